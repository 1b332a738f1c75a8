// Package daemon is the life of `shunt run`: it loads the data plane, keeps it agreeing
// with the configuration file and with the network around it, and takes it down again.
//
//	file ─► state ─► desired ─► reconcile ─► datapath
//	                    ▲           ▲
//	    addresses, ports of host    next hops (neighbour), ownership (announce)
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
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/datapath"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/shunt-lb/shunt/internal/neighbour"
	"github.com/shunt-lb/shunt/internal/reconcile"
	"github.com/shunt-lb/shunt/internal/source/file"
	"github.com/shunt-lb/shunt/internal/state"
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
	Faults []file.Fault
}

// Error says what became of it.
func (e *FaultsError) Error() string {
	return fmt.Sprintf("the configuration was refused, and nothing was changed; `shunt check --config %s` says the same", e.Path)
}

const (
	heartbeatInterval = time.Second
	sweepInterval     = 10 * time.Second
	retryInterval     = 5 * time.Second
	busyInterval      = 50 * time.Millisecond // until it is tried again while another change is under way
	// resolveTimeout bounds how long a change waits for next hops. What is not resolved by
	// then gets no new flows, unless nothing else can be reached either: then slots name it
	// all the same, and its packets are counted as unresolved.
	resolveTimeout = 2 * time.Second
)

// daemon is one running instance.
type daemon struct {
	opts       Options
	log        *slog.Logger
	since      time.Time
	applied    bool // the file has been taken over once
	datapath   *datapath.Datapath
	reconciler *reconcile.Reconciler
	writer     *state.Writer
	conditions *condition.Set
	supervisor *supervisor
	neighbours *neighbour.Watcher
	announcer  *announcements

	// applying is held through a whole change, so that changes take turns.
	applying    sync.Mutex
	attachments map[string]*shuntv1.Attachment

	events *control.Events
	server *control.Server
	views  views
	ending ending

	stopped       bool              // no change any more
	draining      bool              // no new flows, and no change of the configuration any more
	deserted      map[string]string // conditions held, by subject
	sourcesInMaps []netip.Addr      // of full NAT, as adopt found them

	// writing is held while a hop is noted and written, so that none overwrites a newer one.
	writing sync.Mutex
	hops    map[netip.Addr]neighbour.Hop

	// mu guards attachments, and changes need, which come at any time.
	mu      sync.Mutex
	records map[netip.Addr][]reconcile.BackendRecord
	sources map[netip.Addr][]netip.Addr // by backend address, as last written
	retry   chan struct{}               // capacity 1: apply again

	settling reconcile.Settling // as of the last change or upkeep; written with applying and mu held

	retrying *time.Timer         // guarded by applying
	awaited  map[netip.Addr]bool // backends whose ways were waited for; guarded by applying

	missing missedWatch // the loop's

	clock    *steadyClock // of deadlines
	stepped  time.Time    // when the wall clock was last set, by clock; guarded by applying
	watching watching     // guarded by applying, but for what says otherwise
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
	config, err := readConfig(opts.ConfigPath, opts.Log)
	if err != nil {
		return err
	}
	events := &control.Events{}
	d := &daemon{
		opts: opts, log: opts.Log, since: time.Now(), events: events,
		conditions:  newConditions(opts.Log, events),
		supervisor:  newSupervisor(opts.Log),
		attachments: map[string]*shuntv1.Attachment{},
		records:     map[netip.Addr][]reconcile.BackendRecord{},
		sources:     map[netip.Addr][]netip.Addr{},
		hops:        map[netip.Addr]neighbour.Hop{},
		retry:       make(chan struct{}, 1),
	}
	ctx = d.ending.arrange(ctx, opts.Interrupted)
	d.openState()
	if opts.Socket != "" {
		config.API.Socket = opts.Socket
	}
	if err := d.start(ctx, config); err != nil {
		return errors.Join(err, d.abandon())
	}
	d.missing = missedWatch{conditions: d.conditions}
	d.missing.look(framesMissed(d.attachedTo(), d.log), time.Now()) // what is missed from now on is news
	d.log.Info("forwarding", "instance", opts.Instance, "services", len(d.writer.Snapshot().Config.Services),
		"socket", config.API.Socket, "pid", os.Getpid())
	d.supervisor.alive.beat(partChanges) // or a change that is stuck from the first would not count
	d.supervisor.ready(d.summary())
	sources := d.startSources(ctx)
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
	if err := forwardOnLoopback(d.opts.Instance); err != nil {
		d.log.Warn("next hops cannot be looked up while the daemon is not running", "error", err)
	}
	var maps reconcile.Maps = dp
	if d.opts.Through != nil {
		maps = d.opts.Through(dp)
	}
	d.reconciler = reconcile.New(maps, reconcile.BeforeNaming(d.beforeNaming))
	if d.neighbours, err = neighbour.New(neighbour.Options{
		OnChange: d.hopChanged, Conditions: d.conditions, Log: d.log, Host: d.wayToHost,
		Beat: func() { d.supervisor.alive.beat(partNextHops) },
	}); err != nil {
		return err
	}
	d.announcer = newAnnouncements(d)
	contents, err := d.adopt()
	if err != nil {
		return err
	}
	d.startHealth(contents)
	if _, err := d.change(ctx, ofFile(config)); err != nil {
		return err
	}
	d.server = &control.Server{API: config.API, Handler: d, Events: d.events, Log: d.log}
	return d.server.Serve(context.WithoutCancel(ctx)) // it answers while flows drain
}

