package broker

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/udp/lease"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

func TestRules(t *testing.T) {
	id := func(n uint32) *uint32 { return &n }
	who := Identity{PID: 7, UID: 1000, GID: 100, Groups: []uint32{27, 44}, Cgroup: "/system.slice/feed.service"}
	for _, c := range []struct {
		rule Rule
		want bool
	}{
		{Rule{User: id(1000)}, true},
		{Rule{User: id(0)}, false},
		{Rule{Group: id(100)}, true},
		{Rule{Group: id(44)}, true},
		{Rule{Group: id(45)}, false},
		{Rule{Cgroup: "/system.slice/feed.service"}, true},
		{Rule{Cgroup: "/system.slice"}, true},
		{Rule{Cgroup: "/"}, true},
		{Rule{Cgroup: "/system.slice/feed"}, false},
		{Rule{Cgroup: "/system.slice/feed.service/below"}, false},
		{Rule{User: id(1000), Group: id(45)}, false},
		{Rule{User: id(1000), Group: id(44), Cgroup: "/system.slice"}, true},
	} {
		if got := c.rule.allows(who); got != c.want {
			t.Errorf("%+v: %v", c.rule, got)
		}
	}
	if who.Cgroup = ""; (Rule{Cgroup: "/"}).allows(who) {
		t.Error("a process without a cgroup is in one")
	}
}

func TestUnified(t *testing.T) {
	for text, want := range map[string]string{
		"0::/user.slice\n":                      "/user.slice",
		"12:cpu:/a\n1:name=systemd:/b\n0::/c\n": "/c",
		"0::/gone.service (deleted)\n":          "/gone.service",
		"12:cpu:/a\n":                           "",
		"":                                      "",
	} {
		if got := unified(text); got != want {
			t.Errorf("%q: %q", text, got)
		}
	}
}

func TestOffersAreChecked(t *testing.T) {
	good := func() Offer {
		return Offer{Name: "a", Interface: "eth0", Addresses: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:1")}, Mode: xsk.Auto, RingSize: 64, Allow: []Rule{user(1)}}
	}
	if err := checkAll([]Offer{good()}); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Offer){
		"must have 1 to 63 bytes":                      func(o *Offer) { o.Name = strings.Repeat("a", 64) },
		"has 0 addresses":                              func(o *Offer) { o.Addresses = nil },
		"write an address and a port":                  func(o *Offer) { o.Addresses = []netip.AddrPort{{}} },
		"use auto, zero-copy, copy":                    func(o *Offer) { o.Mode = "fast" },
		"power of two":                                 func(o *Offer) { o.RingSize = 65 },
		"twice, or out of range":                       func(o *Offer) { o.Queues = []int{1, 1} },
		"has an empty list of queues":                  func(o *Offer) { o.Queues = []int{} },
		"a rule must name a user, a group or a cgroup": func(o *Offer) { o.Allow = []Rule{{}} },
		"must begin with /":                            func(o *Offer) { o.Allow = []Rule{{Cgroup: "a"}} },
		"must not end with /":                          func(o *Offer) { o.Allow = []Rule{{Cgroup: "/a/"}} },
		"two offers have the name a":                   func(*Offer) {},
		"both have 192.0.2.1:1":                        func(o *Offer) { o.Name = "b" },
		"generic, or none": func(o *Offer) {
			o.Name, o.Mode, o.Addresses[0] = "b", lease.Generic, netip.MustParseAddrPort("192.0.2.1:2")
		},
	} {
		o := good()
		change(&o)
		if err := checkAll([]Offer{good(), o}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}
