package place_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// chooser makes the choices in a history: rapid, or a source of random numbers.
type chooser interface {
	choose(n int, label string) int // 0 to n-1
}

type byNumber struct{ *rand.Rand }

func (b byNumber) choose(n int, _ string) int { return b.IntN(n) }

// history is one run: a configuration that changes, and flows.
type history struct {
	chooser
	w     *world
	tight bool // the table or the budget is too small for all flows
	// lossesOnly switches the rules' judgement off, so that losses alone decide.
	lossesOnly bool
	rules      *rules
	fault      *faults
	r          *reconcile.Reconciler

	desired reconcile.Desired   // the last wanted, whether it succeeded or not
	applied reconcile.Desired   // the last that succeeded
	past    []reconcile.Desired // for rollbacks
	// back are backends whose removal has failed half-way at some time, by service.
	back      map[string]map[model.BackendAddress]bool
	inDoubt   bool                // a change has failed half-way
	begun     []reconcile.Desired // wanted since applied: a half-way change is finished before it is taken back
	flows     []*flow
	seq       int
	ports     int
	trace     []string
	count     *tally
	lateRolls *rand.Rand
}

// tally counts the events in all histories of a test.
type tally struct {
	histories, flows, packets int
	losses                    map[cause]int
	events                    map[string]int
	refused                   int // packets whose flow should have been remembered but was not
	lates                     int // packets of programs that began before a slot closed
	unwanted                  int // new flows without a backend that takes them
	clientsOnDraining         int // new flows of clients that stay with a draining backend
}

func newTally() *tally { return &tally{losses: map[cause]int{}, events: map[string]int{}} }

func (c *tally) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d histories, %d flows, %d packets (%d late, %d not remembered), %d new flows nobody took, %d of clients to a draining backend\nlost:\n",
		c.histories, c.flows, c.packets, c.lates, c.refused, c.unwanted, c.clientsOnDraining)
	for _, line := range sorted(c.losses) {
		fmt.Fprintf(&b, "  %s\n", line)
	}
	fmt.Fprintf(&b, "events:\n")
	for _, line := range sorted(c.events) {
		fmt.Fprintf(&b, "  %s\n", line)
	}
	return b.String()
}

func sorted[K ~string](counts map[K]int) (lines []string) {
	for what, n := range counts {
		lines = append(lines, fmt.Sprintf("%s: %d", what, n))
	}
	slices.Sort(lines)
	return lines
}

// failure ends a history early.
type failure struct{ error }

func (h *history) fail(format string, a ...any) { panic(failure{fmt.Errorf(format, a...)}) }

func (h *history) failFlow(f *flow, format string, a ...any) {
	h.fail("%s\nits packets, by time in quanta: %s", fmt.Sprintf(format, a...), strings.Join(f.log, ", "))
}

var pool = func() (all []model.BackendAddress) {
	for _, text := range []string{"10.0.0.21", "10.0.0.22", "10.0.0.23", "10.0.0.24", "10.0.0.25", "2001:db8:2::21", "2001:db8:2::22", "2001:db8:2::23"} {
		all = append(all, model.BackendAddress{Address: netip.MustParseAddr(text)})
	}
	return all
}()

func frontends(n int) (all []model.Frontend) {
	for _, address := range []string{fmt.Sprintf("192.0.2.%d", 10+n), fmt.Sprintf("2001:db8:1::%d", 10+n)} {
		for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
			all = append(all, model.Frontend{Address: netip.MustParseAddr(address), Ports: value.PortRange{First: 443, Last: 443}, Protocol: protocol})
		}
	}
	return all
}

// newHistory begins with an empty data plane.
func newHistory(w *world, c chooser, count *tally, breaks breakage) *history {
	h := &history{back: map[string]map[model.BackendAddress]bool{}, chooser: c, w: w, count: count, lossesOnly: breaks.lossesOnly, tight: w.tight}
	count.histories++
	must(w, w.d.Heartbeat())
	h.clear()
	var below reconcile.Maps = w.d
	if breaks.writes != nil {
		below = &broken{Maps: below, breakage: breaks, slots: map[uint32]reconcile.Slot{}}
	}
	witness := newWitness(w, below)
	h.rules = &rules{witness: witness, entries: map[flowKey]*entry{}, isThere: w.isRemembered, drains: h.weightless}
	witness.late, witness.ended = h.late, h.rules.endStrays
	witness.scanned = func(found map[uint32]bool) error {
		if err := h.rules.scan(found); err != nil && !h.lossesOnly {
			return err
		}
		return nil
	}
	h.fault = &faults{Maps: witness}
	if breaks.hurries {
		h.fault.Maps = hasty{witness}
	}
	h.desired = reconcile.Desired{Limits: w.options.Limits, Settle: settle}
	h.restart()
	return h
}

