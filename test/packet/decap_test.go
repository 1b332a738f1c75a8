package packet_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/test/space"
)

// The backend of these tests: 10.0.0.20 and 2001:db8:2::20 are the interface's, balancers
// send from 10.0.0.0/24 and 2001:db8:2::/64, GUE comes on port 6080.
const decapPort = 6080

var (
	decapVIP4   = addr("192.0.2.10")
	decapVIP6   = addr("2001:db8::10")
	decapOwn4   = addr("10.0.0.20")
	decapOwn6   = addr("2001:db8:2::20")
	decapFrom4  = addr("10.0.0.1")
	decapFrom6  = addr("2001:db8:2::1")
	decapFroms  = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("2001:db8:2::/64")}
	decapLimit  = packet.Extension{Type: packet.ProtocolDestinationOptions, Body: []byte{4, 1, 4, 1, 1, 0}}
	decapNotes  = map[string]bool{"decap_ecn": true}
	decapFamily = []bool{false, true}
)

// decapWorld is a backend with sh_decap on its interface.
type decapWorld struct {
	*world
	decap *decap.Program
}

func newDecapWorld(t testing.TB) *decapWorld {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	number := worldCount.Add(1)
	name := fmt.Sprintf("shunt-pkt-%d-%d", os.Getpid(), number)
	w := &decapWorld{world: &world{TB: t, number: int(number), ifindex: map[string]int{}}}
	var err error
	w.space, err = makeSpace(name)
	must(w, err)
	w.Cleanup(func() {
		if err := removeSpace(w.space, name); err != nil {
			w.Error(err)
		}
	})
	w.cpu = w.newRunner(0)
	w.cpu.do(func() {
		space.AddArm(w, armC, ownC, 0, decapOwn4.String()+"/24", decapOwn6.String()+"/64")
		var err error
		w.decap, err = decap.Attach(decap.Options{
			Name: name, Interface: armC, Mode: model.AttachNative, GUEPort: decapPort,
			VIPs: []netip.Addr{decapVIP4, decapVIP6}, Senders: decapFroms,
			Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		})
		must(w, err)
	})
	if w.Failed() {
		w.FailNow() // must has failed on another thread
	}
	w.Cleanup(func() {
		if err := w.decap.Detach(); err != nil {
			w.Errorf("detaching: %v", err)
		}
	})
	return w
}

func (w *decapWorld) counted() map[string]uint64 {
	w.Helper()
	counters, err := w.decap.Counters()
	must(w, err)
	out := map[string]uint64{}
	for name, c := range counters {
		out[name] = c.Packets
	}
	return out
}

// judge runs a frame and compares all visible results with the model's.
func (w *decapWorld) judge(frame []byte) (fault string, reason string) {
	w.Helper()
	before := w.counted()
	var verdict uint32
	var out []byte
	var err error
	w.cpu.do(func() { verdict, out, err = w.decap.RunPacket(bytes.Clone(frame)) })
	must(w, err)
	now := w.counted()
	expected := decapModel(frame)
	want := map[string]uint64{expected.reason: 1}
	if expected.marked {
		want["decap_ecn"] = 1
	}
	for name, n := range before {
		if now[name] -= n; now[name] == 0 {
			delete(now, name)
		}
	}
	end := uint32(kernel.XDPPass)
	if expected.drop {
		end = kernel.XDPDrop
	}
	switch {
	case !maps.Equal(now, want):
		return fmt.Sprintf("counted %v, want %v", now, want), expected.reason
	case verdict != end:
		return fmt.Sprintf("XDP verdict %d, want %d (%s)", verdict, end, expected.reason), expected.reason
	case !expected.drop && !bytes.Equal(out, expected.out):
		return fmt.Sprintf("%s: it went on as\n%x, want\n%x", expected.reason, out, expected.out), expected.reason
	}
	return "", expected.reason
}

// ended is the outcome of a frame by the model.
type ended struct {
	reason string
	drop   bool
	marked bool   // ECN was carried inwards
	out    []byte // if it is not dropped
}

