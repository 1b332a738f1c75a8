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

// The kernel's routing table gives the route to a client, with the hardware address. The data plane's packets do
// not make the kernel check whether a neighbour still exists. So the gateways of the host's routes are treated like
// the next hops of backends: managed, and asked.
const (
	// gatewaysMost limits the number of such gateways: if each node of a cluster has a route, the gateways with
	// the most destinations come first. The others are treated as neighbours, like clients on the link.
	gatewaysMost = 128
	// gatewayRest is the number of rounds between two questions to a gateway that answers and leads to no
	// backend, because no backend depends on the answer.
	gatewayRest = 3
	// Reading all routes may take at most this share of the time.
	routesPart = 50
	// destinationsKept is the number of a gateway's routes that are examined to find out whether it is another's
	// stand-in.
	destinationsKept = 4
)

// gateway is a router that routes of this host name.
type gateway struct {
	destinations []destination // some of the destinations that lead to it, the widest first
	source       netip.Addr    // source address of packets through it, if a route has one
	// standIn: other gateways lead to all its destinations while they work, so its silence does no harm.
	standIn bool
}

// destination is where a route leads.
type destination struct {
	table    int
	to       netip.Prefix
	priority int
}

// seekGateways makes the watcher read all routes, because routes or the attached interfaces may have changed.
func (w *Watcher) seekGateways() {
	w.attached = w.opts.Attached()
	w.routesDue = true
}

// readRoutes begins to read all routes if that is due, unless reading has taken too much time lately: then
// later. The gateways are sent to w.found.
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

// takeGateways takes over the result, and reports whether next hops have changed.
func (w *Watcher) takeGateways(r gatewaysRead) (others bool) {
	w.reading, w.routesRead, w.routesTook = false, r.began, r.took
	if r.err != nil {
		// A change during the reading makes it incomplete; its notification makes the watcher read again.
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
		// A gateway outside the interface's subnets also needs a source address for questions.
		if routes, err := w.handle.RouteGetWithOptions(k.addr.AsSlice(), &netlink.RouteGetOptions{OifIndex: k.iface}); err == nil && len(routes) > 0 {
			source, _ := netip.AddrFromSlice(routes[0].Src)
			g.source = source.Unmap()
		}
	}
	return !maps.EqualFunc(before, w.gateways, func(a, b *gateway) bool {
		return a.source == b.source && a.standIn == b.standIn && slices.Equal(a.destinations, b.destinations)
	})
}

// routesReader finds the gateways on attached interfaces.
type routesReader struct {
	handle   *netlink.Handle // of this reader alone
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
		g.destinations = append(g.destinations, d)
		slices.SortStableFunc(g.destinations, func(a, b destination) int { return cmp.Compare(a.to.Bits(), b.to.Bits()) })
		g.destinations = g.destinations[:min(len(g.destinations), destinationsKept)]
	}
	add(route.LinkIndex, route.Flags, route.Gw, route.Via)
	for _, nh := range route.MultiPath {
		add(nh.LinkIndex, nh.Flags, nh.Gw, nh.Via)
	}
}

// gatewayOf returns the router of a route, if it names one: of the route's family, or of IPv6 (RFC 8950).
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
		for _, d := range g.destinations {
			if least, known := best[where{d.table, d.to}]; !known || d.priority < least {
				best[where{d.table, d.to}] = d.priority
			}
		}
	}
	for _, g := range found {
		g.standIn = !slices.ContainsFunc(g.destinations, func(d destination) bool { return d.priority == best[where{d.table, d.to}] })
	}
}

// widest returns the gateways with the most destinations.
func widest(found map[key]*gateway) map[key]*gateway {
	if len(found) <= gatewaysMost {
		return found
	}
	order := slices.SortedFunc(maps.Keys(found), func(a, b key) int {
		return cmp.Or(cmp.Compare(found[a].destinations[0].to.Bits(), found[b].destinations[0].to.Bits()),
			cmp.Compare(a.iface, b.iface), a.addr.Compare(b.addr))
	})
	for _, k := range order[gatewaysMost:] {
		delete(found, k)
	}
	return found
}

// holdGateways makes them next hops in addition to the next hops of backends, and leaves out gateways that are
// not on Ethernet.
func (w *Watcher) holdGateways(users map[key][]netip.Addr) {
	for k := range w.gateways {
		if w.link(k.iface).err != nil {
			delete(w.gateways, k)
		} else if users[k] == nil {
			users[k] = []netip.Addr{}
		}
	}
}

// keepGateway makes sure that the kernel keeps a gateway's entry, or records the reason why it cannot.
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

// tellGateways reports the gateways that do not answer.
func (w *Watcher) tellGateways() {
	silent := map[key]string{}
	for k, g := range w.gateways {
		if why := w.unkept[k]; why != "" {
			silent[k] = why
		} else if w.silent(k) && !g.standIn {
			silent[k] = "it does not answer"
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
			Text:    fmt.Sprintf("cannot use gateway %s on %s for the host's route to %s: %s", k.addr, device, w.gateways[k].destinations[0].to, why),
			Remedy:  w.crowded[family(k.addr)],
		})
	}
	w.opts.Conditions.Only(condition.GatewaySilent, all)
}
