package neighbour

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
	"github.com/vishvananda/netlink"
)

// site is the smallest network with a next hop:
//
//	balancer ──lan─────────eth── backend
//	10.8.0.1/24            10.8.0.2/24, 10.8.0.3/24
//	fd00:8::1/64           fd00:8::2/64
type site struct{ balancer, backend *nstest.Namespace }

func newUntunedSite(t *testing.T) site {
	t.Helper()
	s := site{nstest.New(t), nstest.New(t)}
	nstest.Veth(t, s.balancer, "lan", s.backend, "eth")
	s.balancer.Address(t, "lan", "10.8.0.1/24")
	s.balancer.Address(t, "lan", "fd00:8::1/64")
	s.backend.Address(t, "eth", "10.8.0.2/24")
	s.backend.Address(t, "eth", "10.8.0.3/24")
	s.backend.Address(t, "eth", "fd00:8::2/64")
	return s
}

func newSite(t *testing.T) site {
	t.Helper()
	s := newUntunedSite(t)
	// The kernel's defaults need a minute to notice a silent change of hardware address.
	for _, family := range []string{"ipv4", "ipv6"} {
		s.balancer.Sysctl(t, family+"/neigh/lan/retrans_time_ms", "50")
		s.balancer.Sysctl(t, family+"/neigh/lan/base_reachable_time_ms", "300")
		s.balancer.Sysctl(t, family+"/neigh/lan/delay_first_probe_time", "1")
		s.balancer.Sysctl(t, family+"/neigh/lan/interval_probe_time_ms", "100")
	}
	return s
}

// entry reads the kernel's own view.
func (s site) entry(t *testing.T, addr string) (netlink.Neigh, bool) {
	t.Helper()
	list, err := s.balancer.Net.NeighList(s.balancer.Index(t, "lan"), netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(n netlink.Neigh) bool { return n.IP.Equal(net.ParseIP(addr)) })
	if i < 0 {
		return netlink.Neigh{}, false
	}
	return list[i], true
}

func (s site) managed(t *testing.T, addr string) bool {
	t.Helper()
	n, ok := s.entry(t, addr)
	return ok && n.FlagsExt&netlink.NTF_EXT_MANAGED != 0
}

// record keeps the reports of a watcher.
type record struct {
	mu   sync.Mutex
	hops []Hop
}

func (r *record) add(h *Hop) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hops = append(r.hops, *h)
}

func (r *record) of(addr string) []Hop {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []Hop
	for _, h := range r.hops {
		if h.Address == netip.MustParseAddr(addr) {
			list = append(list, h)
		}
	}
	return list
}

func (s site) watch(t *testing.T, opts Options) (*Watcher, *record) {
	t.Helper()
	r := &record{}
	opts.Namespace = &s.balancer.Handle
	opts.OnChange = r.add
	w, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.stop(); w.stopped.Wait() })
	return w, r
}

func addrs(list ...string) []netip.Addr {
	out := make([]netip.Addr, len(list))
	for i, a := range list {
		out[i] = netip.MustParseAddr(a)
	}
	return out
}

func mustResolve(t *testing.T, w *Watcher, list ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if missing := w.Wait(ctx, addrs(list...)); len(missing) > 0 {
		t.Fatalf("not resolved after 10 s: %v; known: %+v", missing, w.Hops())
	}
}

func TestResolvesOnTheLink(t *testing.T) {
	s := newSite(t)
	w, told := s.watch(t, Options{})
	w.Want(addrs("10.8.0.2", "fd00:8::2"))
	mustResolve(t, w, "10.8.0.2", "fd00:8::2")
	for addr, source := range map[string]string{"10.8.0.2": "10.8.0.1", "fd00:8::2": "fd00:8::1"} {
		want := Hop{
			Address: netip.MustParseAddr(addr), NextHop: netip.MustParseAddr(addr),
			Interface: s.balancer.Index(t, "lan"), MAC: s.backend.MAC(t, "eth"),
			Source: netip.MustParseAddr(source), Resolved: true,
		}
		if got, _ := w.Hop(want.Address); !got.equal(want) {
			t.Errorf("%s: %+v, want %+v", addr, got, want)
		}
		list := told.of(addr)
		if len(list) == 0 || !list[len(list)-1].equal(want) {
			t.Errorf("%s: told %+v, want the last to be %+v", addr, list, want)
		}
		for i := 1; i < len(list); i++ {
			if list[i].equal(list[i-1]) {
				t.Errorf("%s: told the same twice: %+v", addr, list[i])
			}
		}
		if !s.managed(t, addr) {
			t.Errorf("%s is not a managed neighbour", addr)
		}
	}
}

