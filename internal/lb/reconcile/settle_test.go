package reconcile_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
)

const (
	settleTime = 15 * time.Minute
	threeAlike = "10.0.0.2:80 10.0.0.3:80 10.0.0.4:80"
)

// tracked returns a desired state of one direct-return service with a table of the given size.
func tracked(size uint32, backends string) reconcile.Desired {
	s := service("web", "192.0.2.10:80", backends)
	s.Forwarding, s.Tracking, s.TableSize = model.ForwardingDSRIPIP, model.TrackingAuto, size
	d := desired(s)
	d.Settle = settleTime
	return d
}

// settle calls Settle, and returns the unsettled slots and the operations.
func (b *bench) settle() (reconcile.Settling, []string) {
	b.Helper()
	before := len(b.maps.Operations)
	left, err := b.r.Settle()
	if err != nil {
		b.Fatal(err)
	}
	return left, b.maps.Operations[before:]
}

// pass lets time pass, and settles.
func (b *bench) pass(d time.Duration) (reconcile.Settling, []string) {
	b.Helper()
	b.now = b.now.Add(d)
	return b.settle()
}

// unsettled returns the dump's lines about slots that are not settled.
func (b *bench) unsettled() string {
	var lines []string
	for line := range strings.Lines(b.dump()) {
		if strings.HasPrefix(line, "  slots: ") || strings.HasPrefix(line, "  previous ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}

// slots returns the slots of the only service.
func (b *bench) slots() reconcile.Table {
	contents, err := b.maps.Contents()
	if err != nil || len(contents.Slots) != 1 {
		b.Fatalf("want one service: %v, %v", contents.Services, err)
	}
	for _, slots := range contents.Slots {
		return slots
	}
	return nil
}

// flowAt returns a flow whose hash falls into the middle of slot i of size, in its n-th part.
func flowAt(i int, size, n uint64) fake.Flow {
	return fake.Flow{Frontend: frontend("192.0.2.10:80"), Hash: uint32((uint64(i)*16+n+1)<<32/(size*16) + 1)}
}

func TestSettledToTransitionAndBack(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(tracked(251, threeAlike))
	b.want("a new table is settled", b.unsettled(), "")
	if left, _ := b.settle(); left != (reconcile.Settling{}) {
		t.Errorf("nothing to settle, but %+v", left)
	}
	// Backend 3 stays, but much of its share goes elsewhere.
	start := b.now
	b.apply(tracked(251, "10.0.0.2:80*4 10.0.0.3:80*4 10.0.0.4:80*2"))
	b.want("after the change", b.unsettled(), `
slots: 215 settled, 36 in transition
previous backend 1 generation 1: 2 slots
previous backend 2 generation 1: 1 slot
previous backend 3 generation 1: 33 slots`)
	left, operations := b.pass(settleTime - time.Second)
	if want := (reconcile.Settling{Transition: 36, Next: start.Add(settleTime)}); left != want || len(operations) > 0 {
		t.Errorf("too early: %+v, want %+v, operations %q", left, want, operations)
	}
	left, operations = b.pass(time.Second)
	if left != (reconcile.Settling{}) {
		t.Errorf("left: %+v", left)
	}
	b.want("settled", b.unsettled(), "")
	var order []string
	for _, operation := range operations {
		if word, _, _ := strings.Cut(operation, " "); len(order) == 0 || order[len(order)-1] != word {
			order = append(order, word)
		}
	}
	if want := []string{"write", "grace", "scan", "write"}; !slices.Equal(order, want) {
		t.Errorf("want %q, got %q", want, operations)
	}
}

func TestASecondChangeKeepsPrevious(t *testing.T) {
	b := newBench(t, roomy)
	only := func(heavy int) reconcile.Desired {
		texts := strings.Fields(threeAlike)
		for i := range texts {
			if i != heavy {
				texts[i] += "*0"
			}
		}
		return tracked(251, strings.Join(texts, " "))
	}
	b.apply(only(0))
	b.apply(only(1))
	b.want("A to B", b.unsettled(), "slots: 251 in transition\nprevious backend 1 generation 1, draining: 251 slots")
	b.now = b.now.Add(10 * time.Minute)
	b.apply(only(2))
	b.want("to C", b.unsettled(), "slots: 251 in transition\nprevious backend 1 generation 1, draining: 251 slots")
	if left, operations := b.pass(10 * time.Minute); len(operations) > 0 || !left.Next.Equal(b.now.Add(5*time.Minute)) {
		t.Errorf("the settle time begins anew: %+v, %q", left, operations)
	}
	// Back to A: a slot names A twice, and is still not settled.
	b.apply(only(0))
	b.want("and back to A", b.unsettled(), "slots: 251 in transition\nprevious backend 1 generation 1: 251 slots")
	if got := b.slots().At(7); got.Current != got.Previous {
		t.Errorf("got %+v", got)
	}
	left, _ := b.pass(settleTime)
	if left != (reconcile.Settling{}) {
		t.Errorf("left: %+v", left)
	}
}

func TestDrainingOfPreviousKeepsTheSettleTime(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80*0"))
	b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.3:80"))
	b.want("drains", b.unsettled(), "slots: 251 in transition\nprevious backend 1 generation 1, draining: 251 slots")
	end := b.now.Add(settleTime)
	b.now = b.now.Add(time.Minute)
	next := tracked(251, "10.0.0.2:80*1 10.0.0.3:80*1000")
	b.apply(next)
	if got := b.unsettled(); !strings.HasSuffix(got, "in transition\nprevious backend 1 generation 1: 251 slots") {
		t.Errorf("drains no more: %s", got)
	}
	if left, _ := b.settle(); !left.Next.Equal(end) {
		t.Errorf("the settle time: %+v, want its end at %v", left, end)
	}
	// Backend 1 drains in this service, and not in the other.
	next = weighed(next, 0, 0)
	next.Services = append(next.Services, model.Shared([]model.Service{service("other", "192.0.2.11:80", "10.0.0.2:80")})...)
	b.apply(next)
	dump := b.dump()
	if !strings.Contains(dump, "previous backend 1 generation 1, draining") || strings.Contains(dump, "10.0.0.2:80, draining") {
		t.Errorf("drains in one service of two:\n%s", dump)
	}
	b.apply(weighed(next, 1, 0))
	if dump := b.dump(); !strings.Contains(dump, "backend 1 generation 1: 10.0.0.2:80, draining") {
		t.Errorf("drains everywhere:\n%s", dump)
	}
}

func TestRemovedBackendsLeaveNothing(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(tracked(251, threeAlike))
	b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80"))
	// Maglev moves a slot of another backend, too.
	b.want("as current of settled slots", b.unsettled(), "slots: 250 settled, 1 in transition\nprevious backend 1 generation 1: 1 slot")
	b.pass(settleTime)
	b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.3:80"))
	b.want("1 drains", b.unsettled(), "slots: 125 settled, 126 in transition\nprevious backend 1 generation 1, draining: 126 slots")
	b.now = b.now.Add(time.Minute)
	b.apply(tracked(251, "10.0.0.3:80 10.0.0.5:80*0"))
	b.want("as previous", b.unsettled(), "slots: 125 settled, 126 in transition\nprevious nobody: 126 slots")
	if left, _ := b.settle(); !left.Next.Equal(b.now.Add(settleTime - time.Minute)) {
		t.Errorf("the settle time stays: %+v", left)
	}
	b.apply(tracked(251, "10.0.0.6:80 10.0.0.5:80*0"))
	b.want("as current in transition", b.unsettled(), "slots: 125 settled, 126 in transition\nprevious nobody: 126 slots")
	if left, _ := b.settle(); !left.Next.Equal(b.now.Add(settleTime)) {
		t.Errorf("the settle time begins anew: %+v", left)
	}
}

func TestMarkedSlots(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80*0"))
	b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.3:80"))
	first, second, third := flowAt(5, 251, 0), flowAt(9, 251, 0), flowAt(9, 251, 1)
	one, two := b.maps.Packet(first, fake.Middle), b.maps.Packet(second, fake.Middle)
	if one != b.slots().At(5).Previous || one != two {
		t.Fatalf("older flows go to %v and %v", one, two)
	}
	if to := b.maps.Packet(third, fake.Opening); to != b.slots().At(9).Current {
		t.Fatalf("a new flow goes to %v", to)
	}
	left, _ := b.pass(settleTime)
	b.want("flows disagree", b.unsettled(), "slots: 249 settled, 2 marked")
	if want := (reconcile.Settling{Marked: 2, Next: b.now.Add(settleTime / 4)}); left != want || b.maps.Remembered() != 2 {
		t.Errorf("left: %+v, want %+v, and %d flows remembered", left, want, b.maps.Remembered())
	}
	if to := b.maps.Packet(first, fake.Middle); to != one {
		t.Errorf("the flow moved to %v", to)
	}
	b.maps.End(first)
	if _, operations := b.pass(settleTime/4 - time.Second); len(operations) > 0 {
		t.Errorf("too early: %q", operations)
	}
	_, operations := b.pass(time.Second)
	b.want("one has ended", b.unsettled(), "slots: 250 settled, 1 marked")
	b.want("operations", strings.Join(operations, "\n"), "scan remembered\nwrite slots 5+1")

	// Another change of a marked slot: flows without an entry are on the current backend.
	b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80*0"))
	b.want("marked to transition", b.unsettled(), "slots: 251 in transition\nprevious backend 2 generation 1, draining: 251 slots")
	left, _ = b.pass(settleTime)
	if left != (reconcile.Settling{}) || b.maps.Remembered() != 0 {
		t.Errorf("left: %+v, and %d flows remembered", left, b.maps.Remembered())
	}

	// A marked slot whose current backend is removed stays marked.
	b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.3:80"))
	b.maps.Packet(second, fake.Middle)
	b.pass(settleTime)
	b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.9:80"))
	b.want("removed", b.unsettled(), "slots: 250 settled, 1 marked")
	if to := b.maps.Packet(second, fake.Middle); to != two {
		t.Errorf("the flow moved to %v", to)
	}
}

func TestASlotThatProgramsStillReadIsMarked(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80*0"))
	b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.3:80"))
	run := b.maps.Begin(flowAt(7, 251, 0), fake.Middle)
	b.pass(settleTime)
	b.want("settled", b.unsettled(), "slots: 250 settled, 1 marked")
	if to := b.maps.Packet(flowAt(7, 251, 0), fake.Middle); to != run.Finish() {
		t.Errorf("the flow moved to %v", to)
	}
}

func TestAnotherTableSize(t *testing.T) {
	b := newBench(t, model.Limits{Services: 1, Backends: 9, Slots: 251 + 509 + 1021})
	sized := func(size uint32) reconcile.Desired {
		d := tracked(size, threeAlike)
		d.Limits.Slots = 251 + 509 + 1021
		return d
	}
	b.apply(sized(251))
	flows, to := []fake.Flow{}, []reconcile.BackendRef{}
	for i := range 251 {
		flows = append(flows, flowAt(i, 251, 3))
		to = append(to, b.maps.Packet(flows[i], fake.Opening))
	}
	check := func(when string, every int) {
		t.Helper()
		for i, flow := range flows {
			if i%every == 0 && b.maps.Packet(flow, fake.Middle) != to[i] {
				t.Errorf("%s flow %d moved", when, i)
			}
		}
	}
	_, operations := b.apply(sized(509))
	b.want("operations", strings.Join(operations, "\n"), "write slots 251+509\nput service 0/1 web slots 251+509 before 0+251")
	b.want("resized", b.unsettled(), "slots: 509 in transition\nprevious in the table before: 509 slots")
	check("resized,", 2)

	// A second change of size in that time keeps the table before, and gives up the one in between.
	b.now = b.now.Add(time.Minute)
	_, operations = b.apply(sized(1021))
	b.want("operations", strings.Join(operations, "\n"), "write slots 760+1021\nput service 0/1 web slots 760+1021 before 0+251")
	check("twice resized,", 1)

	// Slots that refer to the table before settle together: all of them keep it while any does, or
	// a third size would have two tables before.
	b.now = b.now.Add(time.Minute)
	changed := sized(1021)
	changed.Services[0].Backends[0].Weight = 2
	b.apply(changed)
	changedAt := b.now
	left, operations := b.pass(settleTime - time.Minute)
	if len(operations) > 0 || !left.Next.Equal(changedAt.Add(settleTime)) {
		t.Errorf("left: %+v, operations %q", left, operations)
	}
	before := b.maps.Remembered()
	left, operations = b.pass(time.Minute)
	if last := operations[len(operations)-1]; last != "put service 0/1 web slots 760+1021" {
		t.Errorf("the table before is given up at last, got %q", last)
	}
	if left.Transition != 0 || left.Marked == 0 || b.maps.Remembered() >= before {
		t.Errorf("left: %+v, remembered %d of %d", left, b.maps.Remembered(), before)
	}
	check("settled,", 1)
	b.dumpHas("slots 760 to 1780,", false)

	// Its part of the slots is used again after a grace.
	_, operations = b.apply(sized(509))
	b.want("operations", strings.Join(operations, "\n"),
		"grace\nwrite slots 0+509\nput service 0/1 web slots 0+509 before 760+1021")
	check("resized again,", 1)
	_, err := b.r.Apply(sized(1021))
	if err == nil || !strings.Contains(err.Error(), "1021 of those in use belong to earlier tables, and become free when the slots have settled") {
		t.Errorf("no room: %v", err)
	}
}

// dumpHas checks for a part of the dump, or its absence.
func (b *bench) dumpHas(part string, want bool) {
	b.Helper()
	if strings.Contains(b.dump(), part) != want {
		b.Errorf("dump has %q: want %v\n%s", part, want, b.dump())
	}
}

func TestTrackingComesAndGoes(t *testing.T) {
	b := newBench(t, roomy)
	with := func(tracking model.Tracking, forwarding model.Forwarding, size uint32, backends string) reconcile.Desired {
		d := tracked(size, backends)
		d.Services[0].Tracking, d.Services[0].Forwarding = tracking, forwarding
		return d
	}
	const first, second = "10.0.0.2:80 10.0.0.3:80*0", "10.0.0.2:80*0 10.0.0.3:80"
	for _, off := range []struct {
		tracking   model.Tracking
		forwarding model.Forwarding
	}{{model.TrackingNone, model.ForwardingDSRIPIP}, {model.TrackingAuto, model.ForwardingNAT}, {model.TrackingAlways, model.ForwardingNAT}} {
		b.apply(with(off.tracking, off.forwarding, 251, first))
		b.apply(with(off.tracking, off.forwarding, 251, second))
		b.want("untracked slots change at once", b.unsettled(), "")
		difference, _ := b.apply(with(model.TrackingAuto, model.ForwardingDSRIPIP, 251, second))
		b.want("tracked from now on", b.unsettled(), "")
		if difference.Empty() || difference.Repairs > 0 {
			t.Errorf("difference %+v", difference)
		}
		b.apply(with(model.TrackingAuto, model.ForwardingDSRIPIP, 509, first))
		b.dumpHas("previous in the table before: 509 slots", true)
		b.apply(with(off.tracking, off.forwarding, 509, first))
		b.want("no longer tracked", b.unsettled(), "")
		b.dumpHas(", before ", false)
		b.apply(with(off.tracking, off.forwarding, 251, first))
		b.want("resized untracked", b.unsettled(), "")
		// Tracked and changed in one step: the record comes first.
		_, operations := b.apply(with(model.TrackingAuto, model.ForwardingDSRIPIP, 251, second))
		b.want("tracked and changed", b.unsettled(), "slots: 251 in transition\nprevious backend 1 generation 1, draining: 251 slots")
		if i := slices.IndexFunc(operations, func(o string) bool { return strings.HasPrefix(o, "write") }); i < 1 || !strings.HasPrefix(operations[i-1], "put service") {
			t.Errorf("operations %q", operations)
		}
	}
	none := with(model.TrackingNone, model.ForwardingDSRIPIP, 251, first)
	auto := with(model.TrackingAuto, model.ForwardingDSRIPIP, 251, first)
	auto.Services[0].AffinityTimeout = 3 * time.Hour
	b.apply(none)
	difference, _ := b.apply(auto)
	b.want("difference", difference.String(), "~ service web: tracking from none to auto, affinity_timeout from none to 3h")
	b.dumpHas(", affinity_timeout 3h0m0s\n", true)
}

func TestAffinityOutlivesTheSettleTime(t *testing.T) {
	b := newBench(t, roomy)
	d := tracked(251, "10.0.0.2:80 10.0.0.3:80*0")
	d.Services[0].Forwarding, d.Services[0].AffinityTimeout = model.ForwardingNAT, 3*time.Hour
	b.apply(d)
	b.apply(weighed(d, 0, 0, 1))
	if left, _ := b.pass(settleTime); left.Transition != 251 || !left.Next.Equal(b.now.Add(3*time.Hour-settleTime)) {
		t.Errorf("left: %+v", left)
	}
}

func TestWhereAllDrainKnownFlowsGoOn(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80"))
	old, fresh := flowAt(3, 251, 0), flowAt(3, 251, 1)
	to := b.maps.Packet(old, fake.Opening)
	difference, _ := b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.3:80*0"))
	if got := difference.String(); !strings.HasSuffix(got, "no backend left for new flows") {
		t.Errorf("difference %q", got)
	}
	if got := b.maps.Packet(old, fake.Middle); got != to {
		t.Errorf("a known flow goes to %v", got)
	}
	if got := b.maps.Packet(fresh, fake.Opening); got != (reconcile.BackendRef{}) {
		t.Errorf("a new flow goes to %v", got)
	}
	b.pass(settleTime)
	b.want("settled", b.unsettled(), "slots: 250 settled, 1 marked")
	b.restart()
	difference, _ = b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80"))
	if got := difference.String(); !strings.HasSuffix(got, "table of 251 slots") {
		t.Errorf("difference %q", got)
	}
	b.want("nobody leaves nothing to remember", b.unsettled(), "slots: 250 settled, 1 marked")
}

func TestFailuresOfSettle(t *testing.T) {
	for _, kind := range []fake.Fault{fake.Before, fake.After, fake.Half} {
		for _, restart := range []bool{false, true} {
			for _, apply := range []bool{false, true} {
				steps := 0
				for failOnce(t, kind, steps, restart, apply) {
					steps++
				}
				if steps < 5 {
					t.Errorf("settling took only %d steps", steps)
				}
			}
		}
	}
}

// failOnce makes the given operation of Settle fail, and then lets another Settle or an Apply
// continue, after a restart if wanted. It returns false if there are fewer operations.
func failOnce(t *testing.T, kind fake.Fault, at int, restart, apply bool) bool {
	b := newBench(t, roomy)
	b.apply(tracked(251, threeAlike))
	flow := flowAt(100, 251, 0)
	to := b.maps.Packet(flow, fake.Opening)
	last := tracked(509, threeAlike)
	b.apply(last)
	b.maps.Packet(flow, fake.Middle)
	b.now = b.now.Add(settleTime)
	countdown := at
	b.maps.Fault = func(string) fake.Fault {
		if countdown--; countdown == -1 {
			return kind
		}
		return fake.None
	}
	left, err := b.r.Settle()
	b.maps.Fault = nil
	if err == nil {
		return false
	}
	if !errors.Is(err, fake.ErrInjected) || !left.Next.Equal(b.now) {
		t.Errorf("%v, left %+v", err, left)
	}
	if restart {
		b.restart()
	}
	if apply {
		last.Services[0].Backends[2].Weight = 5
		b.apply(last)
	} else {
		b.settle()
	}
	b.apply(last)
	b.pass(settleTime)
	if got := b.unsettled(); strings.Contains(got, "transition") || strings.Contains(got, "closing") {
		t.Errorf("fault %d of kind %d: %s", at, kind, got)
	}
	b.dumpHas(", before ", false)
	if got := b.maps.Packet(flow, fake.Middle); got != to {
		t.Errorf("fault %d of kind %d, restart %v, apply %v: the flow moved to %v from %v", at, kind, restart, apply, got, to)
	}
	return true
}

func TestAdoptionBeginsSettlingAnew(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(tracked(251, threeAlike))
	b.apply(tracked(509, threeAlike))
	b.now = b.now.Add(settleTime - time.Second)
	b.restart()
	before := b.dump()
	if left, operations := b.pass(time.Hour); len(operations) > 0 || left.Transition != 509 || !left.Next.IsZero() {
		t.Errorf("before the first Apply the settle time is not known: %+v, %q", left, operations)
	}
	b.restart()
	b.now = b.now.Add(time.Minute) // until it looks at the maps
	if difference, operations := b.apply(tracked(509, threeAlike)); !difference.Empty() || len(operations) > 0 {
		t.Errorf("the same after a restart: %s, %q", difference, operations)
	}
	b.want("contents", b.dump(), before)
	if left, operations := b.pass(settleTime - time.Second); len(operations) > 0 || !left.Next.Equal(b.now.Add(time.Second)) {
		t.Errorf("left: %+v, operations %q", left, operations)
	}
	if left, _ := b.pass(time.Second); left != (reconcile.Settling{}) {
		t.Errorf("left: %+v", left)
	}
}

// TestApplyFinishesClosingFirst has Settle fail after closing, and Apply continue from there.
func TestApplyFinishesClosingFirst(t *testing.T) {
	for _, restart := range []bool{false, true} {
		b := newBench(t, roomy)
		b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80*0"))
		b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.3:80"))
		b.now = b.now.Add(settleTime)
		b.maps.Fault = failing("scan", fake.Before)
		left, err := b.r.Settle()
		if !errors.Is(err, fake.ErrInjected) || left.Transition != 251 || !left.Next.Equal(b.now) {
			t.Errorf("%+v, %v", left, err)
		}
		b.want("left", b.unsettled(), "slots: 251 closing")
		if restart {
			b.restart()
		}
		before := len(b.maps.Operations)
		if _, err := b.r.Apply(reconcile.Desired{Limits: roomy}); !errors.Is(err, fake.ErrInjected) {
			t.Error(err)
		}
		b.want("nothing else", strings.Join(b.maps.Operations[before:], "\n"), "grace\nscan remembered")
		b.maps.Fault = nil
		plan, err := b.r.Plan(tracked(251, "10.0.0.2:80 10.0.0.3:80"))
		if err != nil || plan.Empty() {
			t.Errorf("plan: %v, %v", plan, err)
		}
		_, operations := b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80"))
		b.want("operations", strings.Join(operations[:4], "\n"),
			"grace\nscan remembered\nwrite slots 0+251\nput backend 1/1 10.0.0.2:80")
	}
}

func TestAdoptionRefusesOddTransitions(t *testing.T) {
	record := reconcile.ServiceRecord{Generation: 1, Name: "web", Size: 2, Forwarding: model.ForwardingDSRL2}
	with := record
	with.BeforeOffset, with.BeforeSize = 1, 2
	apart := with
	apart.BeforeOffset = 2
	two := map[uint32]reconcile.Table{0: make(reconcile.Table, 2)}
	for name, c := range map[string]struct {
		record        reconcile.ServiceRecord
		slots, before map[uint32]reconcile.Table
		want          string
	}{
		"right":           {apart, two, two, ""},
		"shared":          {with, two, two, "share slot 1"},
		"missing before":  {apart, two, nil, "has 0 slots in the table before, but its record says 2"},
		"surplus before":  {record, two, two, "has 2 slots in the table before, but its record says 0"},
		"no such state":   {record, map[uint32]reconcile.Table{0: reconcile.NewTable([]reconcile.Slot{{}, {State: 4}})}, nil, "has slot 1 in state 4"},
		"no table before": {record, map[uint32]reconcile.Table{0: reconcile.NewTable([]reconcile.Slot{{}, {State: 1, PreviousBefore: true}})}, nil, "refers to an earlier table"},
	} {
		_, err := reconcile.New(contentsOnly{contents: reconcile.Contents{
			Services: map[uint32]reconcile.ServiceRecord{0: c.record}, Slots: c.slots, BeforeSlots: c.before,
		}}).Adopt()
		if (err == nil) != (c.want == "") || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestDrainingIsPutAgain: a backend is put again with the same position and generation and another flag, also after
// a restart that forgot the weights.
func TestDrainingIsPutAgain(t *testing.T) {
	b := newBench(t, roomy)
	b.apply(tracked(251, threeAlike))
	_, operations := b.apply(tracked(251, "10.0.0.2:80*0 10.0.0.3:80 10.0.0.4:80"))
	if operations[0] != "put backend 1/1 10.0.0.2:80 draining" {
		t.Errorf("operations %q", operations)
	}
	b.restart()
	difference, operations := b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80 10.0.0.4:80"))
	if operations[0] != "put backend 1/1 10.0.0.2:80" || slices.Contains(operations, "grace") || difference.Empty() {
		t.Errorf("%v: operations %q", difference, operations)
	}
}

// TestAnotherScanMendsTheLast: only a part of the first scan's results is written, and the
// second finds other results for the same service.
func TestAnotherScanMendsTheLast(t *testing.T) {
	b := newBench(t, roomy)
	two := func(backends string) reconcile.Desired {
		d := tracked(251, backends)
		other := *d.Services[0]
		other.Name, other.Frontends = "other", []model.Frontend{frontend("192.0.2.11:80")}
		d.Services = append(d.Services, &other)
		return d
	}
	last := two("10.0.0.2:80*0 10.0.0.3:80")
	b.apply(two("10.0.0.2:80 10.0.0.3:80*0"))
	b.apply(last)
	flow := flowAt(5, 251, 0)
	b.maps.Packet(flow, fake.Middle)
	b.now = b.now.Add(settleTime)
	writes := 0
	b.maps.Fault = func(operation string) fake.Fault {
		if strings.HasPrefix(operation, "write slots") {
			writes++
		}
		return map[bool]fake.Fault{true: fake.Half}[writes == 3] // two close, the third settles
	}
	if _, err := b.r.Settle(); !errors.Is(err, fake.ErrInjected) {
		t.Fatal(err)
	}
	b.maps.Fault = nil
	b.want("half of the first, none of the second", b.unsettled(),
		"slots: 124 settled, 126 closing, 1 marked\nslots: 251 closing")
	b.maps.End(flow)
	b.apply(last)
	b.want("settled", b.unsettled(), "")
}

// TestTheSettleTimeBeginsWhenItIsWritten: until the slots are written, programs find settled ones, and
// remember nothing.
func TestTheSettleTimeBeginsWhenItIsWritten(t *testing.T) {
	for _, c := range []struct {
		prefix string
		size   uint32
	}{{"write slots", 251}, {"put service", 509}} {
		b := newBench(t, roomy)
		b.apply(tracked(251, "10.0.0.2:80 10.0.0.3:80*0"))
		next := tracked(c.size, "10.0.0.2:80*0 10.0.0.3:80")
		b.maps.Fault = failing(c.prefix, fake.Before)
		if _, err := b.r.Apply(next); !errors.Is(err, fake.ErrInjected) {
			t.Fatal(err)
		}
		b.maps.Fault = nil
		b.now = b.now.Add(settleTime)
		b.apply(next)
		if left, operations := b.settle(); left.Transition != int(c.size) || !left.Next.Equal(b.now.Add(settleTime)) {
			t.Errorf("after a failing %q: %+v, operations %q", c.prefix, left, operations)
		}
	}
}

// TestSettlingWaitsForNobody: a caller of Settling in the middle of a change gets the counts from before it.
func TestSettlingWaitsForNobody(t *testing.T) {
	asked := 0
	var r *reconcile.Reconciler
	r = reconcile.New(fake.New(roomy), reconcile.BeforeNaming(func([]reconcile.BackendRecord) {
		asked++
		if left := r.Settling(); left.Transition != 0 {
			t.Errorf("in the middle of change %d, %+v is left", asked, left)
		}
	}))
	direct := func(backends string) reconcile.Desired {
		d := desired(service("web", "192.0.2.10:80", backends))
		d.Services[0].Forwarding, d.Settle = model.ForwardingDSRL2, settleTime
		return d
	}
	for _, backends := range []string{"10.0.0.2:80", "10.0.0.2:80 10.0.0.3:80"} {
		if _, err := r.Apply(direct(backends)); err != nil {
			t.Fatal(err)
		}
	}
	if left := r.Settling(); asked != 2 || left.Transition == 0 {
		t.Errorf("asked %d times, and %+v is left after a change of slots with flows", asked, left)
	}
}

// TestClosesDown: with on_down: close, flows of a backend that goes down end with their remembered entries, also if the
// backend drained before; without it, they stay. There is no second look for them while the backend stays down.
func TestClosesDown(t *testing.T) {
	for _, closes := range []bool{false, true} {
		b := newBench(t, roomy)
		state := func(down bool, weight uint16) reconcile.Desired {
			d := desired(service("web", "192.0.2.10:80", "10.0.0.2:80 10.0.0.3:80"))
			s := d.Services[0]
			s.Forwarding, s.Tracking, s.ClosesDown = model.ForwardingDSRIPIP, model.TrackingAuto, closes
			s.Backends[0].Weight, s.Backends[0].Observed.Down, s.Backends[0].Observed.Idle = weight, down, down
			d.Settle = settleTime
			return d
		}
		b.apply(state(false, 1))
		var with []fake.Flow // the backend that goes down
		var gone reconcile.BackendRef
		for i := range uint32(200) {
			flow := fake.Flow{Frontend: frontend("192.0.2.10:80"), Hash: i << 24}
			if to := b.maps.Packet(flow, fake.Opening); b.maps.Backend(to.Index).BackendAddress.String() == "10.0.0.2:80" {
				with, gone = append(with, flow), to
			}
		}
		if len(with) == 0 {
			t.Fatal("no flow is with the backend that goes down")
		}
		stay := func(when string, want bool) {
			t.Helper()
			for _, flow := range with {
				if stays := b.maps.Packet(flow, fake.Middle) == gone; stays != want {
					t.Fatalf("closes %v: %s, a flow stays: %v", closes, when, stays)
				}
			}
		}
		b.apply(state(false, 0))
		stay("while the backend drains", true) // and is remembered with it
		before := len(b.maps.Operations)
		b.apply(state(true, 0))
		if ends := slices.Contains(b.maps.Operations[before:], fake.EndStrays); ends != closes {
			t.Errorf("closes %v: flows are ended: %v", closes, ends)
		}
		stay("when the backend is down", !closes)
		before = len(b.maps.Operations)
		d := state(true, 0)
		d.Services[0].Backends[1].Weight = 2
		b.apply(d)
		if slices.Contains(b.maps.Operations[before:], fake.EndStrays) {
			t.Errorf("closes %v: flows are looked for again while the backend stays down", closes)
		}
		if closes {
			b.apply(state(false, 1))
			if to := b.maps.Packet(fake.Flow{Frontend: with[0].Frontend, Hash: with[0].Hash}, fake.Opening); to == (reconcile.BackendRef{}) {
				t.Error("nothing is served when the backend is up again")
			}
		}
	}
}

// TestUpAgainBeforeItClosed: a backend that is down and up again before that has been applied loses no flow.
func TestUpAgainBeforeItClosed(t *testing.T) {
	state := func(down bool) reconcile.Desired {
		d := settling(service("web", "192.0.2.10:80", threeAlike))
		d.Services[0].ClosesDown = true
		d.Services[0].Backends[0].Observed.Down, d.Services[0].Backends[0].Observed.Idle = down, down
		return d
	}
	for at := 0; ; at++ {
		b := newBench(t, roomy)
		b.apply(state(false))
		flows := b.dial("192.0.2.10:80", 50)
		countdown := at
		b.maps.Fault = func(string) fake.Fault {
			if countdown--; countdown == -1 {
				return fake.Before
			}
			return fake.None
		}
		_, err := b.r.Apply(state(true))
		b.maps.Fault = nil
		if err == nil {
			if at < 2 {
				t.Errorf("%d operations", at)
			}
			return
		}
		b.apply(state(false))
		b.stay("up again", flows)
	}
}
