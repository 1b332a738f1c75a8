package packet

import (
	"fmt"
	"net"
	"net/netip"
)

// Endpoint is an address and port, as a value or as text: "192.0.2.10:80",
// "[2001:db8::10]:80".
type Endpoint interface{ ~string | netip.AddrPort }

// Host is an address, as a value or as text.
type Host interface{ ~string | netip.Addr }

// Edit changes one thing about a packet that a constructor makes. Any function will do:
//
//	packet.TCP4("198.51.100.7:40000", "192.0.2.10:80", "S", packet.TTL(1), func(p *packet.Packet) { p.TCP.Window = 0 })
type Edit func(*Packet)

// MACs of packets whose constructor was given none: locally administered, unicast.
var (
	SourceMAC      = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	DestinationMAC = net.HardwareAddr{2, 0, 0, 0, 0, 2}
)

// NewTCP is a TCP packet of the addresses' family: TTL or hop limit 64, window 64240,
// don't-fragment on IPv4, right checksums. Like all constructors here it panics on text
// that is no address: they are for fixed values.
func NewTCP[A Endpoint](source, destination A, flags string, edits ...Edit) Packet {
	from, to := endpoint(source), endpoint(destination)
	p := between(from.Addr(), to.Addr())
	p.TCP = &TCP{SourcePort: from.Port(), DestinationPort: to.Port(), Flags: flags, Window: 64240}
	return p.With(edits...)
}

// NewUDP is a UDP packet of the addresses' family.
func NewUDP[A Endpoint](source, destination A, edits ...Edit) Packet {
	from, to := endpoint(source), endpoint(destination)
	p := between(from.Addr(), to.Addr())
	p.UDP = &UDP{SourcePort: from.Port(), DestinationPort: to.Port()}
	return p.With(edits...)
}

// NewEcho is an echo request, ICMP or ICMPv6.
func NewEcho[A Host](source, destination A, id, sequence uint16, edits ...Edit) Packet {
	p := between(host(source), host(destination))
	rest := uint32(id)<<16 | uint32(sequence)
	if p.IPv4 != nil {
		p.ICMP = &ICMP{Type: 8, Rest: rest}
	} else {
		p.ICMPv6 = &ICMPv6{Type: 128, Rest: rest}
	}
	return p.With(edits...)
}

// NewError is the ICMP or ICMPv6 error that from sends to the source of about, quoting as much of it as a router does:
// 548 bytes (RFC 1812 section 4.3.2.3), and as many as fit into the least IPv6 MTU of 1280 (RFC 4443 section 2.4).
func NewError[A Host](from A, kind, code uint8, rest uint32, about Packet, edits ...Edit) Packet {
	to := about.Source()
	p := between(host(from), to)
	if p.IPv4 != nil {
		p.ICMP = &ICMP{Type: kind, Code: code, Rest: rest, Quote: Quote(about, 548)}
	} else {
		p.ICMPv6 = &ICMPv6{Type: kind, Code: code, Rest: rest, Quote: Quote(about, 1280-48)}
	}
	return p.With(edits...)
}

// NewARPRequest asks for the owner of an address, from sender's MAC to everybody.
func NewARPRequest[A Host](sender net.HardwareAddr, senderAddress, target A, edits ...Edit) Packet {
	return Packet{
		Ethernet: Ethernet{Source: sender, Destination: broadcast, Type: TypeARP},
		ARP: &ARP{
			Operation: 1, SenderMAC: sender, SenderAddress: host(senderAddress),
			TargetMAC: make(net.HardwareAddr, 6), TargetAddress: host(target),
		},
	}.With(edits...)
}

// NewARPReply tells target that senderAddress is at sender.
func NewARPReply[A Host](sender net.HardwareAddr, senderAddress A, target net.HardwareAddr, targetAddress A, edits ...Edit) Packet {
	return Packet{
		Ethernet: Ethernet{Source: sender, Destination: target, Type: TypeARP},
		ARP: &ARP{
			Operation: 2, SenderMAC: sender, SenderAddress: host(senderAddress),
			TargetMAC: target, TargetAddress: host(targetAddress),
		},
	}.With(edits...)
}

// NewNeighbourSolicitation asks for target's MAC, to its solicited-node group
// (RFC 4861 section 4.3).
func NewNeighbourSolicitation[A Host](sender net.HardwareAddr, source, target A, edits ...Edit) Packet {
	address := host(target).As16()
	group := netip.AddrFrom16([16]byte{0xff, 2, 11: 1, 12: 0xff, 13: address[13], 14: address[14], 15: address[15]})
	p := between(host(source), group)
	p.IPv6.HopLimit = 255
	p.Ethernet.Source = sender
	p.Ethernet.Destination = net.HardwareAddr{0x33, 0x33, 0xff, address[13], address[14], address[15]}
	p.ICMPv6 = &ICMPv6{Type: TypeNeighbourSolicitation, Neighbour: &Neighbour{Target: host(target), LinkAddress: sender}}
	return p.With(edits...)
}

