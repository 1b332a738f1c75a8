package cost

import (
	"bytes"
	"net"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// The hosts, all on one segment. Clients are behind the router.
var (
	own     = net.HardwareAddr{2, 0, 0, 0, 0xa, 1}
	router  = net.HardwareAddr{2, 0, 0, 0, 0, 7}
	station = net.HardwareAddr{2, 0, 0, 0, 0, 0xbe} // of all backends
	foreign = net.HardwareAddr{2, 0, 0, 0, 0, 0x99}

	backends = []string{"192.0.2.20", "2001:db8:1::20"}
	sources  = map[bool][]netip.Addr{ // of NAT, by whether the address is of IPv6
		false: {netip.MustParseAddr(source4)},
		true:  {netip.MustParseAddr(source6)},
	}
	// onePort leaves NAT's search for a port no choice, wherever it begins.
	onePort = value.PortRange{First: 2048, Last: 2048}
)

// portMoving is the port of the service whose slots are all in transition.
const portMoving = 85

const (
	vip4, vip6       = "192.0.2.10", "2001:db8:1::10"
	source4, source6 = "192.0.2.9", "2001:db8:1::9"
)

// services returns one service of each kind. A world has the services of direct return or the
// ones of NAT, and so the features that these need.
func services(direct bool) (all []model.Service) {
	add := func(name string, forwarding model.Forwarding, port uint16, backends []string, change func(*model.Service)) {
		s := model.Service{Name: name, Forwarding: forwarding, Announce: model.AnnounceL2, TableSize: 251}
		for _, vip := range []string{vip4, vip6} {
			for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
				s.Frontends = append(s.Frontends, model.Frontend{Address: netip.MustParseAddr(vip), Ports: value.PortRange{First: port, Last: port}, Protocol: protocol})
			}
		}
		for _, address := range backends {
			b := model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr(address)}, Weight: 1}
			if !forwarding.Direct() {
				b.Port = 8080
			}
			s.Backends = append(s.Backends, b)
		}
		change(&s)
		all = append(all, s)
	}
	asIs := func(*model.Service) {}
	if !direct {
		add("nat", model.ForwardingNAT, 80, backends, asIs)
		return all
	}
	add("ipip", model.ForwardingDSRIPIP, 80, backends, asIs)
	add("gue", model.ForwardingDSRGUE, 81, backends, asIs)
	add("l2", model.ForwardingDSRL2, 82, backends, asIs)
	add("few", model.ForwardingDSRIPIP, 83, backends, func(s *model.Service) {
		s.AllowFrom = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:9::/48")}
	})
	add("moving", model.ForwardingDSRIPIP, portMoving, backends, asIs)
	add("nobody", model.ForwardingDSRIPIP, 84, nil, func(s *model.Service) { s.Policy.Rejects = true })
	return all
}

// sent is a packet whose cost is known.
type sent struct {
	name    string
	before  []packet.Packet // packets before it; if empty: the packet itself, so that its destination has been met
	in      packet.Packet
	later   uint64 // seconds after the packet before
	verdict uint32
	stamps  bool   // it is also measured with stamps of probes
	reason  string // the reason that the program counts it for; none for most that are simply forwarded
}

// Payloads of 100 bytes: a longer one costs no more, except where a checksum is computed whole.
var data = packet.Data(bytes.Repeat([]byte{'x'}, 100))

// probe is the head of a probe of `shunt diag ping`, with zeros behind it (bpf/core/probe.h).
var probe = packet.Data(append([]byte{'s', 'h', 'p', 't', 1, 1, 0, 0}, make([]byte, 92)...))

func fromClient(from, to, flags string) packet.Packet {
	edits := []packet.Edit{packet.MACs(router, own), packet.Sequence(1001, 2001)}
	if flags == "PA" {
		edits = append(edits, data)
	}
	return packet.NewTCP(from, to, flags, edits...)
}

func datagram(from, to string) packet.Packet {
	return packet.NewUDP(from, to, packet.MACs(router, own), data)
}

// halves are two fragments of a datagram.
func halves(p packet.Packet) (first, later packet.Packet) {
	const cut = 64
	upper := packet.Quote(p, 0)[20:]
	part := func(from, to int, more bool) packet.Packet {
		return p.With(func(p *packet.Packet) {
			p.UDP, p.Payload, p.IPv4.Protocol = nil, upper[from:to], packet.ProtocolUDP
		}, packet.Fragmented(7, uint16(from), more))
	}
	return part(0, cut, true), part(cut, len(upper), false)
}

