package hook

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// A seat is an address and port that a lease has: the lease serves it, or otherwise guards it. The program finds seats by three maps:
//
//	sh_ud_hints    by the hash, whether there may be a seat: looked at first, and for each datagram
//	sh_ud_direct   by the bucket, one of the seats in it
//	sh_ud_leases   all seats
//
// A new seat is in sh_ud_hints first, and a seat that ends leaves sh_ud_hints last.

// key returns an address and port as sh_ud_leases has them, and its check.
func key(address netip.AddrPort) (k udpLeaseKey, check uint32) {
	k.Address.High, k.Address.Low = kernel.AddrWords(address.Addr())
	k.Port = kernel.ToWire(address.Port())
	words := k.Address.High ^ k.Address.Low
	return k, uint32(words) ^ uint32(words>>32) ^ uint32(k.Port)
}

// hash returns the hash of an address and port, as lease_hash of bpf/udp/lease.h computes it.
func hash(address netip.AddrPort) uint32 {
	const hashes = uint64(udpLeaseLimitLEASE_BUCKETS * udpLeaseLimitLEASE_HINTS)
	_, check := key(address)
	return uint32(uint64(check*0x9e3779b1) * hashes >> 32)
}

// bucket returns the bucket of an address and port in sh_ud_hints and sh_ud_direct.
func bucket(address netip.AddrPort) uint32 { return hash(address) / uint32(udpLeaseLimitLEASE_HINTS) }

// owner returns the lease that has an address and port: the lease that serves it, or otherwise its guard. The caller
// holds mu.
func (h *Hook) owner(address netip.AddrPort) (lease int, owned bool) {
	for lease, served := range h.leases {
		if served[address] {
			return lease, true
		}
	}
	lease, owned = h.guards[address]
	return lease, owned
}

// owned returns all addresses and ports that a lease has. The caller holds mu.
func (h *Hook) owned() iter.Seq[netip.AddrPort] {
	return func(yield func(netip.AddrPort) bool) {
		for _, served := range h.leases {
			for address := range served {
				if !yield(address) {
					return
				}
			}
		}
		for address := range h.guards {
			if !yield(address) {
				return
			}
		}
	}
}

// seat writes the present owner of an address and port into the maps. The caller holds mu.
func (h *Hook) seat(address netip.AddrPort) error {
	lease, owned := h.owner(address)
	if owned {
		if err := h.hint(hash(address), true); err != nil {
			return err
		}
		k, _ := key(address)
		if err := h.objects.Maps[udpMapShUdLeases].Put(k, h.entry(lease, address)); err != nil {
			return fmt.Errorf("%w; there is room for %d addresses and ports", err, udpLeaseLimitLEASE_FRONTENDS_MAX)
		}
		return h.seatDirect(address)
	}
	if err := h.seatDirect(address); err != nil {
		return err
	}
	k, _ := key(address)
	if err := h.objects.Maps[udpMapShUdLeases].Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove its entry: %w", err)
	}
	return h.hint(hash(address), h.hashOwned(hash(address)))
}

// seatDirect is seat for sh_ud_direct: the bucket keeps its seat; if that has gone, it gets another seat of the same bucket,
// or is empty.
func (h *Hook) seatDirect(address netip.AddrPort) error {
	at := bucket(address)
	before := h.direct[at]
	now := before
	if _, owned := h.owner(before); !owned {
		now = netip.AddrPort{}
		for other := range h.owned() {
			if bucket(other) == at {
				now = other
				break
			}
		}
	}
	if now == before && now != address { // the change is about another seat
		return nil
	}
	element := udpLeaseDirect{Lease: udpLease{Index: uint32(udpLeaseLimitLEASES_MAX)}} // no seat's
	if lease, owned := h.owner(now); owned {
		k, _ := key(now)
		element = udpLeaseDirect{Key: k, Lease: h.entry(lease, now)}
	}
	if err := h.objects.Maps[udpMapShUdDirect].Put(at, element); err != nil {
		return fmt.Errorf("write the lease into the bucket of %s: %w", address, err)
	}
	if h.direct[at] = now; !now.IsValid() {
		delete(h.direct, at)
	}
	return nil
}

// entry returns a lease's entry in the maps for an address and port.
func (h *Hook) entry(lease int, address netip.AddrPort) udpLease {
	_, sum := key(address)
	index := uint32(lease)
	if h.stamped[lease] {
		index |= uint32(udpLeaseLimitLEASE_STAMPED)
	}
	if _, guarded := h.guards[address]; guarded {
		index |= uint32(udpLeaseLimitLEASE_DROP)
	}
	return udpLease{Index: index, Check: sum}
}

// hashOwned reports whether a lease has an address and port with a hash. The caller holds mu.
func (h *Hook) hashOwned(of uint32) bool {
	for address := range h.owned() {
		if hash(address) == of {
			return true
		}
	}
	return false
}

// hint writes whether the program has to look for the lease of an address and port with a hash.
func (h *Hook) hint(of uint32, owned bool) error {
	var word uint64
	at, bit := of/uint32(udpLeaseLimitLEASE_HINTS), uint64(1)<<(of%uint32(udpLeaseLimitLEASE_HINTS))
	err := h.objects.Maps[udpMapShUdHints].Lookup(at, &word)
	if err == nil && (word&bit != 0) != owned {
		err = h.objects.Maps[udpMapShUdHints].Put(at, word^bit)
	}
	if err != nil {
		return fmt.Errorf("note whether the interface has leases: %w", err)
	}
	return nil
}
