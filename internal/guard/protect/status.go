package protect

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// Status is the state of the protection, whether or not a process listens.
type Status struct {
	Policy    uint64              `json:"policy"` // number of policies that were loaded so far
	Since     time.Time           `json:"since"`  // of protection
	Loaded    time.Time           `json:"loaded"` // of the policy
	Rules     []policy.RuleStatus `json:"rules"`
	Hooks     int                 `json:"hooks"`
	Listening bool                `json:"listening"`
	Heard     time.Time           `json:"heard"` // when a process last listened
	Denied    uint64              `json:"denied"`
	Audited   uint64              `json:"audited"`
	Unheard   uint64              `json:"unheard"`    // of these, never read by a process
	Unrecord  uint64              `json:"unrecorded"` // new files that are protected only while they are in memory
	Untrusted uint64              `json:"untrusted"`  // processes for which there was no room: neither trusted nor protected
	Missed    uint64              `json:"missed"`     // runs that the kernel left out: operations at that time were not examined
}

// pinned opens the maps of the protection; nil: there is none. The caller closes them.
func pinned(root string) (map[string]*ebpf.Map, error) {
	if err := oneLayout(root); err != nil {
		return nil, err
	}
	set, err := pins(root)
	if err != nil {
		return nil, err
	}
	maps, err := set.OpenPinned()
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return maps, err
}

// Look returns the status of the protection; nil: there is none.
func Look(root string) (*Status, error) {
	maps, err := pinned(root)
	if maps == nil || err != nil {
		return nil, err
	}
	defer kernel.CloseMaps(maps)
	var state guardGuardState
	if err := maps[guardMapShG_state].Lookup(uint32(0), &state); err != nil {
		return nil, fmt.Errorf("read the policy in force: %w", err)
	}
	if state.Generation == 0 {
		return nil, nil
	}
	counts, err := countsOf(maps)
	if err != nil {
		return nil, err
	}
	agent, err := agentOf(maps)
	if err != nil {
		return nil, err
	}
	total := counts.Denied + counts.Audited
	s := &Status{Policy: state.Generation, Since: event.Time(agent.BeganNs), Loaded: event.Time(state.LoadedNs), Heard: event.Time(agent.HeardNs),
		Denied: counts.Denied, Audited: counts.Audited, Unheard: total - min(total, agent.Heard), Unrecord: counts.Unrecorded, Untrusted: counts.Untrusted}
	for i := range uint32(policy.RulesMax) {
		r, err := ruleOf(maps[guardMapShG_rules], state.Generation, i)
		if err != nil {
			return nil, err
		}
		if r.Name != "" {
			s.Rules = append(s.Rules, r)
		}
	}
	links, err := filepath.Glob(filepath.Join(linksFolder(root), "*", "*"))
	if err != nil {
		return nil, err
	}
	s.Hooks = len(links)
	for _, path := range links {
		missed, err := missedBy(path)
		if err != nil {
			return nil, err
		}
		s.Missed += missed
	}
	s.Listening, err = Running(root)
	return s, err
}

// ruleOf returns a rule of a generation, without a name if there is none of that number.
func ruleOf(rules *ebpf.Map, generation uint64, number uint32) (policy.RuleStatus, error) {
	var r guardGuardRule
	if err := rules.Lookup(uint32(generation&1)*policy.RulesMax+number, &r); err != nil {
		return policy.RuleStatus{}, fmt.Errorf("read the rules: %w", err)
	}
	return policy.RuleStatus{Name: event.Text(r.Name[:]), Text: event.Text(r.Text[:])}, nil
}

// missedBy returns the number of times that the kernel left a pinned link's program out because it was running on the
// same CPU already. For programs of security hooks Linux does that only before 6.1.54.
func missedBy(path string) (uint64, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil // a new agent has replaced the link
	}
	if err != nil {
		return 0, fmt.Errorf("open the link %s: %w", path, err)
	}
	defer l.Close() //nolint:errcheck // only read
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("ask about the link %s: %w", path, err)
	}
	program, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return 0, fmt.Errorf("open the program of the link %s: %w", path, err)
	}
	defer program.Close() //nolint:errcheck // only read
	stats, err := program.Stats()
	if err != nil {
		return 0, fmt.Errorf("read how often the kernel left out the program of the link %s: %w", path, err)
	}
	return stats.RecursionMisses, nil
}

func countsOf(maps map[string]*ebpf.Map) (sum guardGuardCount, err error) {
	var each []guardGuardCount
	if err := maps[guardMapShG_counts].Lookup(uint32(0), &each); err != nil {
		return sum, fmt.Errorf("read the numbers of denied and audited operations: %w", err)
	}
	for _, c := range each {
		sum.Denied, sum.Audited = sum.Denied+c.Denied, sum.Audited+c.Audited
		sum.Unrecorded, sum.Untrusted = sum.Unrecorded+c.Unrecorded, sum.Untrusted+c.Untrusted
	}
	return sum, nil
}

func agentOf(maps map[string]*ebpf.Map) (agent guardGuardAgent, err error) {
	if err := maps[guardMapShG_agent].Lookup(uint32(0), &agent); err != nil {
		return agent, fmt.Errorf("read the agent's record in the kernel: %w", err)
	}
	return agent, nil
}
