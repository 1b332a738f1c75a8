package daemon

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/lb/status"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

// sourceFile is what the state calls the configuration file.
const sourceFile = "file"

// ofFile is what the configuration file declares.
func ofFile(config model.Config) state.Declaration {
	return state.Declaration{Source: sourceFile, Node: &config.Node, Services: config.Services}
}

// Refuses is node.Instance's.
func (d *daemon) Refuses(settings any) error {
	return limitsRefused(value.DifferentSettings(d.writer.Snapshot().Node.Settings(), settings.(*file.Parsed).Config.Node.Settings()))
}

// limitsRefused says why limits cannot change, if they are among the changes.
func limitsRefused(changes []value.SettingDifference) error {
	return value.Fixed(changes, "limits.", "limits size the maps, which are made when the data plane is first loaded; run `shunt detach` (its connections end) and start shunt with the new limits")
}

// CheckHost is node.HostChecker's: routes that are followed are not asked for.
func (d *daemon) CheckHost(settings any) {
	settings.(*file.Parsed).CheckHost(followedHost{localHost(), d.ways.Out}, false)
}

// Apply is node.Instance's.
func (d *daemon) Apply(ctx context.Context, settings any) (node.Difference, error) {
	config := settings.(*file.Parsed).Config
	d.changing.Lock()
	defer d.changing.Unlock()
	changes := value.DifferentSettings(d.writer.Snapshot().Node.Settings(), config.Node.Settings())
	difference, err := d.change(ctx, ofFile(config))
	if err != nil {
		return node.Difference{}, err
	}
	changed := node.Difference{Settings: changes, Services: status.Difference(difference)}
	if !difference.Empty() {
		changed.Text = difference.String()
	}
	return changed, nil
}

// refusesChange says why nothing may be changed any more, or is nil. The caller holds
// d.applying.
func (d *daemon) refusesChange() error {
	switch {
	case d.stopped:
		return control.ErrStopping
	case d.draining:
		return control.ErrDraining
	}
	return nil
}

// waiting does what takes its time while others may have d.applying, which the caller holds before and
// after. The error says why a change may not begin, or not go on.
func (d *daemon) waiting(do func()) error {
	if err := d.refusesChange(); err != nil {
		return err
	}
	d.applying.Unlock()
	do()
	d.applying.Lock()
	return d.refusesChange()
}

// change makes these the declarations of their sources. The order is: what may be refused first,
// new interfaces, contents, old interfaces. All of this is done for the snapshot that results, which
// has what other sources declare, too. A source that gives services alone leaves the machine as it is. The caller holds
// d.changing. What health finds is carried out while a change waits for names and next hops.
func (d *daemon) change(ctx context.Context, named ...state.Declaration) (reconcile.Difference, error) {
	d.applying.Lock()
	defer d.applying.Unlock()
	defer d.names.forget()
	var declared []state.Declaration
	var keep func()
	if err := d.waiting(func() { declared, keep = d.names.expanded(ctx, named) }); err != nil {
		return reconcile.Difference{}, err
	}
	next, err := d.writer.Try(declared...)
	if err != nil {
		return reconcile.Difference{}, err
	}
	_, come := model.Changed(d.writer.Snapshot().Configured, next.Configured)
	machine := next.Node
	ofMachine := slices.ContainsFunc(declared, func(d state.Declaration) bool { return d.Node != nil })
	var ports value.PortRange
	if ofMachine {
		if err := requireInterfaces(d.unknown(machine.Interfaces)); err != nil {
			return reconcile.Difference{}, err
		}
		if ports, err = portPool(machine); err != nil {
			return reconcile.Difference{}, err
		}
	}
	// Without overrides: a backend that is drained for good needs its room again without.
	planned, err := d.reconciler.Plan(reconcile.Desired{Services: next.Configured, Limits: machine.Limits})
	if err != nil {
		return reconcile.Difference{}, err
	}
	if err := d.datapath.Prepare(come); err != nil {
		return reconcile.Difference{}, err
	}
	// Interfaces before contents: a backend's way out must be known when it is named.
	if ofMachine {
		if err := d.interfaces.attachAll(d.writer.Snapshot().Node.Interfaces, machine.Interfaces); err != nil {
			return reconcile.Difference{}, err
		}
	}
	if err := d.followServer(next); err != nil {
		return reconcile.Difference{}, err
	}
	defer d.ways.Brought()
	first := d.checks.isFirst()
	if due := d.ways.Due(d.checks.expect(next, d.unreachable)); first || len(due) > 0 {
		err := d.waiting(func() {
			d.ways.Wait(ctx, due)
			if first {
				d.checks.awaitFirst(ctx)
			}
		})
		if err != nil {
			return reconcile.Difference{}, err
		}
		d.checks.monitor.Doubt(come) // by now it is known whether their next hops answer
	}
	if ofMachine {
		if err := d.set(machine, ports); err != nil {
			return reconcile.Difference{}, err
		}
	}
	if _, err := d.writer.Replace(declared...); err != nil {
		return reconcile.Difference{}, err
	}
	// From here on it is carried out, now or by trying again.
	keep()
	var ends []string
	if ofMachine && !first { // a source that changes often does not have all flows counted each time
		ends = d.tellCuts(planned, next.Configured)
	}
	if ofMachine {
		d.checks.reread() // the files may be new, too
	}
	difference, err := d.carryOut()
	difference.Cuts = ends
	if err != nil {
		return difference, fmt.Errorf("the change is carried out in part, and is tried again: %w", err)
	}
	if ofMachine {
		err = d.interfaces.detachOthers(machine.Interfaces)
	}
	return difference, err
}

