package differential_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/packet"
)

// step is one packet of an episode. All of it follows from the episode's seed and the step's
// number, except the packet that it answers, quotes or goes on with: that is the packet of step
// of. So a step can be left out and the others played again, though with other source ports.
type step struct{ number, of int }

// done is a step that has been played.
type done struct {
	arm     int
	in, out []byte // out: the frame that left; nil: none did
	outArm  int
}

// generator makes the packets of an episode: mostly valid ones, some with a fault.
type generator struct {
	*rand.Rand
	focus  int // index in targets: much of an episode's traffic goes to one service
	second int
	most   int // bytes of data
	// In some episodes a backend is removed at a step, if that is valid.
	removed   netip.Addr
	removedAt int
}

// target is an address and port that clients send to.
type target struct {
	vip  [2]netip.Addr // IPv4 and IPv6
	port uint16
}

// targets are all services, and ports of no service.
var targets = func() (all []target) {
	for _, s := range balancing {
		f := s.Frontends[0]
		t := target{port: f.Ports.First}
		if !f.Ports.Exact() {
			t.port = f.Ports.First + (f.Ports.Last-f.Ports.First)/2
		}
		for _, f := range s.Frontends {
			if i := family(f.Address); !t.vip[i].IsValid() {
				t.vip[i] = f.Address
			}
		}
		if t.vip[0] == t.vip[1] || !t.vip[1].IsValid() {
			t.vip[1] = vips[1]
		}
		all = append(all, t)
	}
	return append(all, target{vip: vips, port: 99}, target{vip: directVIPs, port: 99}, target{vip: hashedVIPs, port: 99},
		target{vip: [2]netip.Addr{natSources[0], natSources[1]}, port: 80}, target{vip: [2]netip.Addr{addr("192.0.2.77"), addr("2001:db8:1::77")}, port: 80})
}()

// natOf is the number of the first targets that are services with NAT and backends.
const natOf = 11

func family(a netip.Addr) int {
	if a.Is6() {
		return 1
	}
	return 0
}

func newGenerator(seed uint64) *generator {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0))}
	g.focus, g.second, g.most = g.IntN(len(targets)), g.IntN(len(targets)), 3000
	if poolOf(seed) == narrowPool {
		g.most = 1100           // a packet that is too long has a source port that the model does not see
		g.focus = g.IntN(natOf) // the other services need no ports
	}
	if g.chance(40) {
		g.removed, g.removedAt = g.removable(), 100+g.IntN(episodeSize-100)
	}
	return g
}

// removable is a backend of the service with most traffic.
func (g *generator) removable() (a netip.Addr) {
	if g.focus >= len(balancing) || len(balancing[g.focus].Backends) == 0 {
		return a
	}
	backends := balancing[g.focus].Backends
	if a = backends[g.IntN(len(backends))].Address; a == gone || a == unresolved || a == unsourced {
		return netip.Addr{}
	}
	return a
}

// balancing are the services, in the order of targets.
var balancing = services()

// at is the generator for one step: its choices depend on the step's number alone.
func (g *generator) at(seed uint64, number int) *generator {
	return &generator{Rand: rand.New(rand.NewPCG(seed, uint64(number)+1)), focus: g.focus, second: g.second, most: g.most}
}

func (g *generator) chance(percent int) bool { return g.IntN(100) < percent }

func pick[T any](g *generator, from ...T) T { return from[g.IntN(len(from))] }

// next chooses the step that a step goes on with: one of the last steps, or none.
func (g *generator) next(played int) int {
	if played == 0 || g.chance(30) {
		return -1
	}
	return played - 1 - g.IntN(min(played, 1+g.IntN(60)))
}

// frame is the packet of a step.
func (g *generator) frame(of *done) (arm int, frame []byte) {
	arm = armA
	if g.chance(25) {
		arm = armC
	}
	switch {
	case of == nil || g.chance(10):
		frame = g.fresh(arm)
	default:
		arm, frame = g.after(arm, of)
	}
	if g.chance(30) {
		frame = g.damage(arm, frame)
	}
	const least = 14 // the least that the kernel takes for a test run
	for len(frame) < least {
		frame = append(frame, 0)
	}
	return arm, frame
}

