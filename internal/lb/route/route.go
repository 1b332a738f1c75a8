// Package route writes the routes to backends into the data plane: the next hop of each backend, and
// the addresses that full NAT sends from.
//
//	routes, neighbours ─► neighbour ─► hop ─┐
//	                                        ├─► for each backend in the maps: hop, sources
//	configuration ─► snat.addresses ────────┘
//
// Next hops change at any time, and changes of the configuration add backends. The later of the
// two events writes the route, so no route is missing once a slot names the backend.
package route

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/neighbour"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// resolveTimeout limits the time that a change waits for next hops. A backend whose next hop is not resolved by
// then gets no new flows, unless no other backend can be reached either: then slots name it all the same, and
// its packets are counted as unresolved.
const resolveTimeout = 2 * time.Second

// DataPlane is the part of the data plane that stores routes. Both methods fail with datapath.ErrGone if the
// backend is no longer at its position.
type DataPlane interface {
	SetHop(reconcile.BackendRef, store.Hop) error
	SetNATSources(reconcile.BackendRef, []netip.Addr) error
}

// resolver finds next hops; see neighbour.Watcher.
type resolver interface {
	Want([]netip.Addr)
	Wait(context.Context, []netip.Addr) []netip.Addr
	Review()
	Unreachable(netip.Addr) bool
	Changed() <-chan struct{}
	Close(keep bool) error
}

// Options are the parts that Routes connect. All are needed.
type Options struct {
	DataPlane  DataPlane
	Conditions *condition.Set // receives the conditions of neighbour.Watcher
	Log        *slog.Logger
	// Configured returns the addresses of snat.addresses; without any, the route to a backend decides which
	// address NAT sends from.
	Configured func() []netip.Addr
	// NATSourcesChanged is called when the result of NATSources has changed since the last call.
	NATSourcesChanged func()
	// Host returns the hop to a backend that is this host, neighbour.Options.Host.
	Host func() (iface int, mac net.HardwareAddr, ok bool)
	// Attached returns the interfaces through which clients' packets leave, neighbour.Options.Attached.
	Attached func() map[int]bool
	// Beat is called whenever the watcher of next hops completes an iteration, neighbour.Options.Beat.
	Beat func()
}

// Routes keeps the routes of the backends in the maps. Its methods may be called concurrently, except for
// Follow, Due, Brought, Add, Change, Rewrite and NATSources, which are for one caller at a time. The cost of
// these depends on the changes, except for Rewrite.
type Routes struct {
	opts     Options
	resolver resolver

	services  model.Differ
	named     map[netip.Addr]use  // by services
	unawaited map[netip.Addr]bool // backends that are not down and that no change has waited for
	awaited   map[netip.Addr]bool // backends that were waited for
	due       map[netip.Addr]bool // result of Due, until Brought
	wanted    map[netip.Addr]bool // named, due, or in the maps
	changed   bool                // differs from the addresses that the resolver has

	// writing is held while a hop is recorded and written, so that no older hop overwrites a newer one.
	writing sync.Mutex
	hops    map[netip.Addr]*neighbour.Hop // as last told
	written []netip.Addr                  // result of Configured when all routes were last written
	failed  map[netip.Addr]bool           // backends with a route that could not be written since
	doubted atomic.Bool                   // some routes may not be as they were last written

	mu       sync.Mutex
	records  map[netip.Addr][]reconcile.BackendRecord // in the maps
	sources  map[netip.Addr][]netip.Addr              // by backend address, as last written
	stays    map[netip.Addr]stay                      // last result of NATSources
	lost     map[netip.Addr]bool                      // sources in some backend's last route that the host lost too long ago
	told     map[netip.Addr]bool                      // sources of new flows, as NATSources last found them; nil: none yet
	families map[bool]bool                            // whether NAT has backends of a family, by whether it is IPv4
	heard    []netip.Addr                             // result of Configured then
	retell   bool                                     // the result of NATSources may have changed
}

