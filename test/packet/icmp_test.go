package packet_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
)

// errorTypes of either family: unreachable (fragmentation needed), time exceeded, parameter
// problem; packet too big.
var errorTypes = map[bool][][2]uint8{false: {{3, 4}, {3, 1}, {11, 0}, {12, 0}}, true: {{1, 4}, {2, 0}, {3, 0}, {4, 1}}}

// TestErrors carries ICMP errors through the NAT in both directions, whole and short.
func TestErrors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, v := range ways {
		for _, k := range kinds {
			t.Run(fmt.Sprintf("%s/%s", v.name, k), func(t *testing.T) { errorsOf(t, w, v, k, 45000) })
			more := packet.IPv4Options(1, 1, 1, 1, 1, 1, 1, 0)
			if k.six {
				more = packet.Extended(packet.Padding(packet.ProtocolHopByHop, 1), packet.Padding(packet.ProtocolDestinationOptions, 2))
			}
			t.Run(fmt.Sprintf("%s/%s, longer headers", v.name, k), func(t *testing.T) { errorsOf(t, w, v, k, 45001, more) })
		}
		none := packet.TransportChecksum(packet.Checksum{Mode: packet.Zero})
		t.Run(v.name+"/UDP over IPv4 without checksum", func(t *testing.T) { errorsOf(t, w, v, kind{udp: true}, 45002, none) })
	}
}

// TestErrorsAboutFragments: the quoted packet may be a first fragment, which has ports; a later
// one has none.
func TestErrorsAboutFragments(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i, k := range kinds {
		in := cut(k.fromClient(45003, portNAT, "A", pattern(600)), uint32(i), 400)
		kindOf, speaker := errorTypes[k.six][1], k.pick(addr("203.0.113.1"), addr("2001:db8:77::1"))
		direct := cut(k.toDirect(45003, directWays[2].port, "A", pattern(600)).Reverse(), uint32(i), 400)
		var left []packet.Packet
		for _, part := range in {
			left = append(left, w.send(armA, part))
		}
		about := func(part packet.Packet) packet.Packet {
			return packet.NewError(speaker, kindOf[0], kindOf[1], 1400, part, packet.MACs(beMAC, ownC))
		}
		table(t, w, []trial{
			{name: k.String() + "/first", arm: armC, in: about(left[0]), end: leaves, notes: []string{"icmp_translated"},
				want: func(packet.Packet) packet.Packet {
					return packet.NewError(in[0].Destination(), kindOf[0], kindOf[1], 1400, in[0].With(packet.TTL(63)), packet.MACs(ownA, router), packet.TTL(63))
				}},
			{name: k.String() + "/later", arm: armC, in: about(left[1]), reason: "icmp"},
			{name: k.String() + "/first, direct", arm: armC, in: about(direct[0]), end: leaves, notes: []string{"icmp_to_backend"}},
			{name: k.String() + "/later, direct", arm: armC, in: about(direct[1]), reason: "icmp"},
		})
	}
}

func errorsOf(t *testing.T, w *world, v way, k kind, port uint16, edits ...packet.Edit) {
	in := k.fromClient(port, v.port, "A", append(edits, packet.Data("some bytes of payload"))...)
	sent := w.send(armA, in)
	answer := sent.Reverse().With(packet.MACs(beMAC, v.own), packet.TTL(64), packet.Data("an answer of some bytes"))
	back := w.send(v.arm, answer)
	speaker := k.pick(addr("203.0.113.1"), addr("2001:db8:77::1"))
	const whole = 65535
	header := len(packet.Quote(in, 0)) - len(in.Payload) - 20
	if k.udp {
		header += 12
	}
	for _, kindOf := range errorTypes[k.six] {
		for _, quoted := range []int{whole, header + 8, header + 15} {
			name := fmt.Sprintf("%d.%d quoting %d", kindOf[0], kindOf[1], quoted)
			make := func(from netip.Addr, about packet.Packet, edits ...packet.Edit) packet.Packet {
				cut := func(p *packet.Packet) {
					q := packet.Quote(about, min(quoted, len(packet.Quote(about, 0))))
					if p.ICMP != nil {
						p.ICMP.Quote = q
					} else {
						p.ICMPv6.Quote = q
					}
				}
				return packet.NewError(from, kindOf[0], kindOf[1], 1400, about, append([]packet.Edit{cut}, edits...)...)
			}
			ttl := packet.TTL(63)
			// About our packet to the backend: goes to the client, about the client's packet.
			toUs := make(speaker, sent, packet.MACs(beMAC, v.own))
			about := in.With(packet.TTL(63))
			table(t, w, []trial{{name: name + " from the backend's side", arm: v.arm, in: toUs, end: leaves, notes: []string{"icmp_translated"},
				want: func(packet.Packet) packet.Packet {
					return make(in.Destination(), about, packet.MACs(ownA, router), ttl)
				}}})
			// About our packet to the client: goes to the backend, about the backend's packet.
			toUs = make(speaker, back, packet.MACs(router, ownA))
			about = answer.With(packet.TTL(63))
			from := sent.Source()
			if !v.from4.IsValid() {
				from = speaker // the backend knows the client itself: the speaker is real
			}
			table(t, w, []trial{{name: name + " from the client's side", in: toUs, end: leaves, notes: []string{"icmp_translated"},
				want: func(packet.Packet) packet.Packet {
					return make(from, about, packet.MACs(v.own, beMAC), ttl)
				}}})
		}
	}
}

