package kernel

import (
	"encoding/binary"
	"net"
	"net/netip"
)

// AddrWords returns an address of either family in the form of struct addr of bpf/core/types.h.
func AddrWords(a netip.Addr) (high, low uint64) {
	b := a.As16()
	return binary.NativeEndian.Uint64(b[:8]), binary.NativeEndian.Uint64(b[8:])
}

// AddrOf is the inverse of AddrWords: an IPv4 address is one again.
func AddrOf(high, low uint64) netip.Addr {
	var b [16]byte
	binary.NativeEndian.PutUint64(b[:8], high)
	binary.NativeEndian.PutUint64(b[8:], low)
	return netip.AddrFrom16(b).Unmap()
}

// MACWord returns an Ethernet address in the form of mac_load() of bpf/core/packet.h: the first octet lowest.
func MACWord(mac net.HardwareAddr) (word uint64) {
	for i := range 6 {
		word |= uint64(mac[i]) << (8 * i)
	}
	return word
}

// ToWire turns a port from host to wire order; FromWire is its inverse.
func ToWire(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// FromWire turns a port from wire to host order.
func FromWire(port uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], port)
	return binary.BigEndian.Uint16(b[:])
}