// away is how long a source is kept after the host has lost it. With it, flows survive an interface that goes
// down and up again: the kernel removes its IPv6 addresses meanwhile, and router advertisements and duplicate
// address detection bring them back within some seconds.
const away = 10 * time.Second

// stay is the state of a source address.
type stay struct {
	own   bool      // the host had it when last looked
	until time.Time // when it goes, if it has lost it; zero: never had it
}

// use counts the backends at an address, over all services.
type use struct {
	named      int
	alive      int // that are not down
	translated int // of services whose packets get another source address
}

// Open begins to follow next hops, of no backend yet.
func Open(opts Options) (*Routes, error) {
	w := newRoutes(opts)
	watcher, err := neighbour.New(neighbour.Options{
		OnChange: w.hopChanged, Conditions: opts.Conditions, Log: opts.Log, Host: opts.Host, Attached: opts.Attached, Beat: opts.Beat,
	})
	if err != nil {
		return nil, err
	}
	w.resolver = watcher
	return w, nil
}

func newRoutes(opts Options) *Routes {
	return &Routes{
		opts: opts, named: map[netip.Addr]use{}, unawaited: map[netip.Addr]bool{}, awaited: map[netip.Addr]bool{}, due: map[netip.Addr]bool{}, wanted: map[netip.Addr]bool{},
		hops: map[netip.Addr]*neighbour.Hop{}, failed: map[netip.Addr]bool{}, retell: true,
		records: map[netip.Addr][]reconcile.BackendRecord{}, sources: map[netip.Addr][]netip.Addr{}, stays: map[netip.Addr]stay{},
	}
}

// Adopt passes the addresses that full NAT has sent from before this start: flows continue with them, as with
// addresses that belong to no backend any more.
func (w *Routes) Adopt(sources []netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range sources {
		w.stays[a] = stay{own: true}
	}
}

// Close ends the Routes. With keep the kernel keeps next hops fresh.
func (w *Routes) Close(keep bool) error { return w.resolver.Close(keep) }

// Unreachable reports whether a backend is known to be out of reach.
func (w *Routes) Unreachable(backend netip.Addr) bool { return w.resolver.Unreachable(backend) }

// Here reports whether a backend is known to be this host itself.
func (w *Routes) Here(backend netip.Addr) bool {
	w.writing.Lock()
	defer w.writing.Unlock()
	hop := w.hops[backend]
	return hop != nil && hop.Host
}

// Out returns the index of the interface through which packets to a backend leave, if its next hop is known and
// answers, and whether the backend is the next hop itself.
func (w *Routes) Out(backend netip.Addr) (iface int, onLink, ok bool) {
	w.writing.Lock()
	defer w.writing.Unlock()
	hop := w.hops[backend]
	if hop == nil || !hop.Resolved || hop.Host {
		return 0, false, false
	}
	return hop.Interface, hop.NextHop == backend, true
}

// Hop returns the last known hop to a backend; ok is false if none is known.
func (w *Routes) Hop(backend netip.Addr) (hop store.Hop, ok bool) {
	w.writing.Lock()
	defer w.writing.Unlock()
	known := w.hops[backend]
	if known == nil || len(known.MAC) == 0 {
		return store.Hop{}, false
	}
	return store.Hop{Interface: known.Interface, MAC: known.MAC}, true
}

// Changed returns a channel that receives when the result of Unreachable may have changed.
func (w *Routes) Changed() <-chan struct{} { return w.resolver.Changed() }

// Review looks all next hops up again, and makes the next Change write all routes again: the result of Host has
// changed, or other interfaces are attached.
func (w *Routes) Review() {
	w.Doubt()
	w.resolver.Review()
}

// Doubt makes the next Change write all routes again: records may have been emptied in between.
func (w *Routes) Doubt() { w.doubted.Store(true) }

