package datapath

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

// This file is the only one that knows byte orders and layouts. The generated types have
// fields of wire order (__beN in types.h) as plain integers: they hold the octets as
// they lie in memory.

const (
	backendIndexMask = 1<<abiConstantBACKEND_INDEX_BITS - 1
	backendRefMask   = 1<<abiConstantBACKEND_REF_BITS - 1
	slotStateShift   = 2 * abiConstantBACKEND_REF_BITS
	slotFlagsShift   = slotStateShift + 4
	slotStateMask    = 1<<4 - 1
	hopMACMask       = 1<<abiConstantHOP_INTERFACE_SHIFT - 1
	ownedForever     = ^uint64(0)

	portBits      = 16
	rangeBaseBits = 128 + 8 + 8 // address, protocol and zero, which always count
)

func toAddr(a netip.Addr) (to abiAddr) {
	to.High, to.Low = kernel.AddrWords(a)
	return to
}

// fromAddr is the zero Addr for the zero address, which nobody has.
func fromAddr(a abiAddr) netip.Addr {
	if a.High == 0 && a.Low == 0 {
		return netip.Addr{}
	}
	var b [16]byte
	binary.NativeEndian.PutUint64(b[:8], a.High)
	binary.NativeEndian.PutUint64(b[8:], a.Low)
	return netip.AddrFrom16(b).Unmap()
}

// toVary has ones in the host bits of a prefix, as they lie in the low word of an address.
func toVary(p netip.Prefix) uint64 {
	host := p.Addr().BitLen() - p.Bits()
	var b [8]byte
	for i := 0; i < min(host, 64); i++ {
		b[7-i/8] |= 1 << (i % 8)
	}
	return binary.NativeEndian.Uint64(b[:])
}

func toRef(r reconcile.BackendRef) uint32 {
	if r.Index == 0 {
		return 0
	}
	return uint32(r.Generation)<<abiConstantBACKEND_INDEX_BITS | r.Index&backendIndexMask
}

func fromRef(ref uint32) reconcile.BackendRef {
	return reconcile.BackendRef{Index: ref & backendIndexMask, Generation: uint8(ref >> abiConstantBACKEND_INDEX_BITS)}
}

// toDraining is how a backend stands to new flows. One that is down takes none, anywhere.
func toDraining(r reconcile.BackendRecord) uint8 {
	switch {
	case r.Down:
		return uint8(abiDrainingDRAINING_DOWN)
	case r.Draining:
		return uint8(abiDrainingDRAINING_STAY)
	}
	return uint8(abiDrainingDRAINING_NOT)
}

func toSlot(s reconcile.Slot) uint64 {
	var flags uint64
	if s.PreviousDrains {
		flags |= uint64(abiSlotFlagSLOT_PREVIOUS_DRAINS)
	}
	if s.PreviousBefore {
		flags |= uint64(abiSlotFlagSLOT_PREVIOUS_BEFORE)
	}
	return flags<<slotFlagsShift | uint64(s.State)<<slotStateShift |
		uint64(toRef(s.Current))<<abiConstantBACKEND_REF_BITS | uint64(toRef(s.Previous))
}

func fromSlot(slot uint64) reconcile.Slot {
	flags := abiSlotFlag(slot >> slotFlagsShift)
	return reconcile.Slot{
		State:          reconcile.SlotState(slot >> slotStateShift & slotStateMask),
		Current:        fromRef(uint32(slot >> abiConstantBACKEND_REF_BITS & backendRefMask)),
		Previous:       fromRef(uint32(slot & backendRefMask)),
		PreviousDrains: flags&abiSlotFlagSLOT_PREVIOUS_DRAINS != 0,
		PreviousBefore: flags&abiSlotFlagSLOT_PREVIOUS_BEFORE != 0,
	}
}

func toHop(mac net.HardwareAddr, index uint32) uint64 {
	return kernel.MACWord(mac)&hopMACMask | uint64(index&uint32(abiConstantHOP_INTERFACE_MASK))<<abiConstantHOP_INTERFACE_SHIFT
}

func toRun(first, count uint32) uint64 { return uint64(first)<<32 | uint64(count) }

func fromRun(run uint64) (first, count uint32) { return uint32(run >> 32), uint32(run) }

// The programs look for frontends of fragments, and of clients on this host, where these are written.
var (
	_ [0]struct{} = [model.Fragments - model.Protocol(abiConstantFRONTEND_FRAGMENTS)]struct{}{}
	_ [0]struct{} = [model.Inside - model.Protocol(abiConstantFRONTEND_INSIDE)]struct{}{}
)

func toFrontendKey(f model.Frontend) abiFrontendKey {
	return abiFrontendKey{Address: toAddr(f.Address), Port: kernel.ToWire(f.Ports.First), Protocol: uint8(f.Protocol)}
}

