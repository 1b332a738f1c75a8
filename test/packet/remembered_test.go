package packet_test

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
)

// rememberedFlags is enum remembered_flag.
type rememberedFlags uint8

const (
	rememberedDead rememberedFlags = 1 << iota
	rememberedSYN
	rememberedFIN
	rememberedReset
	rememberedClient
)

func (f rememberedFlags) String() string {
	var words []string
	for i, word := range []string{"dead", "syn", "fin", "reset", "client"} {
		if f>>i&1 == 1 {
			words = append(words, word)
		}
	}
	return "[" + strings.Join(words, " ") + "]"
}

// rememberedEntry is struct remembered without its seal and nonce.
type rememberedEntry struct {
	backend    reconcile.BackendRef
	seen       uint16 // ticks
	flags      rememberedFlags
	hash       uint32
	service    uint32 // index
	generation uint8  // of the service
}

// Offsets of seen and flags in the word, from its lowest octet (REMEMBERED_SEEN_SHIFT and
// REMEMBERED_FLAGS_SHIFT of bpf/lb/types.h).
const (
	rememberedKeySize, rememberedSize = 40, 24
	seenShift, flagsShift             = 28, 44
)

func decodeRemembered(v []byte) rememberedEntry {
	word, service := binary.NativeEndian.Uint64(v[8:]), binary.NativeEndian.Uint32(v[20:])
	return rememberedEntry{
		backend: reconcile.BackendRef{Index: uint32(word & 0xfffff), Generation: uint8(word >> 20)},
		seen:    uint16(word >> seenShift), flags: rememberedFlags(word >> flagsShift),
		hash: binary.NativeEndian.Uint32(v[16:]), service: service & 0xffffff, generation: uint8(service >> 24),
	}
}

// decodeKey reads a key. A client's has no protocol, and no destination.
func decodeKey(k []byte) flowKey {
	key := flowKey{source: decodeEndpoint(k[:16], k[32:34]), protocol: k[36]}
	if key.protocol != 0 {
		key.destination = decodeEndpoint(k[16:32], k[34:36])
	}
	return key
}

// rememberedTable reads sh_remembered. Nothing may change it meanwhile.
func (w *world) rememberedTable() map[flowKey]rememberedEntry {
	w.Helper()
	if w.remembered.KeySize() != rememberedKeySize || w.remembered.ValueSize() != rememberedSize {
		w.Fatalf("sh_remembered has keys of %d and values of %d bytes; this test reads %d and %d",
			w.remembered.KeySize(), w.remembered.ValueSize(), rememberedKeySize, rememberedSize)
	}
	table := map[flowKey]rememberedEntry{}
	must(w, eachElement(w.remembered, func(k, v []byte) {
		e := decodeRemembered(v)
		if e.flags&rememberedDead != 0 {
			w.Errorf("an entry is dead, and still there: %+v", e)
		}
		table[decodeKey(k)] = e
	}))
	return table
}

// flowOf is the key of a packet's own entry, clientOf the key of its client's.
func flowOf(in packet.Packet) flowKey {
	protocol := uint8(packet.ProtocolTCP)
	if in.UDP != nil {
		protocol = packet.ProtocolUDP
	}
	return flowKey{sourceOf(in), destinationOf(in), protocol}
}

func clientOf(in packet.Packet) flowKey {
	return flowKey{source: netip.AddrPortFrom(in.Source(), 0)}
}

// rawRemembered is a key in the map's bytes.
func (w *world) rawRemembered(key flowKey) []byte {
	w.Helper()
	var k, v []byte
	all := w.remembered.Iterate()
	for all.Next(&k, &v) {
		if decodeKey(k) == key {
			return bytes.Clone(k)
		}
	}
	must(w, all.Err())
	w.Fatalf("nothing is remembered of %v", key)
	return nil
}

// rewriteRemembered changes an entry's word in the map, as another CPU would.
func (w *world) rewriteRemembered(key flowKey, change func(value []byte)) {
	w.Helper()
	k := w.rawRemembered(key)
	v, err := w.remembered.LookupBytes(k)
	must(w, err)
	change(v)
	must(w, w.remembered.Put(k, v))
}

// age makes an entry's last packet older by ticks, of a second or up to 1.7 s each.
func (w *world) age(key flowKey, ticks int) {
	w.Helper()
	w.rewriteRemembered(key, func(v []byte) {
		word := binary.NativeEndian.Uint64(v[8:])
		seen := uint16(word>>seenShift) - uint16(ticks)
		word = word&^(0xffff<<seenShift) | uint64(seen)<<seenShift
		binary.NativeEndian.PutUint64(v[8:], word)
	})
}

// budget lets each CPU make this many entries a tick.
func (w *world) budget(entries uint32) {
	w.Helper()
	const offset = 8 + 7*4 + 2 + 2 + 4 // of remember_budget in struct settings
	settings := w.pinned("sh_settings")
	value, err := settings.LookupBytes(uint32(0))
	must(w, err)
	binary.NativeEndian.PutUint32(value[offset:], entries)
	must(w, settings.Put(uint32(0), value))
}
