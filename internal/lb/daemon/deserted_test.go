package daemon

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// TestDeserted: a service without a backend that takes new flows has a condition, with the answer that its clients
// get, and with the family if that is one of two.
func TestDeserted(t *testing.T) {
	at := func(address string, more func(*model.Backend)) model.Backend {
		b := model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr(address)}, Weight: 1}
		if more != nil {
			more(&b)
		}
		return b
	}
	down := func(b *model.Backend) { b.Observed.Down = true }
	drained := func(b *model.Backend) { b.Weight = 0 }
	unknown := func(b *model.Backend) { b.Observed.Idle = true }
	for _, c := range []struct {
		name     string
		vips     string
		rejects  bool
		backends []model.Backend
		want     string // subject and text; empty: it has one
	}{
		{"one is up", "192.0.2.10", false, []model.Backend{at("10.0.0.1", down), at("10.0.0.2", nil)}, ""},
		{"none", "192.0.2.10", false, nil, "web: it has no backend: clients get no answer (on_no_backend: drop)"},
		{"down", "192.0.2.10", true, []model.Backend{at("10.0.0.1", down)}, "web: no backend is up: clients are refused at once (on_no_backend: reject)"},
		{"drained", "192.0.2.10", false, []model.Backend{at("10.0.0.1", drained)}, "web: no backend takes new flows: clients get no answer (on_no_backend: drop)"},
		{"not yet checked", "192.0.2.10", false, []model.Backend{at("10.0.0.1", unknown)}, ""},
		{"of one family", "192.0.2.10 2001:db8::10", false, []model.Backend{at("10.0.0.1", nil), at("2001:db8::1", drained)},
			"web (IPv6): no backend takes new flows: clients get no answer (on_no_backend: drop)"},
		{"of the only family", "2001:db8::10", false, []model.Backend{at("2001:db8::1", drained)},
			"web: no backend takes new flows: clients get no answer (on_no_backend: drop)"},
	} {
		s := model.Service{Name: "web", Backends: c.backends, Policy: model.Policy{Rejects: c.rejects}}
		for vip := range strings.FieldsSeq(c.vips) {
			s.Frontends = append(s.Frontends, model.Frontend{Address: netip.MustParseAddr(vip), Protocol: model.TCP, Ports: value.PortRange{First: 80, Last: 80}})
		}
		got := ""
		for _, condition := range deserted(&s) {
			got += condition.Subject + ": " + condition.Text
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
