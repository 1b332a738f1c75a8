package hook

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
)

// slot returns the key of sockets and counters.
func slot(lease, queue int) uint32 { return uint32(lease*MaxQueues + queue) }

func check(lease, queue int) error {
	if lease < 0 || lease >= MaxLeases {
		return fmt.Errorf("lease %d: leases are numbered 0 to %d", lease, MaxLeases-1)
	}
	if queue < 0 || queue >= MaxQueues {
		return fmt.Errorf("queue %d: queues 0 to %d can have sockets", queue, MaxQueues-1)
	}
	return nil
}

// Begin takes a free lease, with all counters zero.
func (h *Hook) Begin() (lease int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for lease := range MaxLeases {
		if h.leases[lease] != nil {
			continue
		}
		zero := make([]udpLeaseCount, ebpf.MustPossibleCPU())
		for queue := range MaxQueues {
			if err := h.objects.Maps[udpMapShUdCounts].Put(slot(lease, queue), zero); err != nil {
				return 0, fmt.Errorf("set the counters of lease %d to zero: %w", lease, err)
			}
		}
		h.leases[lease] = map[netip.AddrPort]bool{}
		return lease, nil
	}
	return 0, fmt.Errorf("begin a lease on interface %s: it has %d leases, which is the limit; end one first", h.Interface, MaxLeases)
}

// Stamp makes each frame of a lease carry the time at which the program saw it: CLOCK_MONOTONIC, in nanoseconds, in
// the 8 bytes in front of the frame. It applies to addresses that are served from now on.
func (h *Hook) Stamp(lease int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stamped[lease] = true
}

// Bind sends a queue's datagrams of a lease to an AF_XDP socket, which must be bound to that queue of
// this interface. It replaces an earlier socket.
func (h *Hook) Bind(lease, queue, socket int) error {
	if err := check(lease, queue); err != nil {
		return fmt.Errorf("bind a socket: %w", err)
	}
	if err := h.objects.Maps[udpMapShUdSockets].Put(slot(lease, queue), uint32(socket)); err != nil {
		return fmt.Errorf("bind a socket to lease %d, queue %d of interface %s: %w", lease, queue, h.Interface, err)
	}
	return nil
}

// Unbind lets a queue's datagrams pass to the stack. If the queue has no socket, that is success.
func (h *Hook) Unbind(lease, queue int) error {
	if err := check(lease, queue); err != nil {
		return fmt.Errorf("remove a socket: %w", err)
	}
	if err := h.objects.Maps[udpMapShUdSockets].Delete(slot(lease, queue)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the socket of lease %d, queue %d of interface %s: %w", lease, queue, h.Interface, err)
	}
	return nil
}

// Serve sends the datagrams to an address and port to a lease. It is an error if another lease has them.
func (h *Hook) Serve(lease int, address netip.AddrPort) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	address = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
	switch {
	case h.leases[lease] == nil:
		return fmt.Errorf("serve %s: there is no lease %d", address, lease)
	case !address.IsValid() || address.Addr().IsUnspecified() || address.Port() == 0:
		return fmt.Errorf("serve %s: it must have an address and a port", address)
	}
	for other, served := range h.leases {
		if served[address] && other != lease {
			return fmt.Errorf("serve %s on interface %s: lease %d has it", address, h.Interface, other)
		}
	}
	h.leases[lease][address] = true
	if err := h.seat(address); err != nil {
		delete(h.leases[lease], address)
		return errors.Join(fmt.Errorf("serve %s on interface %s: %w", address, h.Interface, err), h.seat(address))
	}
	return nil
}

// Withdraw lets the datagrams to addresses and ports pass to the stack, or be dropped if there is a guard. When it returns, no
// program runs any more that has found them in the lease. If the lease has none of them, that is success.
func (h *Hook) Withdraw(lease int, addresses ...netip.AddrPort) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.withdraw(lease, addresses...)
}

func (h *Hook) withdraw(lease int, addresses ...netip.AddrPort) error {
	for _, address := range addresses {
		address = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
		if !h.leases[lease][address] {
			continue
		}
		delete(h.leases[lease], address)
		h.seen[lease] = true
		if err := h.seat(address); err != nil {
			h.leases[lease][address] = true
			return fmt.Errorf("withdraw %s from lease %d of interface %s: %w", address, lease, h.Interface, err)
		}
	}
	return h.unseen(lease)
}

// unseen waits until no program runs any more that has found a lease by an address and port that it no longer has. The caller holds mu.
func (h *Hook) unseen(lease int) error {
	if !h.seen[lease] {
		return nil
	}
	if err := h.grace.Wait(); err != nil {
		return err
	}
	delete(h.seen, lease)
	return nil
}

// End withdraws all addresses that a lease serves or guards, removes its sockets, and frees its number. If there
// is no such lease, that is success.
func (h *Hook) End(lease int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	served, ok := h.leases[lease]
	if !ok {
		return nil
	}
	if err := h.unguard(lease); err != nil {
		return err
	}
	var addresses []netip.AddrPort
	for address := range served {
		addresses = append(addresses, address)
	}
	if err := h.withdraw(lease, addresses...); err != nil {
		return err
	}
	for queue := range MaxQueues {
		if err := h.Unbind(lease, queue); err != nil {
			return err
		}
	}
	delete(h.leases, lease)
	delete(h.stamped, lease)
	return nil
}
