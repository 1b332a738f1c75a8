package neighbour

import (
	"bytes"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
	"github.com/vishvananda/netlink"
)

// TestSilence has a next hop fall silent and speak again. The kernel's times are its own
// here, so its entry still counts as usable when the silence is told.
func TestSilence(t *testing.T) {
	quiet := func(s site, t *testing.T) { s.backend.Sysctl(t, "ipv4/conf/eth/arp_ignore", "8") }
	speak := func(s site, t *testing.T) { s.backend.Sysctl(t, "ipv4/conf/eth/arp_ignore", "0") }
	for _, c := range []struct {
		name, address, hop string
		quiet, speak       func(s site, t *testing.T)
	}{
		{"IPv4", "10.8.0.2", "10.8.0.2", quiet, speak},
		{"a router", "10.99.1.1", "10.8.0.2", quiet, speak},
		{"IPv6", "fd00:8::2", "fd00:8::2",
			func(s site, t *testing.T) { s.backend.RemoveAddress(t, "eth", "fd00:8::2/64") },
			func(s site, t *testing.T) { s.backend.Address(t, "eth", "fd00:8::2/64") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newUntunedSite(t)
			s.balancer.Route(t, "10.99.0.0/16", "10.8.0.2")
			conditions := &condition.Set{}
			w, told := s.watch(t, Options{Conditions: conditions})
			w.Want(addrs(c.address))
			mustResolve(t, w, c.address)
			address := netip.MustParseAddr(c.address)

			c.quiet(s, t)
			nstest.Eventually(t, "the silence is known", func() bool { return w.Unreachable(address) })
			if e, ok := s.entry(t, c.hop); !ok || e.State&usable == 0 {
				t.Errorf("the kernel knows it as well (%+v), so nothing is proven", e)
			}
			<-w.Changed()
			h, _ := w.Hop(address)
			if h.Resolved || h.Err != "next hop "+c.hop+" does not answer" || !bytes.Equal(h.MAC, s.backend.MAC(t, "eth")) {
				t.Errorf("the silent hop is %+v", h)
			}
			nstest.Eventually(t, "the condition is raised", func() bool {
				list := conditions.List()
				return len(list) == 1 && list[0].Code == condition.NeighbourUnresolved && strings.Contains(list[0].Text, h.Err)
			})

			// It speaks again: before the kernel has given it up, and after that.
			c.speak(s, t)
			nstest.Eventually(t, "the answer is known", func() bool { return !w.Unreachable(address) })
			c.quiet(s, t)
			nstest.Eventually(t, "the silence is known again", func() bool { return w.Unreachable(address) })
			e, _ := s.entry(t, c.hop)
			if err := s.balancer.Net.NeighDel(&e); err != nil { // or the kernel would believe in it for half a minute
				t.Fatal(err)
			}
			nstest.Eventually(t, "the kernel gives it up", func() bool {
				e, ok := s.entry(t, c.hop)
				return ok && e.State&netlink.NUD_FAILED != 0
			})
			c.speak(s, t)
			mustResolve(t, w, c.address)
			nstest.Eventually(t, "the condition ends", func() bool { return len(conditions.List()) == 0 })
			if n := len(told.of(c.address)); n > 8 {
				t.Errorf("told %d findings, of two silences", n)
			}
		})
	}
}

// TestAnsweredNextHopsStay lets rounds pass in which all is well.
func TestAnsweredNextHopsStay(t *testing.T) {
	s := newUntunedSite(t)
	fixed := &netlink.Neigh{
		LinkIndex: s.balancer.Index(t, "lan"), IP: net.ParseIP("10.8.0.77"), State: netlink.NUD_PERMANENT,
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 0x33}, // no host has it, so none answers
	}
	if err := s.balancer.Net.NeighAdd(fixed); err != nil {
		t.Fatal(err)
	}
	list := []string{"10.8.0.2", "10.8.0.3", "fd00:8::2", "10.8.0.77"}
	w, told := s.watch(t, Options{})
	w.Want(addrs(list...))
	mustResolve(t, w, list...)
	// Another next hop, which no host has: once it is known to be silent, rounds have passed.
	w.Want(append(addrs(list...), netip.MustParseAddr("10.8.0.78")))
	nstest.Eventually(t, "silence is known", func() bool { return w.Unreachable(netip.MustParseAddr("10.8.0.78")) })
	for _, a := range list {
		found := told.of(a)
		for i, h := range found {
			if h.Err != "" || i > 0 && !h.Resolved {
				t.Errorf("%s was told as %+v", a, h)
			}
		}
		if !w.Resolved(netip.MustParseAddr(a)) {
			t.Errorf("%s is no longer resolved", a)
		}
	}
}

// TestRounds counts questions: a round asks each next hop once, never more than the rate allows.
func TestRounds(t *testing.T) {
	for _, c := range []struct {
		hops   int
		length time.Duration
	}{{1, roundLeast}, {400, roundLeast}, {3000, 3 * time.Second}} {
		r := rounds{order: make([]key, c.hops)}
		if r.length() != c.length {
			t.Errorf("a round of %d next hops takes %s, want %s", c.hops, r.length(), c.length)
		}
	}
}

func TestSourceOfQuestions(t *testing.T) {
	link := ownLink{linkLocal: netip.MustParseAddr("fe80::1"), prefixes: []netip.Prefix{
		netip.MustParsePrefix("fe80::1/64"), netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("10.8.0.1/24"), netip.MustParsePrefix("fd00:8::1/64"),
	}}
	without := ownLink{prefixes: []netip.Prefix{netip.MustParsePrefix("fd00:8::1/64")}}
	for _, c := range []struct {
		link                    ownLink
		target, otherwise, want string
	}{
		{link, "10.8.0.2", "192.0.2.1", "10.8.0.1"},
		{link, "203.0.113.1", "192.0.2.1", "192.0.2.1"}, // a router outside the subnet
		{link, "fd00:8::2", "fd00:8::1", "fe80::1"},
		{without, "fd00:8::2", "fd00:9::1", "fd00:8::1"},
		{without, "fe80::2", "10.8.0.1", ""}, // IPv4 by way of an IPv6 router, and no address to ask from
	} {
		got := c.link.source(netip.MustParseAddr(c.target), netip.MustParseAddr(c.otherwise))
		if got.IsValid() != (c.want != "") || got.IsValid() && got.String() != c.want {
			t.Errorf("%s is asked from %s, want %s", c.target, got, c.want)
		}
	}
}
