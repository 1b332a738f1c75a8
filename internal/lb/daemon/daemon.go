// Package daemon is the life of `shunt run`: it loads the data plane, keeps it agreeing
// with the configuration file and with the network around it, and takes it down again.
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
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/detour"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/neighbour"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/resolve"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/lb/way"
	"github.com/shunt-lb/shunt/internal/metrics"
)

// Options are what the command line says.
type Options struct {
	ConfigPath string
	Instance   string
	Socket     string           // overrides the configuration's, if set
	Watch      bool             // apply the file whenever it changes
	Hangup     <-chan os.Signal // each applies the file
	// OnExit is what becomes of the data plane when the daemon is told to stop; empty: detach.
	OnExit OnExit
	// DrainTimeout bounds ExitDrain.
	DrainTimeout time.Duration
	// Interrupted, once it has ended, makes the daemon detach whatever OnExit says, in the
	// middle of a drain too. It does not stop the daemon. May be nil: then only the API can do so.
	Interrupted context.Context //nolint:containedctx // a second way to be told to stop
	Log         *slog.Logger
	Version     string // of this build, for metrics
	// Sources give services beside the file. No command sets them.
	Sources []Source
	// Through lets tests stand between reconciler and data plane, to count what is written or
	// to break it; nil: nobody does. No command sets it.
	Through func(reconcile.Maps) reconcile.Maps
}

// DefaultInstance is the one that commands mean unless told otherwise.
const DefaultInstance = "default"

// FaultsError says that the configuration file has faults. Its text is for a log; whoever
// has a terminal renders Faults.
type FaultsError struct {
	Path   string
	Faults []config.Fault
}

// Error says what became of it.
func (e *FaultsError) Error() string {
	return fmt.Sprintf("the configuration was refused, and nothing was changed; `shunt check --config %s` says the same", e.Path)
}

// busyInterval is when it is tried again while another change is under way.
const busyInterval = 50 * time.Millisecond

// daemon is one running instance.
type daemon struct {
	opts  Options
	log   *slog.Logger
	since time.Time

	// reading is held through a whole reload, before applying.
	reading sync.Mutex

	// applying is held through a whole change, so that changes take turns. It guards what follows,
	// but for the methods that say that they may be called at any time.
	applying   sync.Mutex
	writer     *state.Writer
	deadlines  *deadlines // of the writer's overrides
	checks     *checks
	detour     *detour.Way
	names      *names
	loopback   bool // forwarding on lo is to be kept on; the loop's
	interfaces *interfaces
	reconciler *reconcile.Reconciler
	announcer  *announcements
	stopped    bool // no change any more
	draining   bool // no new flows, and no change of the configuration any more

	// These may be called at any time.
	datapath   *datapath.Datapath
	ways       *way.Ways
	retries    *retries
	conditions *condition.Set
	supervisor *supervisor
	events     *control.Events
	server     *control.Server
	views      views
	ending     ending
	metrics    *metrics.Server
	reloaded   reloaded
	sources    atomic.Pointer[[]netip.Addr] // those of full NAT that were last carried out

	pulse   *pulse // the loop's
	chained *chainedWatch
}

// Run is the daemon. When ctx ends it does what opts.OnExit says and returns. To detach
// leaves nothing behind: programs detached, maps unpinned, neighbours and settings put
// back. An error before the data plane has been changed leaves a predecessor's as it was.
func Run(ctx context.Context, opts Options) error {
	unlock, err := lock(opts.Instance)
	if err != nil {
		return err
	}
	release := sync.OnceFunc(unlock)
	defer release()
	started := boundMemoryOften()
	defer started()
	config, err := readConfig(opts.ConfigPath, opts.Log)
	if err != nil {
		return err
	}
	events := &control.Events{}
	conditions := newConditions(opts.Log, events)
	d := &daemon{
		opts: opts, log: opts.Log, since: time.Now(), events: events,
		conditions: conditions,
		supervisor: newSupervisor(opts.Log),
		retries:    newRetries(opts.ConfigPath, conditions),
	}
	d.metrics = metrics.NewServer(d.sample, opts.Log)
	ctx = d.ending.arrange(ctx, opts.Interrupted)
	d.openState()
	if opts.Socket != "" {
		config.API.Socket = opts.Socket
	}
	if err := d.start(ctx, config); err != nil {
		return errors.Join(err, d.abandon())
	}
	d.beat() // what was missed or short until now is history
	d.log.Info("forwarding", "instance", opts.Instance, "services", len(d.writer.Snapshot().Config.Services),
		"socket", config.API.Socket, "pid", os.Getpid())
	d.supervisor.alive.beat(partChanges) // or a change that is stuck from the first would not count
	d.supervisor.ready(d.summary())
	sources := d.startSources(ctx)
	started()
	returnMemory()
	d.loop(ctx)
	sources.Wait()
	err = d.finish()
	release() // before anybody hears that it is over: another daemon may start at once
	d.ending.over(err)
	d.server.Wait()
	return err
}

