package reconcile

import (
	"fmt"
	"slices"
	"time"
)

// tickLength is the unit of the times at which slots changed: with it, 4 bytes last for 13 years.
const tickLength = 100 * time.Millisecond

// scansPerSettle is how often marked slots are examined again within the settle time.
const scansPerSettle = 4

// Settling counts the remaining transitions.
type Settling struct {
	Transition int // slots in transition, or closing
	Marked     int // slots with remembered flows that disagree with them
	// Next is the time at which Settle has work again, by the reconciler's clock; zero: not before the next
	// Apply.
	Next time.Time
}

// Settle does the work that is due now: slots that have been in transition for the settle time become settled
// or marked, marked slots are examined again, and a table before that no slot refers to is freed. It is cheap
// when nothing is due. After an error it may be called again, at once or later: nothing is lost, and slots stay
// closing until a call succeeds. Before the first Apply it only finishes the work that an earlier run began,
// because the settle time is not known.
func (r *Reconciler) Settle() (Settling, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	defer r.publishSettling()
	if !r.adopted {
		if _, err := r.adopt(); err != nil {
			return Settling{}, err
		}
	}
	if err := r.settleDue(); err != nil {
		r.doubt()
		return r.settling(), fmt.Errorf("settle slots: %w: the finished steps stay in force, try again for the rest", err)
	}
	return r.settling(), nil
}

// Settling returns the transitions that remained after the last Apply or Settle. It does not wait for a call
// that is under way. Before the first call all fields are zero.
func (r *Reconciler) Settling() Settling {
	if s := r.published.Load(); s != nil {
		return *s
	}
	return Settling{}
}

func (r *Reconciler) publishSettling() {
	s := r.settling()
	r.published.Store(&s)
}

func (r *Reconciler) settleDue() error {
	now := r.tick()
	doubtful := r.mirror.where(func(s *mirrorService) bool { return s.doubt || s.slotsDoubt })
	if err := each(doubtful, r.settleDoubt); err != nil {
		return err
	}
	// Programs treat closing slots correctly for a moment only: all close, then all wait, then all continue.
	for _, index := range r.mirror.where(func(s *mirrorService) bool { return r.isDue(s, now) }) {
		if err := r.closeSlots(index, now); err != nil {
			return err
		}
	}
	switch {
	case r.mirror.closing():
		if err := r.finishClosing(); err != nil {
			return err
		}
	case r.markedDue():
		if err := r.scan(); err != nil {
			return err
		}
	}
	if err := r.endRemnants(); err != nil {
		return err
	}
	for _, index := range r.mirror.where((*mirrorService).beforeIsOver) {
		service := r.mirror.services[index]
		record := service.record
		record.BeforeOffset, record.BeforeSize = 0, 0
		if err := r.putService(record, service.slots); err != nil {
			return err
		}
	}
	return nil
}

// where lists the unsettled services for which is returns true, except for half deleted ones.
func (m *mirror) where(is func(*mirrorService) bool) []uint32 {
	var found []uint32
	for index := range m.unsettled {
		if service := m.services[index]; !service.leaving && is(service) {
			found = append(found, index)
		}
	}
	slices.Sort(found)
	return found
}

// beforeIsOver reports that there is a table before to which no slot refers any more.
func (s *mirrorService) beforeIsOver() bool {
	return s.record.BeforeSize > 0 && s.tally.before == 0 && s.tally.closing == 0
}

// tick returns the present time, rounded down.
func (r *Reconciler) tick() uint32 { return uint32(r.clock().Sub(r.start) / tickLength) }

// nextTick returns the present time, rounded up: everything that has begun by now began no later.
func (r *Reconciler) nextTick() uint32 {
	return uint32((r.clock().Sub(r.start) + tickLength - 1) / tickLength)
}

// settleTicks returns the service's settle time, rounded up. A client of affinity may be idle for longer than
// other flows.
func (r *Reconciler) settleTicks(s *mirrorService) uint64 {
	settle := max(r.settleTime, s.record.AffinityTimeout)
	return uint64((settle + tickLength - 1) / tickLength)
}

// over reports whether a settle time that began at the tick is over now.
func (r *Reconciler) over(s *mirrorService, begun, now uint32) bool {
	return r.settleKnown && begun != notBegun && uint64(begun)+r.settleTicks(s) <= uint64(now)
}

func (r *Reconciler) isDue(s *mirrorService, now uint32) bool {
	return r.over(s, s.tally.due, now) || r.over(s, s.tally.dueBefore, now)
}

