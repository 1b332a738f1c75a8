package announce

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/gopacket/gopacket/layers"
)

// conflict reads a received frame: does it show that somebody other than mac has addr, or
// is about to take it? It returns that one's hardware address, or nil.
func conflict(frame []byte, mac net.HardwareAddr, addr netip.Addr) net.HardwareAddr {
	if len(frame) < 14 {
		return nil
	}
	var owner net.HardwareAddr
	switch body := frame[14:]; binary.BigEndian.Uint16(frame[12:14]) {
	case uint16(layers.EthernetTypeARP):
		owner = conflictARP(body, addr)
	case uint16(layers.EthernetTypeIPv6):
		owner = conflictND(body, net.HardwareAddr(frame[6:12]), addr)
	}
	if owner == nil || bytes.Equal(owner, mac) {
		return nil
	}
	return bytes.Clone(owner)
}

// conflictARP: a packet from the address, or a probe for it (RFC 5227 section 2.1.1).
func conflictARP(b []byte, addr netip.Addr) net.HardwareAddr {
	if len(b) < 28 || !addr.Is4() || !bytes.Equal(b[:6], []byte{0, 1, 8, 0, 6, 4}) {
		return nil
	}
	want := addr.As4()
	sender, target := b[14:18], b[24:28]
	probe := bytes.Equal(sender, []byte{0, 0, 0, 0}) && bytes.Equal(target, want[:]) && binary.BigEndian.Uint16(b[6:8]) == layers.ARPRequest
	if probe || bytes.Equal(sender, want[:]) {
		return net.HardwareAddr(b[8:14])
	}
	return nil
}

// conflictND: an advertisement of the address, or a solicitation from :: for it (RFC 4862
// sections 5.4.3 and 5.4.4).
func conflictND(b []byte, from net.HardwareAddr, addr netip.Addr) net.HardwareAddr {
	const header, message = 40, 24
	if len(b) < header+message || addr.Is4() || b[6] != uint8(layers.IPProtocolICMPv6) || b[7] != 255 {
		return nil
	}
	icmp, want := b[header:], addr.As16()
	if icmp[1] != 0 || !bytes.Equal(icmp[8:message], want[:]) {
		return nil
	}
	switch icmp[0] {
	case layers.ICMPv6TypeNeighborSolicitation:
		if netip.AddrFrom16([16]byte(b[8:24])).IsUnspecified() {
			return from
		}
	case layers.ICMPv6TypeNeighborAdvertisement:
		// The option, where there is one, names the owner even if a proxy answers.
		for o := icmp[message:]; len(o) >= 8 && o[1] > 0 && int(o[1])*8 <= len(o); o = o[int(o[1])*8:] {
			if o[0] == uint8(layers.ICMPv6OptTargetAddress) {
				return net.HardwareAddr(o[2:8])
			}
		}
		return from
	}
	return nil
}
