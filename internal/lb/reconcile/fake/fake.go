// Package fake is the maps of the data plane in memory, for tests. They fail when told
// to, and after every single operation they check that a program running at that moment
// would find nothing wrong: see check.go.
package fake

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// Fault is how an operation fails.
type Fault int

// The faults there are.
const (
	None   Fault = iota
	Before       // fails and has done nothing
	After        // fails, but has been carried out
	Half         // fails; of WriteSlots the first half has been carried out, of others nothing
)

// ErrInjected is the error of an operation that was told to fail.
var ErrInjected = errors.New("injected fault")

// Forget begins the operation of writing slots of a table before.
const Forget = "forget in slots"

// EndStrays is the operation of that name.
const EndStrays = "end strays"

// Maps is an implementation of reconcile.Maps. Its methods follow that contract; it is
// not safe for concurrent use.
type Maps struct {
	// Fault is asked before every operation but Contents; nil: none fails.
	Fault func(operation string) Fault
	// Operations are those carried out or failed, in words.
	Operations []string
	// Violations are the breaches of the reconciler's order found so far.
	Violations []string

	limits    model.Limits
	backends  map[uint32]reconcile.BackendRecord
	services  map[uint32]reconcile.ServiceRecord
	frontends map[model.Frontend]uint32
	addresses map[netip.Addr]reconcile.AddressRecord
	filters   map[reconcile.Filter]bool
	lent      map[[2]tenant]bool // from and to: a frontend has gone from one service to another
	slots     []reconcile.Slot
	program   // the flows it remembers

	lastBackends map[uint32]reconcile.BackendRecord // present or last tenant
	lastServices map[uint32]reconcile.ServiceRecord
	trackedTable map[uint32]part // the last table of a service that was tracked with it
	held                         // what a program may still hold
}

// tenant is who has a position of services.
type tenant struct {
	index      uint32
	generation uint8
}

// held are the entries that a program may have seen that began before now and after the last Grace.
type held struct {
	named    map[reconcile.BackendRef]bool // by a slot of a living service
	backends map[uint32]bool               // positions that were deleted
	services map[uint32]bool
	filters  map[[2]uint32]bool // services that filter, by index and generation
	slots    map[uint32]bool    // of tables no record points to or refers to any more
}

var _ reconcile.Maps = (*Maps)(nil)

// New is empty maps of the given sizes.
func New(limits model.Limits) *Maps {
	m := &Maps{
		limits:       limits,
		backends:     map[uint32]reconcile.BackendRecord{},
		services:     map[uint32]reconcile.ServiceRecord{},
		frontends:    map[model.Frontend]uint32{},
		lent:         map[[2]tenant]bool{},
		addresses:    map[netip.Addr]reconcile.AddressRecord{},
		filters:      map[reconcile.Filter]bool{},
		slots:        make([]reconcile.Slot, limits.Slots),
		program:      newProgram(),
		lastBackends: map[uint32]reconcile.BackendRecord{},
		lastServices: map[uint32]reconcile.ServiceRecord{},
		trackedTable: map[uint32]part{},
	}
	m.forget()
	return m
}

// Contents is a copy of everything.
func (m *Maps) Contents() (reconcile.Contents, error) {
	c := reconcile.Contents{
		Backends:           maps.Clone(m.backends),
		Services:           maps.Clone(m.services),
		Frontends:          maps.Clone(m.frontends),
		Addresses:          maps.Clone(m.addresses),
		Filters:            maps.Clone(m.filters),
		Slots:              map[uint32]reconcile.Table{},
		BeforeSlots:        map[uint32]reconcile.Table{},
		BackendGenerations: map[uint32]uint8{},
		ServiceGenerations: map[uint32]uint8{},
	}
	for index, service := range m.services {
		c.Slots[index] = reconcile.NewTable(m.slots[service.Offset : service.Offset+service.Size])
		if service.BeforeSize > 0 {
			c.BeforeSlots[index] = reconcile.NewTable(m.slots[service.BeforeOffset : service.BeforeOffset+service.BeforeSize])
		}
	}
	for index, last := range m.lastBackends {
		if _, ok := m.backends[index]; !ok {
			c.BackendGenerations[index] = last.Generation
		}
	}
	for index, last := range m.lastServices {
		if _, ok := m.services[index]; !ok {
			c.ServiceGenerations[index] = last.Generation
		}
	}
	return c, nil
}

