// Package health finds out which backends are well: it checks each backend of each service
// that asks for checks, and decides which backends take new flows.
//
//	Update ─► checks ─► schedule ─► probers ─► machine ─► Changed, OnTransition
//	                                              │
//	services of the configuration ─────► Serve ◄──┘ ─► the same with Idle, Down and Ramp set
//	backends out of reach ─────────────────┘
//
// Probing, deciding (machine) and choosing the backends that serve (serve) are separate: the latter
// two are functions of their arguments.
package health

import (
	"cmp"
	"container/heap"
	"context"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Options configure a Monitor.
type Options struct {
	Log *slog.Logger
	// OnTransition is called with every change of a state, once, in order for each backend; may be nil. Metrics
	// and events use it. It must not call the Monitor.
	OnTransition func(Transition)
	// DialDirect is needed for services with direct return.
	DialDirect DialDirect
	// Uplinks distinguishes failures of this machine's own network from failures of backends; nil: every
	// failure counts as the backend's.
	Uplinks *Uplinks
	// newProber replaces the real probers in tests.
	newProber func(target) prober
}

// Monitor checks backends from New to Close. Its methods may be called from any goroutine.
type Monitor struct {
	options Options
	ctx     context.Context // of all probes
	cancel  context.CancelFunc
	running sync.WaitGroup
	sockets chan struct{} // each probe over the network holds one
	execs   chan struct{} // each program
	wake    chan struct{} // capacity 1: the queue has a new first
	changed chan struct{} // capacity 1

	mu      sync.Mutex
	list    []*model.Service // the services that are checked, or need no checks
	checks  map[key]*check
	members map[member]*check                 // the same, by the members that a check is for
	twins   map[model.BackendAddress][]*check // the same, by backend
	owned   map[owner]int                     // number of checks of each owner
	queue   queue
	serving serving
	ramps   time.Time // when a weight rises next by itself; zero: none does
	lateMax time.Duration
	lateAll uint64
	probes  uint64
	totals  Totals
	// hereCount and hereError describe probes that this machine could not make.
	hereCount uint64
	hereError error
	awaited   map[*check]bool // the checks that Await waits for
	allProbed func()          // called when no awaited check is left
}

// owner is the reason why a backend is checked: a service, or a pool for all its services.
type owner struct{ service, pool string }

func ownerOf(s *model.Service) owner {
	if s.Pool != "" {
		return owner{pool: s.Pool}
	}
	return owner{service: s.Name}
}

// key names a backend of a service, or of a pool.
type key struct {
	owner
	backend model.BackendAddress
	// asked is the endpoint of a pool's backend: services of several ports, or of several VIPs with direct
	// return, may share the backend. It is not set for a service, whose backend stays the same when its
	// endpoint changes.
	asked endpoint
}

// key identifies the check of a target.
func (t target) key() key {
	k := key{owner: t.owner, backend: t.backend}
	if t.pool != "" {
		k.asked = t.endpoint
	}
	return k
}

// member is a backend in a service.
type member struct {
	service string
	backend model.BackendAddress
}

// check is one backend that is checked, for a service or a pool.
type check struct {
	key
	target  target
	prober  prober
	machine machine
	due     time.Time // of the next probe; of the present one while it runs
	index   int       // in the queue; -1: it is being probed
	members []string  // services that it is for; a check without services is removed
	gone    bool      // no service or pool needs it any more
	probed  bool      // a probe has ended
	// usual is the interface that the last successful probe left by; 0: not known.
	usual atomic.Int32
	// notJudged is the reason why the last probe says nothing about the backend; empty: it does.
	notJudged string
	changes   uint64 // of the machine's state
}

const (
	// socketsMax limits the probes at once: 5,000 checks at an interval of 2 s, none of them answered within a
	// timeout of 1 s, are 2,500. Each takes a file descriptor.
	socketsMax = 4096
	// execsMax limits the programs at once. Each is a process.
	execsMax = 64
	// startSpread is the distance between the first probes of checks that begin together, unless that would
	// take longer than an interval.
	startSpread = time.Millisecond
	// lateFrom is the delay from which a probe is late. A probe with a longer delay has waited for more than
	// the scheduler of a busy machine.
	lateFrom = 250 * time.Millisecond
)

// New returns a monitor that checks nothing yet.
func New(options Options) *Monitor {
	if options.newProber == nil {
		options.newProber = func(t target) prober { return newProber(reach{t, options.DialDirect}) }
	}
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	m := &Monitor{options: options,
		sockets: make(chan struct{}, socketsMax), execs: make(chan struct{}, execsMax),
		wake: make(chan struct{}, 1), changed: make(chan struct{}, 1),
		checks: map[key]*check{}, members: map[member]*check{}, twins: map[model.BackendAddress][]*check{}, owned: map[owner]int{}, serving: newServing()}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.running.Go(m.run)
	return m
}

// Close ends all probes, and returns when they have ended.
func (m *Monitor) Close() {
	m.cancel()
	m.running.Wait()
}

// Await returns when each check that Update has begun and whose backend has no known state has a result, or
// when ctx ends. It is for one caller, who does not call Update meanwhile.
func (m *Monitor) Await(ctx context.Context) {
	done := make(chan struct{})
	m.mu.Lock()
	m.awaited = map[*check]bool{}
	for _, c := range m.checks {
		if c.machine.state == model.HealthWaiting && !c.probed {
			m.awaited[c] = true
		}
	}
	none := len(m.awaited) == 0
	m.allProbed = sync.OnceFunc(func() { close(done) })
	m.mu.Unlock()
	if none {
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// Changed returns a channel that receives when the result of Serve may have changed.
func (m *Monitor) Changed() <-chan struct{} { return m.changed }

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Update sets the services that are checked; it costs as much as the changed services. A backend that was
// checked before keeps its state. A backend that was in the service without checks, or is checked in the same
// way in another present or former service (such as a service that is renamed), or in another way in the same
// pool, takes over the state it has there. For others held returns the state, until a result contradicts it; ""
// is unknown. No two services have the same name.
func (m *Monitor) Update(services []*model.Service, held func(service string, b model.BackendAddress) model.HealthState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	u := &update{Monitor: m, held: held, now: time.Now(), before: map[string]*model.Service{}, was: map[member]*check{}, had: map[owner]bool{}}
	gone, come := model.Changed(m.list, services)
	m.list = services
	for _, s := range come {
		u.had[ownerOf(s)] = m.owned[ownerOf(s)] > 0
	}
	for _, s := range gone {
		u.leave(s)
	}
	for _, s := range come {
		u.join(s)
	}
	u.finish()
}

// Reread makes checks of services read their files again.
func (m *Monitor) Reread() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.checks {
		if c.target.health.TLS.CAFile != "" {
			c.prober = m.options.newProber(c.target)
		}
	}
}

// update is one Update under way. The checks of services that are gone, or have changed, stay until its end:
// new services may take them over.
type update struct {
	*Monitor
	held   func(service string, b model.BackendAddress) model.HealthState
	now    time.Time
	before map[string]*model.Service // former versions of the services that are gone or different
	was    map[member]*check         // their checks
	had    map[owner]bool            // owners that had checks before, of the services to come
	left   []*check                  // that a service has left
	fresh  []*check
}

// leave removes a service.
func (u *update) leave(s *model.Service) {
	u.before[s.Name] = s
	if s.Health.Check == "" {
		return
	}
	for _, b := range s.Backends {
		of := member{s.Name, b.BackendAddress}
		c := u.members[of]
		if c == nil {
			continue // the service has the backend twice
		}
		delete(u.members, of)
		u.was[of] = c
		c.members = slices.DeleteFunc(c.members, func(name string) bool { return name == s.Name })
		u.left = append(u.left, c)
	}
}

// join adds a service.
func (u *update) join(s *model.Service) {
	if s.Health.Check == "" {
		return
	}
	u.serving.doubt([]string{s.Name}) // Serve may have been asked before
	for _, b := range s.Backends {
		t := target{owner: ownerOf(s), backend: b.BackendAddress, name: b.Name, endpoint: probed(s, b), health: s.Health}
		of := member{s.Name, b.BackendAddress}
		c := u.checks[t.key()]
		known := c != nil
		if !known {
			c = &check{key: t.key(), index: -1, machine: machine{state: model.HealthWaiting, since: u.now, joined: u.had[ownerOf(s)]}}
			u.checks[c.key] = c
			u.owned[c.owner]++
			u.fresh = append(u.fresh, c)
		}
		if u.members[of] == nil {
			u.members[of] = c
			c.members = append(c.members, s.Name)
		}
		if c.machine.state == model.HealthWaiting && c.machine.since.Equal(u.now) { // no state is known yet
			before := u.before[s.Name]
			switch {
			case before != nil && before.Health.Check == "" && has(before, b.BackendAddress):
				c.machine = machine{state: model.HealthUp}
			case u.was[of] != nil:
				c.machine = u.was[of].machine
			default:
				c.machine.adopt(t, of, u.twins[b.BackendAddress], u.held)
			}
		}
		if !known || !reflect.DeepEqual(c.target, t) {
			c.target, c.prober = t, u.options.newProber(t)
			if soon := u.now.Add(t.health.Interval); c.index >= 0 && soon.Before(c.due) {
				c.due = soon // the interval was longer
				heap.Fix(&u.queue, c.index)
			}
		}
	}
}

// finish ends the checks that no service needs any more, and begins the new ones.
func (u *update) finish() {
	for _, c := range u.left {
		if len(c.members) > 0 || c.gone {
			continue
		}
		c.gone = true
		if c.index >= 0 {
			heap.Remove(&u.queue, c.index)
		}
		delete(u.checks, c.key)
		if u.owned[c.owner]--; u.owned[c.owner] == 0 {
			delete(u.owned, c.owner)
		}
		others := slices.DeleteFunc(u.twins[c.backend], func(o *check) bool { return o == c })
		if u.twins[c.backend] = others; len(others) == 0 {
			delete(u.twins, c.backend)
		}
	}
	for _, c := range u.fresh { // not before: their states are unknown
		u.twins[c.backend] = append(u.twins[c.backend], c)
	}
	u.schedule(u.fresh)
}

func has(s *model.Service, b model.BackendAddress) bool {
	return slices.ContainsFunc(s.Backends, func(o model.Backend) bool { return o.BackendAddress == b })
}

// adopt takes over the state from a check that knows something of the backend.
func (m *machine) adopt(t target, of member, twins []*check, held func(string, model.BackendAddress) model.HealthState) {
	for _, twin := range twins {
		if twin.target.endpoint == t.endpoint && reflect.DeepEqual(twin.target.health, t.health) {
			*m = twin.machine
			return
		}
	}
	if held == nil {
		return
	}
	if state := held(of.service, of.backend); state == model.HealthUp || state == model.HealthDown {
		*m = machine{state: state}
	}
}

// schedule gives checks that begin now their first times.
func (m *Monitor) schedule(fresh []*check) {
	now := time.Now()
	for _, c := range fresh {
		spread := min(time.Duration(len(fresh))*startSpread, c.target.health.Interval)
		c.due = now.Add(rand.N(max(spread, 1)))
		heap.Push(&m.queue, c)
	}
	notify(m.wake)
}

// Status is the state of a backend in a service that checks it.
type Status struct {
	Service    string            `json:"service"`
	Backend    string            `json:"backend"`
	Check      model.HealthCheck `json:"check"`
	State      model.HealthState `json:"state"`
	Since      time.Time         `json:"since,omitzero"` // zero: the state is older than the daemon
	LastError  string            `json:"last_error,omitempty"`
	RestsUntil time.Time         `json:"kept_down_until,omitzero"` // by the flap limit, though it succeeds
	Adopted    bool              `json:"adopted,omitempty"`        // no check has ended yet since the daemon started
	Override   model.HealthState `json:"override,omitempty"`       // an operator's override
	Changes    uint64            `json:"changes"`                  // of State, since the daemon started or the check began
}

// Report lists the known states, by service and backend. services are the services in force.
func (m *Monitor) Report(services []*model.Service) []Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]Status, 0, len(m.members))
	for _, s := range services {
		for _, b := range s.Backends {
			c := m.members[member{s.Name, b.BackendAddress}]
			if c == nil {
				continue
			}
			list = append(list, Status{Service: s.Name, Backend: b.BackendAddress.String(), Check: s.Health.Check,
				State: c.machine.state, Since: c.machine.since, LastError: cmp.Or(c.notJudged, c.machine.lastError),
				RestsUntil: c.machine.restsUntil(), Adopted: !c.machine.result && c.machine.since.IsZero(), Override: b.Override.Health, Changes: c.changes})
		}
	}
	return list
}