// NewNeighbourAdvertisement answers a solicitation: target is at sender
// (solicited and override set, RFC 4861 section 4.4).
func NewNeighbourAdvertisement[A Host](sender net.HardwareAddr, target A, to net.HardwareAddr, destination A, edits ...Edit) Packet {
	p := between(host(target), host(destination))
	p.IPv6.HopLimit = 255
	p.Ethernet.Source, p.Ethernet.Destination = sender, to
	p.ICMPv6 = &ICMPv6{Type: TypeNeighbourAdvertisement, Neighbour: &Neighbour{
		Target: host(target), LinkAddress: sender, Solicited: true, Override: true,
	}}
	return p.With(edits...)
}

// TCP4 is NewTCP that panics unless the addresses are IPv4.
func TCP4[A Endpoint](source, destination A, flags string, edits ...Edit) Packet {
	return NewTCP(source, destination, flags, edits...).only4()
}

// TCP6 is NewTCP that panics unless the addresses are IPv6.
func TCP6[A Endpoint](source, destination A, flags string, edits ...Edit) Packet {
	return NewTCP(source, destination, flags, edits...).only6()
}

// UDP4 is NewUDP that panics unless the addresses are IPv4.
func UDP4[A Endpoint](source, destination A, edits ...Edit) Packet {
	return NewUDP(source, destination, edits...).only4()
}

// UDP6 is NewUDP that panics unless the addresses are IPv6.
func UDP6[A Endpoint](source, destination A, edits ...Edit) Packet {
	return NewUDP(source, destination, edits...).only6()
}

func (p Packet) only4() Packet {
	if p.IPv4 == nil {
		panic(fmt.Sprintf("packet: %s is not IPv4", p))
	}
	return p
}

func (p Packet) only6() Packet {
	if p.IPv6 == nil {
		panic(fmt.Sprintf("packet: %s is not IPv6", p))
	}
	return p
}

var broadcast = net.HardwareAddr{255, 255, 255, 255, 255, 255}

