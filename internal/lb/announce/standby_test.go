package announce

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// stands reports whether this host announces each of these addresses in the place of another host, with a condition
// for each; with in false, whether it announces none, without a condition.
func (f fixture) stands(in bool, addresses ...netip.Addr) bool {
	return !slices.ContainsFunc(addresses, func(a netip.Addr) bool {
		now, _ := f.plane.has(a)
		return now != in || f.Owned(a, f.iface) != in || f.said(condition.AddressTakenOver, a) != in
	})
}

// TestStandby: a standby says nothing while another host has the addresses, takes them when that host has died, and
// leaves them to a shunt that is to have them, with any hardware address, and not to another standby.
func TestStandby(t *testing.T) {
	s := newSegment(t)
	s.host.Address(t, "eth", vip4.String()+"/24")
	s.host.Address(t, "eth", vip6.String()+"/64")
	f, say := s.announcer(t), s.speaker(t)
	for _, vip := range bothVIPs {
		f.StandBy(vip, f.iface)
	}
	for _, state := range f.decided(t) {
		if state.Owned || state.Owner == nil {
			t.Errorf("%+v, want the host as the owner", state)
		}
	}
	if list := f.conditions.List(); len(list) != 0 {
		t.Errorf("another host has the addresses, as it should, and the conditions are %+v", list)
	}
	s.host.RemoveAddress(t, "eth", vip4.String()+"/24")
	s.host.RemoveAddress(t, "eth", vip6.String()+"/64")
	other := vip4.Next()
	f.StandBy(other, f.iface)
	all := append([]netip.Addr{other}, bothVIPs...)
	nstest.Eventually(t, "the addresses are announced, because nobody has them", func() bool { return f.stands(true, all...) })

	f.opts.RetryInterval = time.Hour // an address that it leaves is not taken again
	higher := net.HardwareAddr{0xfe, 0xff, 0xff, 0xff, 0xff, 0xfe}
	say(wire.Probe(higher, vip4)) // of another standby
	say(wire.Bid(higher, s.balancer.MAC(t, "lan"), other))
	nstest.Eventually(t, "the address is left to the host that is to have it", func() bool { return f.stands(false, other) })
	if !f.stands(true, vip4) { // the probes were heard one after the other
		t.Error("the address was left to another standby")
	}
	say(wire.Bid(higher, s.balancer.MAC(t, "lan"), vip6))
	say(wire.Announcement(higher, vip4))
	nstest.Eventually(t, "both are left", func() bool { return f.stands(false, bothVIPs...) })
	if list := f.conditions.List(); len(list) != 0 {
		t.Errorf("the conditions are %+v, want none", list)
	}
}

// TestStandbyIsElected: a standby that is to have the address itself from now on takes or keeps it. A host that becomes a standby leaves
// it, for the other host to ask. A host that is to have an address leaves it to no bid.
func TestStandbyIsElected(t *testing.T) {
	s := newSegment(t)
	f, say := s.announcer(t), s.speaker(t)
	f.StandBy(vip4, f.iface)
	nstest.Eventually(t, "the address is announced, because nobody has it", func() bool { return f.stands(true, vip4) })
	before := f.plane.count()
	f.Announce(vip4, f.iface)
	if list := f.conditions.List(); len(list) != 0 || !f.Owned(vip4, f.iface) {
		t.Errorf("it is to have the address, has it: %v, and the conditions are %+v", f.Owned(vip4, f.iface), list)
	}
	higher := net.HardwareAddr{0xfe, 0xff, 0xff, 0xff, 0xff, 0xfe}
	say(wire.Bid(net.HardwareAddr{0, 0, 0, 0, 0, 9}, s.balancer.MAC(t, "lan"), vip4)) // lower than any that the kernel draws
	nstest.Eventually(t, "a conflict is heard, and so the bid before it", func() bool {
		say(wire.Announcement(higher, vip4))
		return f.said(condition.AddressContested, vip4)
	})
	nstest.Eventually(t, "the conflict is over", func() bool { return !f.said(condition.AddressContested, vip4) })
	if now, _ := f.plane.has(vip4); !now || f.plane.count() != before {
		t.Errorf("the address is answered for: %v, and was claimed %d times, want %d", now, f.plane.count(), before)
	}
	f.Announce(vip6, f.iface) // no other host claims it
	f.decided(t)
	f.opts.RetryInterval = time.Hour
	f.StandBy(vip6, f.iface)
	nstest.Eventually(t, "the address is left", func() bool { return f.stands(false, vip6) })
	f.Announce(vip6, f.iface)
	nstest.Eventually(t, "it is announced again at once", func() bool { return f.Owned(vip6, f.iface) && !f.said(condition.AddressTakenOver, vip6) })
}

// TestBids: a host that is to have an address tells only the host that has it; a standby does not.
func TestBids(t *testing.T) {
	s := newSegment(t)
	s.host.Address(t, "eth", vip4.String()+"/24")
	s.host.Address(t, "eth", vip6.String()+"/64")
	f := s.announcer(t)
	link := s.host.Link(t, "eth")
	space, err := namespace.Keep(&s.host.Handle)
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close(space)
	for _, vip := range bothVIPs {
		w, err := wire.Open(space, link, vip.Is4())
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		// hears waits for two rounds of probes, and returns whether there was a bid between them.
		hears := func() (bids bool) {
			t.Helper()
			for probes := 0; probes < 2; {
				if err := w.Receive(20*time.Second, func(frame []byte) bool {
					c, ok := claimOf(frame)
					if ok = ok && c.addr == vip && bytes.Equal(c.mac, s.balancer.MAC(t, "lan")); ok && c.bid {
						bids = bytes.Equal(frame[:6], link.Attrs().HardwareAddr)
					}
					if ok && c.probe {
						probes++
					}
					return !ok || !c.probe
				}); err != nil {
					t.Fatal(err)
				}
			}
			return bids
		}
		bid, err := wire.Bid(s.balancer.MAC(t, "lan"), link.Attrs().HardwareAddr, vip)
		if err != nil {
			t.Fatal(err)
		}
		if c, ok := claimOf(bytes.ReplaceAll(bid, []byte("shunt1"), make([]byte, 6))); ok {
			t.Errorf("without the mark it is %+v", c)
		}
		f.StandBy(vip, f.iface)
		if hears() {
			t.Errorf("a standby makes a bid for %s", vip)
		}
		f.Announce(vip, f.iface)
		nstest.Eventually(t, "who is to have the address makes a bid", hears)
		if now, _ := f.plane.has(vip); now {
			t.Errorf("%s is another host's, and the data plane answers for it", vip)
		}
	}
}
