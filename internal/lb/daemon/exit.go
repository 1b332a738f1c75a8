package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// OnExit is what becomes of the data plane when the daemon is told to stop.
type OnExit string

// The ways to stop.
const (
	ExitDetach OnExit = "detach" // nothing is left behind; connections end
	ExitKeep   OnExit = "keep"   // the data plane goes on as it is, for the next daemon to take over
	ExitDrain  OnExit = "drain"  // no new flows; detach once those there are have ended
)

// OnExits is every way, the default first.
var OnExits = []OnExit{ExitDetach, ExitKeep, ExitDrain}

const (
	// drainSilence is how long no packet may have come for direct return, whose flows nobody
	// counts, before they are taken for ended. It is the default of `backend drain --idle`.
	drainSilence = 30 * time.Second
	// drainReport is how often the log says how far a drain is.
	drainReport = 10 * time.Second
	// stopTime is more than stopping takes on a busy machine: seconds for a change under way, and
	// a grace period or two.
	stopTime = time.Minute
	// A walk through the flow table may take this share of the time at most.
	drainLookShare = 10
)

// ending is how a daemon is told to stop, and how the one who asked for it hears that it has.
type ending struct {
	interrupted context.Context //nolint:containedctx // ends once somebody wants the daemon gone whatever OnExit says
	interrupt   func()          // has the daemon stop and detach
	done        chan struct{}   // closed when the daemon holds nothing of its instance any more
	kept        bool            // the data plane is there still; once done
	err         error           // once done
}

// arrange returns the context that stops the daemon; interrupted may be nil.
func (e *ending) arrange(stop, interrupted context.Context) context.Context {
	if interrupted == nil {
		interrupted = context.WithoutCancel(stop)
	}
	stop, stopping := context.WithCancel(stop)
	interrupted, interrupting := context.WithCancel(interrupted)
	*e = ending{interrupted: interrupted, done: make(chan struct{}), interrupt: func() { interrupting(); stopping() }}
	return stop
}

// over lets those go on that wait for the end.
func (e *ending) over(err error) {
	e.err = err
	close(e.done)
}

// finish ends a daemon that was told to stop. Interrupted comes before what OnExit says.
func (d *daemon) finish() error {
	way := cmp.Or(d.opts.OnExit, ExitDetach)
	if way == ExitDrain && d.ending.interrupted.Err() == nil {
		d.drain()
	}
	d.supervisor.stopping("stopping", stopTime)
	d.applying.Lock() // a reload under way ends first, and a later one is refused
	d.stopped = true
	d.applying.Unlock()
	ended := d.endChecks()
	d.names.follower.Close()
	d.metrics.Close()
	d.views.end()
	d.server.Stop()
	if way == ExitKeep && d.ending.interrupted.Err() == nil {
		d.ending.kept = true
		return errors.Join(ended, d.keep())
	}
	d.log.Info("stopping: detaching", "instance", d.opts.Instance)
	return errors.Join(ended, d.detach())
}

// Detach ends the daemon and takes its data plane away, and waits until another may start.
func (d *daemon) Detach(_ context.Context, instance string, a state.Author) error {
	if instance != d.opts.Instance {
		return fmt.Errorf("%w: this is %q, but the request is for %q", control.ErrOtherInstance, d.opts.Instance, instance)
	}
	d.log.Info("asked to detach", "instance", instance, "by", a.By, "uid", a.UID, "client", a.Client)
	d.ending.interrupt()
	<-d.ending.done
	switch {
	case d.ending.kept:
		return fmt.Errorf("%w, and has already kept the data plane; ask again to detach it", control.ErrStopping)
	case d.ending.err != nil:
		return fmt.Errorf("the daemon has ended, but could not remove everything; ask again: %w", d.ending.err)
	}
	return nil
}

// keep lets go of the data plane as SIGKILL would, but in order: what operators asked for is
// on disk, the programs trust the next hops for as long as they may, and the log says what
// goes on.
func (d *daemon) keep() error {
	errs := []error{d.writer.Save(), d.announcer.close(true), d.ways.Close(true), d.datapath.Heartbeat()}
	since := time.Now()
	errs = append(errs, d.datapath.Close())
	d.log.Info(unattended(d.opts.Instance, len(d.writer.Snapshot().Config.Services), since), "instance", d.opts.Instance)
	return errors.Join(errs...)
}

