package fake

import (
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// Flow is a flow as the programs of a tracked service know it.
type Flow struct {
	model.Frontend
	Hash uint32
}

// Kind decides to which backend a packet without an entry goes.
type Kind int

// The kinds of packets.
const (
	Opening Kind = iota // a TCP SYN
	Middle              // other TCP
	Loose               // UDP, or a client of affinity
)

// program is the part of the data plane that remembers flows, without its bounds in size
// and time: the tables of docs/design/13-just-enough-tracking.md.
type program struct {
	remembered map[Flow]reconcile.Member
	translated map[Flow]reconcile.Member // the flow table of NAT
	running    []*Run
	finished   map[uint32]int // closing slots: how far
}

const (
	notFinished = iota
	graceFinished
	scanFinished
)

func newProgram() program {
	return program{remembered: map[Flow]reconcile.Member{}, translated: map[Flow]reconcile.Member{}, finished: map[uint32]int{}}
}

// Run is a program that has read a packet's slot and has not acted on it yet. It continues at Finish, or before
// a Grace returns.
type Run struct {
	maps     *Maps
	flow     Flow
	kind     Kind
	service  reconcile.ServiceRecord
	tracking model.Tracking
	slot     reconcile.Slot
	previous reconcile.BackendRef
	done     bool
	backend  reconcile.BackendRef
}

// Begin lets a packet come in, up to reading its slot.
func (m *Maps) Begin(flow Flow, kind Kind) *Run {
	run := &Run{maps: m, flow: flow, kind: kind}
	at, service, ok := m.slotOf(flow)
	if !ok {
		run.done = true
		return run
	}
	run.service, run.slot, run.tracking = service, m.slots[at], service.Tracking
	if !isTracked(service) {
		run.tracking = model.TrackingNone
	}
	run.previous = run.slot.Previous
	if run.slot.PreviousBefore && service.BeforeSize > 0 {
		before := m.slots[service.BeforeOffset+index(flow.Hash, service.BeforeSize)]
		run.previous = before.Current
		if before.State == reconcile.Transition {
			run.previous = before.Previous
		}
	}
	m.running = append(m.running, run)
	return run
}

// Packet processes a packet and returns its backend; the zero reference if there is none.
func (m *Maps) Packet(flow Flow, kind Kind) reconcile.BackendRef {
	others := m.running
	to := m.Begin(flow, kind).Finish()
	m.running = others
	return to
}

// Service returns the record that a packet to the frontend finds.
func (m *Maps) Service(f model.Frontend) (reconcile.ServiceRecord, bool) {
	index, known := m.frontends[f]
	record, ok := m.services[index]
	return record, known && ok
}

// Backend returns the record at the index.
func (m *Maps) Backend(index uint32) reconcile.BackendRecord { return m.backends[index] }

// End expires the flow's entry.
func (m *Maps) End(flow Flow) { delete(m.remembered, flow) }

// EndAll expires all entries.
func (m *Maps) EndAll() {
	clear(m.remembered)
	clear(m.translated)
}

// Translate processes a packet of NAT and returns its backend: the backend of the flow or, if there is no flow,
// the backend of its slot, which the flow keeps from now on.
func (m *Maps) Translate(flow Flow) reconcile.BackendRef {
	if e, ok := m.translated[flow]; ok && m.follows(e) {
		return e.Backend
	}
	delete(m.translated, flow)
	at, service, ok := m.slotOf(flow)
	if !ok || service.Forwarding.Direct() || !m.lives(m.slots[at].Current) {
		return reconcile.BackendRef{}
	}
	m.translated[flow] = member(service, m.slots[at].Current)
	return m.slots[at].Current
}

// Translated returns the service and backend of a flow.
func (m *Maps) Translated(flow Flow) (reconcile.ServiceRecord, bool) {
	e, ok := m.translated[flow]
	return m.services[e.Service], ok && m.follows(e)
}

// EndTranslated expires a flow's entries.
func (m *Maps) EndTranslated(flow Flow) { delete(m.translated, flow) }

// follows reports whether a flow's service and backend exist.
func (m *Maps) follows(e reconcile.Member) bool {
	service, ok := m.services[e.Service]
	return ok && service.Generation == e.Generation && m.lives(e.Backend)
}

// Flows returns the flows that have an entry, with their service and backend.
func (m *Maps) Flows() map[Flow]reconcile.Member { return maps.Clone(m.remembered) }

// Remembered returns the number of flows that have an entry.
func (m *Maps) Remembered() int { return len(m.remembered) }

// Finish runs the rest of the program.
func (r *Run) Finish() reconcile.BackendRef {
	if !r.done {
		r.done, r.backend = true, r.finish()
	}
	return r.backend
}

func (r *Run) finish() reconcile.BackendRef {
	m := r.maps
	if r.tracking == model.TrackingNone {
		return r.slot.Current
	}
	always := r.tracking == model.TrackingAlways
	if r.slot.State != reconcile.Settled || always {
		if e, ok := m.remembered[r.flow]; ok {
			if m.lives(e.Backend) && e == member(r.service, e.Backend) {
				return e.Backend
			}
			delete(m.remembered, r.flow)
		}
	}
	to := r.slot.Current
	if r.slot.State == reconcile.Transition && r.kind != Opening && m.lives(r.previous) &&
		!(r.kind == Loose && r.slot.PreviousDrains) {
		to = r.previous
	}
	if (r.slot.State == reconcile.Transition || always) && m.lives(to) {
		m.remembered[r.flow] = member(r.service, to)
	}
	return to
}

// finishRuns ends the runs that a Grace waits for.
func (m *Maps) finishRuns() {
	for _, run := range m.running {
		run.Finish()
	}
	m.running = nil
}

// scan does the work of ScanRemembered.
func (m *Maps) scan() map[uint32]bool {
	found := map[uint32]bool{}
	for flow, e := range m.remembered {
		at, service, ok := m.slotOf(flow)
		if !ok || !m.lives(e.Backend) || e != member(service, e.Backend) {
			delete(m.remembered, flow)
			continue
		}
		slot := m.slots[at]
		switch {
		case slot.State != reconcile.Closing && slot.State != reconcile.Marked:
		case slot.Current != e.Backend:
			found[at] = true
		case service.Tracking != model.TrackingAlways:
			delete(m.remembered, flow)
		}
	}
	for at, how := range m.finished {
		if how == graceFinished {
			m.finished[at] = scanFinished
		}
	}
	return found
}

// endStrays does the work of EndStrays.
func (m *Maps) endStrays(members []reconcile.Member) {
	for flow, e := range m.remembered {
		if !slices.Contains(members, e) {
			delete(m.remembered, flow)
		}
	}
	for flow, e := range m.translated {
		if !slices.Contains(members, e) {
			delete(m.translated, flow)
		}
	}
}

func member(service reconcile.ServiceRecord, backend reconcile.BackendRef) reconcile.Member {
	return reconcile.Member{Service: service.Index, Generation: service.Generation, Backend: backend}
}

// disagrees reports whether a living flow of the slot remembers another backend.
func (m *Maps) disagrees(slot uint32) bool {
	for flow, e := range m.remembered {
		at, service, ok := m.slotOf(flow)
		if ok && at == slot && e.Backend != m.slots[slot].Current && m.lives(e.Backend) && e == member(service, e.Backend) {
			return true
		}
	}
	return false
}

// slotOf finds the flow's slot.
func (m *Maps) slotOf(flow Flow) (uint32, reconcile.ServiceRecord, bool) {
	service, ok := m.Service(flow.Frontend)
	if !ok || service.Size == 0 {
		return 0, service, false
	}
	return service.Offset + index(flow.Hash, service.Size), service, true
}

// index maps a hash to a slot of a table: multiply and shift, as the programs do.
func index(hash, size uint32) uint32 { return uint32(uint64(hash) * uint64(size) >> 32) }

func isTracked(r reconcile.ServiceRecord) bool {
	return model.Service{Forwarding: r.Forwarding, Tracking: r.Tracking, AffinityTimeout: r.AffinityTimeout}.Tracked()
}
