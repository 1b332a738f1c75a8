package daemon

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

func TestCuts(t *testing.T) {
	at := func(text string) model.BackendAddress {
		a := netip.MustParseAddrPort(text)
		return model.BackendAddress{Address: a.Addr(), Port: a.Port()}
	}
	one, two, three := at("10.0.0.1:80"), at("10.0.0.2:80"), at("10.0.0.3:80")
	open := datapath.OpenByName{Services: map[string]uint64{"old": 7, "gone": 3}, Backends: map[model.BackendAddress]uint64{one: 1, two: 2, three: 4}}
	stay := []*model.Service{{Name: "web", Backends: []model.Backend{{BackendAddress: one}}}}
	got := cuts(reconcile.Difference{Services: []reconcile.ServiceDifference{
		{Name: "new", Change: reconcile.Added, TakesOver: "old", BackendsAdded: []string{one.String()}},
		{Name: "web", Change: reconcile.Changed, BackendsRemoved: []string{two.String()}},
		{Name: "old", Change: reconcile.Removed, BackendsRemoved: []string{one.String(), two.String()}},
		{Name: "gone", Change: reconcile.Removed, BackendsRemoved: []string{three.String()}},
		{Name: "idle", Change: reconcile.Removed},
	}}, stay, open)
	want := []string{"2 open flows of backend 10.0.0.2:80 end with it", "3 open flows of service gone end with it"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
