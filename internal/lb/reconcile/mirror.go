package reconcile

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// mirror is the known contents of the maps. Only operations change it: an entry is "in doubt" before the
// operation, and "known" after its success.
type mirror struct {
	backends  map[uint32]*mirrorBackend
	byAddress map[model.BackendAddress]uint32
	services  map[uint32]*mirrorService
	byKey     map[serviceKey]uint32
	frontends map[model.Frontend]mirrorFrontend
	addresses map[netip.Addr]mirrorAddress
	filters   map[Filter]mirrorFilter
	remnants  map[uint32]bool       // positions
	merging   map[uint32]serviceKey // services that are to receive the flows of the service at a position, after a failure

	// naming counts the services whose slots name a backend.
	naming map[BackendRef]int
	// changed are the positions of backends that were put or deleted since the last call of BackendChanges,
	// each with its record at that time; the zero record if there was none.
	changed map[uint32]BackendRecord
	// unsettled are the services that Settle may have work for, or that are in doubt.
	unsettled map[uint32]bool

	backendPositions positions
	servicePositions positions
	// graceOwed: positions or regions became free since the last Grace.
	graceOwed bool
	// rerouted: slots or records have changed since the last Grace, so programs may still act on their old
	// contents.
	rerouted bool
}

type mirrorBackend struct {
	BackendRecord
	doubt bool // it may be missing
}

type mirrorService struct {
	record ServiceRecord
	slots  Table    // of record's region
	before Table    // of the table before that the record refers to; nil: there is none
	begun  []uint32 // the tick at which the transition of each slot began; nil: no slot is in transition
	tally  tally    // of slots
	// from is the table from which the slots were made; nil: unknown. A change that needs the same table leaves
	// the slots unchanged, and need not examine each.
	from  *filling
	named []BackendRef // backends that the slots name, each once

	// doubt: the record may be missing, or still an earlier one with a table in held.
	doubt bool
	held  []heldTable
	// slotsDoubt: slots of record's region may still name the backends in stale instead.
	slotsDoubt bool
	stale      map[BackendRef]bool
	// lent are the services that have frontends now that belonged to this service.
	lent    map[serviceRef]bool
	remnant *remnant // nil: it is no remnant
	// leaving: its deletion has failed, and must be tried again.
	leaving bool
}

// heldTable is a table that the service's record may still point to, or a table before that it may refer to.
// The slots of a table before do not count: the backends that they name may be gone.
type heldTable struct {
	region
	slots Table
}

type mirrorFrontend struct {
	services []uint32 // it names one of these; more than one: which one is in doubt
	doubt    bool     // it may be missing
}

type mirrorAddress struct {
	AddressRecord
	doubt bool // set flags may be missing in the maps, and so may the record
}

// newMirror takes the contents as known. Contents that no run of shunt can have left are an error; contents
// that a killed run can have left are not. Slots in transition are assumed to be so since tick.
func newMirror(contents Contents, tick uint32) (mirror, error) {
	m := mirror{
		backends:  map[uint32]*mirrorBackend{},
		byAddress: map[model.BackendAddress]uint32{},
		services:  map[uint32]*mirrorService{},
		byKey:     map[serviceKey]uint32{},
		frontends: map[model.Frontend]mirrorFrontend{},
		addresses: map[netip.Addr]mirrorAddress{},
		filters:   map[Filter]mirrorFilter{},
		remnants:  map[uint32]bool{},
		merging:   map[uint32]serviceKey{},
		naming:    map[BackendRef]int{},
		changed:   map[uint32]BackendRecord{},
		unsettled: map[uint32]bool{},
		// An earlier run may have freed something without waiting.
		graceOwed: len(contents.Services)+len(contents.ServiceGenerations)+
			len(contents.Backends)+len(contents.BackendGenerations) > 0,
		rerouted: len(contents.Services) > 0,
	}
	backendGenerations := map[uint32]uint8{}
	for _, index := range slices.Sorted(maps.Keys(contents.Backends)) {
		record := contents.Backends[index]
		m.changes(index)
		m.backends[index] = &mirrorBackend{BackendRecord: record}
		backendGenerations[index] = record.Generation
		if _, ok := m.byAddress[record.BackendAddress]; !ok {
			m.byAddress[record.BackendAddress] = index
		}
	}
	serviceGenerations := map[uint32]uint8{}
	for _, index := range slices.Sorted(maps.Keys(contents.Services)) {
		record := contents.Services[index]
		service := &mirrorService{record: record, before: contents.BeforeSlots[index]}
		if err := checkSlots(record, contents.Slots[index], contents.BeforeSlots[index]); err != nil {
			return m, fmt.Errorf("service %q at index %d %w: stop forwarding and start afresh with `shunt uninstall`",
				record.Name, index, err)
		}
		m.setSlots(service, contents.Slots[index])
		service.begin(tick)
		m.services[index] = service
		m.note(index)
		serviceGenerations[index] = record.Generation
		if record.Remnant() {
			service.remnant = &remnant{}
			m.remnants[index] = true
		} else if _, ok := m.byKey[keyOf(record)]; !ok {
			m.byKey[keyOf(record)] = index
		}
	}
	m.adoptRemnants(tick)
	if err := m.checkRegions(); err != nil {
		return m, err
	}
	for f, service := range contents.Frontends {
		m.frontends[f] = mirrorFrontend{services: []uint32{service}}
	}
	for address, record := range contents.Addresses {
		m.addresses[address] = mirrorAddress{AddressRecord: record}
	}
	for f, allow := range contents.Filters {
		m.filters[f] = mirrorFilter{allow: allow}
	}
	m.backendPositions = newPositions(1, backendGenerations, contents.BackendGenerations)
	m.servicePositions = newPositions(0, serviceGenerations, contents.ServiceGenerations)
	return m, nil
}

