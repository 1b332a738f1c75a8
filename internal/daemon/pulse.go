package daemon

import (
	"log/slog"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/datapath"
	"github.com/shunt-lb/shunt/internal/health"
	"github.com/shunt-lb/shunt/internal/kernel"
)

const (
	heartbeatInterval = time.Second
	sweepInterval     = 10 * time.Second
)

// kept is what a data plane needs from time to time; datapath.Datapath says what each does.
type kept interface {
	Heartbeat() error
	ReasonCounts() (map[string]kernel.Count, error)
	Sweep() (datapath.SweepResult, error)
	Recall() (datapath.RecallResult, error)
}

// pulse keeps a data plane going, and turns what it counts into conditions. It is for one caller
// at a time.
type pulse struct {
	datapath kept
	log      *slog.Logger
	shortage *shortageWatch
	missing  *missedWatch
	trouble  *troubleWatch
}

func newPulse(dp kept, instance string, conditions *condition.Set, log *slog.Logger) *pulse {
	return &pulse{dp, log, newShortageWatch(instance, conditions), newMissedWatch(conditions), newTroubleWatch(conditions)}
}

// beat is due every heartbeatInterval. missed are the frames that each interface has missed, and
// trouble what checks have met since the beat before.
func (p *pulse) beat(missed map[string]uint64, trouble health.Trouble, now time.Time) {
	if err := p.datapath.Heartbeat(); err != nil {
		p.log.Error("the data plane does not hear the daemon and asks the routing table instead", "error", err)
	}
	if reasons, err := p.datapath.ReasonCounts(); err != nil {
		p.log.Error("cannot read the counters that show shortages", "error", err)
	} else {
		p.shortage.look(reasons, now)
	}
	p.missing.look(missed, now)
	p.trouble.look(trouble, now)
}

// sweep is due every sweepInterval.
func (p *pulse) sweep() {
	if _, err := p.datapath.Sweep(); err != nil {
		p.log.Warn("cannot remove ended flows; packets remove them as they arrive", "error", err)
	}
	if _, err := p.datapath.Recall(); err != nil {
		p.log.Warn("cannot remove remembered flows that are over; trying again", "error", err)
	}
}
