// Package wire has the frames by which neighbours on an Ethernet find each other (ARP,
// RFC 826; neighbour discovery, RFC 4861), and packet sockets that send and receive them.
//
// It opens packet sockets (CAP_NET_RAW).
package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/packet"
)

// mark is in every announcement and bid by shunt, where other hosts ignore it: in the padding of an ARP
// frame, and in an experimental option of neighbour discovery (RFC 4727 section 3.1.3). It tells an instance that the other end
// of a conflict knows the same rule.
var mark = []byte("shunt1")

const (
	arpEnd     = 14 + 28     // of an ARP packet in its frame
	arpPadding = 60 - arpEnd // up to the shortest Ethernet frame
	markOption = 253         // RFC 4727: for experiments
	arpReply   = 2           // RFC 826
)

// IsMarked reports whether a frame has shunt's mark.
func IsMarked(frame []byte) bool {
	if len(frame) < arpEnd+len(mark) {
		return false
	}
	if binary.BigEndian.Uint16(frame[12:14]) == packet.TypeARP {
		return bytes.Equal(frame[arpEnd:arpEnd+len(mark)], mark)
	}
	// The options of an advertisement or a solicitation without extension headers.
	for o := frame[min(14+40+24, len(frame)):]; len(o) >= 8 && o[1] > 0 && int(o[1])*8 <= len(o); o = o[int(o[1])*8:] {
		if o[0] == markOption && bytes.Equal(o[2:8], mark) {
			return true
		}
	}
	return false
}

var (
	broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	allNodes  = netip.MustParseAddr("ff02::1")
)

// SolicitedNode returns the group to which questions about an IPv6 address are sent (RFC 4291 section 2.7.1).
func SolicitedNode(addr netip.Addr) netip.Addr {
	b := addr.As16()
	return netip.AddrFrom16([16]byte{0: 0xff, 1: 0x02, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
}

// GroupMAC returns the Ethernet address of an IPv6 group (RFC 2464 section 7).
func GroupMAC(group netip.Addr) net.HardwareAddr {
	b := group.As16()
	return net.HardwareAddr{0x33, 0x33, b[12], b[13], b[14], b[15]}
}

// Probe returns a frame that asks whether a host has the address, without claiming it: an ARP request from
// 0.0.0.0 (RFC 5227 section 2.1.1), or a solicitation from :: (RFC 4862 section 5.4.2).
func Probe(mac net.HardwareAddr, addr netip.Addr) ([]byte, error) {
	if addr.Is4() {
		return ARPRequest(mac, broadcast, netip.IPv4Unspecified(), addr)
	}
	return packet.Build(probe6(mac, addr))
}

func probe6(mac net.HardwareAddr, addr netip.Addr) packet.Packet {
	question := packet.NewNeighbourSolicitation(mac, netip.IPv6Unspecified(), addr)
	question.ICMPv6.Neighbour.LinkAddress = nil // it would claim the address
	return question
}

// BidCode is the ICMPv6 code of a bid.
const BidCode = 1

// Bid returns a frame that tells the host at to, which has the address, that mac is to have it. It is a probe that asks nothing: data planes, which take
// probes from the stack, pass it, and other hosts discard it. As ARP it is a reply from 0.0.0.0; as neighbour discovery, a solicitation
// with a code other than 0 (RFC 4861 section 7.1.1). It has shunt's mark (IsMarked).
func Bid(mac, to net.HardwareAddr, addr netip.Addr) ([]byte, error) {
	if addr.Is4() {
		frame, err := marked(ARPRequest(mac, to, netip.IPv4Unspecified(), addr))
		if err == nil {
			binary.BigEndian.PutUint16(frame[14+6:], arpReply)
		}
		return frame, err
	}
	bid := probe6(mac, addr)
	bid.Ethernet.Destination, bid.ICMPv6.Code, bid.ICMPv6.Neighbour.Options = to, BidCode, markedOption()
	return packet.Build(bid)
}

// marked puts the mark into the padding of an ARP frame.
func marked(frame []byte, err error) ([]byte, error) {
	if err == nil {
		copy(frame[arpEnd:], mark)
	}
	return frame, err
}

func markedOption() []byte { return append([]byte{markOption, 1}, mark...) }

// Announcement returns a frame that says that the address is here: an ARP announcement (RFC 5227 section 2.3),
// or an unsolicited advertisement that overrides the caches of neighbours (RFC 4861 section 7.2.6). It has
// shunt's mark (IsMarked).
func Announcement(mac net.HardwareAddr, addr netip.Addr) ([]byte, error) {
	if addr.Is4() {
		return marked(ARPRequest(mac, broadcast, addr, addr))
	}
	claim := packet.NewNeighbourAdvertisement(mac, addr, GroupMAC(allNodes), allNodes)
	claim.ICMPv6.Neighbour.Solicited = false
	claim.ICMPv6.Neighbour.Options = markedOption()
	return packet.Build(claim)
}

// Question returns a frame that asks target for its hardware address, as source, which must be of its family:
// sent to its last known address (to), or to every host if that is nil. The answer comes to mac alone.
func Question(mac, to net.HardwareAddr, source, target netip.Addr) ([]byte, error) {
	if source.Is4() != target.Is4() {
		return nil, fmt.Errorf("ask for the hardware address of %s as %s: they are of different families", target, source)
	}
	if target.Is4() {
		if to == nil {
			to = broadcast
		}
		return ARPRequest(mac, to, source, target)
	}
	question := packet.NewNeighbourSolicitation(mac, source, target)
	if to != nil {
		question.Ethernet.Destination, question.IPv6.Destination = to, target
	}
	return packet.Build(question)
}

// ARPRequest returns a frame that asks for target's hardware address as sender.
func ARPRequest(mac, to net.HardwareAddr, sender, target netip.Addr) ([]byte, error) {
	question := packet.NewARPRequest(mac, sender, target)
	question.Ethernet.Destination = to
	question.Trailer = make([]byte, arpPadding)
	return packet.Build(question)
}
