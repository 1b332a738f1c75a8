package reconcile

import (
	"fmt"
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// keeps reports whether anything keeps flows of the service. Entries remembered earlier must not be trusted
// when the service keeps flows again, because flows have followed their slots in between.
func (s *targetService) keeps() bool {
	return !s.forwarding.Direct() || s.tracking != model.TrackingNone
}

// open returns the backends that flows of the service may be with.
func (s *targetService) open() []model.BackendAddress {
	if !slices.ContainsFunc(s.down, func(down bool) bool { return down && s.closesDown }) {
		return s.backends
	}
	var open []model.BackendAddress
	for i, b := range s.backends {
		if !s.closed(i) {
			open = append(open, b)
		}
	}
	return open
}

// keepers returns the backends with which flows of the service may be recorded.
func (s *targetService) keepers() []model.BackendAddress {
	if s.keeps() {
		return s.open()
	}
	return nil
}

// endStrays ends the flows of backends that have left their service and still belong to another one: backends
// that are gone altogether have no flows, because programs check the generation. It runs after the plan, when
// slots lead only to a service's own backends, and when no program can still remember other flows.
func (r *Reconciler) endStrays(p *plan) error {
	if !r.strays && !p.leftAlive() {
		return nil
	}
	if r.mirror.rerouted {
		if err := r.grace(); err != nil {
			return err
		}
	}
	if err := r.leaveTablesBefore(p.desired); err != nil {
		return err
	}
	if err := r.maps.EndStrays(r.mirror.members(p.desired)); err != nil {
		return fmt.Errorf("end the flows of backends that have left a service: %w", err)
	}
	return nil
}

// leaveTablesBefore removes backends that have left their service from its table before, where flows without an
// entry would find them again. No program uses such a table as the present one any more.
func (r *Reconciler) leaveTablesBefore(desired *register) error {
	for _, name := range slices.Sorted(maps.Keys(desired.services)) {
		for i := range desired.services[name].halves {
			half := &desired.services[name].halves[i]
			service := r.mirror.services[r.mirror.byKey[half.serviceKey]]
			if len(service.before) == 0 {
				continue
			}
			now := members{}
			for _, b := range half.open() {
				now[r.mirror.backends[r.mirror.byAddress[b]].BackendRef] = false
			}
			after := service.before.without(now)
			runs := changedRuns(service.before, after)
			for _, run := range runs {
				offset := service.record.BeforeOffset + uint32(run.first)
				if err := r.maps.WriteSlots(offset, after[run.first:run.end]); err != nil {
					return fmt.Errorf("take backends that have left the service %s out of its table before: %w", half.serviceKey, err)
				}
			}
			service.before = after
			r.mirror.rerouted = r.mirror.rerouted || len(runs) > 0
		}
	}
	if !r.mirror.rerouted {
		return nil
	}
	return r.grace()
}

// leftAlive reports whether a backend leaves the keepers of a service that stays, and itself stays: another
// service has it, or it is down in a service that closes flows of down backends.
func (p *plan) leftAlive() bool {
	if p.leaves {
		return true
	}
	before := map[serviceKey]*targetService{}
	for _, half := range halvesIn(p.change.gone) {
		before[half.serviceKey] = half
	}
	for _, half := range p.scope.services {
		former := half.serviceKey
		if heir, ok := p.heirs[former]; ok {
			former = heir
		}
		was, known := before[former]
		if !known || !was.keeps() && !half.keeps() {
			continue
		}
		// This also holds if nothing kept flows before: the record says that flows are to be remembered while
		// slots still name backends that leave.
		now := map[model.BackendAddress]bool{}
		for _, b := range half.keepers() {
			now[b] = true
		}
		for _, b := range was.open() {
			if p.desired.names(b) && !now[b] {
				return true
			}
		}
	}
	return false
}

// members returns the backends of all services that keep flows.
func (m *mirror) members(desired *register) (all []Member) {
	for _, name := range slices.Sorted(maps.Keys(desired.services)) {
		for i := range desired.services[name].halves {
			half := &desired.services[name].halves[i]
			index := m.byKey[half.serviceKey]
			generation := m.services[index].record.Generation
			for _, b := range half.keepers() {
				all = append(all, Member{index, generation, m.backends[m.byAddress[b]].BackendRef})
			}
			all = append(all, m.borrowed(index, desired)...)
		}
	}
	for _, index := range slices.Sorted(maps.Keys(m.remnants)) {
		all = append(all, m.borrowed(index, desired)...)
	}
	return all
}
