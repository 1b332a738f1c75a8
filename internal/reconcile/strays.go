package reconcile

import (
	"fmt"
	"slices"

	"github.com/shunt-lb/shunt/internal/model"
)

// keepers are the backends that flows of the service may be known to be with: none where nothing
// keeps them. What is remembered from before must not be believed when something does again, because
// flows have gone where their slots led them in between.
func (s targetService) keepers() []model.BackendAddress {
	if s.forwarding.Direct() && s.tracking == model.TrackingNone {
		return nil
	}
	return s.backends
}

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
		r.served[service.serviceKey] = service.keepers()
	}
	return nil
}

// leftAlive reports whether a backend leaves the keepers of a service that stays, and stays itself.
func (p *plan) leftAlive(served map[serviceKey][]model.BackendAddress) bool {
	for _, service := range p.target.services {
		before, keepers := served[service.serviceKey], service.keepers()
		if slices.Equal(before, keepers) {
			continue
		}
		now := map[model.BackendAddress]bool{}
		for _, b := range keepers {
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

// members are the backends of all services that keep flows.
func (p *plan) members() (all []Member) {
	for _, service := range p.target.services {
		tenant := p.tenants[service.serviceKey]
		for _, b := range service.keepers() {
			all = append(all, Member{tenant.index, tenant.generation, p.refs[b]})
		}
	}
	return all
}
