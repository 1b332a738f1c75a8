package daemon

import (
	"context"
	"log/slog"
	"sync"
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

	mu   sync.Mutex // one look at a time
	said string     // the last logged failure
}

// taking must be called right before and right after addresses of services are put into the maps. Until then another
// program may have served these addresses, and its connections keep their ports. The first look finds nearly all of
// them before shunt begins a flow, the second one the few that began in between.
func (t *takenPorts) taking() {
	if t.list != nil {
		t.look() // if it fails, run tries again
	}
}

// look reserves the ports that are in use now, and reports whether it has succeeded. A failure is a warning, also at the
// start, and is tried again: a flow that meets another program's port is lost, and all other flows continue.
func (t *takenPorts) look() (done bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	attempted, err := t.reserveListed()
	if err == nil {
		t.said = ""
		return true
	}
	if said := attempted + err.Error(); said != t.said {
		t.said = said
		t.log.Warn(attempted+"; trying again", "error", err)
	}
	return false
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

// run looks at once, because frontends of an earlier daemon may be in force already, and ports that it has reserved are
// to be given back. Then it looks repeatedly until ctx ends. It returns if there is nothing to look for.
func (t *takenPorts) run(ctx context.Context) {
	tick := time.NewTicker(takenInterval)
	defer tick.Stop()
	for {
		if done := t.look(); done && t.list == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
