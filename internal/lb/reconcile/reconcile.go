// Package reconcile makes the maps of the data plane agree with the desired state. It
// compares the desired state with a mirror of the maps and executes the difference
// through the Maps interface, which is the only access to the kernel.
//
//	Desired ──► change of the register ──► scope ─┐
//	                                              ├─► plan ──► operations on Maps, each noted in the mirror
//	Contents ─► mirror ───────────────────────────┘
//
// The register is the last desired state that was applied, with the totals over all services for
// a backend, a frontend or an address. A change turns it into the next state, and the entries that
// the change may touch are the plan's scope: the amount of work depends on the changes, not on the
// number of services. If the maps are not known to agree with the register, after an error or at the
// start, the scope is all of their contents.
//
// Programs run between any two operations, so their order is an invariant:
//
//   - A backend exists before a slot of a living service names it. It is deleted only
//     after no slot has named it and a Grace has passed since.
//   - A service exists before a frontend names it, and no frontend names it when it is
//     deleted, or becomes a remnant.
//   - A table of another size or position is written completely before the service's
//     record points to it. A table that keeps its size is changed in place, where every
//     slot names a living backend at every moment.
//   - Positions and slot regions that were in use are reused only after a Grace, and
//     positions then have another generation.
//   - A NAT source is known before a frontend can start flows from it, and removed
//     last; a VIP is made known after its frontends and withdrawn before them.
//   - A source may use a service as before a change or as after it, at every moment: planFilters
//     says how.
//   - A slot of a tracked service leaves its transition only through closing, a Grace and
//     a scan of the remembered flows, and nothing else happens to tables in between.
//   - A table before, which slots in transition refer to, is not written to, and kept
//     until no slot refers to it.
//   - The flows of a backend that has left its service end last, when none can begin any more.
//   - A state that does not fit into the limits is refused before the first operation.
//
// An operation that fails may have taken effect. The entries it touched are then in doubt:
// the mirror allows for both outcomes until the next Apply has settled the doubt, by repeating
// the operation, before it goes on to the newly desired state.
package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Desired holds all input that decides the contents of the maps. Its lists must not be changed once it has been
// planned or applied: a changed service is another pointer.
type Desired struct {
	Services []*model.Service
	// NATSources are the addresses that full NAT sends from.
	NATSources []netip.Addr
	// HostOwn are the addresses that the host has itself.
	HostOwn map[netip.Addr]bool
	// Limits are the limits that the maps were made with. 0 is a limit of 0.
	Limits model.Limits
	// Settle is how long a slot of a tracked service stays in transition after a change;
	// with affinity it is the affinity timeout where that is longer.
	Settle time.Duration
}

// Reconciler owns the contents of the maps. Its methods may be called from any
// goroutine; they take turns.
type Reconciler struct {
	mutex   sync.Mutex
	maps    Maps
	adopted bool
	mirror  mirror
	tables  tables
	// applied is the desired state of the last successful Apply, or the next one once its plan is made. It
	// holds values that the maps do not: weights, and backends without a slot. agrees reports whether the maps
	// are known to match it.
	applied *register
	agrees  bool
	strays  bool // backends that have left a service may have flows of it

	// settleTime is the settle time of the last Apply; unknown before the first.
	settleTime  time.Duration
	settleKnown bool
	scanned     time.Time // the last scan of the remembered flows
	counted     time.Time // when flows of remnants were counted last
	published   atomic.Pointer[Settling]
	start       time.Time // ticks count from here

	beforeNaming     func([]BackendRecord)
	aroundFrontends  func()
	beforeForgetting func(sources []netip.Addr) error
	clock            func() time.Time
}

// Option changes how a Reconciler works.
type Option func(*Reconciler)

// BeforeNaming makes Apply call f between putting backends into the maps and the first slot that names them,
// with the backends that no slot has named so far. f can resolve next hops, and limits its own time.
func BeforeNaming(f func([]BackendRecord)) Option {
	return func(r *Reconciler) { r.beforeNaming = f }
}

// AroundFrontends makes Apply call f twice when it puts frontends: right before the first one and right after the
// last one.
func AroundFrontends(f func()) Option {
	return func(r *Reconciler) { r.aroundFrontends = f }
}

// BeforeForgetting makes Apply call f before NAT sources are removed that are no longer desired, after all
// other entries are in the maps. f can give backends other sources, and end flows of sources that go. After an
// error the sources stay, and removing them is tried again.
func BeforeForgetting(f func(sources []netip.Addr) error) Option {
	return func(r *Reconciler) { r.beforeForgetting = f }
}

// Clock makes the reconciler measure settle times by now instead of time.Now. Only differences count, and it
// must not go back.
func Clock(now func() time.Time) Option {
	return func(r *Reconciler) { r.clock = now }
}

// New returns a reconciler that has not read the maps yet.
func New(maps Maps, options ...Option) *Reconciler {
	r := &Reconciler{maps: maps, tables: tables{}, clock: time.Now}
	for _, option := range options {
		option(r)
	}
	r.start = r.clock()
	return r
}

