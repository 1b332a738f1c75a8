package neighbour

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// gather is the time that the loop waits for more notifications after a notification that makes it look up
	// every route again: a routing daemon sends thousands.
	gather = 50 * time.Millisecond
	// kick is the interval at which a kernel that does not manage neighbours is made to ask. It is the kernel's
	// own delay before a first probe (delay_first_probe_time, 5 s).
	kick = 5 * time.Second
)

// loop is the only function that looks things up and reports.
func (w *Watcher) loop(ctx context.Context, events <-chan event) {
	resync := time.NewTicker(w.opts.Resync)
	defer resync.Stop()
	kicks := time.NewTicker(kick)
	defer kicks.Stop()
	asks := time.NewTicker(tick)
	defer asks.Stop()
	var routes <-chan time.Time // fires when routes are to be looked up again
	for {
		w.opts.Beat()
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
			if !w.takeReview() {
				w.follow(ctx)
				continue
			}
			w.seekGateways()
			w.readRoutes(ctx, time.Now())
			w.review(ctx)
		case r := <-w.found:
			if w.takeGateways(r) {
				w.review(ctx)
			}
		case e := <-events:
			switch {
			case e.lost:
				w.reread(ctx)
			case e.neighbour:
				w.neighbourChanged(e)
			case routes == nil:
				routes = time.After(gather)
			}
		case <-routes:
			routes = nil
			w.seekGateways()
			w.readRoutes(ctx, time.Now())
			w.review(ctx)
		case <-resync.C:
			w.reread(ctx)
		case now := <-asks.C:
			w.readRoutes(ctx, now)
			w.ask(now)
			w.probeNeighbours(now)
		case <-kicks.C:
			if w.plain {
				w.kickAll()
			}
		}
	}
}

// reread drops the known contents of the neighbour table and reviews everything.
func (w *Watcher) reread(ctx context.Context) {
	table, err := w.neigh.list()
	if err != nil {
		w.opts.Log.Error("cannot read the neighbour table; keeping the entries known before", "error", err)
	} else {
		w.table = table
	}
	w.seekGateways()
	w.review(ctx)
}

// review looks up the route of every wanted address, and releases those of our entries that no address needs.
func (w *Watcher) review(ctx context.Context) {
	w.mu.Lock()
	addrs := slices.SortedFunc(maps.Keys(w.wanted), netip.Addr.Compare)
	asked := w.asked
	w.mu.Unlock()

	clear(w.links)
	w.behind, w.users = make(map[netip.Addr]key, len(addrs)), map[key][]netip.Addr{}
	clear(w.told)
	hops := w.lookUp(ctx, addrs)
	w.holdGateways(w.users)
	w.lookAtRoom()
	w.bring(ctx, hops)
	if ctx.Err() != nil {
		return
	}
	for k := range w.gateways {
		w.want(k)
		w.keepGateway(k)
	}
	maps.DeleteFunc(w.unkept, func(k key, _ string) bool { return w.gateways[k] == nil })
	w.tellGateways()
	maps.DeleteFunc(w.asking, func(k key, _ *asking) bool { return w.users[k] == nil })
	if !asked {
		return // a predecessor's entries stay until the wanted addresses are known
	}
	w.reviewed = true
	for k := range w.mine {
		if w.users[k] == nil {
			w.letGo(k)
		}
	}
}

// follow does the same as review for addresses that are newly wanted, or no longer wanted: the other addresses
// have not changed. So replacing a pod costs one route look-up, however many there are.
func (w *Watcher) follow(ctx context.Context) {
	var fresh []netip.Addr
	var gone []key
	w.mu.Lock()
	for a := range w.wanted {
		if w.hops[a] == nil {
			fresh = append(fresh, a)
		}
	}
	for a, k := range w.behind {
		if !w.wanted[a] || w.hops[a] == nil {
			delete(w.behind, a)
			w.users[k] = slices.DeleteFunc(w.users[k], func(x netip.Addr) bool { return x == a })
			gone = append(gone, k)
		}
	}
	w.mu.Unlock()
	slices.SortFunc(fresh, netip.Addr.Compare)
	hops := w.lookUp(ctx, fresh)
	if len(hops) > 0 {
		w.lookAtRoom()
	}
	w.bring(ctx, hops)
	if ctx.Err() != nil {
		return // entries outlive the process, and the next hops of the new addresses are unknown
	}
	for _, k := range gone {
		if users, known := w.users[k]; !known || len(users) > 0 || w.gateways[k] != nil {
			continue
		}
		delete(w.users, k)
		delete(w.asking, k)
		delete(w.told, k)
		if w.mine[k] {
			w.letGo(k)
		}
	}
}

