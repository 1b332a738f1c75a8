package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

const (
	// healthBatch is how long a change of health waits for others: where a host dies, its
	// backends go down together, and the tables change once.
	healthBatch = 20 * time.Millisecond
	// latePart is one of how many checks that start late makes a condition; a single one may
	// have met a moment in which the machine did something else.
	latePart = 100
	// lateQuiet is how long none must have been late, or have failed here, for it to end.
	lateQuiet = 10 * time.Second
)

// checks are the health checks of the services in force, with their results. Its methods are for one caller at a
// time, but for servedLast and those of the monitor.
type checks struct {
	monitor    *health.Monitor
	conditions *condition.Set
	direct     directWay
	uplinks    *health.Uplinks
	// held says how the data plane treated a backend when this process adopted it; nil once that is used.
	held     func(service string, b model.BackendAddress) model.HealthState
	revision state.Revision // of the snapshot that the monitor checks
	checked  []*model.Service
	rereads  bool
	doubted  atomic.Bool // whether backends can be reached may be something else for all services

	mu     sync.Mutex
	served []*model.Service // replaced as a whole, never changed
}

// newChecks begins to check. contents are the maps': who has slots there serves, and
// goes on to until a check contradicts it.
func newChecks(contents reconcile.Contents, conditions *condition.Set, events *control.Events, direct directWay, log *slog.Logger) *checks {
	tell := func(t health.Transition) {
		logTransition(log, t)
		events.Publish(eventOfHealth(t))
	}
	uplinks, err := health.NewUplinks(log)
	if err != nil {
		log.Warn("failures of this machine's own network count as failures of the backends that are checked", "error", err)
	}
	return &checks{
		monitor:    health.New(health.Options{Log: log, OnTransition: tell, DialDirect: direct.dial, Uplinks: uplinks}),
		conditions: conditions, direct: direct, held: heldStates(contents), uplinks: uplinks,
	}
}

// close ends the checks, and takes away what they used.
func (c *checks) close() error {
	c.monitor.Close()
	if c.uplinks != nil {
		c.uplinks.Close()
	}
	return c.direct.Close()
}

// logTransition is the one line that a change of state has in the log.
func logTransition(log *slog.Logger, t health.Transition) {
	level := slog.LevelInfo
	if t.To == model.HealthDown {
		level = slog.LevelWarn
	}
	log.Log(context.Background(), level, t.String(), whose(t), "backend", t.Backend, "from", t.From, "to", t.To)
}

// whose is the service or the pool that a backend was checked for.
func whose(t health.Transition) slog.Attr {
	if t.Pool != "" {
		return slog.String("pool", t.Pool)
	}
	return slog.String("service", t.Service)
}

// reread has what checks read from files read again.
func (c *checks) reread() { c.rereads = true }

// doubt has it asked again of all services whether their backends can be reached. It may be called at any time.
func (c *checks) doubt() { c.doubted.Store(true) }

// serve is a snapshot's services with what health and next hops say.
func (c *checks) serve(snapshot *state.Snapshot, unreachable func(direct bool, backend netip.Addr) bool) []*model.Service {
	if c.revision != snapshot.Revision {
		_, come := model.Changed(c.checked, snapshot.Services)
		c.direct.prepare(come)
		c.monitor.Update(snapshot.Services, c.held)
		c.revision, c.checked, c.held = snapshot.Revision, snapshot.Services, nil
	}
	if c.rereads {
		c.rereads = false
		c.monitor.Reread()
	}
	served := c.monitor.Serve(snapshot.Services, c.doubted.Swap(false), unreachable)
	c.conditions.Only(condition.HealthNotBelieved, c.panics(served))
	return served
}

// firstResults is how long a start waits for the first results of checks. Tables that are filled as one result
// comes after the other are in transition for long, and other than those of other balancers meanwhile.
const firstResults = time.Second

// awaitFirst waits for the first results of checks, before the data plane has services.
func (c *checks) awaitFirst(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, firstResults)
	defer cancel()
	c.monitor.Await(limited)
}

// isFirst reports whether no services have been served since the start.
func (c *checks) isFirst() bool { return c.held != nil }

// expect is the services of a snapshot to come, with what is known of their backends by now.
func (c *checks) expect(next *state.Snapshot, unreachable func(direct bool, backend netip.Addr) bool) []*model.Service {
	if c.isFirst() { // what the maps say is not taken over yet, and nothing is in force
		return c.serve(next, unreachable)
	}
	return c.monitor.Serve(next.Services, false, unreachable)
}

// applied notes the services that were applied. Until then a backend that is down gets new flows, and
// nobody is told otherwise.
func (c *checks) applied(served []*model.Service) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.served = served
}

// servedLast are the services as last applied, for reading alone.
func (c *checks) servedLast() []*model.Service {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.served
}

// heldStates tells the states from the maps: up is who has slots of the service's table, down
// whose record says so. Of others nothing is known.
func heldStates(contents reconcile.Contents) func(string, model.BackendAddress) model.HealthState {
	type in struct {
		service string
		backend model.BackendAddress
	}
	serves, known, down := map[in]bool{}, map[string]bool{}, map[model.BackendAddress]bool{}
	for _, b := range contents.Backends {
		if b.Down {
			down[b.BackendAddress] = true
		}
	}
	for index, record := range contents.Services {
		known[record.Name] = true
		named := map[reconcile.BackendRef]bool{}
		for _, slot := range contents.Slots[index].All() {
			named[slot.Current] = true
		}
		for ref := range named {
			if b, ok := contents.Backends[ref.Index]; ok && b.BackendRef == ref {
				serves[in{record.Name, b.BackendAddress}] = true
			}
		}
	}
	return func(service string, b model.BackendAddress) model.HealthState {
		switch {
		case serves[in{service, b}]:
			return model.HealthUp
		case known[service] && down[b]:
			return model.HealthDown
		}
		return ""
	}
}

// panics is a condition for every service whose health is not believed.
func (c *checks) panics(services []*model.Service) (all []condition.Condition) {
	now := c.monitor.Panics()
	if len(now) == 0 {
		return nil
	}
	for _, s := range services {
		if slices.Contains(now, s.Name) {
			all = append(all, condition.Condition{Subject: s.Name,
				Text: fmt.Sprintf("fewer than %d %% of its backends are up: all of them take flows, whatever their checks say (health.panic)", s.Health.Panic)})
		}
	}
	return all
}

// troubleWatch turns what is in the way of checks into conditions. It is for one caller at a time.
type troubleWatch struct{ lasting condition.Lasting }

func newTroubleWatch(conditions *condition.Set) *troubleWatch {
	return &troubleWatch{condition.Lasting{Set: conditions, Hold: lateQuiet}}
}

// look takes the trouble since the look before.
func (w *troubleWatch) look(trouble health.Trouble, now time.Time) {
	if trouble.Failed > 0 {
		w.lasting.See(condition.Condition{Code: condition.ChecksFailHere, Subject: "host",
			Text: fmt.Sprintf("health checks cannot be made here, and their last results stay in force: %v", trouble.Why)}, now)
	}
	if trouble.Late*latePart > trouble.Probes {
		w.lasting.See(condition.Condition{Code: condition.ChecksLate, Subject: "host",
			Text: "health checks start later than they should, so a failing backend is detected late"}, now)
	}
	w.lasting.Pass(now)
}
