package store

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// The methods of reconcile.Maps.

// PutBackend writes address and port. The next hop and the sources (SetHop, SetNATSources) are kept for the same
// generation; a new tenant begins without them, and with counters at zero.
func (w *Writer) PutBackend(r reconcile.BackendRecord) error {
	if r.Index == 0 || int(r.Index) >= len(w.backends) {
		return fmt.Errorf("write backend %s at index %d: the indexes are 1 to %d: raise limits.backends", r.BackendAddress, r.Index, len(w.backends)-1)
	}
	if !r.Address.IsValid() {
		return fmt.Errorf("write backend at index %d: it has no address", r.Index)
	}
	w.backendMu.Lock()
	defer w.backendMu.Unlock()
	b := &w.backends[r.Index]
	if b.Generation != r.Generation || b.Live == 0 {
		atomic.StoreUint64(&b.Hop, 0)
		w.noteHostBackend(r.Index, false)
		w.forgetNATSources(r.Index)
		if err := w.clearTraffic(abi.MapBeTraffic, r.Index); err != nil {
			return err
		}
	}
	abi.StoreAddr(&b.Address, abi.ToAddr(r.Address))
	tail := abi.Backend{Port: kernel.ToWire(r.Port), Generation: r.Generation, Live: 1, Draining: abi.ToDraining(r)}
	atomic.StoreUint64(abi.BackendTail(b), *abi.BackendTail(&tail))
	return nil
}

// DeleteBackend empties the record and keeps its generation. A slot in transition may still name the backend as
// the previous one, so the record is marked as not live before its next hop is removed: new flows that met it
// without a next hop would be lost.
func (w *Writer) DeleteBackend(r reconcile.BackendRef) error {
	w.backendMu.Lock()
	defer w.backendMu.Unlock()
	if r.Index == 0 || int(r.Index) >= len(w.backends) || w.backends[r.Index].Generation != r.Generation {
		return nil
	}
	b := &w.backends[r.Index]
	tail := abi.Backend{Generation: r.Generation}
	atomic.StoreUint64(abi.BackendTail(b), *abi.BackendTail(&tail))
	atomic.StoreUint64(&b.Hop, 0)
	w.noteHostBackend(r.Index, false)
	w.forgetNATSources(r.Index)
	abi.StoreAddr(&b.Address, abi.Addr{})
	return nil
}

// PutService writes the record, with the position of the table last, and then the name, which marks the service
// as present.
func (w *Writer) PutService(r reconcile.ServiceRecord) error {
	forwarding, ok := abi.ToNumber(abi.Forwardings, r.Forwarding)
	tracking, known := abi.ToNumber(abi.Trackings, r.Tracking)
	switch {
	case int(r.Index) >= len(w.services):
		return fmt.Errorf("write service %q at index %d: the indexes are 0 to %d: raise limits.services", r.Name, r.Index, len(w.services)-1)
	case !ok:
		return fmt.Errorf("write service %q: forwarding %q is not known", r.Name, r.Forwarding)
	case !known:
		return fmt.Errorf("write service %q: tracking %q is not known", r.Name, r.Tracking)
	case len(r.Name) >= len(abi.Name{}.Text):
		return fmt.Errorf("write service %q: the name is longer than %d characters", r.Name, len(abi.Name{}.Text)-1)
	case uint64(r.Offset)+uint64(r.Size) > uint64(w.slots.len()):
		return fmt.Errorf("write service %q: its slots end at %d, and there are %d: raise limits.slots", r.Name, uint64(r.Offset)+uint64(r.Size), w.slots.len())
	case uint64(r.BeforeOffset)+uint64(r.BeforeSize) > uint64(w.slots.len()):
		return fmt.Errorf("write service %q: the slots of its earlier table end at %d, and there are %d: raise limits.slots",
			r.Name, uint64(r.BeforeOffset)+uint64(r.BeforeSize), w.slots.len())
	}
	if err := w.require(featuresOf(r.Forwarding, r.AffinityTimeout > 0, r.Policy)); err != nil {
		return fmt.Errorf("write service %q: %w", r.Name, err)
	}
	if r.Forwarding == model.ForwardingNATDestination {
		w.noteForwarding(r.Index, true) // programs look before the record says so
	}
	s := &w.services[r.Index]
	if s.Generation != r.Generation {
		atomic.StoreUint64(&s.Table, 0)
		if err := w.clearTraffic(abi.MapSvcTraffic, r.Index); err != nil {
			return err
		}
		if err := w.clearFlows(r.Index, r.Generation); err != nil {
			return err
		}
	}
	record := abi.Service{
		Seed: r.Seed, Generation: r.Generation, Forwarding: forwarding, Live: 1, Tracking: tracking,
		AffinityTicks: w.ticks(r.AffinityTimeout), AffinitySeconds: uint32(r.AffinityTimeout / time.Second),
		Flags: abi.ToPolicy(r.Policy), FlowsMax: r.Policy.FlowsMax, SourceRate: r.Policy.SourceRate, TcpMss: r.Policy.TCPMSS,
	}
	abi.StorePolicy(s, record)
	atomic.StoreUint64(abi.ServiceAffinity(s), *abi.ServiceAffinity(&record))
	atomic.StoreUint64(abi.ServiceTail(s), *abi.ServiceTail(&record))
	// A slot of the table may refer to the table before, which is therefore written first.
	atomic.StoreUint64(&s.TableBefore, abi.ToRun(r.BeforeOffset, r.BeforeSize))
	atomic.StoreUint64(&s.Table, abi.ToRun(r.Offset, r.Size))
	if r.Forwarding != model.ForwardingNATDestination {
		w.noteForwarding(r.Index, false)
	}
	key := abi.NameKey{Kind: uint32(abi.NAME_SERVICE), Index: r.Index}
	if err := w.maps[abi.MapNames].Put(key, abi.ToName(r.Name)); err != nil {
		return fmt.Errorf("write the name of service %q: %w", r.Name, err)
	}
	return nil
}

