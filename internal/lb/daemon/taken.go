package daemon

import (
	"context"
	"log/slog"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// takenInterval is how often it is asked which source ports are somebody else's. One that is free again is given back that much later.
const takenInterval = 10 * time.Second

// takenPorts keeps flows of full NAT from the source ports that something else on this host has.
type takenPorts struct {
	list    func() ([]store.SourcePort, error) // nil: nobody has any
	reserve func([]store.SourcePort) error
	log     *slog.Logger
	said    string // what went wrong, as the log has it last
}

// look reserves what is taken now. What fails is a warning, also at the start, and is tried again: a flow that meets a port of another one
// is lost, and all others go on.
func (t *takenPorts) look() {
	attempted, err := t.reserveListed()
	if err == nil {
		t.said = ""
		return
	}
	if said := attempted + err.Error(); said != t.said {
		t.said = said
		t.log.Warn(attempted+"; trying again", "error", err)
	}
}

// reserveListed also says in words what it could not do.
func (t *takenPorts) reserveListed() (attempted string, err error) {
	const lost = ": a new connection that gets one of them is not answered"
	if t.list == nil {
		return "cannot give back the source ports that a daemon before has reserved: new connections do not get them", t.reserve(nil)
	}
	ports, err := t.list()
	if err != nil {
		return "cannot list the source ports that others on this host use" + lost, err
	}
	return "cannot reserve all source ports that others on this host use" + lost, t.reserve(ports)
}

// run looks at once, because others went on while the programs were being attached, and then again and again until ctx ends, or there is
// nothing to look for.
func (t *takenPorts) run(ctx context.Context) {
	tick := time.NewTicker(takenInterval)
	defer tick.Stop()
	for t.list != nil || t.said != "" {
		t.look()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
