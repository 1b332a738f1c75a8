package main

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	payloadSize = 64
	// open is the number of questions without an answer at once when answers per second are counted: half a ring.
	open = 128
	// lateAfter is the time after which a question is given up, and asked again.
	lateAfter = 100 * time.Millisecond
	// least answers make a figure; on a machine with much other work they take longer than a turn, up to patience.
	least    = 20
	patience = 30 * time.Second
)

// result is one turn: the round trip, in microseconds, and the number of answers.
type result struct {
	P50, P99, P999 float64
	PerSecond      float64
	Late           int // questions without an answer in time
}

// client asks from one socket. It spins, in each way alike.
type client struct {
	socket int
	number uint64
	buffer [payloadSize]byte
	times  []float64
}

// newClient connects; call it in the client's namespace.
func newClient(to netip.AddrPort) (*client, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
	}
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	return &client{socket: fd, times: make([]float64, 0, 1<<18)}, nil
}

func (c *client) close() { _ = unix.Close(c.socket) }

// send asks. A question that cannot be sent is late.
func (c *client) send() {
	c.number++
	binary.NativeEndian.PutUint64(c.buffer[:], c.number)
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(c.socket), uintptr(unsafe.Pointer(&c.buffer[0])), payloadSize)
}

// take reads an answer, if there is one, and returns the number of its question.
func (c *client) take() (number uint64, ok bool) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(c.socket), uintptr(unsafe.Pointer(&c.buffer[0])), payloadSize)
	if errno != 0 || n != payloadSize {
		return 0, false
	}
	return binary.NativeEndian.Uint64(c.buffer[:]), true
}

func (c *client) measure(each time.Duration) (r result) {
	for begin := time.Now(); time.Since(begin) < each || len(c.times) < least && time.Since(begin) < patience; {
		c.ask(&r)
	}
	slices.Sort(c.times)
	r.P50, r.P99, r.P999 = c.quantile(0.5), c.quantile(0.99), c.quantile(0.999)
	c.flood(&r, each)
	return r
}

// ask waits for the answer to one question.
func (c *client) ask(r *result) {
	begin := time.Now()
	c.send()
	for {
		number, ok := c.take()
		took := time.Since(begin)
		switch {
		case ok && number == c.number:
			if len(c.times) < cap(c.times) {
				c.times = append(c.times, float64(took.Nanoseconds())/1e3)
			}
			return
		case took > lateAfter:
			r.Late++
			return
		}
	}
}

// quantile returns a quantile of the sorted times.
func (c *client) quantile(q float64) float64 {
	if len(c.times) == 0 {
		return 0
	}
	return c.times[int(q*float64(len(c.times)-1))]
}

// flood keeps questions open for a time, and counts answers.
func (c *client) flood(r *result, each time.Duration) {
	first := c.number
	fill := func() {
		for range open {
			c.send()
		}
	}
	fill()
	answers := 0
	begin := time.Now()
	last := begin
	for now := begin; now.Sub(begin) < each; now = time.Now() {
		for range open {
			number, ok := c.take()
			if !ok {
				break
			}
			if number <= first { // to one that was given up
				continue
			}
			answers++
			last = now
			c.send()
		}
		if now.Sub(last) > lateAfter {
			r.Late += open
			first, last = c.number, now
			fill()
		}
	}
	r.PerSecond = float64(answers) / time.Since(begin).Seconds()
}