func TestResolvesByWayOfARouter(t *testing.T) {
	s := newSite(t)
	s.balancer.Route(t, "10.99.0.0/16", "10.8.0.2")
	s.balancer.Route(t, "fd00:99::/32", "fd00:8::2")
	w, _ := s.watch(t, Options{})
	w.Want(addrs("10.99.1.1", "fd00:99::1"))
	mustResolve(t, w, "10.99.1.1", "fd00:99::1")
	for addr, router := range map[string]string{"10.99.1.1": "10.8.0.2", "fd00:99::1": "fd00:8::2"} {
		h, _ := w.Hop(netip.MustParseAddr(addr))
		if h.NextHop != netip.MustParseAddr(router) || !bytes.Equal(h.MAC, s.backend.MAC(t, "eth")) {
			t.Errorf("%s: %+v, want it by way of %s", addr, h, router)
		}
	}
	// The route moves to another router, and the entry of the first is released.
	s.balancer.Route(t, "10.99.0.0/16", "10.8.0.3")
	nstest.Eventually(t, "the new router is used", func() bool {
		h, _ := w.Hop(netip.MustParseAddr("10.99.1.1"))
		return h.Resolved && h.NextHop == netip.MustParseAddr("10.8.0.3")
	})
	nstest.Eventually(t, "the old router's entry is gone", func() bool { return !s.managed(t, "10.8.0.2") })
}

func TestRouteThatAppearsLater(t *testing.T) {
	s := newSite(t)
	conditions := &condition.Set{}
	w, told := s.watch(t, Options{Conditions: conditions})
	w.Want(addrs("10.99.1.1"))
	nstest.Eventually(t, "no route is told", func() bool { return len(told.of("10.99.1.1")) == 1 })
	if h := told.of("10.99.1.1")[0]; h.Resolved || !strings.HasPrefix(h.Err, "no route to 10.99.1.1") {
		t.Errorf("told %+v, want no route", h)
	}
	nstest.Eventually(t, "the condition is raised", func() bool {
		list := conditions.List()
		return len(list) == 1 && list[0].Code == condition.NeighbourUnresolved && list[0].Subject == "10.99.1.1"
	})
	s.balancer.Route(t, "10.99.0.0/16", "10.8.0.2")
	mustResolve(t, w, "10.99.1.1")
	nstest.Eventually(t, "the condition is cleared", func() bool { return len(conditions.List()) == 0 })
}

// TestReview: the kernel does not report that Host's answer has changed, so the caller does.
func TestReview(t *testing.T) {
	s := newSite(t)
	var attached, met atomic.Bool
	w, told := s.watch(t, Options{Resync: time.Hour, Host: func() (int, net.HardwareAddr, bool) {
		if !attached.Load() {
			return 0, nil, false
		}
		return s.balancer.Index(t, "lan"), s.balancer.MAC(t, "lan"), met.Load()
	}})
	w.Want(addrs("10.8.0.1"))
	nstest.Eventually(t, "it is told", func() bool { return len(told.of("10.8.0.1")) == 1 })
	if h := told.of("10.8.0.1")[0]; !h.Host || h.Resolved || h.Err != "" {
		t.Errorf("told %+v, want an address of the host that is neither resolved nor out of reach", h)
	}
	attached.Store(true)
	w.Review()
	nstest.Eventually(t, "it is out of reach", func() bool { h := told.of("10.8.0.1"); return h[len(h)-1].Err != "" })
	met.Store(true)
	w.Want(addrs("10.8.0.1")) // the same as before
	w.Review()
	mustResolve(t, w, "10.8.0.1")
}

func TestNoticesAnotherHardwareAddress(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(t *testing.T, s site, link netlink.Link, mac net.HardwareAddr) error
	}{
		{"silently", func(t *testing.T, s site, link netlink.Link, mac net.HardwareAddr) error {
			return s.backend.Net.LinkSetHardwareAddr(link, mac)
		}},
		{"with the link down and up", func(t *testing.T, s site, link netlink.Link, mac net.HardwareAddr) error {
			s.backend.Down(t, "eth")
			err := s.backend.Net.LinkSetHardwareAddr(link, mac)
			s.backend.Up(t, "eth")
			return err
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSite(t)
			w, told := s.watch(t, Options{})
			w.Want(addrs("10.8.0.2"))
			mustResolve(t, w, "10.8.0.2")
			mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x77}
			if err := test.change(t, s, s.backend.Link(t, "eth"), mac); err != nil {
				t.Fatal(err)
			}
			nstest.Eventually(t, "the new hardware address is told", func() bool {
				list := told.of("10.8.0.2")
				last := list[len(list)-1]
				return last.Resolved && bytes.Equal(last.MAC, mac)
			})
			if !s.managed(t, "10.8.0.2") {
				t.Error("the neighbour is no longer managed")
			}
		})
	}
}

