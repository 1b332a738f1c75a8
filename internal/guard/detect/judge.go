package detect

import (
	"fmt"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// Found is a rule that holds of an event.
type Found struct {
	Rule     string      `json:"rule"`
	Severity string      `json:"severity"`
	Mitre    []string    `json:"mitre"`
	Action   string      `json:"action"`
	Text     string      `json:"text"`
	Done     string      `json:"done,omitempty"` // what became of the action kill or stop
	Event    *rule.Event `json:"event"`
}

// String is one line.
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

// key names a process for ever.
type key struct {
	pid   uint32
	start uint64
}

func keyOf(p rule.Process) key { return key{p.PID, p.StartNs} }

const (
	// chainsMax bounds what is remembered of one rule. When it is reached all is forgotten, and a chain that goes on is
	// told once more.
	chainsMax = 1 << 14
	// chainLasts is after how long a chain that goes on is told again.
	chainLasts = time.Hour
)

// judge tells each rule once of a chain of processes: not again of the process, and not of what it starts.
type judge struct {
	rules  []rule.Rule
	on     map[string][]int    // by type of events: the rules of it
	chains []map[key]time.Time // by rule: processes of which it was told, and when
	again  uint64              // events that rules held of, and that were of a chain that was told of
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

// inherit takes on the chains that rules of the same names were told of.
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
	isNew bool // its chain was not told of
}

// of are the rules that hold of an event. It keeps nothing of it, and allocates nothing if none holds.
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
