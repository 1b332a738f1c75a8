package realserver

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Facts describe a server, as far as direct return depends on it.
type Facts struct {
	Links []Link
	// Settings of net.ipv4.conf by device, "all" among them.
	Settings map[string]Settings
	// GUE are the UDP ports on which the kernel itself decapsulates GUE.
	GUE []uint16
	// Defaults are the default routes of both families and all tables.
	Defaults []Route
	// Decap are the interfaces that sh_decap is on. Look does not know them.
	Decap []string
}

// Link is a network interface.
type Link struct {
	Name      string
	Up        bool
	NoARP     bool // loopback, and devices that answer no ARP, such as tunnels and dummies
	MTU       int  // bytes, of the IP packet
	Addresses []netip.Addr
	// Tunnel is the outer header that a tunnel device removes; zero for other interfaces.
	Tunnel Tunnel
}

// Tunnel describes the IP packets that a device decapsulates: the outer and the inner version.
type Tunnel struct {
	Outer  int // 4 or 6; 0: no tunnel
	Inner4 bool
	Inner6 bool
}

// Settings are the settings of net.ipv4.conf.<device> that matter.
type Settings struct {
	ARPIgnore, ARPAnnounce, RPFilter int
}

// Values of the settings (Documentation/networking/ip-sysctl).
const (
	arpIgnoreLeast    = 1 // answer only for addresses of the interface asked at
	arpAnnounceLeast  = 2 // ask with an address of the interface asked from
	reversePathStrict = 1
	reversePathLoose  = 2
)

// Route is a default route.
type Route struct {
	Family    int // 4 or 6
	Interface string
	Gateway   netip.Addr // invalid: none
	Priority  int        // metric
	MSS       int        // advmss, bytes; 0: from the MTU
	MTU       int        // bytes; 0: the interface's
}

// CheckDevice begins the names of the devices that a balancer's health checks take (package detour).
const CheckDevice = "shunt-check"

// Look reads the facts of the calling thread's network namespace, all but Decap.
func Look() (Facts, error) {
	f := Facts{Settings: map[string]Settings{}}
	links, err := netlink.LinkList()
	if err != nil {
		return f, fmt.Errorf("list the interfaces: %w", err)
	}
	names := map[int]string{}
	for _, l := range links {
		attrs := l.Attrs()
		names[attrs.Index] = attrs.Name
		link := Link{Name: attrs.Name, MTU: attrs.MTU, Up: attrs.RawFlags&unix.IFF_UP != 0, Tunnel: tunnelOf(l),
			NoARP: attrs.RawFlags&(unix.IFF_NOARP|unix.IFF_LOOPBACK) != 0}
		addresses, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			return f, fmt.Errorf("list the addresses of %s: %w", attrs.Name, err)
		}
		for _, a := range addresses {
			if address, ok := netip.AddrFromSlice(a.IP); ok {
				link.Addresses = append(link.Addresses, address.Unmap())
			}
		}
		f.Links = append(f.Links, link)
		if err := f.readSettings(attrs.Name); err != nil {
			return f, err
		}
	}
	if err := f.readSettings("all"); err != nil {
		return f, err
	}
	if err := f.readRoutes(names); err != nil {
		return f, err
	}
	// Without the module the kernel cannot answer, and has no port either.
	if ports, err := netlink.FouList(0); err == nil {
		for _, p := range ports {
			if p.EncapType == netlink.FOU_ENCAP_GUE {
				f.GUE = append(f.GUE, uint16(p.Port))
			}
		}
	}
	return f, nil
}

func (f *Facts) readSettings(device string) error {
	var s Settings
	for name, to := range map[string]*int{"arp_ignore": &s.ARPIgnore, "arp_announce": &s.ARPAnnounce, "rp_filter": &s.RPFilter} {
		var err error
		if *to, err = host.ReadNumber(settingName(device, name)); err != nil {
			return err
		}
	}
	f.Settings[device] = s
	return nil
}

func (f *Facts) readRoutes(names map[int]string) error {
	for number, kind := range map[int]int{4: netlink.FAMILY_V4, 6: netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(kind, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return fmt.Errorf("list the routes: %w", err)
		}
		for _, r := range routes {
			if r.Type != unix.RTN_UNICAST || !isDefault(r) {
				continue
			}
			to := Route{Family: number, Interface: names[r.LinkIndex], Priority: r.Priority, MSS: r.AdvMSS, MTU: r.MTU}
			hop := r.Gw
			if len(r.MultiPath) > 0 {
				to.Interface, hop = names[r.MultiPath[0].LinkIndex], r.MultiPath[0].Gw
			}
			if gateway, ok := netip.AddrFromSlice(hop); ok {
				to.Gateway = gateway.Unmap()
			}
			if strings.HasPrefix(to.Interface, CheckDevice) {
				continue // for health checks of a balancer on this machine alone
			}
			f.Defaults = append(f.Defaults, to)
		}
	}
	return nil
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	bits, _ := r.Dst.Mask.Size()
	return bits == 0
}

// tunnelOf reads the purpose of a device. Protocol 0 is "any" for all three.
func tunnelOf(l netlink.Link) Tunnel {
	carries := func(outer int, protocol uint8) Tunnel {
		return Tunnel{outer, protocol == 0 || protocol == unix.IPPROTO_IPIP, protocol == 0 || protocol == unix.IPPROTO_IPV6}
	}
	switch l := l.(type) {
	case *netlink.Iptun:
		return Tunnel{Outer: 4, Inner4: true}
	case *netlink.Sittun:
		return carries(4, l.Proto)
	case *netlink.Ip6tnl:
		return carries(6, l.Proto)
	}
	return Tunnel{}
}

// DefaultInterface returns the interface of the first default route; "" without a route.
func (f Facts) DefaultInterface() string {
	for _, r := range f.Defaults {
		if r.Interface != "" {
			return r.Interface
		}
	}
	return ""
}

func (f Facts) link(name string) (Link, bool) {
	for _, l := range f.Links {
		if l.Name == name {
			return l, true
		}
	}
	return Link{}, false
}
