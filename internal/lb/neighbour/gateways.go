package neighbour

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The kernel's routing table says the way to a client, with the hardware address, and no packet
// that the data plane sends makes the kernel look whether a neighbour is still there. So the gateways of
// the host's routes are kept as the next hops of backends are: managed, and asked.
const (
	// gatewaysMost bounds how many of them are: where each node of a cluster has a route, the gateways that
	// lead to the most come first. The others are neighbours as clients on the link are.
	gatewaysMost = 128
	// gatewayRest is how many rounds pass between two questions to a gateway that answers and that no
	// backend is behind. It is not backends that wait for what it tells.
	gatewayRest = 3
	// Reading all routes again and again may take this part of the time.
	routesPart = 50
	// waysKept is how many routes of a gateway are looked at to tell whether it is another's stand-in.
	waysKept = 4
)

// gateway is a router that routes of this host name.
type gateway struct {
	ways   []destination // some of the destinations that lead to it, the widest first
	source netip.Addr    // what packets by way of it are sent from, if a route says so
	// standIn: others lead to all of that while they are there, so that its silence harms nobody.
	standIn bool
}

// destination is where a route leads.
type destination struct {
	table    int
	to       netip.Prefix
	priority int
}

// seekGateways has all routes read, because they or the attached interfaces may differ from before.
func (w *Watcher) seekGateways() {
	w.attached = w.opts.Attached()
	w.routesDue = true
}

// readRoutes begins to read all routes if that is due, unless it has taken too much time lately: then
// later. What there is of gateways comes to w.found.
func (w *Watcher) readRoutes(ctx context.Context, now time.Time) {
	if !w.routesDue || w.reading || now.Sub(w.routesRead) < routesPart*w.routesTook {
		return
	}
	w.routesDue, w.reading = false, true
	r := routesReader{handle: w.routes, attached: w.attached, found: map[key]*gateway{}}
	w.stopped.Go(func() {
		err := r.read(ctx)
		select {
		case w.found <- gatewaysRead{r.found, err, now, time.Since(now)}:
		case <-ctx.Done():
		}
	})
}

// gatewaysRead is the result of one reading.
type gatewaysRead struct {
	found map[key]*gateway
	err   error
	began time.Time
	took  time.Duration
}

// takeGateways notes it, and reports whether next hops are others than before.
func (w *Watcher) takeGateways(r gatewaysRead) (others bool) {
	w.reading, w.routesRead, w.routesTook = false, r.began, r.took
	if r.err != nil {
		// What changes meanwhile makes it incomplete; the notification of that has it read again.
		w.opts.Log.Debug("cannot read all routes; the earlier gateways stay", "error", r.err)
		for k, g := range w.gateways {
			if r.found[k] == nil {
				r.found[k] = g
			}
		}
	}
	maps.DeleteFunc(r.found, func(k key, _ *gateway) bool { return !w.attached[k.iface] })
	before := w.gateways
	w.gateways = widest(r.found)
	for k, g := range w.gateways {
		if g.source.Is4() == k.addr.Is4() && g.source.IsValid() {
			continue
		}
		// A gateway outside the interface's subnets, which has to be asked from some address.
		if routes, err := w.handle.RouteGetWithOptions(k.addr.AsSlice(), &netlink.RouteGetOptions{OifIndex: k.iface}); err == nil && len(routes) > 0 {
			source, _ := netip.AddrFromSlice(routes[0].Src)
			g.source = source.Unmap()
		}
	}
	return !maps.EqualFunc(before, w.gateways, func(a, b *gateway) bool {
		return a.source == b.source && a.standIn == b.standIn && slices.Equal(a.ways, b.ways)
	})
}

// routesReader finds the gateways on attached interfaces.
type routesReader struct {
	handle   *netlink.Handle // its alone
	attached map[int]bool
	found    map[key]*gateway
}

func (r *routesReader) read(ctx context.Context) (err error) {
	if len(r.attached) == 0 {
		return nil
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
		failed := r.handle.RouteListFilteredIter(family, all, netlink.RT_FILTER_TABLE, func(route netlink.Route) bool {
			r.add(&route)
			return ctx.Err() == nil
		})
		err = cmp.Or(err, failed)
	}
	tellStandIns(r.found)
	return err
}

