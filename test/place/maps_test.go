package place_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// errInjected is the error of an operation that had to fail.
var errInjected = errors.New("injected fault")

// fault is the point at which an operation fails.
type fault int

const (
	none   fault = iota
	before       // it has done nothing
	after        // it has been carried out
	half         // the first half of WriteSlots has been carried out, nothing of others
)

// faults is the outermost layer. It makes operations fail.
type faults struct {
	reconcile.Maps
	kind fault
	in   int // operations until it strikes
}

func (f *faults) strike(kind fault, in int) { f.kind, f.in = kind, in }

func (f *faults) do(effect, part func() error) error {
	kind := none
	if f.kind != none {
		if f.in--; f.in < 0 {
			kind = f.kind
			f.kind = none
		}
	}
	var err error
	switch kind {
	case none:
		return effect()
	case after:
		err = effect()
	case half:
		err = part()
	}
	return errors.Join(err, errInjected)
}

func nothing() error { return nil }

func (f *faults) PutBackend(r reconcile.BackendRecord) error {
	return f.do(func() error { return f.Maps.PutBackend(r) }, nothing)
}

func (f *faults) DeleteBackend(r reconcile.BackendRef) error {
	return f.do(func() error { return f.Maps.DeleteBackend(r) }, nothing)
}

func (f *faults) PutService(r reconcile.ServiceRecord) error {
	return f.do(func() error { return f.Maps.PutService(r) }, nothing)
}

func (f *faults) DeleteService(index uint32, generation uint8) error {
	return f.do(func() error { return f.Maps.DeleteService(index, generation) }, nothing)
}

func (f *faults) PutFrontend(r model.Frontend, service uint32) error {
	return f.do(func() error { return f.Maps.PutFrontend(r, service) }, nothing)
}

func (f *faults) DeleteFrontend(r model.Frontend) error {
	return f.do(func() error { return f.Maps.DeleteFrontend(r) }, nothing)
}

func (f *faults) PutAddress(r reconcile.AddressRecord) error {
	return f.do(func() error { return f.Maps.PutAddress(r) }, nothing)
}

func (f *faults) DeleteAddress(a netip.Addr) error {
	return f.do(func() error { return f.Maps.DeleteAddress(a) }, nothing)
}

func (f *faults) WriteSlots(offset uint32, slots reconcile.Table) error {
	return f.do(func() error { return f.Maps.WriteSlots(offset, slots) },
		func() error { return f.Maps.WriteSlots(offset, slots[:len(slots)/2]) })
}

func (f *faults) ScanRemembered() (found map[uint32]bool, err error) {
	err = f.do(func() error { found, err = f.Maps.ScanRemembered(); return err }, nothing)
	if err != nil {
		return nil, err
	}
	return found, nil
}

func (f *faults) EndStrays(members []reconcile.Member) error {
	return f.do(func() error { return f.Maps.EndStrays(members) }, nothing)
}

func (f *faults) Grace() error { return f.do(f.Maps.Grace, nothing) }

// witness sees the actual writes, and keeps them for the rules. It also sets the ways to
// backends, which these tests are not about.
type witness struct {
	reconcile.Maps
	d        *datapath.Datapath
	ifindex  int
	backends map[reconcile.BackendRef]reconcile.BackendRecord
	services map[uint32]reconcile.ServiceRecord
	fronts   map[model.Frontend]uint32
	ours     map[netip.Addr]bool
	slots    []reconcile.Slot
	// old are the words of closing slots from before, which a program that still runs may hold
	// until the grace period has passed.
	old map[uint32]reconcile.Slot
	// late runs packets of such programs at the last possible moment.
	late func()
	// scanned holds the result of a scan against the rules.
	scanned func(map[uint32]bool) error
	// ended makes the rules end strays, too.
	ended func([]reconcile.Member)
	grace func() error // the way to wait; nil: no other program runs, so there is nothing to wait for
}

func newWitness(w *world, below reconcile.Maps) *witness {
	return &witness{
		Maps: below, d: w.d, ifindex: w.ifindex,
		backends: map[reconcile.BackendRef]reconcile.BackendRecord{},
		services: map[uint32]reconcile.ServiceRecord{},
		fronts:   map[model.Frontend]uint32{},
		ours:     map[netip.Addr]bool{},
		slots:    make([]reconcile.Slot, w.options.Limits.Slots),
		old:      map[uint32]reconcile.Slot{},
	}
}

