package fake

import (
	"fmt"

	"github.com/shunt-lb/shunt/internal/model"
	"github.com/shunt-lb/shunt/internal/reconcile"
)

// The rules, each as a program would suffer from its breach:
//
//   - no slot of a living service names a backend that is missing or of another
//     generation, whatever has just happened;
//   - no frontend names a missing service;
//   - living services have no slot in common;
//   - a position gets another tenant only with another generation, and only after a
//     Grace since the last one was deleted;
//   - a backend is deleted only if no slot has named it since the last Grace;
//   - slots that a record pointed to are written again only after a Grace;
//   - a VIP is put when it has a frontend, and loses its last one after it is withdrawn.
//     A range of ports may go before, because another in its place may share parts of it.

func (m *Maps) violation(operation, format string, arguments ...any) {
	m.Violations = append(m.Violations, operation+": "+fmt.Sprintf(format, arguments...))
}

// forget is what a Grace means: programs hold only what is there now.
func (m *Maps) forget() {
	m.held = held{
		named:    map[reconcile.BackendRef]bool{},
		backends: map[uint32]bool{},
		services: map[uint32]bool{},
		slots:    map[uint32]bool{},
	}
	m.hold()
}

// hold notes every backend that a slot of a living service names now.
func (m *Maps) hold() {
	for _, service := range m.services {
		for _, ref := range m.slots[service.Offset : service.Offset+service.Size] {
			m.held.named[ref] = true
		}
	}
}

// abandon notes that the service's record no longer points to its slots.
func (m *Maps) abandon(old reconcile.ServiceRecord) {
	for slot := old.Offset; slot < old.Offset+old.Size; slot++ {
		m.held.slots[slot] = true
	}
}

// check looks at everything a program could find now.
func (m *Maps) check(operation string) {
	for index, service := range m.services {
		for other, beside := range m.services {
			if other > index && service.Offset < beside.Offset+beside.Size && beside.Offset < service.Offset+service.Size {
				m.violation(operation, "services %d and %d share slot %d", index, other, max(service.Offset, beside.Offset))
			}
		}
		var seen reconcile.BackendRef
		for i, ref := range m.slots[service.Offset : service.Offset+service.Size] {
			if i > 0 && ref == seen {
				continue
			}
			seen = ref
			if backend, ok := m.backends[ref.Index]; !ok || backend.BackendRef != ref {
				m.violation(operation, "slot %d of service %d names backend %d/%d, which is not there",
					int(service.Offset)+i, index, ref.Index, ref.Generation)
				break
			}
		}
	}
	for f, service := range m.frontends {
		if _, ok := m.services[service]; !ok {
			m.violation(operation, "frontend %s names service %d, which is not there", f, service)
		}
	}
	m.hold()
}

func (m *Maps) checkPutBackend(operation string, record reconcile.BackendRecord) {
	if record.Index == 0 || record.Generation == 0 || record.Index > m.limits.Backends {
		m.violation(operation, "no backend can be there")
	}
	last, ok := m.lastBackends[record.Index]
	_, present := m.backends[record.Index]
	switch {
	case !ok || last == record:
	case present:
		m.violation(operation, "%s is there", last.BackendAddress)
	case last.Generation == record.Generation:
		m.violation(operation, "%s had the same generation", last.BackendAddress)
	case m.held.backends[record.Index]:
		m.violation(operation, "no grace since %s was deleted", last.BackendAddress)
	}
}

func (m *Maps) checkDeleteBackend(operation string, ref reconcile.BackendRef) {
	if m.held.named[ref] {
		m.violation(operation, "a slot has named it since the last grace")
	}
	if backend, ok := m.backends[ref.Index]; ok && backend.BackendRef != ref {
		m.violation(operation, "generation %d is there", backend.Generation)
	}
}

func (m *Maps) checkPutService(operation string, record reconcile.ServiceRecord) {
	if record.Index >= m.limits.Services || record.Generation == 0 {
		m.violation(operation, "no service can be there")
	}
	if uint64(record.Offset)+uint64(record.Size) > uint64(m.limits.Slots) {
		m.violation(operation, "there are %d slots", m.limits.Slots)
	}
	last, ok := m.lastServices[record.Index]
	_, present := m.services[record.Index]
	same := last.Generation == record.Generation && last.Name == record.Name && last.Seed == record.Seed
	switch {
	case !ok || same:
	case present:
		m.violation(operation, "%s is there", last.Name)
	case last.Generation == record.Generation:
		m.violation(operation, "%s had the same generation", last.Name)
	case m.held.services[record.Index]:
		m.violation(operation, "no grace since %s was deleted", last.Name)
	}
}

func (m *Maps) checkDeleteService(operation string, index uint32, generation uint8) {
	if service, ok := m.services[index]; ok && service.Generation != generation {
		m.violation(operation, "generation %d is there", service.Generation)
	}
}

func (m *Maps) checkDeleteFrontend(operation string, f model.Frontend) {
	if _, ok := m.frontends[f]; !ok || !m.addresses[f.Address].VIP {
		return
	}
	if !f.Ports.Exact() && f.Ports != model.AnyPort {
		return
	}
	for other := range m.frontends {
		if other != f && other.Address == f.Address {
			return
		}
	}
	m.violation(operation, "the address is a VIP and has no other")
}

func (m *Maps) checkPutAddress(operation string, record reconcile.AddressRecord) {
	if !record.VIP || m.addresses[record.Address].VIP {
		return
	}
	for f := range m.frontends {
		if f.Address == record.Address {
			return
		}
	}
	m.violation(operation, "the VIP has no frontend")
}

func (m *Maps) checkWriteSlots(operation string, offset uint32, count int) {
	if uint64(offset)+uint64(count) > uint64(len(m.slots)) {
		m.violation(operation, "there are %d slots", len(m.slots))
		panic(operation + ": out of range")
	}
	for slot := offset; slot < offset+uint32(count); slot++ {
		if m.held.slots[slot] {
			m.violation(operation, "no grace since slot %d belonged to a table", slot)
			return
		}
	}
}