// add adds the gateways that a route names.
func (r *routesReader) add(route *netlink.Route) {
	if route.Type != unix.RTN_UNICAST || route.Table == unix.RT_TABLE_LOCAL || route.Encap != nil {
		return
	}
	d := destination{table: route.Table, priority: route.Priority}
	if route.Dst != nil {
		addr, _ := netip.AddrFromSlice(route.Dst.IP)
		ones, _ := route.Dst.Mask.Size()
		d.to = netip.PrefixFrom(addr.Unmap(), ones)
	} else if d.to = netip.PrefixFrom(netip.IPv4Unspecified(), 0); route.Family == netlink.FAMILY_V6 {
		d.to = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	source, _ := netip.AddrFromSlice(route.Src)
	add := func(link, flags int, gw net.IP, via netlink.Destination) {
		hop, ok := gatewayOf(gw, via)
		if !ok || !r.attached[link] || flags&unix.RTNH_F_DEAD != 0 {
			return
		}
		g := r.found[key{link, hop}]
		if g == nil {
			g = &gateway{source: source.Unmap()}
			r.found[key{link, hop}] = g
		}
		g.ways = append(g.ways, d)
		slices.SortStableFunc(g.ways, func(a, b destination) int { return cmp.Compare(a.to.Bits(), b.to.Bits()) })
		g.ways = g.ways[:min(len(g.ways), waysKept)]
	}
	add(route.LinkIndex, route.Flags, route.Gw, route.Via)
	for _, nh := range route.MultiPath {
		add(nh.LinkIndex, nh.Flags, nh.Gw, nh.Via)
	}
}

// gatewayOf is the router of a route, if it names one: of the route's family, or of IPv6 (RFC 8950).
func gatewayOf(gw net.IP, via netlink.Destination) (netip.Addr, bool) {
	if v, ok := via.(*netlink.Via); ok && len(gw) == 0 {
		gw = v.Addr
	}
	hop, ok := netip.AddrFromSlice(gw)
	return hop.Unmap(), ok && !hop.IsUnspecified()
}

// tellStandIns finds the gateways that are used only when others are gone.
func tellStandIns(found map[key]*gateway) {
	type where struct {
		table int
		to    netip.Prefix
	}
	best := map[where]int{}
	for _, g := range found {
		for _, d := range g.ways {
			if least, known := best[where{d.table, d.to}]; !known || d.priority < least {
				best[where{d.table, d.to}] = d.priority
			}
		}
	}
	for _, g := range found {
		g.standIn = !slices.ContainsFunc(g.ways, func(d destination) bool { return d.priority == best[where{d.table, d.to}] })
	}
}

// widest are the gateways that lead to the most.
func widest(found map[key]*gateway) map[key]*gateway {
	if len(found) <= gatewaysMost {
		return found
	}
	order := slices.SortedFunc(maps.Keys(found), func(a, b key) int {
		return cmp.Or(cmp.Compare(found[a].ways[0].to.Bits(), found[b].ways[0].to.Bits()),
			cmp.Compare(a.iface, b.iface), a.addr.Compare(b.addr))
	})
	for _, k := range order[gatewaysMost:] {
		delete(found, k)
	}
	return found
}

// holdGateways makes them next hops beside those of backends, and has none that is no Ethernet's.
func (w *Watcher) holdGateways(users map[key][]netip.Addr) {
	for k := range w.gateways {
		if w.link(k.iface).err != nil {
			delete(w.gateways, k)
		} else if users[k] == nil {
			users[k] = []netip.Addr{}
		}
	}
}

// keepGateway makes sure that the kernel keeps a gateway's entry, and notes why it cannot.
func (w *Watcher) keepGateway(k key) {
	delete(w.unkept, k)
	if !w.holds(k) {
		if err := w.ensure(k); err != nil {
			w.unkept[k] = err.Error()
		}
	}
}

// restsGateway reports whether a next hop may rest, because it answers and no backend is behind it.
func (w *Watcher) restsGateway(k key) bool { return w.gateways[k] != nil && len(w.users[k]) == 0 }

// tellGateways says which gateways do not answer.
func (w *Watcher) tellGateways() {
	silent := map[key]string{}
	for k, g := range w.gateways {
		if why := w.unkept[k]; why != "" {
			silent[k] = why
		} else if w.silent(k) && !g.standIn {
			silent[k] = "does not answer"
		}
	}
	if maps.Equal(silent, w.saidSilent) {
		return
	}
	w.saidSilent = silent
	var all []condition.Condition
	for k, why := range silent {
		device := w.link(k.iface).name
		all = append(all, condition.Condition{
			Subject: fmt.Sprintf("%s on %s", k.addr, device),
			Text:    fmt.Sprintf("gateway %s on %s, by which the host's route to %s leads, cannot be counted on: it %s", k.addr, device, w.gateways[k].ways[0].to, why),
			Remedy:  w.crowded[family(k.addr)],
		})
	}
	w.opts.Conditions.Only(condition.GatewaySilent, all)
}