func (w *witness) PutBackend(r reconcile.BackendRecord) error {
	if err := w.Maps.PutBackend(r); err != nil {
		return err
	}
	for ref, had := range w.backends {
		if ref.Index == r.Index && ref != r.BackendRef {
			return fmt.Errorf("backend %s takes the place of %s, which was not deleted", r.BackendAddress, had.BackendAddress)
		}
	}
	w.backends[r.BackendRef] = r
	return w.d.SetHop(r.BackendRef, store.Hop{Interface: w.ifindex, MAC: backendMAC(r.Address)})
}

func (w *witness) DeleteBackend(r reconcile.BackendRef) error {
	if err := w.Maps.DeleteBackend(r); err != nil {
		return err
	}
	delete(w.backends, r)
	return nil
}

func (w *witness) PutService(r reconcile.ServiceRecord) error {
	if err := w.Maps.PutService(r); err != nil {
		return err
	}
	w.services[r.Index] = r
	return nil
}

func (w *witness) DeleteService(index uint32, generation uint8) error {
	if err := w.Maps.DeleteService(index, generation); err != nil {
		return err
	}
	if w.services[index].Generation == generation {
		delete(w.services, index)
	}
	return nil
}

func (w *witness) PutFrontend(f model.Frontend, service uint32) error {
	if err := w.Maps.PutFrontend(f, service); err != nil {
		return err
	}
	w.fronts[f] = service
	return nil
}

func (w *witness) DeleteFrontend(f model.Frontend) error {
	if err := w.Maps.DeleteFrontend(f); err != nil {
		return err
	}
	delete(w.fronts, f)
	return nil
}

func (w *witness) PutAddress(r reconcile.AddressRecord) error {
	if err := w.Maps.PutAddress(r); err != nil {
		return err
	}
	w.ours[r.Address] = true
	return nil
}

func (w *witness) DeleteAddress(a netip.Addr) error {
	if err := w.Maps.DeleteAddress(a); err != nil {
		return err
	}
	delete(w.ours, a)
	return nil
}

func (w *witness) WriteSlots(offset uint32, slots reconcile.Table) error {
	if err := w.Maps.WriteSlots(offset, slots); err != nil {
		return err
	}
	for i, slot := range slots.All() {
		at := offset + uint32(i)
		if slot.State == reconcile.Closing && w.slots[at].State == reconcile.Transition {
			w.old[at] = w.slots[at]
		}
		w.slots[at] = slot
	}
	return nil
}

// Grace ends all programs that hold old words, after they have done their worst.
func (w *witness) Grace() error {
	w.lateRuns()
	if w.grace != nil {
		return w.grace()
	}
	return nil
}

func (w *witness) EndStrays(members []reconcile.Member) error {
	if err := w.Maps.EndStrays(members); err != nil {
		return err
	}
	if w.ended != nil {
		w.ended(members)
	}
	return nil
}

func (w *witness) lateRuns() {
	if w.late != nil && len(w.old) > 0 {
		w.late()
	}
	clear(w.old)
}

func (w *witness) ScanRemembered() (map[uint32]bool, error) {
	found, err := w.Maps.ScanRemembered()
	if err == nil && w.scanned != nil {
		err = w.scanned(found)
	}
	// A scan without a grace period fails here.
	w.lateRuns()
	return found, err
}

// asOld gives the slots their words from before they were closed while f runs.
func (w *witness) asOld(f func()) {
	swap := func() {
		for at, slot := range w.old {
			w.old[at], w.slots[at] = w.slots[at], slot
			if err := w.Maps.WriteSlots(at, reconcile.NewTable([]reconcile.Slot{slot})); err != nil {
				panic(err)
			}
		}
	}
	swap()
	f()
	swap()
}

// breakage is a data plane or a reconciler with a known fault.
type breakage struct {
	name string
	// writes changes a write over a slot, below the witness.
	writes func(had, wanted reconcile.Slot) reconcile.Slot
	// hurries: the reconciler scans without waiting for running programs.
	hurries bool
	// lossesOnly: only lost connections may show the breakage; not a part of it.
	lossesOnly bool
}

// hasty is a reconciler's view of maps that do not wait.
type hasty struct{ reconcile.Maps }

func (hasty) Grace() error { return nil }

// broken is a data plane with a breakage. It keeps its own copy of the slots.
type broken struct {
	reconcile.Maps
	breakage
	slots map[uint32]reconcile.Slot
}

func (b *broken) WriteSlots(offset uint32, slots reconcile.Table) error {
	slots = slices.Clone(slots)
	if b.writes != nil {
		for i, wanted := range slots.All() {
			written := b.writes(b.slots[offset+uint32(i)], wanted)
			slots.Set(i, written)
			b.slots[offset+uint32(i)] = written
		}
	}
	return b.Maps.WriteSlots(offset, slots)
}
