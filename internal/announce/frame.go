package announce

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

var (
	broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	allNodes  = netip.MustParseAddr("ff02::1")
)

// solicitedNode is the group in which questions about an IPv6 address are asked (RFC 4291
// section 2.7.1).
func solicitedNode(addr netip.Addr) netip.Addr {
	b := addr.As16()
	return netip.AddrFrom16([16]byte{0: 0xff, 1: 0x02, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
}

// groupMAC is the Ethernet address of an IPv6 group (RFC 2464 section 7).
func groupMAC(group netip.Addr) net.HardwareAddr {
	b := group.As16()
	return net.HardwareAddr{0x33, 0x33, b[12], b[13], b[14], b[15]}
}

// probeFrame asks whether anybody has the address, without claiming it: an ARP request from
// 0.0.0.0 (RFC 5227 section 2.1.1), or a solicitation from :: (RFC 4862 section 5.4.2).
func probeFrame(mac net.HardwareAddr, addr netip.Addr) ([]byte, error) {
	if addr.Is4() {
		return arpFrame(mac, netip.IPv4Unspecified(), addr)
	}
	group := solicitedNode(addr)
	return ndFrame(mac, groupMAC(group), netip.IPv6Unspecified(), group, layers.ICMPv6TypeNeighborSolicitation,
		&layers.ICMPv6NeighborSolicitation{TargetAddress: addr.AsSlice()})
}

// announceFrame says that the address is here: an ARP announcement (RFC 5227 section 2.3),
// or an unsolicited advertisement that overrides what neighbours have cached (RFC 4861
// section 7.2.6).
func announceFrame(mac net.HardwareAddr, addr netip.Addr) ([]byte, error) {
	if addr.Is4() {
		return arpFrame(mac, addr, addr)
	}
	const override = 0x20 // RFC 4861 section 4.4: router 0x80, solicited 0x40
	return ndFrame(mac, groupMAC(allNodes), addr, allNodes, layers.ICMPv6TypeNeighborAdvertisement,
		&layers.ICMPv6NeighborAdvertisement{
			Flags: override, TargetAddress: addr.AsSlice(),
			Options: layers.ICMPv6Options{{Type: layers.ICMPv6OptTargetAddress, Data: mac}},
		})
}

func arpFrame(mac net.HardwareAddr, sender, target netip.Addr) ([]byte, error) {
	return serialize(
		&layers.Ethernet{SrcMAC: mac, DstMAC: broadcast, EthernetType: layers.EthernetTypeARP},
		&layers.ARP{
			AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4,
			HwAddressSize: 6, ProtAddressSize: 4, Operation: layers.ARPRequest,
			SourceHwAddress: mac, SourceProtAddress: sender.AsSlice(),
			DstHwAddress: make([]byte, 6), DstProtAddress: target.AsSlice(),
		})
}

func ndFrame(mac, to net.HardwareAddr, src, dst netip.Addr, kind uint8, message gopacket.SerializableLayer) ([]byte, error) {
	ip := &layers.IPv6{
		Version: 6, HopLimit: 255, NextHeader: layers.IPProtocolICMPv6,
		SrcIP: src.AsSlice(), DstIP: dst.AsSlice(),
	}
	icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(kind, 0)}
	if err := icmp.SetNetworkLayerForChecksum(ip); err != nil {
		return nil, fmt.Errorf("build a neighbour discovery message: %w", err)
	}
	return serialize(&layers.Ethernet{SrcMAC: mac, DstMAC: to, EthernetType: layers.EthernetTypeIPv6}, ip, icmp, message)
}

func serialize(list ...gopacket.SerializableLayer) ([]byte, error) {
	buffer := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, list...)
	if err != nil {
		return nil, fmt.Errorf("build an announcement: %w", err)
	}
	return buffer.Bytes(), nil
}

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
