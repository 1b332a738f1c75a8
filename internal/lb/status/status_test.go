package status

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// TestStates has a backend for each reason to get no new flows, and one that gets them in
// another service.
func TestStates(t *testing.T) {
	at := func(last byte) model.BackendAddress {
		return model.BackendAddress{Address: netip.AddrFrom4([4]byte{10, 0, 0, last}), Port: 80}
	}
	web := model.Service{Name: "web"}
	add := func(last byte, change func(*model.Backend)) {
		b := model.Backend{BackendAddress: at(last), Name: at(last).String(), Weight: 1}
		change(&b)
		web.Backends = append(web.Backends, b)
	}
	add(1, func(*model.Backend) {})
	add(2, func(b *model.Backend) { b.Weight = 0 })
	add(3, func(b *model.Backend) { b.Observed.Idle, b.Observed.Down = true, true })
	add(4, func(b *model.Backend) { b.Observed.Idle = true })
	add(5, func(b *model.Backend) { b.Observed.Idle, b.Backup = true, true })
	add(6, func(b *model.Backend) { b.Weight, b.Observed.Idle, b.Observed.Down = 0, true, true })
	add(7, func(b *model.Backend) { b.Observed.Idle, b.Observed.Down = true, true })
	other := model.Service{Name: "other", Backends: []model.Backend{{BackendAddress: at(7), Name: at(7).String(), Weight: 1}}}
	gone := model.Backend{BackendAddress: at(8), Name: "gone", Weight: 1}
	configured := web
	configured.Backends = append(slices.Clone(web.Backends), gone)
	over := []state.Override{{Backend: at(8), Setting: state.Setting{Kind: state.KindDrain, Deadline: time.Unix(1, 0)}, Over: true}}
	s := &shuntv1.GetStatusResponse{Services: []*shuntv1.Service{{Name: "web", Backends: []*shuntv1.ServiceBackend{
		{Address: at(1).String(), Slots: 3}, {Address: at(2).String()}, {Address: at(1).String(), Slots: 4}}}}}
	s.Daemon = &shuntv1.Daemon{Overrides: Overrides(over)}
	Complete(s, Known{
		Configured: []*model.Service{&configured, &other}, Served: []*model.Service{&web, &other}, Overrides: over,
		Health: []health.Status{{Service: "web", Backend: at(3).String(), State: model.HealthDown, LastError: "refused"}},
	})
	want := []string{StateActive, StateDraining, StateDown, StateWaiting, StateStandby, StateDraining, StateActive, StateOut}
	for i, b := range s.Backends {
		if b.Address != at(byte(i+1)).String() || b.State != want[i] {
			t.Errorf("%s is %s, want %s", b.Address, b.State, want[i])
		}
	}
	if h := s.Backends[2].Health; len(s.Backends) != len(want) || len(h) != 1 || h[0].State != "down" || h[0].LastError != "refused" {
		t.Errorf("of %d backends, the third has health %v", len(s.Backends), h)
	}
	// In the service each has its own state, also the backends that no slot names. The first is there for
	// each address family.
	inWeb := []string{StateActive, StateDraining, StateActive, StateDown, StateWaiting, StateStandby, StateDraining, StateDown, StateOut}
	numbers := []byte{1, 2, 1, 3, 4, 5, 6, 7, 8}
	of := s.Services[0].Backends
	if len(of) != len(inWeb) {
		t.Fatalf("the service has backends %v", of)
	}
	for i, b := range of {
		if b.Address != at(numbers[i]).String() || b.State != inWeb[i] {
			t.Errorf("in the service %s is %s, want %s to be %s", b.Address, b.State, at(numbers[i]), inWeb[i])
		}
	}
	if of[0].Name != at(1).String() || of[8].Name != "gone" {
		t.Errorf("they are called %q and %q", of[0].Name, of[8].Name)
	}
}

// TestStateBetweenDeadlineAndRemoval: a backend whose drain is over may still be in the maps, and has
// the same state in its service as over all services.
func TestStateBetweenDeadlineAndRemoval(t *testing.T) {
	b := model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.1"), Port: 80}, Weight: 1}
	over := []state.Override{{Backend: b.BackendAddress, Setting: state.Setting{Kind: state.KindDrain, Deadline: time.Unix(1, 0)}, Over: true}}
	s := &shuntv1.GetStatusResponse{
		Services: []*shuntv1.Service{{Name: "web", Backends: []*shuntv1.ServiceBackend{{Address: b.BackendAddress.String()}}}},
		Backends: []*shuntv1.Backend{{Address: b.BackendAddress.String(), State: StateActive}},
	}
	s.Daemon = &shuntv1.Daemon{Overrides: Overrides(over)}
	Complete(s, Known{
		Configured: []*model.Service{{Name: "web", Backends: []model.Backend{b}}}, Served: []*model.Service{{Name: "web"}}, Overrides: over})
	if all, inService := s.Backends[0].State, s.Services[0].Backends[0].State; all != StateDraining || inService != StateDraining {
		t.Errorf("it is %s over all services, and %s in its service; want %s", all, inService, StateDraining)
	}
}

// TestDownBeforeTheTablesSaySo: the maps call a backend down before all tables have changed. It is active until
// then, because it gets new flows; without a daemon to ask, the maps are believed.
func TestDownBeforeTheTablesSaySo(t *testing.T) {
	b := model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.1"), Port: 80}, Weight: 1}
	web := model.Service{Name: "web", Backends: []model.Backend{b}}
	for _, c := range []struct {
		served []*model.Service
		want   string
	}{{[]*model.Service{&web}, StateActive}, {nil, StateDown}} {
		s := &shuntv1.GetStatusResponse{Daemon: &shuntv1.Daemon{}, Backends: []*shuntv1.Backend{{Address: b.BackendAddress.String(), State: StateDown}}}
		Complete(s, Known{Configured: []*model.Service{&web}, Served: c.served})
		if got := s.Backends[0].State; got != c.want {
			t.Errorf("it is %s where services %v were applied; want %s", got, c.served, c.want)
		}
	}
}
