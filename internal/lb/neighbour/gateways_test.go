package neighbour

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/vishvananda/netlink"
)

// attach has a watcher keep the gateways on the site's link.
func (s site) attach(t *testing.T) func() map[int]bool {
	lan := s.balancer.Index(t, "lan")
	return func() map[int]bool { return map[int]bool{lan: true} }
}

// add adds a route to the balancer.
func (s site) add(t *testing.T, to string, r netlink.Route) netlink.Route {
	t.Helper()
	p := netip.MustParsePrefix(to)
	r.Dst = &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	if len(r.MultiPath) == 0 {
		r.LinkIndex = s.balancer.Index(t, "lan")
	}
	if err := s.balancer.Net.RouteAdd(&r); err != nil {
		t.Fatalf("add route %v: %v", r, err)
	}
	return r
}

// linkLocal returns the other end's link-local address, once it is no longer being checked.
func (s site) linkLocal(t *testing.T) (found netip.Addr) {
	t.Helper()
	eventuallyIn(t, "the other end has a link-local address", 10*time.Second, func() bool {
		list, err := s.backend.Net.AddrList(s.backend.Link(t, "eth"), netlink.FAMILY_V6)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range list {
			if a.IP.IsLinkLocalUnicast() {
				found, _ = netip.AddrFromSlice(a.IP)
			}
		}
		return found.IsValid()
	})
	return found
}

func eventuallyIn(t *testing.T, what string, limit time.Duration, ready func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ready(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s", what, limit)
		}
	}
}

// TestGatewaysOfRoutes: the kernel keeps the gateway of a route, in every form of naming it, as long as the
// route is there and its interface attached.
func TestGatewaysOfRoutes(t *testing.T) {
	const other = 77 // a routing table
	for _, c := range []struct {
		name string
		to   string
		via  func(t *testing.T, s site) (netlink.Route, []string)
	}{
		{"default", "0.0.0.0/0", func(*testing.T, site) (netlink.Route, []string) {
			return netlink.Route{Gw: net.ParseIP("10.8.0.2")}, []string{"10.8.0.2"}
		}},
		{"ipv6", "::/0", func(*testing.T, site) (netlink.Route, []string) {
			return netlink.Route{Gw: net.ParseIP("fd00:8::2")}, []string{"fd00:8::2"}
		}},
		{"ipv6 by a link-local address", "::/0", func(t *testing.T, s site) (netlink.Route, []string) {
			a := s.linkLocal(t)
			return netlink.Route{Gw: a.AsSlice()}, []string{a.String()}
		}},
		{"ipv4 by an ipv6 router", "10.50.0.0/16", func(t *testing.T, s site) (netlink.Route, []string) {
			a := s.linkLocal(t)
			return netlink.Route{Via: &netlink.Via{AddrFamily: netlink.FAMILY_V6, Addr: a.AsSlice()}}, []string{a.String()}
		}},
		{"outside the subnet", "0.0.0.0/0", func(t *testing.T, s site) (netlink.Route, []string) {
			s.backend.Address(t, "eth", "10.77.0.1/32")
			return netlink.Route{Gw: net.ParseIP("10.77.0.1"), Flags: int(netlink.FLAG_ONLINK)}, []string{"10.77.0.1"}
		}},
		{"multipath", "10.50.0.0/16", func(t *testing.T, s site) (netlink.Route, []string) {
			lan := s.balancer.Index(t, "lan")
			return netlink.Route{MultiPath: []*netlink.NexthopInfo{
				{LinkIndex: lan, Gw: net.ParseIP("10.8.0.2")}, {LinkIndex: lan, Gw: net.ParseIP("10.8.0.3")}}}, []string{"10.8.0.2", "10.8.0.3"}
		}},
		{"another table", "10.50.0.0/16", func(*testing.T, site) (netlink.Route, []string) {
			return netlink.Route{Gw: net.ParseIP("10.8.0.3"), Table: other}, []string{"10.8.0.3"}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			route, hops := c.via(t, s)
			w, _ := s.watch(t, Options{Attached: s.attach(t)})
			w.Want(nil)
			added := s.add(t, c.to, route)
			for _, hop := range hops {
				eventuallyIn(t, hop+" is kept and answers", 10*time.Second, func() bool {
					n, ok := s.entry(t, hop)
					return ok && s.managed(t, hop) && n.State&netlink.NUD_REACHABLE != 0
				})
			}
			if err := s.balancer.Net.RouteDel(&added); err != nil {
				t.Fatal(err)
			}
			for _, hop := range hops {
				eventuallyIn(t, hop+" is let go", 10*time.Second, func() bool { return !s.managed(t, hop) })
			}
		})
	}
}

