package reconcile

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// The operations, each with its effect on the mirror: doubt before, certainty after.

func (r *Reconciler) putBackend(record BackendRecord) error {
	m := &r.mirror
	m.changes(record.Index)
	entry := &mirrorBackend{BackendRecord: record, doubt: true}
	m.backends[record.Index] = entry
	m.byAddress[record.BackendAddress] = record.Index
	m.backendPositions.claim(record.Index, record.Generation)
	if err := r.maps.PutBackend(record); err != nil {
		return fmt.Errorf("put backend %s at index %d: %w", record.BackendAddress, record.Index, err)
	}
	entry.doubt = false
	return nil
}

func (r *Reconciler) deleteBackend(index uint32) error {
	m := &r.mirror
	entry := m.backends[index]
	entry.doubt = true
	if err := r.maps.DeleteBackend(entry.BackendRef); err != nil {
		return fmt.Errorf("delete backend %s at index %d: %w", entry.BackendAddress, index, err)
	}
	m.changes(index)
	delete(m.backends, index)
	if m.byAddress[entry.BackendAddress] == index {
		delete(m.byAddress, entry.BackendAddress)
	}
	m.backendPositions.release(index)
	m.graceOwed = true
	return nil
}

// putService points the service to record's region, which contains slots by now.
func (r *Reconciler) putService(record ServiceRecord, slots Table) error {
	m := &r.mirror
	defer m.note(record.Index)
	entry, ok := m.services[record.Index]
	if !ok {
		entry = &mirrorService{}
		m.setSlots(entry, slots)
		m.services[record.Index] = entry
		m.servicePositions.claim(record.Index, record.Generation)
	}
	old := entry.record
	if !record.Remnant() {
		if keyOf(old) != keyOf(record) && m.byKey[keyOf(old)] == record.Index { // the heir of the earlier service
			delete(m.byKey, keyOf(old))
		}
		m.byKey[keyOf(record)] = record.Index
		entry.remnant = nil
		delete(m.remnants, record.Index)
	}
	switch record.before() {
	case region{record.BeforeOffset, 0}:
		entry.before = nil
	case old.before():
	default: // the earlier table
		entry.before = entry.slots
	}
	if ok && old.table() != record.table() {
		entry.held = append(entry.held, heldTable{old.table(), entry.slots})
		m.setSlots(entry, slots)
	}
	if old.before() != record.before() && old.BeforeSize > 0 {
		entry.held = append(entry.held, heldTable{old.before(), nil})
	}
	entry.record, entry.doubt, entry.leaving = record, true, false
	m.rerouted = true
	if err := r.maps.PutService(record); err != nil {
		return fmt.Errorf("put service %s at index %d: %w", keyOf(record), record.Index, err)
	}
	entry.doubt = false
	for _, held := range entry.held {
		m.graceOwed = m.graceOwed || held.size > 0 && held.region != record.before()
	}
	entry.held = nil
	if !entry.slotsDoubt {
		entry.begin(r.nextTick())
	}
	return nil
}

func (r *Reconciler) deleteService(index uint32) error {
	m := &r.mirror
	defer m.note(index)
	entry := m.services[index]
	entry.doubt, entry.leaving = true, true
	if err := r.maps.DeleteService(index, entry.record.Generation); err != nil {
		return fmt.Errorf("delete service %s at index %d: %w", keyOf(entry.record), index, err)
	}
	m.count(entry, -1)
	delete(m.services, index)
	delete(m.remnants, index)
	delete(m.merging, index)
	if m.byKey[keyOf(entry.record)] == index {
		delete(m.byKey, keyOf(entry.record))
	}
	m.servicePositions.release(index)
	m.graceOwed = true
	return nil
}

// run is a part of a table that changes.
type run struct{ first, end int }

// changedRuns returns the runs in which two tables of one size differ.
func changedRuns(before, after Table) []run {
	var runs []run
	for i := range after {
		switch {
		case before[i] == after[i]:
		case len(runs) > 0 && runs[len(runs)-1].end == i:
			runs[len(runs)-1].end++
		default:
			runs = append(runs, run{i, i + 1})
		}
	}
	return runs
}

// rewriteSlots changes the given runs of a table in place, or the whole table if its contents are in doubt.
func (r *Reconciler) rewriteSlots(index uint32, slots Table, runs []run) error {
	defer r.mirror.note(index)
	entry := r.mirror.services[index]
	if entry.slotsDoubt {
		runs = []run{{0, len(slots)}}
	}
	if entry.stale == nil {
		entry.stale = map[BackendRef]bool{}
	}
	for _, run := range runs {
		nameAll(entry.slots[run.first:run.end], entry.stale)
	}
	r.mirror.setSlots(entry, slots)
	entry.slotsDoubt = true
	r.mirror.rerouted = true
	for _, run := range runs {
		if err := r.writeSlots(entry.record, slots, run); err != nil {
			return err
		}
	}
	entry.slotsDoubt, entry.stale = false, nil
	entry.begin(r.nextTick())
	return nil
}

func (r *Reconciler) writeSlots(record ServiceRecord, slots Table, run run) error {
	offset := record.Offset + uint32(run.first)
	if err := r.maps.WriteSlots(offset, slots[run.first:run.end]); err != nil {
		return fmt.Errorf("write slots %d to %d of service %s: %w",
			offset, record.Offset+uint32(run.end)-1, keyOf(record), err)
	}
	return nil
}

func (r *Reconciler) putFrontend(f model.Frontend, service uint32) error {
	m := &r.mirror
	entry := m.frontends[f]
	if !slices.Contains(entry.services, service) {
		entry.services = append(slices.Clone(entry.services), service)
	}
	entry.doubt = true
	m.frontends[f] = entry
	if err := r.maps.PutFrontend(f, service); err != nil {
		return fmt.Errorf("put frontend %s of the service at index %d: %w", f, service, err)
	}
	m.lend(entry.services, service)
	m.frontends[f] = mirrorFrontend{services: []uint32{service}}
	return nil
}

func (r *Reconciler) deleteFrontend(f model.Frontend) error {
	m := &r.mirror
	entry := m.frontends[f]
	entry.doubt = true
	m.frontends[f] = entry
	if err := r.maps.DeleteFrontend(f); err != nil {
		return fmt.Errorf("delete frontend %s: %w", f, err)
	}
	delete(m.frontends, f)
	return nil
}

// setAddress puts the record, or deletes it if it is empty.
func (r *Reconciler) setAddress(record AddressRecord) error {
	m := &r.mirror
	entry, ok := m.addresses[record.Address]
	if !ok {
		entry.Address = record.Address
	}
	entry.doubt = true
	entry.VIP = entry.VIP || record.VIP
	entry.Source = entry.Source || record.Source
	m.addresses[record.Address] = entry
	if !record.VIP && !record.Source {
		return r.deleteAddress(record.Address)
	}
	if err := r.maps.PutAddress(record); err != nil {
		return fmt.Errorf("put address %s: %w", record.Address, err)
	}
	m.addresses[record.Address] = mirrorAddress{AddressRecord: record}
	return nil
}

func (r *Reconciler) deleteAddress(address netip.Addr) error {
	if err := r.maps.DeleteAddress(address); err != nil {
		return fmt.Errorf("delete address %s: %w", address, err)
	}
	delete(r.mirror.addresses, address)
	return nil
}

func (r *Reconciler) grace() error {
	if err := r.maps.Grace(); err != nil {
		return fmt.Errorf("wait until no program can hold removed entries: %w", err)
	}
	r.mirror.graceOwed, r.mirror.rerouted = false, false
	return nil
}
