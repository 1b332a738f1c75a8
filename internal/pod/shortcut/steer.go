package shortcut

import (
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// countsOfSteer is COUNTS_OF_STEER of bpf/pod/steer.h.
const countsOfSteer = uint32(1) << 31

// Steer sends the packets of pods to one port in a network by a hop, unless it is left alone.
type Steer struct {
	Number   int    // of its counters, from 1
	Protocol uint8  // unix.IPPROTO_TCP or IPPROTO_UDP
	Port     uint16 // of the destination
	Network  netip.Prefix
	Hop      uint32 // for new connections
	Left     Left
}

// Hop is an interface and a next hop. Its ID is given only once: a connection whose hop was removed never comes back to it.
type Hop struct {
	ID      uint32
	NextHop netip.Addr // a neighbour at the interface, of the network's family
	Ifindex int        // AttachFar has it as well
	MTU     int        // of the interface, bytes
	Number  int        // of the steer
}

func (s Steer) key() podPodSteerKey {
	network := Far{Network: s.Network}.key()
	return podPodSteerKey{Bits: 32 + network.Bits, Protocol: s.Protocol, Port: kernel.ToWire(s.Port), Address: network.Address}
}

// PutSteer adds a steer, or changes its properties, as Put does.
func (s *Shortcut) PutSteer(one Steer) error {
	if !one.Network.IsValid() || one.Number <= 0 || one.Number > math.MaxUint16 {
		return fmt.Errorf("add steer %d to %s: its number must be from 1 to %d, and its network be one", one.Number, one.Network, math.MaxUint16)
	}
	value := podPodSteer{Hop: one.Hop, Left: uint16(one.Left), Number: uint16(one.Number)}
	if err := s.objects.Maps[podMapShPdSteers].Put(one.key(), value); err != nil {
		return fmt.Errorf("add the steer to port %d of %s: %w; there is room for %d", one.Port, one.Network, err, podPodLimitSTEERS_MAX)
	}
	return nil
}

// RemoveSteer removes a steer. Connections that have a hop keep it. If the steer is not there, that is success.
func (s *Shortcut) RemoveSteer(one Steer) error {
	if err := s.objects.Maps[podMapShPdSteers].Delete(one.key()); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the steer to port %d of %s: %w", one.Port, one.Network, err)
	}
	return nil
}

// AddHop adds a hop. It must exist before a steer has it.
func (s *Shortcut) AddHop(h Hop) error {
	if !h.NextHop.IsValid() || h.MTU < 0 || h.MTU > math.MaxUint16 || h.Number <= 0 || h.Number > math.MaxUint16 {
		return fmt.Errorf("add the hop by %s, MTU %d, of steer %d: it needs a next hop, an MTU of at most 65535, and a number from 1 on", h.NextHop, h.MTU, h.Number)
	}
	high, low := kernel.AddrWords(h.NextHop)
	value := podPodHop{NextHop: podAddr{High: high, Low: low}, Ifindex: uint32(h.Ifindex), Mtu: uint16(h.MTU), Number: uint16(h.Number)}
	if err := s.objects.Maps[podMapShPdHops].Update(h.ID, value, ebpf.UpdateNoExist); err != nil {
		return fmt.Errorf("add the hop by %s: %w; there is room for %d", h.NextHop, err, podPodLimitHOPS_MAX)
	}
	return nil
}

// RemoveHop removes a hop; its connections go on through the stack. If it is not there, that is success.
func (s *Shortcut) RemoveHop(id uint32) error {
	if err := s.objects.Maps[podMapShPdHops].Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove a hop: %w", err)
	}
	return nil
}

// CountSteer makes the counters of a steer.
func (s *Shortcut) CountSteer(number int) error {
	return s.makeCounts(countsOfSteer | uint32(number))
}

// UncountSteer removes the counters of a steer. If they are not there, that is success.
func (s *Shortcut) UncountSteer(number int) error {
	if err := s.objects.Maps[podMapShPdCounts].Delete(countsOfSteer | uint32(number)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the counters of steer %d: %w", number, err)
	}
	return nil
}

// SteerCounts returns the counts of a steer's packets, in both directions. Packets that it did not take count again for the
// interface that they came in by, as without a steer.
func (s *Shortcut) SteerCounts(number int) (Counts, error) {
	return s.countsOf(countsOfSteer | uint32(number))
}