// do carries an operation out, with its fault and the check afterwards. half is the part of
// it happens in a Half fault; nil: nothing.
func (m *Maps) do(operation string, effect, half func()) error {
	m.Operations = append(m.Operations, operation)
	fault := None
	if m.Fault != nil {
		fault = m.Fault(operation)
	}
	switch {
	case fault == None || fault == After:
		effect()
	case fault == Half && half != nil:
		half()
	}
	m.check(operation)
	if fault != None {
		return fmt.Errorf("%s: %w", operation, ErrInjected)
	}
	return nil
}

// PutBackend is part of reconcile.Maps.
func (m *Maps) PutBackend(record reconcile.BackendRecord) error {
	operation := fmt.Sprintf("put backend %d/%d %s", record.Index, record.Generation, record.BackendAddress)
	if record.Draining {
		operation += " draining"
	}
	if record.Down {
		operation += " down"
	}
	m.checkPutBackend(operation, record)
	return m.do(operation, func() {
		m.backends[record.Index], m.lastBackends[record.Index] = record, record
	}, nil)
}

// DeleteBackend is part of reconcile.Maps.
func (m *Maps) DeleteBackend(ref reconcile.BackendRef) error {
	operation := fmt.Sprintf("delete backend %d/%d", ref.Index, ref.Generation)
	m.checkDeleteBackend(operation, ref)
	return m.do(operation, func() {
		if _, present := m.backends[ref.Index]; present {
			delete(m.backends, ref.Index)
			m.held.backends[ref.Index] = true
		}
	}, nil)
}

// PutService is part of reconcile.Maps.
func (m *Maps) PutService(record reconcile.ServiceRecord) error {
	operation := fmt.Sprintf("put service %d/%d %s slots %d+%d",
		record.Index, record.Generation, record.Name, record.Offset, record.Size)
	if record.BeforeSize > 0 {
		operation += fmt.Sprintf(" before %d+%d", record.BeforeOffset, record.BeforeSize)
	}
	m.checkPutService(operation, record)
	return m.do(operation, func() {
		m.abandon(m.services[record.Index], record)
		m.services[record.Index], m.lastServices[record.Index] = record, record
		if isTracked(record) {
			m.trackedTable[record.Index] = parts(record)[0]
		}
	}, nil)
}

// DeleteService is part of reconcile.Maps.
func (m *Maps) DeleteService(index uint32, generation uint8) error {
	operation := fmt.Sprintf("delete service %d/%d", index, generation)
	m.checkDeleteService(operation, index, generation)
	return m.do(operation, func() {
		if service, present := m.services[index]; present {
			m.abandon(service, reconcile.ServiceRecord{})
			delete(m.services, index)
			m.held.services[index] = true
		}
	}, nil)
}

// PutFrontend is part of reconcile.Maps.
func (m *Maps) PutFrontend(f model.Frontend, service uint32) error {
	return m.do(fmt.Sprintf("put frontend %s service %d", f, service), func() {
		if former, ok := m.frontends[f]; ok {
			m.lent[[2]tenant{m.tenant(former), m.tenant(service)}] = true
		}
		m.frontends[f] = service
	}, nil)
}

func (m *Maps) tenant(service uint32) tenant {
	return tenant{service, m.services[service].Generation}
}

// Lent reports whether flows that name a service may be those of the one that is at this position now: it, or what is a
// remnant now, has got a frontend of the service, and both translate.
func (m *Maps) Lent(from reconcile.ServiceRecord, to uint32) bool {
	receiver := m.services[to]
	if !translatesAlone(from) || !translatesAlone(receiver) {
		return false
	}
	seen := map[tenant]bool{}
	var reaches func(at tenant) bool
	reaches = func(at tenant) bool {
		if seen[at] {
			return false
		}
		seen[at] = true
		for pair := range m.lent {
			next := pair[1]
			if pair[0] == at && m.tenant(next.index) == next && (next == m.tenant(to) || (from.Remnant() || m.services[next.index].Remnant()) && reaches(next)) {
				return true
			}
		}
		return false
	}
	return reaches(tenant{from.Index, from.Generation})
}

