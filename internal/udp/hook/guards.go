package hook

import (
	"errors"
	"fmt"
	"net/netip"
)

// Guard makes a lease without sockets the guard of addresses and ports: their datagrams that no socket takes are dropped instead
// of passed. While another lease serves an address, that lease counts them; otherwise the guard does. Unguard lets them pass again.
func (h *Hook) Guard(guard int, addresses ...netip.AddrPort) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leases[guard] == nil {
		return fmt.Errorf("guard %v: there is no lease %d", addresses, guard)
	}
	for _, address := range addresses {
		address = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
		if other, guarded := h.guards[address]; guarded && other != guard {
			return fmt.Errorf("guard %s on interface %s: lease %d guards it already", address, h.Interface, other)
		}
		h.guards[address] = guard
		if err := h.seat(address); err != nil {
			delete(h.guards, address)
			return errors.Join(fmt.Errorf("guard %s on interface %s: %w", address, h.Interface, err), h.seat(address))
		}
	}
	return nil
}

// Unguard lets datagrams pass again that a lease guards. When it returns, the guard counts nothing any more; its counts
// stay until End. If the lease guards no address, that is success.
func (h *Hook) Unguard(guard int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.unguard(guard); err != nil {
		return err
	}
	return h.unseen(guard)
}

func (h *Hook) unguard(guard int) error {
	for address, by := range h.guards {
		if by != guard {
			continue
		}
		delete(h.guards, address)
		h.seen[guard] = true
		if err := h.seat(address); err != nil {
			h.guards[address] = by
			return fmt.Errorf("end the guard of %s on interface %s: %w", address, h.Interface, err)
		}
	}
	return nil
}
