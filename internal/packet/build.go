package packet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// Build is the frame's bytes. It fails where p contradicts itself or a field cannot hold
// its value; packets that lie are made with the Length and Checksum fields, or by editing
// the bytes.
func Build(p Packet) ([]byte, error) {
	p = p.normal()
	if len(p.Ethernet.Source) != 6 || len(p.Ethernet.Destination) != 6 {
		return nil, fmt.Errorf("build packet: ethernet addresses %q and %q: each must have 6 bytes",
			p.Ethernet.Source, p.Ethernet.Destination)
	}
	if err := p.checkLayers(); err != nil {
		return nil, fmt.Errorf("build packet: %w", err)
	}
	b := append([]byte(nil), p.Ethernet.Destination...)
	b = append(b, p.Ethernet.Source...)
	for _, tag := range p.VLANs {
		if tag.Type != TypeVLAN && tag.Type != TypeQinQ {
			return nil, fmt.Errorf("build packet: vlan type 0x%04x: must be 0x8100 or 0x88a8", tag.Type)
		}
		if tag.ID > 4095 || tag.Priority > 7 {
			return nil, fmt.Errorf("build packet: vlan id %d priority %d: must be at most 4095 and 7", tag.ID, tag.Priority)
		}
		control := uint16(tag.Priority)<<13 | tag.ID
		if tag.DropEligible {
			control |= 1 << 12
		}
		b = binary.BigEndian.AppendUint16(b, tag.Type)
		b = binary.BigEndian.AppendUint16(b, control)
	}
	b = binary.BigEndian.AppendUint16(b, p.Ethernet.Type)
	rest, err := p.network()
	if err != nil {
		return nil, fmt.Errorf("build packet: %w", err)
	}
	return append(b, rest...), nil
}

// BuildIP is Build without the Ethernet header and tags: the part that an ICMP error quotes and a
// tunnel carries.
func BuildIP(p Packet) ([]byte, error) {
	p = p.normal()
	if p.IPv4 == nil && p.IPv6 == nil {
		return nil, errors.New("build ip packet: neither IPv4 nor IPv6 is set")
	}
	if err := p.checkLayers(); err != nil {
		return nil, fmt.Errorf("build ip packet: %w", err)
	}
	b, err := p.network()
	if err != nil {
		return nil, fmt.Errorf("build ip packet: %w", err)
	}
	return b, nil
}

// Must is Build for tests and fixed packets: it panics where Build fails.
func Must(p Packet) []byte {
	b, err := Build(p)
	if err != nil {
		panic(err)
	}
	return b
}

// checkLayers refuses combinations that no frame can have. p is normal.
func (p Packet) checkLayers() error {
	networks := count(p.ARP != nil, p.IPv4 != nil, p.IPv6 != nil)
	uppers := count(p.TCP != nil, p.UDP != nil, p.ICMP != nil, p.ICMPv6 != nil)
	number, _ := p.upperProtocol()
	switch {
	case networks > 1:
		return errors.New("more than one of ARP, IPv4 and IPv6 is set")
	case uppers > 1:
		return errors.New("more than one of TCP, UDP, ICMP and ICMPv6 is set")
	case uppers == 1 && p.IPv4 == nil && p.IPv6 == nil:
		return errors.New("a transport header without IPv4 or IPv6")
	case p.ICMP != nil && p.IPv6 != nil, p.ICMPv6 != nil && p.IPv4 != nil:
		return errors.New("ICMP goes with IPv4, ICMPv6 with IPv6")
	case uppers == 1 && p.IPv4 != nil && p.IPv4.Protocol != number:
		return fmt.Errorf("ipv4 protocol is %d but the header that follows is %d", p.IPv4.Protocol, number)
	case uppers == 1 && p.IPv6 != nil && p.IPv6.NextHeader != number:
		return fmt.Errorf("ipv6 next header is %d but the header that follows is %d", p.IPv6.NextHeader, number)
	case p.ARP != nil && p.Ethernet.Type != TypeARP, p.IPv4 != nil && p.Ethernet.Type != TypeIPv4,
		p.IPv6 != nil && p.Ethernet.Type != TypeIPv6:
		return fmt.Errorf("ethernet type 0x%04x is not that of the header that follows", p.Ethernet.Type)
	case p.ARP != nil && len(p.Payload) > 0:
		return errors.New("ARP with a payload: padding belongs in Trailer")
	case networks == 0 && len(p.Trailer) > 0:
		return errors.New("a trailer without ARP, IPv4 or IPv6 cannot be told from the payload")
	}
	return nil
}