// Changes returns the state that checks have found for a backend in a service, and how often it has changed;
// checked is false if there are no checks.
func (m *Monitor) Changes(service string, b model.BackendAddress) (state model.HealthState, changes uint64, checked bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.members[member{service, b}]
	if c == nil {
		return "", 0, false
	}
	return c.machine.state, c.changes, true
}

// Trouble counts the faults of this machine that prevent checks. A probe that cannot be made has no result: its
// backend's state stays.
type Trouble struct {
	Probes uint64        // probes that were begun
	Late   uint64        // of them, the probes that were late by lateFrom or more
	Max    time.Duration // how late, at most
	Failed uint64        // of them, the probes that could not be made
	Why    error         // the last of these
}

// Totals are the numbers of probes that have ended since the monitor began.
type Totals struct {
	Passed, Failed uint64
	NotMade        uint64 // probes that this machine could not make
	Late           uint64 // of all, the probes that were late by lateFrom or more
}

// Totals counts all probes so far.
func (m *Monitor) Totals() Totals {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.totals
}

// TakeTrouble returns the trouble since the last call.
func (m *Monitor) TakeTrouble() Trouble {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := Trouble{Probes: m.probes, Late: m.lateAll, Max: m.lateMax, Failed: m.hereCount, Why: m.hereError}
	m.probes, m.lateAll, m.lateMax, m.hereCount, m.hereError = 0, 0, 0, 0, nil
	return t
}