// Follow looks up the next hops of the services' backends, and of the backends in the maps. Other backends are
// dropped. No two services may have the same name.
func (w *Routes) Follow(services []*model.Service) {
	gone, come := w.services.Next(services)
	before := map[netip.Addr]use{} // of addresses that these services name
	count := func(s *model.Service, sign int) {
		for _, b := range s.Backends {
			u := w.named[b.Address]
			if _, known := before[b.Address]; !known {
				before[b.Address] = u
			}
			u.named += sign
			if !b.Observed.Down {
				u.alive += sign
			}
			if !s.Forwarding.Direct() {
				u.translated += sign
			}
			w.named[b.Address] = u
		}
	}
	for _, s := range gone {
		count(s, -1)
	}
	for _, s := range come {
		count(s, 1)
	}
	for a, was := range before {
		is := w.named[a]
		if (is.translated > 0) != (was.translated > 0) {
			w.mu.Lock()
			w.retell = true
			w.mu.Unlock()
		}
		if is.named == 0 {
			delete(w.named, a)
			w.forget(a)
		}
		if is.alive > 0 && !w.awaited[a] {
			w.unawaited[a] = true
		} else {
			delete(w.unawaited, a)
		}
		w.note(a)
	}
	w.look()
}

// forget drops the record that an address was waited for, unless it is due.
func (w *Routes) forget(a netip.Addr) {
	if !w.due[a] {
		delete(w.awaited, a)
	}
}

// note updates whether an address is wanted.
func (w *Routes) note(a netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, named := w.named[a]
	if wanted := named || w.due[a] || len(w.records[a]) > 0; wanted != w.wanted[a] {
		w.changed = true
		if wanted {
			w.wanted[a] = true
		} else {
			delete(w.wanted, a)
		}
	}
}

// look passes the wanted addresses to the resolver, if they have changed, and drops the others.
func (w *Routes) look() {
	if !w.changed {
		return
	}
	w.writing.Lock()
	w.mu.Lock()
	maps.DeleteFunc(w.hops, func(a netip.Addr, _ *neighbour.Hop) bool { return !w.wanted[a] })
	maps.DeleteFunc(w.sources, func(a netip.Addr, _ []netip.Addr) bool { return !w.wanted[a] })
	w.mu.Unlock()
	w.writing.Unlock()
	w.changed = false
	w.resolver.Want(slices.Collect(maps.Keys(w.wanted)))
}

// Due returns the backends of future services that are not down and that no change has waited for. Their next
// hops are looked up from now on, even if Follow is called with the present services, until Brought. A backend
// that cannot be reached delays the change that adds it, and no later one.
func (w *Routes) Due(services []*model.Service) []netip.Addr {
	w.Follow(services)
	fresh := slices.SortedFunc(maps.Keys(w.unawaited), netip.Addr.Compare)
	maps.Copy(w.awaited, w.unawaited)
	maps.Copy(w.due, w.unawaited)
	w.unawaited = map[netip.Addr]bool{} // not cleared: after a start it had all backends
	return fresh
}

// Brought says that the change for which Due was called has been applied, or given up.
func (w *Routes) Brought() {
	due := w.due
	w.due = map[netip.Addr]bool{}
	for a := range due {
		if _, named := w.named[a]; !named {
			w.forget(a)
		}
		w.note(a)
	}
	w.look()
}

// Wait returns when the next hops of the due backends are known, or have not answered in time.
func (w *Routes) Wait(ctx context.Context, due []netip.Addr) {
	wait, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	if missing := w.resolver.Wait(wait, due); len(missing) > 0 {
		w.opts.Log.Warn("new backends cannot be reached yet; until then, new flows avoid them where a service has other backends",
			"backends", len(missing), "first", missing[:min(5, len(missing))], "waited", resolveTimeout)
	}
}

