package datapath

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"golang.org/x/sys/unix"
)

// The methods of reconcile.Maps.

// PutBackend writes address and port. The way to it (SetHop, SetSources) is kept for the
// same generation; a new tenant begins without, and with counters at zero.
func (d *Datapath) PutBackend(r reconcile.BackendRecord) error {
	if r.Index == 0 || int(r.Index) >= len(d.backends) {
		return fmt.Errorf("write backend %s at index %d: there are places 1 to %d: raise limits.backends", r.BackendAddress, r.Index, len(d.backends)-1)
	}
	if !r.Address.IsValid() {
		return fmt.Errorf("write backend at index %d: it has no address", r.Index)
	}
	d.ways.Lock()
	defer d.ways.Unlock()
	b := &d.backends[r.Index]
	if b.Generation != r.Generation || b.Live == 0 {
		atomic.StoreUint64(&b.Hop, 0)
		d.noteHostBackend(r.Index, false)
		d.forgetSources(r.Index)
		if err := d.clearTraffic(abi.MapBeTraffic, r.Index); err != nil {
			return err
		}
	}
	abi.StoreAddr(&b.Address, abi.ToAddr(r.Address))
	tail := abi.Backend{Port: kernel.ToWire(r.Port), Generation: r.Generation, Live: 1, Draining: abi.ToDraining(r)}
	atomic.StoreUint64(abi.BackendTail(b), *abi.BackendTail(&tail))
	return nil
}

// DeleteBackend empties the place and keeps its generation. A slot in transition may still name the backend as the
// previous one, so it is no longer live before the way to it goes: new flows that met it without a way would be lost.
func (d *Datapath) DeleteBackend(r reconcile.BackendRef) error {
	d.ways.Lock()
	defer d.ways.Unlock()
	if r.Index == 0 || int(r.Index) >= len(d.backends) || d.backends[r.Index].Generation != r.Generation {
		return nil
	}
	b := &d.backends[r.Index]
	tail := abi.Backend{Generation: r.Generation}
	atomic.StoreUint64(abi.BackendTail(b), *abi.BackendTail(&tail))
	atomic.StoreUint64(&b.Hop, 0)
	d.noteHostBackend(r.Index, false)
	d.forgetSources(r.Index)
	abi.StoreAddr(&b.Address, abi.Addr{})
	return nil
}

// PutService writes the record, the table's place last, and then the name that says
// it is there.
func (d *Datapath) PutService(r reconcile.ServiceRecord) error {
	forwarding, ok := abi.ToNumber(abi.Forwardings, r.Forwarding)
	tracking, known := abi.ToNumber(abi.Trackings, r.Tracking)
	switch {
	case int(r.Index) >= len(d.services):
		return fmt.Errorf("write service %q at index %d: there are places 0 to %d: raise limits.services", r.Name, r.Index, len(d.services)-1)
	case !ok:
		return fmt.Errorf("write service %q: forwarding %q is not known", r.Name, r.Forwarding)
	case !known:
		return fmt.Errorf("write service %q: tracking %q is not known", r.Name, r.Tracking)
	case len(r.Name) >= len(abi.Name{}.Text):
		return fmt.Errorf("write service %q: the name is longer than %d characters", r.Name, len(abi.Name{}.Text)-1)
	case uint64(r.Offset)+uint64(r.Size) > uint64(d.slots.len()):
		return fmt.Errorf("write service %q: its slots end at %d, and there are %d: raise limits.slots", r.Name, uint64(r.Offset)+uint64(r.Size), d.slots.len())
	case uint64(r.BeforeOffset)+uint64(r.BeforeSize) > uint64(d.slots.len()):
		return fmt.Errorf("write service %q: the slots of its earlier table end at %d, and there are %d: raise limits.slots",
			r.Name, uint64(r.BeforeOffset)+uint64(r.BeforeSize), d.slots.len())
	}
	if err := d.require(featuresOf(r.Forwarding, r.AffinityTimeout > 0, r.Policy)); err != nil {
		return fmt.Errorf("write service %q: %w", r.Name, err)
	}
	if r.Forwarding == model.ForwardingNATDestination {
		d.noteForwarding(r.Index, true) // programs look before the record says so
	}
	s := &d.services[r.Index]
	if s.Generation != r.Generation {
		atomic.StoreUint64(&s.Table, 0)
		if err := d.clearTraffic(abi.MapSvcTraffic, r.Index); err != nil {
			return err
		}
		if err := d.clearFlows(r.Index, r.Generation); err != nil {
			return err
		}
	}
	record := abi.Service{
		Seed: r.Seed, Generation: r.Generation, Forwarding: forwarding, Live: 1, Tracking: tracking,
		AffinityTicks: d.ticks(r.AffinityTimeout), AffinitySeconds: uint32(r.AffinityTimeout / time.Second),
		Flags: abi.ToPolicy(r.Policy), FlowsMax: r.Policy.FlowsMax, SourceRate: r.Policy.SourceRate, TcpMss: r.Policy.TCPMSS,
	}
	abi.StorePolicy(s, record)
	atomic.StoreUint64(abi.ServiceAffinity(s), *abi.ServiceAffinity(&record))
	atomic.StoreUint64(abi.ServiceTail(s), *abi.ServiceTail(&record))
	// A slot of the table may refer to the one before, which therefore comes first.
	atomic.StoreUint64(&s.TableBefore, abi.ToRun(r.BeforeOffset, r.BeforeSize))
	atomic.StoreUint64(&s.Table, abi.ToRun(r.Offset, r.Size))
	if r.Forwarding != model.ForwardingNATDestination {
		d.noteForwarding(r.Index, false)
	}
	key := abi.NameKey{Kind: uint32(abi.NAME_SERVICE), Index: r.Index}
	if err := d.maps[abi.MapNames].Put(key, abi.ToName(r.Name)); err != nil {
		return fmt.Errorf("write the name of service %q: %w", r.Name, err)
	}
	return nil
}

