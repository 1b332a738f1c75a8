package gate

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// held has the operations that can be refused when a file is opened, each with the cases that pass all the same. The guide's table says more.
var held = map[string]string{
	policy.Write: "truncating by path passes, and so do earlier descriptors and mappings",
	policy.Read:  "earlier descriptors and mappings pass",
	policy.Exec:  "mapping as code passes",
}

// Missing returns the operations of rules that are not denied without BPF LSM, where only opens of files wait.
func Missing(rules []policy.Rule) (all []policy.Gap) {
	add := func(r policy.Rule, operation, why string) {
		all = append(all, policy.Gap{Rule: r.Name, Operation: operation, Why: why, Denies: r.Mode == policy.Deny})
	}
	for _, r := range rules {
		if r.IsUpdaters {
			add(r, "upgrade", "a program that an updater replaces is not trusted until the policy is loaded again")
		}
		for _, operation := range r.Deny {
			if held[operation] == "" {
				add(r, operation, "fanotify has no event for it that waits for an answer")
			}
		}
	}
	return all
}

// Held returns the operations of rules that are denied when a file is opened, each with the cases that pass all the same.
func Held(rules []policy.Rule) (all []string) {
	for _, operation := range []string{policy.Write, policy.Read, policy.Exec} {
		if slices.ContainsFunc(rules, func(r policy.Rule) bool { return slices.Contains(r.Deny, operation) }) {
			all = append(all, fmt.Sprintf("%s (%s)", operation, held[operation]))
		}
	}
	return all
}

// NotEnforced returns the line about operations that are not denied.
func NotEnforced(gaps []policy.Gap) string {
	if len(gaps) == 0 {
		return "OPENS ONLY: this kernel has no BPF LSM, so the policy is enforced only when files are opened."
	}
	var texts []string
	for i, g := range gaps {
		if i > 0 && gaps[i-1].Rule == g.Rule {
			texts[len(texts)-1] += ", " + g.Operation
			continue
		}
		texts = append(texts, fmt.Sprintf("rule %s: %s", g.Rule, g.Operation))
	}
	return "NOT ENFORCED on this kernel, which has no BPF LSM: " + strings.Join(texts, "; ") + "."
}