// DeleteService empties the record and keeps its generation.
func (w *Writer) DeleteService(index uint32, generation uint8) error {
	if int(index) >= len(w.services) || w.services[index].Generation != generation {
		return nil
	}
	s := &w.services[index]
	atomic.StoreUint64(&s.Table, 0)
	atomic.StoreUint64(&s.TableBefore, 0)
	record := abi.Service{Generation: generation}
	atomic.StoreUint64(abi.ServiceTail(s), *abi.ServiceTail(&record))
	atomic.StoreUint64(abi.ServiceAffinity(s), 0)
	abi.StorePolicy(s, abi.Service{})
	w.noteForwarding(index, false)
	return w.remove(abi.MapNames, abi.NameKey{Kind: uint32(abi.NAME_SERVICE), Index: index}, "the name of a service")
}

// noteForwarding keeps settings.nat_destination true while a service needs it.
func (w *Writer) noteForwarding(index uint32, natDestination bool) {
	if natDestination {
		w.natDestination[index] = true
	} else {
		delete(w.natDestination, index)
	}
	w.toClients.Lock()
	defer w.toClients.Unlock()
	w.storeToClients(abi.TO_CLIENTS_ROUTED, len(w.natDestination) > 0)
}

// noteHostBackend does the same for backends that are this host itself.
func (w *Writer) noteHostBackend(index uint32, host bool) {
	w.toClients.Lock()
	defer w.toClients.Unlock()
	if host {
		w.hostBackends[index] = true
	} else {
		delete(w.hostBackends, index)
	}
	w.storeToClients(abi.TO_CLIENTS_HOST, len(w.hostBackends) > 0)
}

// storeToClients sets or clears a bit. The caller holds toClients.
func (w *Writer) storeToClients(bit abi.ToClient, on bool) {
	word := atomic.LoadUint32(&w.settings[0].NatDestination) &^ uint32(bit)
	if on {
		word |= uint32(bit)
	}
	atomic.StoreUint32(&w.settings[0].NatDestination, word)
}

// forgetKnown ends the notes that programs have about addresses and frontends (bpf/lb/service.h). It runs after
// a change, whether the change succeeded or not: notes that are taken during the change belong to the epoch
// before.
func (w *Writer) forgetKnown() { atomic.AddUint32(&w.settings[0].Epoch, 1) }

// PutFrontend points a frontend to a service. An exact port is one key, a range one for
// each of its prefixes.
func (w *Writer) PutFrontend(f model.Frontend, service uint32) error {
	defer w.forgetKnown()
	if f.Ports.Exact() {
		if err := w.maps[abi.MapFrontends].Put(abi.ToFrontendKey(f), abi.ToFrontend(f, service)); err != nil {
			return fmt.Errorf("write frontend %s: %w", f, NoRoom(err, "limits.services sizes the table of frontends: raise it"))
		}
		return nil
	}
	for _, key := range abi.ToRangeKeys(f) {
		if err := w.maps[abi.MapRanges].Put(key, abi.ToFrontend(f, service)); err != nil {
			return fmt.Errorf("write the port range of frontend %s: %w", f, NoRoom(err, fmt.Sprintf("at most %d prefixes of ports fit: use fewer or aligned ranges", w.maps[abi.MapRanges].MaxEntries())))
		}
	}
	return nil
}

// DeleteFrontend removes a frontend.
func (w *Writer) DeleteFrontend(f model.Frontend) error {
	defer w.forgetKnown()
	if f.Ports.Exact() {
		return w.remove(abi.MapFrontends, abi.ToFrontendKey(f), f.String())
	}
	for _, key := range abi.ToRangeKeys(f) {
		if err := w.remove(abi.MapRanges, key, f.String()); err != nil {
			return err
		}
	}
	return nil
}

