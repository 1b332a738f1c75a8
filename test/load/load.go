// Package load is the traffic under which shunt is changed, killed and broken, and the judge of
// its losses.
//
//	            keep-alive ─┐                             ┌─ each failure, its time, and
//	       new connections ─┤   client ─ shunt ─ backends │  the event then
//	checksummed transfers ──┼─────────────────────────────┤
//	           UDP asked  ──┤                             └─ whether the model allows it
//	                clock ──┘ (to a backend, past shunt)
//
// A failure is a reset, a stall of more than a second, a wrong byte, an answer from another
// backend in the middle of a flow, or a lost datagram. Two things keep the judgement honest:
//
//   - The clock asks the same servers from the same process, but past shunt. When it is late
//     the machine was busy, and that time is taken off a stall; all other failures count.
//   - Each action on shunt is an Event that says beforehand which flows may suffer
//     (Permission). Every other loss is a failure, during any event.
package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// Target is the address of a service in one family.
type Target struct {
	Service string
	TCP     netip.AddrPort
	UDP     netip.AddrPort
}

// Options are the amount of traffic, and its ends.
type Options struct {
	Client  *lab.Host
	Targets []Target
	// Clock is the address of a backend's web server on a way without shunt.
	Clock netip.AddrPort
	Amount
}

// Amount is an amount of traffic.
type Amount struct {
	KeepAlive      int           // connections that stay
	KeepAliveEvery time.Duration // between two requests on one of them
	NewPerSecond   int           // connections with one request each
	Transfers      int           // at once; as many to the service as from it
	TransferSize   int64         // bytes
	TransferRate   int64         // bytes per second, of each
	UDPPerSecond   int           // exchanges
}

// Full is the amount of the long proofs. Its transfers are slow enough for two CPUs to carry all
// of it with time to spare, or else it would only show how busy the machine is; so each transfer
// also lives through many events.
var Full = Amount{
	KeepAlive: 200, KeepAliveEvery: 400 * time.Millisecond, NewPerSecond: 500,
	Transfers: 20, TransferSize: 100 << 20, TransferRate: 2 << 20, UDPPerSecond: 100,
}

// Scaled is a part of an amount, at least a small one.
func (a Amount) Scaled(part float64) Amount {
	of := func(n int) int { return max(4, int(float64(n)*part)) }
	a.KeepAlive, a.NewPerSecond, a.Transfers, a.UDPPerSecond = of(a.KeepAlive), of(a.NewPerSecond), of(a.Transfers), of(a.UDPPerSecond)
	a.TransferSize = max(1<<20, int64(float64(a.TransferSize)*part))
	return a
}

const (
	stallMax = time.Second
	// giveUp is the time after which a question or a transfer without progress counts as broken.
	giveUp = 10 * time.Second
	// startMax bounds the start of the load.
	startMax = 30 * time.Second
	// datagramMax is the time after which a datagram counts as lost.
	datagramMax = time.Second
)

// Kind is the sort of a flow's traffic.
type Kind string

const (
	KeepAlive Kind = "keep-alive"
	New       Kind = "new connection"
	Download  Kind = "download"
	Upload    Kind = "upload"
	UDP       Kind = "udp"
)

// Load is running traffic.
type Load struct {
	options Options
	clock   *clock
	stop    context.CancelFunc
	workers sync.WaitGroup
	flying  atomic.Int64 // new connections under way

	mu       sync.Mutex
	began    time.Time
	done     map[Kind]int
	bytes    int64
	lost     []Failure // datagrams
	failures []Failure
	events   []*Event
}

// Start starts the traffic. It returns when every permanent connection has had one answer, and
// every transfer has begun.
func Start(ctx context.Context, options Options) (*Load, error) {
	ctx, stop := context.WithCancel(ctx)
	l := &Load{options: options, stop: stop, done: map[Kind]int{}, began: time.Now()}
	var err error
	if l.clock, err = startClock(ctx, options.Client, options.Clock); err != nil {
		stop()
		return nil, err
	}
	var ready sync.WaitGroup
	work := func(do func(begun func())) {
		l.workers.Add(1)
		ready.Add(1)
		go func() {
			defer l.workers.Done()
			do(sync.OnceFunc(ready.Done))
		}()
	}
	for i := range options.KeepAlive {
		work(func(begun func()) { l.keepAlive(ctx, i, begun) })
	}
	for i := range options.Transfers {
		work(func(begun func()) { l.transfers(ctx, i, begun) })
	}
	for i := range udpSockets {
		work(func(begun func()) { l.datagrams(ctx, i, begun) })
	}
	work(func(begun func()) { begun(); l.newConnections(ctx) })
	all := make(chan struct{})
	go func() { ready.Wait(); close(all) }()
	select {
	case <-all:
		return l, nil
	case <-time.After(startMax):
		report := l.End()
		err := fmt.Errorf("start the load: not everything was answered within %s", startMax)
		for _, f := range report.Failures[:min(3, len(report.Failures))] {
			err = errors.Join(err, errors.New(report.Explain(f)))
		}
		return nil, err
	}
}

// target takes the targets in turn.
func (l *Load) target(i int) Target { return l.options.Targets[i%len(l.options.Targets)] }

// flow identifies the flow of a failure.
type flow struct {
	kind    Kind
	service string
	address netip.AddrPort
	begun   time.Time
	backend string // "" without an answer yet
}

// count counts a success.
func (l *Load) count(kind Kind, bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done[kind]++
	l.bytes += bytes
}

// fail notes a failure.
func (l *Load) fail(f flow, what string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures = append(l.failures, Failure{flow: f, What: what, At: time.Now(), Err: err})
}