// decapModel follows the documents, in another way than the program: it cuts the frame into slices, and
// uses no offsets.
func decapModel(frame []byte) ended {
	passes := func(reason string) ended { return ended{reason: reason, out: frame} }
	kind := binary.BigEndian.Uint16(frame[12:])
	var o outer
	var ok bool
	switch kind {
	case packet.TypeVLAN, packet.TypeQinQ:
		return passes("vlan")
	case packet.TypeIPv4:
		o, ok = outerIPv4(frame[14:])
	case packet.TypeIPv6:
		o, ok = outerIPv6(frame[14:])
	default:
		return passes("not_ip")
	}
	if !ok {
		return passes("malformed")
	}
	taken := "decap_ipip"
	switch {
	case o.protocol == packet.ProtocolUDP:
		if o.later || len(o.carried) < 8 || binary.BigEndian.Uint16(o.carried[2:]) != decapPort {
			return passes("decap_no_tunnel")
		}
		taken = "decap_gue"
		if size := int(binary.BigEndian.Uint16(o.carried[4:])); !o.fragment && (size < 8 || size > len(o.carried)) {
			return passes("decap_gue_unknown")
		} else if !o.fragment {
			o.rest = append(bytes.Clone(o.carried[size:]), o.rest...)
			o.carried = o.carried[8:size]
		}
	case o.protocol != 4 && o.protocol != 41:
		return passes("decap_no_tunnel")
	}
	if o.to != decapOwn4 && o.to != decapOwn6 { // an interface without carrier has no link-local address
		return passes("decap_not_local")
	}
	if o.fragment {
		return passes("decap_fragment")
	}
	if taken == "decap_gue" {
		if len(o.carried) < 4 || o.carried[0]>>5 != 0 || o.carried[2]|o.carried[3] != 0 {
			return passes("decap_gue_unknown")
		}
		size := 4 + int(o.carried[0])*4
		o.protocol = o.carried[1]
		if size > len(o.carried) || o.protocol != 4 && o.protocol != 41 {
			return passes("decap_gue_unknown")
		}
		o.carried = o.carried[size:]
	}
	return innerModel(frame, o, taken)
}

func innerModel(frame []byte, o outer, taken string) ended {
	in := bytes.Clone(o.carried)
	header, kind, size := 20, packet.TypeIPv4, 0
	var from, to netip.Addr
	if o.protocol == 41 {
		header, kind = 40, packet.TypeIPv6
	}
	if len(in) < header || in[0]>>4 != map[int]byte{20: 4, 40: 6}[header] || header == 20 && in[0]&15 < 5 {
		return ended{reason: "decap_unreadable", out: frame}
	}
	var mark func(byte)
	var ecn byte
	if header == 20 {
		from, to = netip.AddrFrom4([4]byte(in[12:16])), netip.AddrFrom4([4]byte(in[16:20]))
		size = int(binary.BigEndian.Uint16(in[2:]))
		header = int(in[0]&15) * 4
		ecn = in[1] & 3
		mark = func(e byte) { // in the way of RFC 1624, because a wrong checksum has to stay wrong
			old := binary.BigEndian.Uint16(in)
			in[1] = in[1]&^3 | e
			sum := uint32(^binary.BigEndian.Uint16(in[10:])) + uint32(^old) + uint32(binary.BigEndian.Uint16(in))
			for sum > 0xffff {
				sum = sum>>16 + sum&0xffff
			}
			binary.BigEndian.PutUint16(in[10:], ^uint16(sum))
		}
	} else {
		from, to = netip.AddrFrom16([16]byte(in[8:24])), netip.AddrFrom16([16]byte(in[24:40]))
		size = 40 + int(binary.BigEndian.Uint16(in[4:]))
		ecn = in[1] >> 4 & 3
		mark = func(e byte) { in[1] = in[1]&^0x30 | e<<4 }
	}
	if to != decapVIP4 && to != decapVIP6 {
		return ended{reason: "decap_not_vip", out: frame}
	}
	combined, dropped := ecnTable[ecn][o.ecn], false
	if combined < 0 {
		dropped = true
	}
	switch {
	case from.Is4In6():
		return ended{reason: "mapped_address", drop: true}
	case !decapFroms[0].Contains(o.from) && !decapFroms[1].Contains(o.from):
		return ended{reason: "decap_sender", drop: true}
	case size < header || size > len(in):
		return ended{reason: "decap_length", drop: true}
	case dropped:
		return ended{reason: "decap_congested", drop: true}
	}
	marked := byte(combined) != ecn
	if marked {
		mark(byte(combined))
	}
	out := binary.BigEndian.AppendUint16(bytes.Clone(frame[:12]), kind)
	out = append(append(out, in...), o.rest...)
	return ended{reason: taken, marked: marked, out: out}
}