func count(set ...bool) int {
	n := 0
	for _, s := range set {
		if s {
			n++
		}
	}
	return n
}

// network is everything after the EtherType.
func (p Packet) network() ([]byte, error) {
	var b []byte
	var err error
	switch {
	case p.ARP != nil:
		b, err = p.ARP.build()
	case p.IPv4 != nil:
		b, err = p.buildIPv4()
	case p.IPv6 != nil:
		b, err = p.buildIPv6()
	default:
		b = append(b, p.Payload...)
	}
	return append(b, p.Trailer...), err
}

func (a ARP) build() ([]byte, error) {
	if len(a.SenderMAC) != 6 || len(a.TargetMAC) != 6 || !a.SenderAddress.Is4() || !a.TargetAddress.Is4() {
		return nil, errors.New("arp: needs two MACs of 6 bytes and two IPv4 addresses")
	}
	b := []byte{0, 1, 8, 0, 6, 4}
	b = binary.BigEndian.AppendUint16(b, a.Operation)
	b = append(append(b, a.SenderMAC...), a.SenderAddress.AsSlice()...)
	return append(append(b, a.TargetMAC...), a.TargetAddress.AsSlice()...), nil
}

// lengthField is the value of a length field that a caller may have set by hand.
func lengthField(layer string, set, right int) (uint16, error) {
	switch {
	case set == LengthZero:
		return 0, nil
	case set != 0:
		right = set
	}
	if right < 0 || right > 0xffff {
		return 0, fmt.Errorf("%s: a length of %d bytes does not fit its 16-bit field", layer, right)
	}
	return uint16(right), nil
}

func (p Packet) buildIPv4() ([]byte, error) {
	ip := p.IPv4
	switch {
	case !ip.Source.Is4() || !ip.Destination.Is4():
		return nil, fmt.Errorf("ipv4: addresses %s and %s: both must be IPv4", ip.Source, ip.Destination)
	case len(ip.Options) > 40 || len(ip.Options)%4 != 0:
		return nil, fmt.Errorf("ipv4: %d bytes of options: must be a multiple of 4, at most 40", len(ip.Options))
	case ip.FragmentOffset%8 != 0:
		return nil, fmt.Errorf("ipv4: fragment offset %d: must be a multiple of 8", ip.FragmentOffset)
	case ip.Checksum.Mode == Partial:
		return nil, errors.New("ipv4: a header checksum has no partial form")
	}
	upper, err := p.buildUpper(ip.Source, ip.Destination)
	if err != nil {
		return nil, err
	}
	size := 20 + len(ip.Options)
	length, err := lengthField("ipv4", ip.Length, size+len(upper))
	if err != nil {
		return nil, err
	}
	b := make([]byte, size, size+len(upper))
	b[0], b[1], b[8], b[9] = 0x40|byte(size/4), ip.TOS, ip.TTL, ip.Protocol
	binary.BigEndian.PutUint16(b[2:], length)
	binary.BigEndian.PutUint16(b[4:], ip.ID)
	fragment := ip.FragmentOffset / 8
	for i, set := range []bool{ip.MF, ip.DF, ip.ReservedFlag} {
		if set {
			fragment |= 1 << (13 + i)
		}
	}
	binary.BigEndian.PutUint16(b[6:], fragment)
	copy(b[12:], ip.Source.AsSlice())
	copy(b[16:], ip.Destination.AsSlice())
	copy(b[20:], ip.Options)
	right, _ := checksums(b, 10, 0)
	binary.BigEndian.PutUint16(b[10:], ip.Checksum.field(right, 0))
	return append(b, upper...), nil
}

func (p Packet) buildIPv6() ([]byte, error) {
	ip := p.IPv6
	switch {
	case !ip.Source.Is6() || !ip.Destination.Is6():
		return nil, fmt.Errorf("ipv6: addresses %s and %s: both must be IPv6", ip.Source, ip.Destination)
	case ip.Source.Zone() != "" || ip.Destination.Zone() != "":
		return nil, fmt.Errorf("ipv6: addresses %s and %s: zones do not go on the wire", ip.Source, ip.Destination)
	case ip.FlowLabel >= 1<<20:
		return nil, fmt.Errorf("ipv6: flow label 0x%x: has 20 bits", ip.FlowLabel)
	}
	upper, err := p.buildUpper(ip.Source, ip.Destination)
	if err != nil {
		return nil, err
	}
	next, body, err := chain(ip.Extensions, ip.NextHeader)
	if err != nil {
		return nil, err
	}
	body = append(body, upper...)
	length, err := lengthField("ipv6", ip.Length, len(body))
	if err != nil {
		return nil, err
	}
	b := binary.BigEndian.AppendUint32(nil, 6<<28|uint32(ip.TrafficClass)<<20|ip.FlowLabel)
	b = binary.BigEndian.AppendUint16(b, length)
	b = append(b, next, ip.HopLimit)
	b = append(append(b, ip.Source.AsSlice()...), ip.Destination.AsSlice()...)
	return append(b, body...), nil
}

