package packet

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
)

// Parse reads one frame. It never panics. Where it fails, the packet holds the headers
// before the fault and the rest as Payload; where it succeeds, Build gives b back.
//
// Later fragments have no transport header: their data is Payload. A first fragment has
// one, whose checksum also covers the others and so mostly reads as wrong.
func Parse(b []byte) (Packet, error) {
	var r reader
	err := r.ethernet(b)
	if err != nil {
		err = fmt.Errorf("parse frame of %d bytes: %w", len(b), err)
	}
	return r.p, err
}

// ParseQuote reads the packet that an ICMP error quotes, whose end may be missing: lengths that
// point past it stay unchanged, an incomplete TCP header is Cut, and checksums over missing bytes
// read as wrong.
func ParseQuote(b []byte) (Packet, error) {
	r := reader{quoted: true}
	err := r.ip(b)
	if err != nil {
		err = fmt.Errorf("parse quote of %d bytes: %w", len(b), err)
	}
	return r.p, err
}

// reader fills p from the outside in.
type reader struct {
	p      Packet
	quoted bool // the end may be missing
}

// clone keeps p free of the caller's buffer, and empty slices nil.
func clone(b []byte) []byte { return append([]byte(nil), b...) }

// short keeps the unread bytes as the payload and returns the reason.
func (r *reader) short(layer string, b []byte, need int) error {
	r.p.Payload = clone(b)
	return fmt.Errorf("%s: %d bytes are left, %d are needed", layer, len(b), need)
}

// refuse keeps the unread bytes as the payload and returns the reason.
func (r *reader) refuse(b []byte, format string, args ...any) error {
	r.p.Payload = clone(b)
	return fmt.Errorf(format, args...)
}

func (r *reader) ethernet(b []byte) error {
	if len(b) < 14 {
		return r.short("ethernet", b, 14)
	}
	r.p.Ethernet.Destination = net.HardwareAddr(clone(b[:6]))
	r.p.Ethernet.Source = net.HardwareAddr(clone(b[6:12]))
	kind := binary.BigEndian.Uint16(b[12:])
	b = b[14:]
	for kind == TypeVLAN || kind == TypeQinQ {
		if len(b) < 4 {
			r.p.Ethernet.Type = kind
			return r.short("vlan", b, 4)
		}
		control := binary.BigEndian.Uint16(b)
		r.p.VLANs = append(r.p.VLANs, VLAN{
			Type: kind, Priority: uint8(control >> 13), DropEligible: control>>12&1 == 1, ID: control & 0xfff,
		})
		kind, b = binary.BigEndian.Uint16(b[2:]), b[4:]
	}
	r.p.Ethernet.Type = kind
	switch kind {
	case TypeARP:
		return r.arp(b)
	case TypeIPv4:
		return r.ipv4(b)
	case TypeIPv6:
		return r.ipv6(b)
	}
	r.p.Payload = clone(b)
	return nil
}

func (r *reader) arp(b []byte) error {
	if len(b) < 8 {
		return r.short("arp", b, 8)
	}
	if [6]byte(b) != [6]byte{0, 1, 8, 0, 6, 4} { // not IPv4 over Ethernet
		r.p.Payload = clone(b)
		return nil
	}
	if len(b) < 28 {
		return r.short("arp", b, 28)
	}
	r.p.ARP = &ARP{
		Operation:     binary.BigEndian.Uint16(b[6:]),
		SenderMAC:     net.HardwareAddr(clone(b[8:14])),
		SenderAddress: netip.AddrFrom4([4]byte(b[14:])),
		TargetMAC:     net.HardwareAddr(clone(b[18:24])),
		TargetAddress: netip.AddrFrom4([4]byte(b[24:])),
	}
	r.p.Trailer = clone(b[28:])
	return nil
}

func (r *reader) ip(b []byte) error {
	if len(b) == 0 {
		return r.short("ip", b, 20)
	}
	if b[0]>>4 == 6 {
		r.p.Ethernet.Type = TypeIPv6
		return r.ipv6(b)
	}
	r.p.Ethernet.Type = TypeIPv4
	return r.ipv4(b)
}

