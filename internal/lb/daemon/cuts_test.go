package daemon

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

func TestCuts(t *testing.T) {
	at := func(text string) model.BackendAddress {
		a := netip.MustParseAddrPort(text)
		return model.BackendAddress{Address: a.Addr(), Port: a.Port()}
	}
	one, two, three := at("10.0.0.1:80"), at("10.0.0.2:80"), at("10.0.0.3:80")
	open := store.OpenByName{Services: map[string]uint64{"old": 7, "gone": 3, "half": 5, "merged": 2, "again": 6}, Backends: map[model.BackendAddress]uint64{one: 1, two: 2, three: 4}}
	other := model.Frontend{Address: netip.MustParseAddr("192.0.2.11"), Protocol: model.UDP}
	vip := model.Frontend{Address: netip.MustParseAddr("192.0.2.10"), Protocol: model.TCP}
	sticky, far := vip, vip
	sticky.Ports, far.Ports = value.PortRange{First: 1, Last: 1}, value.PortRange{First: 2, Last: 2}
	stay := []*model.Service{
		{Name: "web", Frontends: []model.Frontend{vip}, Backends: []model.Backend{{BackendAddress: one, Weight: 1}}},
		{Name: "sticky", AffinityTimeout: time.Hour, Frontends: []model.Frontend{sticky}},
		{Name: "far", Forwarding: model.ForwardingNATDestination, Frontends: []model.Frontend{far}, Backends: []model.Backend{{BackendAddress: three, Weight: 1}}},
	}
	before := []*model.Service{
		{Name: "direct", Forwarding: model.ForwardingDSRL2, Frontends: []model.Frontend{vip},
			Backends: []model.Backend{{BackendAddress: one, Weight: 1}, {BackendAddress: two, Weight: 1}}},
		{Name: "dropped", Forwarding: model.ForwardingDSRL2}, {Name: "again"},
		{Name: "half", Frontends: []model.Frontend{vip, other, sticky, far}, Backends: []model.Backend{{BackendAddress: one}, {BackendAddress: three}}}}
	got := cuts(reconcile.Difference{Ended: []string{"again", "merged", "idle"}, Services: []reconcile.ServiceDifference{
		{Name: "new", Change: reconcile.Added, TakesOver: []string{"old", "half"}, BackendsAdded: []string{one.String()}},
		{Name: "web", Change: reconcile.Changed, BackendsRemoved: []string{two.String()}},
		{Name: "old", Change: reconcile.Removed, BackendsRemoved: []string{one.String(), two.String()}},
		{Name: "half", Change: reconcile.Removed},
		{Name: "gone", Change: reconcile.Removed, BackendsRemoved: []string{three.String()}},
		{Name: "idle", Change: reconcile.Removed},
		{Name: "direct", Change: reconcile.Removed},
		{Name: "dropped", Change: reconcile.Removed},
	}}, before, stay, open)
	want := []reconcile.Cut{
		{Service: "again", Text: "of 6 open flows of service again, the flows from before its merge into another service end"},
		{Service: "merged", OpenFlows: 2, Text: "2 open flows of service merged, which was merged into another one, end with it"},
		{Backend: "10.0.0.2:80", OpenFlows: 2, Text: "2 open flows of backend 10.0.0.2:80 end with it"},
		{Service: "half", Text: "of 5 open flows of service half, the flows to " + other.String() + " end with it"},
		{Service: "half", Text: "of 5 open flows of service half, the flows to tcp 192.0.2.10:1, tcp 192.0.2.10:2 may end, because the service that takes it over has affinity or another forwarding"},
		{Service: "half", Text: "of 5 open flows of service half, the flows with backend 10.0.0.3:80 end, because the service that takes them over does not have it"},
		{Service: "gone", OpenFlows: 3, Text: "3 open flows of service gone end with it"},
		{Service: "direct", Text: "flows of service direct are placed anew by service web, because direct return places them by the service's name: about 50 % of them move, and end"},
		{Service: "dropped", Text: "the flows of service dropped end with it; with direct return they are not counted"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestCutsOfSharedBackends: a backend leaves one of the services that have it. Flows of that service go on if
// another service has got their frontend, and both keep flows as they are.
func TestCutsOfSharedBackends(t *testing.T) {
	backends := func(addresses ...string) (all []model.Backend) {
		for _, a := range addresses {
			all = append(all, model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr(a), Port: 80}, Weight: 1})
		}
		return all
	}
	port := func(n uint16) model.Frontend {
		return model.Frontend{Address: netip.MustParseAddr("192.0.2.10"), Protocol: model.TCP, Ports: value.PortRange{First: n, Last: n}}
	}
	both := backends("10.0.0.1", "10.0.0.2")
	open := store.OpenByName{Services: map[string]uint64{"web": 5}, Backends: map[model.BackendAddress]uint64{both[0].BackendAddress: 4, both[1].BackendAddress: 3}}
	text := "of 5 open flows of service web, the flows with backend 10.0.0.2:80 may end, because the service no longer has it"
	was := &model.Service{Name: "web", Frontends: []model.Frontend{port(80), port(81)}, Backends: both}
	change := reconcile.Difference{Services: []reconcile.ServiceDifference{{Name: "web", Change: reconcile.Changed, BackendsRemoved: []string{both[1].BackendAddress.String()}}}}
	for _, c := range []struct {
		what          string
		forwarding    model.Forwarding // of web, after the change
		frontends     []model.Frontend // of the other one
		otherForwards model.Forwarding
		otherAffinity time.Duration
		backends      []model.Backend // of the other one
		keeps         bool
	}{
		{what: "another service has it", frontends: []model.Frontend{port(90)}, backends: both},
		{what: "a frontend goes with it", frontends: []model.Frontend{port(81)}, backends: both, keeps: true},
		{what: "a frontend goes, and the service forwards otherwise", forwarding: model.ForwardingDSRIPIP, frontends: []model.Frontend{port(81)}, backends: both},
		{what: "a frontend goes to direct return", frontends: []model.Frontend{port(81)}, otherForwards: model.ForwardingDSRIPIP, backends: both},
		{what: "a frontend goes to affinity", frontends: []model.Frontend{port(81)}, otherAffinity: time.Hour, backends: both},
	} {
		now := &model.Service{Name: "web", Forwarding: c.forwarding, Frontends: []model.Frontend{port(80)}, Backends: both[:1]}
		other := &model.Service{Name: "other", Forwarding: c.otherForwards, AffinityTimeout: c.otherAffinity, Frontends: c.frontends, Backends: c.backends}
		var want []reconcile.Cut
		if !c.keeps {
			want = []reconcile.Cut{{Service: "web", Text: text}}
		}
		if got := cuts(change, []*model.Service{was}, []*model.Service{now, other}, open); !slices.Equal(got, want) {
			t.Errorf("%s: %+v, want %+v", c.what, got, want)
		}
		if idle := (store.OpenByName{Services: map[string]uint64{"web": 5}}); len(cuts(change, []*model.Service{was}, []*model.Service{now, other}, idle)) > 0 {
			t.Errorf("%s: something is said of a backend without flows", c.what)
		}
	}
}