// TestErrorsOfNoFlow: errors about no flow pass to the host unchanged.
func TestErrorsOfNoFlow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		speaker := k.pick(addr("203.0.113.1"), addr("2001:db8:77::1"))
		in := k.fromClient(45000, portNAT, "A", packet.Data("data"))
		sent := w.send(armA, in)
		kindOf := errorTypes[k.six][0]
		about := func(p packet.Packet, edits ...packet.Edit) packet.Packet {
			return packet.NewError(speaker, kindOf[0], kindOf[1], 0, p, append([]packet.Edit{packet.MACs(beMAC, ownC)}, edits...)...)
		}
		stranger := netip.AddrPortFrom(sent.Source(), sourceOf(sent).Port()^1)
		mismatch := about(sent).With(func(p *packet.Packet) { // to one address, about another's packet
			if p.IPv4 != nil {
				p.IPv4.Destination = vip4
			} else {
				p.IPv6.Destination = vip6
			}
		})
		table(t, w, []trial{
			{name: k.String() + "/another port", arm: armC, in: about(sent.With(between(stranger, destinationOf(sent)))), reason: "icmp"},
			{name: k.String() + "/TTL 1", arm: armC, in: about(sent, packet.TTL(1)), reason: "icmp"},
			{name: k.String() + "/quote of a packet from elsewhere", arm: armC, in: mismatch, reason: "icmp"},
		})
		for _, n := range []int{0, 1, 8, 19, 20, 24, 27} {
			short := about(sent).With(func(p *packet.Packet) {
				if p.ICMP != nil {
					p.ICMP.Quote = p.ICMP.Quote[:n]
				} else {
					p.ICMPv6.Quote = p.ICMPv6.Quote[:n+20]
				}
			})
			table(t, w, []trial{{name: fmt.Sprintf("%s/quote of %d bytes", k, n), arm: armC, in: short, reason: "icmp"}})
		}
	}
}

