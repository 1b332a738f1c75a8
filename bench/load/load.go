// Package load asks for a page at a fixed rate and records the time of each answer, counted from the moment when
// the request was due. A request that waits because earlier ones are slow counts its waiting time, so a stall is
// seen by every request that would have met it (no coordinated omission). It uses one thread, a fixed number of
// keep-alive connections, and a timer of the kernel's own precision.
package load

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Options are the target, the rate and the duration of the requests.
type Options struct {
	Target      netip.AddrPort // IPv4
	Rate        int            // requests per second
	Connections int
	Duration    time.Duration
	// Overload is not an error: requests without an answer at the end count with the time that they have waited.
	Overload bool
	Drain    time.Duration // the wait for answers after the last request was due; 0: 5 s
}

// Result is its result. Latencies are in microseconds.
type Result struct {
	Rate      int     `json:"rate"`       // asked for, requests per second
	Requests  int     `json:"requests"`   // due in the time
	Answered  int     `json:"answered"`   // with status 200
	Missing   int     `json:"missing"`    // not answered at the end; see Options.Overload
	Achieved  float64 `json:"achieved"`   // answers per second
	P50us     float64 `json:"p50_us"`     // of all answered, and all missing
	P90us     float64 `json:"p90_us"`     //
	P99us     float64 `json:"p99_us"`     //
	P999us    float64 `json:"p99_9_us"`   //
	Maxus     float64 `json:"max_us"`     //
	QueuedMax int     `json:"queued_max"` // most requests that waited for a free connection
}

// request is sent on every connection.
const request = "GET / HTTP/1.1\r\nHost: bench\r\n\r\n"

// drainLimit is the wait for answers after the last request was due.
const drainLimit = 5 * time.Second

// connection is one keep-alive connection.
type connection struct {
	fd   int
	due  time.Duration // of the request under way
	got  []byte
	busy bool
}

// generator is the state of one run. Times count from started.
type generator struct {
	o        Options
	started  time.Time
	epoll    int
	timer    int
	conns    []*connection
	idle     []*connection
	queue    []time.Duration // due times that found no idle connection, oldest first
	latency  []time.Duration
	result   Result
	busyLeft int
}

// Run makes the connections in the calling thread's network namespace and runs to the end.
// A connection that breaks is an error.
func Run(o Options) (Result, error) {
	if o.Rate <= 0 || o.Connections <= 0 || o.Duration <= 0 || !o.Target.Addr().Is4() {
		return Result{}, fmt.Errorf("rate, connections and duration must be positive, and the target IPv4: %+v", o)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	total := int(float64(o.Rate) * o.Duration.Seconds())
	g := &generator{o: o, latency: make([]time.Duration, 0, total)}
	g.result.Rate, g.result.Requests = o.Rate, total
	defer g.close()
	if err := g.open(); err != nil {
		return g.result, err
	}
	if err := g.loop(total); err != nil {
		return g.result, err
	}
	g.finish()
	return g.result, nil
}

// open makes the timer and all connections.
func (g *generator) open() (err error) {
	g.epoll, g.timer = -1, -1
	if g.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("make an epoll instance: %w", err)
	}
	if g.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC); err != nil {
		return fmt.Errorf("make a timer: %w", err)
	}
	if err := g.watch(g.timer, -1); err != nil {
		return err
	}
	for i := range g.o.Connections {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("make a socket: %w", err)
		}
		c := &connection{fd: fd}
		g.conns = append(g.conns, c)
		address := &unix.SockaddrInet4{Port: int(g.o.Target.Port()), Addr: g.o.Target.Addr().As4()}
		if err := unix.Connect(fd, address); err != nil {
			return fmt.Errorf("connect to %s: %w", g.o.Target, err)
		}
		if err := errors.Join(unix.SetNonblock(fd, true), unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)); err != nil {
			return err
		}
		if err := g.watch(fd, i); err != nil {
			return err
		}
	}
	g.idle = append(g.idle, g.conns...)
	return nil
}

// watch adds a descriptor to the epoll set under an index.
func (g *generator) watch(fd, index int) error {
	event := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(index)}
	if err := unix.EpollCtl(g.epoll, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
		return fmt.Errorf("watch a socket: %w", err)
	}
	return nil
}

