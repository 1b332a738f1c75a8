package hook

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// A seat is an address and port that some lease has: one that serves it, or else its guard. Three maps say so to the program:
//
//	sh_ud_ports    whether the port has any seat: looked at first, and for each datagram
//	sh_ud_direct   by the port modulo its size, one of the seats with such a port
//	sh_ud_leases   all of them
//
// A seat that comes is in sh_ud_ports first, and one that goes is there last.

// key is an address and port as sh_ud_leases has them, and its check.
func key(address netip.AddrPort) (k udpLeaseKey, check uint32) {
	k.Address.High, k.Address.Low = kernel.AddrWords(address.Addr())
	k.Port = kernel.ToWire(address.Port())
	words := k.Address.High ^ k.Address.Low
	return k, uint32(words) ^ uint32(words>>32) ^ uint32(k.Port)
}

// owner is the lease that has an address and port: one that serves it, or else its guard. The caller holds mu.
func (h *Hook) owner(address netip.AddrPort) (lease int, owned bool) {
	for lease, served := range h.leases {
		if served[address] {
			return lease, true
		}
	}
	lease, owned = h.guards[address]
	return lease, owned
}

// owned are all addresses and ports that some lease has. The caller holds mu.
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

// seat has the maps say who has an address and port now. The caller holds mu.
func (h *Hook) seat(address netip.AddrPort) error {
	lease, owned := h.owner(address)
	if owned {
		if err := h.markPort(address.Port(), true); err != nil {
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
		return fmt.Errorf("take its entry out: %w", err)
	}
	return h.markPort(address.Port(), h.portOwned(address.Port()))
}

// seatDirect is seat for sh_ud_direct: the place of the port stays that of its seat, goes to another one with such a port where that
// has gone, or is empty.
func (h *Hook) seatDirect(address netip.AddrPort) error {
	at := place(address.Port())
	before := h.placed[at]
	now := before
	if _, owned := h.owner(before); !owned {
		now = netip.AddrPort{}
		for other := range h.owned() {
			if place(other.Port()) == at {
				now = other
				break
			}
		}
	}
	if now == before && now != address { // whatever has changed is of another one
		return nil
	}
	element := udpLeaseDirect{Lease: udpLease{Index: uint32(udpLeaseLimitLEASES_MAX)}} // nobody's
	if lease, owned := h.owner(now); owned {
		k, _ := key(now)
		element = udpLeaseDirect{Key: k, Lease: h.entry(lease, now)}
	}
	if err := h.objects.Maps[udpMapShUdDirect].Put(at, element); err != nil {
		return fmt.Errorf("say who has the place of port %d: %w", address.Port(), err)
	}
	if h.placed[at] = now; !now.IsValid() {
		delete(h.placed, at)
	}
	return nil
}

// place is the place of a port in sh_ud_direct.
func place(port uint16) uint32 { return uint32(port) % uint32(udpLeaseLimitLEASE_DIRECT_MAX) }

// entry is a lease's entry in the maps for an address and port.
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

// portOwned is whether some lease has a port, at whatever address.
func (h *Hook) portOwned(port uint16) bool {
	for address := range h.owned() {
		if address.Port() == port {
			return true
		}
	}
	return false
}

// markPort says whether the program has to look for leases of a port.
func (h *Hook) markPort(port uint16, served bool) error {
	var word uint64
	index, bit := uint32(port)/64, uint64(1)<<(port%64)
	err := h.objects.Maps[udpMapShUdPorts].Lookup(index, &word)
	if err == nil && (word&bit != 0) != served {
		err = h.objects.Maps[udpMapShUdPorts].Put(index, word^bit)
	}
	if err != nil {
		return fmt.Errorf("note whether port %d of interface %s has a lease: %w", port, h.Interface, err)
	}
	return nil
}
