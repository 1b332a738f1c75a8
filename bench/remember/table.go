package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// Bits of remembered.word (bpf/lb/types.h), which are macros and so not in the BTF.
const (
	backendBits = 28
	seenShift   = 28
	seenMask    = 0xffff
	flagsShift  = 44
	flagFIN     = 0x04
)

// unbounded is the budget of new entries in the simulation. The programs count it per
// second of real time, in which many simulated ones go by.
const unbounded = 1 << 30

// walkBatch is the number of entries that one system call reads.
const walkBatch = 4096

type (
	keyBytes   [40]byte // struct flow_key
	entryBytes [24]byte // struct remembered
)

// table is sh_remembered, seen from outside of the data plane.
type table struct {
	remembered, settings *ebpf.Map
	word, hash           uint32 // offsets in an entry
	source, port         uint32 // offsets in a key
	tick                 time.Duration
	shifted              int64 // ticks the entries were aged by
	begun                time.Time

	// Room for a walk.
	keys    []keyBytes
	entries []entryBytes
}

// openTable opens the maps of an instance and lifts the budget of new entries.
func openTable(instance string) (*table, error) {
	t := &table{begun: time.Now()}
	for name, m := range map[string]**ebpf.Map{"sh_remembered": &t.remembered, "sh_settings": &t.settings} {
		path := filepath.Join(kernel.DefaultPinRoot, "shunt", instance, "abi-1", name)
		var err error
		if *m, err = ebpf.LoadPinnedMap(path, nil); err != nil {
			return nil, errors.Join(fmt.Errorf("open the map pinned at %s: %w", path, err), t.close())
		}
	}
	if err := t.prepare(); err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

func (t *table) close() error {
	var errs []error
	for _, m := range []*ebpf.Map{t.remembered, t.settings} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

func (t *table) prepare() error {
	if t.remembered.KeySize() != uint32(len(keyBytes{})) || t.remembered.ValueSize() != uint32(len(entryBytes{})) {
		return fmt.Errorf("entries of sh_remembered have %d and %d bytes, this program expects %d and %d: adapt bench/remember to bpf/lb/types.h",
			t.remembered.KeySize(), t.remembered.ValueSize(), len(keyBytes{}), len(entryBytes{}))
	}
	t.keys = make([]keyBytes, t.remembered.MaxEntries())
	t.entries = make([]entryBytes, t.remembered.MaxEntries())
	var budget, jiffies uint32
	for _, field := range []struct {
		m              *ebpf.Map
		record, member string
		offset         *uint32
	}{
		{t.remembered, "remembered", "word", &t.word}, {t.remembered, "remembered", "hash", &t.hash},
		{t.remembered, "flow_key", "source", &t.source}, {t.remembered, "flow_key", "source_port", &t.port},
		{t.settings, "settings", "remember_budget", &budget}, {t.settings, "settings", "timeouts", &jiffies},
	} {
		var err error
		if *field.offset, err = offsetOf(field.m, field.record, field.member); err != nil {
			return fmt.Errorf("find %s in struct %s: %w", field.member, field.record, err)
		}
	}
	settings, err := t.settings.LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read sh_settings: %w", err)
	}
	// The first timeout is that of established connections, and gives the length of a jiffy. A tick
	// is the least power of two of jiffies that lasts a second (bpf/lb/config.h).
	rate := int64(binary.NativeEndian.Uint32(settings[jiffies:])) / int64(timeouts(0).TCPEstablished/time.Second)
	ticks := int64(1)
	for ticks < rate {
		ticks *= 2
	}
	t.tick = time.Duration(ticks) * time.Second / time.Duration(rate)
	binary.NativeEndian.PutUint32(settings[budget:], unbounded)
	if err := t.settings.Put(uint32(0), settings); err != nil {
		return fmt.Errorf("lift the budget of new entries in sh_settings: %w", err)
	}
	return nil
}

// offsetOf asks a map's own type information where a member is.
func offsetOf(m *ebpf.Map, record, member string) (uint32, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	id, ok := info.BTFID()
	if !ok {
		return 0, errors.New("the map has no BTF")
	}
	handle, err := btf.NewHandleFromID(id)
	if err != nil {
		return 0, err
	}
	defer handle.Close()
	spec, err := handle.Spec(nil)
	if err != nil {
		return 0, err
	}
	var found *btf.Struct
	if err := spec.TypeByName(record, &found); err != nil {
		return 0, err
	}
	for _, one := range found.Members {
		if one.Name == member {
			return one.Offset.Bytes(), nil
		}
	}
	return 0, errors.New("there is no such member")
}

// walk reads all entries, and returns their number.
func (t *table) walk() (int, error) {
	var cursor ebpf.MapBatchCursor
	read := 0
	for {
		end := min(read+walkBatch, len(t.keys))
		n, err := t.remembered.BatchLookup(&cursor, t.keys[read:end], t.entries[read:end], nil)
		read += n
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return read, nil
		}
		if err != nil {
			return read, fmt.Errorf("read sh_remembered: %w", err)
		}
		if read == len(t.keys) {
			return read, nil
		}
	}
}

func (t *table) entryWord(i int) uint64 {
	return binary.NativeEndian.Uint64(t.entries[i][t.word:])
}

// age makes all entries as old as they are when this much simulated time has gone by since the
// table was opened. The real time since then has aged them already.
func (t *table) age(simulated time.Duration) error {
	ticks := int64(simulated/t.tick) - int64(time.Since(t.begun)/t.tick) - t.shifted
	if ticks <= 0 {
		return nil
	}
	t.shifted += ticks
	n, err := t.walk()
	if err != nil {
		return err
	}
	for i := range n {
		word := t.entryWord(i)
		seen := (word>>seenShift - uint64(ticks)) & seenMask
		word = word&^(seenMask<<seenShift) | seen<<seenShift
		binary.NativeEndian.PutUint64(t.entries[i][t.word:], word)
	}
	if n == 0 {
		return nil
	}
	if _, err := t.remembered.BatchUpdate(t.keys[:n], t.entries[:n], nil); err != nil {
		return fmt.Errorf("age the entries of sh_remembered: %w", err)
	}
	return nil
}

// entry is one entry of the table.
type entry struct {
	client  clientID
	hash    uint32
	backend uint32 // reference
	closed  bool   // the client's FIN was seen
}

// all reads the table.
func (t *table) all(each func(entry)) error {
	n, err := t.walk()
	if err != nil {
		return err
	}
	for i := range n {
		word := t.entryWord(i)
		each(entry{
			// An IPv4 address is the last four bytes of sixteen.
			client: newClientID(t.keys[i][t.source+12:], t.keys[i][t.port:]),
			hash:   binary.NativeEndian.Uint32(t.entries[i][t.hash:]), backend: uint32(word & (1<<backendBits - 1)),
			closed: word>>flagsShift&flagFIN != 0,
		})
	}
	return nil
}