// loop does what has to be done from time to time, until ctx ends. It waits for nobody: the data
// plane counts on its heartbeat.
func (d *daemon) loop(ctx context.Context) {
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { d.reloads(ctx) })
	heartbeat := time.NewTicker(heartbeatInterval)
	defer heartbeat.Stop()
	shortage := &shortageWatch{subject: d.opts.Instance, conditions: d.conditions}
	trouble := &troubleWatch{conditions: d.conditions}
	sweep := time.NewTicker(sweepInterval)
	defer sweep.Stop()
	var healthDue <-chan time.Time
	healthSoon := func() {
		if healthDue == nil {
			healthDue = time.After(d.healthDelay())
		}
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-heartbeat.C:
			if err := d.datapath.Heartbeat(); err != nil {
				d.log.Error("the data plane does not hear the daemon and asks the routing table instead", "error", err)
			}
			if reasons, err := d.datapath.ReasonCounts(); err != nil {
				d.log.Error("shortages are not seen", "error", err)
			} else {
				shortage.look(reasons, time.Now())
			}
			d.missing.look(framesMissed(d.attachedTo(), d.log), time.Now())
			d.refreshInterfaces()
			d.upkeep()
			trouble.look(d.watching.monitor.TakeTrouble(), time.Now())
			d.supervisor.live()
		case <-sweep.C:
			if _, err := d.datapath.Sweep(); err != nil {
				d.log.Warn("ended flows could not be swept; packets end them as they come", "error", err)
			}
			if _, err := d.datapath.Recall(); err != nil {
				d.log.Warn("remembered flows that are over could not be forgotten; it is tried again", "error", err)
			}
		case <-d.retry:
			d.again()
		case <-d.watching.monitor.Changed():
			healthSoon()
		case <-d.neighbours.Changed():
			healthSoon()
		case <-healthDue:
			healthDue = nil
			if !d.healthChanged() {
				healthDue = time.After(busyInterval)
			}
		}
	}
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
	d.log.Error("the file was not applied; what was in force stays", "path", d.opts.ConfigPath, "refused", result.Refused, "error", err)
}

