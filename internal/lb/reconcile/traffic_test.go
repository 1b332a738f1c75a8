package reconcile_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
)

// traffic is TCP flows through tracked services, at every moment of a history: between
// any two operations, with programs that have read a slot before an operation and act on
// it after. No flow may move, unless its backend is no longer wanted, its service is not
// tracked or not its own any more, or it has been idle for the settle time. Backends that a
// failed Apply did not want may be gone until an Apply has succeeded.
type traffic struct {
	random  *rand.Rand // of a drawn seed: too many draws for rapid to shorten
	now     time.Time
	attempt reconcile.Desired   // the state that the last Apply tried
	failed  []reconcile.Desired // states tried before, since an Apply succeeded
	earlier []reconcile.Desired // all states ever tried

	succeeded bool
	living    []*connection
	natted    []nattedFlow
	lost      map[string]int // why flows are not followed any more
}

type connection struct {
	fake.Flow
	service string
	to      reconcile.BackendRef
	last    time.Time // its last packet
	run     *fake.Run // a packet on its way
}

const connectionCount = 40

func newTraffic(seed uint64) traffic {
	return traffic{random: rand.New(rand.NewPCG(seed, 0)), now: time.Unix(0, 0), lost: map[string]int{}}
}

func (w *world) restart() {
	w.restartNAT()
	w.r = reconcile.New(w.maps, reconcile.Clock(func() time.Time { return w.now }))
}

// drawChange returns the last attempt with other weights, one backend more or less, or another
// size of a table; in one service or in all of them.
func (w *world) drawChange() reconcile.Desired {
	d := w.attempt
	d.Services = slices.Clone(d.Services)
	only := rapid.IntRange(-1, len(d.Services)-1).Draw(w.T, "only service")
	for i := range d.Services {
		if only >= 0 && i != only {
			continue
		}
		changed := *d.Services[i]
		s := &changed
		d.Services[i] = s
		s.Backends = slices.Clone(s.Backends)
		if n := len(s.Backends); n > 0 {
			at := rapid.IntRange(0, n-1).Draw(w.T, "backend")
			switch rapid.IntRange(0, 7).Draw(w.T, "change") {
			case 0, 1:
				s.Backends[at].Weight = uint16(rapid.IntRange(0, 3).Draw(w.T, "weight"))
			case 2:
				s.Backends = slices.Delete(s.Backends, at, at+1)
			case 3:
				s.TableSize = rapid.SampledFrom([]uint32{251, 509}).Draw(w.T, "size")
			case 4:
				w.drawLists(s)
			case 5, 6:
				s.Backends[at] = w.drawHealth(s.Backends[at])
			case 7:
				s.ClosesDown = !s.ClosesDown
			}
		} else {
			s.Backends = []model.Backend{backend(poolBackends[0], 1), backend(poolBackends[1], 1)}
		}
	}
	return d
}

// begin gives up the flows that d does not promise to keep.
func (w *world) begin(d reconcile.Desired, plan reconcile.Difference, refused error) {
	if refused != nil {
		return // before anything happens
	}
	w.beginNAT(d, plan)
	if !w.succeeded {
		w.failed = append(w.failed, w.attempt)
	}
	w.attempt, w.succeeded = d, false
	w.living = slices.DeleteFunc(w.living, func(c *connection) bool {
		why := w.promised(c)
		return w.giveUp(c, why == "", why)
	})
}

// giveUp drops a flow unless it is to be kept.
func (w *world) giveUp(c *connection, keep bool, why string) bool {
	if keep {
		return false
	}
	w.lost[why]++
	if c.run != nil {
		c.run.Finish()
	}
	if w.random.IntN(2) == 0 { // the others' entries live on
		w.maps.End(c.Flow)
	}
	return true
}

// promised returns the reason why the flow may be lost, or nothing.
func (w *world) promised(c *connection) string {
	for _, d := range w.failed {
		if why := w.mayLose(c, d); why != "" {
			return why
		}
	}
	return w.mayLose(c, w.attempt)
}

func (w *world) mayLose(c *connection, d reconcile.Desired) string {
	at := w.maps.Backend(c.to.Index)
	for _, s := range d.Services {
		switch {
		case s.Name != c.service:
		case !s.Tracked():
			return "not tracked"
		case !slices.Contains(s.Frontends, c.Frontend):
			return "another service"
		case at.BackendRef != c.to || !slices.ContainsFunc(serving(*s, c.Frontend.Address.Is6()), func(b model.Backend) bool { return b.BackendAddress == at.BackendAddress && !closed(s, b) }):
			return "backend removed, or down and closed"
		default:
			return ""
		}
	}
	return "service removed"
}

