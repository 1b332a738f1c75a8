package memleak

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// faults has the files of the module of test/kernel/fault.
const faults = "/sys/kernel/debug/shunt_fault"

// TestModuleLeaks has a module keep known numbers of objects, pages and ranges, a part at a time, beside processes that
// churn: each time the exact number is reported, with the module's function at the top of the stack, and all of them
// grow.
func TestModuleLeaks(t *testing.T) {
	if _, err := os.Stat(faults); err != nil {
		t.Skipf("needs the module of test/kernel/fault, which test/kernel loads: %v", err)
	}
	noise(t)
	noise(t)
	w := watchOne(t, Options{Interval: 100 * time.Millisecond})
	kinds := []struct {
		kind Kind
		name string
		n    int // at a time
	}{{Slab, "slab", 50}, {Pages, "page", 30}, {Vmalloc, "vmalloc", 10}}
	grew := map[Kind]bool{}
	for round, deadline := 1, time.Now().Add(3*time.Minute); len(grew) < len(kinds); round++ {
		if time.Now().After(deadline) {
			t.Fatalf("became more %d times, and only these grow: %v", round, grew)
		}
		for _, one := range kinds {
			w.p.do(t, fmt.Sprintf("fault/%s %d", one.name, one.n))
		}
		s, _ := w.snapshot(t)
		for _, one := range kinds {
			r, live := s.byModule(one.kind, "fault_"+one.name)
			if want := uint64(round * one.n); live != want && !w.c.blind[one.kind] {
				t.Errorf("time %d: %d of %d by fault_%s are told: %+v", round, live, want, one.name, r)
			}
			if one.kind == Slab && r.Cache != "shunt_fault" {
				t.Errorf("the cache is %q", r.Cache)
			}
			if r.State == Growing || w.c.blind[one.kind] {
				grew[one.kind] = true
			}
		}
		time.Sleep(100 * time.Millisecond) // the interval, in which growth and age are counted
	}
	w.p.do(t, "fault/drop 0")
	s, counts := w.snapshot(t)
	for _, one := range kinds {
		if r, live := s.byModule(one.kind, "fault_"+one.name); live > 0 {
			t.Errorf("%d that were given back are told: %+v", live, r)
		}
	}
	t.Logf("%+v, confidence %.2f %%", counts.sum(), counts.Confidence())
}

// byModule returns the first row of a kind with a function of the module at the top, and the number of live allocations
// in all such rows.
func (s Snapshot) byModule(kind Kind, function string) (first Row, live uint64) {
	for _, r := range s.Rows {
		if r.Kind == kind && len(r.Stack) > 0 && strings.HasPrefix(r.Stack[0], function+"+") {
			if live == 0 {
				first = r
			}
			live += r.Live
		}
	}
	return first, live
}