func (r *reader) ipv4(b []byte) error {
	if len(b) < 20 {
		return r.short("ipv4", b, 20)
	}
	size, total := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	switch {
	case b[0]>>4 != 4:
		return r.refuse(b, "ipv4: version is %d", b[0]>>4)
	case size < 20:
		return r.refuse(b, "ipv4: header length %d: must be at least 20", size)
	case size > len(b):
		return r.short("ipv4", b, size)
	case total < size:
		return r.refuse(b, "ipv4: total length %d is less than the header's %d", total, size)
	case total > len(b) && !r.quoted:
		return r.short("ipv4", b, total)
	}
	fragment := binary.BigEndian.Uint16(b[6:])
	ip := &IPv4{
		Source:         netip.AddrFrom4([4]byte(b[12:])),
		Destination:    netip.AddrFrom4([4]byte(b[16:])),
		TTL:            b[8],
		TOS:            b[1],
		ID:             binary.BigEndian.Uint16(b[4:]),
		ReservedFlag:   fragment>>15 == 1,
		DF:             fragment>>14&1 == 1,
		MF:             fragment>>13&1 == 1,
		FragmentOffset: fragment & 0x1fff * 8,
		Options:        clone(b[20:size]),
		Protocol:       b[9],
	}
	right, _ := checksums(b[:size], 10, 0)
	ip.Checksum = classify(binary.BigEndian.Uint16(b[10:]), right, 0)
	r.p.IPv4 = ip
	if total > len(b) {
		ip.Length = total
	} else {
		r.p.Trailer = clone(b[total:])
		b = b[:total]
	}
	if ip.FragmentOffset != 0 {
		r.p.Payload = clone(b[size:])
		return nil
	}
	return r.upper(ip.Protocol, b[size:], ip.Source, ip.Destination)
}

func (r *reader) ipv6(b []byte) error {
	if len(b) < 40 {
		return r.short("ipv6", b, 40)
	}
	first, length := binary.BigEndian.Uint32(b), int(binary.BigEndian.Uint16(b[4:]))
	if first>>28 != 6 {
		return r.refuse(b, "ipv6: version is %d", first>>28)
	}
	if 40+length > len(b) && !r.quoted {
		return r.short("ipv6", b, 40+length)
	}
	ip := &IPv6{
		Source:       netip.AddrFrom16([16]byte(b[8:])),
		Destination:  netip.AddrFrom16([16]byte(b[24:])),
		HopLimit:     b[7],
		TrafficClass: uint8(first >> 20),
		FlowLabel:    first & 0xfffff,
		NextHeader:   b[6],
	}
	r.p.IPv6 = ip
	b = b[40:]
	if length > len(b) {
		ip.Length = length
	} else {
		r.p.Trailer = clone(b[length:])
		b = b[:length]
	}
	for isExtension(ip.NextHeader) {
		e, next, rest, need := readExtension(ip.NextHeader, b)
		if need > 0 {
			if r.quoted {
				break
			}
			return r.short(fmt.Sprintf("ipv6: extension %d", ip.NextHeader), b, need)
		}
		ip.Extensions = append(ip.Extensions, e)
		ip.NextHeader, b = next, rest
		if e.Type == ProtocolFragment && binary.BigEndian.Uint16(e.Body)>>3 != 0 {
			r.p.Payload = clone(b)
			return nil
		}
	}
	return r.upper(ip.NextHeader, b, ip.Source, ip.Destination)
}

// readExtension takes one extension header off b; need is the bytes it would take where
// b has fewer, otherwise 0.
func readExtension(kind uint8, b []byte) (e Extension, next uint8, rest []byte, need int) {
	if len(b) < 8 {
		return e, 0, b, 8
	}
	size := (int(b[1]) + 1) * 8
	switch kind {
	case ProtocolFragment:
		size = 8
		e.Reserved = b[1]
	case ProtocolAH:
		size = (int(b[1]) + 2) * 4
	}
	if size > len(b) {
		return e, 0, b, size
	}
	e.Type, e.Body = kind, clone(b[2:size])
	return e, b[0], b[size:], 0
}

// upper reads the header after IP; protocols it does not know are Payload.
func (r *reader) upper(protocol uint8, b []byte, source, destination netip.Addr) error {
	switch {
	case protocol == ProtocolTCP:
		return r.tcp(b, source, destination)
	case protocol == ProtocolUDP:
		return r.udp(b, source, destination)
	case protocol == ProtocolICMP && source.Is4():
		return r.icmp(b)
	case protocol == ProtocolICMPv6 && source.Is6():
		return r.icmpv6(b, source, destination)
	}
	r.p.Payload = clone(b)
	return nil
}

// cut ends a quote that has not all of a header; elsewhere that is a fault.
func (r *reader) cut(layer string, b []byte, need int) error {
	err := r.short(layer, b, need)
	if r.quoted {
		return nil
	}
	return err
}