// ecnTable is figure 4 of RFC 6040: by the inner field, then the outer one, in the order of
// their numbers: Not-ECT, ECT(1), ECT(0), CE. -1: drop.
var ecnTable = [4][4]int{
	{0, 0, 0, -1},
	{1, 1, 1, 3},
	{2, 1, 2, 3},
	{3, 3, 3, 3},
}

// outer has the fields of an outer header that the model reads.
type outer struct {
	from, to        netip.Addr
	protocol, ecn   byte
	fragment, later bool
	carried, rest   []byte // rest lies behind the packet's end; the stack cuts it off
}

func outerIPv4(b []byte) (o outer, ok bool) {
	if len(b) < 20 || b[0]>>4 != 4 {
		return o, false
	}
	header, size := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	if header < 20 || size < header || size > len(b) {
		return o, false
	}
	field := binary.BigEndian.Uint16(b[6:])
	return outer{from: netip.AddrFrom4([4]byte(b[12:16])), to: netip.AddrFrom4([4]byte(b[16:20])), protocol: b[9], ecn: b[1] & 3,
		fragment: field&0x3fff != 0, later: field&0x1fff != 0, carried: b[header:size], rest: b[size:]}, true
}

func outerIPv6(b []byte) (o outer, ok bool) {
	if len(b) < 40 || b[0]>>4 != 6 {
		return o, false
	}
	size := 40 + int(binary.BigEndian.Uint16(b[4:]))
	if size > len(b) {
		return o, false
	}
	o = outer{from: netip.AddrFrom16([16]byte(b[8:24])), to: netip.AddrFrom16([16]byte(b[24:40])), protocol: b[6],
		ecn: b[1] >> 4 & 3, carried: b[40:size], rest: b[size:]}
	none := byte(59)
	if o.from.Is4In6() || o.to.Is4In6() {
		o.protocol = none
		return o, true
	}
	if o.protocol != packet.ProtocolDestinationOptions && o.protocol != packet.ProtocolFragment {
		return o, true
	}
	if len(o.carried) < 8 {
		return o, false
	}
	if e := o.carried[:8]; o.protocol == packet.ProtocolFragment {
		o.fragment, o.later = true, binary.BigEndian.Uint16(e[2:])&0xfff8 != 0
		o.protocol = e[0]
	} else if e[1] != 0 || e[2] != 4 || e[3] != 1 {
		o.protocol = none
	} else {
		o.protocol = e[0]
	}
	o.carried = o.carried[8:]
	return o, true
}

// shell describes a tunnel's outer headers.
type shell struct {
	six, gue bool
	private  []byte // GUE private data
	change   []packet.Edit
}

func (s shell) String() string {
	name := "IPIP"
	if s.gue {
		name = "GUE"
	}
	if s.six {
		return name + " over IPv6"
	}
	return name + " over IPv4"
}