// lookUp finds the routes to addresses, and records their next hops.
func (w *Watcher) lookUp(ctx context.Context, addrs []netip.Addr) []Hop {
	hops := make([]Hop, 0, len(addrs))
	for _, a := range addrs {
		if ctx.Err() != nil {
			break
		}
		h := w.route(a)
		hops = append(hops, h)
		if h.Err == "" && !h.Host {
			k := key{h.Interface, h.NextHop}
			w.users[k] = append(w.users[k], a)
			w.behind[a] = k
		}
	}
	return hops
}

// bring asks the next hops of addresses, and reports the findings. Many addresses may be behind one next hop,
// which is looked at once.
func (w *Watcher) bring(ctx context.Context, hops []Hop) {
	found := map[key]finding{}
	for _, h := range hops {
		if ctx.Err() != nil {
			return
		}
		if h.Err == "" && !h.Host {
			k := key{h.Interface, h.NextHop}
			f, ok := found[k]
			if !ok {
				w.want(k)
				f = w.find(k)
				found[k] = f
				delete(w.told, k)
			}
			before, _ := w.Hop(h.Address)
			h = w.resolve(h, before, f)
		}
		w.report(h)
	}
}

// letGo removes one of our entries that is no longer needed.
func (w *Watcher) letGo(k key) {
	if err := w.release(k); err != nil {
		w.opts.Log.Warn("cannot remove a neighbour that is no longer needed; trying again", "error", err)
		return
	}
	delete(w.mine, k)
}

// takeReview reports whether all addresses are to be looked up, or only newly wanted ones.
func (w *Watcher) takeReview() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	due := w.due || !w.reviewed
	w.due = false
	return due
}

// want makes the loop ask a next hop from now on.
func (w *Watcher) want(k key) {
	if w.asking[k] == nil {
		w.asking[k] = &asking{}
		w.rounds.order = append(w.rounds.order, k) // in this round already
	}
	w.asking[k].rest = 0 // an interface that works again is reason to ask again at once
}

// release removes one of our entries, unless it has been made permanent since.
func (w *Watcher) release(k key) error {
	if w.table[k].state&fixed != 0 {
		return nil
	}
	return w.neigh.remove(k)
}

// route fills in everything but the hardware address, or Err.
func (w *Watcher) route(a netip.Addr) Hop {
	if w.opts.looked != nil {
		w.opts.looked(a)
	}
	h := Hop{Address: a}
	routes, err := w.handle.RouteGet(a.AsSlice())
	if err == nil && len(routes) == 0 {
		err = unix.ENETUNREACH
	}
	if err != nil {
		h.Err = fmt.Sprintf("no route to %s: %s", a, errnoText(err))
		return h
	}
	r := routes[0]
	if r.Type == unix.RTN_LOCAL {
		return w.host(a)
	}
	if r.Type != unix.RTN_UNICAST {
		h.Err = fmt.Sprintf("the route to %s does not lead to a single host (route type %d)", a, r.Type)
		return h
	}
	h.Interface = r.LinkIndex
	h.NextHop = a
	if gw, ok := netip.AddrFromSlice(r.Gw); ok {
		h.NextHop = gw.Unmap()
	} else if via, ok := r.Via.(*netlink.Via); ok { // IPv4 through an IPv6 router, RFC 8950
		if gw, ok := netip.AddrFromSlice(via.Addr); ok {
			h.NextHop = gw.Unmap()
		}
	}
	if src, ok := netip.AddrFromSlice(r.Src); ok {
		h.Source = src.Unmap()
	}
	if err := w.link(h.Interface).err; err != nil {
		h.Err = fmt.Sprintf("the route to %s leads out of %s", a, err)
	}
	return h
}

// host returns the hop to this host itself.
func (w *Watcher) host(a netip.Addr) Hop {
	h := Hop{Address: a, NextHop: a, Host: true}
	if w.opts.Host != nil {
		h.Interface, h.MAC, h.Resolved = w.opts.Host()
		if h.Interface == 0 { // none is attached to yet
			return h
		}
	}
	if !h.Resolved {
		h.Err = fmt.Sprintf("%s is an address of this host, whose answers do not pass XDP: set attach: tc for the interfaces that clients use", a)
	}
	return h
}

// finding is the state of a next hop, of which the hops of all addresses behind it are made.
type finding struct {
	held    bool   // the kernel keeps an entry for it, or has been asked to
	refusal string // why the kernel keeps none
	mac     string // bytes of the hardware address; empty: the kernel has none that it would use
	silent  bool
}

// find makes sure that the kernel is asking for a next hop, and returns its state.
func (w *Watcher) find(k key) (f finding) {
	f.held = w.holds(k)
	if e := w.table[k]; e.state&usable != 0 && len(e.mac) == 6 {
		f.mac = string(e.mac)
	}
	f.silent = w.silent(k)
	if !f.held {
		if err := w.ensure(k); err != nil {
			f.refusal = err.Error()
		}
	}
	return f
}