// PutAddress writes the roles of an address. Ownership (SetOwned) is kept, unless the record no longer says
// that the address may be announced.
func (w *Writer) PutAddress(r reconcile.AddressRecord) error {
	return w.changeAddress(r.Address, func(a *abi.Address, _ bool) bool {
		a.Flags, a.Check = abi.ToFlags(r), abi.AddrCheck(r.Address)
		if !r.Announce {
			a.OwnedUntil = 0
		}
		return true
	})
}

// DeleteAddress removes all roles of an address.
func (w *Writer) DeleteAddress(address netip.Addr) error {
	defer w.forgetKnown()
	w.addresses.Lock()
	defer w.addresses.Unlock()
	return w.remove(abi.MapAddresses, abi.ToAddr(address), address.String())
}

// changeAddress reads a record, passes it to change, and writes it if change returns true.
func (w *Writer) changeAddress(address netip.Addr, change func(a *abi.Address, there bool) bool) error {
	w.addresses.Lock()
	defer w.addresses.Unlock()
	m, key := w.maps[abi.MapAddresses], abi.ToAddr(address)
	var record abi.Address
	err := m.Lookup(key, &record)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read the kind of address %s: %w", address, err)
	}
	before := record
	if !change(&record, err == nil) || err == nil && record == before {
		return nil
	}
	defer w.forgetKnown()
	if abi.IsOwn(record.Flags) { // before the record, so that no program misses it
		word, bit := abi.OwnBit(address)
		atomic.OrUint64(&w.settings[0].OwnAddresses[word], bit)
	}
	if err := m.Put(key, record); err != nil {
		return fmt.Errorf("write the kind of address %s: %w", address, NoRoom(err, fmt.Sprintf("at most %d addresses fit", m.MaxEntries())))
	}
	return nil
}

// forgetOwn clears the bits of VIPs and NAT sources that are gone. Programs run meanwhile: the bit of an
// address that is present is never clear.
func (w *Writer) forgetOwn() error {
	var own [len(w.settings[0].OwnAddresses)]uint64
	var key abi.Addr
	var record abi.Address
	all := w.maps[abi.MapAddresses].Iterate()
	for all.Next(&key, &record) {
		if abi.IsOwn(record.Flags) {
			word, bit := abi.OwnBit(abi.FromAddr(key))
			own[word] |= bit
		}
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read the host's own addresses: %w", err)
	}
	for i := range own {
		atomic.StoreUint64(&w.settings[0].OwnAddresses[i], own[i])
	}
	return nil
}

// WriteSlots stores slots.
func (w *Writer) WriteSlots(offset uint32, slots reconcile.Table) error {
	if uint64(offset)+uint64(len(slots)) > uint64(w.slots.len()) {
		return fmt.Errorf("write slots %d to %d: there are %d: raise limits.slots", offset, uint64(offset)+uint64(len(slots))-1, w.slots.len())
	}
	return w.slots.each(offset, uint32(len(slots)), func(i int, slot *uint64) { atomic.StoreUint64(slot, abi.ToSlot(slots.At(i))) })
}

// ScanRemembered ends remembered flows that are over or that agree with closing and marked slots, and returns
// the slots among these with which other flows disagree.
func (w *Writer) ScanRemembered() (map[uint32]bool, error) {
	// The first walk deletes. A walk that deletes can miss other entries, so it marks nothing that counts.
	if _, err := w.Recall(); err != nil {
		return nil, err
	}
	for i := range w.marks {
		atomic.StoreUint64(&w.marks[i], 0)
	}
	if _, err := w.runRecall(true); err != nil {
		return nil, err
	}
	marked := map[uint32]bool{}
	for i := range w.marks {
		for word := atomic.LoadUint64(&w.marks[i]); word != 0; word &= word - 1 {
			marked[uint32(i*64+bits.TrailingZeros64(word))] = true
		}
	}
	return marked, nil
}

// ServiceFlows counts the open flows of each service that has any, by index.
func (w *Writer) ServiceFlows() (map[uint32]uint64, error) {
	counts, err := w.OpenFlows()
	if err != nil {
		return nil, err
	}
	flows := map[uint32]uint64{}
	for index, n := range counts.Services {
		if n > 0 {
			flows[uint32(index)] = n
		}
	}
	return flows, nil
}

// Grace waits until every program run that began before the call has ended.
func (w *Writer) Grace() error { return w.grace.Wait() }

// remove deletes a key; it succeeds if the key is missing.
func (w *Writer) remove(name string, key any, what string) error {
	if err := w.maps[name].Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete %s from %s: %w", what, name, err)
	}
	return nil
}

// clearTraffic sets a counter to zero for its next tenant.
func (w *Writer) clearTraffic(name string, index uint32) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("count the CPUs: %w", err)
	}
	if err := w.maps[name].Put(index, make([]abi.Traffic, cpus)); err != nil {
		return fmt.Errorf("set element %d of %s to zero: %w", index, name, err)
	}
	return nil
}

// NoRoom adds advice when a map has no room.
func NoRoom(err error, advice string) error {
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: %s", err, advice)
	}
	return err
}
