package fake

import (
	"fmt"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// The rules, each worded by the harm that its breach does to a program:
//
//   - no slot of a living service names a backend that is missing or of another
//     generation, after any operation;
//   - no frontend names a missing service;
//   - living services have no slot in common;
//   - a position gets another tenant only with another generation, and only after a
//     Grace since the last one was deleted;
//   - a backend is deleted only if no slot has named it since the last Grace;
//   - slots that a record pointed to, or referred to as the table before, are written
//     again only after a Grace, and the table before not while a record refers to it;
//   - in a tracked service, a slot leaves its transition only through closing, then a
//     Grace, then a scan, and is not settled while a remembered flow disagrees with it;
//   - the previous backend of a slot is the current one at the beginning of its
//     transition, and may only be removed later;
//   - a service that filters has a prefix of length 0, for sources in no list, and loses
//     its last one only after a Grace since it stopped filtering;
//   - there are no more prefixes than there is room for;
//   - a VIP is put when it has a frontend of clients, and loses its last one after it is withdrawn.
//     A range of ports may be removed earlier, because another range that replaces it may share parts of it.

func (m *Maps) violation(operation, format string, arguments ...any) {
	m.Violations = append(m.Violations, operation+": "+fmt.Sprintf(format, arguments...))
}

// forget applies the effect of a Grace: programs hold only the present entries.
func (m *Maps) forget() {
	m.held = held{
		named:    map[reconcile.BackendRef]bool{},
		backends: map[uint32]bool{},
		services: map[uint32]bool{},
		filters:  map[[2]uint32]bool{},
		slots:    map[uint32]bool{},
	}
	m.hold()
}

// hold records every backend that a slot of a living service names now.
func (m *Maps) hold() {
	var names []reconcile.BackendRef // few, so that comparing them all is quicker than a hash for each slot
	for _, service := range m.services {
		if service.Policy.Filters {
			m.held.filters[[2]uint32{service.Index, uint32(service.Generation)}] = true
		}
		for _, slot := range m.slots[service.Offset : service.Offset+service.Size] {
			for _, ref := range [...]reconcile.BackendRef{slot.Current, slot.Previous} {
				if !slices.Contains(names, ref) {
					names = append(names, ref)
				}
			}
		}
	}
	for _, ref := range names {
		m.held.named[ref] = true
	}
}

// part is a part of the slot array: offset and size.
type part [2]uint32

// parts returns the table that a record points to, and the table before that it refers to.
func parts(record reconcile.ServiceRecord) []part {
	return []part{{record.Offset, record.Size}, {record.BeforeOffset, record.BeforeSize}}
}

// abandon notes that the record now points and refers to other slots than before.
func (m *Maps) abandon(old, record reconcile.ServiceRecord) {
	for _, p := range parts(old) {
		if slices.Contains(parts(record), p) {
			continue
		}
		for slot := p[0]; slot < p[0]+p[1]; slot++ {
			m.held.slots[slot] = true
		}
	}
}

// check examines everything that a program could find now.
func (m *Maps) check(operation string) {
	for index, service := range m.services {
		for other, beside := range m.services {
			m.checkShared(operation, index, other, service, beside)
		}
		m.checkNames(operation, service)
		if service.Policy.Filters && !m.filtersRest(service.Index, service.Generation) {
			m.violation(operation, "service %d filters, but says nothing of sources in no list", index)
		}
	}
	listed := 0
	for f := range m.filters {
		if f.Prefix.Bits() > 0 {
			listed++
		}
	}
	if listed > 2*int(m.limits.Filters) {
		m.violation(operation, "%d prefixes, there is room for %d", listed, 2*m.limits.Filters)
	}
	for f, service := range m.frontends {
		if _, ok := m.services[service]; !ok {
			m.violation(operation, "frontend %s names service %d, which is not there", f, service)
		}
	}
	m.hold()
}

// checkShared finds parts of the slot array that belong to two services, or twice to one.
func (m *Maps) checkShared(operation string, index, other uint32, service, beside reconcile.ServiceRecord) {
	for i, a := range parts(service) {
		for j, b := range parts(beside) {
			if (other > index || other == index && j > i) && a[0] < b[0]+b[1] && b[0] < a[0]+a[1] {
				m.violation(operation, "services %d and %d share slot %d", index, other, max(a[0], b[0]))
			}
		}
	}
}

// checkNames finds slots that name missing backends.
func (m *Maps) checkNames(operation string, service reconcile.ServiceRecord) {
	var seen reconcile.Slot
	for i, slot := range m.slots[service.Offset : service.Offset+service.Size] {
		if i > 0 && slot == seen {
			continue
		}
		seen = slot
		if slot.PreviousBefore && service.BeforeSize == 0 && isTracked(service) {
			m.violation(operation, "slot %d of service %d refers to a table before, which is not there",
				int(service.Offset)+i, service.Index)
			return
		}
		for role, ref := range []reconcile.BackendRef{slot.Current, slot.Previous} {
			// Most slots have no previous backend, and slots of a tracked service have no current backend if
			// all backends drain.
			may := role == 1 || m.trackedTable[service.Index] == parts(service)[0]
			if ref == (reconcile.BackendRef{}) && may || m.lives(ref) {
				continue
			}
			m.violation(operation, "slot %d of service %d names backend %d/%d, which is not there",
				int(service.Offset)+i, service.Index, ref.Index, ref.Generation)
			return
		}
	}
}

// filtersRest reports whether a service's lists decide about sources that are in no list.
func (m *Maps) filtersRest(index uint32, generation uint8) bool {
	for f := range m.filters {
		if f.Service == index && f.Generation == generation && f.Prefix.Bits() == 0 {
			return true
		}
	}
	return false
}

func (m *Maps) checkDeleteFilter(operation string, f reconcile.Filter) {
	if f.Prefix.Bits() == 0 && m.held.filters[[2]uint32{f.Service, uint32(f.Generation)}] {
		m.violation(operation, "the service has filtered since the last grace")
	}
}

func (m *Maps) lives(ref reconcile.BackendRef) bool {
	backend, ok := m.backends[ref.Index]
	return ok && backend.BackendRef == ref
}

func (m *Maps) checkPutBackend(operation string, record reconcile.BackendRecord) {
	if record.Index == 0 || record.Generation == 0 || record.Index > m.limits.Backends {
		m.violation(operation, "no backend can be there")
	}
	last, ok := m.lastBackends[record.Index]
	_, present := m.backends[record.Index]
	switch {
	case !ok || last.BackendRef == record.BackendRef && last.BackendAddress == record.BackendAddress:
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
	for _, p := range parts(record) {
		if uint64(p[0])+uint64(p[1]) > uint64(m.limits.Slots) {
			m.violation(operation, "there are %d slots", m.limits.Slots)
		}
	}
	last, ok := m.lastServices[record.Index]
	_, present := m.services[record.Index]
	same := last.Generation == record.Generation && last.Name == record.Name && last.Seed == record.Seed
	switch {
	case !ok || same:
	case present && last.Generation == record.Generation && canFollow(last, record): // an heir
	case present && last.Generation == record.Generation && last.Name == record.Name && last.Forwarding == record.Forwarding && record.Remnant():
		for f, index := range m.frontends {
			if index == record.Index {
				m.violation(operation, "the remnant has frontend %s", f)
			}
		}
	case present:
		m.violation(operation, "%s is there", last.Name)
	case last.Generation == record.Generation:
		m.violation(operation, "%s had the same generation", last.Name)
	case m.held.services[record.Index]:
		m.violation(operation, "no grace since %s was deleted", last.Name)
	}
}

// canFollow reports whether flows of a service stay with their backends when its position, and with it the seed
// of the flow hash, goes to another service: each flow has an entry.
func canFollow(last, record reconcile.ServiceRecord) bool {
	return last.Forwarding == record.Forwarding && translatesAlone(last) && translatesAlone(record)
}

// translatesAlone reports whether all of a service's flows are in the flow table.
func translatesAlone(s reconcile.ServiceRecord) bool {
	return !s.Forwarding.Direct() && s.AffinityTimeout == 0
}

func (m *Maps) checkDeleteService(operation string, index uint32, generation uint8) {
	if service, ok := m.services[index]; ok && service.Generation != generation {
		m.violation(operation, "generation %d is there", service.Generation)
	}
}

func (m *Maps) checkDeleteFrontend(operation string, f model.Frontend) {
	if _, ok := m.frontends[f]; !ok || f.Tunnelled() || !m.addresses[f.Address].VIP {
		return
	}
	if !f.Ports.Exact() && f.Ports != value.AnyPort {
		return
	}
	for other := range m.frontends {
		if other != f && other.Address == f.Address && !other.Tunnelled() {
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
		if f.Address == record.Address && !f.Tunnelled() {
			return
		}
	}
	m.violation(operation, "the VIP has no frontend")
}

func (m *Maps) checkWriteSlots(operation string, offset uint32, slots reconcile.Table) {
	end := uint64(offset) + uint64(len(slots))
	if end > uint64(len(m.slots)) {
		m.violation(operation, "there are %d slots", len(m.slots))
		panic(operation + ": out of range")
	}
	for slot := offset; uint64(slot) < end; slot++ {
		if m.held.slots[slot] {
			m.violation(operation, "no grace since slot %d belonged to a table", slot)
			return
		}
	}
	for _, service := range m.services {
		for at := max(offset, service.BeforeOffset); at < min(uint32(end), service.BeforeOffset+service.BeforeSize); at++ {
			if !forgets(m.slots[at], slots.At(int(at-offset))) {
				m.violation(operation, "service %d refers to slot %d as before", service.Index, at)
				break
			}
		}
		if !isTracked(service) {
			continue
		}
		for i, slot := range slots.All() {
			at := offset + uint32(i)
			if at < service.Offset || at >= service.Offset+service.Size {
				continue
			}
			if wrong := m.wrongStep(at, m.slots[at], slot); wrong != "" {
				m.violation(operation, "slot %d from %+v to %+v: %s", at, m.slots[at], slot, wrong)
				return
			}
		}
	}
}

// forgets reports whether a slot of a table before stays unchanged, or names no backend for flows without an
// entry.
func forgets(from, to reconcile.Slot) bool {
	if from == to {
		return true
	}
	if from.State == reconcile.Transition {
		from.Previous, from.PreviousDrains = reconcile.BackendRef{}, false
	} else {
		from.Current = reconcile.BackendRef{}
	}
	return from == to
}

// wrongStep describes the fault in such a change of a slot of a tracked service.
func (m *Maps) wrongStep(at uint32, from, to reconcile.Slot) string {
	switch {
	case to.State != reconcile.Transition && (to.Previous != reconcile.BackendRef{} || to.PreviousDrains || to.PreviousBefore):
		return "only a slot in transition has a previous backend"
	case to.PreviousBefore && to.Previous != reconcile.BackendRef{}:
		return "the previous backend is in two places"
	}
	same := from.Current == to.Current
	switch from.State {
	case reconcile.Transition:
		switch {
		case to.State == reconcile.Closing && same:
		case to.State != reconcile.Transition:
			return "a transition ends by closing"
		case to.PreviousBefore != from.PreviousBefore, to.Previous != from.Previous && to.Previous != reconcile.BackendRef{}:
			return "another previous backend"
		}
	case reconcile.Closing:
		switch {
		case !same:
			return "a closing slot keeps its current backend"
		case to.State == reconcile.Transition:
			return "what is closing is not opened again"
		case to.State != reconcile.Closing && m.finished[at] != scanFinished:
			return "no scan after a grace"
		case to.State == reconcile.Settled && m.disagrees(at):
			return "a remembered flow disagrees"
		}
	default:
		switch {
		case to.State == reconcile.Closing, to.State == reconcile.Marked && from.State == reconcile.Settled:
			return "it was in no transition"
		case to.State == reconcile.Settled && from.State == reconcile.Marked && (!same || m.disagrees(at)):
			return "a remembered flow disagrees"
		case to.State == reconcile.Transition && (to.PreviousBefore || to.Previous != from.Current || same):
			return "previous is the current one until now"
		}
	}
	return ""
}
