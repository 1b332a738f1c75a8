// Package abi is the common language of programs and daemon: the compiled objects, the types and names that
// are generated from them, byte order, and the conversion of the project's values to elements of maps. It loads
// nothing, and touches no map. The other packages of datapath import it, and it imports none of them.
//
// A name is found in C by its own name: struct backend is Backend, the map sh_backends is MapBackends, and constants
// such as FEATURE_VLAN are the same.
package abi

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// This file is the only one that knows byte orders and layouts. The generated types have fields of wire order
// (__beN in types.h) as plain integers: they hold the octets as they are in memory.

const (
	backendIndexMask = 1<<BACKEND_INDEX_BITS - 1
	backendRefMask   = 1<<BACKEND_REF_BITS - 1
	slotStateShift   = 2 * BACKEND_REF_BITS
	slotFlagsShift   = slotStateShift + 4
	slotStateMask    = 1<<4 - 1
	hopMACMask       = 1<<HOP_INTERFACE_SHIFT - 1

	portBits      = 16
	rangeBaseBits = 128 + 8 + 8 // address, protocol and zero, which always count
)

// OwnedForever is the value of owned_until for an address that is owned.
const OwnedForever = ^uint64(0)

// ToAddr returns IPv4 addresses in their IPv6-mapped form, in wire order.
func ToAddr(a netip.Addr) (to Addr) {
	to.High, to.Low = kernel.AddrWords(a)
	return to
}

// FromAddr returns the zero Addr for the zero address, which no host has.
func FromAddr(a Addr) netip.Addr {
	if a.High == 0 && a.Low == 0 {
		return netip.Addr{}
	}
	var b [16]byte
	binary.NativeEndian.PutUint64(b[:8], a.High)
	binary.NativeEndian.PutUint64(b[8:], a.Low)
	return netip.AddrFrom16(b).Unmap()
}

// ToVary returns ones in the host bits of a prefix, as they are in the low word of an address.
func ToVary(p netip.Prefix) uint64 {
	host := p.Addr().BitLen() - p.Bits()
	var b [8]byte
	for i := 0; i < min(host, 64); i++ {
		b[7-i/8] |= 1 << (i % 8)
	}
	return binary.NativeEndian.Uint64(b[:])
}

// ToRef returns a backend as slots and flows name it: generation and index; zero is no backend.
func ToRef(r reconcile.BackendRef) uint32 {
	if r.Index == 0 {
		return 0
	}
	return uint32(r.Generation)<<BACKEND_INDEX_BITS | r.Index&backendIndexMask
}

func fromRef(ref uint32) reconcile.BackendRef {
	return reconcile.BackendRef{Index: ref & backendIndexMask, Generation: uint8(ref >> BACKEND_INDEX_BITS)}
}

// ToDraining returns whether a backend takes new flows. A backend that is down takes none, in any service.
func ToDraining(r reconcile.BackendRecord) uint8 {
	switch {
	case r.Down:
		return uint8(DRAINING_DOWN)
	case r.Draining:
		return uint8(DRAINING_STAY)
	}
	return uint8(DRAINING_NOT)
}

// ToSlot returns a slot as one word: flags, state, current and previous backend.
func ToSlot(s reconcile.Slot) uint64 {
	var flags uint64
	if s.PreviousDrains {
		flags |= uint64(SLOT_PREVIOUS_DRAINS)
	}
	if s.PreviousBefore {
		flags |= uint64(SLOT_PREVIOUS_BEFORE)
	}
	return flags<<slotFlagsShift | uint64(s.State)<<slotStateShift |
		uint64(ToRef(s.Current))<<BACKEND_REF_BITS | uint64(ToRef(s.Previous))
}

// FromSlot is the reverse of ToSlot.
func FromSlot(slot uint64) reconcile.Slot {
	flags := SlotFlag(slot >> slotFlagsShift)
	return reconcile.Slot{
		State:          reconcile.SlotState(slot >> slotStateShift & slotStateMask),
		Current:        fromRef(uint32(slot >> BACKEND_REF_BITS & backendRefMask)),
		Previous:       fromRef(uint32(slot & backendRefMask)),
		PreviousDrains: flags&SLOT_PREVIOUS_DRAINS != 0,
		PreviousBefore: flags&SLOT_PREVIOUS_BEFORE != 0,
	}
}