// TestEcho: a VIP that is not the host's own answers.
func TestEcho(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range []kind{{}, {six: true}} {
		client, vip := k.pick(client4, client6), k.pick(vip4, vip6)
		ping := packet.NewEcho(client, vip, 77, 3, packet.MACs(router, ownA), packet.Data("abcdefg"), packet.TTL(9))
		zeros := packet.NewEcho(client, vip, 0, 0, packet.MACs(router, ownA), packet.Data("\x00\x00"))
		pong := func(ping packet.Packet) func(packet.Packet) packet.Packet {
			return func(packet.Packet) packet.Packet {
				return ping.Reverse().With(packet.TTL(64), func(p *packet.Packet) {
					if p.ICMP != nil {
						p.ICMP.Type = 0
					} else {
						p.ICMPv6.Type = 129
					}
				})
			}
		}
		to := func(a netip.Addr) packet.Packet { return packet.NewEcho(client, a, 77, 3, packet.MACs(router, ownA)) }
		code := ping.With(func(p *packet.Packet) {
			if p.ICMP != nil {
				p.ICMP.Code = 1
			} else {
				p.ICMPv6.Code = 1
			}
		})
		reply := ping.With(func(p *packet.Packet) {
			if p.ICMP != nil {
				p.ICMP.Type = 0
			} else {
				p.ICMPv6.Type = 129
			}
		})
		group := packet.NewEcho(k.pick(addr("224.0.0.1"), addr("ff02::1")), vip, 1, 1, packet.MACs(router, ownA))
		table(t, w, []trial{
			{name: k.String() + "/VIP", in: ping, end: leaves, reason: "echo_answered", want: pong(ping)},
			{name: k.String() + "/zeros", in: zeros, end: leaves, reason: "echo_answered", want: pong(zeros)},
			{name: k.String() + "/host's own", in: to(k.pick(hostVIP4, hostVIP6)), reason: "icmp"},
			{name: k.String() + "/NAT source", in: to(k.pick(sources[0], sources[2])), reason: "icmp"},
			{name: k.String() + "/not ours, looked at for nat-destination", in: to(k.pick(client4, client6)), reason: "not_ours"},
			{name: k.String() + "/code 1", in: code, reason: "icmp"},
			{name: k.String() + "/a reply", in: reply, reason: "icmp"},
			{name: k.String() + "/from a group", in: group, end: drops, reason: "martian"},
		})
	}
}

// expired is our time exceeded about a packet.
func expired(k kind, from4, from6 netip.Addr, about packet.Packet) packet.Packet {
	to := packet.MACs(about.Ethernet.Destination, about.Ethernet.Source)
	if k.six {
		return packet.NewError(from6, 3, 0, 0, about, to)
	}
	return packet.NewError(from4, 11, 0, 0, about, to, func(p *packet.Packet) { p.IPv4.TOS = 0xc0 })
}

// TestTTL: the last hop ends here, in either direction, as at a router.
func TestTTL(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		w := newWorld(t) // a fresh program may send as many errors at once as one world needs
		for _, v := range ways {
			in := k.fromClient(45000, v.port, "S")
			name := fmt.Sprintf("%s/%s", v.name, k)
			for ttl := range uint8(2) {
				for _, size := range []int{0, 9, 500, 1100} {
					in := in.With(packet.TTL(ttl), packet.Data(make([]byte, size)))
					table(t, w, []trial{{name: fmt.Sprintf("%s/first packet, TTL %d, %d bytes", name, ttl, size), in: in, end: leaves, reason: "ttl_exceeded",
						want: func(packet.Packet) packet.Packet { return expired(k, hostVIP4, hostVIP6, in) }}})
				}
			}
			sent := w.send(armA, in)
			last := in.With(packet.TTL(1), flagged("A"))
			answer := sent.Reverse().With(packet.MACs(beMAC, v.own), packet.TTL(1), flagged("SA"))
			from4, from6 := hostVIP4, hostVIP6
			if v.arm == armC {
				from4, from6 = addr("10.0.0.1"), addr("2001:db8:2::1")
			}
			table(t, w, []trial{
				{name: name + "/later packet", in: last, end: leaves, reason: "ttl_exceeded",
					want: func(packet.Packet) packet.Packet { return expired(k, hostVIP4, hostVIP6, last) }},
				{name: name + "/answer", arm: v.arm, in: answer, end: leaves, reason: "ttl_exceeded",
					want: func(packet.Packet) packet.Packet { return expired(k, from4, from6, answer) }},
			})
			if !k.six {
				group := in.With(packet.TTL(1), between(netip.MustParseAddrPort("224.0.0.9:45000"), destinationOf(in)))
				table(t, w, []trial{{name: name + "/from a group", in: group, end: drops, reason: "martian"}})
			}
		}

	}
}

// TestTimeExceededIsLimited: of a flood of last hops some are answered, and all are counted.
func TestTimeExceededIsLimited(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		in := packet.Must(k.fromClient(40000, portNAT, "S", packet.TTL(1)))
		before := w.reasons()
		const sent = 1000
		w.cpu.do(func() {
			for range sent {
				_, _, _ = w.d.RunPacket(armA, in)
			}
		})
		moved := w.moved(before)
		if n := moved["ttl_exceeded"] + moved["icmp_limited"]; n != sent || moved["icmp_limited"] == 0 || len(moved) > 2 {
			t.Errorf("%s: %d packets were counted as %v", k, sent, moved)
		}
	}
}