// fresh is a packet without relation to another.
func (g *generator) fresh(arm int) []byte {
	switch n := g.IntN(100); {
	case n < 70:
		return build(g.segment(arm))
	case n < 78:
		return build(g.firstFragment(g.segment(arm)))
	case n < 82:
		return g.arp(arm)
	case n < 86:
		return g.solicitation(arm)
	case n < 91:
		return build(g.ping(arm))
	case n < 94:
		return g.tunnelled(arm)
	case n < 97:
		return g.otherProtocol(arm)
	}
	return g.noise(arm)
}

func build(p packet.Packet) []byte {
	b, err := packet.Build(p)
	if err != nil {
		panic(fmt.Sprintf("the generator made a packet that cannot be: %v", err))
	}
	return b
}

// client is an address of a client, or rarely one that no client has.
func (g *generator) client(six bool) netip.Addr {
	if g.chance(4) {
		return g.oddSource(six)
	}
	n := byte(g.IntN(16))
	if six {
		return pick(g, netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0, 9, 15: n}), netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0, 9, 0, n, 15: 7}))
	}
	return netip.AddrFrom4([4]byte{198, 51, byte(100 + g.IntN(10)/9), n})
}

// oddSource is an address that packets to a service may not have, or only just may.
func (g *generator) oddSource(six bool) netip.Addr {
	if six {
		return pick(g, addr("::"), addr("::1"), addr("ff02::1"), addr("fe80::1"), vips[1], directVIPs[1], natSources[1], hostVIPs[1], rangeVIPs[1],
			addr("2001:db8:2::20"), addr("2001:db8:2::30"), addr("::2"), addr("::ffff:192.0.2.7"), netip.AddrFrom16(vips[0].As16()))
	}
	return pick(g, addr("0.0.0.0"), addr("0.1.2.3"), addr("127.0.0.1"), addr("127.255.255.254"), addr("224.0.0.1"), addr("239.255.255.255"), addr("255.255.255.255"),
		addr("240.0.0.1"), vips[0], directVIPs[0], natSources[0], hostVIPs[0], rangeVIPs[0], addr("10.0.0.20"), addr("10.0.0.30"), addr("223.255.255.255"))
}

func (g *generator) target() target {
	switch n := g.IntN(10); {
	case n < 5:
		return targets[g.focus]
	case n < 7:
		return targets[g.second]
	}
	return targets[g.IntN(len(targets))]
}

var tcpFlags = []string{"S", "S", "S", "A", "A", "PA", "FA", "F", "R", "RA", "SA", "SF", "", "SFRPAU", "FPU", "SEC"}

// segment is a client's TCP or UDP packet to a service.
func (g *generator) segment(arm int) packet.Packet {
	six, at := g.chance(50), g.target()
	port := at.port
	if g.chance(5) {
		port += uint16(g.IntN(3)) - 1
	}
	from := netip.AddrPortFrom(g.client(six), 40000+uint16(g.IntN(8)))
	if g.chance(20) {
		from = netip.AddrPortFrom(from.Addr(), uint16(g.IntN(65536)))
	}
	vip := at.vip[0]
	if six {
		vip = at.vip[1]
	}
	return g.between(from, netip.AddrPortFrom(vip, port), g.chance(50), g.linkTo(arm))
}

// linkTo gives a packet the link addresses of one that arrives.
func (g *generator) linkTo(arm int) packet.Edit {
	return packet.MACs(pick(g, routers...), arms[arm].mac)
}