const (
	client4, client6 = "198.51.100.7:40000", "[2001:db8:9::7]:40000"
	back, passed     = uint32(kernel.XDPTx), uint32(kernel.XDPPass)
)

// directPackets are packets of the services with direct return, and of no service.
func directPackets() []sent {
	first, later := halves(datagram(client4, vip4+":82"))
	quoted := packet.NewTCP(vip4+":80", client4, "PA", data)
	return []sent{
		{name: "dsr-ipip/tcp4", stamps: true, in: fromClient(client4, vip4+":80", "PA"), verdict: back},
		{name: "dsr-ipip/tcp4/syn", in: fromClient(client4, vip4+":80", "S"), verdict: back},
		{name: "dsr-ipip/tcp4/unmet-destination", before: []packet.Packet{fromClient(client4, vip4+":82", "PA")}, in: fromClient(client4, vip4+":80", "PA"), verdict: back},
		{name: "dsr-ipip/tcp4/allowed-source", in: fromClient(client4, vip4+":83", "PA"), verdict: back},
		{name: "dsr-ipip/tcp4/transition/syn", before: []packet.Packet{fromClient(client4, vip4+":85", "R")}, in: fromClient(client4, vip4+":85", "S"), verdict: back},
		{name: "dsr-ipip/tcp4/transition/remembered", before: []packet.Packet{fromClient(client4, vip4+":85", "S"), fromClient(client4, vip4+":85", "PA")},
			in: fromClient(client4, vip4+":85", "PA"), verdict: back},
		{name: "dsr-ipip/tcp6", stamps: true, in: fromClient(client6, "["+vip6+"]:80", "PA"), verdict: back},
		{name: "dsr-ipip/udp4", stamps: true, in: datagram(client4, vip4+":80"), verdict: back},
		{name: "dsr-ipip/udp6", stamps: true, in: datagram(client6, "["+vip6+"]:80"), verdict: back},
		{name: "dsr-ipip/udp4/probe", stamps: true, in: datagram(client4, vip4+":80").With(probe), verdict: back},
		{name: "dsr-ipip/udp6/probe", stamps: true, in: datagram(client6, "["+vip6+"]:80").With(probe), verdict: back},
		{name: "dsr-ipip/icmp4-error", verdict: back, reason: "icmp_to_backend", in: packet.NewError("198.51.100.7", 3, 4, 1400, quoted, packet.MACs(router, own))},
		{name: "dsr-gue/tcp4", in: fromClient(client4, vip4+":81", "PA"), verdict: back},
		{name: "dsr-gue/tcp6", in: fromClient(client6, "["+vip6+"]:81", "PA"), verdict: back},
		{name: "dsr-gue/udp4", in: datagram(client4, vip4+":81"), verdict: back},
		{name: "dsr-l2/tcp4", in: fromClient(client4, vip4+":82", "PA"), verdict: back},
		{name: "dsr-l2/tcp6", in: fromClient(client6, "["+vip6+"]:82", "PA"), verdict: back},
		{name: "dsr-l2/udp4", in: datagram(client4, vip4+":82"), verdict: back},
		{name: "dsr-l2/udp4/first-fragment", in: first, verdict: back},
		{name: "dsr-l2/udp4/later-fragment", before: []packet.Packet{first}, in: later, verdict: back, reason: "fragment_followed"},
		{name: "refused/tcp4", in: fromClient(client4, vip4+":84", "S"), verdict: back, reason: "rejected_reset"},
		{name: "refused/tcp6", in: fromClient(client6, "["+vip6+"]:84", "S"), verdict: back, reason: "rejected_reset"},
		{name: "refused/udp4", in: datagram(client4, vip4+":84"), verdict: back, reason: "rejected_unreachable"},
		{name: "passed/no-service", in: fromClient(client4, vip4+":99", "S"), verdict: passed, reason: "no_service"},
		{name: "passed/tcp4", stamps: true, in: fromClient(client4, "192.0.2.77:80", "PA"), verdict: passed, reason: "not_ours"},
		{name: "passed/tcp6", in: fromClient(client6, "[2001:db8:1::77]:80", "PA"), verdict: passed, reason: "not_ours"},
		{name: "passed/other-mac", in: fromClient(client4, vip4+":80", "PA").With(packet.MACs(router, foreign)), verdict: passed, reason: "other_mac"},
		{name: "answered/arp", stamps: true, in: packet.NewARPRequest(router, "192.0.2.254", vip4), verdict: back, reason: "arp_answered"},
		{name: "answered/nd", in: packet.NewNeighbourSolicitation(router, "2001:db8:1::fe", vip6), verdict: back, reason: "nd_answered"},
		{name: "answered/echo4", stamps: true, in: packet.NewEcho("198.51.100.7", vip4, 1, 1, packet.MACs(router, own), data), verdict: back, reason: "echo_answered"},
		{name: "answered/echo4/probe", stamps: true, in: packet.NewEcho("198.51.100.7", vip4, 1, 1, packet.MACs(router, own), probe), verdict: back, reason: "echo_answered"},
		{name: "answered/echo6", in: packet.NewEcho("2001:db8:9::7", vip6, 1, 1, packet.MACs(router, own), data), verdict: back, reason: "echo_answered"},
	}
}

