package daemon

import (
	"context"
	"log/slog"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// takenInterval is the time between two questions for the source ports of other programs. A port that becomes
// free is given back with up to that delay.
const takenInterval = 10 * time.Second

// takenPorts keeps flows of full NAT from using source ports of other programs on this host.
type takenPorts struct {
	list    func() ([]store.SourcePort, error) // nil: no other program has any
	reserve func([]store.SourcePort) error
	log     *slog.Logger
	said    string // the last logged failure
}

// look reserves the ports that are in use now. A failure is a warning, also at the start, and is tried again: a
// flow that meets another program's port is lost, and all other flows continue.
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

// reserveListed also describes a failure in words.
func (t *takenPorts) reserveListed() (attempted string, err error) {
	const lost = ": a new connection that gets one of these ports is not answered"
	if t.list == nil {
		return "cannot give back the source ports that an earlier daemon has reserved: new connections do not get these ports", t.reserve(nil)
	}
	ports, err := t.list()
	if err != nil {
		return "cannot list the source ports that other programs on this host use" + lost, err
	}
	return "cannot reserve all source ports that other programs on this host use" + lost, t.reserve(ports)
}

// run looks at once, because other programs went on while shunt's programs were being attached, and then
// repeatedly until ctx ends. It returns if there is nothing to look for.
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