// wrap puts bytes into a tunnel, as a packet of a family.
func (s shell) wrap(inner []byte, innerSix bool) packet.Packet {
	from, to, protocol := decapFrom4, decapOwn4, uint8(4)
	if s.six {
		from, to = decapFrom6, decapOwn6
	}
	if innerSix {
		protocol = 41
	}
	var p packet.Packet
	if s.gue {
		header := append([]byte{byte(len(s.private) / 4), protocol, 0, 0}, s.private...)
		p = packet.NewUDP(netip.AddrPortFrom(from, 50000), netip.AddrPortFrom(to, decapPort), packet.Data(append(header, inner...)))
		p.UDP.Checksum = packet.Checksum{Mode: packet.Zero}
	} else {
		p = packet.NewUDP(netip.AddrPortFrom(from, 1), netip.AddrPortFrom(to, 1))
		p.UDP, p.Payload = nil, inner
		if s.six {
			p.IPv6.NextHeader = protocol
		} else {
			p.IPv4.Protocol = protocol
		}
	}
	return p.With(append([]packet.Edit{packet.MACs(beMAC, ownC)}, s.change...)...)
}

// carry wraps a packet.
func (s shell) carry(inner packet.Packet) packet.Packet {
	return s.wrap(packet.Quote(inner, 0), inner.IPv6 != nil)
}

// toVIP is a client's packet.
func toVIP(six bool, edits ...packet.Edit) packet.Packet {
	edits = append([]packet.Edit{packet.Data("0123456789")}, edits...)
	if six {
		return packet.NewTCP(netip.AddrPortFrom(client6, 40000), netip.AddrPortFrom(decapVIP6, 80), "S", edits...)
	}
	return packet.NewTCP(netip.AddrPortFrom(client4, 40000), netip.AddrPortFrom(decapVIP4, 80), "S", edits...)
}

func shells() (all []shell) {
	for _, six := range decapFamily {
		all = append(all, shell{six: six}, shell{six: six, gue: true})
	}
	return all
}

// class sets TOS or traffic class.
func class(value uint8) packet.Edit {
	return func(p *packet.Packet) {
		if p.IPv4 != nil {
			p.IPv4.TOS = value
		} else {
			p.IPv6.TrafficClass = value
		}
	}
}

// decapCases are frames and the reason each must be counted for.
func decapCases() map[string]struct {
	frame  []byte
	reason string
} {
	all := map[string]struct {
		frame  []byte
		reason string
	}{}
	add := func(name string, frame []byte, reason string) {
		all[name] = struct {
			frame  []byte
			reason string
		}{frame, reason}
	}
	for _, s := range shells() {
		for _, six := range decapFamily {
			name := fmt.Sprintf("%s, inner IPv%d", s, map[bool]int{false: 4, true: 6}[six])
			taken := "decap_ipip"
			if s.gue {
				taken = "decap_gue"
			}
			whole := s.carry(toVIP(six))
			add(name, packet.Must(whole), taken)
			add(name+", DSCP", packet.Must(s.carry(toVIP(six, class(46<<2))).With(class(10<<2))), taken)
			add(name+", a trailer", append(packet.Must(whole), 1, 2, 3), taken)
			add(name+", an inner fragment", packet.Must(s.carry(toVIP(six, packet.Fragmented(7, 1480, false)))), taken)
			add(name+", a long packet", packet.Must(s.carry(toVIP(six, packet.Data(make([]byte, 8000))))), taken)
			add(name+", another address", packet.Must(s.carry(toVIP(six)).With(func(p *packet.Packet) { readdress(p, addr("10.0.0.21"), addr("2001:db8:2::21")) })), "decap_not_local")
			add(name+", a fragment", packet.Must(s.carry(toVIP(six)).With(packet.Fragmented(9, 0, true))), "decap_fragment")
			if !s.gue {
				add(name+", a later fragment", packet.Must(s.carry(toVIP(six)).With(packet.Fragmented(9, 64, false))), "decap_fragment")
			}
			add(name+", a stranger", packet.Must(s.carry(toVIP(six)).With(func(p *packet.Packet) { resource(p, addr("10.0.1.1"), addr("2001:db8:3::1")) })), "decap_sender")
			add(name+", no VIP", packet.Must(s.carry(toVIP(six).With(func(p *packet.Packet) { readdress(p, addr("192.0.2.11"), addr("2001:db8::11")) }))), "decap_not_vip")
			inner := packet.Quote(toVIP(six), 0)
			add(name+", the other version", packet.Must(s.wrap(inner, !six)), "decap_unreadable")
			add(name+", the inner length is too long", packet.Must(s.wrap(inner[:len(inner)-1], six)), "decap_length")
			add(name+", nothing inside", packet.Must(s.wrap(nil, six)), "decap_unreadable")
			add(name+", congested", packet.Must(s.carry(toVIP(six)).With(class(3))), "decap_congested")
		}
	}
	decapOddities(add)
	return all
}

