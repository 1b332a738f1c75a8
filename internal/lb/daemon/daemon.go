// Package daemon is the balancer as a node runs it: it loads the data plane, keeps it agreeing
// with the configuration and with the network around it, and takes it down again.
//
//	sources ─► state ─► checks ─► reconcile ─► datapath
//	             │                    │           ▲
//	             ├──► interfaces      └─► way ────┤
//	             └──► announcements ──────────────┘
//
// Everything that decides about packets lies in pinned maps. Killing this process at any
// moment loses nothing: the programs go on, and the next start adopts what it finds.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/detour"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/neighbour"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/resolve"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/lb/way"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

// Options are for tests, and for programs that give the balancer services by another way than the file.
type Options struct {
	// Sources give services beside the file.
	Sources []Source
	// Through stands between reconciler and data plane, to count what is written or to break it; nil:
	// nobody does.
	Through func(reconcile.Maps) reconcile.Maps
}

// Product is the balancer.
func Product(opts Options) node.Product {
	part := file.Part
	if len(opts.Sources) > 0 {
		part = file.PartBesideSources
	}
	return node.Product{
		Name: file.Name, Part: part, Remove: remove, Needs: needs,
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

// occupant says whose XDP program keeps shunt's off an interface. A shunt that runs is no
// fault: `shunt check` is for its next file, too.
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

// busyInterval is when it is tried again while another change is under way.
const busyInterval = 50 * time.Millisecond

// Parts that have to go round.
const (
	partLoop     = "the balancer"
	partChanges  = "changes of the data plane" // no change takes for ever
	partNextHops = "next hops"
)

// daemon is one running instance.
type daemon struct {
	host *node.Host
	opts Options
	log  *slog.Logger

	// changing is held through a whole change of what sources declare, so that such changes take turns.
	// It guards names, and is taken before applying.
	changing sync.Mutex
	names    *names

	// applying is held while the data plane is made what is desired, and never while something waits.
	// It guards what follows, but for the methods that say that they may be called at any time.
	applying   sync.Mutex
	writer     *state.Writer
	deadlines  *deadlines // of the writer's overrides
	checks     *checks
	detour     *detour.Way
	loopback   bool // forwarding on lo is to be kept on; the loop's
	interfaces *interfaces
	reconciler *reconcile.Reconciler
	sockets    *sockets
	server     *decapsulation
	announcer  *announcements
	deserted   desertions
	own        map[netip.Addr]bool // the host's addresses, as last carried out
	departed   condition.Lasting   // sources of NAT whose flows were ended
	closed     condition.Lasting   // services whose backends went down, and their flows were ended
	uppersDue  int                 // see uppersEvery
	stopped    bool                // no change any more
	draining   bool                // no new flows, and no change of the configuration any more

	// These may be called at any time.
	datapath   *datapath.Datapath
	ways       *way.Ways
	retries    *retries
	conditions *condition.Set
	events     *control.Events
	views      views
	sources    atomic.Pointer[[]netip.Addr] // those of full NAT that were last carried out

	pulse *pulse // the loop's

	end     func()         // of what runs beside; then waits for it
	running sync.WaitGroup // the loop, and sources
}

// open brings the balancer up. A predecessor's data plane goes on as it was if that fails.
func open(ctx context.Context, host *node.Host, opts Options, config model.Config) (*daemon, error) {
	d := &daemon{host: host, opts: opts, log: host.Log, events: host.Events, conditions: host.Conditions,
		retries: newRetries(host.ConfigPath, host.Conditions)}
	d.departed = condition.Lasting{Set: host.Conditions, Hold: departedHold}
	d.closed = condition.Lasting{Set: host.Conditions, Hold: departedHold}
	d.openState()
	if err := d.start(ctx, config); err != nil {
		return nil, errors.Join(err, d.abandon())
	}
	d.beat() // what was missed or short until now is history
	d.log.Info("forwarding", "instance", host.Instance, "services", len(d.writer.Snapshot().Services))
	host.Alive(partChanges) // or a change that is stuck from the first would not count
	ctx, d.end = context.WithCancel(context.WithoutCancel(ctx))
	d.running.Go(func() { d.loop(ctx) })
	d.startSources(ctx)
	return d, nil
}

// Summary is node.Instance's.
func (d *daemon) Summary() string {
	return "forwarding " + value.Counted(len(d.writer.Snapshot().Services), "service")
}

// start loads the data plane and makes it what the configuration says. What it has done when it fails
// is undone by abandon.
func (d *daemon) start(ctx context.Context, config model.Config) error {
	if err := requireInterfaces(config.Interfaces); err != nil {
		return err
	}
	dp, err := datapath.Open(datapath.Options{Instance: d.host.Instance, Limits: config.Limits, Log: d.log})
	if err != nil {
		return err
	}
	d.datapath = dp
	// Not before: abandon takes it back only where there is a data plane.
	err = forwardOnLoopback(d.host.Instance)
	d.loopback = err == nil
	if err != nil {
		d.log.Warn("next hops cannot be looked up while the daemon is not running", "error", err)
	}
	var maps reconcile.Maps = dp
	if d.opts.Through != nil {
		maps = d.opts.Through(dp)
	}
	d.sockets = newSockets(dp, d.host.Instance, d.log)
	maps = d.sockets.through(maps)
	if d.server, err = newDecapsulation(dp, d.host.Instance, d.log); err != nil {
		return err
	}
	d.interfaces = newInterfaces(dp, newOffloads(d.host.Instance, d.conditions, d.log), d.conditions, d.log,
		func() { d.server.doubt(); d.ways.Review() })
	d.interfaces.serves = d.server.serves
	if d.ways, err = way.Open(way.Options{
		DataPlane: dp, Conditions: d.conditions, Log: d.log, Host: d.interfaces.wayToHost, Attached: d.interfaces.indices,
		Configured:     func() []netip.Addr { return d.writer.Snapshot().Node.SNAT.Addresses },
		SourcesChanged: d.retries.want, // a new source has to become one of our addresses
		Beat:           func() { d.host.Alive(partNextHops) },
	}); err != nil {
		return err
	}
	d.reconciler = reconcile.New(maps, reconcile.BeforeNaming(d.ways.Add), reconcile.BeforeForgetting(d.forgetSources))
	d.announcer = newAnnouncements(dp.SetOwned, d.conditions, d.log)
	contents, err := d.reconciler.Adopt()
	if err != nil {
		return err
	}
	d.ways.Adopt(sourcesIn(contents))
	d.ways.Change(d.reconciler.BackendChanges())
	if d.detour, err = openDetour(dp, d.host.Instance, d.log); err != nil {
		return err
	}
	d.checks = newChecks(contents, d.conditions, d.events, directWay{d.detour, d.ways.Hop, d.server.serves}, d.log)
	d.names = newNames(resolve.Open(resolve.Options{Path: namesPath(d.host.Instance), Log: d.log, Conditions: d.conditions}), d.conditions, d.vipsOf)
	d.pulse = newPulse(dp, d.host.Instance, d.conditions, d.log)
	_, err = d.change(ctx, d.first(config)...)
	return err
}

// sourcesIn are the addresses that full NAT has sent from.
func sourcesIn(contents reconcile.Contents) (sources []netip.Addr) {
	for a, record := range contents.Addresses {
		if record.Source {
			sources = append(sources, a)
		}
	}
	return sources
}

// loop does what has to be done from time to time, until ctx ends. It waits for nobody: the data
// plane counts on its heartbeat.
func (d *daemon) loop(ctx context.Context) {
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { d.followNames(ctx) })
	beside.Go(func() { d.sockets.run(ctx) })
	heartbeat := time.NewTicker(heartbeatInterval)
	defer heartbeat.Stop()
	sweep := time.NewTicker(sweepInterval)
	defer sweep.Stop()
	var healthDue <-chan time.Time
	var took time.Duration // to carry a change of health out; a flood of them must leave half of the time for the rest
	healthSoon := func() {
		if healthDue == nil {
			healthDue = time.After(max(healthBatch, took))
		}
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-heartbeat.C:
			d.beat()
			d.followInterfaces()
			d.keepLoopback()
			d.upkeep()
			d.host.Alive(partLoop)
		case <-sweep.C:
			d.pulse.sweep(d.host.Scraped())
		case <-d.retries.due:
			d.again()
		case <-d.checks.monitor.Changed():
			healthSoon()
		case <-d.ways.Changed():
			d.checks.doubt()
			healthSoon()
		case <-healthDue:
			healthDue = nil
			began := time.Now()
			if d.healthChanged() {
				took = time.Since(began)
			} else {
				healthDue = time.After(busyInterval)
			}
		}
	}
}

