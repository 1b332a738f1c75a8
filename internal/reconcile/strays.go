package reconcile

import (
	"fmt"
	"slices"

	"github.com/shunt-lb/shunt/internal/model"
)

// endStrays ends the flows of backends that have left their service and are another's still: those
// that are gone altogether have no flows, for programs look at the generation. It comes after the
// plan, when slots lead to a service's own backends alone, and when no program can remember
// otherwise.
func (r *Reconciler) endStrays(p *plan) error {
	if r.served == nil || p.leftAlive(r.served) {
		if r.mirror.rerouted {
			if err := r.grace(); err != nil {
				return err
			}
		}
		if err := r.maps.EndStrays(p.members()); err != nil {
			return fmt.Errorf("end the flows of backends that have left a service: %w", err)
		}
	}
	r.served = map[serviceKey][]model.BackendAddress{}
	for _, service := range p.target.services {
		r.served[service.serviceKey] = service.backends
	}
	return nil
}

// leftAlive reports whether a backend leaves a service that stays, and stays itself.
func (p *plan) leftAlive(served map[serviceKey][]model.BackendAddress) bool {
	for _, service := range p.target.services {
		before := served[service.serviceKey]
		if slices.Equal(before, service.backends) {
			continue
		}
		now := map[model.BackendAddress]bool{}
		for _, b := range service.backends {
			now[b] = true
		}
		for _, b := range before {
			if _, stays := p.refs[b]; stays && !now[b] {
				return true
			}
		}
	}
	return false
}

// members are the backends of all services.
func (p *plan) members() (all []Member) {
	for _, service := range p.target.services {
		tenant := p.tenants[service.serviceKey]
		for _, b := range service.backends {
			all = append(all, Member{tenant.index, tenant.generation, p.refs[b]})
		}
	}
	return all
}
