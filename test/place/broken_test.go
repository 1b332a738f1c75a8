package place_test

import (
	"math/rand/v2"
	"os"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/test/unchanged"
)

// breakages are errors in just-enough tracking. Each was once a proposal.
var breakages = []breakage{
	{
		// After A→B→A both backends are the same, and the flows of B are forgotten.
		name: "backends compared instead of the state read",
		writes: func(_, wanted reconcile.Slot) reconcile.Slot {
			if wanted.State == reconcile.Transition && wanted.Current == wanted.Previous {
				return reconcile.Slot{State: reconcile.Settled, Current: wanted.Current}
			}
			return wanted
		},
	},
	{
		// A program that still runs remembers a flow after the scan has passed its place.
		name:    "scan before the grace period",
		hurries: true,
	},
	{
		// Flows older than the first change are sent to the backend from before the second one.
		name: "previous overwritten by a second change",
		writes: func(had, wanted reconcile.Slot) reconcile.Slot {
			if had.State == reconcile.Transition && wanted.State == reconcile.Transition && had.Current != wanted.Current && !had.PreviousBefore {
				wanted.Previous = had.Current
			}
			return wanted
		},
	},
	{
		// The scan reads closing slots alone, and finds nothing that disagrees.
		name: "closing left out",
		writes: func(had, wanted reconcile.Slot) reconcile.Slot {
			if wanted.State == reconcile.Closing {
				return had
			}
			return wanted
		},
	},
	{
		// Remembered flows that disagree are left alone in a slot that no longer looks them up.
		name: "settled where it should be marked",
		writes: func(_, wanted reconcile.Slot) reconcile.Slot {
			if wanted.State == reconcile.Marked {
				wanted.State = reconcile.Settled
			}
			return wanted
		},
	},
	{
		// All flows that the change moves before they are remembered are lost.
		name: "settled at once",
		writes: func(_, wanted reconcile.Slot) reconcile.Slot {
			return reconcile.Slot{State: reconcile.Settled, Current: wanted.Current}
		},
	},
}

// TestBreakagesAreNoticed tests the tests: a few histories find each breakage, even without
// knowledge of the right slots, because lost connections show it, too. The same histories find
// no fault in a program without a breakage.
func TestBreakagesAreNoticed(t *testing.T) {
	if os.Geteuid() == 0 && unchanged.Rests(t, "*.go", "../../internal/lb/reconcile/*.go", "../../internal/lb/maglev/*.go", "../../bpf/lb", "../../bpf/core") {
		return
	}
	const historiesMax = 80
	w := newWorld(t, 4096)
	for _, judge := range []struct {
		name       string
		lossesOnly bool
	}{{"by the rules", false}, {"by losses alone", true}} {
		for _, b := range append(breakages, breakage{name: "nothing"}) {
			b.lossesOnly = judge.lossesOnly
			noticed := -1
			var by error
			for seed := 0; seed < historiesMax && noticed < 0; seed++ {
				if _, by = run(w, byNumber{rand.New(rand.NewPCG(uint64(seed), 1))}, newTally(), b); by != nil {
					noticed = seed
				}
			}
			switch {
			case b.name == "nothing" && noticed >= 0:
				t.Errorf("nothing is wrong, but history %d fails %s: %v", noticed, judge.name, by)
			case b.name != "nothing" && noticed < 0:
				t.Errorf("%s: %d histories did not notice it %s", b.name, historiesMax, judge.name)
			case noticed >= 0:
				t.Logf("%s: noticed in history %d %s: %v", b.name, noticed, judge.name, by)
			}
		}
	}
}
