package sock

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/shunt-lb/shunt/test/space"
)

var testCount atomic.Int64

var testLimits = model.Limits{Flows: 1000, Services: 20, Backends: 40, Slots: 20000, Remembered: 1000, Filters: 100}

// The VIPs are nowhere: only a socket that gets another address reaches anything. Backends are on lo.
const (
	vip     = "192.0.2.10"
	vip2    = "192.0.2.11"
	vip6    = "2001:db8::10"
	first   = "10.9.0.2"
	second  = "10.9.0.3"
	first6  = "fd00:9::2"
	patient = 5 * time.Second
)

// bed is a network namespace, a cgroup with this process in it, and a data plane.
type bed struct {
	*testing.T
	cgroup   string
	datapath *datapath.Datapath
	maps     *reconcile.Reconciler
	options  Options
	sockets  *Sockets
	members  *Members // from the last time that backends may have left a service
}

// noting is a data plane whose bed notes the members of services.
type noting struct {
	reconcile.Maps
	b *bed
}

func (n noting) EndStrays(all []reconcile.Member) error {
	err := n.Maps.EndStrays(all)
	if err == nil && n.b.sockets != nil {
		n.b.members, err = n.b.sockets.Leave(all, n.Grace)
	}
	return err
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newBed returns a bed with the programs attached.
func newBed(t *testing.T) *bed {
	t.Helper()
	b := newBare(t)
	b.open()
	return b
}

// newBare returns a bed without the programs.
func newBare(t *testing.T) *bed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces and cgroups")
	}
	name := fmt.Sprintf("shunt-sk-%d-%d", os.Getpid(), testCount.Add(1))
	space.Enter(t, name)
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.LinkSetUp(lo))
	for _, text := range []string{first + "/32", second + "/32", first6 + "/128"} {
		address, err := netlink.ParseAddr(text)
		must(t, err)
		address.Flags |= unix.IFA_F_NODAD
		must(t, netlink.AddrAdd(lo, address))
	}
	b := &bed{T: t, cgroup: newCgroup(t, name)}
	instance := fmt.Sprintf("sk-%d-%d", os.Getpid(), testCount.Load())
	b.datapath = space.Open(t, store.Options{Instance: instance, Limits: testLimits, Log: slog.New(slog.DiscardHandler)})
	b.maps = reconcile.New(noting{b.datapath, b})
	_, err = b.maps.Adopt()
	must(t, err)
	b.options = Options{Instance: instance, Cgroup: b.cgroup, DataPlane: b.datapath, Log: slog.New(slog.DiscardHandler)}
	t.Cleanup(func() {
		must(t, Remove("", instance))
		if _, err := os.Stat(folder(kernel.DefaultPinRoot, instance)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the folder of the pins is still there: %v", err)
		}
	})
	return b
}

// newCgroup makes a cgroup and moves this process into it. Sockets have the cgroup of their creation.
func newCgroup(t *testing.T, name string) string {
	t.Helper()
	root, unmount, err := lab.MountCgroup2()
	must(t, err)
	t.Cleanup(func() { must(t, unmount()) })
	text, err := os.ReadFile("/proc/self/cgroup")
	must(t, err)
	home := "/"
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			home = path
		}
	}
	path := filepath.Join(root, name)
	must(t, os.Mkdir(path, 0o755))
	must(t, os.WriteFile(filepath.Join(path, "cgroup.procs"), fmt.Appendf(nil, "%d", os.Getpid()), 0))
	t.Cleanup(func() {
		must(t, os.WriteFile(filepath.Join(root, home, "cgroup.procs"), fmt.Appendf(nil, "%d", os.Getpid()), 0))
		must(t, os.Remove(path))
	})
	return path
}

func (b *bed) open() {
	b.Helper()
	sockets, err := Open(b.options)
	must(b.T, err)
	b.sockets = sockets
	b.Cleanup(func() { must(b.T, sockets.Close()) })
}

// serve makes these the services.
func (b *bed) serve(services ...model.Service) {
	b.Helper()
	_, err := b.maps.Apply(reconcile.Desired{Services: model.Shared(services), Limits: testLimits, Settle: time.Hour})
	must(b.T, err)
}

// service returns a service of TCP and UDP at an address and ports, with backends "address:port".
func service(name, address string, ports value.PortRange, backends ...string) model.Service {
	s := model.Service{Name: name, Forwarding: model.ForwardingNAT, Tracking: model.TrackingAuto, TableSize: 251}
	for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
		s.Frontends = append(s.Frontends, model.Frontend{Address: netip.MustParseAddr(address), Ports: ports, Protocol: protocol})
	}
	for _, text := range backends {
		at := netip.MustParseAddrPort(text)
		s.Backends = append(s.Backends, model.Backend{BackendAddress: model.BackendAddress{Address: at.Addr(), Port: at.Port()}, Name: text, Weight: 1})
	}
	return s
}

