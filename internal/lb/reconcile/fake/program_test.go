package fake

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

var (
	refA = reconcile.BackendRef{Index: 1, Generation: 1}
	refB = reconcile.BackendRef{Index: 2, Generation: 1}
	refC = reconcile.BackendRef{Index: 3, Generation: 1}
	gone = reconcile.BackendRef{Index: 4, Generation: 1}
	on   = model.Frontend{Address: netip.MustParseAddr("192.0.2.10"), Ports: value.PortRange{First: 80, Last: 80}, Protocol: model.TCP}
)

// trackedMaps have one service with one slot, backends A, B and C, and a table before of
// two slots: A, and in transition from C.
func trackedMaps(t *testing.T, tracking model.Tracking, slot reconcile.Slot) *Maps {
	t.Helper()
	m := New(model.Limits{Services: 1, Backends: 4, Slots: 8})
	for _, ref := range []reconcile.BackendRef{refA, refB, refC} {
		must(t, m.PutBackend(reconcile.BackendRecord{BackendRef: ref}))
	}
	must(t, m.WriteSlots(0, reconcile.NewTable([]reconcile.Slot{slot})))
	must(t, m.WriteSlots(4, reconcile.NewTable([]reconcile.Slot{{Current: refA}, {State: reconcile.Transition, Current: refA, Previous: refC}})))
	must(t, m.PutService(reconcile.ServiceRecord{Name: "web", Generation: 1, Size: 1, BeforeOffset: 4, BeforeSize: 2,
		Forwarding: model.ForwardingDSRIPIP, Tracking: tracking}))
	must(t, m.PutFrontend(on, 0))
	return m
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestProgram has a case for each field of the first table of docs/design/13.
func TestProgram(t *testing.T) {
	none := reconcile.BackendRef{}
	slot := func(state reconcile.SlotState, previous reconcile.BackendRef) reconcile.Slot {
		return reconcile.Slot{State: state, Current: refB, Previous: previous}
	}
	before := reconcile.Slot{State: reconcile.Transition, Current: refB, PreviousBefore: true}
	drains := slot(reconcile.Transition, refA)
	drains.PreviousDrains = true
	const auto, always, never = model.TrackingAuto, model.TrackingAlways, model.TrackingNone
	for _, c := range []struct {
		name       string
		tracking   model.Tracking
		slot       reconcile.Slot
		hash       uint32
		entry      reconcile.BackendRef
		kind       Kind
		to         reconcile.BackendRef
		remembered reconcile.BackendRef
	}{
		{"settled, entry", auto, slot(reconcile.Settled, none), 0, refA, Middle, refB, refA},
		{"settled", auto, slot(reconcile.Settled, none), 0, none, Opening, refB, none},
		{"transition, entry", auto, slot(reconcile.Transition, refA), 0, refC, Opening, refC, refC},
		{"transition, entry of the dead", auto, slot(reconcile.Transition, refA), 0, gone, Middle, refA, refA},
		{"transition, SYN", auto, slot(reconcile.Transition, refA), 0, none, Opening, refB, refB},
		{"transition, middle", auto, slot(reconcile.Transition, refA), 0, none, Middle, refA, refA},
		{"transition, middle, previous dead", auto, slot(reconcile.Transition, gone), 0, none, Middle, refB, refB},
		{"transition, middle, previous drains", auto, drains, 0, none, Middle, refA, refA},
		{"transition, UDP", auto, slot(reconcile.Transition, refA), 0, none, Loose, refA, refA},
		{"transition, UDP, previous drains", auto, drains, 0, none, Loose, refB, refB},
		{"transition, table before, settled there", auto, before, 0, none, Middle, refA, refA},
		{"transition, table before, in transition there", auto, before, 1 << 31, none, Middle, refC, refC},
		{"closing, entry", auto, slot(reconcile.Closing, none), 0, refA, Middle, refA, refA},
		{"closing", auto, slot(reconcile.Closing, none), 0, none, Middle, refB, none},
		{"marked, entry", auto, slot(reconcile.Marked, none), 0, refA, Middle, refA, refA},
		{"marked", auto, slot(reconcile.Marked, none), 0, none, Opening, refB, none},
		{"always, settled, entry", always, slot(reconcile.Settled, none), 0, refA, Middle, refA, refA},
		{"always, settled", always, slot(reconcile.Settled, none), 0, none, Middle, refB, refB},
		{"none, transition", never, slot(reconcile.Transition, refA), 0, refA, Middle, refB, refA},
	} {
		m := trackedMaps(t, c.tracking, c.slot)
		flow := Flow{on, c.hash}
		if c.entry != none {
			m.remembered[flow] = member(m.services[0], c.entry)
		}
		if to := m.Packet(flow, c.kind); to != c.to || m.remembered[flow].Backend != c.remembered {
			t.Errorf("%s: goes to %v and %v is remembered, want %v and %v", c.name, to, m.remembered[flow].Backend, c.to, c.remembered)
		}
	}
}

func TestScan(t *testing.T) {
	for _, c := range []struct {
		state    reconcile.SlotState
		tracking model.Tracking
		entry    reconcile.BackendRef
		found    bool
		left     int
	}{
		{reconcile.Closing, model.TrackingAuto, refA, true, 1},
		{reconcile.Marked, model.TrackingAuto, refA, true, 1},
		{reconcile.Marked, model.TrackingAuto, refB, false, 0},
		{reconcile.Marked, model.TrackingAlways, refB, false, 1},
		{reconcile.Marked, model.TrackingAuto, gone, false, 0},
		{reconcile.Settled, model.TrackingAuto, refA, false, 1},
	} {
		m := trackedMaps(t, c.tracking, reconcile.Slot{State: c.state, Current: refB})
		m.remembered[Flow{on, 0}] = member(m.services[0], c.entry)
		found, err := m.ScanRemembered()
		if err != nil || found[0] != c.found || m.Remembered() != c.left {
			t.Errorf("%+v: found %v, %d left, %v", c, found, m.Remembered(), err)
		}
	}
}

// TestStepChecksCatch breaks each rule about the steps of a slot once.
func TestStepChecksCatch(t *testing.T) {
	settled := func(ref reconcile.BackendRef) reconcile.Slot { return reconcile.Slot{Current: ref} }
	state := func(s reconcile.SlotState) reconcile.Slot { return reconcile.Slot{State: s, Current: refB} }
	moving := reconcile.Slot{State: reconcile.Transition, Current: refB, Previous: refA}
	onward, other, taken, odd := moving, moving, moving, moving
	onward.Current = refC
	other.Previous = refC
	taken.Previous = reconcile.BackendRef{}
	odd.State = reconcile.Marked
	twice := moving
	twice.PreviousBefore = true
	write := func(slot reconcile.Slot) func(*Maps) error {
		return func(m *Maps) error { return m.WriteSlots(0, reconcile.NewTable([]reconcile.Slot{slot})) }
	}
	scan := func(m *Maps) error { _, err := m.ScanRemembered(); return err }
	release := func(m *Maps) error {
		record := m.services[0]
		record.BeforeOffset, record.BeforeSize = 0, 0
		return m.PutService(record)
	}
	before := func(m *Maps) error { return m.WriteSlots(5, reconcile.NewTable([]reconcile.Slot{settled(refA)})) }
	remember := func(m *Maps) error { m.remembered[Flow{on, 0}] = member(m.services[0], refA); return nil }
	for _, c := range []struct {
		name  string
		from  reconcile.Slot
		steps []func(*Maps) error
		want  string
	}{
		{"all in order", settled(refA), []func(*Maps) error{write(moving), write(onward), write(moving), write(taken),
			write(state(reconcile.Closing)), (*Maps).Grace, scan, write(settled(refB))}, ""},
		{"previous other than current", settled(refB), []func(*Maps) error{write(other)}, "previous is the current one until now"},
		{"another previous", moving, []func(*Maps) error{write(other)}, "another previous backend"},
		{"settled at once", moving, []func(*Maps) error{write(settled(refB))}, "a transition ends by closing"},
		{"no grace", moving, []func(*Maps) error{write(state(reconcile.Closing)), scan, write(settled(refB))}, "no scan after a grace"},
		{"no scan", moving, []func(*Maps) error{write(state(reconcile.Closing)), (*Maps).Grace, write(settled(refB))}, "no scan after a grace"},
		{"grace after scan", moving, []func(*Maps) error{write(state(reconcile.Closing)), scan, (*Maps).Grace, write(settled(refB))}, "no scan after a grace"},
		{"flow ignored", moving, []func(*Maps) error{remember, write(state(reconcile.Closing)), (*Maps).Grace, scan, write(settled(refB))}, "a remembered flow disagrees"},
		{"mark ignored", state(reconcile.Marked), []func(*Maps) error{remember, write(settled(refB))}, "a remembered flow disagrees"},
		{"opened again", state(reconcile.Closing), []func(*Maps) error{write(moving)}, "not opened again"},
		{"changed while closing", state(reconcile.Closing), []func(*Maps) error{write(settled(refA))}, "keeps its current backend"},
		{"closed without need", settled(refB), []func(*Maps) error{write(state(reconcile.Closing))}, "it was in no transition"},
		{"previous without transition", moving, []func(*Maps) error{write(odd)}, "only a slot in transition"},
		{"previous twice", moving, []func(*Maps) error{write(twice)}, "in two places"},
		{"before written", settled(refA), []func(*Maps) error{before}, "refers to slot 5 as before"},
		{"before reused without grace", settled(refA), []func(*Maps) error{release, before}, "no grace since slot 5"},
		{"before reused", settled(refA), []func(*Maps) error{release, (*Maps).Grace, before}, ""},
		{"before lost", reconcile.Slot{State: reconcile.Transition, Current: refB, PreviousBefore: true}, []func(*Maps) error{release}, "refers to a table before, which is not there"},
		{"previous missing", moving, []func(*Maps) error{(*Maps).Grace, func(m *Maps) error { return m.DeleteBackend(refA) }}, "names backend 1/1, which is not there"},
	} {
		m := trackedMaps(t, model.TrackingAuto, c.from)
		for _, step := range c.steps {
			must(t, step(m))
		}
		got := strings.Join(m.Violations, "\n")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s: violations %q, want %q", c.name, got, c.want)
		}
	}
}

// TestAGraceWaitsForRuns: a run that began before a Grace has ended when the Grace returns.
func TestAGraceWaitsForRuns(t *testing.T) {
	m := trackedMaps(t, model.TrackingAuto, reconcile.Slot{State: reconcile.Transition, Current: refB, Previous: refA})
	m.Begin(Flow{on, 0}, Middle)
	if m.Remembered() != 0 {
		t.Error("remembered before it went on")
	}
	must(t, m.Grace())
	if m.remembered[Flow{on, 0}].Backend != refA {
		t.Error("the run is not over after a grace")
	}
}
