package daemon

import (
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

func TestClosed(t *testing.T) {
	two := model.BackendAddress{Address: netip.MustParseAddr("10.0.0.2"), Port: 5432}
	three := model.BackendAddress{Address: netip.MustParseAddr("10.0.0.3"), Port: 5432}
	of := func(name string, closes, down bool, forwarding model.Forwarding) model.Service {
		return model.Service{Name: name, ClosesDown: closes, Forwarding: forwarding, Backends: []model.Backend{
			{BackendAddress: two, Observed: model.BackendObservation{Idle: down, Down: down}}, {BackendAddress: three}}}
	}
	open := store.OpenByName{Backends: map[model.BackendAddress]uint64{two: 3}}
	for _, c := range []struct {
		before, after model.Service
		want          string
	}{
		{of("db", true, false, "nat"), of("db", true, true, "nat"), "db: backend 10.0.0.2:5432 is down, and 3 open flows ended with it: on_down is close"},
		{of("db", true, false, "dsr-l2"), of("db", true, true, "dsr-l2"), "db: backend 10.0.0.2:5432 is down, and flows ended with it: on_down is close"},
		{of("db", false, true, "nat"), of("db", true, true, "nat"), "db: backend 10.0.0.2:5432 is down, and 3 open flows ended with it: on_down is close"},
		{of("db", true, true, "nat"), of("db", true, true, "nat"), ""},
		{of("db", true, true, "nat"), of("db", true, false, "nat"), ""},
		{of("db", false, false, "nat"), of("db", false, true, "nat"), ""},
	} {
		after := []*model.Service{&c.after}
		got := ""
		for _, condition := range closings(newlyClosed([]*model.Service{&c.before}, after), after, open) {
			got += condition.Subject + ": " + condition.Text
		}
		if got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