// set makes the data plane's settings what the machine's owner says.
func (d *daemon) set(machine model.Node, ports value.PortRange) error {
	if err := d.datapath.SetSettings(machine.Timeouts, ports); err != nil {
		return err
	}
	d.datapath.SetEncapsulation(machine.Encapsulation)
	return d.sockets.follow(machine.Sockets)
}

// followServer makes this machine a backend of the services that say so.
func (d *daemon) followServer(next *state.Snapshot) error {
	before := d.server.serves()
	err := d.server.follow(next.Node, next.Configured, d.interfaces.list())
	if d.server.serves() != before {
		d.ways.Review() // the way to this machine itself is another one
		d.checks.doubt()
	}
	return err
}

// unknown are interfaces that the configuration in force does not have. One that it has and that
// has gone is a condition already, and no reason to refuse other changes.
func (d *daemon) unknown(interfaces []model.Interface) []model.Interface {
	known := d.writer.Snapshot().Node.Interfaces
	return slices.DeleteFunc(slices.Clone(interfaces), func(i model.Interface) bool { return slices.Contains(known, i) })
}

// desired is what the data plane is to have: the desired state, with what health and next hops
// say, and closed to new flows while this node drains. served are the services before they are closed.
// The caller holds d.applying.
func (d *daemon) desired() (node model.Node, services, served []*model.Service) {
	snapshot := d.writer.Snapshot()
	if d.server.serves() { // whether a backend is this machine, nobody tells
		d.checks.doubt()
	}
	served = d.checks.serve(snapshot, d.unreachable)
	if d.draining {
		return snapshot.Node, closedToNew(served), served
	}
	return snapshot.Node, served, served
}

// unreachable reports whether a backend is known to be out of reach, with direct return or without. One that is
// this machine, which decapsulates, is reached only with: at XDP nobody sees what it answers for NAT.
func (d *daemon) unreachable(direct bool, backend netip.Addr) bool {
	return d.ways.Unreachable(backend) || !direct && d.server.serves() && d.ways.Here(backend)
}

// carryOut makes the maps agree with what is desired, and waits for nothing. What fails is a condition, and tried again.
func (d *daemon) carryOut() (difference reconcile.Difference, err error) {
	node, services, served := d.desired()
	defer func() {
		if err != nil {
			d.retries.failing(err)
		} else {
			d.retries.succeeded()
		}
	}()
	if d.server.doubted.Load() { // an interface was attached to again, under its name
		err = d.followServer(d.writer.Snapshot())
	}
	if err != nil {
		return reconcile.Difference{}, err
	}
	d.ways.Follow(services)
	own, err := hostAddresses()
	if err != nil {
		return reconcile.Difference{}, err
	}
	d.own = own
	desired := reconcile.Desired{
		Services: services,
		Sources:  d.ways.Sources(own, time.Now()),
		HostOwn:  own,
		Limits:   node.Limits,
		Settle:   node.Timeouts.Settle,
	}
	d.sources.Store(&desired.Sources)
	difference, err = d.reconciler.Apply(desired)
	d.checks.carried(served) // also what has failed in part, which is a condition
	d.ways.Change(d.reconciler.BackendChanges())
	if err != nil {
		d.ways.Doubt() // a backend may be put anew, at the place that it had
		return difference, fmt.Errorf("apply the configuration: %w", err)
	}
	if !d.draining { // then all are, and it is meant
		d.conditions.Only(condition.NoBackend, d.deserted.follow(services))
	}
	if err := d.datapath.Heartbeat(); err != nil { // from here on the hops are fresh
		return difference, err
	}
	return difference, d.announcer.want(node.Interfaces, services, configuredOf(desired.Sources, node), own)
}

// configuredOf is the sources that the configuration names. Others are the host's own: one that the host has lost for
// now, with its link for example, is nothing to announce in the host's place.
func configuredOf(sources []netip.Addr, node model.Node) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(sources), func(a netip.Addr) bool { return !slices.Contains(node.SNAT.Addresses, a) })
}

// portPool is where source ports of full NAT come from.
func portPool(node model.Node) (value.PortRange, error) {
	if node.SNAT.Ports != (value.PortRange{}) {
		return node.SNAT.Ports, nil
	}
	return freePorts()
}