// beat keeps the data plane going, and tells of what it met since the beat before.
func (d *daemon) beat() {
	d.pulse.beat(framesMissed(d.interfaces.names(), d.log), d.checks.monitor.TakeTrouble(), time.Now())
}

// upkeep does what time brings about: deadlines of drains, and slots that have settled.
func (d *daemon) upkeep() {
	if !d.applying.TryLock() {
		return // a change is under way; in a second again
	}
	defer d.applying.Unlock()
	d.host.Alive(partChanges)
	d.deadlines.follow()
	before := d.writer.Snapshot().Revision
	if d.writer.PassDeadlines() != before {
		d.log.Info("the deadline of a drain has passed: its backend's flows are given up")
		_, _ = d.carryOut() // what failed is tried again
	}
	_ = d.writer.Save()
	d.nameOverrideFaults()
	unsettled := d.reconciler.Settling().Transition > 0
	settling, err := d.reconciler.Settle()
	switch {
	case err != nil:
		d.retries.failing(fmt.Errorf("settle slots that changed a while ago: %w", err))
	case unsettled && settling.Transition == 0:
		d.log.Info("all slots have settled", "marked", settling.Marked)
	}
}

// followInterfaces has the data plane follow what becomes of the interfaces.
func (d *daemon) followInterfaces() {
	if !d.applying.TryLock() {
		return // a change is under way; in a second again
	}
	defer d.applying.Unlock()
	if d.interfaces.refresh(d.writer.Snapshot().Node.Interfaces) {
		d.retries.want()
	}
	d.followAddresses(time.Now())
	d.server.refresh()
}