// clear removes the state that the history before has left.
func (h *history) clear() {
	h.w.forget()
	clean := reconcile.New(hasty{h.w.d}) // no program runs
	if _, err := clean.Apply(reconcile.Desired{Limits: h.w.options.Limits}); err != nil {
		h.w.Fatalf("removing what a history left: %v", err)
	}
}

func (h *history) now() time.Duration { return h.rules.now }

var epoch = time.Unix(1_700_000_000, 0)

func (h *history) restart() {
	h.r = reconcile.New(h.fault, reconcile.Clock(func() time.Time { return epoch.Add(h.now()) }))
	if _, err := h.r.Adopt(); err != nil {
		h.fail("adoption: %v", err)
	}
	for _, f := range h.flows {
		record, _ := h.rules.serviceOf(f.frontend)
		f.prolonged(h.now(), h.settleOf(record))
	}
}

func (h *history) log(format string, a ...any) {
	h.trace = append(h.trace, fmt.Sprintf("%6.1f  %s", float64(h.now())/float64(quantum), fmt.Sprintf(format, a...)))
}

func (h *history) settleOf(record reconcile.ServiceRecord) time.Duration {
	return max(settle, record.AffinityTimeout)
}

// slotOf is the slot of a flow.
func (h *history) slotOf(f *flow) reconcile.Slot {
	record, ok := h.rules.serviceOf(f.frontend)
	if !ok {
		return reconcile.Slot{}
	}
	return h.rules.slots[position(record.Offset, record.Size, hashOf(f.packet, record))]
}

func (h *history) currentOf(f *flow) model.BackendAddress {
	return h.rules.backends[h.slotOf(f).Current].BackendAddress
}

// members are the backends that serve a family of a service, with their weights: the family's own, or
// those of the other if it has none.
func members(d reconcile.Desired, name string, ipv6 bool) map[model.BackendAddress]uint16 {
	all := map[model.BackendAddress]uint16{}
	for _, s := range d.Services {
		if s.Name != name {
			continue
		}
		own := slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return b.Address.Is6() == ipv6 })
		for _, b := range s.Backends {
			if b.Address.Is6() == ipv6 || !own {
				all[b.BackendAddress] = b.Weight
			}
		}
	}
	return all
}

func (h *history) isMember(f *flow, b model.BackendAddress) bool {
	_, ok := members(h.desired, f.service, f.frontend.Address.Is6())[b]
	return ok
}

// drainsNow reports whether a backend has weight 0, or may have it in the maps: a change that failed
// half-way is finished by the next change, even if that one says otherwise.
func (h *history) drainsNow(f *flow, b model.BackendAddress) bool {
	return slices.ContainsFunc(append(slices.Clip(h.begun), h.desired), func(d reconcile.Desired) bool {
		weight, ok := members(d, f.service, f.frontend.Address.Is6())[b]
		return ok && weight == 0
	})
}

// weightless reports whether a backend has weight 0 in a service, or does not belong to it.
func (h *history) weightless(record reconcile.ServiceRecord, b model.BackendAddress) (yes, known bool) {
	for f, index := range h.rules.fronts {
		if index == record.Index {
			return members(h.applied, record.Name, f.Address.Is6())[b] == 0, !h.inDoubt
		}
	}
	return false, false
}

// apply applies the desired state, or fails with the injected fault.
func (h *history) apply() {
	before, doubted := h.applied, h.inDoubt
	_, err := h.r.Apply(h.desired)
	h.rules.lateRuns() // no program runs for longer than that
	h.fault.strike(none, 0)
	switch {
	case err == nil:
		h.applied, h.inDoubt, h.begun = h.desired, false, nil
	case errors.Is(err, errInjected):
		h.inDoubt, h.begun = true, append(h.begun, h.desired)
		h.count.events["apply failed"]++
		h.log("  failed: %v", err)
	default:
		h.fail("apply: %v", err)
	}
	h.noteRemovals(before, err != nil)
	h.lookAfter(doubted)
}

// noteRemovals records backends whose removal has begun, until one is carried out whole.
func (h *history) noteRemovals(before reconcile.Desired, failed bool) {
	for _, s := range before.Services {
		for _, ipv6 := range []bool{false, true} {
			now := members(h.desired, s.Name, ipv6)
			for b := range members(before, s.Name, ipv6) {
				if _, stays := now[b]; stays {
					continue
				}
				if h.back[s.Name] == nil {
					h.back[s.Name] = map[model.BackendAddress]bool{}
				}
				h.back[s.Name][b] = failed
			}
		}
	}
}

// look updates the flows after a change.
func (h *history) look() { h.lookAfter(h.inDoubt) }

