package daemon

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/value"
)

// applier makes the data plane agree with the desired state: the declarations of sources with the overrides of
// operators, the health of backends, and their next hops.
type applier struct {
	// mu guards the components of the plane and of the applier, except for their methods that may be called at
	// any time. It is held while the data plane is changed, but not while a change waits for other machines
	// (waiting).
	mu sync.Mutex

	plane      *plane
	writer     *state.Writer
	checks     *checks
	reconciler *reconcile.Reconciler
	addresses  *addresses
	losses     *losses
	retries    *retries
	deserted   desertions
	conditions *condition.Set

	stopped  bool // no change any more
	draining bool // no new flows, and no change of the configuration any more
}

// try calls do with the lock held. If another caller has the lock, done is false, and do is not called.
func (a *applier) try(do func()) (done bool) {
	if !a.mu.TryLock() {
		return false
	}
	defer a.mu.Unlock()
	do()
	return true
}

// waiting releases the lock, which the caller holds, while it calls do, and takes the lock again afterwards.
// The error says why a change may not begin or continue.
func (a *applier) waiting(do func()) error {
	if err := a.refusesChange(); err != nil {
		return err
	}
	a.mu.Unlock()
	do()
	a.mu.Lock()
	return a.refusesChange()
}

// refusesChange returns the reason why no change is allowed any more, or nil. The caller holds the lock.
func (a *applier) refusesChange() error {
	switch {
	case a.stopped:
		return control.ErrStopping
	case a.draining:
		return control.ErrDraining
	}
	return nil
}

// stop refuses every change from now on.
func (a *applier) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopped = true
}

// drain closes all services to new flows.
func (a *applier) drain() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.draining = true
	_, _ = a.apply() // a failure is tried again
}

// desired returns the services that the data plane is to have: the desired state, with the findings of health
// checks and next hops, and closed to new flows while this node drains. served are the services before they are
// closed. The caller holds the lock.
func (a *applier) desired(snapshot *state.Snapshot) (services, served []*model.Service) {
	if a.plane.server.hasVIPs() { // no notification says that a backend is this machine
		a.checks.doubt()
	}
	served = a.checks.serve(snapshot, a.plane.unreachable)
	if a.draining {
		return closedToNew(served), served
	}
	return served, served
}

// apply makes the data plane agree with the desired state, and waits for nothing. A failure raises a condition,
// and is tried again. The caller holds the lock.
func (a *applier) apply() (difference reconcile.Difference, err error) {
	snapshot := a.writer.Snapshot()
	services, served := a.desired(snapshot)
	defer func() {
		if err != nil {
			a.retries.failing(err)
		} else {
			a.retries.succeeded()
		}
	}()
	if a.plane.server.doubted.Load() { // an interface was attached to again, under its name
		if err := a.followServer(snapshot); err != nil {
			return reconcile.Difference{}, err
		}
	}
	p, now := a.plane, time.Now()
	p.routes.Follow(services)
	own, err := a.addresses.read()
	if err != nil {
		return reconcile.Difference{}, err
	}
	sources := p.routes.NATSources(own, now)
	a.addresses.sources.Store(&sources)
	before := a.checks.servedLast()
	closed := a.losses.closing(before, services)
	difference, err = a.reconciler.Apply(reconcile.Desired{
		Services: services, NATSources: sources, HostOwn: own, Limits: snapshot.Node.Limits, Settle: snapshot.Node.Timeouts.Settle,
	})
	a.checks.applied(served) // also after a partial failure, which is a condition
	p.routes.Change(a.reconciler.BackendChanges())
	if err != nil {
		p.routes.Doubt() // a backend may be put anew, at its earlier position
		return difference, fmt.Errorf("apply the configuration: %w", err)
	}
	closed(time.Now())
	if !a.draining { // then all are, and it is meant
		a.conditions.Only(condition.NoBackend, a.deserted.follow(services))
	}
	if err := p.datapath.Heartbeat(); err != nil { // from here on the hops are fresh
		return difference, err
	}
	return difference, p.announcer.want(byName(snapshot.Node.Interfaces), services, configuredOf(sources, snapshot.Node), own)
}

// followServer makes this machine a backend of the services that name it. The caller holds the lock.
func (a *applier) followServer(next *state.Snapshot) error {
	turned, err := a.plane.followServer(next)
	if turned {
		a.checks.doubt()
	}
	return err
}

// unknown returns the interfaces that the configuration in force does not name. A configured interface that has
// gone has a condition already, and is no reason to refuse other changes.
func (a *applier) unknown(interfaces []model.Interface) []model.Interface {
	known := a.writer.Snapshot().Node.Interfaces
	return slices.DeleteFunc(slices.Clone(interfaces), func(i model.Interface) bool { return slices.Contains(known, i) })
}

// applyHealth applies new findings of checks and next hops. done is false while another change is under way.
func (a *applier) applyHealth() (difference reconcile.Difference, done bool) {
	done = a.try(func() {
		if a.stopped {
			return
		}
		if applied, err := a.apply(); err == nil {
			difference = applied
		}
	})
	return difference, done
}

// again applies the present configuration once more, after a failure or because a source address has changed.
// done is false while another change is under way.
func (a *applier) again() (done bool) {
	return a.try(func() {
		if a.stopped {
			return
		}
		a.checks.doubt()
		_, _ = a.apply() // a failure is tried again
	})
}

// follow makes the data plane follow the interfaces and the host's addresses. It is called every second. The
// caller holds the lock.
func (a *applier) follow(now time.Time) {
	snapshot := a.writer.Snapshot()
	if a.plane.interfaces.refresh(snapshot.Node.Interfaces) {
		a.retries.want()
	}
	a.losses.closed.Pass(now)
	if a.addresses.differ(now) {
		a.retries.want()
	}
	a.plane.server.refresh()
}

// followPods makes the data plane follow the interfaces of pods, a few at a time. The caller holds the lock.
func (a *applier) followPods() {
	if !a.stopped && a.plane.interfaces.followPods(a.writer.Snapshot().Node.Interfaces, podTime) {
		a.retries.want()
	}
}

// settle advances slots that changed some time ago. all reports whether no slot is in transition any more. The
// caller holds the lock.
func (a *applier) settle() (marked int, all bool) {
	unsettled := a.reconciler.Settling().Transition > 0
	settling, err := a.reconciler.Settle()
	if err != nil {
		a.retries.failing(fmt.Errorf("settle slots that changed a while ago: %w", err))
		return 0, false
	}
	return settling.Marked, unsettled && settling.Transition == 0
}

// configuredOf returns the sources that the configuration names. The other sources are the host's own: an
// address that the host has lost for now, for example with its link, must not be announced on behalf of the host.
func configuredOf(sources []netip.Addr, node model.Node) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(sources), func(a netip.Addr) bool { return !slices.Contains(node.SNAT.Addresses, a) })
}

// portPool returns the range of source ports for full NAT.
func portPool(node model.Node) (value.PortRange, error) {
	if node.SNAT.Ports != (value.PortRange{}) {
		return node.SNAT.Ports, nil
	}
	return freePorts()
}
