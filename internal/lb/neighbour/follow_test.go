package neighbour

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// lookups records the addresses whose routes were looked up.
type lookups struct {
	mu  sync.Mutex
	all []netip.Addr
}

func (l *lookups) add(a netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, a)
}

// take returns the addresses since the last call, sorted.
func (l *lookups) take() []netip.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := slices.SortedFunc(slices.Values(l.all), netip.Addr.Compare)
	l.all = nil
	return taken
}

// TestNewlyWantedAlone: an address that comes costs a look-up of its own route. Addresses that go or stay cost none, unless
// everything is to be looked up. The entry of an address that has gone is released, and one that comes back is looked up anew.
func TestNewlyWantedAlone(t *testing.T) {
	s := newSite(t)
	s.balancer.Route(t, "10.99.0.0/16", "10.8.0.2")
	var looked lookups
	w, _ := s.watch(t, Options{looked: looked.add, Resync: time.Hour})
	settle := func(want ...string) {
		t.Helper()
		w.Want(addrs(want...))
		mustResolve(t, w, want...)
	}
	settle("10.99.1.1", "10.99.1.2")
	// The kernel's notifications about the new network may cause a look-up of everything at times, but not each time.
	const steps = 20
	all, alone := []string{"10.99.1.1", "10.99.1.2"}, 0
	for i := range steps {
		looked.take()
		fresh := fmt.Sprintf("10.99.2.%d", i)
		all = append(all, fresh)
		settle(all...)
		switch got := looked.take(); {
		case slices.Equal(got, addrs(fresh)):
			alone++
		case !slices.Contains(got, netip.MustParseAddr(fresh)):
			t.Fatalf("%s came, and %v were looked up", fresh, got)
		}
	}
	if alone < steps/2 {
		t.Errorf("of %d addresses that came, %d were looked up alone", steps, alone)
	}
	settle("10.99.1.1", "10.99.1.2", "10.8.0.3")
	if !s.managed(t, "10.8.0.3") || !s.managed(t, "10.8.0.2") {
		t.Error("a next hop is not a managed neighbour")
	}

	settle("10.99.1.1") // one of two addresses behind one next hop goes, and one with a next hop of its own
	nstest.Eventually(t, "the entry that nobody needs is gone", func() bool { return !s.managed(t, "10.8.0.3") })
	if !s.managed(t, "10.8.0.2") {
		t.Error("the entry of a next hop went with one of two addresses behind it")
	}
	looked.take()
	settle("10.99.1.1", "10.99.1.2")
	if got := looked.take(); !slices.Contains(got, netip.MustParseAddr("10.99.1.2")) {
		t.Errorf("an address that came back was not looked up: %v", got)
	}
	w.Want(addrs())
	nstest.Eventually(t, "the last entry is gone", func() bool { return !s.managed(t, "10.8.0.2") })

	settle("10.99.1.1", "10.99.1.2")
	looked.take()
	w.Review()
	nstest.Eventually(t, "a review has all looked up", func() bool {
		return slices.Contains(looked.take(), netip.MustParseAddr("10.99.1.1"))
	})
}