// between is a TCP or UDP packet without a fault. netip does not let a mapped address into the
// library's IPv6 packets, so such addresses are written afterwards.
func (g *generator) between(from, to netip.AddrPort, isUDP bool, edits ...packet.Edit) packet.Packet {
	source, destination := from.Addr(), to.Addr()
	if source.Is4In6() {
		from = netip.AddrPortFrom(addr("2001:db8::ffff"), from.Port())
	}
	if destination.Is4In6() {
		to = netip.AddrPortFrom(addr("2001:db8::ffff"), to.Port())
	}
	var p packet.Packet
	if isUDP {
		p = packet.NewUDP(from, to, edits...)
	} else {
		p = packet.NewTCP(from, to, pick(g, tcpFlags...), edits...)
		p.TCP.Seq, p.TCP.Ack, p.TCP.Window = g.Uint32(), g.Uint32(), uint16(g.Uint32())
		if g.chance(20) {
			p.TCP.Options = pick(g, packet.MSS(1460), make([]byte, 40), []byte{1, 1, 1, 1, 2, 4, 5, 180})
		}
	}
	p.Payload = g.data()
	g.vary(&p)
	if p.IPv6 != nil {
		p.IPv6.Source, p.IPv6.Destination = source, destination
	}
	return p
}

// data is of any length, rarely a long one.
func (g *generator) data() []byte {
	size := 0
	switch n := g.IntN(100); {
	case n < 30:
	case n < 85:
		size = g.IntN(40)
	case n < 95:
		size = g.IntN(600)
	case n < 98:
		size = 1290 + g.IntN(230)
	default:
		size = g.IntN(3000)
	}
	b := make([]byte, min(size, g.most))
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], g.Uint64())
	}
	for i := len(b) &^ 7; i < len(b); i++ {
		b[i] = byte(g.Uint32())
	}
	return b
}

// vary changes fields that may have any value.
func (g *generator) vary(p *packet.Packet) {
	if ip := p.IPv4; ip != nil {
		ip.DF, ip.ID = g.chance(70), uint16(g.Uint32())
		ip.TTL = g.ttl()
		if g.chance(20) {
			ip.TOS = byte(g.Uint32())
		}
		if g.chance(8) {
			ip.Options = make([]byte, 4*(1+g.IntN(10)))
			for i := range ip.Options {
				ip.Options[i] = 1
			}
		}
	}
	if ip := p.IPv6; ip != nil {
		ip.HopLimit = g.ttl()
		if g.chance(20) {
			ip.TrafficClass, ip.FlowLabel = byte(g.Uint32()), g.Uint32()&0xfffff
		}
		if g.chance(10) {
			g.extend(ip)
		}
	}
	if g.chance(8) {
		p.Trailer = make([]byte, g.IntN(20))
	}
	if g.chance(12) {
		packet.TransportChecksum(pick(g, packet.Checksum{Mode: packet.Partial}, packet.Checksum{Mode: packet.Partial}, packet.Checksum{Mode: packet.Zero},
			packet.ChecksumValue(uint16(g.Uint32())), packet.ChecksumValue(0xffff)))(p)
	}
}

func (g *generator) ttl() uint8 {
	if g.chance(5) {
		return byte(g.IntN(3))
	}
	return pick(g, uint8(64), 64, 64, 255, 3, 128)
}

// extend puts extension headers before the payload.
func (g *generator) extend(ip *packet.IPv6) {
	for range 1 + g.IntN(pick(g, 1, 2, 3, 10)) {
		kind := pick(g, packet.ProtocolHopByHop, packet.ProtocolDestinationOptions, packet.ProtocolRouting, packet.ProtocolAH, packet.ProtocolDestinationOptions)
		body := make([]byte, 6+8*g.IntN(3))
		switch {
		case kind == packet.ProtocolAH:
			body = make([]byte, 10+4*g.IntN(4))
		case kind == packet.ProtocolRouting && g.chance(10):
			body[1] = 1
		case g.chance(2):
			body = make([]byte, 6+8*(200+g.IntN(55)))
		}
		ip.Extensions = append(ip.Extensions, packet.Extension{Type: kind, Body: body})
	}
	if g.chance(15) { // a fragment of its own (RFC 6946)
		ip.Extensions = append(ip.Extensions, packet.Extension{Type: packet.ProtocolFragment, Body: []byte{0, 0, 0, 0, 0, byte(g.IntN(4))}})
	}
}