// DeleteService empties the place and keeps its generation.
func (d *Datapath) DeleteService(index uint32, generation uint8) error {
	if int(index) >= len(d.services) || d.services[index].Generation != generation {
		return nil
	}
	s := &d.services[index]
	atomic.StoreUint64(&s.Table, 0)
	atomic.StoreUint64(&s.TableBefore, 0)
	record := abi.Service{Generation: generation}
	atomic.StoreUint64(abi.ServiceTail(s), *abi.ServiceTail(&record))
	atomic.StoreUint64(abi.ServiceAffinity(s), 0)
	abi.StorePolicy(s, abi.Service{})
	d.noteForwarding(index, false)
	return d.remove(abi.MapNames, abi.NameKey{Kind: uint32(abi.NAME_SERVICE), Index: index}, "the name of a service")
}

// noteForwarding keeps settings.nat_destination true while a service needs it.
func (d *Datapath) noteForwarding(index uint32, natDestination bool) {
	if natDestination {
		d.natDestination[index] = true
	} else {
		delete(d.natDestination, index)
	}
	d.toClients.Lock()
	defer d.toClients.Unlock()
	d.storeToClients(abi.TO_CLIENTS_ROUTED, len(d.natDestination) > 0)
}

// noteHostBackend does the same for backends that are this host itself.
func (d *Datapath) noteHostBackend(index uint32, host bool) {
	d.toClients.Lock()
	defer d.toClients.Unlock()
	if host {
		d.hostBackends[index] = true
	} else {
		delete(d.hostBackends, index)
	}
	d.storeToClients(abi.TO_CLIENTS_HOST, len(d.hostBackends) > 0)
}

// storeToClients sets or clears a bit. The caller holds toClients.
func (d *Datapath) storeToClients(bit abi.ToClient, on bool) {
	word := atomic.LoadUint32(&d.settings[0].NatDestination) &^ uint32(bit)
	if on {
		word |= uint32(bit)
	}
	atomic.StoreUint32(&d.settings[0].NatDestination, word)
}

// forgetKnown ends what programs have noted of addresses and frontends (bpf/lb/service.h). It
// comes after a change, whether that succeeded or not: what is noted meanwhile is of the
// epoch before.
func (d *Datapath) forgetKnown() { atomic.AddUint32(&d.settings[0].Epoch, 1) }

// PutFrontend points a frontend to a service. An exact port is one key, a range one for
// each of its prefixes.
func (d *Datapath) PutFrontend(f model.Frontend, service uint32) error {
	defer d.forgetKnown()
	if f.Ports.Exact() {
		if err := d.maps[abi.MapFrontends].Put(abi.ToFrontendKey(f), abi.ToFrontend(f, service)); err != nil {
			return fmt.Errorf("write frontend %s: %w", f, full(err, "limits.services sizes the table of frontends: raise it"))
		}
		return nil
	}
	for _, key := range abi.ToRangeKeys(f) {
		if err := d.maps[abi.MapRanges].Put(key, abi.ToFrontend(f, service)); err != nil {
			return fmt.Errorf("write the port range of frontend %s: %w", f, full(err, fmt.Sprintf("at most %d prefixes of ports fit: use fewer or aligned ranges", d.maps[abi.MapRanges].MaxEntries())))
		}
	}
	return nil
}

// DeleteFrontend removes a frontend.
func (d *Datapath) DeleteFrontend(f model.Frontend) error {
	defer d.forgetKnown()
	if f.Ports.Exact() {
		return d.remove(abi.MapFrontends, abi.ToFrontendKey(f), f.String())
	}
	for _, key := range abi.ToRangeKeys(f) {
		if err := d.remove(abi.MapRanges, key, f.String()); err != nil {
			return err
		}
	}
	return nil
}

