package reconcile_test

import (
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// fleet returns services with backends of their own, in these numbers.
func fleet(services, backends int, table uint32) reconcile.Desired {
	d := reconcile.Desired{Limits: model.Limits{
		Services: uint32(services), Backends: uint32(services * backends), Slots: 2 * uint32(services) * table, Filters: 1000,
	}}
	for i := range services {
		s := model.Service{
			Name: fmt.Sprintf("service-%05d", i), Forwarding: model.ForwardingDSRIPIP, Announce: model.AnnounceL2, TableSize: table,
			Frontends: []model.Frontend{{Address: netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), Ports: value.PortRange{First: 80, Last: 80}, Protocol: model.TCP}},
		}
		for j := range backends {
			n := i*backends + j
			b := model.Backend{Weight: 10}
			b.Address, b.Port = netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), 8080
			s.Backends = append(s.Backends, b)
		}
		d.Services = append(d.Services, &s)
	}
	return d
}

// TestChangeCostsWhatChanges plans and applies one weight in fleets of two sizes: neither the writes
// nor the allocations may grow with the services that stay as they are.
func TestChangeCostsWhatChanges(t *testing.T) {
	type cost struct {
		operations int
		allocated  float64 // blocks of memory
	}
	of := func(services int) cost {
		first := fleet(services, 3, 251)
		maps := &counted{}
		r := reconcile.New(maps)
		apply := func(d reconcile.Desired) {
			if _, err := r.Apply(d); err != nil {
				t.Fatal(err)
			}
		}
		apply(first)
		states := []reconcile.Desired{weighed(first, 5, 20), first}
		maps.operations = 0
		runs := 0
		allocated := testing.AllocsPerRun(20, func() {
			runs++
			d := states[runs%2]
			if _, err := r.Plan(d); err != nil {
				t.Fatal(err)
			}
			apply(d)
		})
		return cost{maps.operations / runs, allocated}
	}
	few, many := of(10), of(500)
	if few.operations == 0 || few.operations != many.operations {
		t.Errorf("one weight among 10 services takes %d operations, among 500 %d", few.operations, many.operations)
	}
	if many.allocated > few.allocated+20 {
		t.Errorf("one weight among 10 services takes %.0f allocations, among 500 %.0f", few.allocated, many.allocated)
	}
}

// counted are maps that hold nothing, and count the writes.
type counted struct {
	reconcile.Maps
	operations int
}

func (c *counted) done() error {
	c.operations++
	return nil
}

func (c *counted) Contents() (reconcile.Contents, error)    { return reconcile.Contents{}, nil }
func (c *counted) PutBackend(reconcile.BackendRecord) error { return c.done() }
func (c *counted) PutService(reconcile.ServiceRecord) error { return c.done() }
func (c *counted) PutFrontend(model.Frontend, uint32) error { return c.done() }
func (c *counted) PutAddress(reconcile.AddressRecord) error { return c.done() }
func (c *counted) WriteSlots(uint32, reconcile.Table) error { return c.done() }
func (c *counted) Grace() error                             { return c.done() }

// BenchmarkChange changes one weight among 10,000 services of 100 backends, planned and applied, as a
// reload does. Tables have 1,021 slots: larger ones have no room.
func BenchmarkChange(b *testing.B) {
	first := fleet(10_000, 100, 1021)
	r := reconcile.New(&counted{})
	if _, err := r.Apply(first); err != nil {
		b.Fatal(err)
	}
	states := []reconcile.Desired{weighed(first, 5000, 20), first}
	at := cpuTime(b)
	for i := 0; b.Loop(); i++ {
		if _, err := r.Plan(states[i%2]); err != nil {
			b.Fatal(err)
		}
		if _, err := r.Apply(states[i%2]); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric((cpuTime(b)-at).Seconds()*1000/float64(b.N), "cpu-ms/op")
}

// cpuTime returns the CPU time of this process so far, the collector's included.
func cpuTime(b *testing.B) time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
