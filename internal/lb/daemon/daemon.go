// Package daemon is the balancer as a node runs it: it loads the data plane, keeps it agreeing
// with the configuration and with the network around it, and removes it again.
//
//	sources ─► changes ─► state ─► applier ─┬─► interfaces ───────────┐
//	           overrides ───┘        ▲  ▲   ├─► reconcile ─► route ───┼─► datapath
//	                       checks ───┘  │   └─► announcements ────────┘
//	                       loop ────────┘ every second, and after failures
//
// The applier has the only lock. A change releases it while it waits for other machines: for names, next hops and the first
// results of checks. The lock is held during waits for this machine: for a grace period, a program that loads, the disk,
// `shunt chain`.
//
// All data that decide about packets are in pinned maps. Killing this process at any moment
// loses nothing: the programs continue, and the next start adopts the maps.
package daemon

import (
	"context"
	"errors"
	"net/netip"
	"sync"

	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/resolve"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

// Options are for tests, and for programs that declare services by other means than the file.
type Options struct {
	// Sources declare services in addition to the file.
	Sources []Source
	// Taken lists the source ports that other programs on this host use towards backends, so that new flows of
	// full NAT avoid them; nil: there are none. It is called before the balancer begins, and then every ten
	// seconds.
	Taken func() ([]store.SourcePort, error)
	// Networks is called with the networks of the file's interfaces, at the start and whenever they have changed. It must not wait. nil: it is
	// not called.
	Networks func([]netip.Prefix)
	// Encapsulation is called with the file's encapsulation: at the start, before First of any source, and whenever it has changed. It
	// must not wait. nil: it is not called.
	Encapsulation func(model.Encapsulation)
	// Through wraps the data plane for the reconciler, to count its writes or to make them fail; nil: no
	// wrapper.
	Through func(reconcile.Maps) reconcile.Maps
}

// Product is the balancer.
func Product(opts Options) node.Product {
	part := file.Part
	if len(opts.Sources) > 0 {
		part = file.PartBesideSources
	}
	return node.Product{
		Name: file.Name, Part: part, Remove: remove, Left: Instances, Needs: needs,
		CheckHost: func(settings any, how node.HostCheck) {
			host := localHost()
			if how.Command {
				host.XDP = occupant
			}
			settings.(*file.Parsed).CheckHost(host, how.Strict)
		},
		Describe: func(settings any) (string, []string) { return settings.(*file.Parsed).Describe() },
		Open: func(ctx context.Context, host *node.Host, settings any) (node.Instance, error) {
			return open(ctx, host, opts, settings.(*file.Parsed).Config)
		},
	}
}

// occupant names the XDP program that keeps shunt's program off an interface. A running shunt is no fault,
// because `shunt check` may check its next file.
func occupant(iface string) (whose, takeOff string, err error) {
	o, err := kernel.OccupantOf(iface)
	switch {
	case err != nil || o == nil || o.IsOurs() && o.Interface == iface:
		return "", "", err
	case o.Unread != nil:
		return o.String(), "", nil
	}
	return o.String(), o.TakeOff(), nil
}

// Parts of the daemon whose progress the watchdog watches.
const (
	partLoop     = "the balancer"
	partChanges  = "changes of the data plane" // no change takes for ever
	partNextHops = "next hops"
)

// daemon is one running instance: its components, and the loop that drives them.
type daemon struct {
	host    *node.Host
	sources []Source

	plane     *plane
	applier   *applier
	changes   *changes
	overrides *overrides
	taken     *takenPorts
	views     views

	// Fields of the loop.
	pulse  *pulse
	uppers uppers
	beats  int // number of heartbeats since the start, without those during a change

	end     func()         // ends the goroutines, and waits for them
	running sync.WaitGroup // the loop, changes, and sources
}

// open starts the balancer. If it fails, a predecessor's data plane continues unchanged.
func open(ctx context.Context, host *node.Host, opts Options, config model.Config) (*daemon, error) {
	d := &daemon{host: host, sources: opts.Sources, plane: &plane{instance: host.Instance, log: host.Log},
		uppers: uppers{conditions: host.Conditions, log: host.Log}}
	d.overrides = openOverrides(host)
	if err := d.start(ctx, opts, config); err != nil {
		return nil, errors.Join(err, d.abandon())
	}
	d.beat() // earlier missed frames and shortages do not count
	d.host.Log.Info("forwarding", "instance", host.Instance, "services", len(d.snapshot().Services))
	host.Alive(partChanges) // otherwise a change that hangs from the start would not count
	ctx, d.end = context.WithCancel(context.WithoutCancel(ctx))
	d.running.Go(func() { d.changes.run(ctx) })
	d.running.Go(func() { d.loop(ctx) })
	d.running.Go(func() { d.taken.run(ctx) })
	for _, source := range d.sources {
		d.running.Go(func() {
			source.Run(ctx, func(change Change) error { return d.changes.declare(ctx, source.Name, change) })
		})
	}
	return d, nil
}

// snapshot is the desired state in force.
func (d *daemon) snapshot() *state.Snapshot { return d.overrides.writer.Snapshot() }

// start loads the data plane and applies the configuration to it. If it fails, abandon undoes its steps.
func (d *daemon) start(ctx context.Context, opts Options, config model.Config) error {
	if err := requireInterfaces(config.Interfaces); err != nil {
		return err
	}
	host, p, writer := d.host, d.plane, d.overrides.writer
	a := &applier{plane: p, writer: writer, retries: newRetries(host.ConfigPath, host.Conditions), conditions: host.Conditions}
	if err := p.open(host, config.Limits, writer, a.retries.want); err != nil {
		return err
	}
	p.announcer.tell = opts.Networks
	p.encapsulates = opts.Encapsulation
	p.tellEncapsulation(config.Encapsulation)
	d.taken = &takenPorts{list: opts.Taken, reserve: p.datapath.Reserve, log: host.Log}
	a.losses = newLosses(p.datapath.CountOpen, host.Conditions, host.Log)
	a.addresses = newAddresses(natFlows{rewrite: p.routes.Rewrite, end: p.datapath.EndNATSources, expires: p.routes.Expires}, host.Conditions, host.Log)
	var maps reconcile.Maps = p.datapath
	if opts.Through != nil {
		maps = opts.Through(maps)
	}
	a.reconciler = reconcile.New(p.sockets.through(maps), reconcile.BeforeNaming(p.routes.Add), reconcile.AroundFrontends(d.taken.taking), reconcile.BeforeForgetting(a.addresses.forget))
	contents, err := a.reconciler.Adopt()
	if err != nil {
		return err
	}
	p.routes.Adopt(natSourcesIn(contents))
	p.routes.Change(a.reconciler.BackendChanges())
	detour, err := openDetour(p.datapath, host.Instance, host.Log)
	if err != nil {
		return err
	}
	a.checks = newChecks(contents, host.Conditions, host.Events, directPath{detour, p.routes.Hop, p.server.hasVIPs, hostAddresses}, host.Log)
	d.applier, d.overrides.applier = a, a
	follower := resolve.Open(resolve.Options{Path: namesPath(host.Instance), Log: host.Log, Conditions: host.Conditions})
	d.changes = newChanges(newNames(follower, host.Conditions, vipsOf(writer)), a, host)
	d.pulse = newPulse(p.datapath, host.Instance, host.Conditions, host.Log)
	_, err = d.changes.change(ctx, first(config, d.sources, writer, host.Log)...)
	return err
}

// natSourcesIn returns the addresses that full NAT has sent from.
func natSourcesIn(contents reconcile.Contents) (sources []netip.Addr) {
	for a, record := range contents.Addresses {
		if record.Source {
			sources = append(sources, a)
		}
	}
	return sources
}

// abandon ends a start that failed. A predecessor's data plane continues unchanged.
func (d *daemon) abandon() error {
	errs := []error{d.endChecks()}
	if d.changes != nil {
		d.changes.names.follower.Close()
	}
	return errors.Join(append(errs, d.plane.abandon())...)
}

// endChecks ends health checks, and removes the things that they used.
func (d *daemon) endChecks() error {
	var err error
	if d.applier != nil {
		err = d.applier.checks.close()
	}
	return errors.Join(err, releaseDetour(d.host.Instance, d.host.Log))
}

// Summary implements node.Instance.
func (d *daemon) Summary() string {
	return "forwarding " + value.Counted(len(d.snapshot().Services), "service")
}

// Refuses implements node.Instance.
func (d *daemon) Refuses(settings any) error {
	return limitsRefused(value.DifferentSettings(d.snapshot().Node.Settings(), settings.(*file.Parsed).Config.Node.Settings()))
}

// limitsRefused returns the reason why limits cannot change, if they are among the changes.
func limitsRefused(changes []value.SettingDifference) error {
	return value.Fixed(changes, "limits.", "limits size the maps, which are made when the data plane is first loaded; run `shunt detach` (its connections end) and start shunt with the new limits")
}

// CheckHost implements node.HostChecker: routes that are followed are not looked up again.
func (d *daemon) CheckHost(settings any) {
	settings.(*file.Parsed).CheckHost(followedHost{localHost(), d.plane.routes.Out}, false)
}

// Apply implements node.Instance.
func (d *daemon) Apply(ctx context.Context, settings any) (node.Difference, error) {
	return d.changes.apply(ctx, settings.(*file.Parsed).Config)
}

// Foresee implements node.Foreseer: it returns the changes that Apply would make, given the present results of
// checks.
func (d *daemon) Foresee(ctx context.Context, settings any) (node.Difference, error) {
	return d.changes.foresee(ctx, settings.(*file.Parsed).Config)
}

// Overridable implements node.Overrider.
func (d *daemon) Overridable() control.Overrides { return d.overrides }

// Drain implements node.Drainer: no service takes new flows. Health checks go on.
func (d *daemon) Drain() { d.applier.drain() }

// AwaitDrained implements node.Drainer.
func (d *daemon) AwaitDrained(ctx context.Context) {
	drainage{flows: d.plane.datapath, log: d.host.Log.With("instance", d.host.Instance), interrupted: d.host.Interrupted}.await(ctx)
}

// Close implements node.Instance.
func (d *daemon) Close(keep bool) error {
	d.changes.turns.stop() // a change under way ends first, and a later one is refused
	d.applier.stop()
	d.end()
	d.running.Wait()
	ended := d.endChecks()
	d.changes.names.follower.Close()
	d.views.end()
	if keep {
		saved := d.overrides.writer.Save() // the operators' overrides are on the disk
		return errors.Join(ended, saved, d.plane.leave(len(d.snapshot().Services)))
	}
	return errors.Join(ended, d.plane.takeDown())
}

var (
	_ node.Instance    = (*daemon)(nil)
	_ node.Foreseer    = (*daemon)(nil)
	_ node.HostChecker = (*daemon)(nil)
	_ node.Drainer     = (*daemon)(nil)
	_ node.Sampler     = (*daemon)(nil)
	_ node.Overrider   = (*daemon)(nil)
)
