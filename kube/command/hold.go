package command

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"

	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/kube/hold"
)

// holder keeps the node's connection tracking and translation on while agents run with --moving. Its table outlives an
// agent that keeps the data plane, and ends with an agent that detaches, or with the start of one without --moving.
type holder struct {
	on   bool // --moving
	log  *slog.Logger
	made bool        // by this process
	runs atomic.Bool // the balancer has begun
}

// take must be called before the balancer begins.
func (h *holder) take() {
	if !h.on {
		return
	}
	var err error
	if h.made, err = hold.Take(); err != nil {
		h.log.Warn("could not keep connection tracking and translation on: connections that kube-proxy balanced are lost when its rules are removed, "+
			"if no other rules on this node need both; leave kube-proxy's rules until these connections have ended", "error", err)
	}
}

// taken returns a function that lists the source ports of the kernel's translation, while the translation is held; nil: it is not, and no ports are taken.
func (h *holder) taken() func() ([]store.SourcePort, error) {
	if !h.on {
		return nil
	}
	return hold.Translated
}

// beside returns a source's Run, which begins once the balancer is in force: from then on, without --moving, no connection is left to the host.
func (h *holder) beside(follow func(context.Context, func(daemon.Change) error)) func(context.Context, func(daemon.Change) error) {
	return func(ctx context.Context, declare func(daemon.Change) error) {
		h.runs.Store(true)
		if !h.on {
			if err := h.release(); err != nil {
				h.log.Warn("could not remove the table of an agent with --moving; connection tracking stays on", "error", err)
			}
		}
		follow(ctx, declare)
	}
}

// over must be called after the node's end, with its error: a node that did not begin leaves no table.
func (h *holder) over(err error) error {
	if err != nil && h.made && !h.runs.Load() {
		return errors.Join(err, h.release())
	}
	return err
}

func (h *holder) release() error {
	was, err := hold.Release()
	if was {
		h.log.Info("connection tracking and translation are no longer kept on", "table", "inet "+hold.Table)
	}
	return err
}
