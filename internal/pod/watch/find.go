package watch

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// Fixed returns a function that always finds the same pods.
func Fixed(pods ...Pod) func() ([]Pod, error) {
	return func() ([]Pod, error) { return slices.Clone(pods), nil }
}

// Routed returns a function that finds pods as container networks with routes make them: veths into another network
// namespace whose names match, with the addresses to which a route of the main table leads by them. It also finds a
// veth without such an address. Interfaces of always are pods of any kind, even if they do not exist.
func Routed(matches func(name string) bool, always ...string) func() ([]Pod, error) {
	return func() ([]Pod, error) {
		links, err := netlink.LinkList()
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // the change that interrupted it is announced, too
			return nil, err
		}
		var pods []Pod
		at := map[int]int{} // by index of the interface
		for _, name := range always {
			pods = append(pods, Pod{Interface: name})
		}
		for _, l := range links {
			a := l.Attrs()
			i := slices.IndexFunc(pods, func(p Pod) bool { return p.Interface == a.Name })
			if i < 0 && kernel.LeadsAway(l) && matches(a.Name) {
				i = len(pods)
				pods = append(pods, Pod{Interface: a.Name})
			}
			if i >= 0 {
				at[a.Index] = i
			}
		}
		if len(at) == 0 {
			return pods, nil
		}
		return pods, addAddresses(pods, at)
	}
}

// addAddresses adds the addresses that routes lead to, except the host's own.
func addAddresses(pods []Pod, at map[int]int) error {
	own := map[netip.Addr]bool{}
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return err
	}
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			own[ip.Unmap()] = true
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN, Type: unix.RTN_UNICAST}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
		for _, r := range routes {
			i, is := at[r.LinkIndex]
			if !is || r.Dst == nil || r.Gw != nil {
				continue
			}
			ip, _ := netip.AddrFromSlice(r.Dst.IP)
			if ones, bits := r.Dst.Mask.Size(); ones != bits || own[ip.Unmap()] || slices.Contains(pods[i].Addresses, ip.Unmap()) {
				continue
			}
			pods[i].Addresses = append(pods[i].Addresses, ip.Unmap())
		}
	}
	return nil
}
