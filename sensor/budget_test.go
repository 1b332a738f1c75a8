package sensor

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/event/storm"
)

// twoSensors attaches the same sensor twice. A Budget may close the second one.
func twoSensors(t *testing.T) *Set {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	spec, err := storm.LoadStorm()
	if err != nil {
		t.Fatal(err)
	}
	set, err := Open(spec, []Sensor{{Name: "first", Ways: []Way{byRaw}}, {Name: "second", Ways: []Way{byRaw}, Without: "renames are counted once"}},
		Options{Constants: map[string]any{"only_tgid": uint32(os.Getpid())}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := set.Close(); err != nil {
			t.Error(err)
		}
	})
	return set
}

// keep makes the sensors run, and calls Keep. The kernel counts in nanoseconds, so runs are never free.
func keep(t *testing.T, b *Budget) *Spending {
	t.Helper()
	rename(t, 5)
	s, err := b.Keep()
	if err != nil || s.Percent <= 0 {
		t.Fatalf("got %+v, %v", s, err)
	}
	return s
}

// TestBudgetSamplesThenSheds sets a limit that every program exceeds, and then one that no program reaches.
func TestBudgetSamplesThenSheds(t *testing.T) {
	set := twoSensors(t)
	var samples []uint32
	b, err := NewBudget(1e-9, Member{Set: set, Unit: "rename", SampleMax: 4, Rises: true, Note: ", and a note", Sheds: []string{"nosuch", "second"},
		Resample: func(one uint32) error { samples = append(samples, one); return nil }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}()
	var said []string
	for _, want := range []string{
		"may take 0.0 %: from now on one rename of 2 is watched, and a note",
		"from now on one rename of 4 is watched, and a note",
		`the sensor "second" is detached, so that from now on renames are counted once`,
		"and cannot watch less",
	} {
		s := keep(t, b)
		said = append(said, s.Change)
		if !strings.HasSuffix(s.Change, want) || s.AtEnd != strings.Contains(want, "cannot") {
			t.Errorf("got %+v, want %q", s, want)
		}
	}
	if s := keep(t, b); s.Change != "" {
		t.Errorf("the end is told again: %+v", s)
	}
	before := counted(t, set)
	rename(t, 3)
	if n := counted(t, set) - before; n != 3 {
		t.Errorf("%d renames of 3 are counted after one of two sensors was let go of", n)
	}
	if missed, err := set.Missed(); err != nil || len(missed) != 2 {
		t.Errorf("runs of a sensor that was let go of are not in what was missed: %v, %v", missed, err)
	}
	if whole := b.Total(); whole.Change != strings.Join(said, "; ") || whole.Percent <= 0 {
		t.Errorf("the whole: %+v", whole)
	}
	b.limit = 1e9
	for _, want := range []string{"from now on one rename of 2 is watched, and a note", "from now on everything is watched again", ""} {
		if s := keep(t, b); !strings.HasSuffix(s.Change, want) || want == "" && s.Change != "" {
			t.Errorf("below the limit: got %+v, want %q", s, want)
		}
	}
	if want := []uint32{2, 4, 2, 1}; !slices.Equal(samples, want) {
		t.Errorf("samples of one of %v, want %v", samples, want)
	}
}

// TestBudgetTakesFromTheLargest has two Sets. Only the programs of one run.
func TestBudgetTakesFromTheLargest(t *testing.T) {
	busy, idle := twoSensors(t), twoSensors(t)
	if err := idle.Detach(); err != nil {
		t.Fatal(err)
	}
	chosen := ""
	member := func(name string, s *Set) Member {
		return Member{Set: s, Unit: name, SampleMax: 1 << 16, Resample: func(uint32) error { chosen += name; return nil }}
	}
	b, err := NewBudget(1e-9, member("idle", idle), member("busy", busy))
	if err != nil {
		t.Fatal(err)
	}
	keep(t, b)
	b.limit = 1e9
	keep(t, b)
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if chosen != "busy" {
		t.Errorf("%q watch less or more; the busy one should watch less, and none more, because it cannot", chosen)
	}
}

func TestWithoutBudget(t *testing.T) {
	b, err := NewBudget(0)
	if b != nil || err != nil {
		t.Fatalf("got %v, %v", b, err)
	}
	if s, err := b.Keep(); s != nil || err != nil || b.Total() != nil || b.Close() != nil {
		t.Errorf("without a limit there is something to tell: %v, %v", s, err)
	}
	set := twoSensors(t)
	if err := set.SetSample("no_such", 2); err == nil || !strings.Contains(err.Error(), "no_such") {
		t.Errorf("a variable that is not there: %v", err)
	}
}