func endpoint[A Endpoint](a A) netip.AddrPort {
	if ap, ok := any(a).(netip.AddrPort); ok {
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return netip.MustParseAddrPort(fmt.Sprint(a))
}

func host[A Host](a A) netip.Addr {
	if addr, ok := any(a).(netip.Addr); ok {
		return addr.Unmap()
	}
	return netip.MustParseAddr(fmt.Sprint(a))
}

// between is the frame and IP header from source to destination.
func between(source, destination netip.Addr) Packet {
	if source.Is4() != destination.Is4() {
		panic(fmt.Sprintf("packet: %s and %s are of different families", source, destination))
	}
	p := Packet{Ethernet: Ethernet{Source: SourceMAC, Destination: DestinationMAC}}
	if source.Is4() {
		p.Ethernet.Type = TypeIPv4
		p.IPv4 = &IPv4{Source: source, Destination: destination, TTL: 64, DF: true}
	} else {
		p.Ethernet.Type = TypeIPv6
		p.IPv6 = &IPv6{Source: source, Destination: destination, HopLimit: 64}
	}
	return p
}

// With is a deep copy of p with the edits applied, derived fields filled in, as Parse returns it for its bytes.
func (p Packet) With(edits ...Edit) Packet {
	p = p.copied()
	for _, edit := range edits {
		edit(&p)
	}
	return p.normal()
}

// copied is p with its own headers, so that an edit does not reach the original. Byte
// slices are shared: edits replace them, they do not write into them.
func (p Packet) copied() Packet {
	p.VLANs = append([]VLAN(nil), p.VLANs...)
	p.ARP, p.IPv4, p.IPv6 = own(p.ARP), own(p.IPv4), own(p.IPv6)
	p.TCP, p.UDP, p.ICMP, p.ICMPv6 = own(p.TCP), own(p.UDP), own(p.ICMP), own(p.ICMPv6)
	if p.IPv6 != nil {
		p.IPv6.Extensions = append([]Extension(nil), p.IPv6.Extensions...)
	}
	if p.ICMPv6 != nil {
		p.ICMPv6.Neighbour = own(p.ICMPv6.Neighbour)
	}
	return p
}

func own[T any](p *T) *T {
	if p == nil {
		return nil
	}
	c := *p
	return &c
}

// Source is the IP source address, the zero Addr where there is none.
func (p Packet) Source() netip.Addr {
	switch {
	case p.IPv4 != nil:
		return p.IPv4.Source
	case p.IPv6 != nil:
		return p.IPv6.Source
	}
	return netip.Addr{}
}

// Destination is the IP destination address, the zero Addr where there is none.
func (p Packet) Destination() netip.Addr {
	switch {
	case p.IPv4 != nil:
		return p.IPv4.Destination
	case p.IPv6 != nil:
		return p.IPv6.Destination
	}
	return netip.Addr{}
}

// Reverse swaps MACs, addresses and ports: the way back. Nothing else changes.
func (p Packet) Reverse() Packet {
	return p.With(func(p *Packet) {
		p.Ethernet.Source, p.Ethernet.Destination = p.Ethernet.Destination, p.Ethernet.Source
		if ip := p.IPv4; ip != nil {
			ip.Source, ip.Destination = ip.Destination, ip.Source
		}
		if ip := p.IPv6; ip != nil {
			ip.Source, ip.Destination = ip.Destination, ip.Source
		}
		if t := p.TCP; t != nil {
			t.SourcePort, t.DestinationPort = t.DestinationPort, t.SourcePort
		}
		if u := p.UDP; u != nil {
			u.SourcePort, u.DestinationPort = u.DestinationPort, u.SourcePort
		}
	})
}

// Quote is the first limit bytes of p's IP packet; limit 0 is all of them. It panics
// where p does not build.
func Quote(p Packet, limit int) []byte {
	b, err := BuildIP(p)
	if err != nil {
		panic(err)
	}
	if limit > 0 && len(b) > limit {
		b = b[:limit]
	}
	return b
}

// MACs sets the link addresses.
func MACs(source, destination net.HardwareAddr) Edit {
	return func(p *Packet) { p.Ethernet.Source, p.Ethernet.Destination = source, destination }
}

// Tagged puts an 802.1Q tag inside the present ones.
func Tagged(id uint16) Edit {
	return func(p *Packet) { p.VLANs = append(p.VLANs, VLAN{ID: id}) }
}

// TTL sets the TTL or the hop limit.
func TTL(ttl uint8) Edit {
	return func(p *Packet) {
		if p.IPv4 != nil {
			p.IPv4.TTL = ttl
		}
		if p.IPv6 != nil {
			p.IPv6.HopLimit = ttl
		}
	}
}

// Data sets the payload.
func Data[B ~string | ~[]byte](payload B) Edit {
	return func(p *Packet) { p.Payload = []byte(payload) }
}

// Sequence sets TCP's sequence and acknowledgement numbers.
func Sequence(seq, ack uint32) Edit {
	return func(p *Packet) { p.TCP.Seq, p.TCP.Ack = seq, ack }
}

// TransportChecksum sets the checksum of TCP, UDP, ICMP or ICMPv6.
func TransportChecksum(c Checksum) Edit {
	return func(p *Packet) {
		switch {
		case p.TCP != nil:
			p.TCP.Checksum = c
		case p.UDP != nil:
			p.UDP.Checksum = c
		case p.ICMP != nil:
			p.ICMP.Checksum = c
		case p.ICMPv6 != nil:
			p.ICMPv6.Checksum = c
		}
	}
}

// IPv4Options sets the options: a multiple of 4 bytes.
func IPv4Options(options ...byte) Edit {
	return func(p *Packet) { p.IPv4.Options = options }
}

// TCPOptions sets the options: a multiple of 4 bytes. MSS(1460) is one.
func TCPOptions(options ...byte) Edit {
	return func(p *Packet) { p.TCP.Options = options }
}

// MSS is the TCP option of that name (RFC 9293 section 3.7.1).
func MSS(bytes uint16) []byte { return []byte{2, 4, byte(bytes >> 8), byte(bytes)} }

// Extended appends IPv6 extension headers.
func Extended(extensions ...Extension) Edit {
	return func(p *Packet) { p.IPv6.Extensions = append(p.IPv6.Extensions, extensions...) }
}

// Padding is an extension header of the given type and of 8*units bytes that holds only
// PadN (RFC 8200 section 4.2).
func Padding(kind uint8, units int) Extension {
	body := make([]byte, 8*units-2)
	for at := 0; at < len(body); { // one PadN option spans at most 257 bytes
		n := min(len(body)-at, 257)
		if n == 1 { // Pad1
			at++
			continue
		}
		body[at], body[at+1] = 1, byte(n-2)
		at += n
	}
	return Extension{Type: kind, Body: body}
}

// Fragmented makes p the fragment at offset (bytes, a multiple of 8) of packet id: the IPv4 fields, or a fragment
// header as the last extension. At an offset other than 0, the bytes of the transport header are payload.
func Fragmented(id uint32, offset uint16, more bool) Edit {
	return func(p *Packet) {
		if offset != 0 {
			number, _ := p.normal().upperProtocol()
			upper, err := p.buildUpper(p.Source(), p.Destination())
			if err != nil {
				panic(err)
			}
			*p = p.normal()
			p.Payload = upper
			p.TCP, p.UDP, p.ICMP, p.ICMPv6 = nil, nil, nil, nil
			if p.IPv6 != nil && number != 0 {
				p.IPv6.NextHeader = number
			}
		}
		if ip := p.IPv4; ip != nil {
			ip.ID, ip.FragmentOffset, ip.MF, ip.DF = uint16(id), offset, more, false
			return
		}
		field := offset &^ 7
		if more {
			field |= 1
		}
		p.IPv6.Extensions = append(p.IPv6.Extensions, Extension{Type: ProtocolFragment, Body: []byte{
			byte(field >> 8), byte(field), byte(id >> 24), byte(id >> 16), byte(id >> 8), byte(id),
		}})
	}
}
