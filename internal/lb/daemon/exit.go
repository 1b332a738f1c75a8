package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

const (
	// drainSilence is the time without a packet after which flows with direct return, which cannot be counted,
	// are considered ended. It is the default of `backend drain --idle`.
	drainSilence = 30 * time.Second
	// drainReport is the time between two log lines about the progress of a drain.
	drainReport = 10 * time.Second
	// A walk through the flow table may take at most this share of the time.
	drainLookShare = 10
)

// unattended is the last log line of a daemon that leaves a data plane behind.
func unattended(instance string, services int, since time.Time) string {
	return fmt.Sprintf("still forwarding %s without health checks since %s; `%s` ends it",
		value.Counted(services, "service"), since.Local().Format(time.DateTime), node.DetachCommand(instance))
}

// flowCounter counts the flows of a data plane; see datapath.Datapath.
type flowCounter interface {
	Sweep() (store.SweepResult, error)
	Contents() (reconcile.Contents, error)
	Counters() (store.Counters, error)
}

// drainage waits for the flows of a data plane that takes no new ones.
type drainage struct {
	flows       flowCounter
	log         *slog.Logger
	interrupted context.Context //nolint:containedctx // it says why the wait ends
}

// await returns when no flow is open any more, or when ctx ends. The log says which of the two happened.
func (d drainage) await(ctx context.Context) {
	watch := drainWatch{flows: d.flows, silentSince: time.Now()}
	reported := time.Now()
	for {
		begin := time.Now()
		left, err := watch.look()
		switch {
		case err != nil:
			d.log.Warn("cannot count the flows that are still open; the drain goes on until its timeout", "error", err)
		case left.none():
			d.log.Info("drained: all flows have ended")
			return
		case time.Since(reported) >= drainReport:
			d.log.Info("draining", "open_flows", left.open, "direct_silent", left.silent.Round(time.Second).String())
			reported = time.Now()
		}
		pause := time.NewTimer(max(heartbeatInterval, drainLookShare*time.Since(begin)))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			reason := "the timeout is over"
			if d.interrupted.Err() != nil {
				reason = "interrupted"
			}
			d.log.Warn("the drain ends before the flows: "+reason, "open_flows", left.open)
			return
		}
	}
}

// drainWatch repeatedly counts the flows that a drain waits for.
type drainWatch struct {
	flows       flowCounter
	packets     uint64 // from clients to services of direct return, when last looked
	silentSince time.Time
}

// flowsLeft are the flows that a drain still waits for.
type flowsLeft struct {
	open   uint64        // connections of NAT, and conversations over UDP
	direct bool          // there is direct return
	silent time.Duration // how long no packet has come for it
}

func (l flowsLeft) none() bool {
	return l.open == 0 && (!l.direct || l.silent >= drainSilence)
}

func (w *drainWatch) look() (left flowsLeft, err error) {
	swept, err := w.flows.Sweep()
	if err != nil {
		return left, err
	}
	left.open = swept.Established
	contents, err := w.flows.Contents()
	if err != nil {
		return left, err
	}
	counters, err := w.flows.Counters()
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

// closedToNew returns the services with no backend that takes new flows.
func closedToNew(services []*model.Service) []*model.Service {
	closed := make([]*model.Service, len(services))
	for i := range services {
		service := *services[i]
		service.Backends = slices.Clone(service.Backends)
		for j := range service.Backends {
			override := &service.Backends[j].Override
			override.Weighs, override.Weight = true, 0
		}
		closed[i] = &service
	}
	return closed
}
