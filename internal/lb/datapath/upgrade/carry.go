package upgrade

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// eachOne does the same as each for kinds of maps that are not read in batches, one by one.
func eachOne(m *ebpf.Map, f func(key, value []byte) error) error {
	var key, value []byte
	all := m.Iterate()
	for all.Next(&key, &value) {
		if err := f(key, value); err != nil {
			return err
		}
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read %s: %w", store.MapName(m), err)
	}
	return nil
}

// copy copies the contents of the old maps while the old programs run.
func (u *upgrade) copy(own map[string]*ebpf.Map) error {
	for name, old := range u.old {
		var err error
		switch manners[name] {
		case mannerStill:
			err = u.copyStill(name, old, own[name])
		case mannerCounter:
			u.counters[name] = map[string][][]byte{}
			err = u.copyCounters(name, old, own[name])
		}
		if err != nil {
			return err
		}
	}
	u.flows = &flowCarry{conversions: u.conversions, old: u.old[abi.MapFlows], own: own[abi.MapFlows], hash: maphash.MakeSeed(), carried: map[uint64]uint64{}}
	if err := u.flows.findDirection(u.opts.Version); err != nil {
		return err
	}
	return u.flows.copy()
}

func (u *upgrade) copyStill(name string, old, own *ebpf.Map) error {
	return eachOne(old, func(key, value []byte) error {
		key, value, err := u.conversions.convert(name, key, value)
		if err != nil || key == nil {
			return err
		}
		if err := own.Put(key, value); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		return nil
	})
}

// convertCPUs converts each CPU's value.
func (u *upgrade) convertCPUs(name string, key []byte, values [][]byte) (newKey []byte, newValues [][]byte, err error) {
	for _, value := range values {
		var converted []byte
		if newKey, converted, err = u.conversions.convert(name, key, value); err != nil || newKey == nil {
			return nil, nil, err
		}
		newValues = append(newValues, converted)
	}
	return newKey, newValues, nil
}