// chain writes the extension headers; last is the number of the header behind them.
func chain(extensions []Extension, last uint8) (first uint8, b []byte, err error) {
	first = last
	if len(extensions) > 0 {
		first = extensions[0].Type
	}
	for i, e := range extensions {
		next := last
		if i+1 < len(extensions) {
			next = extensions[i+1].Type
		}
		size := 2 + len(e.Body)
		second := e.Reserved
		switch {
		case e.Type == ProtocolFragment:
			if size != 8 {
				return 0, nil, fmt.Errorf("ipv6: fragment header: body of %d bytes: must be 6", len(e.Body))
			}
		case e.Reserved != 0:
			return 0, nil, fmt.Errorf("ipv6: extension %d: only a fragment header has a reserved octet", e.Type)
		case e.Type == ProtocolAH:
			if size%4 != 0 || size < 8 || size/4-2 > 255 {
				return 0, nil, fmt.Errorf("ipv6: AH: body of %d bytes: must be 2 more than a multiple of 4, 6 to 1026", len(e.Body))
			}
			second = uint8(size/4 - 2)
		default:
			if !isExtension(e.Type) {
				return 0, nil, fmt.Errorf("ipv6: %d is not the number of an extension header", e.Type)
			}
			if size%8 != 0 || size/8-1 > 255 {
				return 0, nil, fmt.Errorf("ipv6: extension %d: body of %d bytes: must be 6 more than a multiple of 8, at most 2046", e.Type, len(e.Body))
			}
			second = uint8(size/8 - 1)
		}
		b = append(append(b, next, second), e.Body...)
	}
	return first, b, nil
}

// isExtension knows the numbers of IANA's "IPv6 Extension Header Types" that have the common
// next-header and length octets (ESP hides the headers behind it).
func isExtension(number uint8) bool {
	switch number {
	case ProtocolHopByHop, ProtocolRouting, ProtocolFragment, ProtocolAH, ProtocolDestinationOptions,
		135, 139, 140: // mobility, HIP, shim6
		return true
	}
	return false
}

// buildUpper is everything after the IP headers.
func (p Packet) buildUpper(source, destination netip.Addr) ([]byte, error) {
	switch {
	case p.TCP != nil:
		return p.TCP.build(p.Payload, source, destination)
	case p.UDP != nil:
		return p.UDP.build(p.Payload, source, destination)
	case p.ICMP != nil:
		return p.ICMP.build(p.Payload)
	case p.ICMPv6 != nil:
		return p.ICMPv6.build(p.Payload, source, destination)
	}
	return append([]byte(nil), p.Payload...), nil
}

// flagLetters has one letter per TCP flag, lowest bit first.
const flagLetters = "FSRPAUECN"

func (t TCP) build(payload []byte, source, destination netip.Addr) ([]byte, error) {
	b := binary.BigEndian.AppendUint16(nil, t.SourcePort)
	b = binary.BigEndian.AppendUint16(b, t.DestinationPort)
	b = binary.BigEndian.AppendUint32(b, t.Seq)
	if t.Cut {
		return append(b, payload...), nil
	}
	if len(t.Options) > 40 || len(t.Options)%4 != 0 {
		return nil, fmt.Errorf("tcp: %d bytes of options: must be a multiple of 4, at most 40", len(t.Options))
	}
	if t.Reserved > 7 {
		return nil, fmt.Errorf("tcp: reserved bits %d: there are 3 of them", t.Reserved)
	}
	bits := uint16(20+len(t.Options))/4<<12 | uint16(t.Reserved)<<9
	for _, letter := range t.Flags {
		i := strings.IndexRune(flagLetters, letter)
		if i < 0 {
			return nil, fmt.Errorf("tcp: flags %q: %q is not one of %s", t.Flags, letter, flagLetters)
		}
		bits |= 1 << i
	}
	b = binary.BigEndian.AppendUint32(b, t.Ack)
	b = binary.BigEndian.AppendUint16(b, bits)
	b = binary.BigEndian.AppendUint16(b, t.Window)
	b = append(b, 0, 0)
	b = binary.BigEndian.AppendUint16(b, t.Urgent)
	b = append(append(b, t.Options...), payload...)
	right, partial := checksums(b, 16, pseudo(source, destination, ProtocolTCP, len(b)))
	binary.BigEndian.PutUint16(b[16:], t.Checksum.field(right, partial))
	return b, nil
}