// lookAfter is look if a change before this one may have failed half-way.
func (h *history) lookAfter(doubted bool) {
	h.seq++
	for _, f := range h.flows {
		if f.dead {
			continue
		}
		record, ok := h.rules.serviceOf(f.frontend)
		holds := f.holder != model.BackendAddress{}
		if current := h.currentOf(f); current != f.current {
			f.changed(h.now(), h.seq, h.settleOf(record))
			f.current = current
		}
		if n := len(f.periods); n > 0 && h.slotOf(f).State != reconcile.Transition {
			f.periods[n-1].over = true
		}
		f.holderGone = f.holderGone || !ok || holds && !h.isMember(f, f.holder)
		if n := len(f.synsTo); n > 0 && !h.inDoubt { // a removed backend may still be there
			f.synsTo = slices.DeleteFunc(f.synsTo, func(b model.BackendAddress) bool { return !h.isMember(f, b) })
			f.reused = f.reused || len(f.synsTo) < n
		}
		wasLeft := func(b model.BackendAddress) bool { return h.back[f.service][b] }
		f.halfLeft = f.halfLeft || (doubted || h.inDoubt) && (wasLeft(f.holder) || slices.ContainsFunc(f.synsTo, wasLeft))
		f.draining = f.draining || holds && h.drainsNow(f, f.holder)
		f.rehashed = f.rehashed || f.byClient != (record.AffinityTimeout > 0)
		untracked := h.mayStray(f)
		// The next change may carry it out and take it back in one step: then its slot has another
		// previous backend.
		between := f.mayStray && h.slotOf(f).State == reconcile.Transition
		if (record.Tracking == model.TrackingNone || untracked || f.mayStray) && holds && (f.current != f.holder || between) {
			f.strayed = true
		}
		f.mayStray = untracked
	}
}

// mayStray reports whether a change to tracking none failed half-way: the next change carries it
// out, even if that one says otherwise.
func (h *history) mayStray(f *flow) bool {
	return h.inDoubt && h.trackingOf(f) == model.TrackingNone
}

// trackingOf is the tracking of the flow's service in the configuration.
func (h *history) trackingOf(f *flow) model.Tracking {
	for _, s := range h.desired.Services {
		if s.Name == f.service {
			return s.Tracking
		}
	}
	return model.TrackingAuto
}

// advance lets time pass, a quantum at a time at most, and makes the reconciler do the work that is
// due.
func (h *history) advance(by time.Duration) {
	h.rules.now += by
	h.w.age(by)
	must(h.w, h.w.d.Heartbeat())
}

func (h *history) settle() reconcile.Settling {
	left, err := h.r.Settle()
	h.rules.lateRuns() // no program runs for longer than that
	if errors.Is(err, errInjected) {
		h.log("  settling failed: %v", err)
		h.count.events["settle failed"]++
	} else if err != nil {
		h.fail("settle: %v", err)
	}
	h.fault.strike(none, 0)
	h.look()
	return left
}

// late makes flows of closing slots send at the last moment, through programs that still hold the old
// words.
func (h *history) late() {
	if h.lateRolls == nil {
		return
	}
	h.rules.asOld(func() {
		budget := 6
		for _, i := range h.lateRolls.Perm(len(h.flows)) {
			f := h.flows[i]
			record, ok := h.rules.serviceOf(f.frontend)
			if !ok || f.dead || budget == 0 {
				continue
			}
			if _, closing := h.rules.old[position(record.Offset, record.Size, hashOf(f.packet, record))]; closing {
				h.step(f, h.lateRolls)
				h.count.lates++
				budget--
			}
		}
	})
}

// traffic makes flows send, each at its own rate, and new ones begin.
func (h *history) traffic(rng *rand.Rand, newcomers int) {
	must(h.w, pin(rng.IntN(2)))
	for range newcomers {
		if len(h.desired.Services) > 0 {
			h.open(rng, false)
		}
	}
	for _, f := range h.flows { // flows that begin meanwhile wait
		if rng.Float64() < f.chattiness {
			h.step(f, rng)
		}
	}
	h.flows = slices.DeleteFunc(h.flows, func(f *flow) bool { return f.dead })
	if !h.lossesOnly {
		h.checkEntries()
	}
}

// checkEntries compares the program's entries with the rules'.
func (h *history) checkEntries() {
	real := h.w.entries()
	for key, e := range h.rules.entries {
		if _, ok := real[key]; ok {
			continue
		}
		if !h.rules.alive(e.backend) { // a scan may delete it, or leave it to the next packet that finds it
			delete(h.rules.entries, key)
			continue
		}
		h.fail("%x should be remembered with %v", key, *e)
	}
	for key := range real {
		if _, ok := h.rules.entries[key]; !ok {
			h.fail("%x is remembered, and should not be", key)
		}
	}
}

// tableSize draws a size for the configuration: one of the smallest.
func (h *history) tableSize() uint32 {
	return maglev.Sizes[h.choose(2, "size")]
}