// TestGatewaysElsewhere: gateways of interfaces that the data plane does not use are the kernel's own matter.
func TestGatewaysElsewhere(t *testing.T) {
	s := newSite(t)
	s.add(t, "0.0.0.0/0", netlink.Route{Gw: net.ParseIP("10.8.0.2")})
	w, _ := s.watch(t, Options{Attached: func() map[int]bool { return map[int]bool{1: true} }})
	w.Want(addrs("10.8.0.3"))
	mustResolve(t, w, "10.8.0.3")
	w.Want(addrs("fd00:8::2")) // by then the earlier routes have been read
	mustResolve(t, w, "fd00:8::2")
	eventuallyIn(t, "the backend of before is let go", 10*time.Second, func() bool { return !s.managed(t, "10.8.0.3") })
	if s.managed(t, "10.8.0.2") {
		t.Error("a gateway of an interface that is not attached is managed")
	}
}

// TestGatewayWithAnotherHardwareAddress: a new hardware address is found in seconds, although the kernel's own times
// are half a minute and more.
func TestGatewayWithAnotherHardwareAddress(t *testing.T) {
	s := newUntunedSite(t)
	s.add(t, "0.0.0.0/0", netlink.Route{Gw: net.ParseIP("10.8.0.2")})
	s.add(t, "::/0", netlink.Route{Gw: net.ParseIP("fd00:8::2")})
	conditions := &condition.Set{}
	w, _ := s.watch(t, Options{Attached: s.attach(t), Conditions: conditions})
	w.Want(nil)
	has := func(mac net.HardwareAddr) func() bool {
		return func() bool {
			return !slices.ContainsFunc([]string{"10.8.0.2", "fd00:8::2"}, func(hop string) bool {
				n, ok := s.entry(t, hop)
				return !ok || n.State&netlink.NUD_REACHABLE == 0 || !bytes.Equal(n.HardwareAddr, mac)
			})
		}
	}
	eventuallyIn(t, "both gateways are known", 10*time.Second, has(s.backend.MAC(t, "eth")))
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x79}
	if err := s.backend.Net.LinkSetHardwareAddr(s.backend.Link(t, "eth"), mac); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	eventuallyIn(t, "both gateways are known by the new hardware address", 15*time.Second, has(mac))
	t.Logf("known after %s", time.Since(began).Round(10*time.Millisecond))
	if list := conditions.List(); len(list) != 0 {
		t.Errorf("conditions %+v for gateways that answer", list)
	}
}

// TestGatewayThatIsSilentFirst: a silent gateway is a condition until it answers. A gateway that only stands in for
// another is none.
func TestGatewayThatIsSilentFirst(t *testing.T) {
	s := newSite(t)
	s.add(t, "0.0.0.0/0", netlink.Route{Gw: net.ParseIP("10.8.0.77"), Priority: 10})
	s.add(t, "0.0.0.0/0", netlink.Route{Gw: net.ParseIP("10.8.0.78"), Priority: 20})
	conditions := &condition.Set{}
	w, _ := s.watch(t, Options{Attached: s.attach(t), Conditions: conditions})
	w.Want(nil)
	subjects := func() (all []string) {
		for _, c := range conditions.List() {
			all = append(all, c.Code+" "+c.Subject)
		}
		return all
	}
	want := []string{condition.GatewaySilent + " 10.8.0.77 on lan"}
	eventuallyIn(t, "the silent gateway is a condition", 10*time.Second, func() bool { return slices.Equal(subjects(), want) })
	s.backend.Address(t, "eth", "10.8.0.77/24")
	eventuallyIn(t, "the condition ends", 10*time.Second, func() bool { return len(subjects()) == 0 })
	s.backend.RemoveAddress(t, "eth", "10.8.0.77/24")
	eventuallyIn(t, "the condition is back", 10*time.Second, func() bool { return slices.Equal(subjects(), want) })
	if err := s.balancer.Net.RouteDel(&netlink.Route{Gw: net.ParseIP("10.8.0.77"), Priority: 10}); err != nil {
		t.Fatal(err)
	}
	// Now the other one counts, and no host has it.
	want = []string{condition.GatewaySilent + " 10.8.0.78 on lan"}
	eventuallyIn(t, "the one that stood in is a condition", 10*time.Second, func() bool { return slices.Equal(subjects(), want) })
	if err := w.Close(false); err != nil || len(subjects()) != 0 {
		t.Errorf("after the end, %v: conditions %v", err, subjects())
	}
}

// TestWidestGateways: of more gateways than can be kept, the ones of the widest routes are kept.
func TestWidestGateways(t *testing.T) {
	found := map[key]*gateway{}
	for i := range gatewaysMost + 50 {
		a := netip.MustParseAddr(fmt.Sprintf("10.8.%d.%d", i/200, i%200))
		found[key{1, a}] = &gateway{destinations: []destination{{to: netip.PrefixFrom(a, 24)}}}
	}
	wide := key{9, netip.MustParseAddr("10.9.0.1")}
	found[wide] = &gateway{destinations: []destination{{to: netip.MustParsePrefix("0.0.0.0/0")}}}
	kept := widest(found)
	if len(kept) != gatewaysMost || kept[wide] == nil {
		t.Errorf("%d gateways are kept, want %d, the default route's among them: %t", len(kept), gatewaysMost, kept[wide] != nil)
	}
}