// closed reports whether a service ends the flows of its backend.
func closed(s *model.Service, b model.Backend) bool { return s.ClosesDown && b.Observed.Down }

// during sends packets between any two operations.
func (w *world) during(fault func(string) fake.Fault) func(string) fake.Fault {
	return func(operation string) fake.Fault {
		w.some(3)
		if fault == nil {
			return fake.None
		}
		return fault(operation)
	}
}

// send sends a packet of most flows, and many others.
func (w *world) send() {
	for _, c := range slices.Clone(w.living) {
		if w.random.IntN(8) > 0 {
			w.packet(c, false)
		}
	}
	w.some(20)
	w.checkViolations()
}

func (w *world) some(count int) {
	for range count {
		w.someNAT()
		if n := len(w.living); n > 0 && w.random.IntN(3) > 0 {
			w.packet(w.living[w.random.IntN(n)], w.random.IntN(3) == 0)
		} else if n < connectionCount {
			w.open()
		}
	}
}

// open begins a flow, if its service is tracked and stays so.
func (w *world) open() {
	n := len(w.attempt.Services)
	if n == 0 {
		return
	}
	s := w.attempt.Services[w.random.IntN(n)]
	if !s.Tracked() || len(s.Frontends) == 0 {
		return
	}
	f := s.Frontends[w.random.IntN(len(s.Frontends))]
	record, ok := w.maps.Service(f)
	was := model.Service{Forwarding: record.Forwarding, Tracking: record.Tracking, AffinityTimeout: record.AffinityTimeout}
	if !ok || record.Name != s.Name || !was.Tracked() {
		return
	}
	c := &connection{Flow: fake.Flow{Frontend: f, Hash: w.random.Uint32()}, service: s.Name, last: w.now}
	c.to = w.maps.Packet(c.Flow, fake.Opening)
	if w.promised(c) == "" {
		w.living = append(w.living, c)
	}
}

// packet sends one more packet of a flow, or the first half of one, and checks its backend.
func (w *world) packet(c *connection, half bool) {
	if c.run != nil {
		w.goesOn(c, c.run.Finish())
		c.run = nil
		return
	}
	idle := w.now.Sub(c.last) >= settleTime
	if idle || w.random.IntN(60) == 0 {
		w.living = slices.DeleteFunc(w.living, func(o *connection) bool { return o == c && w.giveUp(c, false, "idle or over") })
		return
	}
	c.last = w.now
	if half {
		c.run = w.maps.Begin(c.Flow, fake.Middle)
		return
	}
	w.goesOn(c, w.maps.Packet(c.Flow, fake.Middle))
}

func (w *world) goesOn(c *connection, to reconcile.BackendRef) {
	if to != c.to {
		contents, _ := w.maps.Contents()
		w.Fatalf("flow %v of service %s moved from %v to %v; operations:\n%s\ncontents:\n%s", c.Flow, c.service, c.to, to,
			strings.Join(w.maps.Operations, "\n"), reconcile.Dump(contents))
	}
}

// settle calls Settle with the fault, and checks its result against the maps.
func (w *world) settle(fault func(string) fake.Fault) {
	w.maps.Fault = w.during(fault)
	left, err := w.r.Settle()
	w.maps.Fault = nil
	if err != nil && !errors.Is(err, fake.ErrInjected) {
		w.Fatal(err)
	}
	w.checkViolations()
	if err != nil {
		return
	}
	var found reconcile.Settling
	contents, _ := w.maps.Contents()
	for _, slots := range contents.Slots {
		for _, slot := range slots.All() {
			switch slot.State {
			case reconcile.Transition:
				found.Transition++
			case reconcile.Closing:
				w.Fatalf("closing after Settle:\n%s", reconcile.Dump(contents))
			case reconcile.Marked:
				found.Marked++
			}
		}
	}
	if left.Transition > found.Transition || left.Marked > found.Marked {
		w.Fatalf("Settle says %+v, but there are %+v", left, found)
	}
	if !left.Next.IsZero() && !left.Next.After(w.now) {
		w.Fatalf("Settle has something to do at once: %+v at %v", left, w.now)
	}
	before := len(w.maps.Operations)
	if again, err := w.r.Settle(); err != nil || again != left || len(w.maps.Operations) > before {
		w.Fatalf("a second Settle: %+v after %+v, %v, operations %q", again, left, err, w.maps.Operations[before:])
	}
}

