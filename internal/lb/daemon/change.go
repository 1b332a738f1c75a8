package daemon

import (
	"context"
	"fmt"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/value"
)

// change makes declarations, whose names have addresses, the declarations of their sources. The order is: all
// steps that may be refused, new interfaces, contents, old interfaces. All steps use the snapshot that results,
// which also has the declarations of other sources. A source that declares services alone does not change the
// machine's settings. accepted is called when no refusal can follow. The caller holds the lock. The findings of
// health checks are applied while a change waits for next hops.
func (a *applier) change(ctx context.Context, declared []state.Declaration, accepted func()) (reconcile.Difference, error) {
	next, err := a.writer.Try(declared...)
	if err != nil {
		return reconcile.Difference{}, err
	}
	_, come := model.Changed(a.writer.Snapshot().Configured, next.Configured)
	machine := next.Node
	ofMachine := slices.ContainsFunc(declared, func(d state.Declaration) bool { return d.Node != nil })
	var ports value.PortRange
	if ofMachine {
		if err := requireInterfaces(a.unknown(machine.Interfaces)); err != nil {
			return reconcile.Difference{}, err
		}
		if ports, err = portPool(machine); err != nil {
			return reconcile.Difference{}, err
		}
	}
	// The plan ignores overrides: a backend that is drained for good needs room again when the drain ends.
	planned, err := a.reconciler.Plan(reconcile.Desired{Services: next.Configured, Limits: machine.Limits})
	if err != nil {
		return reconcile.Difference{}, err
	}
	if err := a.plane.datapath.Prepare(come); err != nil {
		return reconcile.Difference{}, err
	}
	a.plane.server.expect(next)
	// Interfaces come before contents: the interface that leads to a backend must be known before a record
	// names it.
	if ofMachine {
		if err := a.plane.interfaces.attachAll(a.writer.Snapshot().Node.Interfaces, machine.Interfaces); err != nil {
			return reconcile.Difference{}, err
		}
	}
	if err := a.followServer(next); err != nil {
		return reconcile.Difference{}, err
	}
	defer a.plane.routes.Brought()
	first := a.checks.isFirst()
	if err := a.awaitBackends(ctx, next, come, first); err != nil {
		return reconcile.Difference{}, err
	}
	if ofMachine {
		if err := a.plane.set(machine, ports); err != nil {
			return reconcile.Difference{}, err
		}
	}
	if _, err := a.writer.Replace(declared...); err != nil {
		return reconcile.Difference{}, err
	}
	// From here on the change is applied, at once or by trying again.
	accepted()
	var ends []reconcile.Cut
	if ofMachine && !first { // a source that changes often does not have all flows counted each time
		ends = a.losses.announce(planned, a.checks.servedLast(), next.Configured)
	}
	if ofMachine {
		a.checks.reread() // the files may be new, too
	}
	difference, err := a.apply()
	difference.Cuts = ends
	if err != nil {
		return difference, fmt.Errorf("the change was applied in part, and the rest is tried again: %w", err)
	}
	if ofMachine {
		err = a.plane.interfaces.detachOthers(machine.Interfaces)
	}
	return difference, err
}

// awaitBackends waits for the next hops of backends that are new in next, and at the first change also for the
// first results of health checks. come are the services that differ. The caller holds the lock, which is
// released during the wait.
func (a *applier) awaitBackends(ctx context.Context, next *state.Snapshot, come []*model.Service, first bool) error {
	due := a.plane.routes.Due(a.checks.expect(next, a.plane.unreachable))
	if !first && len(due) == 0 {
		return nil
	}
	err := a.waiting(func() {
		a.plane.routes.Wait(ctx, due)
		if first {
			a.checks.awaitFirst(ctx)
		}
	})
	if err != nil {
		return err
	}
	a.checks.monitor.Doubt(come) // by now it is known whether their next hops answer
	return nil
}

// foresee plans declarations, whose names have addresses, and changes nothing. The caller holds the lock.
func (a *applier) foresee(declared []state.Declaration) (reconcile.Difference, error) {
	next, err := a.writer.Try(declared...)
	if err != nil {
		return reconcile.Difference{}, err
	}
	if err := requireInterfaces(a.unknown(next.Node.Interfaces)); err != nil {
		return reconcile.Difference{}, err
	}
	if _, err := portPool(next.Node); err != nil {
		return reconcile.Difference{}, err
	}
	services := a.checks.monitor.Serve(next.Services, false, a.plane.unreachable)
	difference, err := a.reconciler.Plan(reconcile.Desired{Services: services, NATSources: a.addresses.applied(), HostOwn: a.addresses.own, Limits: next.Node.Limits})
	if err != nil {
		return reconcile.Difference{}, err
	}
	before := a.checks.servedLast()
	difference.Cuts = append(a.losses.cuts(difference, before, services), a.losses.foreseeClosing(before, services)...)
	return difference, nil
}
