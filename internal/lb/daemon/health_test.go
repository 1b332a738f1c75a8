package daemon

import (
	"log/slog"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// TestHeldStates: a backend with slots of a service is up there, even if its record says down; a backend
// that is down and has no slots is down in every service that the maps know; the states of others are unknown.
func TestHeldStates(t *testing.T) {
	at := func(last byte) model.BackendAddress {
		return model.BackendAddress{Address: netip.AddrFrom4([4]byte{10, 0, 0, last}), Port: 80}
	}
	ref := func(index uint32) reconcile.BackendRef { return reconcile.BackendRef{Index: index, Generation: 1} }
	stale := ref(2)
	stale.Generation = 9
	contents := reconcile.Contents{
		Services: map[uint32]reconcile.ServiceRecord{0: {Name: "web"}, 1: {Name: "mail"}},
		Backends: map[uint32]reconcile.BackendRecord{
			1: {BackendRef: ref(1), BackendAddress: at(1)},
			2: {BackendRef: ref(2), BackendAddress: at(2)},
			3: {BackendRef: ref(3), BackendAddress: at(3), Down: true},
		},
		Slots: map[uint32]reconcile.Table{
			0: reconcile.NewTable([]reconcile.Slot{{Current: ref(1)}, {Current: stale}, {Current: ref(1)}}),
			1: reconcile.NewTable([]reconcile.Slot{{Current: ref(3)}}),
		},
	}
	held := heldStates(contents)
	for _, c := range []struct {
		service string
		backend model.BackendAddress
		want    model.HealthState
	}{
		{"web", at(1), model.HealthUp},
		{"mail", at(1), ""},
		{"web", at(2), ""}, // another generation's slot
		{"web", at(3), model.HealthDown},
		{"mail", at(3), model.HealthUp},
		{"new", at(3), ""},
		{"web", at(4), ""},
	} {
		if got := held(c.service, c.backend); got != c.want {
			t.Errorf("%s in %s is held for %q, want %q", c.backend, c.service, got, c.want)
		}
	}
}

// Checks that fail on this machine, or come late, are a condition until they have been well for a while.
func TestTroubleWithChecks(t *testing.T) {
	conditions := &condition.Set{}
	w := newTroubleWatch(conditions)
	now := time.Now()
	look := func(after time.Duration, trouble health.Trouble, want ...string) {
		t.Helper()
		now = now.Add(after)
		w.look(trouble, now)
		holds(t, conditions, "host", want)
		for _, c := range conditions.List() {
			if c.Code == condition.ChecksFailHere && !strings.Contains(c.Text, "too many open files") {
				t.Errorf("the condition does not say why: %s", c.Text)
			}
		}
	}
	well := health.Trouble{Probes: 100, Late: 1}
	look(0, health.Trouble{})
	look(time.Second, well)
	look(time.Second, health.Trouble{Probes: 100, Late: 2}, condition.ChecksLate)
	look(time.Second, health.Trouble{Probes: 100, Failed: 1, Why: syscall.EMFILE}, condition.ChecksFailHere, condition.ChecksLate)
	look(lateQuiet-time.Second, well, condition.ChecksFailHere)
	look(time.Second, well)
	look(time.Second, health.Trouble{Probes: 1, Late: 1}, condition.ChecksLate)
	look(time.Second, health.Trouble{}, condition.ChecksLate)
	look(lateQuiet-time.Second, health.Trouble{})
}

// TestServedOnceCarriedOut: a backend is reported to take no new flows once the maps say so, and no sooner.
func TestServedOnceCarriedOut(t *testing.T) {
	c := newChecks(reconcile.Contents{}, &condition.Set{}, &control.Events{}, directPath{marked: &dials{}}, slog.New(slog.DiscardHandler))
	defer c.monitor.Close()
	lost := netip.MustParseAddr("10.0.0.1")
	web := model.Service{Name: "web", Health: model.Health{Check: model.CheckTCP}}
	for _, address := range []netip.Addr{lost, lost.Next()} {
		web.Backends = append(web.Backends, model.Backend{BackendAddress: model.BackendAddress{Address: address, Port: 80}, Weight: 1})
	}
	served := c.serve(&state.Snapshot{Services: []*model.Service{&web}}, func(_ bool, b netip.Addr) bool { return b == lost })
	if len(served) != 1 || !served[0].Backends[0].Observed.Idle {
		t.Fatalf("a backend that is out of reach is served as %+v", served)
	}
	if told := c.servedLast(); told != nil {
		t.Errorf("before it is applied, %+v is reported", told)
	}
	c.applied(served)
	if told := c.servedLast(); len(told) != 1 || !told[0].Backends[0].Observed.Idle {
		t.Errorf("once it is applied, %+v is reported", told)
	}
}
