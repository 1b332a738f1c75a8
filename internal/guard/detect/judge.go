package detect

import (
	"fmt"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// Found is a rule that holds for an event.
type Found struct {
	Rule     string      `json:"rule"`
	Severity string      `json:"severity"`
	Mitre    []string    `json:"mitre"`
	Action   string      `json:"action"`
	Text     string      `json:"text"`
	Done     string      `json:"done,omitempty"` // result of the action kill or stop
	Event    *rule.Event `json:"event"`
}

// String returns the finding as one line.
func (f Found) String() string {
	e := f.Event
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s %s", e.Time.Format("15:04:05.000"), f.Action, f.Severity, f.Rule)
	if len(f.Mitre) > 0 {
		fmt.Fprintf(&b, " (%s)", strings.Join(f.Mitre, ", "))
	}
	fmt.Fprintf(&b, ": %s; %s, pid %d, user %d", event.Printable(f.Text), e.Type, e.Process.PID, e.User.UID)
	for i, a := range e.Ancestors {
		word := " <- "
		if i == 0 {
			word = ", from "
		}
		fmt.Fprintf(&b, "%s%s %d", word, event.Printable(a.Comm), a.PID)
	}
	if e.Container != "" {
		fmt.Fprintf(&b, ", container %.12s", e.Container)
	}
	if f.Done != "" {
		fmt.Fprintf(&b, ": %s", f.Done)
	}
	return b.String()
}

// key identifies a process: no later one has the same values.
type key struct {
	pid   uint32
	start uint64
}

func keyOf(p rule.Process) key { return key{p.PID, p.StartNs} }

const (
	// chainsMax limits the processes that are remembered for one rule. When it is reached, all of them are forgotten, and a chain that
	// goes on is reported once more.
	chainsMax = 1 << 14
	// chainLasts is the time after which a chain that goes on is reported again.
	chainLasts = time.Hour
)

// judge reports each rule once for a chain of processes: not again for the process, nor for processes that it starts.
type judge struct {
	rules  []rule.Rule
	on     map[string][]int    // by type of events: the rules for it
	chains []map[key]time.Time // by rule: processes that were reported, and when
	again  uint64              // events for which a rule held, and whose chain was reported before
}

func newJudge(rules []rule.Rule) *judge {
	j := &judge{rules: rules, on: map[string][]int{}, chains: make([]map[key]time.Time, len(rules))}
	for i := range j.chains {
		j.chains[i] = map[key]time.Time{}
		for _, of := range rules[i].On {
			j.on[of] = append(j.on[of], i)
		}
	}
	return j
}

// inherit takes over the reported chains of rules with the same names.
func (j *judge) inherit(before *judge) {
	for i := range j.rules {
		for k := range before.rules {
			if before.rules[k].Name == j.rules[i].Name {
				j.chains[i] = before.chains[k]
			}
		}
	}
}

// verdict is a rule that holds.
type verdict struct {
	rule  *rule.Rule
	isNew bool // its chain was not reported before
}

// of returns the rules that hold for an event. It keeps no part of the event, and allocates nothing if no rule holds.
func (j *judge) of(e *rule.Event) (all []verdict) {
	for _, i := range j.on[e.Type] {
		if !j.rules[i].Holds(e) {
			continue
		}
		isNew := !j.isTold(j.chains[i], e)
		if isNew {
			if len(j.chains[i]) >= chainsMax {
				clear(j.chains[i])
			}
			j.chains[i][keyOf(e.Process)] = e.Time
		} else {
			j.again++
		}
		all = append(all, verdict{&j.rules[i], isNew})
	}
	return all
}

func (j *judge) isTold(chain map[key]time.Time, e *rule.Event) bool {
	told := func(p rule.Process) bool {
		at, is := chain[keyOf(p)]
		return is && e.Time.Sub(at) < chainLasts
	}
	if told(e.Process) {
		return true
	}
	for _, a := range e.Ancestors {
		if told(a) {
			return true
		}
	}
	return false
}

func found(v verdict, e *rule.Event) Found {
	return Found{Rule: v.rule.Name, Severity: v.rule.Severity, Mitre: v.rule.Mitre, Action: v.rule.Action, Text: v.rule.Text(e), Event: e}
}
