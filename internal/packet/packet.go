// Package packet builds, parses and compares packets as readable values. The tests, the
// demo, the announcements of addresses and every command that shows a packet use it.
//
//	bytes ──Parse──► Packet ──Build──► bytes        Build(Parse(b)) == b
//	                   │
//	                   ├─ Diff    the differences, field by field
//	                   └─ String  one line for a human
//
// A Packet has the contents of the wire and nothing else: it holds no slices of the bytes it was
// parsed from, and two of them are equal if a receiver would see the same. Numbers are in host byte
// order, lengths and offsets in bytes.
//
// The zero value of a length or of a checksum means "the right one", so that a test writes only the
// fields that it is about. Parse fills them in the same way: a right length is 0, a right checksum
// is Correct, and anything else stands there by name.
package packet

import (
	"net"
	"net/netip"
)

// EtherTypes this package reads (IANA "IEEE 802 Numbers").
const (
	TypeIPv4 uint16 = 0x0800
	TypeARP  uint16 = 0x0806
	TypeVLAN uint16 = 0x8100
	TypeIPv6 uint16 = 0x86dd
	TypeQinQ uint16 = 0x88a8
)

// IP protocol numbers this package reads (IANA "Assigned Internet Protocol Numbers").
const (
	ProtocolHopByHop           uint8 = 0
	ProtocolICMP               uint8 = 1
	ProtocolTCP                uint8 = 6
	ProtocolUDP                uint8 = 17
	ProtocolRouting            uint8 = 43
	ProtocolFragment           uint8 = 44
	ProtocolAH                 uint8 = 51
	ProtocolICMPv6             uint8 = 58
	ProtocolNoNext             uint8 = 59
	ProtocolDestinationOptions uint8 = 60
)

// LengthZero, in a Length field, writes 0 on the wire (0 itself means "the right one").
const LengthZero = -1

// Packet is one frame. At most one of ARP, IPv4 and IPv6 is set, and at most one of
// TCP, UDP, ICMP and ICMPv6, which then follows the IP header.
type Packet struct {
	Ethernet Ethernet
	VLANs    []VLAN // outermost first
	ARP      *ARP
	IPv4     *IPv4
	IPv6     *IPv6
	TCP      *TCP
	UDP      *UDP
	ICMP     *ICMP
	ICMPv6   *ICMPv6
	Payload  []byte // the bytes after the innermost header above
	Trailer  []byte // the bytes after the end of the IP packet or ARP message: Ethernet padding
}

// Ethernet is the link header. Both addresses are 6 bytes.
type Ethernet struct {
	Source      net.HardwareAddr
	Destination net.HardwareAddr
	Type        uint16 // of the header after the tags; 0: that of the ARP, IPv4 or IPv6 set
}

// VLAN is one 802.1Q tag.
type VLAN struct {
	Type         uint16 // TypeVLAN or TypeQinQ; 0: TypeVLAN
	Priority     uint8  // 0 to 7
	DropEligible bool
	ID           uint16 // 0 to 4095
}

// ARP is a message about IPv4 over Ethernet (RFC 826).
type ARP struct {
	Operation     uint16 // 1 request, 2 reply
	SenderMAC     net.HardwareAddr
	SenderAddress netip.Addr
	TargetMAC     net.HardwareAddr
	TargetAddress netip.Addr
}

// IPv4 is the header of RFC 791.
type IPv4 struct {
	Source         netip.Addr
	Destination    netip.Addr
	TTL            uint8
	TOS            uint8 // DSCP in the upper 6 bits, ECN in the lower 2
	ID             uint16
	ReservedFlag   bool // must be zero on a decent network
	DF             bool
	MF             bool
	FragmentOffset uint16 // bytes, a multiple of 8
	Options        []byte // a multiple of 4, at most 40 bytes
	Protocol       uint8  // 0: that of the TCP, UDP or ICMP set
	Length         int    // total length in bytes; 0: the right one; LengthZero: 0
	Checksum       Checksum
}

