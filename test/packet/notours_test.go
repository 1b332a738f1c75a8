package packet_test

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
)

// TestNotOurs sends packets that must pass unchanged.
func TestNotOurs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other4, other6 := addr("192.0.2.77"), addr("2001:db8:1::77")
	for _, k := range kinds {
		syn := k.fromClient(40000, portNAT, "S", packet.Data("data"))
		to := func(destination netip.Addr) packet.Edit {
			return between(sourceOf(syn), netip.AddrPortFrom(destination, portNAT))
		}
		name := func(what string) string { return fmt.Sprintf("%s/%s", k, what) }
		table(t, w, []trial{
			{name: name("another address"), in: syn.With(to(k.pick(other4, other6))), reason: "not_ours"},
			{name: name("another station"), in: syn.With(packet.MACs(router, foreign)), reason: "other_mac"},
			{name: name("broadcast frame"), in: syn.With(packet.MACs(router, net.HardwareAddr{255, 255, 255, 255, 255, 255})), reason: "multicast"},
			{name: name("multicast frame"), in: syn.With(packet.MACs(router, mac("01:00:5e:00:00:05"))), reason: "multicast"},
			{name: name("VLAN tag"), in: syn.With(packet.Tagged(7)), reason: "vlan"},
			{name: name("two VLAN tags"), in: syn.With(packet.Tagged(7), packet.Tagged(8)), reason: "vlan"},
			{name: name("to a source address, no flow"), in: syn.With(to(k.pick(sources[0], sources[2]))), reason: "not_ours"},
			{name: name("port of no service"), in: k.fromClient(40000, portNothing, "S"), reason: "no_service"},
			{name: name("TTL 1, not ours"), in: syn.With(to(k.pick(other4, other6)), packet.TTL(1)), reason: "not_ours"},
		})
	}
	frame := func(kind uint16, payload ...byte) packet.Packet {
		return packet.Packet{Ethernet: packet.Ethernet{Source: router, Destination: ownA, Type: kind}, Payload: payload}
	}
	ip4 := packet.UDP4("198.51.100.7:1", "192.0.2.10:80", packet.MACs(router, ownA))
	ip6 := packet.UDP6("[2001:db8:9::7]:1", "[2001:db8:1::10]:80", packet.MACs(router, ownA))
	protocol := func(p packet.Packet, n uint8) packet.Packet {
		p.UDP, p.Payload = nil, make([]byte, 40)
		return p.With(func(p *packet.Packet) {
			if p.IPv4 != nil {
				p.IPv4.Protocol = n
			} else {
				p.IPv6.NextHeader = n
			}
		})
	}
	table(t, w, []trial{
		{name: "LLDP", in: frame(0x88cc, 1, 2, 3), reason: "not_ip"},
		{name: "nothing but a header", in: frame(0x88cc), reason: "not_ip"},
		{name: "802.3 length", in: frame(100, 1, 2, 3), reason: "not_ip"},
		{name: "SCTP over IPv4", in: protocol(ip4, 132), reason: "protocol"},
		{name: "IPv4 with the number of a routing header", in: protocol(ip4, 43), reason: "protocol"},
		{name: "IPv4 with the number of a fragment header", in: protocol(ip4, 44), reason: "protocol"},
		{name: "IPv4 with the number of no header", in: protocol(ip4, 59), reason: "protocol"},
		{name: "IPv4 with the raw number", in: protocol(ip4, 255), reason: "protocol"},
		{name: "IPv6 with the raw number", in: protocol(ip6, 255), reason: "protocol"},
		{name: "SCTP over IPv6", in: protocol(ip6, 132), reason: "protocol"},
		{name: "ICMPv6 over IPv4", in: protocol(ip4, 58), reason: "protocol"},
		{name: "ICMP over IPv6", in: protocol(ip6, 1), reason: "protocol"},
		{name: "ESP over IPv6", in: protocol(ip6, 50), reason: "protocol"},
		{name: "no next header", in: protocol(ip6, 59), reason: "protocol"},
	})
}

// TestMappedAddresses: on the wire they could be taken for an IPv4 flow's.
func TestMappedAddresses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	in := packet.TCP6("[2001:db8:9::7]:40000", "[2001:db8:1::10]:80", "S", packet.MACs(router, ownA))
	edit := func(offset int, a netip.Addr) []byte {
		frame, as16 := packet.Must(in), a.As16()
		copy(frame[offset:], as16[:])
		return frame
	}
	mapped := netip.AddrFrom16(vip4.As16())
	table(t, w, []trial{
		{name: "destination", raw: edit(14+24, mapped), end: drops, reason: "mapped_address"},
		{name: "source", raw: edit(14+8, mapped), end: drops, reason: "mapped_address"},
	})
}

// TestIPv4Options: valid options pass through, contradictory ones do not.
func TestIPv4Options(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, udp := range []bool{false, true} {
		k := kind{udp: udp}
		for n := 4; n <= 40; n += 4 {
			in := k.fromClient(uint16(40000+n), portNAT, "S", packet.IPv4Options(bytes.Repeat([]byte{1}, n)...), packet.Data("data"))
			t.Run(fmt.Sprintf("%s/%d bytes", k, n), func(t *testing.T) {
				trial{in: in, end: leaves, want: ways[0].expected(w, k, in)}.try(t, w)
			})
		}
	}
}

// TestExtensionHeaders: each kind passes through, up to 8 headers.
func TestExtensionHeaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	routing := packet.Extension{Type: packet.ProtocolRouting, Body: []byte{0, 0, 0, 0, 0, 0}}
	left := packet.Extension{Type: packet.ProtocolRouting, Body: append([]byte{4, 1, 0, 0, 0, 0}, make([]byte, 16)...)}
	ah := packet.Extension{Type: packet.ProtocolAH, Body: make([]byte, 22)}
	hop, dst := packet.Padding(packet.ProtocolHopByHop, 1), packet.Padding(packet.ProtocolDestinationOptions, 2)
	many := func(n int) (list []packet.Extension) {
		for range n {
			list = append(list, packet.Padding(packet.ProtocolDestinationOptions, 1))
		}
		return list
	}
	for i, c := range []struct {
		name   string
		chain  []packet.Extension
		end    outcome
		reason string
	}{
		{"hop-by-hop", []packet.Extension{hop}, leaves, ""},
		{"destination options", []packet.Extension{dst}, leaves, ""},
		{"routing, none left", []packet.Extension{routing}, leaves, ""},
		{"AH", []packet.Extension{ah}, leaves, ""},
		{"one of each", []packet.Extension{hop, dst, routing, ah, dst}, leaves, ""},
		{"8", many(8), leaves, ""},
		{"9", many(9), drops, "extension_limit"},
		{"20", many(20), drops, "extension_limit"},
		{"routing, one left", []packet.Extension{left}, passes, "source_routed"},
		{"routing, one left, behind others", []packet.Extension{hop, dst, left}, passes, "source_routed"},
		{"too deep", []packet.Extension{packet.Padding(packet.ProtocolDestinationOptions, 256)}, drops, "extension_limit"},
		{"deep", []packet.Extension{packet.Padding(packet.ProtocolDestinationOptions, 16)}, leaves, ""},
	} {
		for _, udp := range []bool{false, true} {
			k := kind{udp: udp, six: true}
			in := k.fromClient(uint16(40000+i), portNAT, "S", packet.Extended(c.chain...), packet.Data("data"))
			t.Run(fmt.Sprintf("%s/%s", k, c.name), func(t *testing.T) {
				trial{in: in, end: c.end, reason: c.reason, want: ways[0].expected(w, k, in)}.try(t, w)
			})
		}
	}
}
