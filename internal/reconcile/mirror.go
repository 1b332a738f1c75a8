package reconcile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/model"
)

// mirror is what the maps hold as far as we know. It is changed by the operations alone,
// before each one to "in doubt" and after it, if it succeeded, to "known".
type mirror struct {
	backends  map[uint32]*mirrorBackend
	byAddress map[model.BackendAddress]uint32
	services  map[uint32]*mirrorService
	byKey     map[serviceKey]uint32
	frontends map[model.Frontend]mirrorFrontend
	addresses map[netip.Addr]mirrorAddress

	backendPositions positions
	servicePositions positions
	// graceOwed: positions or regions became free since the last Grace.
	graceOwed bool
}

type mirrorBackend struct {
	BackendRecord
	doubt bool // it may be missing
}

type mirrorService struct {
	record ServiceRecord
	slots  []BackendRef // of record's region

	// doubt: the record may be missing, or still an earlier one with a table in held.
	doubt bool
	held  []heldTable
	// slotsDoubt: slots of record's region may still name what stale lists instead.
	slotsDoubt bool
	stale      []BackendRef
}

// heldTable is a table that the service's record may still point to.
type heldTable struct {
	region
	slots []BackendRef
}

type mirrorFrontend struct {
	services []uint32 // it names one of them; more than one is doubt
	doubt    bool     // it may be missing
}

type mirrorAddress struct {
	AddressRecord
	doubt bool // flags that are set may not be, or the record may be missing
}

// newMirror takes the contents for known. What no run of ours can have left behind is
// an error; what one that was killed can, is not.
func newMirror(contents Contents) (mirror, error) {
	m := mirror{
		backends:  map[uint32]*mirrorBackend{},
		byAddress: map[model.BackendAddress]uint32{},
		services:  map[uint32]*mirrorService{},
		byKey:     map[serviceKey]uint32{},
		frontends: map[model.Frontend]mirrorFrontend{},
		addresses: map[netip.Addr]mirrorAddress{},
		// A run before this one may have freed something and not waited.
		graceOwed: len(contents.Services)+len(contents.ServiceGenerations)+
			len(contents.Backends)+len(contents.BackendGenerations) > 0,
	}
	backendGenerations := map[uint32]uint8{}
	for _, index := range slices.Sorted(maps.Keys(contents.Backends)) {
		record := contents.Backends[index]
		m.backends[index] = &mirrorBackend{BackendRecord: record}
		backendGenerations[index] = record.Generation
		if _, ok := m.byAddress[record.BackendAddress]; !ok {
			m.byAddress[record.BackendAddress] = index
		}
	}
	serviceGenerations := map[uint32]uint8{}
	for _, index := range slices.Sorted(maps.Keys(contents.Services)) {
		record := contents.Services[index]
		service := &mirrorService{record: record, slots: slices.Clone(contents.Slots[index])}
		if len(service.slots) != int(record.Size) {
			return m, fmt.Errorf("service %q at index %d has %d slots, but its record says %d: "+
				"stop forwarding and start afresh with `shunt uninstall`", record.Name, index, len(service.slots), record.Size)
		}
		m.services[index] = service
		serviceGenerations[index] = record.Generation
		if _, ok := m.byKey[keyOf(record)]; !ok {
			m.byKey[keyOf(record)] = index
		}
	}
	if err := m.checkRegions(); err != nil {
		return m, err
	}
	for f, service := range contents.Frontends {
		m.frontends[f] = mirrorFrontend{services: []uint32{service}}
	}
	for address, record := range contents.Addresses {
		m.addresses[address] = mirrorAddress{AddressRecord: record}
	}
	m.backendPositions = newPositions(1, backendGenerations, contents.BackendGenerations)
	m.servicePositions = newPositions(0, serviceGenerations, contents.ServiceGenerations)
	return m, nil
}

// checkRegions is an error if two services share slots: changing one in place would
// change the other.
func (m *mirror) checkRegions() error {
	var last *mirrorService
	services := slices.SortedFunc(maps.Values(m.services), func(a, b *mirrorService) int {
		return int(a.record.Offset) - int(b.record.Offset)
	})
	for _, service := range services {
		if service.record.Size == 0 {
			continue
		}
		if last != nil && last.record.Offset+last.record.Size > service.record.Offset {
			return fmt.Errorf("services %q and %q share slot %d: stop forwarding and start afresh with `shunt uninstall`",
				last.record.Name, service.record.Name, service.record.Offset)
		}
		last = service
	}
	return nil
}

// regions is every part of the slot array that a record may point to.
func (s *mirrorService) regions() []region {
	var all []region
	if s.record.Size > 0 {
		all = append(all, region{s.record.Offset, s.record.Size})
	}
	for _, held := range s.held {
		if held.size > 0 {
			all = append(all, held.region)
		}
	}
	return all
}

// names adds every backend that a slot of the service may name.
func (s *mirrorService) names(into map[BackendRef]bool) {
	for _, ref := range s.slots {
		into[ref] = true
	}
	for _, ref := range s.stale {
		into[ref] = true
	}
	for _, held := range s.held {
		for _, ref := range held.slots {
			into[ref] = true
		}
	}
}
