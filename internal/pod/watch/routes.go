package watch

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Beyond returns a function that finds networks of other machines as routing daemons and CNI plugins make them: networks to which
// the main table leads by an uplink and a gateway, except by the default route. A network inside of such a network with another
// route is found, too, and left alone. Each uplink is found at least once: without a network, if it has none.
func Beyond(uplinks ...string) func() ([]Far, error) {
	return func() ([]Far, error) {
		if len(uplinks) == 0 {
			return nil, nil
		}
		links, err := netlink.LinkList()
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // the change that interrupted it is announced, too
			return nil, err
		}
		r := reader{names: map[int]string{}, uplinks: uplinks}
		for _, l := range links {
			r.names[l.Attrs().Index] = l.Attrs().Name
		}
		var fars []Far
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			more, err := r.read(family)
			if err != nil {
				return nil, err
			}
			fars = append(fars, more...)
		}
		return r.complete(fars), nil
	}
}

// reader reads routes.
type reader struct {
	names   map[int]string // of interfaces, by index
	uplinks []string
}

// complete adds the uplinks without networks, and leaves all networks alone if they are too many: a wider network
// would hide a network that has no room.
func (r *reader) complete(fars []Far) (all []Far) {
	for _, name := range r.uplinks {
		switch {
		case len(fars) > shortcut.FarMax:
			all = append(all, Far{Interface: name, Left: shortcut.Route,
				Why: fmt.Sprintf("routes lead to %d networks or parts of them, and there is room for %d", len(fars), shortcut.FarMax)})
		case !slices.Contains(slices.Collect(maps.Values(r.names)), name):
			all = append(all, Far{Interface: name, Left: shortcut.Down, Why: "there is no such interface"})
		case !slices.ContainsFunc(fars, func(f Far) bool { return f.Interface == name }):
			all = append(all, Far{Interface: name, Left: shortcut.Route, Why: fmt.Sprintf("no route of the main table leads to a network by a gateway and %s", name)})
		}
	}
	if len(fars) > shortcut.FarMax {
		return all
	}
	return append(fars, all...)
}

// read reads one family.
func (r *reader) read(family int) ([]Far, error) {
	policy, err := foreignRule(family)
	if err != nil {
		return nil, err
	}
	routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, err
	}
	addresses, err := netlink.AddrList(nil, family)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, err
	}
	ways := map[netip.Prefix]Far{}
	for network, all := range byNetwork(routes) {
		f := r.way(network, all)
		if policy != "" && f.Left == shortcut.Taken {
			f.Left, f.Why = shortcut.Route, policy
		}
		ways[network] = f
	}
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			ip = ip.Unmap()
			ways[netip.PrefixFrom(ip, ip.BitLen())] = Far{Network: netip.PrefixFrom(ip, ip.BitLen()), Left: shortcut.Route, Why: "it is this host's address"}
		}
	}
	var fars []Far
	for network, f := range ways {
		if f.Interface != "" || inside(network, ways) {
			fars = append(fars, f)
		}
	}
	slices.SortFunc(fars, func(a, b Far) int {
		return cmp.Or(a.Network.Addr().Compare(b.Network.Addr()), a.Network.Bits()-b.Network.Bits())
	})
	return fars, nil
}

// inside reports whether a network that may take the shortcut has another one in it.
func inside(network netip.Prefix, ways map[netip.Prefix]Far) bool {
	for bits := network.Bits() - 1; bits > 0; bits-- {
		if f, is := ways[netip.PrefixFrom(network.Addr(), bits).Masked()]; is && f.Interface != "" && f.Left == shortcut.Taken {
			return true
		}
	}
	return false
}

// byNetwork returns the routes to each network with the smallest metric. Default routes are left out.
func byNetwork(routes []netlink.Route) map[netip.Prefix][]netlink.Route {
	all := map[netip.Prefix][]netlink.Route{}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		ip, ok := netip.AddrFromSlice(r.Dst.IP)
		bits, _ := r.Dst.Mask.Size()
		if !ok || bits == 0 {
			continue
		}
		network := netip.PrefixFrom(ip.Unmap(), bits).Masked()
		switch before := all[network]; {
		case len(before) == 0 || r.Priority < before[0].Priority:
			all[network] = []netlink.Route{r}
		case r.Priority == before[0].Priority:
			all[network] = append(before, r)
		}
	}
	return all
}

// way returns the way to a network. Its interface is an uplink, or empty if the way uses no uplink.
func (r *reader) way(network netip.Prefix, routes []netlink.Route) Far {
	f := Far{Network: network, Left: shortcut.Route}
	for _, one := range routes {
		for _, index := range append([]int{one.LinkIndex}, hops(&one)...) {
			if name := r.names[index]; slices.Contains(r.uplinks, name) && (one.Gw != nil || one.Via != nil || len(one.MultiPath) > 0) {
				f.Interface = name
			}
		}
	}
	one := &routes[0]
	gateway, _ := netip.AddrFromSlice(one.Gw)
	gateway = gateway.Unmap()
	switch {
	case f.Interface == "":
		f.Why = "another route leads there"
		if name := r.names[one.LinkIndex]; name != "" {
			f.Why += " by " + name
		}
	case len(routes) > 1 || len(one.MultiPath) > 0:
		f.Why = "several routes or next hops lead there"
	case one.Type != unix.RTN_UNICAST || one.Encap != nil || one.Via != nil || one.Tos != 0 || gateway.Is4() != network.Addr().Is4():
		f.Why = "the route does not lead by one gateway of its family: " + one.String()
	case one.Flags&(unix.RTNH_F_DEAD|unix.RTNH_F_LINKDOWN) != 0:
		f.Left, f.Why = shortcut.Down, "the route's interface has no carrier"
	default:
		f.Left, f.NextHop, f.MTU = shortcut.Taken, gateway, one.MTU
	}
	return f
}

func hops(r *netlink.Route) (indexes []int) {
	for _, h := range r.MultiPath {
		indexes = append(indexes, h.LinkIndex)
	}
	return indexes
}

// foreignRule describes a policy rule before the main table, or the lack of a rule that leads there: then a route does
// not tell where packets go. Empty: none.
func foreignRule(family int) (string, error) {
	all, err := netlink.RuleList(family)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return "", err
	}
	const ofMain = 32766 // ip-rule(8)
	isThere := false
	for _, rule := range all {
		whole := netlink.NewRule()
		whole.Priority, whole.Table, whole.Family, whole.Protocol = rule.Priority, rule.Table, rule.Family, rule.Protocol
		plain := rule == *whole
		switch {
		case rule.Priority > ofMain:
		case rule.Priority <= 0 && rule.Table == unix.RT_TABLE_LOCAL && plain:
		case rule.Priority == ofMain && rule.Table == unix.RT_TABLE_MAIN && plain:
			isThere = true
		default:
			return fmt.Sprintf("the policy rule of priority %d may send its packets another way", rule.Priority), nil
		}
	}
	if !isThere {
		return "no policy rule leads to the main table", nil
	}
	return "", nil
}