// IPv6 is the header of RFC 8200 and its chain of extension headers.
type IPv6 struct {
	Source       netip.Addr
	Destination  netip.Addr
	HopLimit     uint8
	TrafficClass uint8
	FlowLabel    uint32 // 20 bits
	Extensions   []Extension
	NextHeader   uint8 // of the header after the extensions; 0: that of the TCP, UDP or ICMPv6 set
	Length       int   // payload length in bytes; 0: the right one; LengthZero: 0
}

// Extension is one IPv6 extension header.
type Extension struct {
	Type uint8 // its own protocol number, ProtocolHopByHop for example
	// Body follows the next-header and length octets: 6 bytes more than a
	// multiple of 8 (of 4 for AH), exactly 6 for a fragment header.
	Body []byte
	// Reserved is the octet that a fragment header has in the place of a length.
	Reserved uint8
}

// TCP is the header of RFC 9293.
type TCP struct {
	SourcePort      uint16
	DestinationPort uint16
	Seq             uint32
	Ack             uint32
	// Flags is one letter per set bit, in the order F S R P A U E C N ("SA", "PA").
	// Build takes any order. E, C and N are ECE, CWR and AE (RFC 3168, RFC 9768).
	Flags    string
	Reserved uint8 // 3 bits, zero on a decent network
	Window   uint16
	Urgent   uint16
	Options  []byte // a multiple of 4, at most 40 bytes
	Checksum Checksum
	// Cut means that only ports and Seq are there, as in an ICMP error that quotes
	// the 8 bytes RFC 792 asks for. All other fields are then empty.
	Cut bool
}

// UDP is the header of RFC 768.
type UDP struct {
	SourcePort      uint16
	DestinationPort uint16
	Length          int // header and payload in bytes; 0: the right one; LengthZero: 0
	Checksum        Checksum
}

// ICMP is a message of RFC 792.
type ICMP struct {
	Type     uint8
	Code     uint8
	Rest     uint32 // the second word: id and sequence of an echo, MTU, gateway, …
	Quote    []byte // the packet that an error quotes; otherwise the body is Packet.Payload
	Checksum Checksum
}

// ICMPv6 is a message of RFC 4443, or one of neighbour discovery (RFC 4861).
type ICMPv6 struct {
	Type      uint8
	Code      uint8
	Rest      uint32     // the second word; without the flags that Neighbour names
	Quote     []byte     // the packet that an error quotes; otherwise the body is Packet.Payload
	Neighbour *Neighbour // of a solicitation (135) or advertisement (136)
	Checksum  Checksum
}

// Neighbour is the body of a neighbour solicitation or advertisement.
type Neighbour struct {
	Target      netip.Addr
	Router      bool
	Solicited   bool
	Override    bool
	LinkAddress net.HardwareAddr // source (solicitation) or target (advertisement) option
	Options     []byte           // the options after it
}

// normal fills in the fields that follow from others: the zero types and protocols.
func (p Packet) normal() Packet {
	if len(p.VLANs) > 0 {
		p.VLANs = append([]VLAN(nil), p.VLANs...)
		for i := range p.VLANs {
			if p.VLANs[i].Type == 0 {
				p.VLANs[i].Type = TypeVLAN
			}
		}
	}
	if p.Ethernet.Type == 0 {
		switch {
		case p.ARP != nil:
			p.Ethernet.Type = TypeARP
		case p.IPv4 != nil:
			p.Ethernet.Type = TypeIPv4
		case p.IPv6 != nil:
			p.Ethernet.Type = TypeIPv6
		}
	}
	if number, ok := p.upperProtocol(); ok {
		if p.IPv4 != nil && p.IPv4.Protocol == 0 {
			ip := *p.IPv4
			ip.Protocol = number
			p.IPv4 = &ip
		}
		if p.IPv6 != nil && p.IPv6.NextHeader == 0 {
			ip := *p.IPv6
			ip.NextHeader = number
			p.IPv6 = &ip
		}
	}
	return p
}

// upperProtocol is the protocol number of the layer above IP, if there is one.
func (p Packet) upperProtocol() (uint8, bool) {
	switch {
	case p.TCP != nil:
		return ProtocolTCP, true
	case p.UDP != nil:
		return ProtocolUDP, true
	case p.ICMP != nil:
		return ProtocolICMP, true
	case p.ICMPv6 != nil:
		return ProtocolICMPv6, true
	}
	return 0, false
}
