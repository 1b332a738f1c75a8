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
	// healthBatch is the time that a change of health waits for more changes: when a host dies, its backends go
	// down together, and the tables change once.
	healthBatch = 20 * time.Millisecond
	// latePart is the share of late checks that raises a condition, as one in latePart; a single late check may
	// have met a moment in which the machine was busy.
	latePart = 100
	// lateQuiet is the time without a late or locally failed check after which the condition ends.
	lateQuiet = 10 * time.Second
)

// checks are the health checks of the services in force, with their results. One caller at a time may use its
// methods, except for servedLast and the methods of the monitor.
type checks struct {
	monitor    *health.Monitor
	conditions *condition.Set
	direct     directPath
	uplinks    *health.Uplinks
	// held returns the state in which the data plane held a backend when this process adopted it; nil after its first use.
	held     func(service string, b model.BackendAddress) model.HealthState
	revision state.Revision // of the snapshot that the monitor checks
	checked  []*model.Service
	rereads  bool
	doubted  atomic.Bool // for all services, the answer whether backends can be reached may have changed

	mu     sync.Mutex
	served []*model.Service // replaced as a whole, never changed
}

// newChecks begins to check. contents are the contents of the maps: a backend with slots there counts as up
// until a check contradicts it.
func newChecks(contents reconcile.Contents, conditions *condition.Set, events *control.Events, direct directPath, log *slog.Logger) *checks {
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

// close ends the checks, and removes the things that they used.
func (c *checks) close() error {
	c.monitor.Close()
	if c.uplinks != nil {
		c.uplinks.Close()
	}
	return c.direct.Close()
}

// logTransition writes the one log line of a change of state.
func logTransition(log *slog.Logger, t health.Transition) {
	level := slog.LevelInfo
	if t.To == model.HealthDown {
		level = slog.LevelWarn
	}
	log.Log(context.Background(), level, t.String(), whose(t), "backend", t.Backend, "from", t.From, "to", t.To)
}

// whose names the service or the pool that a backend was checked for.
func whose(t health.Transition) slog.Attr {
	if t.Pool != "" {
		return slog.String("pool", t.Pool)
	}
	return slog.String("service", t.Service)
}

// reread makes the checks read their files again.
func (c *checks) reread() { c.rereads = true }

// doubt makes the next serve ask again for all services whether their backends can be reached. It may be called
// at any time.
func (c *checks) doubt() { c.doubted.Store(true) }

// serve returns a snapshot's services with the findings of health checks and next hops.
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

// firstResults is the time that a start waits for the first results of checks. If tables were filled as the
// results arrive, they would be in transition for long, and differ from the tables of other balancers
// meanwhile.
const firstResults = time.Second

// awaitFirst waits for the first results of checks, before the data plane has services.
func (c *checks) awaitFirst(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, firstResults)
	defer cancel()
	c.monitor.Await(limited)
}

// isFirst reports whether no services have been served since the start.
func (c *checks) isFirst() bool { return c.held != nil }

// expect returns the services of a future snapshot, with the present knowledge of their backends.
func (c *checks) expect(next *state.Snapshot, unreachable func(direct bool, backend netip.Addr) bool) []*model.Service {
	if c.isFirst() { // the states in the maps are not taken over yet, and nothing is in force
		return c.serve(next, unreachable)
	}
	return c.monitor.Serve(next.Services, false, unreachable)
}

// applied records the services that were applied. Until then a backend that is down gets new flows, and its
// change is not reported.
func (c *checks) applied(served []*model.Service) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.served = served
}

// servedLast returns the services as last applied. Callers must not change them.
func (c *checks) servedLast() []*model.Service {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.served
}

// heldStates derives states from the maps: a backend with slots in the service's table is up, and a backend
// whose record says so is down. Nothing is known of other backends.
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

// panics returns a condition for every service whose health checks are not believed.
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

// troubleWatch turns problems of checks into conditions. One caller at a time may use it.
type troubleWatch struct{ lasting condition.Lasting }

func newTroubleWatch(conditions *condition.Set) *troubleWatch {
	return &troubleWatch{condition.Lasting{Set: conditions, Hold: lateQuiet}}
}

// look handles the trouble since the last call.
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
