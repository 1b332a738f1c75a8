// Package next is the next version of shunt, for tests of upgrades: objects with another ABI,
// which no product binary contains, and the step that leads there. A change of the real ABI is
// made like this one.
package next

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// The environment is the one of internal/lb/datapath, and gen makes the objects from bpf/.
//go:generate go run ./gen

// ABI is one more than this version's.
const ABI = 2

// Version is the next version.
func Version() *abi.Version {
	return &abi.Version{
		ABI: ABI, Steps: []abi.Step{Step()},
		Objects: map[string]func() (*ebpf.CollectionSpec, error){
			"abi": loadAbi, "xdp": loadXdp, "tc": loadTc, "stopgap": loadStopgap, "sweep": loadSweep, "drops": loadDrops, "gate": loadGate, "check": loadCheck, "vlan": loadVlan, "tunnelled": loadTunnelled,
		},
	}
}

// Step leads to the next version: struct flow has a service_index of 32 bits there.
func Step() abi.Step {
	return abi.Step{From: ABI - 1, To: ABI, Maps: map[string]abi.Convert{
		"sh_flows": ConvertFlow, "sh_fragments": nil, // its notes are of flows too, and begin empty
	}}
}

// Offsets in struct flow_key, in both versions.
const (
	keySource, keyDestination, keyPorts, keyProtocol = 0, 16, 32, 36
	keySize                                          = 40
)

// Offsets in struct flow of either version.
const (
	seal, source, destination, ports, nonce, backend, service = 0, 24, 40, 56, 60, 64, 68

	oldGeneration, oldDirection, oldSize = 70, 71, 72
	newGeneration, newDirection, newSize = 72, 73, 80
)

// mix is the constants of bpf/lb/flow.h.
var mix = [...]uint64{0x6a09e667f3bcc909, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
	0x1f83d9abfb41bd6b, 0x5be0cd19137e2179, 0xcbbb9d5dc1059ed9, 0x629a292a367cd507, 0x9159015a3070dd17}

var (
	u16 = binary.NativeEndian.Uint16
	u32 = binary.NativeEndian.Uint32
	u64 = binary.NativeEndian.Uint64
)

// common is the common begin of both seals: the key, the addresses, and the ports with the nonce.
func common(key, flow []byte) uint64 {
	sum := u64(key[keySource:])*mix[0] + u64(key[keySource+8:])*mix[1] +
		u64(key[keyDestination:])*mix[2] + u64(key[keyDestination+8:])*mix[3]
	sum += (uint64(key[keyProtocol])<<32 | uint64(u16(key[keyPorts:]))<<16 | uint64(u16(key[keyPorts+2:]))) * mix[4]
	sum += u64(flow[source:])*mix[5] + u64(flow[source+8:])*mix[6] + u64(flow[destination:])*mix[7] + u64(flow[destination+8:])*mix[8]
	return sum + (uint64(u16(flow[ports:]))<<48|uint64(u16(flow[ports+2:]))<<32|uint64(u32(flow[nonce:])))*mix[9]
}

// ConvertFlow converts an entry of sh_flows.
func ConvertFlow(key, old []byte) (newKey, converted []byte, err error) {
	if len(key) != keySize || len(old) != oldSize {
		return nil, nil, fmt.Errorf("an entry of %d and %d octets is none of ABI %d", len(key), len(old), ABI-1)
	}
	index := uint64(u16(old[service:]))
	kind := uint64(old[oldGeneration])<<8 | uint64(old[oldDirection])
	if u64(old[seal:]) != common(key, old)+(uint64(u32(old[backend:]))<<32|index<<16|kind)*mix[10] {
		return nil, nil, nil // it changed while it was read
	}
	value := make([]byte, newSize)
	copy(value, old[:service])
	binary.NativeEndian.PutUint32(value[service:], uint32(index))
	value[newGeneration], value[newDirection] = old[oldGeneration], old[oldDirection]
	binary.NativeEndian.PutUint64(value[seal:], common(key, value)+(uint64(u32(old[backend:]))<<32|index)*mix[10]+kind*mix[0])
	return key, value, nil
}
