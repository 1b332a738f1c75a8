package differential_test

import (
	"encoding/binary"
	"net/netip"
)

// Protocols and types of messages, as assigned by IANA.
const (
	typeIPv4, typeARP, typeVLAN, typeIPv6, typeQinQ = 0x0800, 0x0806, 0x8100, 0x86dd, 0x88a8

	hopByHop, icmp4, tcp, udp, routingHeader, fragmentHeader, authentication, icmp6, destinationOptions = 0, 1, 6, 17, 43, 44, 51, 58, 60

	flagFIN, flagSYN, flagRST, flagACK = 1, 2, 4, 16

	linkSize = 14
)

// part is the part of a datagram that a packet has.
type part int

const (
	whole part = iota
	first
	later
)

// reading has the fields that a station can read from a frame: RFC 791, 8200, 4302 for IP; ports and
// flags if the packet is TCP or UDP and has them. Offsets count from the frame's begin.
type reading struct {
	arm                 int
	group               bool // the frame is for more than one station
	frame               []byte
	six                 bool
	source, destination netip.Addr
	ttl, tos            byte
	df                  bool
	protocol            byte
	upper, end          int // the begin of the header behind IP, and the end of the IP packet
	part                part
	id                  uint32 // of the datagram
	offset              int    // of the fragment
	sourcePort          uint16
	destinationPort     uint16
	flags               byte
	data                bool // bytes beyond the transport header
}

func be16(b []byte) uint16 { return binary.BigEndian.Uint16(b) }
func be32(b []byte) uint32 { return binary.BigEndian.Uint32(b) }

func address(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}

// l4 returns the bytes behind the IP headers.
func (r *reading) l4() []byte { return r.frame[r.upper:r.end] }

// readIP reads the IP headers. False: they are truncated or contradict themselves.
func (r *reading) readIP() bool {
	b := r.frame[linkSize:]
	if r.six {
		return r.readIPv6(b)
	}
	if len(b) < 20 || b[0]>>4 != 4 {
		return false
	}
	size, length := int(b[0]&15)*4, int(be16(b[2:]))
	if size < 20 || length < size || length > len(b) {
		return false
	}
	r.source, r.destination = address(b[12:16]), address(b[16:20])
	r.tos, r.ttl, r.protocol = b[1], b[8], b[9]
	r.upper, r.end = linkSize+size, linkSize+length
	field := be16(b[6:])
	r.df = field&0x4000 != 0
	r.id = uint32(be16(b[4:]))
	r.setFragment(int(field&0x1fff)*8, field&0x2000 != 0)
	return true
}

func (r *reading) setFragment(offset int, more bool) {
	r.offset = offset
	switch {
	case offset > 0:
		r.part = later
	case more:
		r.part = first
	}
}

func (r *reading) readIPv6(b []byte) bool {
	if len(b) < 40 || b[0]>>4 != 6 || 40+int(be16(b[4:])) > len(b) {
		return false
	}
	r.source, r.destination = address(b[8:24]), address(b[24:40])
	r.tos, r.ttl, r.protocol = b[0]<<4|b[1]>>4, b[7], b[6]
	r.df = true
	r.upper, r.end = linkSize+40, linkSize+40+int(be16(b[4:]))
	return true
}

// Limits of the headers behind an IPv6 header: bpf/core/parse.h has them, and reasons.md.
const (
	extensionsMax = 8
	deepestHeader = 0x7ff - 8  // the last begin of an extension header in the frame
	depthMax      = 0x7ff - 64 // the last begin of the header behind them
)

// chainEnd is the reason why a walk through the extension headers ends.
type chainEnd int

const (
	chainRead chainEnd = iota // before a header that is no extension
	chainFragment
	chainBroken
	chainTooLong
	chainRouted // a routing header has segments left
)

// readChain goes through the IPv6 extension headers, up to a fragment header.
func (r *reading) readChain() chainEnd {
	if !r.six || r.protocol == tcp || r.protocol == udp {
		if r.part != whole {
			return chainFragment
		}
		return chainRead
	}
	end := r.walk()
	if end != chainBroken && r.upper > depthMax {
		return chainTooLong
	}
	return end
}

// isExtension reports whether the next IPv6 header is one that TCP or UDP may follow, other than the
// fragment header.
func (r *reading) isExtension() bool {
	switch r.protocol {
	case hopByHop, destinationOptions, routingHeader, authentication:
		return r.six
	}
	return false
}

func (r *reading) walk() chainEnd {
	for seen := 0; ; seen++ {
		if r.protocol == fragmentHeader {
			return chainFragment
		}
		if !r.isExtension() {
			return chainRead
		}
		b := r.frame[min(r.upper, r.end):r.end]
		switch {
		case seen == extensionsMax || r.upper > deepestHeader:
			return chainTooLong
		case len(b) < 8:
			return chainBroken
		case r.protocol == routingHeader && b[3] != 0:
			return chainRouted
		}
		size := 8 * (1 + int(b[1]))
		if r.protocol == authentication { // RFC 4302, 2.2
			size = 4 * (2 + int(b[1]))
		}
		if size > len(b) {
			return chainBroken
		}
		r.protocol = b[0]
		r.upper += size
	}
}

// readFragmentHeader reads the header at the chain's end. False: it is incomplete.
func (r *reading) readFragmentHeader() bool {
	b := r.l4()
	if len(b) < 8 {
		return false
	}
	field := be16(b[2:])
	r.protocol, r.id = b[0], be32(b[4:])
	r.upper += 8
	r.setFragment(int(field&^7), field&1 != 0)
	return true
}

// readTransport reads ports, flags and whether there is data. False: the header is truncated, or its
// lengths are false.
func (r *reading) readTransport() bool {
	b := r.l4()
	header := 8
	switch {
	case len(b) < 8:
		return false
	case r.protocol == tcp:
		if len(b) < 20 {
			return false
		}
		header = int(b[12]>>4) * 4
		if header < 20 || header > len(b) {
			return false
		}
		r.flags = b[13]
	case r.part == first: // the length is the sum of all fragments
		if be16(b[4:]) < 8 {
			return false
		}
	default:
		if length := int(be16(b[4:])); length < 8 || length > len(b) {
			return false
		}
	}
	r.sourcePort, r.destinationPort = be16(b), be16(b[2:])
	r.data = len(b) > header || r.part == first
	return true
}

// tuple has the common fields of a flow's packets.
type tuple struct {
	from, to netip.AddrPort
	protocol byte
}

func (t tuple) reversed() tuple { return tuple{t.to, t.from, t.protocol} }

func (r *reading) tuple() tuple {
	return tuple{netip.AddrPortFrom(r.source, r.sourcePort), netip.AddrPortFrom(r.destination, r.destinationPort), r.protocol}
}
