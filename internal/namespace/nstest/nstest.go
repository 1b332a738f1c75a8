// Package nstest gives tests network namespaces of their own, made over netlink and gone
// with the test. Only tests import it.
package nstest

import (
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace.
type Namespace struct {
	Handle netns.NsHandle
	Net    *netlink.Handle // works inside it
}

// New makes a namespace without a name, which lives as long as its handle is open, and
// brings its loopback up. A test that is not run as root skips.
func New(t *testing.T) *Namespace {
	t.Helper()
	return create(t, netns.New)
}

// NewNamed makes a namespace that `ip netns` and every reader of /run/netns can see. The
// name must start with "shunt-".
func NewNamed(t *testing.T, name string) *Namespace {
	t.Helper()
	n := create(t, func() (netns.NsHandle, error) { return namespace.NewNamed(name) })
	t.Cleanup(func() {
		if err := netns.DeleteNamed(name); err != nil {
			t.Errorf("delete namespace %s: %v", name, err)
		}
	})
	return n
}

func create(t *testing.T, enter func() (netns.NsHandle, error)) *Namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes network namespaces")
	}
	n := &Namespace{}
	var err error
	locked(t, func() { n.Handle, err = enter() })
	if err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(func() { n.Handle.Close() })
	if n.Net, err = netlink.NewHandleAt(n.Handle); err != nil {
		t.Fatalf("open netlink in the namespace: %v", err)
	}
	t.Cleanup(n.Net.Close)
	n.Up(t, "lo")
	return n
}

// Do runs f on a thread that is inside the namespace. f must not start goroutines that
// rely on it, nor end the test.
func (n *Namespace) Do(t *testing.T, f func()) {
	t.Helper()
	locked(t, func() {
		if err := netns.Set(n.Handle); err != nil {
			t.Errorf("enter the namespace: %v", err)
			return
		}
		f()
	})
}

// locked runs f on a thread of its own and brings that thread back to its namespace.
func locked(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			t.Errorf("get the current namespace: %v", err)
			return // the thread ends with the goroutine
		}
		defer home.Close()
		f()
		if netns.Set(home) == nil {
			runtime.UnlockOSThread()
		}
	}()
	<-done
}

// Veth joins two namespaces: interface nameA in a, nameB in b, both up.
func Veth(t *testing.T, a *Namespace, nameA string, b *Namespace, nameB string) {
	t.Helper()
	link := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: nameA, Namespace: netlink.NsFd(a.Handle)},
		PeerName:      nameB,
		PeerNamespace: netlink.NsFd(b.Handle),
	}
	if err := a.Net.LinkAdd(link); err != nil {
		t.Fatalf("make veth %s–%s: %v", nameA, nameB, err)
	}
	a.Up(t, nameA)
	b.Up(t, nameB)
}

// Link reads an interface.
func (n *Namespace) Link(t *testing.T, name string) netlink.Link {
	t.Helper()
	link, err := n.Net.LinkByName(name)
	if err != nil {
		t.Fatalf("read interface %s: %v", name, err)
	}
	return link
}

// Index is an interface's index.
func (n *Namespace) Index(t *testing.T, name string) int {
	t.Helper()
	return n.Link(t, name).Attrs().Index
}

// MAC is an interface's hardware address.
func (n *Namespace) MAC(t *testing.T, name string) net.HardwareAddr {
	t.Helper()
	return n.Link(t, name).Attrs().HardwareAddr
}

// Up sets an interface up.
func (n *Namespace) Up(t *testing.T, name string) {
	t.Helper()
	if err := n.Net.LinkSetUp(n.Link(t, name)); err != nil {
		t.Fatalf("set %s up: %v", name, err)
	}
}

// Down sets an interface down.
func (n *Namespace) Down(t *testing.T, name string) {
	t.Helper()
	if err := n.Net.LinkSetDown(n.Link(t, name)); err != nil {
		t.Fatalf("set %s down: %v", name, err)
	}
}

// Address gives an interface an address, "10.0.0.1/24", without duplicate detection.
func (n *Namespace) Address(t *testing.T, name, prefix string) {
	t.Helper()
	if err := n.Net.AddrAdd(n.Link(t, name), address(t, prefix)); err != nil {
		t.Fatalf("add %s to %s: %v", prefix, name, err)
	}
}

// RemoveAddress takes it off again.
func (n *Namespace) RemoveAddress(t *testing.T, name, prefix string) {
	t.Helper()
	if err := n.Net.AddrDel(n.Link(t, name), address(t, prefix)); err != nil {
		t.Fatalf("remove %s from %s: %v", prefix, name, err)
	}
}

func address(t *testing.T, prefix string) *netlink.Addr {
	t.Helper()
	a, err := netlink.ParseAddr(prefix)
	if err != nil {
		t.Fatal(err)
	}
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	return a
}

// Route adds a route by way of a router.
func (n *Namespace) Route(t *testing.T, prefix, via string) {
	t.Helper()
	p := netip.MustParsePrefix(prefix)
	err := n.Net.RouteReplace(&netlink.Route{
		Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		Gw:  netip.MustParseAddr(via).AsSlice(),
	})
	if err != nil {
		t.Fatalf("route %s via %s: %v", prefix, via, err)
	}
}

// Sysctl writes a value under /proc/sys/net, for instance ("ipv4/ip_forward", "1").
func (n *Namespace) Sysctl(t *testing.T, path, value string) {
	t.Helper()
	var err error
	n.Do(t, func() { err = os.WriteFile("/proc/sys/net/"+path, []byte(value), 0) })
	if err != nil {
		t.Fatalf("set %s to %s: %v", path, value, err)
	}
}

// Read reads a file as seen from inside, for instance "/proc/thread-self/net/igmp6".
func (n *Namespace) Read(t *testing.T, path string) string {
	t.Helper()
	var b []byte
	var err error
	n.Do(t, func() { b, err = os.ReadFile(path) })
	if err != nil {
		t.Fatalf("read %s: %v", path, err)
	}
	return string(b)
}

// Eventually asks until the answer is yes, and fails the test after 30 s.
func Eventually(t *testing.T, what string, ask func() bool) {
	t.Helper()
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for !ask() {
		select {
		case <-deadline.C:
			t.Fatalf("waited 30 s in vain: %s", what)
		case <-again.C:
		}
	}
}
