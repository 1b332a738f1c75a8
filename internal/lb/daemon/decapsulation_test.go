package daemon

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// TestInnerAddresses: of packets between nodes, those for nodes and for the frontends of level 2 are ours; a port at all addresses
// adds none.
func TestInnerAddresses(t *testing.T) {
	at := func(name string, frontends ...string) *model.Service {
		s := &model.Service{Name: name}
		for _, a := range frontends {
			s.Frontends = append(s.Frontends, model.Frontend{Address: netip.MustParseAddr(a), Ports: value.PortRange{First: 80, Last: 80}, Protocol: model.TCP | model.Tunnelled})
		}
		return s
	}
	clients := at("clients", "192.0.2.77")
	clients.Frontends[0].Protocol = model.TCP
	node := netip.MustParseAddr("10.0.0.1")
	var inner innerAddresses
	for _, step := range []struct {
		services []*model.Service
		nodes    []netip.Addr
		want     string
	}{
		{nil, nil, ""},
		{[]*model.Service{clients, at("port", "0.0.0.0", "::")}, nil, ""},
		{[]*model.Service{clients, at("a", "192.0.2.10", "2001:db8::10"), at("b", "192.0.2.10")}, nil, "192.0.2.10, 2001:db8::10"},
		{[]*model.Service{clients, at("b", "192.0.2.10")}, nil, "192.0.2.10"},
		{[]*model.Service{clients, at("b", "192.0.2.10")}, []netip.Addr{node}, "10.0.0.1, 192.0.2.10"},
		{[]*model.Service{at("b", "10.0.0.1")}, []netip.Addr{node}, "10.0.0.1"},
		{nil, []netip.Addr{node}, "10.0.0.1"},
		{nil, nil, ""},
	} {
		before := inner.all
		copied := slices.Clone(before)
		if got := model.ListText(inner.list(step.services, step.nodes)); got != step.want {
			t.Errorf("of %d services and nodes %v: %q, want %q", len(step.services), step.nodes, got, step.want)
		}
		if !slices.Equal(before, copied) {
			t.Error("a list that was given away has changed")
		}
	}
}