func one(port uint16) value.PortRange { return value.PortRange{First: port, Last: port} }

// outcome returns the count of an outcome of calls.
func (b *bed) outcome(name string) uint64 {
	b.Helper()
	counts, err := b.sockets.Outcomes()
	must(b.T, err)
	return counts[name]
}

// listenTCP accepts at an address, for the whole test, and sends that address at each connection.
func (b *bed) listenTCP(address string) string {
	b.Helper()
	l, err := net.Listen("tcp", address)
	must(b.T, err)
	b.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte(l.Addr().String()))
			b.Cleanup(func() { _ = c.Close() })
		}
	}()
	return l.Addr().String()
}

// listenUDP answers at an address, for the whole test, with that address.
func (b *bed) listenUDP(address string) string {
	b.Helper()
	c, err := net.ListenPacket("udp", address)
	must(b.T, err)
	b.Cleanup(func() { _ = c.Close() })
	go func() {
		buffer := make([]byte, 100)
		for {
			_, from, err := c.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = c.WriteTo([]byte(c.LocalAddr().String()), from)
		}
	}()
	return c.LocalAddr().String()
}

// socket is a bare socket, because package net hides the calls that are tested here.
type socket struct {
	*bed
	fd int
}

func (b *bed) socket(family, kind, protocol int) socket {
	b.Helper()
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
	must(b.T, err)
	timeout := unix.NsecToTimeval(int64(patient))
	must(b.T, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout))
	must(b.T, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout))
	s := socket{b, fd}
	b.Cleanup(func() { _ = unix.Close(fd) })
	return s
}

// sockaddr returns an address for a socket of a family: IPv4 is mapped for a socket of IPv6.
func sockaddr(family int, to string) unix.Sockaddr {
	at := netip.MustParseAddrPort(to)
	if family == unix.AF_INET {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
}

func text(sa unix.Sockaddr) string {
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)).String()
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port)).String()
	}
	return fmt.Sprintf("%T", sa)
}

func (s socket) family() int {
	s.Helper()
	family, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	must(s.T, err)
	return family
}

// connect connects; a signal that Go sends to its threads does not end it.
func (s socket) connect(to string) error {
	s.Helper()
	err := unix.Connect(s.fd, sockaddr(s.family(), to))
	if errors.Is(err, syscall.EINTR) {
		poll := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLOUT}}
		for n, e := unix.Poll(poll, int(patient/time.Millisecond)); n < 1 && errors.Is(e, unix.EINTR); n, e = unix.Poll(poll, int(patient/time.Millisecond)) {
		}
		number, e := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		must(s.T, e)
		if number != 0 {
			return unix.Errno(number)
		}
		return nil
	}
	return err
}

// disconnect is connect() to AF_UNSPEC.
func (s socket) disconnect() {
	s.Helper()
	var none unix.RawSockaddr
	none.Family = unix.AF_UNSPEC
	must(s.T, rawConnect(s.fd, &none))
}

func (s socket) peer() string {
	s.Helper()
	sa, err := unix.Getpeername(s.fd)
	if err != nil {
		return err.Error()
	}
	return text(sa)
}

func (s socket) wantPeer(want string) {
	s.Helper()
	if got := s.peer(); got != want {
		s.Errorf("getpeername says %s, want %s", got, want)
	}
}

func (s socket) send(to string) error {
	s.Helper()
	return unix.Sendto(s.fd, []byte("?"), 0, sockaddr(s.family(), to))
}

// ask sends a datagram (connected: to is "") and returns the backend that answered, and the answer's source address.
func (s socket) ask(to string) (answered, as string) {
	s.Helper()
	if to == "" {
		_, err := unix.Write(s.fd, []byte("?"))
		must(s.T, err)
	} else {
		must(s.T, s.send(to))
	}
	return s.receive()
}

func (s socket) receive() (answered, as string) {
	s.Helper()
	buffer := make([]byte, 100)
	for {
		n, from, err := unix.Recvfrom(s.fd, buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		must(s.T, err)
		return string(buffer[:n]), text(from)
	}
}

// wantAsk asks, and checks both.
func (s socket) wantAsk(to, answered, as string) {
	s.Helper()
	if by, got := s.ask(to); by != answered || got != as {
		s.Errorf("asked %q: %s answered as %s, want %s as %s", to, by, got, answered, as)
	}
}

// wantGreeting reads the address that a TCP backend sends.
func (s socket) wantGreeting(from string) {
	s.Helper()
	buffer := make([]byte, 100)
	for {
		n, err := unix.Read(s.fd, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		must(s.T, err)
		if got := string(buffer[:n]); got != from {
			s.Errorf("the backend is %q, want %s", got, from)
		}
		return
	}
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patient); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s", what, patient)
		}
	}
}
