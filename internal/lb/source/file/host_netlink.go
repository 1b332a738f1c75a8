package file

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// LocalHost is the machine, or the network namespace, that the caller runs in. It reads
// over rtnetlink, which needs no capability.
type LocalHost struct {
	// XDP is Occupant; nil: not looked at.
	XDP func(iface string) (whose, takeOff string, err error)
	// CA is Authorities; nil: not looked at.
	CA func(path string) error
}

// Occupant asks XDP.
func (h LocalHost) Occupant(iface string) (whose, takeOff string, err error) {
	if h.XDP == nil {
		return "", "", nil
	}
	return h.XDP(iface)
}

// Authorities asks CA.
func (h LocalHost) Authorities(path string) error {
	if h.CA == nil {
		return nil
	}
	return h.CA(path)
}

// Program looks for an executable file.
func (LocalHost) Program(path string) error {
	_, err := exec.LookPath(path)
	return err
}

// Release asks uname(2).
func (LocalHost) Release() string {
	var name unix.Utsname
	_ = unix.Uname(&name) // fails only for an address that cannot be written
	return unix.ByteSliceToString(name.Release[:])
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
	names := map[int]string{}
	for _, link := range links {
		names[link.Attrs().Index] = link.Attrs().Name
	}
	for _, link := range links {
		attrs := link.Attrs()
		own := HostInterface{Name: attrs.Name, Prefixes: prefixes[attrs.Index], MAC: attrs.HardwareAddr, MTU: attrs.MTU}
		switch link.(type) {
		case *netlink.Macvlan, *netlink.Macvtap:
			own.Below = names[attrs.ParentIndex]
		}
		interfaces = append(interfaces, own)
	}
	return interfaces, nil
}

// Routes asks the kernel's routing (RTM_GETROUTE), over one socket.
func (LocalHost) Routes(to []netip.Addr) map[netip.Addr]Route {
	routes := make(map[netip.Addr]Route, len(to))
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		for _, a := range to {
			routes[a] = Route{Err: fmt.Errorf("asking for the route: %w", err)}
		}
		return routes
	}
	defer handle.Close()
	names := map[int]string{}
	for _, a := range to {
		index, onLink, err := routeOut(handle, a)
		name, known := names[index]
		if err == nil && !known {
			var link netlink.Link
			if link, err = handle.LinkByIndex(index); err != nil {
				err = fmt.Errorf("naming the interface of the route: %w", err)
			} else {
				name = link.Attrs().Name
				names[index] = name
			}
		}
		routes[a] = Route{name, onLink, err}
	}
	return routes
}

// routeOut is the index of the interface that packets to an address leave by, and whether they need no gateway.
func routeOut(handle *netlink.Handle, to netip.Addr) (index int, onLink bool, err error) {
	routes, err := handle.RouteGet(net.IP(to.AsSlice()))
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return 0, false, errors.New("no route")
	case err != nil:
		return 0, false, fmt.Errorf("asking for the route: %w", err)
	case len(routes) == 0:
		return 0, false, errors.New("no route")
	}
	return routes[0].LinkIndex, routes[0].Gw == nil && routes[0].Via == nil, nil
}