func TestBackendThatDoesNotAnswer(t *testing.T) {
	s := newSite(t)
	conditions := &condition.Set{}
	w, told := s.watch(t, Options{Conditions: conditions})
	w.Want(addrs("10.8.0.2", "10.8.0.77"))
	nstest.Eventually(t, "silence is noticed", func() bool {
		h, _ := w.Hop(netip.MustParseAddr("10.8.0.77"))
		return strings.Contains(h.Err, "does not answer")
	})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	go func() { // ends the wait once the other one is there
		w.Wait(ctx, addrs("10.8.0.2"))
		cancel()
	}()
	if missing := w.Wait(ctx, addrs("10.8.0.2", "10.8.0.77")); !slices.Equal(missing, addrs("10.8.0.77")) {
		t.Errorf("Wait says %v are missing, want 10.8.0.77 alone", missing)
	}
	for _, h := range told.of("10.8.0.77") {
		if h.Resolved {
			t.Errorf("told %+v, but nobody has that address", h)
		}
	}
	s.backend.Address(t, "eth", "10.8.0.77/24")
	mustResolve(t, w, "10.8.0.77")
	// It goes away again: the last known hardware address stays in the hop.
	s.backend.RemoveAddress(t, "eth", "10.8.0.77/24")
	nstest.Eventually(t, "the loss is told", func() bool { return !w.Resolved(netip.MustParseAddr("10.8.0.77")) })
	if h, _ := w.Hop(netip.MustParseAddr("10.8.0.77")); !bytes.Equal(h.MAC, s.backend.MAC(t, "eth")) {
		t.Errorf("after the loss: %+v, want the last known hardware address in it", h)
	}
}

func TestOwnAddressAndInterfaceWithoutHardwareAddresses(t *testing.T) {
	s := newSite(t)
	w, told := s.watch(t, Options{})
	w.Want(addrs("10.8.0.1"))
	nstest.Eventually(t, "the host's own address is told", func() bool { return len(told.of("10.8.0.1")) == 1 })
	if h := told.of("10.8.0.1")[0]; h.Resolved || !strings.Contains(h.Err, "address of this host") {
		t.Errorf("told %+v, want the host's own address named as such", h)
	}
}

func TestLetsGoOnlyOfWhatNobodyNeeds(t *testing.T) {
	s := newSite(t)
	s.balancer.Route(t, "10.99.0.0/16", "10.8.0.2")
	theirs := &netlink.Neigh{
		LinkIndex: s.balancer.Index(t, "lan"), IP: net.ParseIP("10.8.0.3"), State: netlink.NUD_PERMANENT,
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 0x33},
	}
	if err := s.balancer.Net.NeighAdd(theirs); err != nil {
		t.Fatal(err)
	}
	w, _ := s.watch(t, Options{})
	w.Want(addrs("10.8.0.2", "10.99.1.1", "10.8.0.3"))
	mustResolve(t, w, "10.8.0.2", "10.99.1.1", "10.8.0.3")
	if h, _ := w.Hop(netip.MustParseAddr("10.8.0.3")); !bytes.Equal(h.MAC, theirs.HardwareAddr) {
		t.Errorf("a permanent entry gives %+v, want its hardware address", h)
	}
	w.Want(addrs("10.99.1.1", "fd00:8::2"))
	mustResolve(t, w, "fd00:8::2") // so that Want has been acted on
	if _, ok := w.Hop(netip.MustParseAddr("10.8.0.2")); ok {
		t.Error("what is not wanted is still known")
	}
	if !s.managed(t, "10.8.0.2") {
		t.Error("the entry 10.99.1.1 goes through was removed")
	}
	w.Want(nil)
	nstest.Eventually(t, "our entries are gone", func() bool {
		return !s.managed(t, "10.8.0.2") && !s.managed(t, "fd00:8::2")
	})
	if n, ok := s.entry(t, "10.8.0.3"); !ok || n.State != netlink.NUD_PERMANENT {
		t.Errorf("somebody's permanent entry is now %+v", n)
	}
}

