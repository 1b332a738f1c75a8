package daemon

import (
	"context"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"log/slog"
	"time"
)

// takenInterval is how often it is asked which source ports are somebody else's. One that is free again is given back that much later.
const takenInterval = 10 * time.Second

// takenPorts keeps flows of full NAT from the source ports that something else on this host has.
type takenPorts struct {
	list    func() ([]store.SourcePort, error) // nil: nobody has any
	reserve func([]store.SourcePort) error
	log     *slog.Logger
	said    string // why nothing could be listed, as the log has it last
}

// look reserves what is taken now. What cannot be listed stays as it was: a flow that meets a port of another one is lost, and the others go on.
func (t *takenPorts) look() error {
	if t.list == nil {
		return t.reserve(nil) // a process before may have reserved some
	}
	ports, err := t.list()
	if err != nil {
		if t.said != err.Error() {
			t.said = err.Error()
			t.log.Warn("cannot list the source ports that others on this host use: a new connection that gets one of them is not answered; trying again", "error", err)
		}
		return nil
	}
	t.said = ""
	return t.reserve(ports)
}

// run looks at once, because others went on while the programs were being attached, and then again and again until ctx ends.
func (t *takenPorts) run(ctx context.Context) {
	if t.list == nil {
		return
	}
	tick := time.NewTicker(takenInterval)
	defer tick.Stop()
	for {
		if err := t.look(); err != nil {
			t.log.Warn("cannot reserve the source ports that others on this host use; trying again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
