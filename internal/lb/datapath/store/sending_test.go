package store

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestChooseAddresses(t *testing.T) {
	address := func(text string, index, flags, scope int) netlink.Addr {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			t.Fatal(err)
		}
		a.LinkIndex, a.Flags, a.Scope = index, flags, scope
		return *a
	}
	lo := []netlink.Addr{
		address("127.0.0.1/8", 1, unix.IFA_F_PERMANENT, unix.RT_SCOPE_HOST), address("::1/128", 1, unix.IFA_F_PERMANENT, unix.RT_SCOPE_HOST),
		address("192.0.2.10/32", 1, unix.IFA_F_PERMANENT, 0), address("10.255.0.1/32", 1, unix.IFA_F_PERMANENT, 0), address("2001:db8:255::1/128", 1, unix.IFA_F_PERMANENT, 0),
	}
	local := address("fe80::1/64", 2, unix.IFA_F_PERMANENT, unix.RT_SCOPE_LINK)
	group := address("ff02::1:ff00:10/128", 2, unix.IFA_F_PERMANENT|unix.IFA_F_MCAUTOJOIN, unix.RT_SCOPE_LINK)
	for _, c := range []struct {
		name   string
		all    []netlink.Addr
		v4, v6 string
	}{
		{"nothing", lo[:2], "", ""},
		{"lo has them", append([]netlink.Addr{local}, lo...), "10.255.0.1", "2001:db8:255::1"},
		{"a group that was joined", append([]netlink.Addr{group}, lo...), "10.255.0.1", "2001:db8:255::1"},
		{"the interface's go first", append(lo, address("10.0.0.1/24", 2, 0, 0), address("2001:db8::7/64", 2, unix.IFA_F_SECONDARY, 0), address("2001:db8::1/64", 2, 0, 0)), "10.0.0.1", "2001:db8::1"},
		{"another interface's", append(lo[:3:3], address("10.9.0.1/24", 3, 0, 0), address("2001:db8:9::1/64", 3, 0, 0)), "10.9.0.1", "2001:db8:9::1"},
		{"one that another host has", []netlink.Addr{address("2001:db8::1/64", 2, unix.IFA_F_DADFAILED, 0), lo[4]}, "", "2001:db8:255::1"},
		{"of a link alone", []netlink.Addr{address("10.9.0.1/24", 3, 0, unix.RT_SCOPE_LINK)}, "", ""},
		{"a family each", append(lo[:4:4], address("2001:db8::1/64", 2, 0, 0)), "10.255.0.1", "2001:db8::1"},
	} {
		got := chooseAddresses(c.all, 2, func(a netip.Addr) bool { return a == netip.MustParseAddr("192.0.2.10") })
		text := func(a netip.Addr) string {
			if !a.IsValid() {
				return ""
			}
			return a.String()
		}
		if text(got.v4) != c.v4 || text(got.v6) != c.v6 {
			t.Errorf("%s: %s and %s, want %q and %q", c.name, got.v4, got.v6, c.v4, c.v6)
		}
	}
}
