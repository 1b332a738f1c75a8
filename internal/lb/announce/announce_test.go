package announce

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// lan is a link with a balancer that announces and a host that listens:
//
//	balancer ──lan─────────eth── host
//	10.8.0.1/24            10.8.0.2/24
//	fd00:8::1/64           fd00:8::2/64
type lan struct{ balancer, host *nstest.Namespace }

func newSegment(t *testing.T) lan {
	t.Helper()
	s := lan{nstest.New(t), nstest.New(t)}
	for _, n := range []*nstest.Namespace{s.balancer, s.host} { // link-local addresses are usable at once
		n.Sysctl(t, "ipv6/conf/default/accept_dad", "0")
	}
	nstest.Veth(t, s.balancer, "lan", s.host, "eth")
	// An address in the middle: the tests make lower and higher ones, and the kernel may draw any.
	if err := s.balancer.Net.LinkSetHardwareAddr(s.balancer.Link(t, "lan"), net.HardwareAddr{0x42, 0, 0, 0, 0, 1}); err != nil {
		t.Fatal(err)
	}
	s.balancer.Address(t, "lan", "10.8.0.1/24")
	s.balancer.Address(t, "lan", "fd00:8::1/64")
	s.host.Address(t, "eth", "10.8.0.2/24")
	s.host.Address(t, "eth", "fd00:8::2/64")
	return s
}

// plane stands in for the data plane.
type plane struct {
	mu    sync.Mutex
	owned map[netip.Addr]bool
	ever  map[netip.Addr]bool
	calls int // of own
	fail  error
}

func (p *plane) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls
}

func (p *plane) own(a netip.Addr, _ int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail != nil {
		return p.fail
	}
	p.owned[a], p.ever[a] = true, true
	p.calls++
	return nil
}

func (p *plane) disown(a netip.Addr, _ int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.owned, a)
	return nil
}

func (p *plane) has(a netip.Addr) (now, ever bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.owned[a], p.ever[a]
}

type fixture struct {
	*Announcer
	plane      *plane
	conditions *condition.Set
	iface      int
}

func (s lan) announcer(t *testing.T) fixture {
	t.Helper()
	f := fixture{
		plane:      &plane{owned: map[netip.Addr]bool{}, ever: map[netip.Addr]bool{}},
		conditions: &condition.Set{}, iface: s.balancer.Index(t, "lan"),
	}
	var err error
	f.Announcer, err = New(Options{
		Namespace: &s.balancer.Handle, Own: f.plane.own, Disown: f.plane.disown, Conditions: f.conditions,
		ProbeInterval: 30 * time.Millisecond, ProbeWait: 100 * time.Millisecond, AnnounceInterval: 20 * time.Millisecond,
		RetryInterval: 100 * time.Millisecond, FailureInterval: 50 * time.Millisecond,
		CheckInterval: 100 * time.Millisecond, DefendInterval: 200 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.stop(); f.running.Wait() })
	return f
}

// decided waits until the owner of each address is known, and returns the addresses that are not ours.
func (f fixture) decided(t *testing.T) []State {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	list := f.Wait(ctx)
	if ctx.Err() != nil {
		t.Fatalf("undecided after 20 s: %+v", f.States())
	}
	return list
}

var (
	vip4 = netip.MustParseAddr("10.8.0.100")
	vip6 = netip.MustParseAddr("fd00:8::1:2:3")
)

// member reports whether the interface is a member of the group.
func member(t *testing.T, n *nstest.Namespace, iface string, group netip.Addr) bool {
	t.Helper()
	b := group.As16()
	hex := ""
	for _, c := range b {
		hex += string("0123456789abcdef"[c>>4]) + string("0123456789abcdef"[c&15])
	}
	return slices.ContainsFunc(strings.Split(n.Read(t, "/proc/thread-self/net/igmp6"), "\n"), func(line string) bool {
		f := strings.Fields(line)
		return len(f) > 2 && f[1] == iface && f[2] == hex
	})
}

