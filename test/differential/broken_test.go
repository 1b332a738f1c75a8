package differential_test

import (
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// breakage is an error in the model.
type breakage int

const (
	nothing breakage = iota
	lastHopForwards
	denyBeatsLonger
	identificationIgnored
	portsIgnored
	resetStaysOpen
	longerQuote
	outerHeaderFree
	zeroIsAChecksum
	anyoneMayAsk
)

var breakages = []struct {
	breakage
	name string
}{
	{lastHopForwards, "a TTL of 1 is enough for another hop"},
	{denyBeatsLonger, "deny_from beats a longer prefix of allow_from"},
	{identificationIgnored, "fragments are told apart by addresses alone"},
	{portsIgnored, "the slot depends on the addresses alone"},
	{resetStaysOpen, "a flow that was reset is not closed"},
	{longerQuote, "an ICMP error quotes eight bytes more"},
	{outerHeaderFree, "the outer header takes no room"},
	{zeroIsAChecksum, "a zero checksum of UDP is updated"},
	{anyoneMayAsk, "martians may use a service"},
}

// cracks are errors in the data plane, with their repairs.
var cracks = []struct {
	name          string
	crack, repair func(*world)
}{
	{"another GUE port", func(w *world) {
		e := outer
		e.GUEPort++
		w.d.SetEncapsulation(e)
	}, func(w *world) { w.d.SetEncapsulation(outer) }},
	{"an outer source from elsewhere", func(w *world) {
		w.d.SetEncapsulation(model.Encapsulation{GUEPort: outer.GUEPort})
	}, func(w *world) { w.d.SetEncapsulation(outer) }},
	{"a table turned by one slot", func(w *world) { w.turn(1) }, func(w *world) { w.turn(-1) }},
	{"a VIP that is not owned", func(w *world) {
		must(w, w.d.SetOwned(vips[0], store.OwnedNever))
	}, func(w *world) { must(w, w.d.SetOwned(vips[0], store.OwnedForever)) }},
}

// turn moves the slots of a service by some places.
func (w *world) turn(by int) {
	contents, err := w.d.Contents()
	must(w, err)
	for index, s := range contents.Services {
		if slots := contents.Slots[index]; s.Name == "nat" {
			by := (by + len(slots)) % len(slots)
			must(w, w.d.WriteSlots(s.Offset, slices.Concat(slots[by:], slots[:by])))
		}
	}
}

// TestBreakagesAreNoticed tests the test: few packets find any error in the model or in the data
// plane. Without an error the same packets find nothing.
func TestBreakagesAreNoticed(t *testing.T) {
	const most = 50_000
	w := newWorld(t)
	notices := func(name string, broken breakage) {
		r := newRun(w)
		r.oracle.broken = broken
		if f := r.until(1, most); f == nil {
			t.Errorf("%s: %d packets did not notice it", name, r.packets)
		} else {
			t.Logf("%s: noticed by packet %d", name, r.packets)
		}
	}
	for _, b := range breakages {
		notices(b.name, b.breakage)
	}
	for _, c := range cracks {
		c.crack(w)
		notices(c.name, nothing)
		c.repair(w)
	}
	if f := newRun(w).until(1, most/4); f != nil {
		t.Errorf("nothing is wrong, but: %s", f)
	}
}

// TestFailuresShrink: the report has few packets, and the last one fails. A packet that goes on with
// another keeps that one, and so on; so they are not always two.
func TestFailuresShrink(t *testing.T) {
	const packets, few = 50_000, 12
	r := newRun(newWorld(t))
	r.oracle.broken = identificationIgnored // one packet alone does not show this error
	f := r.until(1, packets)
	if f == nil {
		t.Fatalf("%d packets did not fail", r.packets)
	}
	steps, last := r.shrink(f)
	if len(steps) < 2 || len(steps) > few || len(last.before) != len(steps) {
		t.Errorf("%d packets came down to %d", len(f.before), len(steps))
	}
	t.Logf("%s\n%s", f, r.shrunk(f))
}