// decapOddities are cases with one kind of shell each.
func decapOddities(add func(name string, frame []byte, reason string)) {
	ipip, ipip6, gue := shell{}, shell{six: true}, shell{gue: true}
	add("outer IPv4 options", packet.Must(ipip.carry(toVIP(false)).With(packet.IPv4Options(bytes.Repeat([]byte{1}, 40)...))), "decap_ipip")
	add("inner IPv4 options", packet.Must(ipip.carry(toVIP(false, packet.IPv4Options(1, 1, 1, 1)))), "decap_ipip")
	add("encapsulation limit", packet.Must(ipip6.carry(toVIP(true)).With(packet.Extended(decapLimit))), "decap_ipip")
	add("encapsulation limit before GUE", packet.Must(shell{six: true, gue: true}.carry(toVIP(true)).With(packet.Extended(decapLimit))), "decap_gue")
	add("other destination options", packet.Must(ipip6.carry(toVIP(true)).With(packet.Extended(packet.Padding(packet.ProtocolDestinationOptions, 1)))), "decap_no_tunnel")
	add("long destination options", packet.Must(ipip6.carry(toVIP(true)).With(packet.Extended(packet.Extension{Type: packet.ProtocolDestinationOptions, Body: append([]byte{4, 1}, make([]byte, 12)...)}))), "decap_no_tunnel")
	add("hop-by-hop options", packet.Must(ipip6.carry(toVIP(true)).With(packet.Extended(packet.Padding(packet.ProtocolHopByHop, 1)))), "decap_no_tunnel")
	add("private data", packet.Must(shell{gue: true, private: make([]byte, 124)}.carry(toVIP(false))), "decap_gue")
	add("everything at its longest", packet.Must(shell{gue: true, private: make([]byte, 124)}.carry(toVIP(false, packet.IPv4Options(make([]byte, 40)...))).With(packet.IPv4Options(make([]byte, 40)...))), "decap_gue")
	for _, mode := range []packet.ChecksumMode{packet.Correct, packet.Partial} {
		add(fmt.Sprintf("UDP checksum, mode %d", mode), packet.Must(gue.carry(toVIP(false)).With(packet.TransportChecksum(packet.Checksum{Mode: mode}))), "decap_gue")
	}
	add("wrong UDP checksum", packet.Must(gue.carry(toVIP(false)).With(packet.TransportChecksum(packet.ChecksumValue(1)))), "decap_gue")
	for name, at := range map[string]struct {
		index int
		value byte
	}{"version 1": {0, 0x40}, "version 2": {0, 0x80}, "a control message": {0, 0x20}, "a header longer than the packet": {0, 0x1f},
		"flags, first octet": {2, 0x80}, "flags, second octet": {3, 1}, "no IP inside": {1, packet.ProtocolTCP}} {
		p := gue.carry(toVIP(false))
		p.Payload[at.index] = at.value
		add("GUE: "+name, packet.Must(p), "decap_gue_unknown")
	}
	for _, size := range []int{packet.LengthZero, 7, 200} {
		add(fmt.Sprintf("GUE: UDP length %d", size), packet.Must(gue.carry(toVIP(false)).With(func(p *packet.Packet) { p.UDP.Length = size })), "decap_gue_unknown")
	}
	add("GUE: shorter by UDP's length", packet.Must(gue.carry(toVIP(false)).With(func(p *packet.Packet) { p.UDP.Length = 8 + len(p.Payload) - 1 })), "decap_length")
	add("GUE: a later fragment", packet.Must(gue.carry(toVIP(false)).With(packet.Fragmented(9, 64, false))), "decap_no_tunnel")
	add("another port", packet.Must(gue.carry(toVIP(false)).With(func(p *packet.Packet) { p.UDP.DestinationPort++ })), "decap_no_tunnel")
	add("no tunnel", packet.Must(packet.NewTCP(netip.AddrPortFrom(client4, 1), netip.AddrPortFrom(decapOwn4, 80), "S")), "decap_no_tunnel")
	add("mapped outer source", packet.Must(ipip6.carry(toVIP(true)).With(func(p *packet.Packet) { p.IPv6.Source = addr("::ffff:10.0.0.1") })), "decap_no_tunnel")
	add("mapped outer destination", packet.Must(ipip6.carry(toVIP(true)).With(func(p *packet.Packet) { p.IPv6.Destination = addr("::ffff:10.0.0.20") })), "decap_no_tunnel")
	add("mapped inner source", packet.Must(ipip6.carry(toVIP(true, func(p *packet.Packet) { p.IPv6.Source = addr("::ffff:10.0.0.1") }))), "mapped_address")
	add("mapped inner destination", packet.Must(ipip6.carry(toVIP(true, func(p *packet.Packet) { p.IPv6.Destination = addr("::ffff:192.0.2.10") }))), "decap_not_vip")
	add("VLAN", packet.Must(ipip.carry(toVIP(false)).With(packet.Tagged(5))), "vlan")
	add("ARP", packet.Must(packet.NewARPRequest(router, "10.0.0.254", "10.0.0.20")), "not_ip")
	add("outer length too long", packet.Must(ipip.carry(toVIP(false)).With(func(p *packet.Packet) { p.IPv4.Length = 2000 })), "malformed")
	short := packet.Quote(toVIP(false), 0)
	binary.BigEndian.PutUint16(short[2:], 19)
	add("inner length shorter than its header", packet.Must(ipip.wrap(short, false)), "decap_length")
	strange := packet.Quote(toVIP(false), 0)
	strange[0] = 0x55
	add("inner version 5", packet.Must(ipip.wrap(strange, false)), "decap_unreadable")
	for _, six := range decapFamily {
		inner := packet.Quote(toVIP(six), 0)
		add(fmt.Sprintf("the inner header ends behind the tunnel, IPv6 %v", six), append(packet.Must(ipip.wrap(inner[:12], six)), inner[12:]...), "decap_unreadable")
	}
	add("outer length shorter than its header", packet.Must(ipip.carry(toVIP(false)).With(func(p *packet.Packet) { p.IPv4.Length = 19 })), "malformed")
	tiny := packet.Quote(toVIP(false), 0)
	tiny[0] = 0x44
	add("inner header length of 16", packet.Must(ipip.wrap(tiny, false)), "decap_unreadable")
}