func fromFrontendKey(k abiFrontendKey) model.Frontend {
	port := kernel.FromWire(k.Port)
	return model.Frontend{Address: fromAddr(k.Address), Ports: value.PortRange{First: port, Last: port}, Protocol: model.Protocol(k.Protocol)}
}

// addrCheck is the check of an address that struct frontend in bpf/lb/types.h describes.
func addrCheck(a netip.Addr) uint32 {
	b := a.As16()
	var check uint32
	for i := 0; i < len(b); i += 4 {
		check ^= binary.NativeEndian.Uint32(b[i:])
	}
	return check
}

// isOwn reports whether an address's flags make it a VIP or a NAT source.
func isOwn(flags uint32) bool {
	return abiAddressFlag(flags)&(abiAddressFlagADDRESS_VIP|abiAddressFlagADDRESS_SOURCE) != 0
}

// ownBit is an address's word and bit of own_addresses, as addr_may_be_own in bpf/lb/lookup.h finds them.
func ownBit(a netip.Addr) (word uint32, bit uint64) {
	const bits = uint64(len(abiSettings{}.OwnAddresses)) * 64
	n := uint32(uint64(addrCheck(a)*0x9e3779b1) * bits >> 32)
	return n / 64, 1 << (n % 64)
}

// toFrontend makes a frontend's value: the service, with a check of the key.
func toFrontend(f model.Frontend, service uint32) abiFrontend {
	check := addrCheck(f.Address) ^ uint32(f.Protocol)<<16
	if f.Ports.Exact() {
		check ^= uint32(f.Ports.First)
	}
	return abiFrontend{ServiceIndex: service, Check: check}
}

