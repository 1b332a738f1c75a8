package demo

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// flows is the number of the client's sockets: several, so that all queues get datagrams.
	flows = 8
	// window is the number of questions of each flow that are open at once when answers per second are counted. All
	// together fit into one queue's ring.
	window = 8
	// payloadSize is the size of a question in bytes: the answerer's letter, 7 unused, a number, and padding.
	payloadSize = 64
	// spinFor is the time that the client looks for an answer before it sleeps: on a machine with more runnable tasks
	// than CPUs, spinning would keep the worker from answering.
	spinFor = time.Millisecond
	// lateAfter is the time after which a question is given up: a scheduler with twenty other tasks needs a tenth of it.
	lateAfter = time.Second
)

// client asks questions from sockets in the client's namespace. It belongs to one goroutine.
type client struct {
	sockets [flows]int
	number  uint64
	buffer  [payloadSize]byte
	polled  [flows]unix.PollFd
	times   []int64 // nanoseconds
}

// newClient connects to the worker; call it in the client's namespace.
func newClient(to netip.AddrPort) (*client, error) {
	c := &client{times: make([]int64, 0, 1<<18)}
	for i := range c.sockets {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
		}
		if err != nil {
			return nil, fmt.Errorf("connect to %s: %w", to, err)
		}
		c.sockets[i] = fd
	}
	return c, nil
}

func (c *client) close() {
	for _, fd := range c.sockets {
		_ = unix.Close(fd)
	}
}

// drain discards answers to questions that were given up.
func (c *client) drain() {
	for _, fd := range c.sockets {
		for {
			if _, ok := c.take(fd); !ok {
				break
			}
		}
	}
}

// send asks a question, and returns its number. A question that cannot be sent counts as late.
func (c *client) send(fd int) uint64 {
	c.number++
	c.buffer[0] = '?'
	binary.NativeEndian.PutUint64(c.buffer[8:], c.number)
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&c.buffer[0])), payloadSize)
	return c.number
}

// take reads an answer, if there is one, into the buffer.
func (c *client) take(fd int) (number uint64, ok bool) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&c.buffer[0])), payloadSize)
	if errno != 0 || n != payloadSize {
		return 0, false
	}
	return binary.NativeEndian.Uint64(c.buffer[8:]), true
}

// ask waits for the answer to one question, and returns the letter of its sender; 0: no answer in time.
func (c *client) ask(fd int) (by byte, took time.Duration) {
	begin := time.Now()
	question := c.send(fd)
	for {
		if number, ok := c.take(fd); ok && number == question {
			return c.buffer[0], time.Since(begin)
		}
		took := time.Since(begin)
		if took > lateAfter {
			return 0, took
		}
		if took > spinFor {
			c.sleep(lateAfter - took)
		}
	}
}

// sleep waits until there is an answer on any socket.
func (c *client) sleep(limit time.Duration) {
	for i, fd := range c.sockets {
		c.polled[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	}
	_, _ = unix.Poll(c.polled[:], max(1, int(limit.Milliseconds()))) // a signal ends the wait early
}

// roundTrips asks one question after another for a time.
func (c *client) roundTrips(r *Round, by byte, during time.Duration) {
	c.drain()
	c.times = c.times[:0]
	for begin := time.Now(); time.Since(begin) < during; {
		who, took := c.ask(c.sockets[r.Asked%flows])
		r.Asked++
		switch {
		case who == 0:
			r.Late++
		case who != by:
			r.Wrong++
		case len(c.times) < cap(c.times):
			c.times = append(c.times, took.Nanoseconds())
		}
	}
	slices.Sort(c.times)
	r.P50, r.P99, r.P999 = c.quantile(0.5), c.quantile(0.99), c.quantile(0.999)
}

// quantile returns a quantile of the sorted times, in microseconds.
func (c *client) quantile(q float64) float64 {
	if len(c.times) == 0 {
		return 0
	}
	return float64(c.times[int(q*float64(len(c.times)-1))]) / 1e3
}

// rate keeps flows × window questions open for a time, and counts answers.
func (c *client) rate(r *Round, by byte, during time.Duration) {
	c.drain()
	for _, fd := range c.sockets {
		for range window {
			c.send(fd)
		}
	}
	r.Asked += flows * window
	answers := 0
	begin := time.Now()
	last := begin
	for now := begin; now.Sub(begin) < during; now = time.Now() {
		for _, fd := range c.sockets {
			for range window {
				if _, ok := c.take(fd); !ok {
					break
				}
				answers++
				if c.buffer[0] != by {
					r.Wrong++
				}
				last = now
				c.send(fd)
				r.Asked++
			}
		}
		if now.Sub(last) > spinFor {
			c.sleep(min(lateAfter, during-now.Sub(begin)))
		}
		if now.Sub(last) > lateAfter { // all are late: the window opens anew
			r.Late += flows * window
			for _, fd := range c.sockets {
				for range window {
					c.send(fd)
				}
			}
			r.Asked += flows * window
			last = now
		}
	}
	r.PerSecond = float64(answers) / time.Since(begin).Seconds()
	c.settle()
}

// settle waits for answers that are still under way. The next round ignores later ones.
func (c *client) settle() {
	const quiet = 5 * time.Millisecond
	for last := time.Now(); time.Since(last) < quiet; {
		c.sleep(quiet)
		for _, fd := range c.sockets {
			if _, ok := c.take(fd); ok {
				last = time.Now()
			}
		}
	}
}

// onCPU runs a function on a thread that is bound to a CPU, counted from 1; 0: any.
func onCPU(cpu int, do func() error) error {
	if cpu == 0 {
		return do()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return fmt.Errorf("read which CPUs the client may use: %w", err)
	}
	set.Set(cpu - 1)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("bind the client to CPU %d: %w", cpu-1, err)
	}
	return errors.Join(do(), unix.SchedSetaffinity(0, &before))
}

// twoCPUs returns the first and the last CPU that this process may use, counted from 1; zeroes if there is only one.
func twoCPUs() (first, last int) {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil || set.Count() < 2 {
		return 0, 0
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			if first == 0 {
				first = cpu + 1
			}
			last = cpu + 1
		}
	}
	return first, last
}
