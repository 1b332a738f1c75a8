package differential_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
)

// Bytes of the packets that leave, by the RFCs.

func put16(b []byte, n uint16) { binary.BigEndian.PutUint16(b, n) }
func put32(b []byte, n uint32) { binary.BigEndian.PutUint32(b, n) }

// sum is the one's complement sum of b's words, an odd byte being the upper half of the last
// (RFC 1071).
func sum(b []byte, start uint32) uint32 {
	s := uint64(start)
	for ; len(b) > 1; b = b[2:] {
		s += uint64(be16(b))
	}
	if len(b) == 1 {
		s += uint64(b[0]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint32(s)
}

// updated is a checksum after a change of the covered bytes (RFC 1624, equation 3).
func updated(checksum uint16, before, after []byte) uint16 {
	s := uint32(^checksum)
	for i := 0; i < len(before); i += 2 {
		s += uint32(^be16(before[i:])) + uint32(be16(after[i:]))
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

// pseudo is the folded sum of the pseudo-header (RFC 9293, 3.1; RFC 8200, 8.1).
func pseudo(source, destination netip.Addr, protocol byte, length int) uint16 {
	var b [40]byte
	n := copy(b[:], source.AsSlice())
	n += copy(b[n:], destination.AsSlice())
	put32(b[n:], uint32(length))
	b[n+7] = protocol
	return uint16(sum(b[:n+8], 0))
}

// link writes an Ethernet header.
func link(b []byte, destination, source net.HardwareAddr, kind uint16) []byte {
	b = append(append(b, destination...), source...)
	return binary.BigEndian.AppendUint16(b, kind)
}

// header is the IP header of a packet that the balancer makes itself. df and id are for IPv4,
// label for IPv6.
type header struct {
	source, destination netip.Addr
	tos, ttl, protocol  byte
	df                  bool
	id                  uint16
	label               uint32
}

func (h header) append(b []byte, size int) []byte {
	at := len(b)
	if h.source.Is6() {
		b = append(b, make([]byte, 40)...)
		ip := b[at:]
		put32(ip, 6<<28|uint32(h.tos)<<20|h.label)
		put16(ip[4:], uint16(size))
		ip[6], ip[7] = h.protocol, h.ttl
		copy(ip[8:], h.source.AsSlice())
		copy(ip[24:], h.destination.AsSlice())
		return b
	}
	b = append(b, make([]byte, 20)...)
	ip := b[at:]
	ip[0], ip[1], ip[8], ip[9] = 0x45, h.tos, h.ttl, h.protocol
	put16(ip[2:], uint16(20+size))
	put16(ip[4:], h.id)
	if h.df {
		ip[6] = 0x40
	}
	copy(ip[12:], h.source.AsSlice())
	copy(ip[16:], h.destination.AsSlice())
	put16(ip[10:], ^uint16(sum(ip, 0)))
	return b
}

func (h header) etherType() uint16 {
	if h.source.Is6() {
		return typeIPv6
	}
	return typeIPv4
}

const ownTTL = 64 // of packets that the balancer makes (RFC 1700, "IP time to live")

// answer is our packet to the sender of another: over IP, back out of the arm.
func (r *reading) answer(source netip.Addr, tos, protocol byte, upper []byte) []byte {
	h := header{source: source, destination: r.source, tos: tos, ttl: ownTTL, protocol: protocol, df: true}
	b := link(make([]byte, 0, linkSize+40+len(upper)), r.frame[6:12], r.frame[0:6], h.etherType())
	return append(h.append(b, len(upper)), upper...)
}

// errorAbout is an ICMP error about a packet: it quotes as much as RFC 1812, 4.3.2.3 and RFC 4443, 2.4 c allow, and has
// precedence 6 (RFC 1812, 4.3.2.5).
func (o *oracle) errorAbout(r *reading, source netip.Addr, kind, code byte, rest uint32) []byte {
	quote, protocol, tos := r.frame[linkSize:r.end], byte(icmp4), byte(0xc0)
	most := 576 - 20 - 8
	if r.six {
		protocol, tos, most = icmp6, 0, 1280-40-8
	}
	if o.broken == longerQuote {
		most += 8
	}
	quote = quote[:min(len(quote), most)]
	b := make([]byte, 8, 8+len(quote))
	b[0], b[1] = kind, code
	put32(b[4:], rest)
	b = append(b, quote...)
	start := uint32(0)
	if r.six {
		start = uint32(pseudo(source, r.source, icmp6, len(b)))
	}
	if 8+r.upper-linkSize > len(b) && r.isOpen() {
		return nil // the kernel would not find the checksum field to fill in
	}
	put16(b[2:], ^uint16(sum(r.onTheWire(b), start)))
	return r.answer(source, tos, protocol, b)
}

// isOpen reports whether the kernel will still complete the packet's checksum, also after the program has changed the packet.
func (r *reading) isOpen() bool {
	return arms[r.arm].generic && r.part == whole && r.isTransport() && r.isUnfinished()
}

// onTheWire is an error's message about the packet as it will be when the kernel has completed the checksum that the
// packet's sender left open: in generic mode the kernel still knows that it is open, and fills it in, over the packet's
// bytes at that time.
func (r *reading) onTheWire(message []byte) []byte {
	if !r.isOpen() {
		return message
	}
	// The kernel fills in the field such that the sum of all covered bytes is the complement of this.
	start := pseudo(r.source, r.destination, r.protocol, len(r.l4()))
	return binary.BigEndian.AppendUint16(slices.Clone(message[:8+r.upper-linkSize]), ^start)
}

// reset is the answer of RFC 9293, 3.10.7.1 to a segment without a connection. unfinished leaves its checksum to the
// kernel, which finishes it.
func (r *reading) reset(unfinished bool) []byte {
	segment := r.l4()
	b := make([]byte, 20)
	copy(b[0:], segment[2:4])
	copy(b[2:], segment[0:2])
	b[12], b[13] = 5<<4, flagRST
	if r.flags&flagACK != 0 {
		copy(b[4:8], segment[8:12])
	} else {
		length := uint32(len(segment) - int(segment[12]>>4)*4)
		if r.flags&flagSYN != 0 {
			length++
		}
		if r.flags&flagFIN != 0 {
			length++
		}
		b[13] |= flagACK
		put32(b[8:], be32(segment[4:])+length)
	}
	start := pseudo(r.destination, r.source, tcp, len(b))
	if put16(b[16:], start); !unfinished {
		put16(b[16:], 0)
		put16(b[16:], ^uint16(sum(b, uint32(start))))
	}
	return r.answer(r.destination, 0, tcp, b)
}

// lowerTTL takes a hop off an IP packet.
func lowerTTL(ip []byte) {
	if ip[0]>>4 == 6 {
		ip[7]--
		return
	}
	var before [2]byte
	copy(before[:], ip[8:])
	ip[8]--
	put16(ip[10:], updated(be16(ip[10:]), before[:], ip[8:10]))
}

// setAddresses writes addresses into an IP header, and updates its checksum.
func setAddresses(ip []byte, source, destination netip.Addr) {
	if ip[0]>>4 == 6 {
		copy(ip[8:], source.AsSlice())
		copy(ip[24:], destination.AsSlice())
		return
	}
	var before [8]byte
	copy(before[:], ip[12:])
	copy(ip[12:], source.AsSlice())
	copy(ip[16:], destination.AsSlice())
	put16(ip[10:], updated(be16(ip[10:]), before[:], ip[12:20]))
}

// checksumOffset is the offset of the checksum in a TCP or UDP header.
func checksumOffset(protocol byte) int {
	if protocol == tcp {
		return 16
	}
	return 6
}

// isUnfinished reports whether the sender has left the checksum to hardware: the field has the sum of the
// pseudo-header, and is not valid as it is. A fragment's is finished (docs/design/11 and 15).
func (r *reading) isUnfinished() bool {
	b := r.l4()
	field := be16(b[checksumOffset(r.protocol):])
	start := pseudo(r.source, r.destination, r.protocol, len(b))
	return r.part == whole && field == start && sum(b, uint32(start)) != 0xffff
}

// finish computes the checksum of a TCP or UDP packet between two addresses.
func finish(l4 []byte, source, destination netip.Addr, protocol byte) {
	at := checksumOffset(protocol)
	put16(l4[at:], 0)
	value := ^uint16(sum(l4, uint32(pseudo(source, destination, protocol, len(l4)))))
	if value == 0 && protocol == udp {
		value = 0xffff
	}
	put16(l4[at:], value)
}

// endpoints are the words of a tuple that checksums cover.
func (t tuple) endpoints(ports bool) []byte {
	b := append(t.from.Addr().AsSlice(), t.to.Addr().AsSlice()...)
	if ports {
		b = binary.BigEndian.AppendUint16(b, t.from.Port())
		b = binary.BigEndian.AppendUint16(b, t.to.Port())
	}
	return b
}

// readdress gives a TCP or UDP header other ports, and updates its checksum for the new tuple (RFC 1624). UDP's zero
// stands for no checksum (RFC 768; RFC 6935 for IPv6), and no checksum may become zero.
func (o *oracle) readdress(l4 []byte, was, now tuple) {
	put16(l4, now.from.Port())
	put16(l4[2:], now.to.Port())
	at := checksumOffset(was.protocol)
	if len(l4) < at+2 {
		return
	}
	field := be16(l4[at:])
	if field == 0 && was.protocol == udp && o.broken != zeroIsAChecksum {
		return
	}
	field = updated(field, was.endpoints(true), now.endpoints(true))
	if field == 0 && was.protocol == udp {
		field = 0xffff
	}
	put16(l4[at:], field)
}
