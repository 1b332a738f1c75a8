package sock

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// Members are the backends of all services at a moment. If a backend was chosen before that moment and is not a
// member, it has left its service. Generations do not show this for a backend that another service still has.
type Members struct {
	all    []reconcile.Member
	moment uint64 // CLOCK_MONOTONIC in ns, as bpf_ktime_get_ns
}

// Leave is called when backends may have left services. all are the present backends of the services: slots lead to
// no other backend, and clients of affinity do not stay with any other backend. grace returns when every program run
// that began before has ended. The result is for CloseGone.
func (s *Sockets) Leave(all []reconcile.Member, grace func() error) (*Members, error) {
	if err := s.forgetClients(all); err != nil {
		return nil, err
	}
	if err := grace(); err != nil {
		return nil, err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("read the monotonic clock: %w", err)
	}
	return &Members{all, uint64(now.Nano())}, nil
}

// forgetClients removes entries of clients whose backend is not among the members.
func (s *Sockets) forgetClients(all []reconcile.Member) error {
	clients := s.maps[sockMapShSkClients]
	found := map[sockcloseSockPair][]sockSockClient{}
	var client sockSockClient
	var stay sockSockStay
	entries := clients.Iterate()
	for entries.Next(&client, &stay) {
		pair := sockcloseSockPair{Service: client.Service, Backend: stay.Backend}
		found[pair] = append(found[pair], client)
	}
	// This fails if programs remove so many entries that the walk cannot end; the caller tries again.
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read the backends of clients with affinity: %w", err)
	}
	for _, member := range all {
		delete(found, pairOf(member))
	}
	for _, left := range found {
		for _, client := range left {
			if err := clients.Delete(client); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("forget the backend of a client with affinity, because the backend left: %w", err)
			}
		}
	}
	return nil
}

// pairOf returns a member as sockets store it (struct sock_choice).
func pairOf(m reconcile.Member) sockcloseSockPair {
	return sockcloseSockPair{Service: uint32(m.Generation)<<24 | m.Service, Backend: uint32(m.Backend.Generation)<<20 | m.Backend.Index}
}

// without returns the pairs that are not members.
func (m *Members) without(pairs []sockcloseSockPair) []sockcloseSockPair {
	left := map[sockcloseSockPair]bool{}
	for _, p := range pairs {
		left[p] = true
	}
	for _, member := range m.all { // there may be a million of them, and few pairs
		if len(left) == 0 {
			return nil
		}
		delete(left, pairOf(member))
	}
	all := make([]sockcloseSockPair, 0, len(left))
	for p := range left {
		all = append(all, p)
	}
	return all
}

// leftPairs returns the pairs of sockets of the calling thread's network namespace that are not members.
func (c *closer) leftPairs(members *Members) ([]sockcloseSockPair, error) {
	if members == nil {
		return nil, nil
	}
	var all []sockcloseSockPair
	for _, iterator := range c.namers {
		pairs, err := walk[sockcloseSockPair](iterator)
		if err != nil {
			return nil, err
		}
		all = append(all, pairs...)
	}
	return members.without(all), nil
}

// eachLot calls f for all pairs, in lots that the closing programs can look up, and once if there are none.
func (c *closer) eachLot(left []sockcloseSockPair, moment uint64, f func() error) error {
	if len(left) == 0 {
		return f()
	}
	for lot := range slices.Chunk(left, int(c.left.MaxEntries())) {
		for _, pair := range lot {
			if err := c.left.Put(pair, moment); err != nil {
				return errors.Join(fmt.Errorf("record the backends that left a service: %w", err), c.clearLot(lot))
			}
		}
		if err := errors.Join(f(), c.clearLot(lot)); err != nil {
			return err
		}
	}
	return nil
}

func (c *closer) clearLot(lot []sockcloseSockPair) error {
	for _, pair := range lot {
		if err := c.left.Delete(pair); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget the backends that left a service: %w", err)
		}
	}
	return nil
}