// DeleteFrontend is part of reconcile.Maps.
func (m *Maps) DeleteFrontend(f model.Frontend) error {
	operation := fmt.Sprintf("delete frontend %s", f)
	m.checkDeleteFrontend(operation, f)
	return m.do(operation, func() { delete(m.frontends, f) }, nil)
}

// PutFilter is part of reconcile.Maps.
func (m *Maps) PutFilter(f reconcile.Filter, allow bool) error {
	operation := fmt.Sprintf("put filter %s service %d/%d allow %v", f.Prefix, f.Service, f.Generation, allow)
	return m.do(operation, func() { m.filters[f] = allow }, nil)
}

// DeleteFilter is part of reconcile.Maps.
func (m *Maps) DeleteFilter(f reconcile.Filter) error {
	operation := fmt.Sprintf("delete filter %s service %d/%d", f.Prefix, f.Service, f.Generation)
	m.checkDeleteFilter(operation, f)
	return m.do(operation, func() { delete(m.filters, f) }, nil)
}

// PutAddress is part of reconcile.Maps.
func (m *Maps) PutAddress(record reconcile.AddressRecord) error {
	operation := fmt.Sprintf("put address %s vip %v source %v", record.Address, record.VIP, record.Source)
	m.checkPutAddress(operation, record)
	return m.do(operation, func() { m.addresses[record.Address] = record }, nil)
}

// DeleteAddress is part of reconcile.Maps.
func (m *Maps) DeleteAddress(address netip.Addr) error {
	return m.do(fmt.Sprintf("delete address %s", address), func() { delete(m.addresses, address) }, nil)
}

// WriteSlots is part of reconcile.Maps.
func (m *Maps) WriteSlots(offset uint32, slots reconcile.Table) error {
	operation := fmt.Sprintf("write slots %d+%d", offset, len(slots))
	for _, service := range m.services {
		if offset >= service.BeforeOffset && offset < service.BeforeOffset+service.BeforeSize {
			operation = fmt.Sprintf("%s %d+%d", Forget, offset, len(slots))
		}
	}
	m.checkWriteSlots(operation, offset, slots)
	write := func(slots reconcile.Table) {
		for i, slot := range slots.All() {
			at := offset + uint32(i)
			if slot.State != m.slots[at].State {
				delete(m.finished, at)
			}
			m.slots[at] = slot
		}
	}
	return m.do(operation, func() { write(slots) }, func() { write(slots[:len(slots)/2]) })
}

// ScanRemembered is part of reconcile.Maps.
func (m *Maps) ScanRemembered() (map[uint32]bool, error) {
	var found map[uint32]bool
	err := m.do("scan remembered", func() { found = m.scan() }, nil)
	if err != nil {
		return nil, err
	}
	return found, nil
}

// ServiceFlows is part of reconcile.Maps.
func (m *Maps) ServiceFlows() (map[uint32]uint64, error) {
	flows := map[uint32]uint64{}
	err := m.do("count flows", func() {
		for _, e := range m.translated {
			if m.follows(e) {
				flows[e.Service]++
			}
		}
	}, nil)
	return flows, err
}

// EndStrays is part of reconcile.Maps.
func (m *Maps) EndStrays(members []reconcile.Member) error {
	return m.do(EndStrays, func() { m.endStrays(members) }, nil)
}

// Grace is part of reconcile.Maps.
func (m *Maps) Grace() error {
	return m.do("grace", func() {
		m.finishRuns()
		m.forget()
		for at, slot := range m.slots {
			if slot.State == reconcile.Closing && m.finished[uint32(at)] == notFinished {
				m.finished[uint32(at)] = graceFinished
			}
		}
	}, nil)
}