func TestEntriesOutliveTheProcessAndAreAdopted(t *testing.T) {
	s := newSite(t)
	theirs := &netlink.Neigh{
		LinkIndex: s.balancer.Index(t, "lan"), IP: net.ParseIP("10.8.0.3"), FlagsExt: netlink.NTF_EXT_MANAGED,
	}
	if err := s.balancer.Net.NeighAdd(theirs); err != nil {
		t.Fatal(err)
	}
	w, _ := s.watch(t, Options{})
	w.Want(addrs("10.8.0.2", "fd00:8::2", "10.8.0.3"))
	mustResolve(t, w, "10.8.0.2", "fd00:8::2", "10.8.0.3")
	if err := w.Close(true); err != nil {
		t.Fatal(err)
	}
	// The kernel alone notices another hardware address.
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x78}
	if err := s.backend.Net.LinkSetHardwareAddr(s.backend.Link(t, "eth"), mac); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, "the kernel resolves again by itself", func() bool {
		n, ok := s.entry(t, "10.8.0.2")
		return ok && bytes.Equal(n.HardwareAddr, mac) && n.State&usable != 0
	})

	next, told := s.watch(t, Options{})
	next.Want(addrs("10.8.0.2"))
	mustResolve(t, next, "10.8.0.2")
	if list := told.of("10.8.0.2"); len(list) != 1 || !list[0].Resolved || !bytes.Equal(list[0].MAC, mac) {
		t.Errorf("the successor tells %+v, want one finding, resolved from the start", list)
	}
	nstest.Eventually(t, "what the predecessor left and nobody wants is gone", func() bool { return !s.managed(t, "fd00:8::2") })
	if err := next.Close(false); err != nil {
		t.Fatal(err)
	}
	if s.managed(t, "10.8.0.2") {
		t.Error("Close without keep left the entry")
	}
	if !s.managed(t, "10.8.0.3") {
		t.Error("a managed entry that somebody else made was removed")
	}
}

func TestFlushedEntryComesBack(t *testing.T) {
	s := newSite(t)
	w, told := s.watch(t, Options{})
	w.Want(addrs("10.8.0.2"))
	mustResolve(t, w, "10.8.0.2")
	before := len(told.of("10.8.0.2"))
	n, _ := s.entry(t, "10.8.0.2")
	if err := s.balancer.Net.NeighDel(&n); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, "the entry is back", func() bool {
		n, ok := s.entry(t, "10.8.0.2")
		return ok && n.State&usable != 0 && s.managed(t, "10.8.0.2")
	})
	for _, h := range told.of("10.8.0.2")[before:] {
		if h.Resolved && h.Err != "" || !bytes.Equal(h.MAC, s.backend.MAC(t, "eth")) {
			t.Errorf("told %+v", h)
		}
	}
	mustResolve(t, w, "10.8.0.2")
}

func TestKernelThatDoesNotManage(t *testing.T) {
	s := newSite(t)
	conditions := &condition.Set{}
	w, _ := s.watch(t, Options{Conditions: conditions, refuseManaged: true})
	w.Want(addrs("10.8.0.2", "fd00:8::2"))
	mustResolve(t, w, "10.8.0.2", "fd00:8::2")
	list := conditions.List()
	if len(list) != 1 || list[0].Code != condition.NeighbourNotManaged {
		t.Errorf("conditions %+v, want %s alone", list, condition.NeighbourNotManaged)
	}
	if err := w.Close(false); err != nil {
		t.Fatal(err)
	}
	if n, ok := s.entry(t, "10.8.0.2"); ok {
		t.Errorf("Close left %+v", n)
	}
}

func TestLostNotifications(t *testing.T) {
	s := newSite(t)
	entry := &netlink.Neigh{
		LinkIndex: s.balancer.Index(t, "lan"), IP: net.ParseIP("10.8.0.2"), State: netlink.NUD_PERMANENT,
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1},
	}
	if err := s.balancer.Net.NeighSet(entry); err != nil {
		t.Fatal(err)
	}
	var logged lockedBuffer
	busy, begun := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w, err := New(Options{
		Namespace: &s.balancer.Handle, Resync: time.Hour, receiveBuffer: 1,
		Log: slog.New(slog.NewTextHandler(&logged, nil)),
		OnChange: func(*Hop) {
			once.Do(func() { close(begun) })
			<-busy
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.stop(); w.stopped.Wait() })
	w.Want(addrs("10.8.0.2"))
	<-begun
	// While no listener reads, more changes happen than the smallest socket buffer holds; the change
	// that matters is the last.
	for i := range 200 {
		other := *entry
		other.IP = net.IPv4(10, 8, 0, byte(50+i))
		if err := s.balancer.Net.NeighSet(&other); err != nil {
			t.Fatal(err)
		}
	}
	entry.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 0, 2}
	if err := s.balancer.Net.NeighSet(entry); err != nil {
		t.Fatal(err)
	}
	close(busy)
	nstest.Eventually(t, "the last change is found", func() bool {
		h, _ := w.Hop(netip.MustParseAddr("10.8.0.2"))
		return h.Resolved && bytes.Equal(h.MAC, entry.HardwareAddr)
	})
	if !strings.Contains(logged.String(), "notifications were lost") {
		t.Errorf("nothing was lost, so nothing is proven; log: %s", logged.String())
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
