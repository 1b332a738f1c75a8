package file

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/user"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// LocalHost is the machine, or the network namespace, that the caller runs in. It reads
// over rtnetlink, which needs no capability.
type LocalHost struct {
	// XDP is Occupant; nil: not looked at.
	XDP func(iface string) (whose, takeOff string, err error)
}

// Occupant asks XDP.
func (h LocalHost) Occupant(iface string) (whose, takeOff string, err error) {
	if h.XDP == nil {
		return "", "", nil
	}
	return h.XDP(iface)
}

// HasGroup asks the machine's list of groups.
func (LocalHost) HasGroup(name string) bool {
	if _, err := strconv.ParseUint(name, 10, 31); err == nil {
		return true // a number needs no name
	}
	_, err := user.LookupGroup(name)
	return err == nil
}

// Interfaces lists links and addresses (RTM_GETLINK, RTM_GETADDR).
func (LocalHost) Interfaces() ([]HostInterface, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("listing the interfaces of this machine: %w", err)
	}
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("listing the addresses of this machine: %w", err)
	}
	prefixes := map[int][]netip.Prefix{}
	for _, a := range addresses {
		if a.IPNet == nil {
			continue
		}
		ip, ok := netip.AddrFromSlice(a.IP)
		length, _ := a.Mask.Size()
		if ok {
			prefixes[a.LinkIndex] = append(prefixes[a.LinkIndex], netip.PrefixFrom(ip.Unmap(), length))
		}
	}
	interfaces := make([]HostInterface, 0, len(links))
	for _, link := range links {
		attrs := link.Attrs()
		interfaces = append(interfaces, HostInterface{Name: attrs.Name, Prefixes: prefixes[attrs.Index]})
	}
	return interfaces, nil
}

// RouteInterface asks the kernel's routing (RTM_GETROUTE).
func (LocalHost) RouteInterface(to netip.Addr) (string, error) {
	routes, err := netlink.RouteGet(net.IP(to.AsSlice()))
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return "", errors.New("no route")
	case err != nil:
		return "", fmt.Errorf("asking for the route: %w", err)
	case len(routes) == 0:
		return "", errors.New("no route")
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return "", fmt.Errorf("naming the interface of the route: %w", err)
	}
	return link.Attrs().Name, nil
}