// ToHop returns a next hop as one word: the interface's index in sh_interfaces, and the hardware address.
func ToHop(mac net.HardwareAddr, index uint32) uint64 {
	return kernel.MACWord(mac)&hopMACMask | uint64(index&uint32(HOP_INTERFACE_MASK))<<HOP_INTERFACE_SHIFT
}

// ToRun returns a run of elements of an array as one word.
func ToRun(first, count uint32) uint64 { return uint64(first)<<32 | uint64(count) }

// FromRun is the reverse of ToRun.
func FromRun(run uint64) (first, count uint32) { return uint32(run >> 32), uint32(run) }

// The programs look for frontends of fragments, of clients on this host, and of packets between nodes, only after these are written.
var (
	_ [0]struct{} = [model.Fragments - model.Protocol(FRONTEND_FRAGMENTS)]struct{}{}
	_ [0]struct{} = [model.Inside - model.Protocol(FRONTEND_INSIDE)]struct{}{}
	_ [0]struct{} = [model.Tunnelled - model.Protocol(FRONTEND_TUNNELLED)]struct{}{}
)

// ToFrontendKey returns the key of a frontend with one port.
func ToFrontendKey(f model.Frontend) FrontendKey {
	return FrontendKey{Address: ToAddr(f.Address), Port: kernel.ToWire(f.Ports.First), Protocol: uint8(f.Protocol)}
}

// FromFrontendKey is the reverse of ToFrontendKey.
func FromFrontendKey(k FrontendKey) model.Frontend {
	port := kernel.FromWire(k.Port)
	f := model.Frontend{Address: FromAddr(k.Address), Ports: value.PortRange{First: port, Last: port}, Protocol: model.Protocol(k.Protocol)}
	if f.Tunnelled() && !f.Address.IsValid() {
		f.Address = netip.IPv6Unspecified()
	}
	return f
}

// AddrCheck returns the check of an address that struct frontend in bpf/lb/types.h describes.
func AddrCheck(a netip.Addr) uint32 {
	b := a.As16()
	var check uint32
	for i := 0; i < len(b); i += 4 {
		check ^= binary.NativeEndian.Uint32(b[i:])
	}
	return check
}

// IsOwn reports whether an address's flags make it a VIP or a NAT source.
func IsOwn(flags uint32) bool {
	return AddressFlag(flags)&(ADDRESS_VIP|ADDRESS_SOURCE) != 0
}

// OwnBit returns an address's word and bit of own_addresses, as addr_may_be_own in bpf/lb/lookup.h finds them.
func OwnBit(a netip.Addr) (word uint32, bit uint64) {
	const bits = uint64(len(Settings{}.OwnAddresses)) * 64
	n := uint32(uint64(AddrCheck(a)*0x9e3779b1) * bits >> 32)
	return n / 64, 1 << (n % 64)
}

// ToFrontend returns a frontend's value: the service, with a check of the key.
func ToFrontend(f model.Frontend, service uint32) Frontend {
	check := AddrCheck(f.Address) ^ uint32(f.Protocol)<<16
	if f.Ports.Exact() {
		check ^= uint32(f.Ports.First)
	}
	return Frontend{ServiceIndex: service, Check: check}
}