func (r *reader) tcp(b []byte, source, destination netip.Addr) error {
	size := 20
	if len(b) >= 20 {
		size = int(b[12]>>4) * 4
	}
	if size < 20 && !r.quoted {
		return r.refuse(b, "tcp: header length %d: must be at least 20", size)
	}
	if size < 20 || size > len(b) {
		if r.quoted && len(b) >= 8 {
			r.p.TCP = &TCP{
				SourcePort:      binary.BigEndian.Uint16(b),
				DestinationPort: binary.BigEndian.Uint16(b[2:]),
				Seq:             binary.BigEndian.Uint32(b[4:]),
				Cut:             true,
			}
			b = b[8:]
		}
		return r.cut("tcp", b, size)
	}
	bits := binary.BigEndian.Uint16(b[12:])
	t := &TCP{
		SourcePort:      binary.BigEndian.Uint16(b),
		DestinationPort: binary.BigEndian.Uint16(b[2:]),
		Seq:             binary.BigEndian.Uint32(b[4:]),
		Ack:             binary.BigEndian.Uint32(b[8:]),
		Reserved:        uint8(bits >> 9 & 7),
		Window:          binary.BigEndian.Uint16(b[14:]),
		Urgent:          binary.BigEndian.Uint16(b[18:]),
		Options:         clone(b[20:size]),
	}
	for i := range len(flagLetters) {
		if bits>>i&1 == 1 {
			t.Flags += flagLetters[i : i+1]
		}
	}
	right, partial := checksums(b, 16, pseudo(source, destination, ProtocolTCP, len(b)))
	t.Checksum = classify(binary.BigEndian.Uint16(b[16:]), right, partial)
	r.p.TCP, r.p.Payload = t, clone(b[size:])
	return nil
}

func (r *reader) udp(b []byte, source, destination netip.Addr) error {
	if len(b) < 8 {
		return r.cut("udp", b, 8)
	}
	u := &UDP{
		SourcePort:      binary.BigEndian.Uint16(b),
		DestinationPort: binary.BigEndian.Uint16(b[2:]),
	}
	switch length := int(binary.BigEndian.Uint16(b[4:])); length {
	case len(b):
	case 0:
		u.Length = LengthZero
	default:
		u.Length = length
	}
	right, partial := udpChecksums(b, source, destination)
	u.Checksum = classify(binary.BigEndian.Uint16(b[6:]), right, partial)
	r.p.UDP, r.p.Payload = u, clone(b[8:])
	return nil
}

func (r *reader) icmp(b []byte) error {
	if len(b) < 8 {
		return r.cut("icmp", b, 8)
	}
	c := &ICMP{Type: b[0], Code: b[1], Rest: binary.BigEndian.Uint32(b[4:])}
	right, _ := checksums(b, 2, 0)
	c.Checksum = classify(binary.BigEndian.Uint16(b[2:]), right, 0)
	r.p.ICMP = c
	if isICMPError(c.Type) {
		c.Quote = clone(b[8:])
	} else {
		r.p.Payload = clone(b[8:])
	}
	return nil
}

func (r *reader) icmpv6(b []byte, source, destination netip.Addr) error {
	if len(b) < 8 {
		return r.cut("icmpv6", b, 8)
	}
	c := &ICMPv6{Type: b[0], Code: b[1], Rest: binary.BigEndian.Uint32(b[4:])}
	right, partial := checksums(b, 2, pseudo(source, destination, ProtocolICMPv6, len(b)))
	c.Checksum = classify(binary.BigEndian.Uint16(b[2:]), right, partial)
	r.p.ICMPv6 = c
	neighbour := c.Type == TypeNeighbourSolicitation || c.Type == TypeNeighbourAdvertisement
	switch {
	case neighbour && len(b) >= 24:
		n := &Neighbour{
			Target:    netip.AddrFrom16([16]byte(b[8:])),
			Router:    c.Rest>>31 == 1,
			Solicited: c.Rest>>30&1 == 1,
			Override:  c.Rest>>29&1 == 1,
		}
		c.Rest &= 1<<29 - 1
		options := b[24:]
		if len(options) >= 8 && options[0] == c.Type-TypeNeighbourSolicitation+1 && options[1] == 1 {
			n.LinkAddress = net.HardwareAddr(clone(options[2:8]))
			options = options[8:]
		}
		n.Options = clone(options)
		c.Neighbour = n
	case c.Type < 128:
		c.Quote = clone(b[8:])
	default:
		r.p.Payload = clone(b[8:])
	}
	return nil
}