// summary is what the daemon does, in a few words.
func (d *daemon) summary() string {
	return "forwarding " + plural(len(d.writer.Snapshot().Config.Services), "service")
}

// start brings the instance up, and answers at the control socket. What it has done when it
// fails is undone by abandon.
func (d *daemon) start(ctx context.Context, config model.Config) error {
	if err := requireInterfaces(config.Interfaces); err != nil {
		return err
	}
	dp, err := datapath.Open(datapath.Options{Instance: d.opts.Instance, Limits: config.Limits, Log: d.log})
	if err != nil {
		return err
	}
	d.datapath = dp
	// Not before: abandon takes it back only where there is a data plane.
	err = forwardOnLoopback(d.opts.Instance)
	d.loopback = err == nil
	if err != nil {
		d.log.Warn("next hops cannot be looked up while the daemon is not running", "error", err)
	}
	var maps reconcile.Maps = dp
	if d.opts.Through != nil {
		maps = d.opts.Through(dp)
	}
	d.interfaces = newInterfaces(dp, newOffloads(d.opts.Instance, d.conditions, d.log), d.conditions, d.log,
		func() { d.ways.Review() })
	if d.ways, err = way.Open(way.Options{
		DataPlane: dp, Conditions: d.conditions, Log: d.log, Host: d.interfaces.wayToHost,
		Configured:     func() []netip.Addr { return d.writer.Snapshot().Config.SNAT.Addresses },
		SourcesChanged: d.retries.want, // a new source has to become one of our addresses
		Beat:           func() { d.supervisor.alive.beat(partNextHops) },
	}); err != nil {
		return err
	}
	d.reconciler = reconcile.New(maps, reconcile.BeforeNaming(d.ways.Add), reconcile.BeforeForgetting(d.ways.Rewrite))
	d.announcer = newAnnouncements(dp.SetOwned, d.conditions, d.log)
	contents, err := d.reconciler.Adopt()
	if err != nil {
		return err
	}
	d.ways.Adopt(sourcesIn(contents))
	d.ways.Change(d.reconciler.BackendChanges())
	if d.detour, err = openDetour(dp, d.opts.Instance, d.log); err != nil {
		return err
	}
	d.checks = newChecks(contents, d.conditions, d.events, directWay{d.detour, d.ways.Hop}, d.log)
	d.names = newNames(resolve.Open(resolve.Options{Path: namesPath(d.opts.Instance), Log: d.log, Conditions: d.conditions}), d.conditions)
	d.pulse = newPulse(dp, d.opts.Instance, d.conditions, d.log)
	d.chained = newChainedWatch(d.conditions, d.log)
	if _, err := d.change(ctx, ofFile(config)); err != nil {
		return err
	}
	d.reloaded.note(true)
	d.server = &control.Server{API: config.API, Handler: d, Events: d.events, Log: d.log}
	return d.server.Serve(context.WithoutCancel(ctx)) // it answers while flows drain
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
	beside.Go(func() { d.reloads(ctx) })
	beside.Go(func() { d.followNames(ctx) })
	beside.Go(func() { d.measureOthers(ctx) })
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
			boundMemory()
			d.supervisor.live()
		case <-sweep.C:
			d.pulse.sweep(d.metrics.Listening())
		case <-d.retries.due:
			d.again()
		case <-d.checks.monitor.Changed():
			healthSoon()
		case <-d.ways.Changed():
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

// reloads reads the file again when it changes or somebody sends SIGHUP, until ctx ends. It is
// beside the loop, because a change may wait for the ways to new backends.
func (d *daemon) reloads(ctx context.Context) {
	changed := make(chan struct{})
	if d.opts.Watch {
		changed = watchFile(ctx, d.opts.ConfigPath, d.log)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-d.opts.Hangup:
		}
		d.reloadUnasked(ctx)
	}
}