// Add writes the known routes of backends that have come into the maps. It is for reconcile.BeforeNaming.
func (w *Routes) Add(records []reconcile.BackendRecord) {
	w.put(records)
	w.writing.Lock()
	defer w.writing.Unlock()
	for _, r := range records {
		if hop, ok := w.hops[r.Address]; ok {
			w.write(hop, []reconcile.BackendRecord{r})
		}
	}
}

// put records that the maps have these records.
func (w *Routes) put(records []reconcile.BackendRecord) {
	for _, r := range records {
		w.mu.Lock()
		all := w.records[r.Address]
		if i := slices.IndexFunc(all, func(o reconcile.BackendRecord) bool { return o.BackendRef == r.BackendRef }); i >= 0 {
			all[i] = r
		} else {
			w.records[r.Address] = append(all, r)
		}
		w.mu.Unlock()
		w.note(r.Address)
	}
}

// Change takes the backends that are new in the maps or have changed, and the backends that have gone, since
// the last call. It writes the routes of the former.
func (w *Routes) Change(put, gone []reconcile.BackendRecord) {
	for _, r := range gone {
		w.mu.Lock()
		left := slices.DeleteFunc(slices.Clone(w.records[r.Address]), func(o reconcile.BackendRecord) bool { return o.BackendRef == r.BackendRef })
		if w.records[r.Address] = left; len(left) == 0 {
			delete(w.records, r.Address)
		}
		w.mu.Unlock()
		w.note(r.Address)
	}
	w.Add(put)
	w.look()
	if w.doubted.Swap(false) || !slices.Equal(w.written, w.opts.Configured()) {
		w.Rewrite()
	} else {
		w.again()
	}
}

// again writes the routes that could not be written.
func (w *Routes) again() {
	w.writing.Lock()
	defer w.writing.Unlock()
	failed := w.failed
	w.failed = map[netip.Addr]bool{}
	for address := range failed {
		if hop, ok := w.hops[address]; ok {
			w.write(hop, w.recordsOf(address))
		}
	}
}

// Rewrite writes all routes again. It is for reconcile.BeforeForgetting: afterwards no backend names a source
// that is not wanted any more.
func (w *Routes) Rewrite() {
	w.writing.Lock()
	defer w.writing.Unlock()
	w.written = slices.Clone(w.opts.Configured())
	clear(w.failed)
	for address, hop := range w.hops {
		w.write(hop, w.recordsOf(address))
	}
}

// recordsOf returns a backend's records, one for each of its ports.
func (w *Routes) recordsOf(backend netip.Addr) []reconcile.BackendRecord {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.records[backend])
}

// hopChanged is called with new findings about a backend.
func (w *Routes) hopChanged(hop *neighbour.Hop) {
	w.writing.Lock()
	defer w.writing.Unlock()
	w.hops[hop.Address] = hop
	w.write(hop, w.recordsOf(hop.Address))
	w.opts.Log.Debug("next hop", "backend", hop.Address, "via", hop.NextHop, "mac", hop.MAC.String(), "resolved", hop.Resolved)
}

// write tells the data plane the route to backends that share an address. The caller holds w.writing.
func (w *Routes) write(hop *neighbour.Hop, records []reconcile.BackendRecord) {
	sources := natSourcesFor(w.opts.Configured(), hop)
	failed := func(what string, r reconcile.BackendRecord, err error) {
		if err != nil && !errors.Is(err, store.ErrGone) {
			w.failed[hop.Address] = true
			w.opts.Log.Warn(what, "backend", r.BackendAddress, "error", err)
		}
	}
	for _, r := range records {
		if len(hop.MAC) > 0 { // a hop that does not answer now is still the best one known
			failed("the next hop of a backend was not stored", r,
				w.opts.DataPlane.SetHop(r.BackendRef, store.Hop{Interface: hop.Interface, MAC: hop.MAC}))
		}
		if len(sources) > 0 {
			failed("the source addresses towards a backend were not stored", r, w.opts.DataPlane.SetNATSources(r.BackendRef, sources))
		}
	}
	if len(sources) == 0 { // without a route now, flows still use the last ones
		for _, r := range records {
			if w.hasLost(hop.Address) {
				failed("cannot store that a source address is gone", r, w.opts.DataPlane.SetNATSources(r.BackendRef, nil))
			}
		}
		return
	}
	w.mu.Lock()
	before, known := w.sources[hop.Address]
	w.sources[hop.Address] = sources
	w.retell = w.retell || !slices.Equal(before, sources)
	unheard := w.told != nil && slices.ContainsFunc(sources, func(a netip.Addr) bool { return !w.told[a] })
	w.mu.Unlock()
	if unheard || known && !slices.Equal(before, sources) {
		w.opts.NATSourcesChanged()
	}
}