// ToRangeKeys cuts a range of ports into prefixes: at each step the largest aligned block
// that begins at first and does not pass last. At most 30 (2*(16-1)).
func ToRangeKeys(f model.Frontend) []RangeKey {
	base := RangeKey{Protocol: uint8(f.Protocol)}
	b := f.Address.As16()
	for i := range base.Address {
		base.Address[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	var keys []RangeKey
	first, last := uint32(f.Ports.First), uint32(f.Ports.Last)
	for first <= last {
		bits := 0 // of the block's size
		for bits < portBits && first&(1<<(bits+1)-1) == 0 && first+1<<(bits+1)-1 <= last {
			bits++
		}
		key := base
		key.PrefixLength = uint32(rangeBaseBits + portBits - bits)
		key.Port = kernel.ToWire(uint16(first))
		keys = append(keys, key)
		first += 1 << bits
	}
	return keys
}

// FromRangeKey returns one prefix as a frontend.
func FromRangeKey(k RangeKey) model.Frontend {
	var b [16]byte
	for i, word := range k.Address {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	size := uint32(1) << (rangeBaseBits + portBits - k.PrefixLength)
	first := kernel.FromWire(k.Port)
	return model.Frontend{
		Address:  netip.AddrFrom16(b).Unmap(),
		Ports:    value.PortRange{First: first, Last: uint16(uint32(first) + size - 1)},
		Protocol: model.Protocol(k.Protocol),
	}
}

const (
	filterServiceBits = 32       // of an LPM key, before the address
	mappedBits        = 128 - 32 // of an address before the IPv4 one in it
	tenantShift       = 24       // of a service's tenant: generation above, index below
	tenantIndexMask   = 1<<tenantShift - 1
)

// ToTenant returns a service's position and generation in the form that keys have.
func ToTenant(index uint32, generation uint8) uint32 { return uint32(generation)<<tenantShift | index }

// toFilterBits returns a prefix's length among the bits of an address in the maps.
func toFilterBits(p netip.Prefix) int {
	if p.Addr().Is4() {
		return mappedBits + p.Bits()
	}
	return p.Bits()
}

// ToFilterKey returns the key of a prefix of sources, for one tenant of a service's position.
func ToFilterKey(f reconcile.Filter) FilterKey {
	key := FilterKey{
		PrefixLength: uint32(filterServiceBits + toFilterBits(f.Prefix)),
		Service:      ToTenant(f.Service, f.Generation),
	}
	b := f.Prefix.Masked().Addr().As16()
	for i := range key.Address {
		key.Address[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return key
}

// FromFilterKey is the reverse of ToFilterKey.
func FromFilterKey(k FilterKey) reconcile.Filter {
	var b [16]byte
	for i, word := range k.Address {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	address, bits := netip.AddrFrom16(b), int(k.PrefixLength)-filterServiceBits
	if address.Is4In6() && bits >= mappedBits {
		address, bits = address.Unmap(), bits-mappedBits
	}
	return reconcile.Filter{Service: k.Service & tenantIndexMask, Generation: uint8(k.Service >> tenantShift),
		Prefix: netip.PrefixFrom(address, bits)}
}

// ToFilter returns a filter's value, with a check of the key (struct filter in types.h).
func ToFilter(f reconcile.Filter, allow bool) Filter {
	verdict := uint32(toFilterBits(f.Prefix)) << FILTER_BITS_SHIFT
	if allow {
		verdict |= uint32(FILTER_ALLOWS)
	}
	return Filter{Verdict: verdict, Check: AddrCheck(f.Prefix.Masked().Addr()) ^ ToFilterKey(f).Service}
}

// Forwardings and Trackings are the words for the numbers of types.h.
var (
	Forwardings = []model.Forwarding{
		FORWARDING_NAT:             model.ForwardingNAT,
		FORWARDING_NAT_DESTINATION: model.ForwardingNATDestination,
		FORWARDING_DSR_L2:          model.ForwardingDSRL2,
		FORWARDING_DSR_IPIP:        model.ForwardingDSRIPIP,
		FORWARDING_DSR_GUE:         model.ForwardingDSRGUE,
	}
	Trackings = []model.Tracking{
		TRACKING_AUTO:   model.TrackingAuto,
		TRACKING_ALWAYS: model.TrackingAlways,
		TRACKING_NONE:   model.TrackingNone,
	}
)

// ToNumber returns the number of a word; the first number if there is no word.
func ToNumber[T ~string](words []T, word T) (uint8, bool) {
	if word == "" {
		return 0, true
	}
	i := slices.Index(words, word)
	return uint8(max(i, 0)), i >= 0
}

// FromNumber returns the word of a number. A number that a newer version wrote counts as the first.
func FromNumber[T ~string](words []T, number uint8) T {
	return words[min(int(number), len(words)-1)]
}

// ToFlags returns the flags of struct address.
func ToFlags(r reconcile.AddressRecord) uint32 {
	var flags AddressFlag
	for flag, set := range map[AddressFlag]bool{
		ADDRESS_VIP: r.VIP, ADDRESS_SOURCE: r.Source,
		ADDRESS_HOST_OWN: r.HostOwn, ADDRESS_ANNOUNCE: r.Announce,
		ADDRESS_DIRECT: r.Direct,
	} {
		if set {
			flags |= flag
		}
	}
	return uint32(flags)
}

// FromFlags is the reverse of ToFlags.
func FromFlags(address netip.Addr, bits uint32) reconcile.AddressRecord {
	flags := AddressFlag(bits)
	return reconcile.AddressRecord{
		Address: address,
		VIP:     flags&ADDRESS_VIP != 0, Source: flags&ADDRESS_SOURCE != 0,
		HostOwn: flags&ADDRESS_HOST_OWN != 0, Announce: flags&ADDRESS_ANNOUNCE != 0,
		Direct: flags&ADDRESS_DIRECT != 0,
	}
}

// ToName returns a name of at most 63 octets.
func ToName(s string) (n Name) {
	copy(n.Text[:len(n.Text)-1], s)
	return n
}

// FromName is the reverse of ToName.
func FromName(n Name) string {
	for i, c := range n.Text {
		if c == 0 {
			return string(n.Text[:i])
		}
	}
	return string(n.Text[:])
}

// Array is a memory-mapped array of T as the programs see it.
func Array[T any](memory []byte) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(memory))), len(memory)/int(unsafe.Sizeof(t)))
}

// BackendTail is the last word of struct backend, ServiceTail the words of struct service from seed to
// tracking, and ServiceAffinity the word after these: fields that are stored together.
func BackendTail(b *Backend) *uint64 { return (*uint64)(unsafe.Pointer(&b.Port)) }

// ServiceTail: see BackendTail.
func ServiceTail(s *Service) *uint64 { return (*uint64)(unsafe.Pointer(&s.Seed)) }

// ServiceAffinity: see BackendTail.
func ServiceAffinity(s *Service) *uint64 {
	return (*uint64)(unsafe.Pointer(&s.AffinityTicks))
}

// serviceMSS is the word that begins with tcp_mss.
func serviceMSS(s *Service) *uint32 { return (*uint32)(unsafe.Pointer(&s.TcpMss)) }

// StorePolicy stores the fields of model.Policy one by one: none depends on another.
func StorePolicy(s *Service, record Service) {
	atomic.StoreUint32(&s.Flags, record.Flags)
	atomic.StoreUint32(&s.FlowsMax, record.FlowsMax)
	atomic.StoreUint32(&s.SourceRate, record.SourceRate)
	atomic.StoreUint32(serviceMSS(s), *serviceMSS(&record))
}

// policyFlags are the bits of struct service's flags by the fields of model.Policy.
func policyFlags(p *model.Policy) map[ServiceFlag]*bool {
	return map[ServiceFlag]*bool{
		SERVICE_REJECTS:          &p.Rejects,
		SERVICE_HASHES_ADDRESSES: &p.HashAddresses,
		SERVICE_FILTERS:          &p.Filters,
		SERVICE_INSIDE:           &p.Inside,
		SERVICE_PASSES_BEGUN:     &p.PassesBegun,
		SERVICE_DRAWS:            &p.Draws,
		SERVICE_TUNNELLED:        &p.Tunnelled,
	}
}

// ToPolicy returns the flags of struct service.
func ToPolicy(p model.Policy) (flags uint32) {
	for bit, on := range policyFlags(&p) {
		if *on {
			flags |= uint32(bit)
		}
	}
	return flags
}

// FromPolicy returns the policy in a service's record.
func FromPolicy(s *Service) model.Policy {
	p := model.Policy{FlowsMax: s.FlowsMax, SourceRate: s.SourceRate, TCPMSS: s.TcpMss}
	for bit, on := range policyFlags(&p) {
		*on = s.Flags&uint32(bit) != 0
	}
	return p
}

// StoreAddr stores an address word by word: no program may use it meanwhile.
func StoreAddr(to *Addr, a Addr) {
	atomic.StoreUint64(&to.High, a.High)
	atomic.StoreUint64(&to.Low, a.Low)
}

// StorePorts writes the first port and the count of the NAT pool in one word.
func StorePorts(s *Settings, first, count uint16) {
	var b [4]byte
	binary.NativeEndian.PutUint16(b[:2], first)
	binary.NativeEndian.PutUint16(b[2:], count)
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&s.PortFirst)), binary.NativeEndian.Uint32(b[:]))
}

// PortCount returns the count that StorePorts has written.
func PortCount(s *Settings) uint16 {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], atomic.LoadUint32((*uint32)(unsafe.Pointer(&s.PortFirst))))
	return binary.NativeEndian.Uint16(b[2:])
}

// Bool returns a flag as programs read it.
func Bool(on bool) uint8 {
	if on {
		return 1
	}
	return 0
}