// identification is a datagram's: there are few, so that datagrams share one.
func (g *generator) identification() uint32 { return uint32(g.IntN(4)) }

// firstFragment makes a packet the first fragment of a longer one.
func (g *generator) firstFragment(p packet.Packet) packet.Packet {
	if p.IPv6 != nil && len(p.IPv6.Extensions) > 0 {
		p.IPv6.Extensions = p.IPv6.Extensions[:len(p.IPv6.Extensions)-1]
	}
	if p.UDP != nil && g.chance(70) {
		p.UDP.Length = 8 + len(p.Payload) + 8*(1+g.IntN(20))
	}
	return p.With(packet.Fragmented(g.identification(), 0, true))
}

// laterFragment is a fragment, perhaps of the same datagram as another.
func (g *generator) laterFragment(arm int, p packet.Packet) packet.Packet {
	offset := uint16(8 * (1 + g.IntN(pick(g, 4, 100, 8000))))
	out := packet.Packet{Ethernet: p.Ethernet, IPv4: p.IPv4, IPv6: p.IPv6, Payload: g.data()}
	switch {
	case p.TCP != nil:
		out = out.With(protocolOf(packet.ProtocolTCP))
	case p.UDP != nil:
		out = out.With(protocolOf(packet.ProtocolUDP))
	default:
		out = out.With()
	}
	packet.MACs(pick(g, routers...), arms[arm].mac)(&out)
	id := g.identification()
	if ip := out.IPv6; ip != nil {
		kept := ip.Extensions[:0]
		for _, e := range ip.Extensions {
			if e.Type == packet.ProtocolFragment && len(e.Body) == 6 {
				id = be32(e.Body[2:])
			} else {
				kept = append(kept, e)
			}
		}
		ip.Extensions = kept
		field := offset
		if g.chance(50) {
			field |= 1
		}
		ip.Extensions = append(ip.Extensions, packet.Extension{Type: packet.ProtocolFragment,
			Body: append(binary.BigEndian.AppendUint16(nil, field), binary.BigEndian.AppendUint32(nil, id)...)})
		ip.HopLimit, ip.Length = g.ttl(), 0
		return out
	}
	ip := out.IPv4
	ip.FragmentOffset, ip.MF, ip.TTL, ip.Length, ip.Checksum = offset, g.chance(50), g.ttl(), 0, packet.Checksum{}
	if !p.IPv4.MF {
		ip.ID = uint16(id)
	}
	return out
}

func protocolOf(number uint8) packet.Edit {
	return func(p *packet.Packet) {
		if p.IPv4 != nil {
			p.IPv4.Protocol = number
		} else {
			p.IPv6.NextHeader = number
		}
	}
}

func (g *generator) arp(arm int) []byte {
	target := pick(g, vips[0], vips[0], directVIPs[0], natSources[0], hostVIPs[0], rangeVIPs[0], addr("192.0.2.77"))
	sender := pick(g, addr("192.0.2.254"), addr("192.0.2.254"), addr("0.0.0.0"), target)
	router := pick(g, routers...)
	p := packet.NewARPRequest(router, sender, target)
	if g.chance(20) {
		p = packet.NewARPReply(router, sender, arms[arm].mac, target)
	}
	if g.chance(30) {
		p.Ethernet.Destination = pick(g, arms[arm].mac, foreign)
	}
	if g.chance(10) {
		p.ARP.SenderMAC = pick(g, foreign, net.HardwareAddr{1, 0, 0x5e, 0, 0, 1})
	}
	if g.chance(40) {
		p.Trailer = make([]byte, 18)
	}
	return build(p)
}

