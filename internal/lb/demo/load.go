package demo

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

const (
	// askTimeout is when a request counts as failed. A lost packet is sent again after
	// 200 ms (Linux's TCP_RTO_MIN), so this is several losses in a row.
	askTimeout = 2 * time.Second
	// requestInterval is how often each open flow asks.
	requestInterval = 40 * time.Millisecond
	// newFlowInterval is how often a new connection is opened beside them.
	newFlowInterval = 10 * time.Millisecond
)

// session is one connection of the client's, or one UDP socket.
type session struct {
	target target
	flow   *lab.Session
}

// open makes a connection from the client; port 0 lets the kernel choose the source port.
func (d *demo) open(ctx context.Context, to target, port int) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var local netip.AddrPort
	if port != 0 {
		local = to.wildcard(port)
	}
	flow, err := d.top.Client.OpenSession(ctx, to.network, local, to.vip.String())
	if err != nil {
		return nil, err
	}
	return &session{target: to, flow: flow}, nil
}

// ask is one request.
func (s *session) ask(ctx context.Context) (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return s.flow.Ask(ctx, "/")
}

func (s *session) close() { _ = s.flow.Close() }

// once opens a flow, asks once, and closes it.
func (d *demo) once(ctx context.Context, to target, port int) (lab.Answer, error) {
	s, err := d.open(ctx, to, port)
	if err != nil {
		return lab.Answer{}, err
	}
	defer s.close()
	return s.ask(ctx)
}

// flow is a session that asks again and again. A TCP connection that breaks is opened
// anew, as a browser would.
type flow struct {
	session *session

	mu    sync.Mutex
	state flowState
}

// flowState records the answers that a flow has seen.
type flowState struct {
	backend  string // the last that answered
	requests int    // answered
	failures int
	moves    int // answers from another backend than before, and broken connections
	reopened int
	slowest  time.Duration // since it was last looked at
	fault    error         // the last
	// failedBegan is when the last request began that failed.
	failedBegan time.Time
}

// load is many flows at once.
type load struct {
	flows []*flow
	stop  context.CancelFunc
	wg    sync.WaitGroup
}

// flowsMin is how many flows of each protocol the load has at least, and flowsOnEachMin how
// many of them on each backend: so many connections are opened as that takes.
const (
	flowsMin       = 36
	flowsOnEachMin = 3
	flowsMax       = 400
	flowPortFirst  = 20000 // of UDP sockets: a port used twice would be the same flow
)

// startFlows opens the flows and lets them ask.
func (d *demo) startFlows(ctx context.Context) error {
	l := &load{}
	d.flows = l
	for _, to := range targets {
		on := map[string]int{}
		least := func() int {
			fewest := flowsMax
			for _, host := range d.top.Backends {
				fewest = min(fewest, on[host.Name()])
			}
			return fewest
		}
		for n := 0; n < flowsMin/2 || least() < flowsOnEachMin; n++ {
			if n == flowsMax {
				return fmt.Errorf("open %d flows of %s: fewer than %d reached one of the backends: %v", n, to, flowsOnEachMin, on)
			}
			port := 0
			if to.network == "udp" {
				port = flowPortFirst + d.udpFlows
				d.udpFlows++
			}
			s, err := d.open(ctx, to, port)
			if err != nil {
				return fmt.Errorf("open a flow of %s: %w", to, err)
			}
			f := &flow{session: s}
			l.flows = append(l.flows, f)
			answer, err := s.ask(ctx)
			if err != nil {
				return fmt.Errorf("first request of a flow of %s: %w", to, err)
			}
			d.made[to.service]++
			f.state.backend = answer.Backend
			on[answer.Backend]++
		}
	}
	ctx, l.stop = context.WithCancel(ctx)
	for i, f := range l.flows {
		l.wg.Add(1)
		go func() {
			defer l.wg.Done()
			f.run(ctx, d, requestInterval*time.Duration(i)/time.Duration(len(l.flows)))
		}()
	}
	return nil
}

// run asks until ctx ends; delay spreads the flows over the interval.
func (f *flow) run(ctx context.Context, d *demo, delay time.Duration) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(delay):
	}
	tick := time.NewTicker(requestInterval)
	defer tick.Stop()
	for {
		begin := time.Now()
		answer, err := f.session.ask(ctx)
		if ctx.Err() != nil {
			return
		}
		f.record(answer, err, begin)
		if err != nil && f.session.target.network == "tcp" {
			f.reopen(ctx, d)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (f *flow) record(answer lab.Answer, err error, began time.Time) {
	took := time.Since(began)
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &f.state
	s.slowest = max(s.slowest, took)
	if err != nil {
		s.failures++
		s.fault, s.failedBegan = err, began
		return
	}
	s.requests++
	if answer.Backend != s.backend {
		s.moves++
		s.backend = answer.Backend
	}
}

// reopen makes a new connection instead of a broken one.
func (f *flow) reopen(ctx context.Context, d *demo) {
	f.session.close()
	began := time.Now()
	next, err := d.open(ctx, f.session.target, 0)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state.reopened++
	if err != nil {
		f.state.failures++
		f.state.fault, f.state.failedBegan = err, began
		return
	}
	f.session = next
}

// look is the state of every flow. It starts a new search for the slowest request.
func (l *load) look() []flowState {
	states := l.lookAgain()
	for _, f := range l.flows {
		f.mu.Lock()
		f.state.slowest = 0
		f.mu.Unlock()
	}
	return states
}

// lookAgain is look without a new search.
func (l *load) lookAgain() []flowState {
	states := make([]flowState, len(l.flows))
	for i, f := range l.flows {
		f.mu.Lock()
		states[i] = f.state
		f.mu.Unlock()
	}
	return states
}

// endFlows ends the load, if there is one.
func (d *demo) endFlows() {
	if d.flows == nil {
		return
	}
	if d.flows.stop != nil {
		d.flows.stop()
	}
	d.flows.wg.Wait()
	for _, f := range d.flows.flows {
		f.session.close()
	}
	d.flows = nil
}

// tally counts the outcomes of new flows.
type tally struct {
	on       map[string]int // by backend
	flows    int            // that were answered
	failed   int
	lastFail error
	// failedBegan is when the last one began that failed, where keepConnecting made it.
	failedBegan time.Time
}

func (t *tally) add(answer lab.Answer, err error) {
	if err != nil {
		t.failed++
		t.lastFail = err
		return
	}
	t.flows++
	t.on[answer.Backend]++
}

// why is the last failure.
func (t *tally) why() string {
	if t.lastFail == nil {
		return ""
	}
	return fmt.Sprintf(" (the last: %v)", t.lastFail)
}

// keepConnecting opens new connections, one after the other, until stop is closed.
func (d *demo) keepConnecting(ctx context.Context, stop <-chan struct{}) *tally {
	t := &tally{on: map[string]int{}}
	tick := time.NewTicker(newFlowInterval)
	defer tick.Stop()
	for n := 0; ; n++ {
		began := time.Now()
		answer, err := d.once(ctx, targets[n%2], 0)
		t.add(answer, err)
		if err != nil {
			t.failedBegan = began
		}
		select {
		case <-ctx.Done():
			return t
		case <-stop:
			return t
		case <-tick.C:
		}
	}
}
