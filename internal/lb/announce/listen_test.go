package announce

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// speaker has the host send frames. Its socket stays open until the test ends: closing it waits for a grace period of the kernel, and a condition
// of a conflict may be over after that.
func (s lan) speaker(t *testing.T) (say func(frame []byte, err error)) {
	t.Helper()
	space, err := namespace.Keep(&s.host.Handle)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { namespace.Close(space) })
	sender, err := wire.OpenSender(space)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sender.Close)
	return func(frame []byte, err error) {
		t.Helper()
		if err == nil {
			err = sender.Send(s.host.Index(t, "eth"), frame)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// said reports whether there is a condition of an address.
func (f fixture) said(code string, addr netip.Addr) bool {
	return slices.ContainsFunc(f.conditions.List(), func(c condition.Condition) bool {
		return c.Code == code && strings.HasPrefix(c.Subject, addr.String()+" ")
	})
}

var bothVIPs = []netip.Addr{vip4, vip6}

// TestConflictWithAnotherShunt: of two that turn out to have an address the one with the lower hardware address keeps it.
func TestConflictWithAnotherShunt(t *testing.T) {
	s := newSegment(t)
	f := s.announcer(t)
	for _, vip := range bothVIPs {
		f.Announce(vip, f.iface)
	}
	f.decided(t)
	ours := s.balancer.MAC(t, "lan")
	higher, lower, say := slices.Clone(ours), slices.Clone(ours), s.speaker(t)
	higher[0], lower[0] = 0xfe, 0x00
	for _, vip := range bothVIPs {
		err := s.host.Net.NeighSet(&netlink.Neigh{LinkIndex: s.host.Index(t, "eth"), IP: vip.AsSlice(), State: netlink.NUD_STALE, HardwareAddr: higher})
		if err != nil {
			t.Fatal(err)
		}
		nstest.Eventually(t, "the conflict is said", func() bool {
			say(wire.Announcement(higher, vip))
			return f.said(condition.AddressContested, vip)
		})
		nstest.Eventually(t, "the host hears that the address is here", func() bool { return bytes.Equal(s.cached(t, vip), ours) })
		if now, _ := f.plane.has(vip); !now || !f.Owned(vip, f.iface) {
			t.Errorf("%s was left to a shunt with a higher hardware address", vip)
		}
		nstest.Eventually(t, "the condition ends when nothing more is heard", func() bool {
			return !f.said(condition.AddressContested, vip)
		})
	}
	f.opts.RetryInterval = time.Hour
	for _, vip := range bothVIPs {
		say(wire.Announcement(lower, vip))
		nstest.Eventually(t, "the address is left to the other one", func() bool {
			now, _ := f.plane.has(vip)
			return !now && !f.Owned(vip, f.iface) && f.said(condition.AddressInUse, vip) && !f.said(condition.AddressContested, vip)
		})
	}
}

// TestConflictWithAnotherHost: a host that is given the address by hand does not get it, with any hardware
// address; it is asked now and then, since it sends no announcement by itself.
func TestConflictWithAnotherHost(t *testing.T) {
	for _, way := range []struct {
		name  string
		first byte
	}{{"lower", 0x00}, {"higher", 0xfe}} {
		t.Run(way.name, func(t *testing.T) {
			s := newSegment(t)
			mac := s.host.MAC(t, "eth")
			mac[0] = way.first
			link := s.host.Link(t, "eth")
			if err := s.host.Net.LinkSetHardwareAddr(link, mac); err != nil {
				t.Fatal(err)
			}
			f := s.announcer(t)
			for _, vip := range bothVIPs {
				f.Announce(vip, f.iface)
			}
			f.decided(t)
			s.host.Address(t, "eth", vip4.String()+"/24")
			s.host.Address(t, "eth", vip6.String()+"/64")
			for _, vip := range bothVIPs {
				nstest.Eventually(t, "the conflict is said", func() bool { return f.said(condition.AddressContested, vip) })
				if now, _ := f.plane.has(vip); !now || !f.Owned(vip, f.iface) {
					t.Errorf("%s was left to a host that is no shunt", vip)
				}
			}
			if err := f.Withdraw(vip4, f.iface); err != nil {
				t.Fatal(err)
			}
			if f.said(condition.AddressContested, vip4) {
				t.Error("the condition outlives the announcement")
			}
			s.host.RemoveAddress(t, "eth", vip6.String()+"/64")
			nstest.Eventually(t, "the condition ends with the conflict", func() bool { return len(f.conditions.List()) == 0 })
		})
	}
}

// TestListenerOutlivesTheLink: a conflict is heard after the interface was down.
func TestListenerOutlivesTheLink(t *testing.T) {
	s := newSegment(t)
	f := s.announcer(t)
	f.Announce(vip4, f.iface)
	f.decided(t)
	before := f.plane.count()
	s.balancer.Down(t, "lan")
	nstest.Eventually(t, "the loss of carrier arrives at the host", func() bool {
		return s.host.Link(t, "eth").Attrs().RawFlags&unix.IFF_RUNNING == 0
	})
	s.balancer.Up(t, "lan")
	nstest.Eventually(t, "the address is claimed again", func() bool { return f.plane.count() > before })
	began, say := time.Now(), s.speaker(t)
	other := net.HardwareAddr{0xfe, 0, 0, 0, 0, 9}
	nstest.Eventually(t, "the conflict is said", func() bool {
		say(wire.Announcement(other, vip4))
		return f.said(condition.AddressContested, vip4)
	})
	t.Logf("heard after %s", time.Since(began).Round(time.Millisecond))
}