// resolve fills in the state of a hop's next hop. While nothing else is known, the previous finding holds: an
// entry that was flushed, or has failed once, usually comes back within milliseconds, and is not reported.
func (w *Watcher) resolve(h, before Hop, f finding) Hop {
	if w.opts.resolved != nil {
		w.opts.resolved(h.Address)
	}
	if before.Interface == h.Interface && before.NextHop == h.NextHop {
		h.MAC, h.Resolved, h.Err = before.MAC, before.Resolved, before.Err
	}
	if f.refusal != "" {
		h.Resolved, h.Err = false, f.refusal
		return h
	}
	if !f.held && !h.Resolved {
		h.Err = ""
	}
	if f.mac != "" {
		h.MAC, h.Resolved, h.Err = net.HardwareAddr(f.mac), true, ""
	}
	if f.silent {
		h.Resolved = false
		h.Err = fmt.Sprintf("next hop %s does not answer", h.NextHop)
	}
	return h
}

// holds reports whether there is an entry that the kernel keeps, or that needs no upkeep.
func (w *Watcher) holds(k key) bool {
	e, ok := w.table[k]
	return ok && (e.state&fixed != 0 || !w.plain && e.managed || w.plain && w.mine[k])
}

// ensure makes the entry exist and, if the kernel can, be managed.
func (w *Watcher) ensure(k key) error {
	err := w.neigh.ask(k, !w.plain)
	if !w.plain && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)) {
		w.notManaged(err)
		err = w.neigh.ask(k, false)
	}
	if f := family(k.addr); errors.Is(err, unix.ENOBUFS) && !w.refused[f] {
		w.refused[f] = true
		if w.crowded[f] == "" {
			w.lookAtRoom()
		}
	}
	if err != nil {
		return err
	}
	w.mine[k] = true
	if w.known || w.plain {
		return nil
	}
	// The first entry shows whether the attribute was understood.
	table, err := w.neigh.list()
	if err != nil {
		return err
	}
	if e, ok := table[k]; ok {
		w.known = true
		if !e.managed && e.state&fixed == 0 {
			w.notManaged(errors.New("the flag was ignored"))
			return w.neigh.ask(k, false)
		}
	}
	return nil
}

func (w *Watcher) notManaged(why error) {
	w.plain = true
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	w.opts.Conditions.Raise(condition.Condition{
		Code: condition.NeighbourNotManaged, Subject: host,
		Text: fmt.Sprintf("this kernel does not manage neighbour entries (%v): shunt asks for them every %s instead", why, kick),
	})
}

// neighbourChanged applies one notification to the table and reports the resulting changes.
func (w *Watcher) neighbourChanged(e event) {
	if e.deleted {
		delete(w.table, e.key)
	} else {
		w.table[e.key] = e.entry
	}
	w.tell(e.key)
}

// kickAll makes a kernel that does not manage neighbours ask for every next hop. Reachable entries are not
// affected.
func (w *Watcher) kickAll() {
	for k := range w.mine {
		if err := w.neigh.ask(k, false); err != nil {
			w.opts.Log.Warn("cannot ask for a next hop; trying again", "error", err)
		}
	}
}

// report reports and publishes a finding if it differs from the last one.
func (w *Watcher) report(h Hop) {
	w.mu.Lock()
	old := w.hops[h.Address]
	wanted := w.wanted[h.Address]
	w.mu.Unlock()
	if !wanted || old != nil && old.equal(h) {
		return
	}
	fresh := new(Hop)
	*fresh = h
	w.opts.OnChange(fresh)
	w.mu.Lock()
	wanted = w.wanted[h.Address]
	if wanted {
		w.hops[h.Address] = fresh
		if delete(w.lost, h.Address); h.unreachable() {
			w.lost[h.Address] = true
		}
		close(w.changed)
		w.changed = make(chan struct{})
	}
	w.mu.Unlock()
	if wanted && h.unreachable() != (old != nil && old.unreachable()) {
		select {
		case w.reach <- struct{}{}:
		default: // the earlier signal was not received yet
		}
	}
	subject := h.Address.String()
	switch {
	case !wanted || h.Resolved:
		w.opts.Conditions.Clear(condition.NeighbourUnresolved, subject)
	case h.Err != "":
		w.raise(h)
	}
}

// raise raises the condition that an address is out of reach, with the remedy.
func (w *Watcher) raise(h Hop) {
	c := condition.Condition{
		Code: condition.NeighbourUnresolved, Subject: h.Address.String(),
		Text: fmt.Sprintf("cannot send to backend %s: %s", h.Address, h.Err),
	}
	if h.NextHop.IsValid() {
		c.Remedy = w.crowded[family(h.NextHop)]
	}
	w.opts.Conditions.Raise(c)
}

// errnoText returns only the system's words: the libraries' prefixes do not help a user.
func errnoText(err error) string {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}
