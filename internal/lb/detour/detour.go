// Package detour sends health checks with direct return along the path of clients' packets: to the VIP, at one
// backend, although the routing table has another route to the VIP.
//
//	socket ─► mark ─► rule ─► table ─► device ─► program at its egress ─► the backend's next hop
//	   ▲                                                                            │
//	   └───────────────────────── answer, from the VIP ◄──── backend ◄──────────────┘
//
// The socket is an ordinary socket, so the kernel does TCP. The device is one end of a veth pair, whose other end
// receives nothing; the table has no other use. All objects are in the calling thread's network namespace.
package detour

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"golang.org/x/sys/unix"
)

// Target is the target of a check: a VIP, at one backend.
type Target struct {
	VIP        netip.AddrPort
	Backend    netip.Addr
	Forwarding model.Forwarding
	Interface  int              // index of the interface towards the next hop
	MAC        net.HardwareAddr // of the next hop
}

// Program encapsulates packets that leave through the device, and sends them to the backend that is recorded
// for their socket.
type Program interface {
	// Attach attaches the program to the egress of a device.
	Attach(ifindex int) error
	// Name records a socket's target.
	Name(socket uintptr, t Target) error
	// Taken reports whether a packet of the socket has passed the program.
	Taken(socket uintptr) (bool, error)
	// Close closes the program.
	Close() error
}

// Options configure a Detour.
type Options struct {
	Instance string
	// Note is called with the number that names all objects before they are made, so that another process can
	// remove them (Remove). If it fails nothing is made.
	Note func(number uint8) error
	// Load loads the program.
	Load func() (Program, error)
	// Mark is the sockets' mark; the routing table has the same number.
	Mark func(number uint8) uint32
}

// Detour is the path of an instance's checks. It is made when it is first needed. Its methods may be called
// from any goroutine.
type Detour struct {
	options Options
	sources sources

	mu      sync.Mutex
	program Program // nil: nothing is made yet
	number  uint8
	device  int             // its interface index; 0: it is to be made, or made again
	made    time.Time       // when the device was
	led     map[string]bool // families that are led to the device
}

// New returns a path that is not made yet.
func New(options Options) *Detour { return &Detour{options: options, led: map[string]bool{}} }

// NotMadeError says that a check was not made, for a reason on this machine. It says nothing about the backend.
type NotMadeError struct{ Cause string }

// Error returns the reason.
func (e *NotMadeError) Error() string { return e.Cause }

// NotMade distinguishes the error from a failed check.
func (e *NotMadeError) NotMade() bool { return true }

func notMade(format string, values ...any) error {
	return &NotMadeError{fmt.Sprintf(format, values...)}
}

// Dial connects to a target. The network is tcp or udp. The error is a NotMadeError if the packets did not
// reach the program.
func (w *Detour) Dial(ctx context.Context, network string, t Target) (net.Conn, error) {
	from, err := w.sources.of(t)
	if err != nil {
		return nil, err
	}
	program, mark, err := w.lead(t.VIP.Addr())
	if err != nil {
		return nil, notMade("%v", err)
	}
	if ctx.Err() != nil {
		return nil, notMade("the time of a check was over before it could begin")
	}
	held := -1 // the socket, which is looked at after the dialer has closed it
	dialer := net.Dialer{KeepAlive: -1, LocalAddr: localAddr(network, from), Control: func(_, _ string, raw syscall.RawConn) (failed error) {
		if held >= 0 {
			_ = unix.Close(held) // the dialer tries again if there was no port
		}
		err := raw.Control(func(fd uintptr) { held, failed = prepareSocket(fd, mark, func() error { return program.Name(fd, t) }) })
		return errors.Join(err, failed)
	}}
	conn, err := dialer.DialContext(ctx, network, t.VIP.String())
	if held < 0 {
		return nil, err // there is no socket yet
	}
	s := &socket{Conn: conn, detour: w, held: held}
	if network == "udp" && err == nil {
		return s, nil // nothing is sent yet
	}
	defer s.release()
	if astray := s.astray(err); astray != nil {
		if err == nil {
			_ = conn.Close() // nothing is lost
		}
		return nil, astray
	}
	return conn, err
}

// prepareSocket marks a socket, records its target, and duplicates it.
func prepareSocket(fd uintptr, mark uint32, name func() error) (held int, err error) {
	if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		return -1, notMade("mark the socket of a check: %v", err)
	}
	// The kernel chooses a port at connect, for this VIP alone: the checks of several VIPs can share ports.
	if err := unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
		return -1, notMade("let the socket of a check choose its port late: %v", err)
	}
	if err := name(); err != nil {
		return -1, err
	}
	held, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, notMade("duplicate the socket of a check: %v", err)
	}
	return held, nil
}

// socket is a connected socket; a UDP socket is also used by other goroutines.
type socket struct {
	net.Conn
	detour *Detour
	held   int
}

// astray returns the error for a socket whose packets did not reach the program; err is the error of the socket
// itself.
func (s *socket) astray(err error) error {
	s.detour.mu.Lock()
	defer s.detour.mu.Unlock()
	if s.detour.program == nil {
		return notMade("checks with direct return have ended")
	}
	taken, failed := s.detour.program.Taken(uintptr(s.held))
	if failed != nil {
		return notMade("%v", failed)
	}
	if taken {
		return nil
	}
	// The next check makes missing objects again. A fault of the device itself cannot be seen here.
	clear(s.detour.led)
	if time.Since(s.detour.made) > remakeInterval {
		s.detour.device = 0
	}
	return notMade("a check did not take the path of clients' packets (%v): another rule of `ip rule` (`ip -6 rule`) comes before shunt's, or a firewall dropped it or changed its mark", cmp.Or(err, errNone))
}

var errNone = errors.New("without an error")

// Write sends a datagram, and checks its path: when Write returns, the datagram has left.
func (s *socket) Write(datagram []byte) (int, error) {
	n, err := s.Conn.Write(datagram)
	if astray := s.astray(err); astray != nil {
		return 0, astray
	}
	return n, err
}

// Close closes the socket.
func (s *socket) Close() error {
	s.release()
	return s.Conn.Close()
}

func (s *socket) release() {
	if s.held >= 0 {
		_ = unix.Close(s.held) // nothing is lost
	}
	s.held = -1
}

func localAddr(network string, a netip.Addr) net.Addr {
	if network == "udp" {
		return net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0))
	}
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0))
}