func (u UDP) build(payload []byte, source, destination netip.Addr) ([]byte, error) {
	length, err := lengthField("udp", u.Length, 8+len(payload))
	if err != nil {
		return nil, err
	}
	b := binary.BigEndian.AppendUint16(nil, u.SourcePort)
	b = binary.BigEndian.AppendUint16(b, u.DestinationPort)
	b = binary.BigEndian.AppendUint16(b, length)
	b = append(append(b, 0, 0), payload...)
	right, partial := udpChecksums(b, source, destination)
	binary.BigEndian.PutUint16(b[6:], u.Checksum.field(right, partial))
	return b, nil
}

// udpChecksums covers as many bytes as the length field says, as receivers do, or everything where
// the field cannot be true.
func udpChecksums(b []byte, source, destination netip.Addr) (right, partial uint16) {
	if length := int(binary.BigEndian.Uint16(b[4:])); length >= 8 && length < len(b) {
		b = b[:length]
	}
	right, partial = checksums(b, 6, pseudo(source, destination, ProtocolUDP, len(b)))
	if right == 0 {
		right = 0xffff
	}
	return right, partial
}

func (c ICMP) build(payload []byte) ([]byte, error) {
	if c.Checksum.Mode == Partial {
		return nil, errors.New("icmp: its checksum has no pseudo-header and so no partial form")
	}
	if len(c.Quote) > 0 && !isICMPError(c.Type) {
		return nil, fmt.Errorf("icmp: type %d does not quote: use Payload", c.Type)
	}
	b := binary.BigEndian.AppendUint32([]byte{c.Type, c.Code, 0, 0}, c.Rest)
	b = append(append(b, c.Quote...), payload...)
	right, _ := checksums(b, 2, 0)
	binary.BigEndian.PutUint16(b[2:], c.Checksum.field(right, 0))
	return b, nil
}

// isICMPError knows the types of RFC 792 that quote a packet.
func isICMPError(kind uint8) bool {
	return kind == 3 || kind == 4 || kind == 5 || kind == 11 || kind == 12
}

// Types of ICMPv6 that have a Neighbour (RFC 4861).
const (
	TypeNeighbourSolicitation  uint8 = 135
	TypeNeighbourAdvertisement uint8 = 136
)

func (c ICMPv6) build(payload []byte, source, destination netip.Addr) ([]byte, error) {
	rest := c.Rest
	var body []byte
	if n := c.Neighbour; n != nil {
		if c.Type != TypeNeighbourSolicitation && c.Type != TypeNeighbourAdvertisement {
			return nil, fmt.Errorf("icmpv6: type %d has no neighbour: 135 and 136 have", c.Type)
		}
		if c.Rest>>29 != 0 || len(payload) > 0 {
			return nil, errors.New("icmpv6: neighbour: flags go in Neighbour, other options in its Options")
		}
		if !n.Target.Is6() {
			return nil, fmt.Errorf("icmpv6: neighbour target %s: must be IPv6", n.Target)
		}
		for i, set := range []bool{n.Override, n.Solicited, n.Router} {
			if set {
				rest |= 1 << (29 + i)
			}
		}
		body = append(body, n.Target.AsSlice()...)
		body = append(body, linkOption(c.Type, n.LinkAddress)...)
		body = append(body, n.Options...)
	} else if len(c.Quote) > 0 && c.Type >= 128 {
		return nil, fmt.Errorf("icmpv6: type %d does not quote: use Payload", c.Type)
	}
	b := binary.BigEndian.AppendUint32([]byte{c.Type, c.Code, 0, 0}, rest)
	b = append(append(append(b, body...), c.Quote...), payload...)
	right, partial := checksums(b, 2, pseudo(source, destination, ProtocolICMPv6, len(b)))
	binary.BigEndian.PutUint16(b[2:], c.Checksum.field(right, partial))
	return b, nil
}

// linkOption is the source link-layer address option of a solicitation and the target
// one of an advertisement (RFC 4861 section 4.6.1); nothing for an empty address.
func linkOption(kind uint8, address net.HardwareAddr) []byte {
	if len(address) != 6 {
		return nil
	}
	return append([]byte{kind - TypeNeighbourSolicitation + 1, 1}, address...)
}
