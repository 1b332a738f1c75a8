package neighbour

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// TestManyBehindOneRouter: the router is asked for once, not once for each address behind it, and the addresses
// are looked at when its state changes, not in each round.
func TestManyBehindOneRouter(t *testing.T) {
	const many = 300
	s := newSite(t)
	s.balancer.Route(t, "10.99.0.0/16", "10.8.0.2")
	var asked, resolved, rounds atomic.Int64
	w, _ := s.watch(t, Options{
		Resync: time.Hour,
		full: func() bool {
			asked.Add(1)
			return false
		},
		rooms: func() (map[int]room, error) { // each round asks for the rooms
			rounds.Add(1)
			return nil, nil
		},
		resolved: func(netip.Addr) { resolved.Add(1) },
	})
	var behind []string
	for i := range many {
		behind = append(behind, fmt.Sprintf("10.99.%d.%d", i/200, 1+i%200))
	}
	w.Want(addrs(behind...))
	mustResolve(t, w, behind...)

	nstest.Eventually(t, "five rounds look at no address", func() bool {
		before, end := resolved.Load(), rounds.Load()+5
		nstest.Eventually(t, "five rounds pass", func() bool { return rounds.Load() >= end })
		return resolved.Load() == before
	})

	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x7a}
	if err := s.backend.Net.LinkSetHardwareAddr(s.backend.Link(t, "eth"), mac); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, "the new hardware address is known for all", func() bool {
		for _, h := range w.Hops() {
			if !bytes.Equal(h.MAC, mac) {
				return false
			}
		}
		return true
	})

	e, _ := s.entry(t, "10.8.0.2")
	if err := s.balancer.Net.NeighDel(&e); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, "the entry is back", func() bool { return s.managed(t, "10.8.0.2") })
	if n := asked.Load(); n > many/2 {
		t.Errorf("the kernel was asked %d times for one router", n)
	}
}
