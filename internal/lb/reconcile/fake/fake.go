// Package fake keeps the maps of the data plane in memory, for tests. Operations fail on request. After every
// single operation the package checks that a program running at that moment would find a consistent state: see
// check.go.
package fake

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// Fault says how an operation fails.
type Fault int

// The faults.
const (
	None   Fault = iota
	Before       // the operation fails and has no effect
	After        // the operation fails, but has taken effect
	Half         // the operation fails; WriteSlots has written the first half, other operations have no effect
)

// ErrInjected is the error of an operation that fails on request.
var ErrInjected = errors.New("injected fault")

// Forget begins the operation of writing slots of a table before.
const Forget = "forget in slots"

// EndStrays is the operation of that name.
const EndStrays = "end strays"

// Maps implements reconcile.Maps. Its methods follow that contract; it is not safe for concurrent use.
type Maps struct {
	// Fault is called before every operation except Contents; nil: no operation fails.
	Fault func(operation string) Fault
	// Operations lists the operations that were run or failed, in words.
	Operations []string
	// Violations are the breaches of the reconciler's order that were found so far.
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
	held                         // entries that a program may still hold
}

// tenant is the service that has a position.
type tenant struct {
	index      uint32
	generation uint8
}

// held are the entries that a program that began before now and after the last Grace may have seen.
type held struct {
	named    map[reconcile.BackendRef]bool // by a slot of a living service
	backends map[uint32]bool               // positions that were deleted
	services map[uint32]bool
	filters  map[[2]uint32]bool // services that filter, by index and generation
	slots    map[uint32]bool    // of tables no record points to or refers to any more
}

var _ reconcile.Maps = (*Maps)(nil)

// New returns empty maps of the given sizes.
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

// Contents returns a copy of everything.
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

// do runs an operation, with its fault, and checks the maps afterwards. half is the part of the operation that
// a Half fault runs; nil: nothing.
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

// PutBackend implements reconcile.Maps.
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

// DeleteBackend implements reconcile.Maps.
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

// PutService implements reconcile.Maps.
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

// DeleteService implements reconcile.Maps.
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

// PutFrontend implements reconcile.Maps.
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

// Lent reports whether flows that name a service may belong to the service that is at this position now: that
// service, or a present remnant, has got a frontend of the named service, and both translate.
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

// DeleteFrontend implements reconcile.Maps.
func (m *Maps) DeleteFrontend(f model.Frontend) error {
	operation := fmt.Sprintf("delete frontend %s", f)
	m.checkDeleteFrontend(operation, f)
	return m.do(operation, func() { delete(m.frontends, f) }, nil)
}

// PutFilter implements reconcile.Maps.
func (m *Maps) PutFilter(f reconcile.Filter, allow bool) error {
	operation := fmt.Sprintf("put filter %s service %d/%d allow %v", f.Prefix, f.Service, f.Generation, allow)
	return m.do(operation, func() { m.filters[f] = allow }, nil)
}

// DeleteFilter implements reconcile.Maps.
func (m *Maps) DeleteFilter(f reconcile.Filter) error {
	operation := fmt.Sprintf("delete filter %s service %d/%d", f.Prefix, f.Service, f.Generation)
	m.checkDeleteFilter(operation, f)
	return m.do(operation, func() { delete(m.filters, f) }, nil)
}

// PutAddress implements reconcile.Maps.
func (m *Maps) PutAddress(record reconcile.AddressRecord) error {
	operation := fmt.Sprintf("put address %s vip %v source %v", record.Address, record.VIP, record.Source)
	m.checkPutAddress(operation, record)
	return m.do(operation, func() { m.addresses[record.Address] = record }, nil)
}

// DeleteAddress implements reconcile.Maps.
func (m *Maps) DeleteAddress(address netip.Addr) error {
	return m.do(fmt.Sprintf("delete address %s", address), func() { delete(m.addresses, address) }, nil)
}

// WriteSlots implements reconcile.Maps.
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

// ScanRemembered implements reconcile.Maps.
func (m *Maps) ScanRemembered() (map[uint32]bool, error) {
	var found map[uint32]bool
	err := m.do("scan remembered", func() { found = m.scan() }, nil)
	if err != nil {
		return nil, err
	}
	return found, nil
}

// ServiceFlows implements reconcile.Maps.
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

// EndStrays implements reconcile.Maps.
func (m *Maps) EndStrays(members []reconcile.Member) error {
	return m.do(EndStrays, func() { m.endStrays(members) }, nil)
}

// Grace implements reconcile.Maps.
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
