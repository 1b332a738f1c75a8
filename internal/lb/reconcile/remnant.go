package reconcile

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// A service that goes because another service, the receiver, takes its frontends over leaves a remnant: its
// position and generation, without frontends and without slots. An entry of the flow table names a service by
// these, and is followed while the service and the backend live. So flows of NAT continue, and the receiver
// gets the new ones. A remnant goes when its flows have ended, when no receiver is left, or when another
// service needs its position.
//
// In the maps a remnant has its own name, and as its seed the complement of its receiver's seed: without slots
// it places nothing. So a daemon that starts finds the remnant, even if the receiver has the same name.
//
// With direct return there is no remnant: only the slots tell where a flow is. With affinity there is none
// either, neither of the service nor for the receiver: entries of clients are trusted again when a frontend
// comes back.

// remnant is the mirror's knowledge of a remnant.
type remnant struct {
	former   serviceKey // the service that it was
	receiver serviceKey
	since    uint32 // tick
}

// remnantLooks is how often flows of remnants are counted within the settle time.
const remnantLooks = 4

// remnantStep makes a service a remnant, or gives a remnant another receiver.
type remnantStep struct {
	index    uint32
	receiver serviceKey
}

// Remnant reports whether the service is a remnant, because another service has its frontends now: it keeps its
// flows, and gets no others.
func (r ServiceRecord) Remnant() bool {
	return r.Size == 0 && !r.Forwarding.Direct() && r.Seed != serviceKey{r.Name, false}.seed() && r.Seed != serviceKey{r.Name, true}.seed()
}

// adoptRemnants finds the former services of the remnants, and the services that may have flows of them.
func (m *mirror) adoptRemnants(tick uint32) {
	bySeed := map[uint32]uint32{}
	for index, s := range m.services {
		if s.remnant == nil {
			bySeed[s.record.Seed] = index
		}
	}
	for index := range m.remnants {
		s := m.services[index]
		s.remnant = &remnant{former: serviceKey{name: s.record.Name}, since: tick}
		to, found := bySeed[^s.record.Seed]
		if !found {
			continue // the next plan has it go
		}
		s.remnant.receiver = keyOf(m.services[to].record)
		s.remnant.former.ipv6 = s.remnant.receiver.ipv6
		m.lend([]uint32{index}, to)
		if again, ok := m.byKey[s.remnant.former]; ok {
			m.lend([]uint32{index}, again)
		}
	}
}

