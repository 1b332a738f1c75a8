package net

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The balancer's own addresses towards the backends, and others on the same interface.
var (
	firstSources = []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"), netip.MustParsePrefix("2001:db8:1::1/64")}
	otherSources = []netip.Prefix{netip.MustParsePrefix("10.0.0.60/24"), netip.MustParsePrefix("2001:db8:1::60/64")}
)

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// towards is the interface by which the balancer reaches the backends.
func (b *bed) towards(t *testing.T) netlink.Link {
	t.Helper()
	interfaces := b.Balancer.Interfaces()
	link, err := b.Balancer.Netlink().LinkByName(interfaces[len(interfaces)-1].Name)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// own gives the balancer an address towards the backends, or changes its flags.
func (b *bed) own(t *testing.T, address netip.Prefix, flags int, deprecated bool) {
	t.Helper()
	a, err := netlink.ParseAddr(address.String())
	if err != nil {
		t.Fatal(err)
	}
	if a.Flags = flags; address.Addr().Is6() {
		a.Flags |= unix.IFA_F_NODAD
	}
	if deprecated {
		a.ValidLft, a.PreferedLft = math.MaxInt32, 0
	}
	if err := b.Balancer.Netlink().AddrReplace(b.towards(t), a); err != nil {
		t.Fatal(err)
	}
}

// prefer sets the balancer's source address for the network, or the host, of a prefix.
func (b *bed) prefer(t *testing.T, to netip.Prefix, source netip.Addr) {
	t.Helper()
	if err := b.Balancer.Netlink().RouteReplace(b.linkRoute(t, to, source)); err != nil {
		t.Fatal(err)
	}
}

// linkRoute is a route to a network or host on the link.
func (b *bed) linkRoute(t *testing.T, to netip.Prefix, source netip.Addr) *netlink.Route {
	r := &netlink.Route{Dst: ipNet(to.Masked()), LinkIndex: b.towards(t).Attrs().Index, Scope: netlink.SCOPE_LINK, Src: source.AsSlice(), Protocol: unix.RTPROT_KERNEL}
	if to.Addr().Is6() {
		r.Scope, r.Priority = netlink.SCOPE_UNIVERSE, 256 // the kernel's own route to a network has this metric
	}
	return r
}

// leaves waits until new connections to a VIP come from another address than this.
func (b *bed) leaves(t *testing.T, vip netip.Addr, not netip.Addr) netip.Addr {
	t.Helper()
	var now netip.Addr
	eventually(t, 10*time.Second, fmt.Sprintf("new connections to %s come from another address than %s", vip, not), func() error {
		answer, err := b.get(b.Client.HTTPClient(false), at(vip, 80))
		if err != nil {
			return err
		}
		if now = netip.MustParseAddrPort(answer.Remote).Addr(); now == not {
			return errors.New("they do not")
		}
		return nil
	})
	return now
}

// TestNATSourceIsKept: a flow keeps its source address of NAT as long as the host has that address,
// even if NAT would choose another one now; new flows take the present choice. When the address
// goes, its flows are ended, counted and reported.
func TestNATSourceIsKept(t *testing.T) {
	for _, way := range []struct {
		attach string
		layout lab.Layout
	}{{"native", lab.TwoArm}, {"generic", lab.OneArm}, {"tc", lab.TwoArm}} {
		t.Run(way.attach, func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: way.layout})
			link := b.towards(t).Attrs().Name
			for name, value := range map[string]string{
				"net.ipv4.conf." + link + ".promote_secondaries": "1", "net.ipv6.conf." + link + ".use_tempaddr": "2", "net.ipv6.conf." + link + ".accept_dad": "0"} {
				if err := b.Balancer.SetSysctl(name, value); err != nil {
					t.Fatal(err)
				}
			}
			b.write(b.file(settings{attach: way.attach}))
			b.start()
			eventually(t, 10*time.Second, "announcement", b.announced)
			sessions := b.open(t, 2)
			more := func(when string) {
				t.Helper()
				sessions = append(sessions, b.open(t, 1)...)
				b.goOn(t, when, sessions)
			}

			b.own(t, netip.MustParsePrefix("2001:db8:1::5001/64"), unix.IFA_F_MANAGETEMPADDR, false)
			temporary := b.leaves(t, lab.VIP6, firstSources[1].Addr())
			more("with a temporary address " + temporary.String())

			b.own(t, netip.PrefixFrom(temporary, 64), 0, true)
			more("with that deprecated: " + b.leaves(t, lab.VIP6, temporary).String())

			for i, other := range otherSources {
				b.own(t, other, 0, false)
				b.prefer(t, other, other.Addr())
				b.leaves(t, vips[i], firstSources[i].Addr())
			}
			more("with another source by `ip route replace`")

			b.prefer(t, netip.PrefixFrom(b.Backends[0].Addr4(), 32), firstSources[0].Addr())
			b.prefer(t, netip.PrefixFrom(b.Backends[1].Addr4(), 32), firstSources[0].Addr())
			b.leaves(t, lab.VIP4, otherSources[0].Addr())
			more("with routes of their own to the backends")
			for _, backend := range b.Backends {
				if err := b.Balancer.Netlink().RouteDel(b.linkRoute(t, netip.PrefixFrom(backend.Addr4(), 32), firstSources[0].Addr())); err != nil {
					t.Fatal(err)
				}
			}
			b.leaves(t, lab.VIP4, firstSources[0].Addr())
			more("with these withdrawn")

			b.kill()
			b.goOn(t, "after kill -9", sessions)
			b.start()
			more("under the successor")

			b.sourceGoes(t, sessions)
		})
	}
}

// sourceGoes removes the first sources from the balancer. Their flows end, with a message, and all
// others go on.
func (b *bed) sourceGoes(t *testing.T, sessions []*session) {
	t.Helper()
	link := b.towards(t).Attrs().Name
	var stay, end []*session
	for _, s := range sessions {
		if slices.ContainsFunc(firstSources, func(p netip.Prefix) bool { return p.Addr().String() == s.source() }) {
			end = append(end, s)
		} else {
			stay = append(stay, s)
		}
	}
	if len(end) == 0 || len(stay) == 0 {
		t.Fatalf("%d sessions from the first addresses, %d from others", len(end), len(stay))
	}
	for i, first := range firstSources {
		if err := b.Balancer.DeleteAddress(link, first); err != nil {
			t.Fatal(err)
		}
		b.prefer(t, otherSources[i], otherSources[i].Addr()) // the route of the address may have gone with it
	}
	for _, first := range firstSources {
		eventually(t, 30*time.Second, "a condition for "+first.Addr().String(), func() error {
			for _, c := range b.status().Daemon.Conditions {
				if c.Code == "nat_source_gone" && c.Subject == first.Addr().String() && strings.Contains(c.Text, "ended") {
					t.Log(c.Text)
					return nil
				}
			}
			return fmt.Errorf("%+v", b.status().Daemon.Conditions)
		})
	}
	for _, s := range end {
		if _, err := s.get(); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a session from %s, which is gone: %v, want a reset", s.first.Remote, err)
		}
	}
	b.goOn(t, "with the first addresses gone", stay)
}
