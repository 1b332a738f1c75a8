package condition

import (
	"slices"
	"testing"
	"time"
)

// held lists the conditions that hold, "code subject: text" each.
func held(s *Set) (all []string) {
	for _, c := range s.List() {
		all = append(all, c.Code+" "+c.Subject+": "+c.Text)
	}
	return all
}

func requireHeld(t *testing.T, s *Set, want ...string) {
	t.Helper()
	if have := held(s); !slices.Equal(have, want) {
		t.Errorf("conditions %q, want %q", have, want)
	}
}

// TestLasting: a condition ends a while after it was last seen, each by itself.
func TestLasting(t *testing.T) {
	s := &Set{}
	l := Lasting{Set: s, Hold: time.Minute}
	now := time.Now()
	at := func(after time.Duration) time.Time { return now.Add(after) }
	see := func(subject, text string, after time.Duration) {
		l.See(Condition{Code: FramesMissed, Subject: subject, Text: text}, at(after))
	}
	l.Pass(now)
	see("eth0", "a few", 0)
	see("eth1", "a few", 20*time.Second)
	see("eth0", "many", 30*time.Second)
	l.Pass(at(79 * time.Second))
	requireHeld(t, s, "frames_missed eth0: many", "frames_missed eth1: a few")
	l.Pass(at(80 * time.Second))
	requireHeld(t, s, "frames_missed eth0: many")
	if l.Holds(FramesMissed, "eth1") || !l.Holds(FramesMissed, "eth0") {
		t.Error("it does not know which holds")
	}
	s.Raise(Condition{Code: FramesMissed, Subject: "eth1", Text: "somebody else's"})
	l.End(FramesMissed, "eth1")
	l.End(FramesMissed, "eth0")
	requireHeld(t, s, "frames_missed eth1: somebody else's")
	l.Pass(at(time.Hour))
	requireHeld(t, s, "frames_missed eth1: somebody else's")
}

// TestOnly: a condition that is not among them is cleared, of this code alone, and nothing is told
// twice.
func TestOnly(t *testing.T) {
	var told []string
	s := &Set{OnChange: func(c Change) {
		word := "raised "
		if c.Cleared {
			word = "cleared "
		}
		told = append(told, word+c.Condition.Subject)
	}}
	only := func(want []string, subjects ...string) {
		t.Helper()
		var all []Condition
		for _, subject := range subjects {
			all = append(all, Condition{Subject: subject, Text: "no backend"})
		}
		told = nil
		s.Only(NoBackend, all)
		if !slices.Equal(told, want) {
			t.Errorf("told %q, want %q", told, want)
		}
	}
	s.Raise(Condition{Code: HealthNotBelieved, Subject: "web", Text: "few are up"})
	only([]string{"raised web", "raised mail"}, "web", "mail")
	only(nil, "mail", "web")
	only([]string{"cleared mail", "raised shop"}, "web", "shop")
	only([]string{"cleared shop", "cleared web"})
	requireHeld(t, s, "health_not_believed web: few are up")
	var none *Set
	none.Only(NoBackend, []Condition{{Subject: "web"}})
}