// Adopt fills the mirror from the maps, so that positions, generations and tables survive a restart. Slots in
// transition get the full settle time anew. Plan, Apply and Settle call it if it was not called before. It
// changes nothing, and returns the contents of the maps, which the caller must not change.
func (r *Reconciler) Adopt() (Contents, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.adopt()
}

func (r *Reconciler) adopt() (Contents, error) {
	contents, err := r.maps.Contents()
	if err != nil {
		return contents, fmt.Errorf("read the maps for adoption: %w", err)
	}
	mirror, err := newMirror(contents, r.nextTick())
	if err != nil {
		return contents, fmt.Errorf("adopt the maps: %w", err)
	}
	r.scanned, r.counted = r.clock(), r.clock()
	r.mirror, r.applied, r.adopted = mirror, newRegister(), true
	r.agrees, r.strays = false, len(mirror.services) > 0
	return contents, nil
}

// BackendChanges returns the backends that were put into the maps or changed there, and the backends that were
// removed, since the last call; the first call returns in put all backends that Adopt has found. It does not
// read the maps: after an error, a backend that could not be put is in put, and one that could not be removed
// is not in gone. A backend that was put again with the same record is in neither, so after an error the data
// that depend on the records have to be written again.
func (r *Reconciler) BackendChanges() (put, gone []BackendRecord) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, index := range slices.Sorted(maps.Keys(r.mirror.changed)) {
		was := r.mirror.changed[index]
		now, there := r.mirror.backends[index]
		if was.Index != 0 && (!there || now.BackendRef != was.BackendRef || now.BackendAddress != was.BackendAddress) {
			gone = append(gone, was)
		}
		if there && now.BackendRecord != was {
			put = append(put, now.BackendRecord)
		}
	}
	r.mirror.changed = map[uint32]BackendRecord{} // not cleared: after a start it had all backends
	return put, gone
}

// Plan returns the changes that Apply would make. It fails as Apply would before its first operation: with a
// *CapacityError, or because the desired state contradicts itself.
func (r *Reconciler) Plan(desired Desired) (Difference, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	p, err := r.prepare(desired)
	if err != nil {
		return Difference{}, err
	}
	p.desired.undo(p.change)
	return p.difference, nil
}

// Apply makes the maps agree with the desired state and returns the changes. After an error some of the
// difference may be in effect; every living backend and its flows are unharmed, and the next Apply repairs the
// rest. Without a difference it does nothing. Slots that a Settle left closing are finished before anything
// else.
func (r *Reconciler) Apply(desired Desired) (Difference, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	defer r.publishSettling()
	p, err := r.prepare(desired)
	if err != nil {
		return Difference{}, err
	}
	r.settleTime, r.settleKnown = desired.Settle, true
	difference := p.difference
	if r.mirror.closing() {
		// The plan assumes that they are finished, but cannot know their states.
		p.desired.undo(p.change)
		if err := r.finishClosing(); err != nil {
			r.doubt()
			return difference, fmt.Errorf("finish closing slots: %w: nothing else is done yet, apply again", err)
		}
		if p, err = r.prepare(desired); err != nil {
			return difference, err
		}
	}
	if err := r.carryOut(p); err != nil {
		r.doubt()
		p.desired.undo(p.change)
		return difference, err
	}
	r.tables = tables{} // the mirror has them now
	r.applied, r.agrees, r.strays = p.desired, true, false
	clear(r.mirror.merging)
	return difference, nil
}

func (r *Reconciler) carryOut(p *plan) error {
	if err := r.execute(p); err != nil {
		return fmt.Errorf("apply the desired state: %w: the finished steps stay in force, apply again for the rest", err)
	}
	if err := r.endStrays(p); err != nil {
		return fmt.Errorf("apply the desired state: %w: all other steps are finished, apply again for this step", err)
	}
	return nil
}

// doubt makes the next plan examine everything: the maps may differ from the applied state, and may hold
// backends that the next state does not have.
func (r *Reconciler) doubt() { r.agrees, r.strays = false, true }

// prepare plans the changes that lead to a desired state. When it returns a plan, the applied register has made
// the change; if that register is not known to match the maps, prepare uses another register, which begins
// empty.
func (r *Reconciler) prepare(desired Desired) (*plan, error) {
	if !r.adopted {
		if _, err := r.adopt(); err != nil {
			return nil, err
		}
	}
	register, whole := r.applied, !r.agrees
	if whole {
		register = newRegister()
	}
	change, err := register.compare(desired)
	if err == nil {
		err = register.do(change)
	}
	if err != nil {
		return nil, fmt.Errorf("plan the desired state: %w", err)
	}
	scope := newScope(&r.mirror, register, change, whole)
	p, err := newPlan(&r.mirror, register, scope, desired.Limits, r.tables, 0)
	var capacity *CapacityError
	if errors.As(err, &capacity) && capacity.What == "services" && capacity.Need > capacity.Limit {
		if short := capacity.Need - capacity.Limit; short <= uint64(len(r.mirror.remnants)) {
			p, err = newPlan(&r.mirror, register, scope, desired.Limits, r.tables, int(short))
		}
	}
	if err != nil {
		register.undo(change)
		return nil, fmt.Errorf("plan the desired state: %w", err)
	}
	r.tables.keep(scope.services)
	p.change = change
	p.difference = r.difference(p, whole)
	return p, nil
}
