package xsk

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// ErrNotUDP means that a frame has no UDP packet, or one with options, extension headers, fragments or VLAN tags, or
// contradicts itself. shunt's program redirects no such frame; another program may.
var ErrNotUDP = errors.New("the frame is not a plain UDP packet")

const (
	ethernetSize = 14
	ip4Size      = 20
	ip6Size      = 40
	udpSize      = 8

	typeIP4     = 0x0800
	typeIP6     = 0x86dd
	protocolUDP = 17
)

// Packet is a received UDP packet. Payload points into the frame, and is valid as long as the program holds the frame.
type Packet struct {
	Source, Destination netip.AddrPort
	Payload             []byte
}

// Parse reads a frame that begins with its Ethernet header: IPv4 (RFC 791) or IPv6 (RFC 8200) and UDP
// (RFC 768). Bytes behind the IP packet are Ethernet's padding. Parse verifies no checksum: where XDP takes a
// packet the kernel has not verified one either, and a sender on the same machine leaves UDP's
// unfinished.
func Parse(frame []byte) (Packet, error) {
	if len(frame) < ethernetSize+ip4Size+udpSize {
		return Packet{}, ErrNotUDP
	}
	ip := frame[ethernetSize:]
	var source, destination netip.Addr
	var udp []byte
	switch binary.BigEndian.Uint16(frame[12:]) {
	case typeIP4:
		size := int(binary.BigEndian.Uint16(ip[2:]))
		fragment := binary.BigEndian.Uint16(ip[6:]) & 0x3fff // more fragments, and the offset
		if ip[0] != 0x45 || ip[9] != protocolUDP || fragment != 0 || size > len(ip) || size < ip4Size {
			return Packet{}, ErrNotUDP
		}
		source, destination = netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:]))
		udp = ip[ip4Size:size]
	case typeIP6:
		if len(ip) < ip6Size {
			return Packet{}, ErrNotUDP
		}
		size := int(binary.BigEndian.Uint16(ip[4:]))
		if ip[0]>>4 != 6 || ip[6] != protocolUDP || size > len(ip)-ip6Size {
			return Packet{}, ErrNotUDP
		}
		source, destination = netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:]))
		udp = ip[ip6Size : ip6Size+size]
	default:
		return Packet{}, ErrNotUDP
	}
	if len(udp) < udpSize {
		return Packet{}, ErrNotUDP
	}
	size := int(binary.BigEndian.Uint16(udp[4:]))
	if size < udpSize || size > len(udp) {
		return Packet{}, ErrNotUDP
	}
	return Packet{
		Source:      netip.AddrPortFrom(source, binary.BigEndian.Uint16(udp)),
		Destination: netip.AddrPortFrom(destination, binary.BigEndian.Uint16(udp[2:])),
		Payload:     udp[udpSize:size:size],
	}, nil
}

// Packet returns the UDP packet in a received frame.
func (q *Queue) Packet(d *Descriptor) (Packet, error) { return Parse(q.Bytes(d)) }

// Reply turns a received frame into its own answer, without a copy: addresses and ports change
// places. The payload is the received one, or bytes of the same length that the program has written
// over it. Send sends the frame.
func (q *Queue) Reply(d *Descriptor) error {
	if q.layout.TransmitRing == 0 {
		return ErrReceiveOnly
	}
	size, err := reply(q.Bytes(d))
	if err != nil {
		return err
	}
	d.Len = uint32(size)
	return nil
}

// reply turns a frame around, and returns its length without padding.
func reply(frame []byte) (int, error) {
	p, err := Parse(frame)
	if err != nil {
		return 0, err
	}
	swap(frame[0:6], frame[6:12])
	ip := frame[ethernetSize:]
	size, length := ip4Size, udpSize+len(p.Payload) // bytes of the packet that UDP's length does not count are left out
	if p.Source.Addr().Is4() {
		swap(ip[12:16], ip[16:20])
		ip[8] = replyTTL
		binary.BigEndian.PutUint16(ip[2:], uint16(ip4Size+length))
		binary.BigEndian.PutUint16(ip[10:], 0)
		binary.BigEndian.PutUint16(ip[10:], finish(sum(ip[:ip4Size], 0)))
	} else {
		size = ip6Size
		swap(ip[8:24], ip[24:40])
		ip[7] = replyTTL
		binary.BigEndian.PutUint16(ip[4:], uint16(length))
	}
	udp := ip[size : size+length]
	swap(udp[0:2], udp[2:4])
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	binary.BigEndian.PutUint16(udp[6:], 0)
	addresses := ip[12:20]
	if size == ip6Size {
		addresses = ip[8:40]
	}
	check := finish(sum(udp, sum(addresses, uint64(protocolUDP+len(udp)))))
	if check == 0 {
		check = 0xffff // RFC 768: 0 means that there is no checksum
	}
	binary.BigEndian.PutUint16(udp[6:], check)
	return ethernetSize + size + len(udp), nil
}

// replyTTL is Linux's own default (net.ipv4.ip_default_ttl, RFC 1700).
const replyTTL = 64

func swap(a, b []byte) {
	for i := range a {
		a[i], b[i] = b[i], a[i]
	}
}

// sum adds 16-bit words (RFC 1071); an odd last byte is padded with zero.
func sum(b []byte, from uint64) uint64 {
	for len(b) >= 4 {
		from += uint64(binary.BigEndian.Uint32(b)) // two words at once: folding adds the upper to the lower
		b = b[4:]
	}
	if len(b) >= 2 {
		from += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		from += uint64(b[0]) << 8
	}
	return from
}

// finish folds a sum into its complement.
func finish(s uint64) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}
