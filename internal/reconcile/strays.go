package reconcile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// endStrays ends the flows of backends that have left their service and are another's still: those
// that are gone altogether have no flows, for programs look at the generation. It comes after the
// plan, when slots lead to a service's own backends alone, and when no program can remember
// otherwise.
func (r *Reconciler) endStrays(p *plan) error {
	if r.members != nil && !r.leftAlive(p.members) {
		r.members = p.members
		return nil
	}
	if r.mirror.rerouted {
		if err := r.grace(); err != nil {
			return err
		}
	}
	order := func(a, b Member) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Backend.Index, b.Backend.Index))
	}
	if err := r.maps.EndStrays(slices.SortedFunc(maps.Keys(p.members), order)); err != nil {
		return fmt.Errorf("end the flows of backends that have left a service: %w", err)
	}
	r.members = p.members
	return nil
}

// leftAlive reports whether a backend has left a service that lives, and lives itself.
func (r *Reconciler) leftAlive(now map[Member]bool) bool {
	for m := range r.members {
		service, serves := r.mirror.services[m.Service]
		backend, lives := r.mirror.backends[m.Backend.Index]
		if !now[m] && serves && service.record.Generation == m.Generation && lives && backend.BackendRef == m.Backend {
			return true
		}
	}
	return false
}