// healthChanged carries out what checks and next hops have shown, or says that another change is under way.
func (d *daemon) healthChanged() (done bool) {
	if !d.applying.TryLock() {
		return false
	}
	defer d.applying.Unlock()
	if d.stopped {
		return true
	}
	if difference, err := d.carryOut(); err == nil {
		d.log.Debug("health carried out", "difference", difference.String())
		d.changed(difference)
	}
	return true
}

// again carries the present configuration out once more, after a failure or because a
// source address has changed.
func (d *daemon) again() {
	if !d.applying.TryLock() {
		time.AfterFunc(busyInterval, d.retries.want)
		return
	}
	defer d.applying.Unlock()
	if d.stopped {
		return
	}
	d.checks.doubt()
	_, _ = d.carryOut() // what failed is tried again
}

// abandon ends a start that failed. A predecessor's data plane goes on as it was.
func (d *daemon) abandon() error {
	keep := d.datapath != nil && d.datapath.Adopted()
	errs := []error{d.endChecks()}
	if d.names != nil {
		d.names.follower.Close()
	}
	if d.announcer != nil {
		errs = append(errs, d.announcer.close(keep))
	}
	if d.ways != nil {
		errs = append(errs, d.ways.Close(keep))
	}
	if d.sockets != nil {
		errs = append(errs, d.sockets.close(keep))
	}
	if d.server != nil {
		d.server.beside.Close()
	}
	if d.datapath != nil {
		errs = append(errs, d.datapath.Close())
		if !keep {
			errs = append(errs, datapath.Remove(d.host.Instance, d.log), releaseAll(d.host.Instance, d.log), releaseLoopback(d.host.Instance, d.log), releaseServer(d.host.Instance, d.log))
		}
	}
	return errors.Join(errs...)
}

// endChecks ends health checks, and takes away what they used.
func (d *daemon) endChecks() error {
	var err error
	if d.checks != nil {
		d.checks.close()
	}
	if d.detour != nil {
		err = d.detour.Close()
	}
	return errors.Join(err, releaseDetour(d.host.Instance, d.log))
}

// detach takes everything down. What draws traffic here goes first.
func (d *daemon) detach() error {
	d.server.beside.Close()
	return errors.Join(d.announcer.close(false), d.ways.Close(false), d.sockets.close(false), d.datapath.Close(),
		datapath.Remove(d.host.Instance, d.log), releaseAll(d.host.Instance, d.log), releaseLoopback(d.host.Instance, d.log), releaseServer(d.host.Instance, d.log))
}

// remove takes away what a killed daemon has left: programs, maps, neighbours, group memberships and
// changed settings. The log names what was removed.
func remove(instance string, log *slog.Logger) error {
	left := leftAnnounced(instance, log)
	if err := datapath.Remove(instance, log); err != nil {
		return err
	}
	errs := []error{withdraw(left, log), releaseDetour(instance, log), releaseAll(instance, log), releaseLoopback(instance, log), releaseServer(instance, log)}
	neighbours, err := neighbour.New(neighbour.Options{Log: log})
	if err == nil {
		err = neighbours.Close(false) // takes a predecessor's entries along
	}
	return errors.Join(append(errs, err)...)
}
