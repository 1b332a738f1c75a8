package packet_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// from gives a packet another source address.
func from(a netip.Addr) packet.Edit {
	return func(p *packet.Packet) {
		if p.IPv4 != nil {
			p.IPv4.Source = a
		} else {
			p.IPv6.Source = a
		}
	}
}

// sourcesOf are source addresses, by whether IPv6, and the reason for packets to a service.
var sourcesOf = map[bool][]struct{ address, reason string }{
	false: {
		{"127.0.0.1", "martian"}, {"127.255.255.254", "martian"}, {"0.0.0.0", "martian"}, {"0.1.2.3", "martian"},
		{"224.0.0.1", "martian"}, {"239.255.255.255", "martian"}, {"255.255.255.255", "martian"},
		{"126.255.255.255", ""}, {"128.0.0.1", ""}, {"223.255.255.255", ""}, {"1.0.0.0", ""}, {"240.0.0.1", ""}, {"255.255.255.254", ""},
	},
	true: {
		{"::", "martian"}, {"::1", "martian"}, {"ff02::1", "martian"}, {"ff0e::1:2:3", "martian"},
		{"fe80::1", ""}, {"fc00::7", ""}, {"::2", ""}, {"1::", ""}, {"64:ff9b::c633:6407", ""},
	},
}

// TestMartians: packets from a martian source are dropped if they are for a service, and only then.
func TestMartians(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	direct := wayOf(model.ForwardingDSRGUE, false)
	for _, k := range kinds {
		for _, s := range sourcesOf[k.six] {
			end := leaves
			if s.reason != "" {
				end = drops
			}
			name := fmt.Sprintf("%s/%s", k, s.address)
			source := from(addr(s.address))
			toDirect := k.toDirect(40000, direct.port, "A", source)
			table(t, w, []trial{
				{name: name + "/nat", in: k.fromClient(40000, portNAT, "S", source), end: end, reason: s.reason},
				{name: name + "/nat-destination", in: k.fromClient(40000, portDestination, "S", source), end: end, reason: s.reason},
				{name: name + "/dsr-gue", in: toDirect, end: end, reason: s.reason},
				{name: name + "/no service", in: k.fromClient(40000, portNothing, "S", source), reason: "no_service"},
			})
		}
	}
}

// TestLoops: packets from the VIP itself, or from another address that is only ours.
func TestLoops(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	direct := wayOf(model.ForwardingDSRIPIP, false)
	for _, k := range kinds {
		land := k.fromClient(portNAT, portNAT, "S", from(k.pick(vip4, vip6)))
		end, reason := leaves, "" // of direct return, from an address of ours
		if k.udp {
			end, reason = drops, "loop"
		}
		table(t, w, []trial{
			{name: k.String() + "/from the VIP itself", in: land, end: drops, reason: "loop"},
			{name: k.String() + "/from the VIP itself, direct", in: k.toDirect(1, direct.port, "A", from(k.pick(directVIP4, directVIP6))), end: drops, reason: "loop"},
			{name: k.String() + "/from another VIP", in: k.fromClient(1, portNAT, "S", from(k.pick(rangeVIP4, rangeVIP6))), end: drops, reason: "loop"},
			{name: k.String() + "/from another VIP, direct", in: k.toDirect(1, direct.port, "A", from(k.pick(directRangeVIP4, directRangeVIP6))),
				end: end, reason: reason},
			{name: k.String() + "/from a NAT source, direct", in: k.toDirect(1, direct.port, "A", from(k.pick(sources[0], sources[2]))),
				end: end, reason: reason},
			{name: k.String() + "/from the host's own address, direct", in: k.toDirect(1, direct.port, "A", from(k.pick(hostVIP4, hostVIP6))), end: leaves},
			{name: k.String() + "/first fragment from another VIP, direct", in: cut(k.toDirect(1, direct.port, "A", from(k.pick(directRangeVIP4, directRangeVIP6)), pattern(600)), 77, 160)[0],
				end: end, reason: reason},
			{name: k.String() + "/from a NAT source", in: k.fromClient(1, portNAT, "S", from(k.pick(sources[0], sources[2]))), end: drops, reason: "loop"},
			{name: k.String() + "/from the host's own address", in: k.fromClient(1, portNAT, "S", from(k.pick(hostVIP4, hostVIP6))), end: leaves},
			{name: k.String() + "/ping from the VIP itself", in: packet.NewEcho(k.pick(vip4, vip6), k.pick(vip4, vip6), 1, 1, packet.MACs(router, ownA)), end: drops, reason: "loop"},
		})
		// With dsr-l2 the frame would go back to the host that sent it.
		for _, v := range directWays {
			if v.forwarding != model.ForwardingDSRL2 {
				continue
			}
			back := k.toDirect(1, v.port, "A", packet.MACs(beMAC, v.own()))
			arm := armC
			if v.oneArm {
				arm = armA
			}
			table(t, w, []trial{{name: fmt.Sprintf("%s/%s/from its own backend", k, v.name), arm: arm, in: back, end: drops, reason: "loop"}})
		}
	}
}

// TestLoopEndsByTTL: two balancers, each the other's backend, pass a packet back and forth until its TTL
// ends. Nothing multiplies.
func TestLoopEndsByTTL(t *testing.T) {
	t.Parallel()
	const port = 700
	for _, k := range kinds {
		t.Run(k.String(), func(t *testing.T) {
			one, two := newWorld(t), newWorld(t)
			vips := [2]netip.Addr{k.pick(vip4, vip6), k.pick(rangeVIP4, rangeVIP6)}
			for i, w := range []*world{one, two} {
				w.apply(append(services(), model.Service{Name: "circle", Forwarding: model.ForwardingNATDestination, Announce: model.AnnounceL2,
					Frontends: []model.Frontend{{Address: vips[i], Ports: value.PortRange{First: port, Last: port}, Protocol: map[bool]model.Protocol{false: model.TCP, true: model.UDP}[k.udp]}},
					Backends:  []model.Backend{{BackendAddress: model.BackendAddress{Address: vips[1-i]}, Weight: 1}}}))
			}
			const ttl = 40
			at := k.packet(netip.AddrPortFrom(k.pick(client4, client6), 40000), netip.AddrPortFrom(vips[0], port), "S", packet.MACs(router, ownA), packet.TTL(ttl))
			hops := 0
			for ; hops <= ttl; hops++ {
				w := []*world{one, two}[hops%2]
				out := w.send(armA, at)
				if out.Destination() == at.Source() {
					break // time exceeded
				}
				at = out.With(packet.MACs(router, ownA))
			}
			if hops != ttl-1 {
				t.Errorf("the packet went round for %d hops, want %d", hops, ttl-1)
			}
			if n := one.reasons()["ttl_exceeded"] + two.reasons()["ttl_exceeded"]; n != 1 {
				t.Errorf("%d packets ended by their TTL, want 1", n)
			}
			if a, b := len(one.flowTable()), len(two.flowTable()); a != 2 || b != 2 {
				t.Errorf("the flow tables have %d and %d entries, want 2 each: one flow", a, b)
			}
		})
	}
}