// TestNeighbourWithAnotherHardwareAddress: a client on the link, which no caller wants.
func TestNeighbourWithAnotherHardwareAddress(t *testing.T) {
	s := newUntunedSite(t)
	lan := s.balancer.Index(t, "lan")
	here := s.backend.MAC(t, "eth")
	gone := net.HardwareAddr{2, 0, 0, 0, 0, 0x66}
	for _, n := range []netlink.Neigh{
		{IP: net.ParseIP("10.8.0.2"), HardwareAddr: here, State: netlink.NUD_STALE},
		{IP: net.ParseIP("10.8.0.3"), HardwareAddr: gone, State: netlink.NUD_STALE},
		{IP: net.ParseIP("fd00:8::2"), HardwareAddr: gone, State: netlink.NUD_STALE},
		{IP: net.ParseIP("10.8.0.40"), HardwareAddr: gone, State: netlink.NUD_PERMANENT},
		{IP: net.ParseIP("10.8.0.41"), HardwareAddr: gone, State: netlink.NUD_STALE, Flags: netlink.NTF_EXT_LEARNED},
	} {
		n.LinkIndex = lan
		if err := s.balancer.Net.NeighSet(&n); err != nil {
			t.Fatal(err)
		}
	}
	w, _ := s.watch(t, Options{Attached: s.attach(t)})
	w.Want(nil)
	eventuallyIn(t, "true entries are confirmed, and untrue ones given up", 15*time.Second, func() bool {
		true4, _ := s.entry(t, "10.8.0.2")
		untrue4, had4 := s.entry(t, "10.8.0.3")
		untrue6, had6 := s.entry(t, "fd00:8::2")
		return true4.State&netlink.NUD_REACHABLE != 0 && bytes.Equal(true4.HardwareAddr, here) &&
			(!had4 || untrue4.State&usable == 0 || bytes.Equal(untrue4.HardwareAddr, here)) &&
			(!had6 || untrue6.State&usable == 0 || bytes.Equal(untrue6.HardwareAddr, here))
	})
	for _, kept := range []string{"10.8.0.40", "10.8.0.41"} {
		if n, _ := s.entry(t, kept); !bytes.Equal(n.HardwareAddr, gone) || n.State&(netlink.NUD_PERMANENT|netlink.NUD_STALE) == 0 {
			t.Errorf("an entry that somebody else keeps is now %+v", n)
		}
	}
	if n, _ := s.entry(t, "10.8.0.41"); n.Flags&netlink.NTF_EXT_LEARNED == 0 {
		t.Errorf("an entry that another program has learned is no longer marked as such: %+v", n)
	}
}

// TestDueNeighbours: the neighbours that are probed, and their order; and the ones that are left to the kernel,
// which collects unused entries.
func TestDueNeighbours(t *testing.T) {
	now := time.Unix(1000, 0)
	lan := func(a string) key { return key{1, netip.MustParseAddr(a)} }
	mac := make(net.HardwareAddr, 6)
	table := map[key]entry{
		lan("10.8.0.1"):                      {state: netlink.NUD_STALE, mac: mac, confirmed: 20 * time.Second},
		lan("10.8.0.2"):                      {state: netlink.NUD_REACHABLE, mac: mac, confirmed: 30 * time.Second},
		lan("10.8.0.3"):                      {state: netlink.NUD_REACHABLE, mac: mac, confirmed: time.Second},
		lan("10.8.0.4"):                      {state: netlink.NUD_STALE, mac: mac, confirmed: time.Hour, managed: true},
		lan("10.8.0.5"):                      {state: netlink.NUD_FAILED, confirmed: time.Hour},
		lan("10.8.0.6"):                      {state: netlink.NUD_PROBE, mac: mac, confirmed: time.Hour},
		lan("fd00::1"):                       {state: netlink.NUD_STALE, mac: mac, confirmed: 10 * time.Second},
		{2, netip.MustParseAddr("10.8.0.1")}: {state: netlink.NUD_STALE, mac: mac, confirmed: time.Hour},
	}
	p := probing{collected: map[int]bool{4: true}}
	all := []key{lan("10.8.0.2"), lan("10.8.0.1"), lan("fd00::1")}
	for _, c := range []struct {
		after time.Duration
		want  []key
	}{{0, all}, {probedFor - 1, all}, {probedFor, all[2:]}, {probedFor + leftFor - 1, all[2:]}, {probedFor + leftFor, all}, {2*probedFor + leftFor, all[2:]}} {
		got := p.due(table, func(k key) bool { return k.iface == 1 }, now.Add(c.after))
		if !slices.Equal(got, c.want) {
			t.Errorf("after %s %v are due, want %v", c.after, got, c.want)
		}
	}
}
