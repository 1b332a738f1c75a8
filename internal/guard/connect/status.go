package connect

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// Status is the state of denied connections, whether or not a process listens.
type Status struct {
	Way       Way                 `json:"way"`
	Enforced  []string            `json:"enforced"`     // operations of the rules that are denied, or audited, every time
	Not       []string            `json:"not_enforced"` // operations of the rules that are not
	Loaded    time.Time           `json:"loaded"`       // of the policy
	Rules     []policy.RuleStatus `json:"rules"`
	Hooks     int                 `json:"hooks"`
	Denied    uint64              `json:"denied"`
	Audited   uint64              `json:"audited"`
	Untracked uint64              `json:"untracked"` // processes for which there was no room
}

// Look returns the status of the policy in force; nil: there is none.
func Look(root string) (*Status, error) {
	maps, folder, err := inForce(root)
	if maps == nil || err != nil {
		return nil, err
	}
	defer kernel.CloseMaps(maps)
	var p connectConnectPolicy
	if err := maps[connectMapShC_policy].Lookup(uint32(0), &p); err != nil {
		return nil, fmt.Errorf("read the rules of connections in force: %w", err)
	}
	counts, err := countsOf(maps[connectMapShC_counts])
	if err != nil {
		return nil, err
	}
	s := &Status{Loaded: event.Time(p.LoadedNs), Denied: counts.Denied, Audited: counts.Audited, Untracked: counts.Untracked, Enforced: []string{}, Not: []string{}}
	for i := range uint32(policy.RulesMax) {
		name, text, err := textOf(maps[connectMapShC_rules], i)
		if err != nil {
			return nil, err
		}
		if name != "" {
			s.Rules = append(s.Rules, policy.RuleStatus{Name: name, Text: text})
		}
	}
	links, err := os.ReadDir(linksFolder(folder))
	if err != nil {
		return nil, fmt.Errorf("list the links that deny connections: %w", err)
	}
	has := func(name string) bool {
		return slices.ContainsFunc(links, func(l os.DirEntry) bool { return l.Name() == name })
	}
	s.Hooks = len(links)
	s.Way = LSM
	for name := range attachTypes {
		if has(name) {
			s.Way = Cgroup
		}
	}
	for _, operation := range policy.ConnectionOperations {
		masks := p.Ops[operations[operation]]
		if masks.Denied|masks.Audited == 0 {
			continue
		}
		by := deciders[s.Way][operation]
		if len(by) > 0 && !slices.ContainsFunc(by, func(name string) bool { return !has(name) }) && (Coverage{Way: s.Way}).Gap(operation) == "" {
			s.Enforced = append(s.Enforced, operation)
		} else {
			s.Not = append(s.Not, operation)
		}
	}
	return s, nil
}

// inForce opens the maps of the policy in force; nil: there is none.
func inForce(root string) (maps map[string]*ebpf.Map, folder string, err error) {
	all, err := generations(root)
	if err != nil {
		return nil, "", err
	}
	for _, number := range slices.Backward(all) {
		folder := generation(root, number)
		maps, err := openPinned(folder)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, "", err
		}
		var p connectConnectPolicy
		if err := maps[connectMapShC_policy].Lookup(uint32(0), &p); err != nil {
			kernel.CloseMaps(maps)
			return nil, "", fmt.Errorf("read the rules of connections in force: %w", err)
		}
		if p.LoadedNs != 0 {
			return maps, folder, nil
		}
		kernel.CloseMaps(maps) // the policy was not brought into force
	}
	return nil, "", nil
}

func countsOf(m *ebpf.Map) (sum connectConnectCount, err error) {
	var each []connectConnectCount
	if err := m.Lookup(uint32(0), &each); err != nil {
		return sum, fmt.Errorf("read the numbers of denied connections: %w", err)
	}
	for _, c := range each {
		sum.Denied, sum.Audited = sum.Denied+c.Denied, sum.Audited+c.Audited
		sum.Untracked, sum.Changed = sum.Untracked+c.Untracked, sum.Changed+c.Changed
	}
	return sum, nil
}