func readdress(p *packet.Packet, four, six netip.Addr) {
	if p.IPv4 != nil {
		p.IPv4.Destination = four
	} else {
		p.IPv6.Destination = six
	}
}

func resource(p *packet.Packet, four, six netip.Addr) {
	if p.IPv4 != nil {
		p.IPv4.Source = four
	} else {
		p.IPv6.Source = six
	}
}

// TestDecap has every reason, and every kind of tunnel with every kind of packet inside. The model gives
// only the bytes here, and not the reason.
func TestDecap(t *testing.T) {
	t.Parallel()
	w := newDecapWorld(t)
	seen := map[string]bool{}
	for name, c := range decapCases() {
		t.Run(name, func(t *testing.T) {
			fault, reason := w.judge(c.frame)
			if fault != "" {
				t.Error(fault)
			}
			if reason != c.reason {
				t.Errorf("the model says %s, the test %s", reason, c.reason)
			}
			seen[c.reason] = true
		})
	}
	for _, r := range kernel.Reasons() {
		if name := r.String(); len(name) > 6 && name[:6] == "decap_" && !seen[name] && !decapNotes[name] {
			t.Errorf("no case ends with %s", name)
		}
	}
}

// TestDecapGivesTheClientsPacket compares the decapsulated packet, field by field and without the model,
// with the client's packet.
func TestDecapGivesTheClientsPacket(t *testing.T) {
	t.Parallel()
	w := newDecapWorld(t)
	for _, s := range shells() {
		for _, six := range decapFamily {
			sent := toVIP(six, packet.MACs(beMAC, ownC))
			var verdict uint32
			var out []byte
			var err error
			w.cpu.do(func() { verdict, out, err = w.decap.RunPacket(packet.Must(s.carry(sent))) })
			must(t, err)
			if verdict != kernel.XDPPass {
				t.Fatalf("%s: XDP verdict %d", s, verdict)
			}
			if diff := packet.DiffBytes(sent, out); diff != "" {
				t.Errorf("%s: it came out wrong:\n%s", s, diff)
			}
		}
	}
}