// upkeep does what time brings about: deadlines of drains, and slots that have settled.
func (d *daemon) upkeep() {
	if !d.applying.TryLock() {
		return // a change is under way; in a second again
	}
	defer d.applying.Unlock()
	d.supervisor.alive.beat(partChanges)
	d.followClock()
	before := d.writer.Snapshot().Revision
	if d.writer.PassDeadlines() != before {
		d.log.Info("the deadline of a drain has passed: its backend's flows are given up")
		if _, err := d.carryOut(); err != nil {
			d.failing(err)
		}
	}
	_ = d.writer.Save()
	d.nameOverrideFaults()
	settling, err := d.reconciler.Settle()
	if err != nil {
		d.failing(fmt.Errorf("settle slots that changed a while ago: %w", err))
		return
	}
	d.publishSettling(settling)
}

// publishSettling is for the status, which does not wait for a change that is under way.
func (d *daemon) publishSettling(settling reconcile.Settling) {
	if d.settling.Transition > 0 && settling.Transition == 0 {
		d.log.Info("all slots have settled", "marked", settling.Marked)
	}
	d.mu.Lock()
	d.settling = settling
	d.mu.Unlock()
}

// again carries the present configuration out once more, after a failure or because a
// source address has changed.
func (d *daemon) again() {
	if !d.applying.TryLock() {
		time.AfterFunc(busyInterval, d.wantRetry)
		return
	}
	defer d.applying.Unlock()
	if d.stopped {
		return
	}
	if _, err := d.carryOut(); err != nil {
		d.failing(err)
		return
	}
	d.conditions.Clear(condition.ReconcileFailing, d.opts.ConfigPath)
}

// failing says that the maps are not as they should be, and has it tried again.
func (d *daemon) failing(err error) {
	d.conditions.Raise(condition.Condition{Code: condition.ReconcileFailing, Severity: condition.Error,
		Subject: d.opts.ConfigPath, Text: err.Error(), Remedy: "it is tried again every few seconds"})
	if d.retrying != nil {
		d.retrying.Stop()
	}
	d.retrying = time.AfterFunc(retryInterval, d.wantRetry)
}

func (d *daemon) wantRetry() {
	select {
	case d.retry <- struct{}{}:
	default:
	}
}

// abandon ends a start that failed. A predecessor's data plane goes on as it was.
func (d *daemon) abandon() error {
	keep := d.datapath != nil && d.datapath.Adopted()
	var errs []error
	if d.watching.monitor != nil {
		d.watching.monitor.Close()
	}
	if d.announcer != nil {
		errs = append(errs, d.announcer.close(keep))
	}
	if d.neighbours != nil {
		errs = append(errs, d.neighbours.Close(keep))
	}
	if d.datapath != nil {
		errs = append(errs, d.datapath.Close())
		if !keep {
			errs = append(errs, datapath.Remove(d.opts.Instance, d.log), d.releaseAll(), releaseLoopback(d.opts.Instance, d.log))
		}
	}
	return errors.Join(errs...)
}

// detach takes everything down. What draws traffic here goes first.
func (d *daemon) detach() error {
	return errors.Join(d.announcer.close(false), d.neighbours.Close(false), d.datapath.Close(),
		datapath.Remove(d.opts.Instance, d.log), d.releaseAll(), releaseLoopback(d.opts.Instance, d.log))
}

// readConfig reads the file and logs its warnings.
func readConfig(path string, log *slog.Logger) (model.Config, error) {
	parsed, err := file.Read(path)
	if err != nil {
		return model.Config{}, err
	}
	parsed.CheckHost(file.LocalHost{}, false)
	if file.HasErrors(parsed.Faults) {
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
	d := &daemon{opts: Options{Instance: instance}, log: log}
	errs := []error{withdraw(left, log), d.releaseAll(), releaseLoopback(instance, log)}
	neighbours, err := neighbour.New(neighbour.Options{Log: log})
	if err == nil {
		err = neighbours.Close(false) // takes a predecessor's entries along
	}
	return errors.Join(append(errs, err)...)
}
