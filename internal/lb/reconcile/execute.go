package reconcile

import (
	"maps"
	"net/netip"
)

// execute runs the operations of the plan, up to the first one that fails.
func (r *Reconciler) execute(p *plan) error {
	maps.Copy(r.mirror.merging, p.merges)
	for _, stage := range []func(*plan) error{r.settleDoubts, r.removeEarly, r.add, r.removeLate} {
		if err := stage(p); err != nil {
			return err
		}
	}
	return nil
}

// settleDoubts repeats failed operations for services that stay.
func (r *Reconciler) settleDoubts(p *plan) error { return each(p.settle, r.settleDoubt) }

// settleDoubt repeats the failed operations of one service.
func (r *Reconciler) settleDoubt(index uint32) error {
	service := r.mirror.services[index]
	if service.leaving { // its slots may belong to no table any more
		if err := r.grace(); err != nil {
			return err
		}
	}
	if service.slotsDoubt {
		if err := r.rewriteSlots(index, service.slots, nil); err != nil {
			return err
		}
	}
	if service.doubt {
		return r.putService(service.record, service.slots)
	}
	return nil
}

// removeEarly removes the entries that no new entry replaces.
func (r *Reconciler) removeEarly(p *plan) error {
	if err := each(p.withdrawals, r.setAddress); err != nil {
		return err
	}
	if err := each(p.earlyFrontends, r.deleteFrontend); err != nil {
		return err
	}
	if err := each(p.earlyServices, r.deleteService); err != nil {
		return err
	}
	if p.earlyGrace {
		if err := r.grace(); err != nil {
			return err
		}
	}
	if err := each(p.earlyBackends, r.deleteBackend); err != nil {
		return err
	}
	if p.earlyGraceMore {
		return r.grace()
	}
	return nil
}

// add writes new and changed entries.
func (r *Reconciler) add(p *plan) error {
	if err := each(p.sources, r.setAddress); err != nil {
		return err
	}
	if err := each(p.backends, r.putBackend); err != nil {
		return err
	}
	if len(p.named) > 0 && r.beforeNaming != nil {
		r.beforeNaming(p.named)
	}
	if err := each(p.filters, r.putFilter); err != nil {
		return err
	}
	if err := each(p.filtersGone, r.deleteFilter); err != nil {
		return err
	}
	if err := each(p.tables, r.changeTable); err != nil {
		return err
	}
	if err := each(p.clashing, r.deleteFrontend); err != nil {
		return err
	}
	if err := r.putFrontends(p.frontends); err != nil {
		return err
	}
	if err := each(p.addresses, r.setAddress); err != nil {
		return err
	}
	return each(p.lateFrontends, r.deleteFrontend)
}

func (r *Reconciler) putFrontends(frontends []frontendStep) error {
	if len(frontends) > 0 && r.aroundFrontends != nil {
		r.aroundFrontends()
		defer r.aroundFrontends()
	}
	return each(frontends, func(f frontendStep) error { return r.putFrontend(f.Frontend, f.service) })
}

// changeTable writes the slots and the record of one service.
func (r *Reconciler) changeTable(step tableStep) error {
	if service, ok := r.mirror.services[step.record.Index]; ok {
		service.from = nil // until all operations have succeeded
	}
	if err := r.changeTableOf(step); err != nil {
		return err
	}
	r.mirror.services[step.record.Index].from = step.from
	return nil
}

func (r *Reconciler) changeTableOf(step tableStep) error {
	if step.fresh {
		// Nothing points to the slots yet, so a failure leaves nothing to remember.
		if err := r.writeSlots(step.record, step.slots, run{0, len(step.slots)}); err != nil {
			return err
		}
	}
	// The record goes first if it decides how the slots are read: flows must be followed before a slot changes,
	// and must no longer be looked up before a slot settles at once.
	if step.put && !step.late {
		if err := r.putService(step.record, step.slots); err != nil {
			return err
		}
	}
	if len(step.runs) > 0 {
		if err := r.rewriteSlots(step.record.Index, step.slots, step.runs); err != nil {
			return err
		}
	}
	if step.put && step.late {
		return r.putService(step.record, step.slots)
	}
	return nil
}

// removeLate removes the entries that new entries have replaced.
func (r *Reconciler) removeLate(p *plan) error {
	if err := each(p.remnants, r.leaveRemnant); err != nil {
		return err
	}
	if err := each(p.lateServices, r.deleteService); err != nil {
		return err
	}
	if len(p.lateBackends)+len(p.filtersLate) > 0 {
		if err := r.grace(); err != nil {
			return err
		}
	}
	if err := each(p.lateBackends, r.deleteBackend); err != nil {
		return err
	}
	if err := each(p.filtersLate, r.deleteFilter); err != nil {
		return err
	}
	if len(p.forgotten) > 0 && r.beforeForgetting != nil {
		sources := make([]netip.Addr, 0, len(p.forgotten))
		for _, record := range p.forgotten {
			sources = append(sources, record.Address)
		}
		if err := r.beforeForgetting(sources); err != nil {
			return err
		}
	}
	return each(p.forgotten, r.setAddress)
}

// each calls do for every item, up to the first error.
func each[T any](items []T, do func(T) error) error {
	for _, item := range items {
		if err := do(item); err != nil {
			return err
		}
	}
	return nil
}