func (g *generator) solicitation(arm int) []byte {
	target := pick(g, vips[1], vips[1], directVIPs[1], natSources[1], hostVIPs[1], rangeVIPs[1], addr("2001:db8:1::77"))
	p := packet.NewNeighbourSolicitation(pick(g, routers...), pick(g, addr("2001:db8:1::fe"), addr("fe80::7"), addr("::")), target)
	if p.IPv6.Source.IsUnspecified() && g.chance(80) || g.chance(10) {
		p.ICMPv6.Neighbour.LinkAddress = nil
	}
	if g.chance(20) {
		p.ICMPv6.Type = 136
	}
	if g.chance(30) {
		p.Ethernet.Destination, p.IPv6.Destination = pick(g, arms[arm].mac, arms[arm].mac, foreign), target
	}
	if g.chance(20) {
		p.ICMPv6.Neighbour.Options = pick(g, make([]byte, 8), []byte{14, 1, 0, 0, 0, 0, 0, 0}, []byte{3, 4, 0, 0, 0, 0, 0, 0}, []byte{1, 1, 2, 0, 0, 0, 0, 7})
	}
	if g.chance(5) {
		p.IPv6.HopLimit = 254
	}
	if g.chance(5) {
		p.ICMPv6.Code = 1
	}
	return build(p)
}

func (g *generator) ping(arm int) packet.Packet {
	six := g.chance(50)
	from, to := g.client(six), pick(g, vips[0], directVIPs[0], rangeVIPs[0], hostVIPs[0], natSources[0])
	if six {
		to = pick(g, vips[1], directVIPs[1], rangeVIPs[1], hostVIPs[1], natSources[1])
		if from.Is4In6() {
			from = addr("2001:db8:9::8")
		}
	}
	p := packet.NewEcho(from, to, uint16(g.Uint32()), uint16(g.Uint32()), g.linkTo(arm), packet.Data(g.data()))
	g.vary(&p)
	switch {
	case p.ICMP != nil && g.chance(15):
		p.ICMP.Type, p.ICMP.Code = byte(g.IntN(20)), byte(g.IntN(3))
	case p.ICMPv6 != nil && g.chance(15):
		p.ICMPv6.Type, p.ICMPv6.Code = pick(g, uint8(128), 129, 130, 143, 200), byte(g.IntN(3))
	}
	if p.ICMP != nil && p.ICMP.Checksum.Mode == packet.Partial {
		p.ICMP.Checksum = packet.Checksum{}
	}
	if p.ICMP != nil && slices.Contains([]uint8{3, 4, 5, 11, 12}, p.ICMP.Type) {
		p.ICMP.Quote, p.Payload = p.Payload, nil
	}
	if g.chance(10) {
		return p.With(packet.Fragmented(g.identification(), uint16(8*g.IntN(4)), g.chance(50)))
	}
	return p
}

// tunnelled is a packet inside another.
func (g *generator) tunnelled(arm int) []byte {
	inside := g.segment(arm)
	outside := g.segment(arm)
	raw, err := packet.BuildIP(inside)
	if err != nil {
		panic(err)
	}
	number := uint8(inIPv4)
	if inside.IPv6 != nil {
		number = inIPv6
	}
	if g.chance(50) {
		outside.TCP, outside.UDP, outside.Payload = nil, nil, raw
		return build(outside.With(protocolOf(number)))
	}
	outside.TCP, outside.UDP = nil, &packet.UDP{SourcePort: 50000, DestinationPort: outer.GUEPort}
	outside.Payload = append([]byte{0, number, 0, 0}, raw...)
	return build(outside.With(protocolOf(packet.ProtocolUDP)))
}

func (g *generator) otherProtocol(arm int) []byte {
	p := g.segment(arm)
	p.TCP, p.UDP = nil, nil
	return build(p.With(protocolOf(pick(g, uint8(132), 50, 47, 59, 255, 1, 58, 43, 44, 0, 51, 60, 135, 2))))
}

