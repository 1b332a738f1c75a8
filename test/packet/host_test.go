package packet_test

import (
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// The host itself as a backend, and as a client: with an address of its own that is no VIP.
var (
	ownBackend4, ownBackend6 = addr("10.0.0.1"), addr("2001:db8:2::1")
	ownClient4, ownClient6   = addr("192.0.2.1"), addr("2001:db8:1::1")
)

// Ports of the services with such backends.
const (
	portOwn       = 70 // the host alone
	portOwnToo    = 71 // the host and backend4, backend6
	portOwnDirect = 72 // direct return, the host alone
)

// ownServices are on the VIPs, and directVIPs for direct return.
func ownServices() []model.Service {
	var all []model.Service
	add := func(name string, forwarding model.Forwarding, port uint16, vips []netip.Addr, to uint16, backends ...netip.Addr) {
		s := model.Service{Name: name, Forwarding: forwarding, Announce: model.AnnounceL2, TableSize: 251}
		for _, vip := range vips {
			for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
				s.Frontends = append(s.Frontends, model.Frontend{Address: vip, Ports: value.PortRange{First: port, Last: port}, Protocol: protocol})
			}
		}
		for _, b := range backends {
			s.Backends = append(s.Backends, model.Backend{BackendAddress: model.BackendAddress{Address: b, Port: to}, Weight: 1})
		}
		all = append(all, s)
	}
	vips := []netip.Addr{vip4, vip6}
	add("own", model.ForwardingNAT, portOwn, vips, backendPort, ownBackend4, ownBackend6)
	add("own-too", model.ForwardingNAT, portOwnToo, vips, backendPort, ownBackend4, ownBackend6, backend4, backend6)
	add("own-direct", model.ForwardingDSRIPIP, portOwnDirect, []netip.Addr{directVIP4, directVIP6}, 0, ownBackend4, ownBackend6)
	return all
}

// TestHostIsBackend: packets to a backend that is the host itself go up its stack, and its answers
// are caught on their way out: at tc. At XDP no program would see them, so the flow does not begin.
func TestHostIsBackend(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.apply(append(services(), ownServices()...))
	for _, k := range kinds {
		in := k.fromClient(40000, portOwn, "S", packet.Data("hello"))
		server := netip.AddrPortFrom(k.pick(ownBackend4, ownBackend6), backendPort)
		if *hook != "tc" {
			table(t, w, []trial{{name: k.String(), in: in, end: drops, reason: "host_backend"}})
			continue
		}
		arrived := in.With(routed, between(sourceOf(in), server))
		answer := arrived.Reverse().With(packet.MACs(ownA, router), packet.TTL(64))
		stranger := k.packet(server, netip.AddrPortFrom(k.pick(client4, client6), 41000), "A", packet.MACs(ownA, router))
		table(t, w, []trial{
			{name: k.String(), in: in, end: changes, want: func(packet.Packet) packet.Packet { return arrived }},
			{name: k.String() + "/answer", arm: armA, out: true, in: answer, end: changes, want: func(packet.Packet) packet.Packet {
				return answer.With(routed, between(destinationOf(in), sourceOf(in)), packet.MACs(ownA, router))
			}},
			{name: k.String() + "/what the host sends to others", out: true, in: stranger},
		})
	}
}

// TestHostIsBackendDirectly: the host has the VIP, so the packet goes up its stack as it is.
func TestHostIsBackendDirectly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.apply(append(services(), ownServices()...))
	for _, k := range kinds {
		in := k.toDirect(40000, portOwnDirect, "S", packet.Data("hello"))
		table(t, w, []trial{{name: k.String(), in: in, end: changes, want: func(packet.Packet) packet.Packet { return in }}})
	}
}

// TestHostIsClient: the host's packets to a VIP are balanced on their way out, and answers come
// back up its stack.
func TestHostIsClient(t *testing.T) {
	t.Parallel()
	if *hook != "tc" {
		return // XDP does not see these packets
	}
	w := newWorld(t)
	w.apply(append(services(), ownServices()...))
	for _, k := range kinds {
		fromHost := func(source, port uint16) packet.Packet {
			return k.packet(netip.AddrPortFrom(k.pick(ownClient4, ownClient6), source), netip.AddrPortFrom(k.pick(vip4, vip6), port), "S",
				packet.MACs(ownA, router), packet.Data("hello"))
		}
		in := fromHost(40000, portNAT)
		var sent packet.Packet
		table(t, w, []trial{{name: k.String(), out: true, in: in, end: leaves, want: func(got packet.Packet) packet.Packet {
			sent = got
			return ways[0].expected(w, k, in)(got)
		}}})
		if t.Failed() {
			return
		}
		answer := sent.Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64))
		table(t, w, []trial{
			// By the interface that the host sent it from, because the VIP is expected there.
			{name: k.String() + "/answer", arm: armC, in: answer, end: leaves, want: func(packet.Packet) packet.Packet {
				return answer.With(routed, between(destinationOf(in), sourceOf(in)), packet.MACs(beMAC, ownA))
			}},
			{name: k.String() + "/sent on, seen at the next interface", arm: armC, out: true, in: sent},
			{name: k.String() + "/no service", out: true, in: fromHost(40001, portNothing)},
			{name: k.String() + "/refused", out: true, in: fromHost(40002, portNobody), end: drops, reason: "no_backend"},
			{name: k.String() + "/the host is the only backend", out: true, in: fromHost(40003, portOwn), end: drops, reason: "host_backend"},
		})
		for source := uint16(42000); source < 42020; source++ {
			in := fromHost(source, portOwnToo)
			trial{out: true, in: in, end: leaves, want: ways[0].expected(w, k, in)}.try(t, w)
		}
	}
}

// TestHostAsksForVIPs: its own requests are answered, except requests that look for other hosts
// with the address.
func TestHostAsksForVIPs(t *testing.T) {
	t.Parallel()
	if *hook != "tc" {
		return // XDP does not see these packets
	}
	w := newWorld(t)
	ask := packet.NewARPRequest(ownA, ownClient4, vip4)
	probe := packet.NewARPRequest(ownA, netip.IPv4Unspecified(), vip4)
	table(t, w, []trial{
		{name: "ARP", out: true, in: ask, end: leaves, reason: "arp_answered", want: func(packet.Packet) packet.Packet {
			return packet.NewARPReply(ownA, vip4, ownA, ownClient4)
		}},
		{name: "ARP probe", out: true, in: probe},
		{name: "ARP for others", out: true, in: packet.NewARPRequest(ownA, ownClient4, addr("192.0.2.77"))},
	})
}
