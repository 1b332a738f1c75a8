package reconcile_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
	"github.com/shunt-lb/shunt/internal/value"
)

// twoLevels are a service whose backends are nodes, and the one of its packets on this node.
func twoLevels() (outer, inner model.Service) {
	at := func(address string, protocol model.Protocol) model.Frontend {
		return model.Frontend{Address: netip.MustParseAddr(address), Ports: value.PortRange{First: 80, Last: 80}, Protocol: protocol}
	}
	outer = model.Service{Name: "web", Forwarding: model.ForwardingDSRGUE, Announce: model.AnnounceL2, Policy: model.Policy{Tunnelled: true},
		Frontends: []model.Frontend{at("192.0.2.10", model.TCP), at("2001:db8::10", model.TCP)},
		Backends:  []model.Backend{backend("10.0.0.1", 2), backend("10.0.0.2", 1)}}
	inner = model.Service{Name: "web@node", Forwarding: model.ForwardingNATDestination, Announce: model.AnnounceNone,
		Frontends: []model.Frontend{at("192.0.2.10", model.TCP|model.Tunnelled), at("0.0.0.0", model.TCP|model.Tunnelled), at("::", model.TCP|model.Tunnelled)},
		Backends:  []model.Backend{backend("10.1.0.1:8080", 1), backend("[2001:db8:1::1]:8080", 1)}}
	return outer, inner
}

// TestTwoLevels: both levels have the same address and port, and only the first makes the address one of ours.
func TestTwoLevels(t *testing.T) {
	outer, inner := twoLevels()
	limits := model.Limits{Services: 8, Backends: 16, Slots: 1 << 15, Filters: 8}
	maps := fake.New(limits)
	r := reconcile.New(maps)
	apply := func(services ...model.Service) reconcile.Contents {
		t.Helper()
		if _, err := r.Apply(reconcile.Desired{Services: model.Shared(services), Limits: limits}); err != nil {
			t.Fatal(err)
		}
		contents, err := maps.Contents()
		if err != nil {
			t.Fatal(err)
		}
		if len(maps.Violations) > 0 {
			t.Fatal(strings.Join(maps.Violations, "\n"))
		}
		return contents
	}
	outer.Backends, inner.Backends = nil, nil
	if of1, of2 := reconcile.Deserted(&outer), reconcile.Deserted(&inner); len(of1) != 2 || len(of2) != 0 {
		t.Errorf("without backends level 1 is deserted for %v, and level 2 for %v", of1, of2)
	}
	outer, inner = twoLevels()
	vip, unspecified := inner.Frontends[0].Address, inner.Frontends[1].Address
	c := apply(inner)
	if len(c.Addresses) > 0 || len(c.Frontends) != 3 {
		t.Errorf("with level 2 alone: addresses %v, frontends %v", c.Addresses, c.Frontends)
	}
	c = apply(outer, inner)
	of := func(f model.Frontend) string { return c.Services[c.Frontends[f]].Name }
	if of(outer.Frontends[0]) != "web" || of(inner.Frontends[0]) != "web@node" || of(inner.Frontends[1]) != "web@node" {
		t.Errorf("frontends of both levels: %v of %v", c.Frontends, c.Services)
	}
	if _, ours := c.Addresses[unspecified]; ours || !c.Addresses[vip].VIP || !c.Addresses[vip].Direct || !c.Addresses[vip].Announce {
		t.Errorf("with both levels: addresses %+v", c.Addresses)
	}
	for _, s := range c.Services {
		if s.Policy.Tunnelled != (s.Name == "web") {
			t.Errorf("service %q: tunnelled is %v", s.Name, s.Policy.Tunnelled)
		}
	}
	if c = apply(inner); len(c.Addresses) > 0 || len(c.Frontends) != 3 {
		t.Errorf("with level 2 alone again: addresses %v, frontends %v", c.Addresses, c.Frontends)
	}
	if c = apply(); len(c.Frontends)+len(c.Services)+len(c.Backends) > 0 {
		t.Errorf("with no service: %+v", c)
	}
}

// TestWrongLevels: services that would encapsulate twice, or that clients could meet, are refused before a map is written.
func TestWrongLevels(t *testing.T) {
	for want, change := range map[string]func(outer, inner *model.Service){
		"must be dsr-ipip or dsr-gue":                func(outer, _ *model.Service) { outer.Forwarding = model.ForwardingNAT },
		"so that no packet is encapsulated twice":    func(_, inner *model.Service) { inner.Forwarding = model.ForwardingDSRGUE },
		"has the unspecified address":                func(outer, _ *model.Service) { outer.Frontends[0].Address = netip.IPv4Unspecified() },
		"has more than one port":                     func(_, inner *model.Service) { inner.Frontends[0].Ports = value.AnyPort },
		"and for something else as well":             func(_, inner *model.Service) { inner.Frontends[0].Protocol |= model.Inside },
		"and cannot be announced":                    func(_, inner *model.Service) { inner.Announce = model.AnnounceStandby },
		"and other frontends of the service are not": func(_, inner *model.Service) { inner.Frontends[0].Protocol = model.UDP },
		"other frontends of the service are for packets between nodes": func(_, inner *model.Service) {
			inner.Frontends = append(inner.Frontends, model.Frontend{Address: netip.MustParseAddr("192.0.2.11"), Ports: value.PortRange{First: 80, Last: 80}, Protocol: model.TCP})
		},
	} {
		outer, inner := twoLevels()
		outer.Frontends, inner.Frontends = slices.Clone(outer.Frontends), slices.Clone(inner.Frontends)
		change(&outer, &inner)
		limits := model.Limits{Services: 8, Backends: 16, Slots: 1 << 15, Filters: 8}
		maps := fake.New(limits)
		_, err := reconcile.New(maps).Apply(reconcile.Desired{Services: model.Shared([]model.Service{outer, inner}), Limits: limits})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want an error with %q", err, want)
		}
		if c, _ := maps.Contents(); len(c.Services) > 0 {
			t.Errorf("%q: there are services", want)
		}
	}
}
