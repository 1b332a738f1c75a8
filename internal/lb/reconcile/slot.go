package reconcile

import (
	"iter"
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// packed is a Slot in 8 bytes.
//
//	bits  0 to 27  Previous: index, generation
//	bits 28 to 55  Current: index, generation
//	bits 56 to 59  State
//	bit  60        PreviousDrains
//	bit  61        PreviousBefore
type packed uint64

const (
	packedIndexBits        = 20
	packedRefBits          = packedIndexBits + 8
	packedStateAt          = 2 * packedRefBits
	packedDrains    packed = 1 << (packedStateAt + 4)
	packedBefore    packed = 1 << (packedStateAt + 5)
)

func pack(s Slot) packed {
	p := packRef(s.Previous) | packRef(s.Current)<<packedRefBits | packed(s.State)<<packedStateAt
	if s.PreviousDrains {
		p |= packedDrains
	}
	if s.PreviousBefore {
		p |= packedBefore
	}
	return p
}

func packRef(r BackendRef) packed { return packed(r.Index) | packed(r.Generation)<<packedIndexBits }

func (p packed) slot() Slot {
	return Slot{
		State: p.state(), Current: p.current(), Previous: unpackRef(p),
		PreviousDrains: p&packedDrains != 0, PreviousBefore: p&packedBefore != 0,
	}
}

func (p packed) state() SlotState    { return SlotState(p >> packedStateAt & 0xf) }
func (p packed) current() BackendRef { return unpackRef(p >> packedRefBits) }

func unpackRef(p packed) BackendRef {
	return BackendRef{Index: uint32(p & (1<<packedIndexBits - 1)), Generation: uint8(p >> packedIndexBits)}
}

// Table is a sequence of slots in 8 bytes each: there can be millions.
type Table []packed

// NewTable returns a table of these slots.
func NewTable(slots []Slot) Table {
	t := make(Table, len(slots))
	for i, s := range slots {
		t.Set(i, s)
	}
	return t
}

// At returns the i-th slot.
func (t Table) At(i int) Slot { return t[i].slot() }

// Set replaces the i-th slot.
func (t Table) Set(i int, s Slot) { t[i] = pack(s) }

// All iterates over the slots.
func (t Table) All() iter.Seq2[int, Slot] {
	return func(yield func(int, Slot) bool) {
		for i, p := range t {
			if !yield(i, p.slot()) {
				return
			}
		}
	}
}

// nobody is the reference to no backend: index 0 is never used.
var nobody = BackendRef{}

// tracked reports whether the service's slots go through transitions.
func (r ServiceRecord) tracked() bool {
	return model.Service{Forwarding: r.Forwarding, Tracking: r.Tracking, AffinityTimeout: r.AffinityTimeout}.Tracked()
}

// before returns the region of the table before; its size is 0 if there is none.
func (r ServiceRecord) before() region { return region{r.BeforeOffset, r.BeforeSize} }

// table returns the region of the slots; its size is 0 if there are none.
func (r ServiceRecord) table() region { return region{r.Offset, r.Size} }

// members are the backends that a service has now, each with whether it drains (has weight 0) there. A backend
// that is not a member is removed, together with its flows.
type members map[BackendRef]bool

// has reports whether flows may stay with the backend.
func (m members) has(ref BackendRef) bool {
	_, ok := m[ref]
	return ok
}

// next returns the next state of a slot of a tracked service that is to name current. It implements the table
// in docs/design/13-just-enough-tracking.md. A slot that is closing is planned as the settled or marked slot
// that it will be before the plan is executed.
func (s Slot) next(current BackendRef, now members) Slot {
	switch {
	case s.State == Transition:
		// Every flow opened since the first change is remembered, so one without an
		// entry is older than all changes: previous stays.
		s.Current = current
		if !now.has(s.Previous) {
			s.Previous = nobody
		}
		s.PreviousDrains = now[s.Previous]
		return s
	case s.Current == current:
		return Slot{State: s.State, Current: current}
	case !now.has(s.Current):
		// The slot has no flows to remember.
		return Slot{State: s.State, Current: current}
	}
	return Slot{State: Transition, Current: current, Previous: s.Current, PreviousDrains: now[s.Current]}
}

// nextSlots returns the service's table after a change: current are the backends that its slots are to name,
// and record gives their position in the array. It sets the record's table before.
func (s *mirrorService) nextSlots(record *ServiceRecord, current []BackendRef, now members) Table {
	slots := make(Table, len(current))
	switch {
	case !record.tracked() || s.record.Size == 0:
		for i, ref := range current {
			slots[i] = pack(Slot{Current: ref})
		}
	case len(current) == len(s.slots):
		before := false
		for i, ref := range current {
			slot := s.slots[i].slot()
			if !s.record.tracked() {
				slot = Slot{Current: slot.Current}
			}
			slots[i] = pack(slot.next(ref, now))
			before = before || slots[i]&packedBefore != 0
		}
		if before {
			record.BeforeOffset, record.BeforeSize = s.record.BeforeOffset, s.record.BeforeSize
		}
	default:
		for i, ref := range current {
			slots[i] = pack(Slot{State: Transition, Current: ref, PreviousBefore: true})
		}
		record.BeforeOffset, record.BeforeSize = s.record.Offset, s.record.Size
		if s.tally.before == len(s.slots) && s.record.BeforeSize > 0 {
			// All flows since that table are remembered, so it still places the rest. Slots that refer to it
			// leave their transition together: either all refer to it, or none.
			record.BeforeOffset, record.BeforeSize = s.record.BeforeOffset, s.record.BeforeSize
		}
	}
	return slots
}

// without returns a table before in which flows without an entry find members only, or no backend.
func (t Table) without(now members) Table {
	after := make(Table, len(t))
	for i, p := range t {
		slot := p.slot()
		switch {
		case slot.State == Transition && !now.has(slot.Previous):
			slot.Previous, slot.PreviousDrains = nobody, false
		case slot.State != Transition && !now.has(slot.Current):
			slot.Current = nobody
		}
		after[i] = pack(slot)
	}
	return after
}

// currents returns the backends of new flows, slot by slot; nil if there are none.
func currents(slots Table) []BackendRef {
	if len(slots) == 0 || slots[0].current() == nobody {
		return nil // one slot is like all in this
	}
	refs := make([]BackendRef, len(slots))
	for i, p := range slots {
		refs[i] = p.current()
	}
	return refs
}

// nameAll adds the backends that the slots name.
func nameAll(slots Table, into map[BackendRef]bool) {
	for _, p := range slots {
		s := p.slot()
		if s.Current != nobody {
			into[s.Current] = true
		}
		if s.Previous != nobody {
			into[s.Previous] = true
		}
	}
}

// tally counts a service's slots.
type tally struct {
	transition, closing, marked int
	before                      int // slots in transition that refer to the table before
	// due is the tick since which the first slot may count its settle time, notBegun if none may. Slots that
	// refer to the table before count from the last of them.
	due, dueBefore uint32
}

// notBegun marks a slot in transition that may not be in transition in the maps yet.
const notBegun = ^uint32(0)

// setSlots records the slots that a service has now, or may have. The settle time of a slot begins (again) when
// the slot enters its transition or its current backend changes.
func (s *mirrorService) setSlots(slots Table) {
	old, begun := s.slots, s.begun
	s.slots, s.begun = slots, nil
	named := map[BackendRef]bool{}
	nameAll(slots, named)
	s.named = slices.AppendSeq(make([]BackendRef, 0, len(named)), maps.Keys(named))
	for i, slot := range slots {
		if slot.state() != Transition {
			continue
		}
		if s.begun == nil {
			s.begun = make([]uint32, len(slots))
		}
		s.begun[i] = notBegun
		if len(old) == len(slots) && old[i].state() == Transition && old[i].current() == slot.current() {
			s.begun[i] = begun[i]
		}
	}
	s.count()
}

// begin starts the settle time of the slots that are certainly in transition now.
func (s *mirrorService) begin(tick uint32) {
	for i, at := range s.begun {
		if at == notBegun && s.slots[i].state() == Transition {
			s.begun[i] = tick
		}
	}
	s.count()
}

func (s *mirrorService) count() {
	s.tally = tally{due: notBegun}
	for i, slot := range s.slots {
		switch slot.state() {
		case Closing:
			s.tally.closing++
		case Marked:
			s.tally.marked++
		case Transition:
			s.tally.transition++
			if slot&packedBefore != 0 {
				s.tally.before++
				s.tally.dueBefore = max(s.tally.dueBefore, s.begun[i])
			} else {
				s.tally.due = min(s.tally.due, s.begun[i])
			}
		}
	}
	if s.tally.before == 0 {
		s.tally.dueBefore = notBegun
	}
}
