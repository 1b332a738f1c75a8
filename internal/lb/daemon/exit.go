package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

const (
	// drainSilence is how long no packet may have come for direct return, whose flows nobody
	// counts, before they are taken for ended. It is the default of `backend drain --idle`.
	drainSilence = 30 * time.Second
	// drainReport is how often the log says how far a drain is.
	drainReport = 10 * time.Second
	// A walk through the flow table may take this share of the time at most.
	drainLookShare = 10
)

// Close is node.Instance's.
func (d *daemon) Close(keep bool) error {
	d.changing.Lock() // a change under way ends first, and a later one is refused
	defer d.changing.Unlock()
	d.applying.Lock()
	d.stopped = true
	d.applying.Unlock()
	d.end()
	d.running.Wait()
	ended := d.endChecks()
	d.names.follower.Close()
	d.views.end()
	if keep {
		return errors.Join(ended, d.keep())
	}
	return errors.Join(ended, d.detach())
}

// keep lets go of the data plane as SIGKILL would, but in order: what operators asked for is
// on disk, the programs trust the next hops for as long as they may, and the log says what
// goes on.
func (d *daemon) keep() error {
	errs := []error{d.writer.Save(), d.announcer.close(true), d.ways.Close(true), d.sockets.close(true), d.datapath.Heartbeat()}
	d.server.beside.Close()
	since := time.Now()
	errs = append(errs, d.datapath.Close())
	d.log.Info(unattended(d.host.Instance, len(d.writer.Snapshot().Services), since), "instance", d.host.Instance)
	return errors.Join(errs...)
}

// unattended is the last word of a daemon that leaves a data plane behind.
func unattended(instance string, services int, since time.Time) string {
	return fmt.Sprintf("still forwarding %s without health checks since %s; `%s` ends it",
		value.Counted(services, "service"), since.Local().Format(time.DateTime), node.DetachCommand(instance))
}

// AwaitDrained is node.Drainer's.
func (d *daemon) AwaitDrained(ctx context.Context) { d.awaitFlows(ctx) }

// Drain is node.Drainer's: no service takes new flows. Health is followed all the same.
func (d *daemon) Drain() {
	d.applying.Lock()
	d.draining = true
	_, _ = d.carryOut() // what failed is tried again
	d.applying.Unlock()
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
			d.log.Info("drained: all flows have ended", "instance", d.host.Instance)
			return
		case time.Since(reported) >= drainReport:
			d.log.Info("draining", "instance", d.host.Instance, "open_flows", left.open, "direct_silent", left.silent.Round(time.Second).String())
			reported = time.Now()
		}
		pause := time.NewTimer(max(heartbeatInterval, drainLookShare*time.Since(begin)))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			reason := "the timeout is over"
			if d.host.Interrupted.Err() != nil {
				reason = "interrupted"
			}
			d.log.Warn("the drain ends before the flows: "+reason, "instance", d.host.Instance, "open_flows", left.open)
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
func closedToNew(services []*model.Service) []*model.Service {
	closed := make([]*model.Service, len(services))
	for i := range services {
		service := *services[i]
		service.Backends = slices.Clone(service.Backends)
		for j := range service.Backends {
			service.Backends[j].Weight = 0
		}
		closed[i] = &service
	}
	return closed
}