// reloadUnasked is a reload that nobody waits for: what is wrong goes into the log.
func (d *daemon) reloadUnasked(ctx context.Context) {
	result, err := d.Reload(ctx)
	if err == nil && result.Applied {
		return
	}
	for _, fault := range result.Faults {
		d.log.Error("configuration", "fault", fault.String())
	}
	d.log.Error("the file was not applied; the configuration before stays in force", "path", d.opts.ConfigPath, "refused", result.Refused, "error", err)
}

// upkeep does what time brings about: deadlines of drains, and slots that have settled.
func (d *daemon) upkeep() {
	if !d.applying.TryLock() {
		return // a change is under way; in a second again
	}
	defer d.applying.Unlock()
	d.supervisor.alive.beat(partChanges)
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
	if d.interfaces.refresh(d.writer.Snapshot().Config.Interfaces) {
		d.retries.want()
	}
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
	_, _ = d.carryOut() // what failed is tried again
}

// abandon ends a start that failed. A predecessor's data plane goes on as it was.
func (d *daemon) abandon() error {
	keep := d.datapath != nil && d.datapath.Adopted()
	d.metrics.Close()
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
	if d.datapath != nil {
		errs = append(errs, d.datapath.Close())
		if !keep {
			errs = append(errs, datapath.Remove(d.opts.Instance, d.log), releaseAll(d.opts.Instance, d.log), releaseLoopback(d.opts.Instance, d.log))
		}
	}
	return errors.Join(errs...)
}

// endChecks ends health checks, and takes away what they used.
func (d *daemon) endChecks() error {
	var err error
	if d.checks != nil {
		d.checks.monitor.Close()
	}
	if d.detour != nil {
		err = d.detour.Close()
	}
	return errors.Join(err, releaseDetour(d.opts.Instance, d.log))
}

// detach takes everything down. What draws traffic here goes first.
func (d *daemon) detach() error {
	return errors.Join(d.announcer.close(false), d.ways.Close(false), d.datapath.Close(),
		datapath.Remove(d.opts.Instance, d.log), releaseAll(d.opts.Instance, d.log), releaseLoopback(d.opts.Instance, d.log))
}

// readConfig reads the file and logs its warnings.
func readConfig(path string, log *slog.Logger) (model.Config, error) {
	parsed, err := file.Read(path)
	if err != nil {
		return model.Config{}, err
	}
	parsed.CheckHost(file.LocalHost{}, false)
	if config.HasErrors(parsed.Faults) {
		return model.Config{}, &FaultsError{Path: path, Faults: parsed.Faults}
	}
	for _, fault := range parsed.Faults {
		log.Warn("configuration", "fault", fault.String())
	}
	return parsed.Config, nil
}

func newConditions(log *slog.Logger, events *control.Events) *condition.Set {
	return &condition.Set{OnChange: func(c condition.Change) {
		events.Publish(eventOf(c))
		if c.Joined {
			return // it holds; the line of all has said so
		}
		if c.Cleared {
			log.Info("condition ended", "condition", c.Condition.Code, "subject", c.Condition.Subject)
			return
		}
		log.Warn(c.Condition.Text, "condition", c.Condition.Code, "subject", c.Condition.Subject, "remedy", c.Condition.Remedy)
	}}
}

// Detach removes what a killed daemon left: programs, maps, neighbours, group memberships
// and changed settings. It refuses while a daemon runs the instance. The log names what was
// removed; nothing there is success.
func Detach(instance string, log *slog.Logger) error {
	unlock, err := lock(instance)
	if err != nil {
		return err
	}
	defer unlock()
	return detachLocked(instance, log)
}

// detachLocked is Detach for who holds the instance's lock.
func detachLocked(instance string, log *slog.Logger) error {
	left := leftAnnounced(instance, log)
	if err := datapath.Remove(instance, log); err != nil {
		return err
	}
	errs := []error{withdraw(left, log), releaseDetour(instance, log), releaseAll(instance, log), releaseLoopback(instance, log)}
	neighbours, err := neighbour.New(neighbour.Options{Log: log})
	if err == nil {
		err = neighbours.Close(false) // takes a predecessor's entries along
	}
	return errors.Join(append(errs, err)...)
}
