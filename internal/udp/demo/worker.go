package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/udp"
)

// port is the port on which the worker answers.
const port = 5000

// The ways to receive, in the order in which they are shown. The first byte of an answer names the way that gave it.
const (
	wayBlocking = "recvfrom, blocking"
	waySpinning = "recvfrom, spinning"
	waySleep    = "AF_XDP, sleeping (poll)"
	waySpin     = "AF_XDP, spinning"

	byKernel = 'k'
	byXDP    = 'x'
)

// ways lists all of them.
var ways = []string{wayBlocking, waySpinning, waySleep, waySpin}

// The demo and its worker exchange JSON over a SOCK_SEQPACKET socket, one order and one report at a time.
// This protocol serves the demo alone: the lease comes from the broker, in the broker's protocol.
type order struct {
	Serve string `json:"serve"`         // one of ways, "stop", or "close", which gives the lease back
	CPU   int    `json:"cpu,omitempty"` // to run on, counted from 1
}

const (
	orderStop  = "stop"
	orderClose = "close"
)

// worker is the process that answers, without any right.
type worker struct {
	control  int
	kernel   int          // the kernel's socket on the port
	lease    *udp.Lease   // nil: given back
	received atomic.Int64 // number of orders
	handled  int64
	about    Worker
	batch    [64]udp.Descriptor
	buffer   [2048]byte
}

// socketVariable is the path of the broker's socket.
const socketVariable = "SHUNT_DEMO_UDP_SOCKET"

// Work is the worker from start to end: it leases from the broker, answers as descriptor 3 orders, and ends
// with the demo.
func Work() error {
	// No packet allocates memory, so nothing needs to be collected; the limit is for the demo's orders.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(64 << 20)
	runtime.LockOSThread()
	w := &worker{control: 3}
	unix.CloseOnExec(w.control)
	if err := w.describe(); err != nil {
		return err
	}
	var err error
	if w.kernel, err = listen(); err != nil {
		return err
	}
	w.lease, err = udp.Open(context.Background(), udp.Options{Socket: os.Getenv(socketVariable), Name: offerName, Also: []int{w.kernel}, Checked: true})
	if err != nil {
		return err
	}
	orders := make(chan order)
	go w.listen(orders)
	if err := w.report(); err != nil {
		return err
	}
	for o := range orders {
		if err := w.do(o); err != nil {
			return err
		}
	}
	return nil
}

// listen opens the kernel's socket on the port.
func listen() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: port})
	}
	if err == nil { // so that a blocking worker notices that it has to stop
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 10_000})
	}
	if err != nil {
		return 0, fmt.Errorf("listen on UDP port %d: %w", port, err)
	}
	return fd, nil
}

// describe finds out the rights of this process.
func (w *worker) describe() error {
	w.about.PID, w.about.UID = os.Getpid(), os.Getuid()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	var capabilities uint64
	for _, line := range strings.Split(string(text), "\n") {
		name, value, _ := strings.Cut(line, ":\t")
		if name == "CapEff" || name == "CapPrm" {
			set, err := strconv.ParseUint(value, 16, 64)
			if err != nil {
				return fmt.Errorf("read the capabilities of process %d: %w", w.about.PID, err)
			}
			capabilities |= set
		}
	}
	w.about.Capabilities = fmt.Sprintf("%016x", capabilities)
	fd, err := unix.Socket(unix.AF_XDP, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		w.about.Refused = err.Error()
	} else {
		_ = unix.Close(fd)
	}
	return nil
}