// toRangeKeys cuts a range of ports into prefixes: at each step the largest aligned block
// that begins at first and does not pass last. At most 30 (2*(16-1)).
func toRangeKeys(f model.Frontend) []abiRangeKey {
	base := abiRangeKey{Protocol: uint8(f.Protocol)}
	b := f.Address.As16()
	for i := range base.Address {
		base.Address[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	var keys []abiRangeKey
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

// fromRangeKey is one prefix as a frontend.
func fromRangeKey(k abiRangeKey) model.Frontend {
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

// toTenant is a service's position and generation as keys have them.
func toTenant(index uint32, generation uint8) uint32 { return uint32(generation)<<tenantShift | index }

// toFilterBits is a prefix's length among the bits of an address as the maps have it.
func toFilterBits(p netip.Prefix) int {
	if p.Addr().Is4() {
		return mappedBits + p.Bits()
	}
	return p.Bits()
}

func toFilterKey(f reconcile.Filter) abiFilterKey {
	key := abiFilterKey{
		PrefixLength: uint32(filterServiceBits + toFilterBits(f.Prefix)),
		Service:      toTenant(f.Service, f.Generation),
	}
	b := f.Prefix.Masked().Addr().As16()
	for i := range key.Address {
		key.Address[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return key
}

func fromFilterKey(k abiFilterKey) reconcile.Filter {
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

// toFilter makes a filter's value, with a check of the key (struct filter in types.h).
func toFilter(f reconcile.Filter, allow bool) abiFilter {
	verdict := uint32(toFilterBits(f.Prefix)) << abiConstantFILTER_BITS_SHIFT
	if allow {
		verdict |= uint32(abiConstantFILTER_ALLOWS)
	}
	return abiFilter{Verdict: verdict, Check: addrCheck(f.Prefix.Masked().Addr()) ^ toFilterKey(f).Service}
}

// forwardings and trackings are the words for the numbers of types.h.
var (
	forwardings = []model.Forwarding{
		abiForwardingFORWARDING_NAT:             model.ForwardingNAT,
		abiForwardingFORWARDING_NAT_DESTINATION: model.ForwardingNATDestination,
		abiForwardingFORWARDING_DSR_L2:          model.ForwardingDSRL2,
		abiForwardingFORWARDING_DSR_IPIP:        model.ForwardingDSRIPIP,
		abiForwardingFORWARDING_DSR_GUE:         model.ForwardingDSRGUE,
	}
	trackings = []model.Tracking{
		abiTrackingTRACKING_AUTO:   model.TrackingAuto,
		abiTrackingTRACKING_ALWAYS: model.TrackingAlways,
		abiTrackingTRACKING_NONE:   model.TrackingNone,
	}
)

// toNumber is the number of a word; no word is the first.
func toNumber[T ~string](words []T, word T) (uint8, bool) {
	if word == "" {
		return 0, true
	}
	i := slices.Index(words, word)
	return uint8(max(i, 0)), i >= 0
}

// fromNumber is the word of a number. A number that a newer version wrote is the first.
func fromNumber[T ~string](words []T, number uint8) T {
	return words[min(int(number), len(words)-1)]
}

func toFlags(r reconcile.AddressRecord) uint32 {
	var flags abiAddressFlag
	for flag, set := range map[abiAddressFlag]bool{
		abiAddressFlagADDRESS_VIP: r.VIP, abiAddressFlagADDRESS_SOURCE: r.Source,
		abiAddressFlagADDRESS_HOST_OWN: r.HostOwn, abiAddressFlagADDRESS_ANNOUNCE: r.Announce,
		abiAddressFlagADDRESS_DIRECT: r.Direct,
	} {
		if set {
			flags |= flag
		}
	}
	return uint32(flags)
}

func fromFlags(address netip.Addr, bits uint32) reconcile.AddressRecord {
	flags := abiAddressFlag(bits)
	return reconcile.AddressRecord{
		Address: address,
		VIP:     flags&abiAddressFlagADDRESS_VIP != 0, Source: flags&abiAddressFlagADDRESS_SOURCE != 0,
		HostOwn: flags&abiAddressFlagADDRESS_HOST_OWN != 0, Announce: flags&abiAddressFlagADDRESS_ANNOUNCE != 0,
		Direct: flags&abiAddressFlagADDRESS_DIRECT != 0,
	}
}

func toName(s string) (n abiName) {
	copy(n.Text[:len(n.Text)-1], s)
	return n
}

func fromName(n abiName) string {
	for i, c := range n.Text {
		if c == 0 {
			return string(n.Text[:i])
		}
	}
	return string(n.Text[:])
}

// array is a memory-mapped array of T as the programs see it.
func array[T any](memory []byte) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(memory))), len(memory)/int(unsafe.Sizeof(t)))
}

// backendTail is the last word of struct backend, serviceTail the words of struct service
// from seed to tracking, and serviceAffinity the word behind: fields that are stored together.
func backendTail(b *abiBackend) *uint64 { return (*uint64)(unsafe.Pointer(&b.Port)) }

func serviceTail(s *abiService) *uint64 { return (*uint64)(unsafe.Pointer(&s.Seed)) }

func serviceAffinity(s *abiService) *uint64 {
	return (*uint64)(unsafe.Pointer(&s.AffinityTicks))
}

// serviceMSS is the word that begins with tcp_mss.
func serviceMSS(s *abiService) *uint32 { return (*uint32)(unsafe.Pointer(&s.TcpMss)) }

// storePolicy stores the fields of model.Policy, each by itself: none refers to another.
func storePolicy(s *abiService, record abiService) {
	atomic.StoreUint32(&s.Flags, record.Flags)
	atomic.StoreUint32(&s.FlowsMax, record.FlowsMax)
	atomic.StoreUint32(&s.SourceRate, record.SourceRate)
	atomic.StoreUint32(serviceMSS(s), *serviceMSS(&record))
}

// policyFlags are the bits of struct service's flags by the fields of model.Policy.
func policyFlags(p *model.Policy) map[abiServiceFlag]*bool {
	return map[abiServiceFlag]*bool{
		abiServiceFlagSERVICE_REJECTS:          &p.Rejects,
		abiServiceFlagSERVICE_HASHES_ADDRESSES: &p.HashAddresses,
		abiServiceFlagSERVICE_FILTERS:          &p.Filters,
		abiServiceFlagSERVICE_INSIDE:           &p.Inside,
		abiServiceFlagSERVICE_PASSES_BEGUN:     &p.PassesBegun,
		abiServiceFlagSERVICE_DRAWS:            &p.Draws,
	}
}

func toPolicy(p model.Policy) (flags uint32) {
	for bit, on := range policyFlags(&p) {
		if *on {
			flags |= uint32(bit)
		}
	}
	return flags
}

func fromPolicy(s *abiService) model.Policy {
	p := model.Policy{FlowsMax: s.FlowsMax, SourceRate: s.SourceRate, TCPMSS: s.TcpMss}
	for bit, on := range policyFlags(&p) {
		*on = s.Flags&uint32(bit) != 0
	}
	return p
}

func storeAddr(to *abiAddr, a abiAddr) {
	atomic.StoreUint64(&to.High, a.High)
	atomic.StoreUint64(&to.Low, a.Low)
}

// storePorts writes the first port and the count of the NAT pool in one word.
func storePorts(s *abiSettings, first, count uint16) {
	var b [4]byte
	binary.NativeEndian.PutUint16(b[:2], first)
	binary.NativeEndian.PutUint16(b[2:], count)
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&s.PortFirst)), binary.NativeEndian.Uint32(b[:]))
}

// portCount is the count that storePorts has written.
func portCount(s *abiSettings) uint16 {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], atomic.LoadUint32((*uint32)(unsafe.Pointer(&s.PortFirst))))
	return binary.NativeEndian.Uint16(b[2:])
}