// TestDecapECN has all of RFC 6040, figure 4, in all families. A right header checksum stays right.
func TestDecapECN(t *testing.T) {
	t.Parallel()
	w := newDecapWorld(t)
	for _, s := range shells() {
		for _, six := range decapFamily {
			for inner := range uint8(4) {
				for outer := range uint8(4) {
					name := fmt.Sprintf("%s, inner IPv6 %v, inner %d, outer %d", s, six, inner, outer)
					frame := packet.Must(s.carry(toVIP(six, class(46<<2|inner))).With(class(10<<2 | outer)))
					if fault, _ := w.judge(frame); fault != "" {
						t.Errorf("%s: %s", name, fault)
					}
					if ecnTable[inner][outer] < 0 {
						continue
					}
					var out []byte
					w.cpu.do(func() { _, out, _ = w.decap.RunPacket(frame) })
					want := toVIP(six, class(46<<2|uint8(ecnTable[inner][outer])), packet.MACs(beMAC, ownC))
					if diff := packet.DiffBytes(want, out); diff != "" {
						t.Errorf("%s:\n%s", name, diff)
					}
				}
			}
		}
	}
}

// TestDecapTruncated has every length of every header: frames cut short, and tunnels whose headers claim
// less content.
func TestDecapTruncated(t *testing.T) {
	t.Parallel()
	w := newDecapWorld(t)
	for name, c := range decapCases() {
		if len(c.frame) > 1000 {
			continue
		}
		for size := frameMin; size < len(c.frame); size++ {
			if fault, _ := w.judge(c.frame[:size]); fault != "" {
				t.Fatalf("%s, cut after %d bytes: %s", name, size, fault)
			}
		}
	}
	for _, s := range shells() {
		for _, six := range decapFamily {
			whole := s.carry(toVIP(six))
			for size := range len(whole.Payload) {
				frame := packet.Must(whole.With(packet.Data(whole.Payload[:size])))
				fault, reason := w.judge(frame)
				if fault != "" || reason == "decap_ipip" || reason == "decap_gue" {
					t.Fatalf("%s, %d bytes inside: %s %s", s, size, reason, fault)
				}
			}
		}
	}
}

// FuzzDecap sends packets with all kinds of changes through the loaded program, and compares with the
// model.
func FuzzDecap(f *testing.F) {
	for _, c := range decapCases() {
		f.Add(c.frame)
	}
	w := newDecapWorld(f)
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) < frameMin || len(frame) > 9000 {
			t.Skip("not a frame that the kernel takes")
		}
		mine := *w
		space := *w.world
		space.TB = t
		mine.world = &space
		if fault, _ := mine.judge(frame); fault != "" {
			t.Errorf("%s\n%x", fault, frame)
		}
	})
}