// eachCounter calls f with every element that has counted anything, converted.
func (u *upgrade) eachCounter(name string, old *ebpf.Map, f func(key []byte, values [][]byte) error) error {
	var key []byte
	var values [][]byte
	all := old.Iterate()
	for all.Next(&key, &values) {
		counted := false
		for _, v := range values {
			counted = counted || len(bytes.TrimLeft(v, "\x00")) > 0
		}
		if !counted {
			continue
		}
		newKey, converted, err := u.convertCPUs(name, key, values)
		if err != nil {
			return err
		}
		if newKey == nil {
			continue
		}
		if err := f(newKey, converted); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
	if err := all.Err(); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

func (u *upgrade) copyCounters(name string, old, own *ebpf.Map) error {
	return u.eachCounter(name, old, func(key []byte, values [][]byte) error {
		u.counters[name][string(key)] = values
		return own.Put(key, values)
	})
}

// addCounters adds the counts between the copy and the switch. Counters are words of 64 bits. The programs keep
// counting meanwhile: counts in the microsecond between reading an element and writing it may be missing.
func (u *upgrade) addCounters(name string, old, own *ebpf.Map) error {
	return u.eachCounter(name, old, func(key []byte, values [][]byte) error {
		before := u.counters[name][string(key)]
		var now [][]byte
		if err := own.Lookup(key, &now); err != nil {
			return err
		}
		changed := false
		for cpu, value := range values {
			for at := 0; at+8 <= len(value); at += 8 {
				more := binary.NativeEndian.Uint64(value[at:])
				if before != nil {
					more -= binary.NativeEndian.Uint64(before[cpu][at:])
				}
				changed = changed || more != 0
				binary.NativeEndian.PutUint64(now[cpu][at:], binary.NativeEndian.Uint64(now[cpu][at:])+more)
			}
		}
		if !changed {
			return nil
		}
		return own.Put(key, now)
	})
}

// carryRest carries the changes between the copy and the switch over. Nothing is added to the old maps any
// more.
func (u *upgrade) carryRest(own map[string]*ebpf.Map, grace func() error) error {
	if err := u.flows.rest(grace); err != nil {
		return err
	}
	if u.flows.lost > 0 {
		u.opts.Log.Warn("some flows were not carried over, because new flows had taken their source ports or their tuples", "entries", u.flows.lost)
	}
	for name := range u.counters {
		if err := u.addCounters(name, u.old[name], own[name]); err != nil {
			return err
		}
	}
	return nil
}

// flowCarry carries sh_flows over. In every ABI seal and life are the first two words of a flow, and life has
// the layout of struct flow.
type flowCarry struct {
	conversions conversions
	old, own    *ebpf.Map // old is nil where both ABIs share the table
	hash        maphash.Seed
	// carried is the life with which an entry was last carried over, by the hash of its key.
	carried   map[uint64]uint64
	direction int // where struct flow has it, in octets

	entries, late, lost int
}

// lifeOf is the second word.
func lifeOf(value []byte) uint64 { return binary.NativeEndian.Uint64(value[8:]) }

func lifeState(life uint64) abi.FlowState { return abi.FlowState(uint8(life >> 32)) }

func lifeNonce(life uint64) uint64 { return life >> 40 }

// newer reports whether a life was seen later than another.
func newer(a, b uint64) bool { return int32(uint32(a)-uint32(b)) > 0 }

// findDirection reads from the new object the offset of a flow's direction.
func (f *flowCarry) findDirection(v *abi.Version) error {
	if f.old == nil {
		return nil
	}
	spec, err := v.Spec(abi.ObjectABI)
	if err != nil {
		return err
	}
	var flow *btf.Struct
	if err := spec.Types.TypeByName("flow", &flow); err != nil {
		return fmt.Errorf("look for struct flow in the object compiled from abi.bpf.c: %w", err)
	}
	offsets := map[string]int{}
	for _, m := range flow.Members {
		offsets[m.Name] = int(m.Offset.Bytes())
	}
	if offsets["life"] != 8 || offsets["direction"] == 0 {
		return errors.New("struct flow of the object compiled from abi.bpf.c has no life as its second word, or no direction: flows cannot be carried over")
	}
	f.direction = offsets["direction"]
	return nil
}

// eachOld calls back with every living entry of the old table, converted.
func (f *flowCarry) eachOld(call func(hash uint64, key, value []byte) error) error {
	return store.Each(f.old, func(key, value []byte) error {
		newKey, converted, err := f.conversions.convert(abi.MapFlows, key, value)
		if err != nil || newKey == nil {
			return err
		}
		if !bytes.Equal(key, newKey) || len(converted) != int(f.own.ValueSize()) {
			return fmt.Errorf("carry a flow over: its key has changed, or its value has %d octets instead of %d: this is a fault in shunt's conversion", len(converted), f.own.ValueSize())
		}
		if lifeState(lifeOf(converted))&abi.FLOW_DEAD != 0 {
			return nil
		}
		return call(maphash.Bytes(f.hash, key), key, converted)
	})
}

// copy updates the new table from the old one, which is in use. No program uses the new table.
func (f *flowCarry) copy() error {
	if f.old == nil {
		return nil
	}
	keys, values, n := store.MakeRows(f.own.KeySize(), store.Batch), store.MakeRows(f.own.ValueSize(), store.Batch), 0
	flush := func() error {
		if n == 0 {
			return nil
		}
		_, err := f.own.BatchUpdate(keys.First(n), values.First(n), nil)
		if n = 0; err != nil {
			return fmt.Errorf("write flows into the new table: %w", store.NoRoom(err, "it has no room for them"))
		}
		return nil
	}
	err := f.eachOld(func(hash uint64, key, value []byte) error {
		life, there := f.carried[hash]
		if there && life == lifeOf(value) {
			return nil
		}
		if !there {
			f.entries++
		}
		f.carried[hash] = lifeOf(value)
		copy(keys.At(n), key)
		copy(values.At(n), value)
		if n++; n < store.Batch {
			return nil
		}
		return flush()
	})
	if err != nil {
		return err
	}
	return flush()
}

// flowEntry is an element of sh_flows.
type flowEntry struct{ key, value []byte }

// rest makes the new table contain the old table's flows at the switch, with the changes that the new programs
// have made since. Meanwhile they pass packets of flows that are not carried over to the old programs.
func (f *flowCarry) rest(grace func() error) error {
	if f.old == nil {
		return nil
	}
	// A client's packet that finds no twin ends its flow, so the backend's directions are inserted first.
	var backend, client []*flowEntry
	err := f.eachOld(func(hash uint64, key, value []byte) error {
		life, there := f.carried[hash]
		delete(f.carried, hash)
		if there && life == lifeOf(value) {
			return nil // as copied; the new programs have its newer state
		}
		f.late++
		e := &flowEntry{bytes.Clone(key), value}
		if value[f.direction] == uint8(abi.DIRECTION_BACKEND) {
			backend = append(backend, e)
		} else {
			client = append(client, e)
		}
		return nil
	})
	if err != nil {
		return err
	}
	late := append(backend, client...)
	if err := f.insertLate(late, true); err != nil {
		return err
	}
	// The old programs may have changed an entry between its reading and its writing. Once every run that met
	// it before has ended, they no longer do.
	if err := grace(); err != nil {
		return err
	}
	if err := f.insertLate(late, false); err != nil {
		return err
	}
	return f.dropEnded()
}

// insertLate inserts entries that were added or changed late, in their present state; then again, only entries
// that have changed since.
func (f *flowCarry) insertLate(late []*flowEntry, first bool) error {
	gone := map[uint64]bool{} // nonces of flows that have lost their port
	for _, e := range late {
		value, err := f.old.LookupBytes(e.key)
		if err != nil {
			return fmt.Errorf("read a flow of the old table: %w", err)
		}
		if value == nil {
			continue // ended this moment
		}
		_, value, err = f.conversions.convert(abi.MapFlows, e.key, value)
		if err != nil {
			return err
		}
		if value == nil || lifeState(lifeOf(value))&abi.FLOW_DEAD != 0 || !first && lifeOf(value) == lifeOf(e.value) {
			continue
		}
		e.value = value
		ok := !gone[lifeNonce(lifeOf(value))]
		if ok {
			if ok, err = f.insert(*e); err != nil {
				return err
			}
		}
		if !ok {
			f.lost++
			gone[lifeNonce(lifeOf(value))] = true
		}
	}
	return nil
}

// insert inserts an entry that was added or changed late. false: its key has been taken since.
func (f *flowCarry) insert(e flowEntry) (bool, error) {
	err := f.own.Update(e.key, e.value, ebpf.UpdateNoExist)
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, ebpf.ErrKeyExist) {
		return false, fmt.Errorf("write a flow into the new table: %w", store.NoRoom(err, "it has no room"))
	}
	now, err := f.own.LookupBytes(e.key)
	if err != nil {
		return false, fmt.Errorf("read a flow of the new table: %w", err)
	}
	if now == nil {
		return true, nil // ended this moment
	}
	mine, theirs := lifeOf(e.value), lifeOf(now)
	if newer(theirs, mine) {
		if lifeNonce(theirs) != lifeNonce(mine) {
			return false, nil
		}
		// It had packets since. State that no packet can undo is kept from the old entry.
		const keep = abi.FLOW_REPLIED | abi.FLOW_ESTABLISHED | abi.FLOW_SLOTTED
		merged := theirs | uint64(lifeState(mine)&keep)<<32
		if merged == theirs {
			return true, nil
		}
		binary.NativeEndian.PutUint64(now[8:], merged)
		e.value = now
	}
	// The copy is older than the switch, or belongs to another flow that has ended before it.
	if err := f.own.Update(e.key, e.value, ebpf.UpdateExist); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, fmt.Errorf("write a flow into the new table: %w", err)
	}
	return true, nil
}

