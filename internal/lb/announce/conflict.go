package announce

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/shunt-lb/shunt/internal/packet"
)

const (
	arpRequest        = 1 // operation (RFC 826)
	targetLinkAddress = 2 // option of an advertisement (RFC 4861 section 4.6.1)
)

// claim is the statement of a received frame: mac has an address, or is about to use it.
type claim struct {
	addr  netip.Addr
	mac   net.HardwareAddr
	probe bool // mac does not have the address yet, and asks
	bid   bool // mac is another shunt, which is to have the address and does not have it yet (wire.Bid)
	// marked: the sender is another shunt, which knows the rule of Announcer.heard.
	marked bool
}

// claimOf reads a frame; ok reports whether the frame claims an address.
func claimOf(frame []byte) (c claim, ok bool) {
	if len(frame) < 14 {
		return claim{}, false
	}
	switch body := frame[14:]; binary.BigEndian.Uint16(frame[12:14]) {
	case packet.TypeARP:
		c, ok = claimARP(body)
	case packet.TypeIPv6:
		c, ok = claimND(body, net.HardwareAddr(frame[6:12]))
	}
	if !ok {
		return claim{}, false
	}
	c.mac, c.marked = bytes.Clone(c.mac), wire.IsMarked(frame)
	return c, c.marked || !c.bid
}

// conflict reads a frame that was received while mac probes for addr. If the frame shows that another host has
// addr, or is about to use it before mac, conflict returns that host's hardware address; otherwise nil. Of two
// hosts that probe at the same time, the one with the lower hardware address continues.
func conflict(frame []byte, mac net.HardwareAddr, addr netip.Addr) net.HardwareAddr {
	c, ok := claimOf(frame)
	if !ok || c.bid || c.addr != addr || bytes.Equal(c.mac, mac) || c.probe && bytes.Compare(c.mac, mac) > 0 {
		return nil
	}
	return c.mac
}

// claimARP: a packet from the address, or a probe for it (RFC 5227 section 2.1.1).
func claimARP(b []byte) (c claim, ok bool) {
	if len(b) < 28 || !bytes.Equal(b[:6], []byte{0, 1, 8, 0, 6, 4}) {
		return claim{}, false
	}
	sender, target := netip.AddrFrom4([4]byte(b[14:18])), netip.AddrFrom4([4]byte(b[24:28]))
	if sender.IsUnspecified() {
		asks := binary.BigEndian.Uint16(b[6:8]) == arpRequest
		return claim{addr: target, mac: b[8:14], probe: asks, bid: !asks}, true
	}
	return claim{addr: sender, mac: b[8:14]}, true
}

// claimND: an advertisement of the address, or a solicitation from :: for it (RFC 4862
// sections 5.4.3 and 5.4.4).
func claimND(b []byte, from net.HardwareAddr) (c claim, ok bool) {
	const header, message = 40, 24
	if len(b) < header+message || b[6] != packet.ProtocolICMPv6 || b[7] != 255 {
		return claim{}, false
	}
	icmp := b[header:]
	isBid := icmp[0] == packet.TypeNeighbourSolicitation && icmp[1] == wire.BidCode
	if icmp[1] != 0 && !isBid {
		return claim{}, false
	}
	c = claim{addr: netip.AddrFrom16([16]byte(icmp[8:message])), mac: from}
	switch icmp[0] {
	case packet.TypeNeighbourSolicitation:
		c.probe, c.bid = !isBid, isBid
		return c, netip.AddrFrom16([16]byte(b[8:24])).IsUnspecified()
	case packet.TypeNeighbourAdvertisement:
		// The option, if present, names the owner even if a proxy answers.
		for o := icmp[message:]; len(o) >= 8 && o[1] > 0 && int(o[1])*8 <= len(o); o = o[int(o[1])*8:] {
			if o[0] == targetLinkAddress {
				c.mac = net.HardwareAddr(o[2:8])
				break
			}
		}
		return c, true
	}
	return claim{}, false
}