// receivers returns the positions of services that have got frontends of a service, or of remnants among these.
func (m *mirror) receivers(index uint32) []uint32 {
	found, seen := map[uint32]bool{}, map[uint32]bool{index: true}
	for next := []uint32{index}; len(next) > 0; next = next[1:] {
		lender := m.services[next[0]]
		for ref := range lender.lent {
			receiver := m.services[ref.index]
			switch {
			case receiver == nil || receiver.record.Generation != ref.generation:
				delete(lender.lent, ref)
			case seen[ref.index]:
			case receiver.remnant != nil:
				seen[ref.index], next = true, append(next, ref.index)
			default:
				seen[ref.index], found[ref.index] = true, true
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// revivable returns the position of the remnant that a returning service has left.
func (m *mirror) revivable(want *targetService) (uint32, bool) {
	for _, index := range slices.Sorted(maps.Keys(m.remnants)) {
		s := m.services[index]
		if s.remnant.former == want.serviceKey && canInherit(s, want) {
			return index, true
		}
	}
	return 0, false
}

// canMerge reports whether flows of a service can continue beside the flows of a service that takes its
// frontends over.
func canMerge(former *mirrorService, want *targetService) bool {
	return former.remnant == nil && !former.leaving && goOn(former.record, want)
}

// matchMerges makes services that go, and have no heir, leave a remnant if others take their frontends over.
func (p *planner) matchMerges() {
	for former, key := range p.mirror.merging { // a change that failed has moved frontends
		if half, ok := p.desired.find(key); ok && p.unwanted[former] && canMerge(p.mirror.services[former], half) {
			p.merge(former, key)
		}
	}
	for _, t := range p.takings(canMerge, true) {
		if p.unwanted[t.former] {
			p.merge(t.former, t.by)
		}
	}
}

func (p *planner) merge(former uint32, receiver serviceKey) {
	p.merges[former] = receiver
	delete(p.unwanted, former)
	p.remnants = append(p.remnants, remnantStep{former, receiver})
	p.leaves = true
}

// matchRemnants decides which remnants stay, and for which receiver.
func (p *planner) matchRemnants() {
	spare := p.givenUp()
	for _, index := range slices.Sorted(maps.Keys(p.mirror.remnants)) {
		s := p.mirror.services[index]
		if _, revived := p.takenBy[index]; revived {
			continue
		}
		receiver, ok := p.receiverOf(index)
		if !ok || s.leaving || spare[index] {
			p.unwanted[index] = true
			p.ended = append(p.ended, s.remnant.former.name)
			continue
		}
		delete(p.unwanted, index)
		p.leaves = p.leaves || receiver != s.remnant.receiver || slices.ContainsFunc(p.mirror.receivers(index), func(r uint32) bool { return p.unwanted[r] })
		if receiver != s.remnant.receiver {
			p.remnants = append(p.remnants, remnantStep{index, receiver})
		}
	}
	slices.Sort(p.ended)
	p.ended = slices.Compact(p.ended)
	slices.SortFunc(p.remnants, func(a, b remnantStep) int { return int(a.index) - int(b.index) })
}

// givenUp returns the remnants whose positions are needed: the oldest.
func (p *planner) givenUp() map[uint32]bool {
	all := slices.SortedFunc(maps.Keys(p.mirror.remnants), func(a, b uint32) int {
		if first, second := p.mirror.services[a].remnant.since, p.mirror.services[b].remnant.since; first != second {
			return int(first) - int(second)
		}
		return int(a) - int(b)
	})
	spare := map[uint32]bool{}
	for _, index := range all {
		if _, revived := p.takenBy[index]; !revived && len(spare) < p.short {
			spare[index] = true
		}
	}
	return spare
}

// receiverOf returns a service that has frontends of a remnant after the change: the present receiver, if it
// has some.
func (p *planner) receiverOf(index uint32) (serviceKey, bool) {
	former := p.mirror.services[index]
	all := p.mirror.receivers(index)
	if present, ok := p.mirror.byKey[former.remnant.receiver]; ok {
		all = append([]uint32{present}, all...)
	}
	for _, receiver := range all {
		key := keyOf(p.mirror.services[receiver].record)
		if p.unwanted[receiver] {
			continue
		}
		for _, now := range []map[uint32]serviceKey{p.takenBy, p.merges} {
			if other, ok := now[receiver]; ok {
				key = other
			}
		}
		if half, ok := p.desired.find(key); ok && goOn(former.record, half) {
			return key, true
		}
	}
	// The service may have come again without getting its position back.
	half, ok := p.desired.find(former.remnant.former)
	return former.remnant.former, ok && goOn(former.record, half)
}

// leaveRemnant removes frontends and slots from a service, but not its flows.
func (r *Reconciler) leaveRemnant(step remnantStep) error {
	m := &r.mirror
	s := m.services[step.index]
	if s.remnant == nil {
		s.remnant = &remnant{former: keyOf(s.record), since: r.nextTick()}
		m.remnants[step.index] = true
		if m.byKey[s.remnant.former] == step.index {
			delete(m.byKey, s.remnant.former)
		}
	}
	s.remnant.receiver = step.receiver
	m.lend([]uint32{step.index}, m.byKey[step.receiver])
	s.from = nil
	return r.putService(ServiceRecord{
		Index: step.index, Generation: s.record.Generation, Name: s.record.Name, Forwarding: s.record.Forwarding, Seed: ^step.receiver.seed(),
		Tracking: model.TrackingAuto, Policy: model.Policy{TCPMSS: s.record.Policy.TCPMSS},
	}, nil)
}

// nextRemnantLook returns the time at which flows of remnants are to be counted again, if there are any. A
// remnant that is younger than the settle time stays, because flows that have not been answered yet are not
// counted.
func (r *Reconciler) nextRemnantLook() (next time.Time, ok bool) {
	if !r.settleKnown {
		return next, false
	}
	for index := range r.mirror.remnants {
		over := r.remnantSettles(r.mirror.services[index])
		if !ok || over.Before(next) {
			next, ok = over, true
		}
	}
	if again := r.counted.Add(max(r.settleTime/remnantLooks, time.Second)); ok && next.Before(again) {
		next = again
	}
	return next, ok
}

func (r *Reconciler) remnantSettles(s *mirrorService) time.Time {
	return r.start.Add(time.Duration(s.remnant.since)*tickLength + r.settleTime)
}

// endRemnants ends remnants whose flows have ended, if it is time to count.
func (r *Reconciler) endRemnants() error {
	if next, ok := r.nextRemnantLook(); !ok || r.clock().Before(next) {
		return nil
	}
	flows, err := r.maps.ServiceFlows()
	if err != nil {
		return fmt.Errorf("count the flows of services that have been merged into others: %w", err)
	}
	r.counted = r.clock()
	for _, index := range slices.Sorted(maps.Keys(r.mirror.remnants)) {
		if flows[index] == 0 && !r.counted.Before(r.remnantSettles(r.mirror.services[index])) {
			if err := r.deleteService(index); err != nil {
				return err
			}
		}
	}
	return nil
}