// PutAddress says what an address is to us. Ownership (SetOwned) is kept, unless the
// record no longer says that it may be announced.
func (d *Datapath) PutAddress(r reconcile.AddressRecord) error {
	return d.changeAddress(r.Address, func(a *abi.Address, _ bool) bool {
		a.Flags, a.Check = abi.ToFlags(r), abi.AddrCheck(r.Address)
		if !r.Announce {
			a.OwnedUntil = 0
		}
		return true
	})
}

// DeleteAddress makes an address nobody's.
func (d *Datapath) DeleteAddress(address netip.Addr) error {
	defer d.forgetKnown()
	d.addresses.Lock()
	defer d.addresses.Unlock()
	return d.remove(abi.MapAddresses, abi.ToAddr(address), address.String())
}

// changeAddress reads a record, has it changed, and writes it if change says so.
func (d *Datapath) changeAddress(address netip.Addr, change func(a *abi.Address, there bool) bool) error {
	d.addresses.Lock()
	defer d.addresses.Unlock()
	m, key := d.maps[abi.MapAddresses], abi.ToAddr(address)
	var record abi.Address
	err := m.Lookup(key, &record)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read the kind of address %s: %w", address, err)
	}
	before := record
	if !change(&record, err == nil) || err == nil && record == before {
		return nil
	}
	defer d.forgetKnown()
	if abi.IsOwn(record.Flags) { // before the record, so that no program misses it
		word, bit := abi.OwnBit(address)
		atomic.OrUint64(&d.settings[0].OwnAddresses[word], bit)
	}
	if err := m.Put(key, record); err != nil {
		return fmt.Errorf("write the kind of address %s: %w", address, full(err, fmt.Sprintf("at most %d addresses fit", m.MaxEntries())))
	}
	return nil
}

// forgetOwn clears the bits of VIPs and NAT sources that are no more. Programs run meanwhile: no
// bit of one that is there is ever clear.
func (d *Datapath) forgetOwn() error {
	var own [len(d.settings[0].OwnAddresses)]uint64
	var key abi.Addr
	var record abi.Address
	all := d.maps[abi.MapAddresses].Iterate()
	for all.Next(&key, &record) {
		if abi.IsOwn(record.Flags) {
			word, bit := abi.OwnBit(abi.FromAddr(key))
			own[word] |= bit
		}
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read which addresses are ours: %w", err)
	}
	for i := range own {
		atomic.StoreUint64(&d.settings[0].OwnAddresses[i], own[i])
	}
	return nil
}

// WriteSlots stores slots.
func (d *Datapath) WriteSlots(offset uint32, slots reconcile.Table) error {
	if uint64(offset)+uint64(len(slots)) > uint64(d.slots.len()) {
		return fmt.Errorf("write slots %d to %d: there are %d: raise limits.slots", offset, uint64(offset)+uint64(len(slots))-1, d.slots.len())
	}
	return d.slots.each(offset, uint32(len(slots)), func(i int, slot *uint64) { atomic.StoreUint64(slot, abi.ToSlot(slots.At(i))) })
}

// ScanRemembered ends remembered flows that are over or that closing and marked slots agree
// with, and returns those of these slots that others disagree with.
func (d *Datapath) ScanRemembered() (map[uint32]bool, error) {
	// First what is to go. A walk that deletes can miss others, so it marks nothing that counts.
	if _, err := d.Recall(); err != nil {
		return nil, err
	}
	for i := range d.marks {
		atomic.StoreUint64(&d.marks[i], 0)
	}
	if _, err := d.runRecall(true); err != nil {
		return nil, err
	}
	marked := map[uint32]bool{}
	for i := range d.marks {
		for word := atomic.LoadUint64(&d.marks[i]); word != 0; word &= word - 1 {
			marked[uint32(i*64+bits.TrailingZeros64(word))] = true
		}
	}
	return marked, nil
}

// ServiceFlows counts the open flows of each service that has any, by index.
func (d *Datapath) ServiceFlows() (map[uint32]uint64, error) {
	counts, err := d.OpenFlows()
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

// Grace waits until no program run is left that began before the call.
func (d *Datapath) Grace() error { return d.grace.Wait() }

// remove deletes a key; that it is not there is success.
func (d *Datapath) remove(name string, key any, what string) error {
	if err := d.maps[name].Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete %s from %s: %w", what, name, err)
	}
	return nil
}

// clearTraffic sets a counter to zero for its next tenant.
func (d *Datapath) clearTraffic(name string, index uint32) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("count the CPUs: %w", err)
	}
	if err := d.maps[name].Put(index, make([]abi.Traffic, cpus)); err != nil {
		return fmt.Errorf("set element %d of %s to zero: %w", index, name, err)
	}
	return nil
}

// full adds advice when a map has no room.
func full(err error, advice string) error {
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: %s", err, advice)
	}
	return err
}
