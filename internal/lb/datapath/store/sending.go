package store

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// sendingAddresses returns the source addresses of outer headers and ICMP errors that leave through an
// interface: the address of each family that the kernel would choose (inet_select_addr in net/ipv4/devinet.c;
// RFC 6724, section 5). It is an address of the interface, or else of the host: if links are unnumbered, lo has
// it.
func (w *Writer) sendingAddresses(ifindex int, record *abi.Interface) error {
	all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	choice := chooseAddresses(all, ifindex, w.isVIP)
	if choice.v4.IsValid() {
		record.Address4 = abi.ToAddr(choice.v4)
	}
	if choice.v6.IsValid() {
		record.Address6 = abi.ToAddr(choice.v6)
	}
	return nil
}

// isVIP reports whether clients reach a service at an address.
func (w *Writer) isVIP(a netip.Addr) bool {
	var record abi.Address
	return w.maps[abi.MapAddresses].Lookup(abi.ToAddr(a), &record) == nil && record.Flags&uint32(abi.ADDRESS_VIP) != 0
}

// chosen holds an address of each family, if there is one.
type chosen struct{ v4, v6 netip.Addr }

// chooseAddresses takes the first address that is not secondary to another one (IFA_F_SECONDARY), and is
// neither link-local nor a group that an announcement has joined: of the interface, or else of the other
// interfaces in the order of their indexes, which begins with lo. An address of the other interfaces must not
// be a VIP: a host that is also a backend has VIPs on lo, and other hosts have them, too.
func chooseAddresses(all []netlink.Addr, ifindex int, isVIP func(netip.Addr) bool) (c chosen) {
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b netlink.Addr) int { return cmp.Compare(rank(a, ifindex), rank(b, ifindex)) })
	for _, a := range all {
		address, ok := netip.AddrFromSlice(a.IP)
		address = address.Unmap()
		if !ok || a.Flags&(unix.IFA_F_SECONDARY|unix.IFA_F_DADFAILED) != 0 || !address.IsGlobalUnicast() {
			continue
		}
		to := &c.v6
		if address.Is4() {
			to = &c.v4
		}
		if to.IsValid() || a.LinkIndex != ifindex && (a.Scope == unix.RT_SCOPE_LINK || a.Scope == unix.RT_SCOPE_HOST || isVIP(address)) {
			continue
		}
		*to = address
	}
	return c
}

// rank returns the rank of an address in an interface's choice.
func rank(a netlink.Addr, ifindex int) int {
	if a.LinkIndex == ifindex {
		return 0 // indexes begin with 1
	}
	return a.LinkIndex
}
