package daemon

import (
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/health"
)

const (
	heartbeatInterval = time.Second
	sweepInterval     = 10 * time.Second
)

// kept is a data plane that needs these calls from time to time; see datapath.Datapath.
type kept interface {
	Heartbeat() error
	ReasonCounts() (map[string]kernel.Count, error)
	Sweep() (store.SweepResult, error)
	Recall() (store.RecallResult, error)
	CountOpen() (store.OpenByName, error)
}

// pulse keeps a data plane alive, and turns its counters into conditions. One caller at a time may use it.
type pulse struct {
	datapath kept
	log      *slog.Logger
	shortage *shortageWatch
	missing  *missedWatch
	trouble  *troubleWatch

	// Results of the last walks through the tables; nil before the first. They may be read at any time.
	flows      atomic.Pointer[store.SweepResult]
	remembered atomic.Pointer[store.RecallResult]
	open       atomic.Pointer[store.OpenByName]
}

func newPulse(dp kept, instance string, conditions *condition.Set, log *slog.Logger) *pulse {
	return &pulse{datapath: dp, log: log, shortage: newShortageWatch(instance, conditions), missing: newMissedWatch(conditions),
		trouble: newTroubleWatch(conditions)}
}

// beat is called every heartbeatInterval. missed are the frames that each interface has missed, and trouble
// lists the problems of checks since the last beat.
func (p *pulse) beat(missed map[string]uint64, trouble health.Trouble, now time.Time) {
	if err := p.datapath.Heartbeat(); err != nil {
		p.log.Error("the daemon cannot tell the data plane that it is alive; the programs look up the routing table instead", "error", err)
	}
	if reasons, err := p.datapath.ReasonCounts(); err != nil {
		p.log.Error("cannot read the counters that show shortages", "error", err)
	} else {
		p.shortage.look(reasons, now)
	}
	p.missing.look(missed, now)
	p.trouble.look(trouble, now)
}

// sweep is called every sweepInterval. counts says whether it also counts the open flows, which takes a walk of
// its own.
func (p *pulse) sweep(counts bool) {
	if flows, err := p.datapath.Sweep(); err != nil {
		p.log.Warn("cannot remove ended flows; packets remove them as they arrive", "error", err)
	} else {
		p.flows.Store(&flows)
	}
	if remembered, err := p.datapath.Recall(); err != nil {
		p.log.Warn("cannot remove remembered flows that are over; trying again", "error", err)
	} else {
		p.remembered.Store(&remembered)
	}
	if !counts {
		p.open.Store(nil)
		return
	}
	if open, err := p.datapath.CountOpen(); err != nil {
		p.log.Warn("cannot count the open flows of services and backends for the metrics", "error", err)
	} else {
		p.open.Store(&open)
	}
}