// noise is a frame of another kind.
func (g *generator) noise(arm int) []byte {
	kind := pick(g, uint16(0x88cc), 100, 0x0800, 0x86dd, 0x0806, 0x8100, 0x88a8, 0x8847)
	return build(packet.Packet{Ethernet: packet.Ethernet{Source: routers[0], Destination: arms[arm].mac, Type: kind}, Payload: g.data()})
}

// after is a packet related to an earlier one.
func (g *generator) after(arm int, of *done) (int, []byte) {
	in, err := packet.Parse(of.in)
	if err != nil || in.IPv4 == nil && in.IPv6 == nil || in.TCP == nil && in.UDP == nil {
		if err == nil && (in.IPv4 != nil || in.IPv6 != nil) && g.chance(70) {
			return of.arm, build(g.laterFragment(of.arm, in))
		}
		return arm, g.fresh(arm)
	}
	var out packet.Packet
	if of.out != nil {
		if out, err = packet.Parse(of.out); err != nil || out.TCP == nil && out.UDP == nil {
			of = &done{arm: of.arm, in: of.in}
		}
	}
	n := g.IntN(100)
	switch {
	case n < 10 || n < 60 && isFirst(in):
		return of.arm, build(g.laterFragment(of.arm, in))
	case n < 40:
		return of.arm, g.again(in)
	case n < 50 || of.out == nil:
		return of.arm, g.errorAbout(of.arm, g.reply(in, of.arm))
	case n < 85:
		return of.outArm, build(g.reply(out, of.outArm))
	}
	return of.outArm, g.errorAbout(of.outArm, out)
}

// isFirst reports whether a packet is a first fragment.
func isFirst(p packet.Packet) bool {
	if p.IPv4 != nil {
		return p.IPv4.MF
	}
	return slices.ContainsFunc(p.IPv6.Extensions, func(e packet.Extension) bool {
		return e.Type == packet.ProtocolFragment && e.Body[1]&1 != 0
	})
}

// again is another packet of the same flow.
func (g *generator) again(p packet.Packet) []byte {
	p = p.With()
	if p.TCP != nil {
		p.TCP.Flags = pick(g, tcpFlags...)
		p.TCP.Checksum = packet.Checksum{}
	} else {
		p.UDP.Length, p.UDP.Checksum = 0, packet.Checksum{}
	}
	p.Payload = g.data()
	packet.TTL(g.ttl())(&p)
	if p.IPv4 != nil {
		p.IPv4.Length, p.IPv4.Checksum = 0, packet.Checksum{}
	} else {
		p.IPv6.Length = 0
	}
	g.vary(&p)
	return build(p)
}

// reply is the answer to a packet that left, from its receiver.
func (g *generator) reply(sent packet.Packet, arm int) packet.Packet {
	p := sent.Reverse()
	from := stationOf(p.Source())
	if g.chance(20) {
		from = routers[0]
	}
	p = g.between(endpointOf(p, true), endpointOf(p, false), p.UDP != nil, packet.MACs(from, arms[arm].mac))
	if p.TCP != nil && g.chance(70) {
		p.TCP.Flags = pick(g, "SA", "A", "PA", "FA", "RA", "R")
	}
	return p
}

func endpointOf(p packet.Packet, source bool) netip.AddrPort {
	a, from, to := p.Destination(), uint16(0), uint16(0)
	if p.TCP != nil {
		from, to = p.TCP.SourcePort, p.TCP.DestinationPort
	} else {
		from, to = p.UDP.SourcePort, p.UDP.DestinationPort
	}
	if source {
		return netip.AddrPortFrom(p.Source(), from)
	}
	return netip.AddrPortFrom(a, to)
}

