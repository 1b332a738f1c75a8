package daemon

import (
	"slices"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// holds expects these conditions of a subject, each with text, remedy and severity.
func holds(t *testing.T, conditions *condition.Set, subject string, want []string) {
	t.Helper()
	var have []string
	for _, c := range conditions.List() {
		have = append(have, c.Code)
		if c.Text == "" || c.Remedy == "" || c.Severity == "" || c.Subject != subject {
			t.Errorf("the condition says too little: %+v", c)
		}
	}
	slices.Sort(have)
	if !slices.Equal(have, want) {
		t.Errorf("conditions %v, want %v", have, want)
	}
}

// A shortage is a condition from the first packet that meets it until a while after the last.
func TestShortages(t *testing.T) {
	conditions := &condition.Set{}
	w := newShortageWatch("default", conditions)
	counted := map[string]kernel.Count{"flows_full": {Packets: 7}}
	now := time.Now()
	look := func(after time.Duration, want ...string) {
		t.Helper()
		now = now.Add(after)
		w.look(counted, now)
		holds(t, conditions, "default", want)
	}
	count := func(reason string) { counted[reason] = kernel.Count{Packets: counted[reason].Packets + 1} }
	look(0) // an earlier daemon's
	look(time.Second)
	count("flows_full")
	look(time.Second, condition.FlowsFull)
	look(shortageHold-time.Second, condition.FlowsFull)
	count("table_full")
	count("ports_exhausted")
	look(time.Second, condition.FlowsFull, condition.PortsShort)
	look(shortageHold)
	count("port_taken")
	count("not_remembered")
	count("redirect_refused")
	look(time.Second, condition.FramesRefused, condition.PortsShort, condition.RememberedFull)
}

// Every shortage has to be a reason: a word that no program counts would never be reported.
func TestShortagesAreReasons(t *testing.T) {
	var names []string
	for _, r := range kernel.Reasons() {
		names = append(names, r.String())
	}
	for _, s := range shortages {
		if _, ok := condition.Lookup(s.code); !ok {
			t.Errorf("condition %s is not defined", s.code)
		}
		for _, reason := range s.reasons {
			if !slices.Contains(names, reason) {
				t.Errorf("%s: there is no reason %s", s.code, reason)
			}
		}
	}
}
