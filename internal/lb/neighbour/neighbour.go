// Package neighbour resolves next hops: for each wanted address it finds the route, the
// interface, the next hop on it and that next hop's hardware address, and tells whenever
// any of these changes.
//
//	backend address ── route ──► interface, next hop ── neighbour ──► hardware address
//
// It also keeps fresh the gateways and neighbours towards clients, on the interfaces that the data
// plane uses: the data plane itself asks the kernel for them.
//
// Next hops are made *managed* neighbours (NTF_EXT_MANAGED, Linux 5.16): the kernel then
// asks for them by itself and goes on when this process is gone. The entries carry a
// protocol number of ours, by which a later process recognises its predecessor's entries. While
// this process runs, it asks as well, so that it notices within two seconds, instead of half a
// minute, that a next hop is gone.
//
// Invariant: an entry marked as ours exists for every next hop in use, unless the kernel
// holds a permanent one, which is usable as it is and left alone.
//
// It reads and writes rtnetlink (CAP_NET_ADMIN in the namespace's user namespace), and
// sends ARP requests and neighbour solicitations (CAP_NET_RAW).
package neighbour

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Hop is the next hop for one address.
type Hop struct {
	Address   netip.Addr // the wanted address
	NextHop   netip.Addr // Address itself when it is on the link
	Interface int        // index of the interface towards it; 0 without a route
	// MAC is the next hop's hardware address. Once known it stays, as the last one
	// known, when Resolved becomes false; a change of next hop or interface empties it.
	MAC net.HardwareAddr
	// Source is the address the host itself would send from: the route's preferred
	// source, of Address's family.
	Source   netip.Addr
	Resolved bool
	Err      string // why not, in words; empty while the next hop is still being asked
	Host     bool   // it is an address of this host itself
}

func (h Hop) equal(o Hop) bool {
	return h.Address == o.Address && h.NextHop == o.NextHop && h.Interface == o.Interface &&
		slices.Equal(h.MAC, o.MAC) && h.Source == o.Source && h.Host == o.Host && h.Resolved == o.Resolved && h.Err == o.Err
}

func (h Hop) unreachable() bool { return !h.Resolved && h.Err != "" }

// Options configure a Watcher.
type Options struct {
	// Namespace is the network namespace to work in; nil is the calling thread's.
	Namespace *netns.NsHandle
	// OnChange is called with the first finding for each wanted address, resolved or not, and with every change
	// after it. Calls come one at a time. It must not call Close, and may keep the hop, which does not change.
	OnChange func(*Hop)
	// Conditions receives neighbour_unresolved, gateway_silent and neighbour_not_managed; may be nil.
	Conditions *condition.Set
	// Beat is called whenever the watcher completes an iteration, every few seconds at least; may be nil.
	Beat func()
	// Log receives problems with the kernel's notifications; slog.Default() if nil.
	Log *slog.Logger
	// Resync is the interval at which everything is read again, because some causes are not notified (policy
	// routing by mark, for one). 30 s if zero.
	Resync time.Duration

	// Host returns the interface for servers on this host itself. ok reports whether packets get there and
	// answers are seen. Without Host, or with ok false, an address of the host is not resolved; with an iface of 0,
	// which is none, it is not called out of reach yet.
	Host func() (iface int, mac net.HardwareAddr, ok bool)

	// Attached returns the indices of the interfaces through which the data plane sends clients' packets; nil:
	// none. All neighbours there are kept fresh.
	Attached func() map[int]bool

	// refuseManaged makes the kernel look older than 5.16.
	refuseManaged bool
	// receiveBuffer replaces receiveBufferBytes.
	receiveBuffer int
	// rooms replaces the kernel's information about its tables.
	rooms func() (map[int]room, error)
	// looked is called with each address whose route is looked up; may be nil.
	looked func(netip.Addr)
	// resolved is called with each address whose next hop's state is looked at; may be nil.
	resolved func(netip.Addr)
	// full makes the kernel refuse entries as if its table had no room.
	full func() bool
}

