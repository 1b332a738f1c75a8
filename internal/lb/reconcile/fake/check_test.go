package fake

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// TestChecksCatch breaks each rule once: a check that cannot fail proves nothing.
func TestChecksCatch(t *testing.T) {
	at := model.BackendAddress{Address: netip.MustParseAddr("10.0.0.2"), Port: 80}
	other := model.BackendAddress{Address: netip.MustParseAddr("10.0.0.3"), Port: 80}
	one := reconcile.BackendRef{Index: 1, Generation: 1}
	two := reconcile.BackendRef{Index: 1, Generation: 2}
	web := reconcile.ServiceRecord{Name: "web", Generation: 1, Size: 2}
	moved := web
	moved.Offset = 4
	vip := netip.MustParseAddr("192.0.2.10")
	f := model.Frontend{Address: vip, Ports: value.PortRange{First: 80, Last: 80}, Protocol: model.TCP}

	putBackend := func(ref reconcile.BackendRef, a model.BackendAddress) func(*Maps) error {
		return func(m *Maps) error { return m.PutBackend(reconcile.BackendRecord{BackendRef: ref, BackendAddress: a}) }
	}
	deleteBackend := func(ref reconcile.BackendRef) func(*Maps) error {
		return func(m *Maps) error { return m.DeleteBackend(ref) }
	}
	putService := func(record reconcile.ServiceRecord) func(*Maps) error {
		return func(m *Maps) error { return m.PutService(record) }
	}
	deleteService := func(m *Maps) error { return m.DeleteService(0, 1) }
	write := func(offset uint32, refs ...reconcile.BackendRef) func(*Maps) error {
		var slots []reconcile.Slot
		for _, ref := range refs {
			slots = append(slots, reconcile.Slot{Current: ref})
		}
		return func(m *Maps) error { return m.WriteSlots(offset, reconcile.NewTable(slots)) }
	}
	putFrontend := func(m *Maps) error { return m.PutFrontend(f, 0) }
	deleteFrontend := func(m *Maps) error { return m.DeleteFrontend(f) }
	putVIP := func(m *Maps) error { return m.PutAddress(reconcile.AddressRecord{Address: vip, VIP: true}) }
	deleteVIP := func(m *Maps) error { return m.DeleteAddress(vip) }
	grace := func(m *Maps) error { return m.Grace() }
	filtering, plain := web, web
	filtering.Policy.Filters = true
	others := reconcile.Filter{Service: 0, Generation: 1, Prefix: netip.MustParsePrefix("0.0.0.0/0")}
	listed := reconcile.Filter{Service: 0, Generation: 1, Prefix: netip.MustParsePrefix("10.0.0.0/8")}
	putRest := func(m *Maps) error { return m.PutFilter(others, true) }
	deleteRest := func(m *Maps) error { return m.DeleteFilter(others) }
	putLong := func(m *Maps) error { return m.PutFilter(listed, true) }
	up := []func(*Maps) error{putBackend(one, at), write(0, one, one), putService(web), putFrontend, putVIP}
	down := []func(*Maps) error{deleteVIP, deleteFrontend, deleteService, grace, deleteBackend(one)}

	for _, c := range []struct {
		name  string
		up    bool // begin with a working service
		steps []func(*Maps) error
		want  string // part of the first violation; empty: none
	}{
		{"right order", true, append(down[:5:5], grace, putBackend(two, other)), ""},
		{"slot before backend", false, []func(*Maps) error{write(0, one, one), putService(web), putBackend(one, at)}, "names backend 1/1, which is not there"},
		{"slot of another generation", true, []func(*Maps) error{write(0, two)}, "names backend 1/2, which is not there"},
		{"record before slots", false, []func(*Maps) error{putBackend(one, at), putService(web), write(0, one, one)}, "names backend 0/0, which is not there"},
		{"backend before slot is unnamed", true, []func(*Maps) error{grace, deleteBackend(one)}, "a slot has named it"},
		{"backend without grace", true, []func(*Maps) error{deleteVIP, deleteFrontend, deleteService, deleteBackend(one)}, "a slot has named it"},
		{"same generation again", true, append(down[:5:5], grace, putBackend(one, other)), "had the same generation"},
		{"position without grace", true, append(down[:5:5], putBackend(two, other)), "no grace since 10.0.0.2:80 was deleted"},
		{"position in use", true, []func(*Maps) error{putBackend(two, other)}, "10.0.0.2:80 is there"},
		{"index 0", false, []func(*Maps) error{putBackend(reconcile.BackendRef{Generation: 1}, at)}, "no backend can be there"},
		{"service before its frontend", true, []func(*Maps) error{deleteVIP, deleteService}, "names service 0, which is not there"},
		{"frontend before its service", false, []func(*Maps) error{putFrontend}, "names service 0, which is not there"},
		{"slots without grace", true, []func(*Maps) error{write(4, one, one), putService(moved), write(0, one)}, "no grace since slot 0"},
		{"slots after grace", true, []func(*Maps) error{write(4, one, one), putService(moved), grace, write(0, one)}, ""},
		{"VIP before frontend", false, []func(*Maps) error{putVIP}, "the VIP has no frontend"},
		{"frontend before VIP", true, []func(*Maps) error{deleteFrontend}, "the address is a VIP"},
		{"lists without the rest", true, []func(*Maps) error{putService(filtering)}, "says nothing of sources in no list"},
		{"lists with the rest", true, []func(*Maps) error{putRest, putService(filtering)}, ""},
		{"lists gone without grace", true, []func(*Maps) error{putRest, putService(filtering), putService(plain), deleteRest}, "the service has filtered since the last grace"},
		{"lists gone after grace", true, []func(*Maps) error{putRest, putService(filtering), putService(plain), grace, deleteRest}, ""},
		{"too many prefixes", false, []func(*Maps) error{putLong, putRest}, "1 prefixes, there is room for 0"},
		{"shared slots", true, []func(*Maps) error{putService(reconcile.ServiceRecord{Index: 1, Name: "x", Generation: 1, Size: 1})}, "share slot 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := New(model.Limits{Services: 2, Backends: 2, Slots: 8})
			steps := c.steps
			if c.up {
				steps = append(up[:len(up):len(up)], steps...)
			}
			for _, step := range steps {
				if err := step(m); err != nil {
					t.Fatal(err)
				}
			}
			got := strings.Join(m.Violations, "\n")
			if c.want == "" && got != "" || !strings.Contains(got, c.want) {
				t.Errorf("violations %q, want %q", got, c.want)
			}
		})
	}
}

func TestFaults(t *testing.T) {
	ref := reconcile.BackendRef{Index: 1, Generation: 1}
	for fault, want := range map[Fault]struct {
		err      bool
		backends int
		slots    int
	}{None: {false, 1, 2}, Before: {true, 0, 0}, After: {true, 1, 2}, Half: {true, 0, 1}} {
		m := New(model.Limits{Services: 1, Backends: 1, Slots: 2})
		m.Fault = func(string) Fault { return fault }
		err := m.PutBackend(reconcile.BackendRecord{BackendRef: ref})
		errSlots := m.WriteSlots(0, reconcile.NewTable([]reconcile.Slot{{Current: ref}, {Current: ref}}))
		written := 0
		for _, slot := range m.slots {
			if slot.Current == ref {
				written++
			}
		}
		if (err != nil) != want.err || (errSlots != nil) != want.err || len(m.backends) != want.backends || written != want.slots {
			t.Errorf("fault %d: %v, %v, %d backends, %d slots", fault, err, errSlots, len(m.backends), written)
		}
	}
}
