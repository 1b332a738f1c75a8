package connect

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Way names the hooks at which the kernel asks.
type Way string

// The ways, the better one first.
const (
	LSM    Way = "lsm"    // security hooks: all operations
	Cgroup Way = "cgroup" // programs at a cgroup
)

// Coverage has the kernel's hooks, which decide which operations can be denied.
type Coverage struct {
	Way Way    `json:"way"`
	Why string `json:"why,omitempty"` // reason why it is not at security hooks
}

// deciders has the programs that an operation needs.
var deciders = map[Way]map[string][]string{
	LSM: {
		policy.Connect: {connectProgShConnect, connectProgShSendmsg, connectProgShSocket},
		policy.Bind:    {connectProgShBind, connectProgShSocket},
		policy.Listen:  {connectProgShListen},
		policy.Accept:  {connectProgShAccept},
		policy.Raw:     {connectProgShSocket},
	},
	Cgroup: {
		policy.Connect: {connectProgShConnect4, connectProgShConnect6, connectProgShSendmsg4, connectProgShSendmsg6, connectProgShSock},
		policy.Bind:    {connectProgShBind4, connectProgShBind6, connectProgShSock},
		policy.Raw:     {connectProgShSock},
	},
}

// gaps has the reasons why a cgroup's programs cannot deny an operation, or not every time.
var gaps = map[string]string{
	policy.Listen: "the kernel calls no program of a cgroup for listen",
	policy.Accept: "the kernel calls no program of a cgroup for accept",
	policy.Raw:    "the kernel calls a cgroup's program for raw sockets of IPv4 and IPv6, but not for AF_PACKET and AF_XDP",
}

// Gap returns the reason why an operation is not denied, or not every time; empty: it is denied.
func (c Coverage) Gap(operation string) string {
	if c.Way == LSM {
		return ""
	}
	return gaps[operation]
}

// Missing returns the gaps of rules.
func (c Coverage) Missing(rules []policy.Connection) (all []policy.Gap) {
	for _, r := range rules {
		for _, operation := range r.Deny {
			if why := c.Gap(operation); why != "" {
				all = append(all, policy.Gap{Rule: r.Name, Operation: operation, Why: why, Denies: r.Mode == policy.Deny})
			}
		}
	}
	return all
}

// NotEnforced is the error for a policy that must be enforced and that the kernel cannot enforce completely.
type NotEnforced struct {
	Gaps     []policy.Gap
	Coverage Coverage
}

func (e *NotEnforced) Error() string {
	texts := make([]string, len(e.Gaps))
	for i, g := range e.Gaps {
		texts[i] = fmt.Sprintf("%s of rule %q: %s", g.Operation, g.Rule, g.Why)
	}
	return fmt.Sprintf("this kernel cannot deny %s. Connections are denied at a cgroup here, because %s. Leave the operation out, or write degraded: allow", strings.Join(texts, "; "), e.Coverage.Why)
}

// suffices returns an error unless everything is enforced that the policy demands.
func (c Coverage) suffices(p policy.Policy) error {
	missing := slices.DeleteFunc(c.Missing(p.Connections), func(g policy.Gap) bool { return !g.Denies })
	if len(missing) == 0 || p.IsDegraded {
		return nil
	}
	return &NotEnforced{missing, c}
}

// modules returns the list of the kernel's active security modules; empty: unknown, because securityfs is not mounted.
func modules() string {
	text, err := os.ReadFile("/sys/kernel/security/lsm")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// hooksRefuse returns the reason why no program decides at security hooks, from the result of loading one; empty: one does.
func hooksRefuse(modules string, loading error) string {
	switch {
	case modules != "" && !slices.Contains(strings.Split(modules, ","), "bpf"):
		return fmt.Sprintf("bpf is not among the kernel's active security modules (%s)", modules)
	case errors.Is(loading, unix.EPERM):
		return "the kernel refuses to load programs for security hooks and does not say why (EPERM)"
	case loading == nil && modules == "":
		return "shunt cannot read whether bpf is among the active security modules: run mount -t securityfs securityfs /sys/kernel/security"
	}
	return ""
}