// checkSlots returns an error, in words that follow the service's name, if the slots do not match the record.
func checkSlots(record ServiceRecord, slots, before Table) error {
	if len(slots) != int(record.Size) {
		return fmt.Errorf("has %d slots, but its record says %d", len(slots), record.Size)
	}
	if len(before) != int(record.BeforeSize) {
		return fmt.Errorf("has %d slots in the table before, but its record says %d", len(before), record.BeforeSize)
	}
	for i, slot := range slots.All() {
		switch {
		case slot.State > Marked:
			return fmt.Errorf("has slot %d in state %d, which does not exist", i, slot.State)
		case slot.PreviousBefore && record.BeforeSize == 0 && record.tracked():
			return fmt.Errorf("has slot %d that refers to an earlier table, but there is none", i)
		}
	}
	return nil
}

// checkRegions returns an error if two tables share slots: changing one in place would change the other.
func (m *mirror) checkRegions() error {
	type owned struct {
		region
		name string
	}
	var all []owned
	for _, service := range m.services {
		for _, r := range service.regions() {
			all = append(all, owned{r, service.record.Name})
		}
	}
	slices.SortFunc(all, func(a, b owned) int {
		return cmp.Or(cmp.Compare(a.offset, b.offset), cmp.Compare(a.name, b.name))
	})
	for i := 1; i < len(all); i++ {
		last, next := all[i-1], all[i]
		if last.offset+last.size > next.offset {
			return fmt.Errorf("services %q and %q share slot %d: stop forwarding and start afresh with `shunt uninstall`",
				last.name, next.name, next.offset)
		}
	}
	return nil
}

// regions returns every part of the slot array that a record may point to or refer to, each once.
func (s *mirrorService) regions() []region {
	var all []region
	add := func(r region) {
		if r.size > 0 && !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	add(s.record.table())
	add(s.record.before())
	for _, held := range s.held {
		add(held.region)
	}
	return all
}

// inDoubt adds every backend that the service's slots may name in addition to the known ones. The table before
// does not count: programs detect by the generation that a backend in it is gone.
func (s *mirrorService) inDoubt(into map[BackendRef]bool) {
	for ref := range s.stale {
		into[ref] = true
	}
	for _, held := range s.held {
		nameAll(held.slots, into)
	}
}

// changes records which backend was at a position, before it is replaced.
func (m *mirror) changes(index uint32) {
	if _, known := m.changed[index]; known {
		return
	}
	m.changed[index] = BackendRecord{}
	if was, ok := m.backends[index]; ok {
		m.changed[index] = was.BackendRecord
	}
}

// setSlots records the slots that a service has now, or may have.
func (m *mirror) setSlots(s *mirrorService, slots Table) {
	m.count(s, -1)
	s.setSlots(slots)
	m.count(s, 1)
}

// count adds the service to the services that name a backend, or with -1 removes it.
func (m *mirror) count(s *mirrorService, sign int) {
	for _, ref := range s.named {
		if m.naming[ref] += sign; m.naming[ref] == 0 {
			delete(m.naming, ref)
		}
	}
}

// note finds out whether the service at a position is settled. Every change of the service is followed by a
// call.
func (m *mirror) note(index uint32) {
	s, ok := m.services[index]
	settled := !ok || !s.doubt && !s.slotsDoubt && !s.leaving && s.record.BeforeSize == 0 &&
		s.tally.transition+s.tally.closing+s.tally.marked == 0
	if settled {
		delete(m.unsettled, index)
	} else {
		m.unsettled[index] = true
	}
}