// cached is the hardware address the host has for addr.
func (s lan) cached(t *testing.T, addr netip.Addr) net.HardwareAddr {
	t.Helper()
	list, err := s.host.Net.NeighList(s.host.Index(t, "eth"), netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range list {
		if n.IP.Equal(addr.AsSlice()) {
			return n.HardwareAddr
		}
	}
	return nil
}

func TestFreeAddressIsAnnounced(t *testing.T) {
	s := newSegment(t)
	for _, vip := range []netip.Addr{vip4, vip6} { // the host knows an old place of the address
		err := s.host.Net.NeighAdd(&netlink.Neigh{
			LinkIndex: s.host.Index(t, "eth"), IP: vip.AsSlice(), State: netlink.NUD_STALE,
			HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	f := s.announcer(t)
	f.Announce(vip4, f.iface)
	f.Announce(vip6, f.iface)
	if list := f.decided(t); len(list) > 0 {
		t.Fatalf("not ours: %+v", list)
	}
	for _, vip := range []netip.Addr{vip4, vip6} {
		if now, _ := f.plane.has(vip); !now || !f.Owned(vip, f.iface) {
			t.Errorf("the data plane does not answer for %s", vip)
		}
		nstest.Eventually(t, "the host learns the new place of "+vip.String(), func() bool {
			return bytes.Equal(s.cached(t, vip), s.balancer.MAC(t, "lan"))
		})
	}
	if list := f.conditions.List(); len(list) > 0 {
		t.Errorf("conditions: %+v, want none", list)
	}
}

func TestAddressInUseIsLeftAloneUntilItIsFree(t *testing.T) {
	s := newSegment(t)
	s.host.Address(t, "eth", vip4.String()+"/24")
	s.host.Address(t, "eth", vip6.String()+"/64")
	f := s.announcer(t)
	f.Announce(vip4, f.iface)
	f.Announce(vip6, f.iface)
	for _, state := range f.decided(t) {
		if !bytes.Equal(state.Owner, s.host.MAC(t, "eth")) || state.Owned || state.Err != "" {
			t.Errorf("%+v, want the host as the owner", state)
		}
	}
	nstest.Eventually(t, "both conditions are raised", func() bool { return len(f.conditions.List()) == 2 })
	for _, c := range f.conditions.List() {
		if c.Code != condition.AddressInUse || !strings.HasSuffix(c.Subject, " on lan") || !strings.Contains(c.Text, s.host.MAC(t, "eth").String()) {
			t.Errorf("condition %+v, want %s with interface and hardware address", c, condition.AddressInUse)
		}
	}
	for _, vip := range []netip.Addr{vip4, vip6} {
		if _, ever := f.plane.has(vip); ever {
			t.Errorf("the data plane was told to answer for %s", vip)
		}
	}
	s.host.RemoveAddress(t, "eth", vip4.String()+"/24")
	s.host.RemoveAddress(t, "eth", vip6.String()+"/64")
	nstest.Eventually(t, "the free addresses are announced", func() bool {
		return f.Owned(vip4, f.iface) && f.Owned(vip6, f.iface) && len(f.conditions.List()) == 0
	})
}

func TestTwoBalancersNeverBothOwn(t *testing.T) {
	s := newSegment(t)
	ours := s.announcer(t)
	ours.opts.ProbeWait = time.Second // nobody answers probes here: only probes that cross are seen
	theirs := lan{s.host, s.balancer}
	other := fixture{plane: &plane{owned: map[netip.Addr]bool{}, ever: map[netip.Addr]bool{}}, iface: theirs.balancer.Index(t, "eth")}
	var err error
	other.Announcer, err = New(Options{
		Namespace: &s.host.Handle, Own: other.plane.own, Disown: other.plane.disown,
		ProbeInterval: 30 * time.Millisecond, ProbeWait: time.Second, RetryInterval: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.stop(); other.running.Wait() })
	for _, vip := range []netip.Addr{vip4, vip6} {
		ours.Announce(vip, ours.iface)
		other.Announce(vip, other.iface)
	}
	ours.decided(t)
	other.decided(t)
	for _, vip := range []netip.Addr{vip4, vip6} {
		_, here := ours.plane.has(vip)
		_, there := other.plane.has(vip)
		if here && there {
			t.Errorf("%s: both own it after probing at once", vip)
		}
	}
}

func TestGroupOutlivesTheProcess(t *testing.T) {
	s := newSegment(t)
	group := wire.SolicitedNode(vip6)
	if member(t, s.balancer, "lan", group) {
		t.Fatal("already a member of the group")
	}
	f := s.announcer(t)
	f.Announce(vip6, f.iface)
	// The last 24 bits are the same, and so is the group.
	twin := netip.MustParseAddr("fd00:8:0:1::2:3")
	f.Announce(twin, f.iface)
	f.decided(t)
	if err := f.Close(true); err != nil {
		t.Fatal(err)
	}
	if !member(t, s.balancer, "lan", group) {
		t.Fatal("the membership ended with the announcer")
	}
	next := s.announcer(t)
	next.Announce(vip6, next.iface)
	next.Announce(twin, next.iface)
	if list := next.decided(t); len(list) > 0 {
		t.Errorf("the successor does not own %+v", list)
	}
	if err := next.Withdraw(vip6, next.iface); err != nil {
		t.Fatal(err)
	}
	if !member(t, s.balancer, "lan", group) {
		t.Error("the membership ended while another address needs it")
	}
	if now, _ := next.plane.has(vip6); now {
		t.Error("the data plane still answers for a withdrawn address")
	}
	if err := next.Close(false); err != nil {
		t.Fatal(err)
	}
	if member(t, s.balancer, "lan", group) {
		t.Error("the membership outlived the last address that needs it")
	}
}

func TestWithdrawsWhatAPredecessorLeft(t *testing.T) {
	s := newSegment(t)
	f := s.announcer(t)
	f.Announce(vip6, f.iface)
	f.decided(t)
	if err := f.Close(true); err != nil {
		t.Fatal(err)
	}
	next := s.announcer(t)
	if err := next.Withdraw(vip6, next.iface); err != nil {
		t.Fatal(err)
	}
	if member(t, s.balancer, "lan", wire.SolicitedNode(vip6)) {
		t.Error("still a member of the group")
	}
}

func TestGroupRefused(t *testing.T) {
	s := newSegment(t)
	s.balancer.Sysctl(t, "ipv6/conf/lan/disable_ipv6", "1")
	f := s.announcer(t)
	f.Announce(vip6, f.iface)
	if list := f.decided(t); len(list) > 0 {
		t.Fatalf("not ours: %+v", list)
	}
	list := f.conditions.List()
	if len(list) != 1 || list[0].Code != condition.MulticastLinkOnly || list[0].Subject != vip6.String()+" on lan" {
		t.Errorf("conditions %+v, want %s alone", list, condition.MulticastLinkOnly)
	}
	mac := strings.ReplaceAll(wire.GroupMAC(wire.SolicitedNode(vip6)).String(), ":", "")
	listed := func() bool { return strings.Contains(s.balancer.Read(t, "/proc/thread-self/net/dev_mcast"), mac) }
	if !listed() {
		t.Errorf("%s is not received", mac)
	}
	if err := f.Close(false); err != nil {
		t.Fatal(err)
	}
	if listed() {
		t.Errorf("%s is still received after Close", mac)
	}
	if list := f.conditions.List(); len(list) > 0 {
		t.Errorf("conditions left: %+v", list)
	}
}

func TestInterfaceThatGoesDownAndComesBack(t *testing.T) {
	s := newSegment(t)
	f := s.announcer(t)
	f.Announce(vip4, f.iface)
	f.Announce(vip6, f.iface)
	f.decided(t)
	before := f.plane.count()
	s.balancer.Down(t, "lan")
	nstest.Eventually(t, "the loss of carrier arrives at the host", func() bool {
		return s.host.Link(t, "eth").Attrs().RawFlags&unix.IFF_RUNNING == 0
	})
	s.balancer.Up(t, "lan")
	nstest.Eventually(t, "both addresses are claimed again", func() bool { return f.plane.count() >= before+2 })
	if !member(t, s.balancer, "lan", wire.SolicitedNode(vip6)) {
		t.Error("the group is no longer joined")
	}
	nstest.Eventually(t, "no condition remains", func() bool { return len(f.conditions.List()) == 0 })
}

func TestFailuresAreTriedAgain(t *testing.T) {
	s := newSegment(t)
	f := s.announcer(t)
	f.plane.fail = errors.New("map is full")
	f.Announce(vip4, f.iface)
	if list := f.decided(t); len(list) != 1 || !strings.Contains(list[0].Err, "map is full") {
		t.Errorf("states %+v, want the data plane's error", list)
	}
	nstest.Eventually(t, "the failure is a condition", func() bool {
		list := f.conditions.List()
		return len(list) == 1 && list[0].Code == condition.AnnounceFailed
	})
	f.plane.mu.Lock()
	f.plane.fail = nil
	f.plane.mu.Unlock()
	nstest.Eventually(t, "the address is announced", func() bool {
		return f.Owned(vip4, f.iface) && len(f.conditions.List()) == 0
	})

	f.Announce(vip4, 9999)
	nstest.Eventually(t, "a missing interface is named", func() bool {
		return slices.ContainsFunc(f.States(), func(s State) bool { return strings.Contains(s.Err, "interface 9999") })
	})
	if err := f.Withdraw(vip4, 9999); err != nil {
		t.Error(err)
	}
}

func TestConflict(t *testing.T) {
	ours, theirs := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	lower := net.HardwareAddr{2, 0, 0, 0, 0, 0}
	frame := func(b []byte, err error) []byte {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, test := range []struct {
		name  string
		frame []byte
		addr  netip.Addr
		owner net.HardwareAddr
	}{
		{"ARP announcement of the address", frame(wire.Announcement(theirs, vip4)), vip4, theirs},
		{"ARP probe for the address, by a higher hardware address", frame(wire.Probe(theirs, vip4)), vip4, nil},
		{"ARP probe for the address, by a lower one", frame(wire.Probe(lower, vip4)), vip4, lower},
		{"ARP bid for the address, by a lower one", frame(wire.Bid(lower, ours, vip4)), vip4, nil},
		{"our own ARP probe", frame(wire.Probe(ours, vip4)), vip4, nil},
		{"ARP request for the address", frame(wire.ARPRequest(theirs, ours, netip.MustParseAddr("10.8.0.2"), vip4)), vip4, nil},
		{"ARP about another address", frame(wire.Announcement(theirs, netip.MustParseAddr("10.8.0.2"))), vip4, nil},
		{"advertisement of the address", frame(wire.Announcement(theirs, vip6)), vip6, theirs},
		{"solicitation from ::, by a higher hardware address", frame(wire.Probe(theirs, vip6)), vip6, nil},
		{"solicitation from ::, by a lower one", frame(wire.Probe(lower, vip6)), vip6, lower},
		{"bid for the address, by a lower one", frame(wire.Bid(lower, ours, vip6)), vip6, nil},
		{"our own solicitation", frame(wire.Probe(ours, vip6)), vip6, nil},
		{"advertisement of another address", frame(wire.Announcement(theirs, netip.MustParseAddr("fd00::9"))), vip6, nil},
		{"nothing", nil, vip4, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := conflict(test.frame, ours, test.addr); !bytes.Equal(got, test.owner) {
				t.Errorf("owner %v, want %v", got, test.owner)
			}
			for n := range test.frame { // cut short anywhere, it is never read beyond its end
				conflict(test.frame[:n:n], ours, test.addr)
			}
		})
	}
}

// FuzzConflict reads any frame, and expects no panic.
func FuzzConflict(f *testing.F) {
	for _, vip := range []netip.Addr{vip4, vip6} {
		frame, err := wire.Announcement(net.HardwareAddr{2, 0, 0, 0, 0, 2}, vip)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(frame)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		for _, vip := range []netip.Addr{vip4, vip6} {
			if owner := conflict(frame, net.HardwareAddr{2, 0, 0, 0, 0, 1}, vip); owner != nil && len(owner) != 6 {
				t.Errorf("owner %v is not a hardware address", owner)
			}
		}
	})
}