// settleAll ends all flows, and with them everything that is not settled.
func (w *world) settleAll() {
	for _, c := range w.living {
		if c.run != nil {
			w.goesOn(c, c.run.Finish())
		}
	}
	w.maps.EndAll()
	w.living = nil
	w.natted = nil
	for range 3 {
		w.now = w.now.Add(time.Hour)
		left, err := w.r.Settle()
		if err != nil {
			w.Fatal(err)
		}
		if left == (reconcile.Settling{}) {
			return
		}
	}
	contents, _ := w.maps.Contents()
	w.Fatalf("not settled:\n%s", reconcile.Dump(contents))
}

// checkStrays checks that each flow is remembered with a backend of its service or, with NAT, of a service that has
// got one of its frontends: the flow may have begun there.
func (w *world) checkStrays() {
	has := func(name string, flow model.Frontend, backend model.BackendAddress) bool {
		return slices.ContainsFunc(w.attempt.Services, func(s *model.Service) bool {
			return s.Name == name && slices.ContainsFunc(serving(*s, flow.Address.Is6()), func(b model.Backend) bool { return b.BackendAddress == backend && !closed(s, b) })
		})
	}
	contents, _ := w.maps.Contents()
	for flow, e := range w.maps.Flows() {
		record, ok := w.maps.Service(flow.Frontend)
		wanted := slices.ContainsFunc(w.attempt.Services, func(s *model.Service) bool { return s.Name == record.Name })
		if !ok || !wanted || record.Index != e.Service || record.Generation != e.Generation {
			continue // programs look at the service first
		}
		backend := w.maps.Backend(e.Backend.Index)
		if backend.BackendRef != e.Backend || has(record.Name, flow.Frontend, backend.BackendAddress) {
			continue
		}
		borrowed := false
		for index, s := range contents.Services {
			borrowed = borrowed || w.maps.Lent(record, index) && has(s.Name, flow.Frontend, backend.BackendAddress)
		}
		if !borrowed {
			w.Fatalf("flow %v of service %s is remembered with %s, which has left it; operations:\n%s", flow, record.Name, backend.BackendAddress, strings.Join(w.maps.Operations, "\n"))
		}
	}
}

// checkPrevious adds to the exact comparison that previous backends are the
// service's own, and drain as the service says.
func (w *world) checkPrevious(c reconcile.Contents) {
	weights := map[string]map[model.BackendAddress]uint32{}
	tracked := map[string]bool{}
	for _, s := range w.attempt.Services {
		tracked[s.Name] = s.Tracked()
		weights[s.Name] = map[model.BackendAddress]uint32{}
		for _, b := range s.Backends {
			if !closed(s, b) {
				weights[s.Name][b.BackendAddress] = b.Share()
			}
		}
	}
	for index, slots := range c.Slots {
		name, refers := c.Services[index].Name, false
		for i, slot := range slots.All() {
			refers = refers || slot.PreviousBefore
			if slot.State != reconcile.Settled && !tracked[name] {
				w.Fatalf("slot %d of service %s, which is not tracked: %+v", i, name, slot)
			}
			weight, ok := weights[name][c.Backends[slot.Previous.Index].BackendAddress]
			if slot.Previous != (reconcile.BackendRef{}) && (!ok || (weight == 0) != slot.PreviousDrains) {
				w.Fatalf("slot %d of service %s: %+v, but the previous backend has weight %d there: %v", i, name, slot, weight, ok)
			}
		}
		for i, slot := range c.BeforeSlots[index].All() {
			previous := slot.Current
			if slot.State == reconcile.Transition {
				previous = slot.Previous
			}
			backend, lives := c.Backends[previous.Index]
			if _, ok := weights[name][backend.BackendAddress]; lives && backend.BackendRef == previous && !ok {
				w.Fatalf("slot %d of the table before of service %s leads to %s, which has left it", i, name, backend.BackendAddress)
			}
		}
		if before := c.Services[index].BeforeSize > 0; before != refers {
			w.Fatalf("service %s has a table before: %v, and slots that refer to it: %v", name, before, refers)
		}
	}
}