// listen reads orders; each one ends the work on the last one.
func (w *worker) listen(orders chan<- order) {
	buffer := make([]byte, 4096)
	for {
		n, err := unix.Read(w.control, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		var o order
		if err != nil || n == 0 || json.Unmarshal(buffer[:n], &o) != nil {
			os.Exit(0) // the demo has gone
		}
		w.received.Add(1)
		orders <- o
	}
}

// report sends the worker's properties and counts.
func (w *worker) report() error {
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	w.about.Collections = stats.NumGC
	if w.lease != nil { // after the lease is given back, the last counts stay
		w.about.Wakeups = w.lease.Wakeups()
		w.about.Delivered, w.about.Invalid, w.about.Kicks = 0, 0, 0
		for _, q := range w.lease.Queues {
			c := q.Counts()
			w.about.Delivered += c.Delivered
			w.about.Invalid += c.Invalid
			w.about.Kicks += c.Kicks
		}
	}
	text, err := json.Marshal(w.about)
	if err != nil {
		return err
	}
	_, err = unix.Write(w.control, text)
	return err
}

// do carries an order out. A way is served until the next order comes; other orders are followed by a report.
func (w *worker) do(o order) error {
	w.handled++
	if o.CPU > 0 {
		var set unix.CPUSet
		set.Set(o.CPU - 1)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("bind the worker to CPU %d: %w", o.CPU-1, err)
		}
	}
	switch o.Serve {
	case wayBlocking:
		return w.receive(0)
	case waySpinning:
		return w.receive(unix.MSG_DONTWAIT)
	case waySleep:
		return w.receiveXDP(true)
	case waySpin:
		return w.receiveXDP(false)
	case orderStop:
		return w.report()
	case orderClose:
		l := w.lease // the report on the order to stop had the counts
		w.lease = nil
		return errors.Join(l.Close(), w.report())
	}
	return fmt.Errorf("the worker knows no order %q", o.Serve)
}

func (w *worker) ended() bool { return w.received.Load() != w.handled }

// receive answers from the kernel's socket. The system calls are made without the runtime's knowledge, as in a
// C program, so that they cost the same.
func (w *worker) receive(flags int) error {
	for !w.ended() {
		if _, err := w.receiveOne(flags); err != nil {
			return err
		}
	}
	return nil
}

// receiveOne answers one datagram of the kernel's socket, if there is one.
func (w *worker) receiveOne(flags int) (bool, error) {
	var from unix.RawSockaddrInet4
	size := uint32(unix.SizeofSockaddrInet4)
	buffer := uintptr(unsafe.Pointer(&w.buffer[0]))
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(w.kernel), buffer, uintptr(len(w.buffer)), uintptr(flags),
		uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&size)))
	switch errno {
	case 0:
	case unix.EAGAIN, unix.EINTR, unix.ECONNREFUSED: // no datagram, or an ICMP error about an earlier answer
		return false, nil
	default:
		return false, fmt.Errorf("receive from the kernel's socket: %w", errno)
	}
	w.buffer[0] = byKernel
	_, _, errno = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(w.kernel), buffer, n, unix.MSG_DONTWAIT,
		uintptr(unsafe.Pointer(&from)), uintptr(size))
	if errno != 0 && errno != unix.EAGAIN && errno != unix.ECONNREFUSED && errno != unix.ENOBUFS {
		return false, fmt.Errorf("answer from the kernel's socket: %w", errno)
	}
	return true, nil
}

// receiveXDP answers from all AF_XDP sockets, and now and then from the kernel's socket, which gets the datagrams that they
// do not take.
func (w *worker) receiveXDP(sleep bool) error {
	const looks = 1024 // at the rings, between two at the kernel's socket
	for i := 0; !w.ended(); i++ {
		got := 0
		for _, q := range w.lease.Queues {
			n, err := w.answer(q)
			if err != nil {
				return err
			}
			got += n
		}
		if got > 0 || !sleep && i%looks != 0 {
			continue
		}
		if sleep {
			if _, err := w.lease.Wait(10 * time.Millisecond); err != nil {
				return err
			}
		}
		if _, err := w.receiveOne(unix.MSG_DONTWAIT); err != nil {
			return err
		}
	}
	return nil
}

// answer turns the datagrams of a batch around, in place.
func (w *worker) answer(q *udp.Queue) (int, error) {
	n := q.Receive(w.batch[:])
	if n == 0 {
		return 0, q.Flush() // sends answers for which the kernel had no room
	}
	ready := 0
	for i := range n {
		d := &w.batch[i]
		p, err := q.Packet(d)
		if err == nil && len(p.Payload) > 0 {
			p.Payload[0] = byXDP
			err = q.Reply(d)
		}
		if err != nil || len(p.Payload) == 0 {
			q.Release(w.batch[i : i+1])
			continue
		}
		w.batch[ready] = *d
		ready++
	}
	sent := q.Send(w.batch[:ready])
	q.Release(w.batch[sent:ready])
	return n, q.Flush()
}