// loop sends every request when it is due and takes the answers.
func (g *generator) loop(total int) error {
	g.started = time.Now()
	interval := float64(time.Second) / float64(g.o.Rate)
	dueAt := func(i int) time.Duration { return time.Duration(float64(i) * interval) }
	events := make([]unix.EpollEvent, g.o.Connections+1)
	for next := 0; next < total || g.busyLeft > 0 || len(g.queue) > 0; {
		now := time.Since(g.started)
		for next < total && dueAt(next) <= now {
			g.queue = append(g.queue, dueAt(next))
			next++
		}
		if err := g.send(); err != nil {
			return err
		}
		wake := dueAt(next)
		if next == total {
			drain := cmp.Or(g.o.Drain, drainLimit)
			wake = g.o.Duration + drain
			if now > wake && g.o.Overload {
				g.giveUp(now)
				return nil
			}
			if now > wake {
				return fmt.Errorf("%d answers were missing %s after the last request", total-g.result.Answered, drain)
			}
		}
		setting := unix.ItimerSpec{Value: unix.NsecToTimespec(max(int64(wake-time.Since(g.started)), 1))}
		if err := unix.TimerfdSettime(g.timer, 0, &setting, nil); err != nil {
			return fmt.Errorf("set the timer: %w", err)
		}
		n, err := unix.EpollWait(g.epoll, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for answers: %w", err)
		}
		for _, event := range events[:max(n, 0)] {
			if event.Fd >= 0 { // the timer needs no reading: setting it clears it
				if err := g.receive(g.conns[event.Fd]); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// giveUp counts the requests that have no answer yet.
func (g *generator) giveUp(now time.Duration) {
	for _, c := range g.conns {
		if c.busy {
			g.queue = append(g.queue, c.due)
		}
	}
	for _, due := range g.queue {
		g.latency = append(g.latency, now-due)
	}
	g.result.Missing = len(g.queue)
}

// send gives waiting requests to idle connections, oldest first.
func (g *generator) send() error {
	sent := 0
	for sent < len(g.queue) && len(g.idle) > 0 {
		c := g.idle[0]
		g.idle = g.idle[1:]
		c.due, c.busy, c.got = g.queue[sent], true, c.got[:0]
		sent++
		if n, err := unix.Write(c.fd, []byte(request)); err != nil || n != len(request) {
			return fmt.Errorf("send a request: wrote %d bytes: %w", n, err)
		}
		g.busyLeft++
	}
	g.queue = g.queue[sent:]
	g.result.QueuedMax = max(g.result.QueuedMax, len(g.queue))
	return nil
}

// receive reads the received bytes and ends the request when its answer is complete.
func (g *generator) receive(c *connection) error {
	var buffer [4096]byte
	n, err := unix.Read(c.fd, buffer[:])
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil
	case err != nil:
		return fmt.Errorf("read an answer: %w", err)
	case n == 0:
		return errors.New("the server closed a keep-alive connection")
	case !c.busy:
		return fmt.Errorf("the server sent %q without a request", buffer[:n])
	}
	c.got = append(c.got, buffer[:n]...)
	complete, err := answerComplete(c.got)
	if err != nil || !complete {
		return err
	}
	g.latency = append(g.latency, time.Since(g.started)-c.due)
	g.result.Answered++
	g.busyLeft--
	c.busy = false
	g.idle = append(g.idle, c)
	return nil
}

// answerComplete reports whether a whole answer with status 200 and a Content-Length is there.
func answerComplete(got []byte) (bool, error) {
	header, body, is := bytes.Cut(got, []byte("\r\n\r\n"))
	if !is {
		return false, nil
	}
	if !bytes.HasPrefix(header, []byte("HTTP/1.1 200 ")) {
		return false, fmt.Errorf("the server answered %q", header)
	}
	_, rest, is := bytes.Cut(header, []byte("\r\nContent-Length: "))
	if !is {
		return false, fmt.Errorf("the answer has no Content-Length: %q", header)
	}
	digits, _, _ := bytes.Cut(rest, []byte("\r\n"))
	length, err := strconv.Atoi(string(digits))
	if err != nil {
		return false, fmt.Errorf("the answer's Content-Length: %w", err)
	}
	if len(body) > length {
		return false, fmt.Errorf("the answer is longer than its Content-Length %d: %q", length, got)
	}
	return len(body) == length, nil
}

// finish computes the figures.
func (g *generator) finish() {
	slices.Sort(g.latency)
	g.result.Achieved = float64(g.result.Answered) / time.Since(g.started).Seconds()
	for _, q := range []struct {
		to   *float64
		part float64
	}{{&g.result.P50us, 0.5}, {&g.result.P90us, 0.9}, {&g.result.P99us, 0.99}, {&g.result.P999us, 0.999}, {&g.result.Maxus, 1}} {
		*q.to = float64(quantile(g.latency, q.part).Nanoseconds()) / 1e3
	}
}

// quantile is the smallest value that at least the given part of sorted values does not exceed.
func quantile(sorted []time.Duration, part float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	index := int(part*float64(len(sorted))+0.9999999) - 1
	return sorted[min(max(index, 0), len(sorted)-1)]
}

// close closes all descriptors.
func (g *generator) close() {
	for _, c := range g.conns {
		unix.Close(c.fd)
	}
	for _, fd := range []int{g.timer, g.epoll} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}
