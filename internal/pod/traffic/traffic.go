// Package traffic sends data between two network namespaces and measures: a stream, requests over one
// connection, a connection for each request, and datagrams back and forth. It uses blocking system calls on
// threads of its own, so that it measures the kernel and not a runtime.
package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is a kind of traffic, with the name that netperf gave its test.
type Kind string

// The kinds. A transaction is an octet there and an octet back, in CRR with a connection of its own; in a
// stream it is one write of 16 KiB.
const (
	Stream Kind = "TCP_STREAM"
	RR     Kind = "TCP_RR"
	CRR    Kind = "TCP_CRR"
	UDPRR  Kind = "UDP_RR"
)

// Kinds lists all kinds.
var Kinds = []Kind{Stream, RR, CRR, UDPRR}

// writeSize is the size of a stream's writes, bytes.
const writeSize = 16 << 10

// patience limits each system call: a path that loses a packet costs a retransmission, a dead one an error.
const patience = 5 * time.Second

// Namespace runs functions on a thread in a network namespace; *lab.Host is one.
type Namespace interface{ Run(func() error) error }

// Result is one measurement.
type Result struct {
	Kind         Kind          `json:"kind"`
	Transactions int           `json:"transactions"`
	Seconds      float64       `json:"seconds"`
	CPU          time.Duration `json:"cpu_nanoseconds"` // of this process in user and kernel mode, for both ends
}

// Rate returns transactions per second, or octets per second of a stream.
func (r Result) Rate() float64 {
	rate := float64(r.Transactions) / r.Seconds
	if r.Kind == Stream {
		rate *= writeSize
	}
	return rate
}

// CPUPerTransaction returns the time of a transaction on all processors.
func (r Result) CPUPerTransaction() time.Duration {
	if r.Transactions == 0 {
		return 0
	}
	return r.CPU / time.Duration(r.Transactions)
}

// Server answers all kinds on one address and port.
type Server struct {
	Address  netip.AddrPort
	tcp, udp int
	ended    sync.WaitGroup

	mu  sync.Mutex
	end bool
}

// Serve answers in a namespace until Close.
func Serve(in Namespace, address netip.AddrPort) (*Server, error) {
	s := &Server{tcp: -1, udp: -1}
	err := in.Run(func() (err error) {
		if s.tcp, err = socket(address.Addr(), unix.SOCK_STREAM); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(s.tcp, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
		if err := errors.Join(unix.Bind(s.tcp, sockaddr(address)), unix.Listen(s.tcp, 128)); err != nil {
			return err
		}
		bound, err := unix.Getsockname(s.tcp)
		if err != nil {
			return err
		}
		s.Address = netip.AddrPortFrom(address.Addr(), portOf(bound))
		if s.udp, err = socket(address.Addr(), unix.SOCK_DGRAM); err != nil {
			return err
		}
		return unix.Bind(s.udp, sockaddr(s.Address))
	})
	if err != nil {
		for _, fd := range []int{s.tcp, s.udp} {
			if fd >= 0 {
				_ = unix.Close(fd)
			}
		}
		return nil, fmt.Errorf("serve on %s: %w", address, err)
	}
	s.ended.Go(s.accept)
	s.ended.Go(s.echo)
	return s, nil
}

func socket(of netip.Addr, kind int) (int, error) {
	family := unix.AF_INET
	if of.Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	return fd, err
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is6() {
		return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}

func portOf(a unix.Sockaddr) uint16 {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return uint16(a.Port)
	case *unix.SockaddrInet6:
		return uint16(a.Port)
	}
	return 0
}

// pin keeps the calling goroutine on a thread of its own, and on the first processor, where the other end is
// too. Between two processors, waking the other end takes most of a round trip and hides the path: 180 µs,
// against 37 to 50 on one (2 virtual CPUs, Linux 6.18, November 2026).
func pin() {
	runtime.LockOSThread()
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil || set.Count() < 2 {
		return
	}
	first := 0
	for !set.IsSet(first) {
		first++
	}
	set.Zero()
	set.Set(first)
	_ = unix.SchedSetaffinity(0, &set) // if it is refused, the kernel chooses
}

// accept serves connections one after the other on one thread: the client has one at a time.
func (s *Server) accept() {
	pin() // and the thread ends with the goroutine
	buffer := make([]byte, 64<<10)
	for {
		fd, _, err := unix.Accept4(s.tcp, unix.SOCK_CLOEXEC)
		if s.isEnding() {
			if err == nil {
				_ = unix.Close(fd)
			}
			return
		}
		if err != nil {
			continue // no connection came within the time, or it has gone again
		}
		s.serve(fd, buffer)
		_ = unix.Close(fd)
	}
}

// serve reads a stream whose first octet is 's', or answers each octet.
func (s *Server) serve(fd int, buffer []byte) {
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	streams := false
	for first := true; ; first = false {
		n, err := read(fd, buffer)
		if err != nil || n == 0 {
			if streams && n == 0 { // all data has arrived
				_, _ = write(fd, []byte{'.'})
			}
			return
		}
		streams = streams || first && buffer[0] == 's'
		if !streams {
			if _, err := write(fd, buffer[:n]); err != nil {
				return
			}
		}
	}
}

func (s *Server) echo() {
	pin()
	buffer := make([]byte, 2048)
	for {
		n, from, err := unix.Recvfrom(s.udp, buffer, 0)
		if s.isEnding() {
			return
		}
		if err == nil && from != nil {
			_ = unix.Sendto(s.udp, buffer[:n], 0, from)
		}
	}
}

func (s *Server) isEnding() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end
}