// hasLost reports whether the host has lost the last source towards a backend.
func (w *Routes) hasLost(backend netip.Addr) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.sources[backend], func(a netip.Addr) bool { return w.lost[a] })
}

// NATSources returns every address that full NAT sends from, sorted: the addresses towards backends of the
// services, and the addresses that it has sent from before, as long as they are among the host's own addresses,
// or were until a moment ago. Flows keep their source, and the programs recognise their answers by it.
func (w *Routes) NATSources(own map[netip.Addr]bool, now time.Time) (all []netip.Addr) {
	configured := w.opts.Configured()
	w.writing.Lock()
	defer w.writing.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.retell || !slices.Equal(w.heard, configured) {
		w.told, w.heard, w.retell = map[netip.Addr]bool{}, slices.Clone(configured), false
		for _, a := range configured {
			w.told[a] = true
		}
		w.families = map[bool]bool{}
		for b, u := range w.named {
			if u.translated == 0 {
				continue
			}
			w.families[b.Is4()] = true
			sources := natSourcesFor(configured, w.hops[b])
			if len(sources) == 0 && len(configured) == 0 {
				sources = w.sources[b]
			}
			for _, a := range sources {
				w.told[a] = true
			}
		}
	}
	before, lost := w.stays, w.lost
	w.stays, w.lost = map[netip.Addr]stay{}, map[netip.Addr]bool{}
	for a := range w.told {
		s := before[a].look(own[a], now)
		switch {
		case slices.Contains(configured, a):
			w.stays[a] = stay{own: own[a]}
		case lost[a] && !own[a] || s.over(now):
			w.lost[a] = true
		default:
			w.stays[a] = s
		}
	}
	for a, s := range before {
		if s = s.look(own[a], now); !w.told[a] && w.families[a.Is4()] && (s.own || now.Before(s.until)) {
			w.stays[a] = s
		}
	}
	return slices.SortedFunc(maps.Keys(w.stays), netip.Addr.Compare)
}

// look returns the present state of a source address.
func (s stay) look(own bool, now time.Time) stay {
	switch {
	case own:
		return stay{own: true}
	case s.own:
		return stay{until: now.Add(away)}
	}
	return s
}

// over reports whether the host has lost a source too long ago.
func (s stay) over(now time.Time) bool { return !s.own && !s.until.IsZero() && !now.Before(s.until) }

// Expires reports whether NATSources would now leave out an address that it returned last.
func (w *Routes) Expires(now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.stays {
		if s.over(now) {
			return true
		}
	}
	return false
}

// natSourcesFor returns the addresses that full NAT sends from towards a hop; nil: not known.
func natSourcesFor(configured []netip.Addr, hop *neighbour.Hop) []netip.Addr {
	if hop == nil {
		return nil
	}
	var sources []netip.Addr
	for _, a := range configured {
		if a.Is4() == hop.Address.Is4() {
			sources = append(sources, a)
		}
	}
	if len(configured) == 0 && hop.Source.IsValid() {
		sources = append(sources, hop.Source)
	}
	return sources
}