// Watcher keeps the hops of the wanted addresses. Its methods may be called concurrently.
type Watcher struct {
	opts   Options
	handle *netlink.Handle // routes and links
	neigh  *neighbours     // neighbours, with the attributes the library leaves out
	sender *wire.Sender
	routes *netlink.Handle   // all of them, for gateways
	found  chan gatewaysRead // which there are

	wake    chan struct{} // capacity 1: look up new addresses, and all addresses if that is due
	reach   chan struct{} // capacity 1: Unreachable may say something else than before
	stop    context.CancelFunc
	stopped sync.WaitGroup

	mu      sync.Mutex
	wanted  map[netip.Addr]bool
	asked   bool                // Want was called: unneeded entries may be removed
	due     bool                // Review was called
	hops    map[netip.Addr]*Hop // the hops themselves are not changed
	lost    map[netip.Addr]bool // addresses in hops that are out of reach
	changed chan struct{}       // closed and replaced when hops changes

	// Only the loop uses the following fields.
	table  map[key]entry        // the kernel's neighbour table
	mine   map[key]bool         // entries we made or found marked as ours at the start
	users  map[key][]netip.Addr // the wanted addresses behind each next hop
	behind map[netip.Addr]key   // the same by address
	told   map[key]finding      // the states that all of users know; one is missing if some may know another
	// reviewed: all addresses were looked up since the first call of Want.
	reviewed bool
	asking   map[key]*asking // by next hop, as users
	links    map[int]ownLink // by index, as of the last review
	rounds   rounds          // of asking
	crowded  map[int]string  // remedies for tables that are short of room, by family
	refused  map[int]bool    // tables that had no room for an entry since lookAtRoom
	plain    bool            // the kernel does not manage neighbours
	known    bool            // whether it does

	attached   map[int]bool     // Attached, as of the last review
	gateways   map[key]*gateway // of routes that leave by attached interfaces
	unkept     map[key]string   // why the kernel does not keep a gateway
	saidSilent map[key]string   // as the conditions have it
	routesDue  bool             // to be read
	reading    bool             // they are being read
	routesRead time.Time        // when all routes were last read
	routesTook time.Duration    // and how long that took
	listed     map[key]entry    // the kernel's table, as last read
	listedAt   time.Time
	probing    probing
}

// New starts a watcher without wanted addresses.
func New(opts Options) (*Watcher, error) {
	if opts.OnChange == nil {
		opts.OnChange = func(*Hop) {}
	}
	if opts.Attached == nil {
		opts.Attached = func() map[int]bool { return nil }
	}
	if opts.Beat == nil {
		opts.Beat = func() {}
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	if opts.Resync == 0 {
		opts.Resync = 30 * time.Second
	}
	if opts.receiveBuffer == 0 {
		opts.receiveBuffer = receiveBufferBytes
	}
	ns := netns.None()
	if opts.Namespace != nil {
		ns = *opts.Namespace
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket to look up next hops: %w", err)
	}
	neigh, err := openNeighbours(ns, opts.refuseManaged)
	if err != nil {
		handle.Close()
		return nil, err
	}
	neigh.full = opts.full
	if opts.rooms == nil {
		opts.rooms = neigh.rooms
	}
	sender, err := wire.OpenSender(ns)
	if err != nil {
		handle.Close()
		neigh.close()
		return nil, err
	}
	routes, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		handle.Close()
		neigh.close()
		sender.Close()
		return nil, fmt.Errorf("open a netlink socket to read routes: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	w := &Watcher{
		opts: opts, handle: handle, neigh: neigh, sender: sender, stop: stop,
		routes: routes, found: make(chan gatewaysRead),
		wake:    make(chan struct{}, 1),
		reach:   make(chan struct{}, 1),
		wanted:  map[netip.Addr]bool{},
		hops:    map[netip.Addr]*Hop{},
		lost:    map[netip.Addr]bool{},
		changed: make(chan struct{}),
		table:   map[key]entry{},
		mine:    map[key]bool{},
		asking:  map[key]*asking{},
		told:    map[key]finding{},
		crowded: map[int]string{},
		refused: map[int]bool{},
		links:   map[int]ownLink{},

		unkept: map[key]string{}, probing: probing{collected: map[int]bool{}},
	}
	events, err := subscribe(ctx, ns, opts, &w.stopped)
	if err == nil {
		err = w.adopt()
	}
	if err != nil {
		stop()
		w.stopped.Wait()
		w.closeSockets()
		return nil, err
	}
	w.stopped.Go(func() { w.loop(ctx, events) })
	return w, nil
}

// adopt reads the table and takes over a predecessor's entries.
func (w *Watcher) adopt() error {
	table, err := w.neigh.list()
	if err != nil {
		return err
	}
	w.table = table
	for k, e := range table {
		if e.managed && e.protocol == protocol {
			w.mine[k] = true
		}
	}
	return nil
}

// Want replaces the set of addresses to resolve, and looks up the new ones. It returns at once; see Wait. An
// address that is no longer wanted is dropped without a call of OnChange, and its neighbour entry is removed if
// it is ours and no other wanted address needs it.
func (w *Watcher) Want(addrs []netip.Addr) {
	wanted := make(map[netip.Addr]bool, len(addrs))
	for _, a := range addrs {
		wanted[a.Unmap()] = true
	}
	w.mu.Lock()
	if w.asked && maps.Equal(w.wanted, wanted) {
		w.mu.Unlock()
		return
	}
	w.wanted = wanted
	w.asked = true
	var gone []netip.Addr
	for a := range w.hops {
		if !wanted[a] {
			delete(w.hops, a)
			delete(w.lost, a)
			gone = append(gone, a)
		}
	}
	w.mu.Unlock()
	for _, a := range gone {
		w.opts.Conditions.Clear(condition.NeighbourUnresolved, a.String())
	}
	w.rouse()
}

// Review makes the watcher look up all wanted addresses again, without a notification of the kernel: the result
// of Host has changed. It returns at once.
func (w *Watcher) Review() {
	w.mu.Lock()
	w.due = true
	w.mu.Unlock()
	w.rouse()
}

// rouse wakes the loop.
func (w *Watcher) rouse() {
	select {
	case w.wake <- struct{}{}:
	default: // already woken
	}
}

// Hop returns the next hop of an address; false if the address is not wanted or not yet looked up.
func (w *Watcher) Hop(addr netip.Addr) (Hop, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if h := w.hops[addr.Unmap()]; h != nil {
		return *h, true
	}
	return Hop{}, false
}

// Hops returns the next hop of every wanted address, sorted by address.
func (w *Watcher) Hops() []Hop {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := make([]Hop, 0, len(w.hops))
	for _, h := range w.hops {
		list = append(list, *h)
	}
	slices.SortFunc(list, func(a, b Hop) int { return a.Address.Compare(b.Address) })
	return list
}

// Resolved reports whether the address can be sent to.
func (w *Watcher) Resolved(addr netip.Addr) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.resolved(addr)
}

