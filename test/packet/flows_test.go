package packet_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/shunt-lb/shunt/internal/packet"
)

// flowKey is a packet's tuple, as in struct flow_key of bpf/core/types.h.
type flowKey struct {
	source, destination netip.AddrPort
	protocol            uint8
}

// flowEntry is the part of struct flow that tests read.
type flowEntry struct {
	source, destination netip.AddrPort
	state               flowState
	nonce, backend      uint32
	service             uint16
	direction           uint8 // 0 from the client, 1 from the backend
}

// flowState is enum flow_state.
type flowState uint8

const (
	dead flowState = 1 << iota
	slotted
	replied
	established
	reset
	finClient
	finBackend
	backendFirst
)

func (s flowState) String() string {
	var words []string
	for i, word := range []string{"dead", "slotted", "replied", "established", "reset", "fin_client", "fin_backend", "backend_first"} {
		if s>>i&1 == 1 {
			words = append(words, word)
		}
	}
	return "[" + strings.Join(words, " ") + "]"
}

func (s flowState) closed() bool {
	return s&reset != 0 || s&(finClient|finBackend) == finClient|finBackend
}

func decodeEndpoint(address, port []byte) netip.AddrPort {
	a := netip.AddrFrom16([16]byte(address)).Unmap()
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port))
}

// flowTable reads sh_flows. Nothing may change it meanwhile.
func (w *world) flowTable() map[flowKey]flowEntry {
	w.Helper()
	const keySize, flowSize = 40, 72
	if w.flows.KeySize() != keySize || w.flows.ValueSize() != flowSize {
		w.Fatalf("sh_flows has keys of %d and values of %d bytes; this test reads %d and %d", w.flows.KeySize(), w.flows.ValueSize(), keySize, flowSize)
	}
	table := map[flowKey]flowEntry{}
	must(w, eachElement(w.flows, func(k, v []byte) {
		life := binary.NativeEndian.Uint64(v[8:])
		e := flowEntry{
			source: decodeEndpoint(v[24:40], v[56:58]), destination: decodeEndpoint(v[40:56], v[58:60]),
			state: flowState(life >> 32), nonce: binary.NativeEndian.Uint32(v[60:]),
			backend: binary.NativeEndian.Uint32(v[64:]), service: binary.NativeEndian.Uint16(v[68:]), direction: v[71],
		}
		if uint32(life>>40) != e.nonce&0xffffff {
			w.Errorf("an entry's life is of nonce %#x, the entry of %#x", life>>40, e.nonce)
		}
		table[flowKey{decodeEndpoint(k[:16], k[32:34]), decodeEndpoint(k[16:32], k[34:36]), k[36]}] = e
	}))
	return table
}

// rawFlow is the entry of a packet's tuple, in the map's bytes.
func (w *world) rawFlow(in packet.Packet) (key, value []byte) {
	w.Helper()
	protocol := uint8(packet.ProtocolTCP)
	if in.UDP != nil {
		protocol = packet.ProtocolUDP
	}
	all := w.flows.Iterate()
	for all.Next(&key, &value) {
		if key[36] == protocol && decodeEndpoint(key[:16], key[32:34]) == sourceOf(in) && decodeEndpoint(key[16:32], key[34:36]) == destinationOf(in) {
			return bytes.Clone(key), bytes.Clone(value)
		}
	}
	must(w, all.Err())
	w.Fatalf("there is no flow of %s", in)
	return nil, nil
}

// ageFlow makes the last packet of a packet's flow at least a second older.
func (w *world) ageFlow(in packet.Packet) {
	w.Helper()
	const jiffies = 1 << 10 // a second has no more
	key, value := w.rawFlow(in)
	life := binary.NativeEndian.Uint64(value[8:])
	binary.NativeEndian.PutUint64(value[8:], life&^(1<<32-1)|uint64(uint32(life)-jiffies))
	must(w, w.flows.Put(key, value))
}

// soundTable reads the flow table and expects every entry to have its twin: no port with two owners,
// and no orphan claim, except on ports that rest.
func (w *world) soundTable() map[flowKey]flowEntry {
	w.Helper()
	table := w.flowTable()
	faults := 0
	for k, e := range table {
		twin, ok := table[flowKey{e.destination, e.source, k.protocol}]
		fault := ""
		switch {
		case e.state&dead != 0:
			fault = "is dead, and still there"
		case (!ok || twin.nonce != e.nonce) && e.direction == 1 && e.state.closed():
			// The client has begun another connection, to another backend; the port rests.
		case !ok:
			fault = "has no twin"
		case twin.nonce != e.nonce || twin.backend != e.backend || twin.direction == e.direction:
			fault = fmt.Sprintf("has a twin of another flow, %+v", twin)
		case twin.source != k.destination || twin.destination != k.source:
			fault = fmt.Sprintf("has a twin that does not lead back, %+v", twin)
		}
		if fault == "" {
			continue
		}
		if faults++; faults <= 5 {
			w.Errorf("the entry %v of direction %d %s: %+v", k, e.direction, fault, e)
		}
	}
	if faults > 5 {
		w.Errorf("and %d faults more", faults-5)
	}
	w.checkFlowCounts()
	return table
}

// created is the number of flows that all services have counted.
func (w *world) created() uint64 {
	w.Helper()
	counters, err := w.d.Counters()
	must(w, err)
	sum := uint64(0)
	for _, s := range counters.Services {
		sum += s.FlowsCreated
	}
	return sum
}
