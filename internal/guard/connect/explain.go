package connect

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/process"
)

// Answer says whether an operation would be denied.
type Answer struct {
	Operation string   `json:"operation"`
	Denied    []string `json:"denied,omitempty"`  // rules
	Audited   []string `json:"audited,omitempty"` // rules
	Gap       string   `json:"gap,omitempty"`     // reason why the rules are not enforced, or not every time
}

// Explanation lists the operations with an address that would be denied to a process.
type Explanation struct {
	InForce    bool     `json:"in_force"` // otherwise it is the answer of a file
	Way        Way      `json:"way"`
	Address    string   `json:"address"`
	PID        int      `json:"pid"`
	Comm       string   `json:"comm"`
	Program    string   `json:"program"`
	Operations []Answer `json:"operations"`
}

// Address reads an address, with a port or without; ok is false if it is none.
func Address(text string) (at netip.AddrPort, ok bool) {
	if at, err := netip.ParseAddrPort(text); err == nil {
		return at, true
	}
	a, err := netip.ParseAddr(text)
	return netip.AddrPortFrom(a, 0), err == nil
}

// Explain asks the rules in force; nil: there are none.
func Explain(root string, at netip.AddrPort, pid int) (*Explanation, error) {
	maps, _, err := inForce(root)
	if maps == nil || err != nil {
		return nil, err
	}
	defer kernel.CloseMaps(maps)
	coll, err := loadOnly([]string{connectProgShAsk, connectProgShFile}, nil, maps)
	if err != nil {
		return nil, err
	}
	defer coll.Close()
	status, err := Look(root)
	if err != nil || status == nil {
		return nil, err
	}
	e, err := explain(coll, Coverage{Way: status.Way}, at, pid)
	if err == nil {
		e.InForce = true
	}
	return e, err
}

// ExplainPolicy asks a policy that is not in force. It does not find processes that a program of the policy has started and that have left it since.
func ExplainPolicy(p policy.Policy, at netip.AddrPort, pid int) (*Explanation, error) {
	coll, err := loadOnly([]string{connectProgShAsk, connectProgShFile, connectProgShWalk}, nil, nil)
	if err != nil {
		return nil, err
	}
	defer coll.Close()
	if _, err := fill(coll, p.Connections); err != nil {
		return nil, err
	}
	inForce := policyOf(p.Connections)
	if err := coll.Maps[connectMapShC_policy].Put(uint32(0), &inForce); err != nil {
		return nil, fmt.Errorf("write the rules to ask: %w", err)
	}
	d := &Denial{coll: coll, rules: p.Connections}
	if err := d.track(nil); err != nil {
		return nil, err
	}
	c, err := CoverageHere(p.Connections)
	if err != nil {
		return nil, err
	}
	return explain(coll, c, at, pid)
}

// CoverageHere returns where this kernel would ask for rules. It attaches nothing.
func CoverageHere(rules []policy.Connection) (Coverage, error) {
	coll, c, err := load(rules, Options{}, nil)
	if err != nil {
		return c, err
	}
	coll.Close()
	return c, nil
}

// Enforces returns an error, with a *NotEnforced, unless this kernel enforces a policy's rules of connections, or need not.
func Enforces(p policy.Policy) (Coverage, error) {
	c, err := CoverageHere(p.Connections)
	if err == nil {
		err = c.suffices(p)
	}
	return c, err
}

func explain(coll *ebpf.Collection, c Coverage, at netip.AddrPort, pid int) (*Explanation, error) {
	e := &Explanation{Way: c.Way, Address: at.String(), PID: pid}
	if at.Port() == 0 {
		e.Address = at.Addr().String()
	}
	question := connectConnectQuestion{AddressKind: uint32(connectConnectAddressKindCONNECT_GIVEN), Port: at.Port(), Address: at.Addr().As16()}
	f, err := os.Open(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return nil, fmt.Errorf("find the program of process %d: %w", pid, err)
	}
	defer f.Close() //nolint:errcheck // only looked at
	if question.Program, err = fileOf(coll.Programs[connectProgShFile], f); err != nil {
		return nil, err
	}
	stat, err := process.ReadStat(pid)
	if err != nil {
		return nil, fmt.Errorf("look at process %d: %w", pid, err)
	}
	start, err := stat.Number(process.StartTicks)
	if err != nil {
		return nil, fmt.Errorf("look at process %d: %w", pid, err)
	}
	question.Process = connectGuardProcess{Id: uint64(pid), Start: start}
	e.Program, _ = os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "exe")) // it existed a moment ago
	comm, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
	e.Comm = strings.TrimSpace(string(comm))
	for _, operation := range policy.ConnectionOperations {
		q := question
		q.Op = uint32(operations[operation])
		if operation == policy.Raw {
			q.AddressKind = uint32(connectConnectAddressKindCONNECT_UNKNOWN)
		}
		if err := run(coll.Programs[connectProgShAsk], &q); err != nil {
			return nil, fmt.Errorf("ask the rules about %s: %w", operation, err)
		}
		a := Answer{Operation: operation}
		if a.Denied, err = names(coll, q.Denied); err == nil {
			a.Audited, err = names(coll, q.Audited)
		}
		if err != nil {
			return nil, err
		}
		if q.Denied|q.Audited != 0 {
			a.Gap = c.Gap(operation)
		}
		e.Operations = append(e.Operations, a)
	}
	return e, nil
}

func names(coll *ebpf.Collection, rules uint64) (all []string, err error) {
	for i := range uint32(policy.RulesMax) {
		if rules>>i&1 == 0 {
			continue
		}
		name, _, textErr := textOf(coll.Maps[connectMapShC_rules], i)
		all, err = append(all, name), errors.Join(err, textErr)
	}
	return all, err
}