// Close ends the server.
func (s *Server) Close() {
	s.mu.Lock()
	s.end = true
	s.mu.Unlock()
	_ = unix.Shutdown(s.tcp, unix.SHUT_RDWR) // wakes accept
	_ = unix.Shutdown(s.udp, unix.SHUT_RDWR) // wakes recvfrom, though it says ENOTCONN
	s.ended.Wait()
	_ = errors.Join(unix.Close(s.tcp), unix.Close(s.udp))
}

// Measure sends from a namespace to a server for a time.
func Measure(in Namespace, kind Kind, to netip.AddrPort, duration time.Duration) (r Result, err error) {
	r.Kind = kind
	do := map[Kind]func(netip.AddrPort, time.Duration) (int, error){Stream: stream, RR: requests, CRR: connections, UDPRR: datagrams}[kind]
	if do == nil {
		return r, fmt.Errorf("measure %q: there is no such kind", kind)
	}
	err = in.Run(func() (err error) {
		release := pinned()
		defer release()
		var before, after unix.Rusage
		begin := time.Now()
		if err := unix.Getrusage(unix.RUSAGE_SELF, &before); err != nil {
			return err
		}
		r.Transactions, err = do(to, duration)
		r.Seconds = time.Since(begin).Seconds()
		if err := unix.Getrusage(unix.RUSAGE_SELF, &after); err != nil {
			return err
		}
		r.CPU = time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
		return err
	})
	if err != nil {
		return r, fmt.Errorf("measure %s to %s: %w", kind, to, err)
	}
	return r, nil
}

// pinned is pin for a thread that is used for other work later.
func pinned() (release func()) {
	var before unix.CPUSet
	if unix.SchedGetaffinity(0, &before) != nil {
		return func() {}
	}
	pin()
	return func() {
		_ = unix.SchedSetaffinity(0, &before)
		runtime.UnlockOSThread()
	}
}

func dial(to netip.AddrPort, kind int) (int, error) {
	fd, err := socket(to.Addr(), kind)
	if err != nil {
		return -1, err
	}
	if err := connect(fd, to); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("connect: %w", err)
	}
	return fd, nil
}

// connect calls connect(2). A signal, which Go's runtime sends its threads, interrupts it, and the kernel goes
// on connecting (POSIX, connect: EINTR).
func connect(fd int, to netip.AddrPort) error {
	err := unix.Connect(fd, sockaddr(to))
	if err != unix.EINTR {
		return err
	}
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	for end := time.Now().Add(patience); ; {
		n, err := unix.Poll(poll, int(max(0, time.Until(end).Milliseconds())))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case n == 0:
			return unix.ETIMEDOUT
		default:
			code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && code != 0 {
				err = syscall.Errno(code)
			}
			return err
		}
	}
}