// waited notes a stall, unless the machine is to blame.
func (l *Load) waited(f flow, since time.Time) {
	now := time.Now()
	if now.Sub(since) <= stallMax {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures = append(l.failures, Failure{flow: f, What: "stall", Since: since, At: now})
}

// pause waits for a moment; false when ctx ends before.
func pause(ctx context.Context, until time.Time) bool {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// keepAlive asks repeatedly on one connection, and opens another if it breaks.
func (l *Load) keepAlive(ctx context.Context, i int, begun func()) {
	defer begun()
	var session *lab.Session
	var f flow
	due := time.Now()
	for n := 0; ctx.Err() == nil; n++ {
		since := time.Now()
		if session == nil {
			to := l.target(i)
			f = flow{kind: KeepAlive, service: to.Service, address: to.TCP, begun: since}
		}
		question, cancel := context.WithTimeout(ctx, giveUp)
		var err error
		if session == nil {
			session, err = l.options.Client.OpenSession(question, "tcp", netip.AddrPort{}, f.address.String())
		}
		if err == nil {
			err = l.ask(question, session, &f, n)
		}
		cancel()
		if ctx.Err() != nil {
			break
		}
		l.waited(f, since)
		if err != nil {
			l.fail(f, "broken", err)
			if session != nil {
				_ = session.Close()
			}
			session = nil
		} else {
			l.count(KeepAlive, 0)
			begun()
		}
		if n == 0 { // so that they do not ask all at once
			due = since.Add(l.options.KeepAliveEvery * time.Duration(i) / time.Duration(l.options.KeepAlive))
		}
		if due = due.Add(l.options.KeepAliveEvery); due.Before(time.Now()) {
			due = time.Now()
		}
		pause(ctx, due)
	}
	if session != nil {
		_ = session.Close()
	}
}

// ask asks once, and compares the answer with the question, and its backend with the earlier one.
func (l *Load) ask(ctx context.Context, s *lab.Session, f *flow, n int) error {
	path := fmt.Sprintf("/%s/%d", f.service, n)
	answer, err := s.Ask(ctx, path)
	switch {
	case err != nil:
		return err
	case answer.Path != path:
		return fmt.Errorf("asked for %s and was answered about %s", path, answer.Path)
	case f.backend != "" && answer.Backend != f.backend:
		return fmt.Errorf("moved from %s to %s", f.backend, answer.Backend)
	}
	f.backend = answer.Backend
	return nil
}

// newConnections opens connections at the rate, also while earlier ones still wait or have failed.
func (l *Load) newConnections(ctx context.Context) {
	interval := time.Second / time.Duration(l.options.NewPerSecond)
	var open sync.WaitGroup
	defer open.Wait()
	begun := time.Now()
	for n := 0; pause(ctx, begun.Add(time.Duration(n)*interval)); n++ {
		// After a delay of the machine it does not open them all at once: that would be a flood of
		// our own making.
		if behind := time.Since(begun) - time.Duration(n)*interval; behind > 100*time.Millisecond {
			begun = begun.Add(behind)
		}
		open.Add(1)
		l.flying.Add(1)
		go func() {
			defer open.Done()
			defer l.flying.Add(-1)
			l.newConnection(ctx, n)
		}()
	}
}

func (l *Load) newConnection(ctx context.Context, n int) {
	to, since := l.target(n), time.Now()
	f := flow{kind: New, service: to.Service, address: to.TCP, begun: since}
	question, cancel := context.WithTimeout(ctx, giveUp)
	defer cancel()
	session, err := l.options.Client.OpenSession(question, "tcp", netip.AddrPort{}, to.TCP.String())
	if err == nil {
		defer session.Close()
		err = l.ask(question, session, &f, n)
	}
	if ctx.Err() != nil {
		return
	}
	l.waited(f, since)
	if err != nil {
		l.fail(f, "broken", err)
		return
	}
	l.count(New, 0)
}

// udpSockets is the number of UDP sockets: half of them stay one flow, the others ask from a new
// port each time.
const udpSockets = 20

// datagrams asks over UDP.
func (l *Load) datagrams(ctx context.Context, i int, begun func()) {
	begun()
	interval := udpSockets * time.Second / time.Duration(l.options.UDPPerSecond)
	due := time.Now().Add(interval * time.Duration(i) / udpSockets)
	var session *lab.Session
	var f flow
	defer func() {
		if session != nil {
			_ = session.Close()
		}
	}()
	for n := 0; pause(ctx, due); n++ {
		since := time.Now()
		var err error
		if session == nil {
			to := l.target(i / 2)
			f = flow{kind: UDP, service: to.Service, address: to.UDP, begun: since}
			if session, err = l.options.Client.OpenSession(ctx, "udp", netip.AddrPort{}, to.UDP.String()); err != nil {
				if ctx.Err() != nil {
					return
				}
				l.fail(f, "broken", err)
				return
			}
		}
		question, cancel := context.WithTimeout(ctx, datagramMax)
		err = l.ask(question, session, &f, n)
		lost := question.Err() != nil
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case lost:
			l.mu.Lock()
			l.lost = append(l.lost, Failure{flow: f, What: "lost", Since: since, At: time.Now()})
			l.mu.Unlock()
		case err != nil:
			l.fail(f, "broken", err)
		default:
			l.count(UDP, 0)
		}
		if i%2 == 1 || err != nil {
			_ = session.Close()
			session = nil
		}
		if due = due.Add(interval); due.Before(time.Now()) {
			due = time.Now()
		}
	}
}