// natPackets are packets of the service with NAT, and of no service.
func natPackets() []sent {
	fromBackend := func(p packet.Packet) packet.Packet { return p.With(packet.MACs(station, own)) }
	answer4 := func(flags string) packet.Packet {
		return fromBackend(fromClient(backends[0]+":8080", source4+":2048", flags))
	}
	answer6 := func(flags string) packet.Packet {
		return fromBackend(fromClient("["+backends[1]+"]:8080", "["+source6+"]:2048", flags))
	}
	ask4 := func(flags string) packet.Packet { return fromClient(client4, vip4+":80", flags) }
	ask6 := func(flags string) packet.Packet { return fromClient(client6, "["+vip6+"]:80", flags) }
	talk := func(ask, answer func(string) packet.Packet) []packet.Packet {
		return []packet.Packet{ask("S"), answer("SA"), ask("A"), ask("PA"), answer("PA"), ask("PA")}
	}
	established4, established6 := talk(ask4, answer4), talk(ask6, answer6)
	ask, answer := datagram(client4, vip4+":80"), fromBackend(datagram(backends[0]+":8080", source4+":2048"))
	first, later := halves(ask)
	return []sent{
		{name: "nat/tcp4/to-backend", stamps: true, before: established4, in: ask4("PA"), verdict: back},
		{name: "nat/tcp4/to-client", before: established4, in: answer4("PA"), verdict: back},
		{name: "nat/tcp4/to-backend/first-in-a-second", before: established4, later: 2, in: ask4("PA"), verdict: back},
		{name: "nat/tcp4/to-client/first-in-a-second", before: established4, later: 2, in: answer4("PA"), verdict: back},
		{name: "nat/tcp4/syn", before: []packet.Packet{ask4("R")}, in: ask4("S"), verdict: back},
		{name: "nat/tcp4/syn-ack", before: []packet.Packet{ask4("S")}, in: answer4("SA"), verdict: back},
		{name: "nat/tcp4/handshake-ends", before: established4[:2], in: ask4("A"), verdict: back},
		{name: "nat/tcp4/fin", before: established4, in: ask4("FA"), verdict: back},
		{name: "nat/tcp6/to-backend", before: established6, in: ask6("PA"), verdict: back},
		{name: "nat/tcp6/to-client", before: established6, in: answer6("PA"), verdict: back},
		{name: "nat/tcp6/syn", before: []packet.Packet{ask6("R")}, in: ask6("S"), verdict: back},
		{name: "nat/udp4/new", before: []packet.Packet{ask.With(packet.TTL(1))}, in: ask, verdict: back},
		{name: "nat/udp4/to-backend", before: []packet.Packet{ask, answer, ask, ask}, in: ask, verdict: back},
		{name: "nat/udp4/to-client", before: []packet.Packet{ask, answer, ask, answer}, in: answer, verdict: back},
		{name: "nat/udp4/first-fragment", before: []packet.Packet{ask, answer, ask, ask}, in: first, verdict: back},
		{name: "nat/udp4/later-fragment", before: []packet.Packet{ask, answer, ask, first}, in: later, verdict: back, reason: "fragment_followed"},
		{name: "nat/passed/tcp4", in: fromClient(client4, "192.0.2.77:80", "PA"), verdict: passed, reason: "not_ours"},
	}
}