func (r *Reconciler) markedDue() bool {
	next, ok := r.nextScan()
	return ok && !r.clock().Before(next)
}

// nextScan returns the time at which marked slots are examined again, if there are any.
func (r *Reconciler) nextScan() (time.Time, bool) {
	marked := func(s *mirrorService) bool { return s.tally.marked > 0 }
	if !r.settleKnown || len(r.mirror.where(marked)) == 0 {
		return time.Time{}, false
	}
	return r.scanned.Add(r.settleTime / scansPerSettle), true
}

// closing reports whether a scan is due before anything else.
func (m *mirror) closing() bool {
	return len(m.where(func(s *mirrorService) bool { return s.tally.closing > 0 })) > 0
}

// closeSlots stops programs from remembering flows in the slots whose time is over.
func (r *Reconciler) closeSlots(index, now uint32) error {
	service := r.mirror.services[index]
	return r.changeStates(index, func(i int, slot Slot) SlotState {
		begun := service.tally.dueBefore
		if !slot.PreviousBefore && service.begun != nil {
			begun = service.begun[i]
		}
		if slot.State == Transition && r.over(service, begun, now) {
			return Closing
		}
		return slot.State
	})
}

// changeStates advances slots to their next state.
func (r *Reconciler) changeStates(index uint32, state func(int, Slot) SlotState) error {
	service := r.mirror.services[index]
	after := slices.Clone(service.slots)
	for i, p := range service.slots {
		slot := p.slot()
		if next := state(i, slot); next != slot.State {
			after[i] = pack(Slot{State: next, Current: slot.Current})
		}
	}
	if runs := changedRuns(service.slots, after); len(runs) > 0 {
		return r.rewriteSlots(index, after, runs)
	}
	return nil
}

// finishClosing finishes all closing slots: when no program can remember more flows there, the remembered flows
// decide which slots become marked.
func (r *Reconciler) finishClosing() error {
	closing := r.mirror.where(func(s *mirrorService) bool { return s.tally.closing > 0 })
	for _, index := range closing {
		if err := r.settleDoubt(index); err != nil {
			return err
		}
		if r.mirror.services[index].tally.before == 0 {
			continue
		}
		// An earlier run was killed while it closed these slots. They close together, so the time of the others
		// is over too.
		err := r.changeStates(index, func(_ int, slot Slot) SlotState {
			if slot.PreviousBefore {
				return Closing
			}
			return slot.State
		})
		if err != nil {
			return err
		}
	}
	if err := r.grace(); err != nil {
		return err
	}
	return r.scan()
}

// scan sorts closing and marked slots into settled and marked ones.
func (r *Reconciler) scan() error {
	found, err := r.maps.ScanRemembered()
	if err != nil {
		return fmt.Errorf("scan the remembered flows: %w", err)
	}
	r.scanned = r.clock()
	scanned := r.mirror.where(func(s *mirrorService) bool { return s.tally.closing+s.tally.marked > 0 })
	for _, index := range scanned {
		offset := r.mirror.services[index].record.Offset
		err := r.changeStates(index, func(i int, slot Slot) SlotState {
			switch {
			case slot.State != Closing && slot.State != Marked:
				return slot.State
			case found[offset+uint32(i)]:
				return Marked
			}
			return Settled
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// settling counts the remaining transitions, and finds the time at which to continue.
func (r *Reconciler) settling() Settling {
	var left Settling
	sooner := func(at time.Time) {
		if left.Next.IsZero() || at.Before(left.Next) {
			left.Next = at
		}
	}
	for index := range r.mirror.unsettled {
		service := r.mirror.services[index]
		if service.leaving {
			continue
		}
		left.Transition += service.tally.transition + service.tally.closing
		left.Marked += service.tally.marked
		if service.tally.closing > 0 || service.doubt || service.slotsDoubt || service.beforeIsOver() {
			sooner(r.clock())
		}
		for _, begun := range []uint32{service.tally.due, service.tally.dueBefore} {
			if r.settleKnown && begun != notBegun {
				ticks := uint64(begun) + r.settleTicks(service)
				sooner(r.start.Add(time.Duration(ticks) * tickLength))
			}
		}
	}
	if next, ok := r.nextScan(); ok {
		sooner(next)
	}
	if next, ok := r.nextRemnantLook(); ok {
		sooner(next)
	}
	return left
}
