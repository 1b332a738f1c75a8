package store

import (
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// SourcePort is an address and port of this host from which another program sends to a backend.
type SourcePort struct {
	Protocol model.Protocol // TCP or UDP
	Source   netip.AddrPort
	Backend  netip.AddrPort
}

// A reserved port is an entry of sh_flows under the key of a flow's answers. It has FLOW_DEAD, so packets and
// walks ignore it; because the entry exists, no flow that begins can claim the port (bpf/lb/nat.h). A new ABI's
// table begins without reservations.
//
// The first reservation has a key of zeros, which no packet has. By one look-up of this key a process finds out
// whether another process, perhaps a killed one, has left reservations.

// key returns the key of the entry.
func (p SourcePort) key() abi.FlowKey {
	return abi.FlowKey{
		Source: abi.ToAddr(p.Backend.Addr()), SourcePort: kernel.ToWire(p.Backend.Port()),
		Destination: abi.ToAddr(p.Source.Addr()), DestinationPort: kernel.ToWire(p.Source.Port()),
		Protocol: uint8(p.Protocol),
	}
}

// reservation is the entry, which has only its seal (flow_seal of bpf/lb/flow.h, of which the key's part is
// left) and its state.
func reservation(key *abi.FlowKey) abi.Flow {
	last := uint64(key.Protocol)<<32 | uint64(uint32(key.SourcePort)<<16) | uint64(key.DestinationPort)
	var seal uint64
	for i, word := range [...]uint64{key.Source.High, key.Source.Low, key.Destination.High, key.Destination.Low, last} {
		seal += word * sealFactors[i]
	}
	return abi.Flow{Seal: seal, Life: uint64(abi.FLOW_DEAD) << lifeStateShift}
}

// sealFactors are MIX_0 to MIX_4 of bpf/lb/flow.h.
var sealFactors = [...]uint64{0x6a09e667f3bcc909, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1, 0x510e527fade682d1}

// lifeStateShift is LIFE_STATE_SHIFT of bpf/lb/types.h.
const lifeStateShift = 32

// Reserve keeps new flows of full NAT from these ports, each towards its backend, and gives back the ports of
// the call before. A port that a flow has keeps that flow, and is reserved by a later call. Reservations of an
// earlier process count as this process's. Reserve is idempotent, and for one caller at a time. After an error,
// part of the work is done, and the next call does the rest.
func (w *Writer) Reserve(ports []SourcePort) error {
	flows := w.maps[abi.MapFlows]
	if err := w.adoptReserved(flows); err != nil {
		return err
	}
	wanted := make(map[abi.FlowKey]bool, len(ports))
	for _, p := range ports {
		wanted[p.key()] = true
	}
	if len(wanted) > 0 {
		if err := reserve(flows, abi.FlowKey{}); err != nil {
			return err
		}
	}
	for key := range wanted {
		if w.reserved[key] {
			continue
		}
		switch err := reserve(flows, key); {
		case err == nil:
			w.reserved[key] = true
		case !errors.Is(err, ebpf.ErrKeyExist):
			return err
		}
	}
	for key := range w.reserved {
		if wanted[key] {
			continue
		}
		if err := release(flows, key); err != nil {
			return err
		}
		delete(w.reserved, key)
	}
	if len(wanted) == 0 {
		return release(flows, abi.FlowKey{})
	}
	return nil
}

// adoptReserved reads the reservations of an earlier process, once.
func (w *Writer) adoptReserved(flows *ebpf.Map) error {
	if w.reserved != nil {
		return nil
	}
	reserved := map[abi.FlowKey]bool{}
	switch is, err := isReserved(flows, abi.FlowKey{}); {
	case err != nil:
		return err
	case is:
		err := Each(flows, func(k, v []byte) error {
			key, flow := *(*abi.FlowKey)(unsafe.Pointer(&k[0])), *(*abi.Flow)(unsafe.Pointer(&v[0]))
			if key != (abi.FlowKey{}) && flow == reservation(&key) {
				reserved[key] = true
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("look for reserved source ports: %w", err)
		}
	}
	w.reserved = reserved
	return nil
}

func isReserved(flows *ebpf.Map, key abi.FlowKey) (bool, error) {
	var flow abi.Flow
	err := flows.Lookup(&key, &flow)
	if err == nil || errors.Is(err, ebpf.ErrKeyNotExist) {
		return err == nil, nil
	}
	return false, fmt.Errorf("look for reserved source ports: %w", err)
}

// reserve makes one reservation. It returns ErrKeyExist if a flow has the port. The reservation with a key of
// zeros may exist already.
func reserve(flows *ebpf.Map, key abi.FlowKey) error {
	flow := reservation(&key)
	err := flows.Update(&key, &flow, ebpf.UpdateNoExist)
	if err == nil || key == (abi.FlowKey{}) && errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return fmt.Errorf("reserve a source port: %w", NoRoom(err, "limits.flows sizes the table of flows: raise it"))
}

func release(flows *ebpf.Map, key abi.FlowKey) error {
	if err := flows.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("give a source port back: %w", err)
	}
	return nil
}