// again repeats a system call that a signal has interrupted.
func again(call func([]byte) (int, error), buffer []byte) (n int, err error) {
	for {
		if n, err = call(buffer); err != unix.EINTR {
			return n, err
		}
	}
}

// read waits for data as long as patience. The kernel ends a blocking call on a paired socket before its time when
// another event wakes it (tcp_bpf_recvmsg in net/ipv4/tcp_bpf.c), so read repeats it.
func read(fd int, buffer []byte) (n int, err error) {
	for end := time.Now().Add(patience); ; {
		n, err = again(func(b []byte) (int, error) { return unix.Read(fd, b) }, buffer)
		if err != unix.EAGAIN || time.Now().After(end) {
			return n, err
		}
	}
}

func write(fd int, data []byte) (int, error) {
	return again(func(b []byte) (int, error) { return unix.Write(fd, b) }, data)
}

func stream(to netip.AddrPort, duration time.Duration) (writes int, err error) {
	fd, err := dial(to, unix.SOCK_STREAM)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	data := make([]byte, writeSize)
	data[0] = 's'
	octets := 0
	for end := time.Now().Add(duration); time.Now().Before(end); {
		n, err := write(fd, data)
		if err != nil {
			return 0, fmt.Errorf("write: %w", err)
		}
		octets += n
	}
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return 0, err
	}
	if err := readAll(fd, make([]byte, 1)); err != nil { // the server has read everything
		return 0, fmt.Errorf("wait until all has arrived: %w", err)
	}
	return octets / writeSize, nil
}

// readAll fills the buffer.
func readAll(fd int, buffer []byte) error {
	for len(buffer) > 0 {
		n, err := read(fd, buffer)
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		if n == 0 {
			return errors.New("read: the connection was closed")
		}
		buffer = buffer[n:]
	}
	return nil
}

func requests(to netip.AddrPort, duration time.Duration) (count int, err error) {
	fd, err := dial(to, unix.SOCK_STREAM)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	octet := []byte{'r'}
	for end := time.Now().Add(duration); time.Now().Before(end); count++ {
		if _, err := write(fd, octet); err != nil {
			return count, fmt.Errorf("write: %w", err)
		}
		if err := readAll(fd, octet); err != nil {
			return count, err
		}
	}
	return count, nil
}

func connections(to netip.AddrPort, duration time.Duration) (count int, err error) {
	octet := []byte{'r'}
	for end := time.Now().Add(duration); time.Now().Before(end); count++ {
		fd, err := dial(to, unix.SOCK_STREAM)
		if err != nil {
			return count, err
		}
		if _, err = write(fd, octet); err == nil {
			err = readAll(fd, octet)
		}
		if err == nil {
			err = unix.Shutdown(fd, unix.SHUT_WR)
		}
		if err == nil { // the server closes when it has seen the end: both FINs
			var n int
			if n, err = read(fd, octet); err == nil && n != 0 {
				err = errors.New("read: an octet too many")
			}
		}
		_ = unix.Close(fd)
		if err != nil {
			return count, err
		}
	}
	return count, nil
}

func datagrams(to netip.AddrPort, duration time.Duration) (count int, err error) {
	fd, err := dial(to, unix.SOCK_DGRAM)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	buffer := make([]byte, 8)
	for end := time.Now().Add(duration); time.Now().Before(end); count++ {
		binary.NativeEndian.PutUint64(buffer, uint64(count))
		if _, err := write(fd, buffer); err != nil {
			return count, fmt.Errorf("write: %w", err)
		}
		if n, err := read(fd, buffer); err != nil || n != len(buffer) || binary.NativeEndian.Uint64(buffer) != uint64(count) {
			return count, fmt.Errorf("datagram %d did not come back: %d octets, %w", count, n, err)
		}
	}
	return count, nil
}

// Median returns the middle value, and the smallest and the largest; zeros if there are none.
func Median(values []float64) (middle, lowest, highest float64) {
	if len(values) == 0 {
		return 0, 0, 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2, sorted[0], sorted[len(sorted)-1]
}