// dropEnded deletes copied entries that have ended in the old table before the switch, unless they have had
// packets since.
func (f *flowCarry) dropEnded() error {
	if len(f.carried) == 0 {
		return nil
	}
	var ended [][]byte
	err := store.Each(f.own, func(key, value []byte) error {
		if life, ok := f.carried[maphash.Bytes(f.hash, key)]; ok && life == lifeOf(value) {
			ended = append(ended, bytes.Clone(key))
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, key := range ended {
		if err := f.own.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete an ended flow from the new table: %w", err)
		}
	}
	return nil
}

// resumeFlows carries the rest over for a process that was killed meanwhile. Entries that have not been seen
// since the switch are as copied. Counts between the copy and the switch are lost with that process.
func resumeFlows(opts store.Options, w conversions, from, since uint32) error {
	if _, ok := w[abi.MapFlows]; !ok {
		return nil
	}
	f := &flowCarry{conversions: w, hash: maphash.MakeSeed(), carried: map[uint64]uint64{}}
	for _, m := range []struct {
		to  **ebpf.Map
		abi uint32
	}{{&f.old, from}, {&f.own, opts.Version.ABI}} {
		opened, err := kernel.OpenMap(filepath.Join(opts.MapDir(m.abi), abi.MapFlows))
		if err != nil {
			return fmt.Errorf("finish an upgrade: %w; `shunt detach` removes the data plane (this ends connections)", err)
		}
		defer opened.Close()
		*m.to = opened
	}
	if err := f.findDirection(opts.Version); err != nil {
		return err
	}
	grace, err := kernel.NewGrace()
	if err != nil {
		return err
	}
	defer grace.Close() //nolint:errcheck // two maps of its own
	err = store.Each(f.own, func(key, value []byte) error {
		if life := lifeOf(value); int32(uint32(life)-since) < 0 {
			f.carried[maphash.Bytes(f.hash, key)] = life
		}
		return nil
	})
	if err != nil {
		return err
	}
	return f.rest(grace.Wait)
}