// Unreachable reports whether the address is known to be out of reach: it has no route, or its next hop does
// not answer. An address that is still being looked up is not.
func (w *Watcher) Unreachable(addr netip.Addr) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost[addr.Unmap()]
}

// Changed returns a channel that receives when the result of Unreachable may have changed.
func (w *Watcher) Changed() <-chan struct{} { return w.reach }

// resolved does the same as Resolved for a caller that holds mu.
func (w *Watcher) resolved(addr netip.Addr) bool {
	h := w.hops[addr.Unmap()]
	return h != nil && h.Resolved
}

// Wait returns when every address is resolved and OnChange has returned for it, or when
// ctx ends. It returns the addresses that are not resolved. An address that is not wanted is
// never resolved.
func (w *Watcher) Wait(ctx context.Context, addrs []netip.Addr) []netip.Addr {
	next := 0 // addresses before it are resolved: each is looked at once, not at every change
	for {
		w.mu.Lock()
		changed := w.changed
		for next < len(addrs) && w.resolved(addrs[next]) {
			next++
		}
		over := next == len(addrs) || ctx.Err() != nil
		var missing []netip.Addr
		if over {
			missing = slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return w.resolved(a) })
		}
		w.mu.Unlock()
		switch {
		case len(missing) > 0 && ctx.Err() == nil:
			addrs, next = missing, 0 // they were resolved a moment ago
		case over:
			return missing
		default:
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	}
}

// Close ends the watcher. With keep its entries stay, and the kernel keeps them fresh; without keep, they are
// removed.
func (w *Watcher) Close(keep bool) error {
	w.stop()
	w.stopped.Wait()
	w.opts.Conditions.Only(condition.GatewaySilent, nil)
	var first error
	if !keep {
		for k := range w.mine {
			if err := w.release(k); err != nil && first == nil {
				first = err
			}
		}
		clear(w.mine)
	}
	w.closeSockets()
	return first
}

func (w *Watcher) closeSockets() {
	w.handle.Close()
	w.neigh.close()
	w.sender.Close()
	w.routes.Close()
}