// errorAbout is an ICMP error about a packet, from a host on its way.
func (g *generator) errorAbout(arm int, about packet.Packet) []byte {
	from, kind, code := pick(g, addr("203.0.113.1"), addr("10.0.0.20"), about.Destination()), pick(g, uint8(3), 3, 11, 12, 5, 4), byte(g.IntN(5))
	if about.IPv6 != nil {
		from, kind = pick(g, addr("2001:db8:77::1"), about.Destination()), pick(g, uint8(1), 2, 3, 4, 137, 0)
	}
	if from.Is4() != about.Destination().Is4() {
		from = about.Destination()
	}
	about.Trailer = nil
	if source := about.Source(); source.Is4In6() || about.Destination().Is4In6() {
		return build(g.ping(arm))
	}
	p := packet.NewError(from, kind, code, g.Uint32(), about, packet.MACs(pick(g, routers[0], stationOf(about.Destination())), arms[arm].mac))
	quoted := len(packet.Quote(about, 0))
	if g.chance(40) {
		quoted = g.IntN(quoted + 1)
	}
	if p.ICMP != nil {
		p.ICMP.Quote = p.ICMP.Quote[:min(quoted, len(p.ICMP.Quote))]
	} else {
		p.ICMPv6.Quote = p.ICMPv6.Quote[:min(quoted, len(p.ICMPv6.Quote))]
	}
	g.vary(&p)
	if p.ICMP != nil && p.ICMP.Checksum.Mode == packet.Partial {
		p.ICMP.Checksum = packet.Checksum{}
	}
	if p.ICMPv6 != nil && p.ICMPv6.Type >= 128 { // no error, so no quote follows
		p.ICMPv6.Quote, p.Payload = nil, p.ICMPv6.Quote
	}
	return build(p)
}

// damage changes a frame in a way that its sender would not.
func (g *generator) damage(arm int, frame []byte) []byte {
	b := slices.Clone(frame)
	switch n := g.IntN(100); {
	case n < 20 && len(b) > 0:
		for range 1 + g.IntN(3) {
			b[g.IntN(len(b))] ^= 1 << g.IntN(8)
		}
	case n < 30:
		b[g.IntN(min(len(b), 70))] = byte(g.Uint32())
	case n < 45:
		b = b[:g.IntN(len(b)+1)]
	case n < 52: // cut, with lengths that fit
		if keep := g.IntN(len(b) + 1); keep > 60 {
			b = b[:keep]
			adjust(b)
		} else if len(b) > 18 {
			put16(b[16:], uint16(g.Uint32()))
		}
	case n < 60: // false lengths
		if at := pick(g, 16, 18, 38, 58, 46, 66); at+2 <= len(b) {
			put16(b[at:], pick(g, 0, be16(b[at:])+uint16(g.IntN(9))-4, uint16(g.Uint32())))
		}
	case n < 68:
		tag := []byte{0x81, 0, 0, byte(g.IntN(256))}
		if g.chance(30) {
			tag = append([]byte{0x88, 0xa8, 0, 9}, tag...)
		}
		b = slices.Insert(b, 12, tag...)
	case n < 78:
		copy(b, pick(g, foreign, net.HardwareAddr{255, 255, 255, 255, 255, 255}, net.HardwareAddr{1, 0, 0x5e, 0, 0, 5}, net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, arms[1-arm].mac))
	case n < 84:
		b = append(b, make([]byte, g.IntN(30))...)
	case n < 92 && len(b) > 54: // addresses
		if b[14]>>4 == 4 {
			copy(b[pick(g, 26, 26, 30):], g.oddSource(false).AsSlice())
		} else {
			a := g.oddSource(true).As16()
			copy(b[pick(g, 22, 22, 38):], a[:])
		}
	case n < 96 && len(b) > 22:
		b[21+g.IntN(2)] = byte(g.IntN(2)) // TTL, or hop limit
	default:
		for i := 14; i < len(b); i++ {
			if g.chance(3) {
				b[i] = byte(g.Uint32())
			}
		}
	}
	return b
}

// adjust sets the IP header's length to the frame's end.
func adjust(b []byte) {
	if b[14]>>4 == 4 {
		put16(b[16:], uint16(len(b)-14))
	} else {
		put16(b[18:], uint16(len(b)-14-40))
	}
}