// unattended is the last word of a daemon that leaves a data plane behind.
func unattended(instance string, services int, since time.Time) string {
	return fmt.Sprintf("still forwarding %s without health checks since %s; `%s` ends it",
		plural(services, "service"), since.Local().Format(time.DateTime), DetachCommand(instance))
}

// DetachCommand is what ends forwarding of an instance.
func DetachCommand(instance string) string {
	if instance == DefaultInstance {
		return "shunt detach"
	}
	return "shunt detach --instance " + instance
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// drain takes no new flows, and returns when those that are there have ended, when the time
// for it is over, or when the daemon is interrupted.
func (d *daemon) drain() {
	ctx, cancel := context.WithTimeout(context.Background(), d.opts.DrainTimeout)
	defer cancel()
	defer context.AfterFunc(d.ending.interrupted, cancel)()
	d.applying.Lock()
	d.draining = true
	d.conditions.Raise(condition.Condition{Code: condition.NodeDraining, Severity: condition.Info, Subject: d.opts.Instance,
		Text: "told to stop with --on-exit drain: no service takes new flows", Remedy: "wait; Ctrl-C or SIGINT detaches at once"})
	_, _ = d.carryOut() // what failed is tried again
	d.applying.Unlock()
	d.supervisor.stopping("waiting for flows to end", d.opts.DrainTimeout+stopTime)
	d.log.Info("draining: no new flows from now on; detaching when the open flows have ended", "instance", d.opts.Instance, "timeout", d.opts.DrainTimeout)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		d.awaitFlows(ctx)
		cancel()
	}()
	d.loop(ctx)
	<-ended
}

// awaitFlows returns when no flow is open any more, or when ctx ends, and says which.
func (d *daemon) awaitFlows(ctx context.Context) {
	watch := drainWatch{d: d, silentSince: time.Now()}
	reported := time.Now()
	for {
		begin := time.Now()
		left, err := watch.look()
		switch {
		case err != nil:
			d.log.Warn("cannot count the flows that are still open; the drain goes on until its timeout", "error", err)
		case left.none():
			d.log.Info("drained: all flows have ended", "instance", d.opts.Instance)
			return
		case time.Since(reported) >= drainReport:
			d.log.Info("draining", "instance", d.opts.Instance, "open_flows", left.open, "direct_silent", left.silent.Round(time.Second).String())
			reported = time.Now()
		}
		pause := time.NewTimer(max(heartbeatInterval, drainLookShare*time.Since(begin)))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			reason := "the timeout is over"
			if d.ending.interrupted.Err() != nil {
				reason = "interrupted"
			}
			d.log.Warn("the drain ends before the flows: "+reason, "instance", d.opts.Instance, "open_flows", left.open)
			return
		}
	}
}

// drainWatch looks again and again at what a drain waits for.
type drainWatch struct {
	d           *daemon
	packets     uint64 // from clients to services of direct return, when last looked
	silentSince time.Time
}

// flowsLeft is what a drain still waits for.
type flowsLeft struct {
	open   uint64        // connections of NAT, and conversations over UDP
	direct bool          // there is direct return
	silent time.Duration // how long no packet has come for it
}

func (l flowsLeft) none() bool {
	return l.open == 0 && (!l.direct || l.silent >= drainSilence)
}

func (w *drainWatch) look() (left flowsLeft, err error) {
	swept, err := w.d.datapath.Sweep()
	if err != nil {
		return left, err
	}
	left.open = swept.Established
	contents, err := w.d.datapath.Contents()
	if err != nil {
		return left, err
	}
	counters, err := w.d.datapath.Counters()
	if err != nil {
		return left, err
	}
	var packets uint64
	for index, record := range contents.Services {
		if record.Forwarding.Direct() {
			left.direct = true
			packets += counters.Services[index].PacketsIn
		}
	}
	if packets != w.packets {
		w.packets, w.silentSince = packets, time.Now()
	}
	left.silent = time.Since(w.silentSince)
	return left, nil
}

// closedToNew is the services with no backend that takes new flows.
func closedToNew(services []model.Service) []model.Service {
	services = slices.Clone(services)
	for i := range services {
		services[i].Backends = slices.Clone(services[i].Backends)
		for j := range services[i].Backends {
			services[i].Backends[j].Weight = 0
		}
	}
	return services
}
