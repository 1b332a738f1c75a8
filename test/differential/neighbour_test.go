package differential_test

import (
	"net/netip"
	"slices"
)

// arp answers a request for an address that the balancer answers for (RFC 826).
func (o *oracle) arp(r *reading) want {
	b := r.frame[linkSize:]
	switch {
	case len(b) < 28, be16(b) != 1, be16(b[2:]) != typeIPv4, b[4] != 6, b[5] != 4, be16(b[6:]) != 1:
		return pass(neighbourOther)
	case b[8]&1 != 0: // a sender that is a group
		return pass(neighbourOther)
	case address(b[14:18]) == address(b[24:28]): // an announcement (RFC 5227)
		return pass(neighbourOther)
	case !isOwned(address(b[24:28])):
		return pass(neighbourOther)
	}
	own := arms[r.arm].mac
	out := slices.Clone(r.frame)
	copy(out, b[8:14])
	copy(out[6:], own)
	reply := out[linkSize:]
	put16(reply[6:], 2)
	copy(reply[8:], own)
	copy(reply[14:], b[24:28])
	copy(reply[18:], b[8:18])
	return r.back(arpAnswered, out)
}

const solicitationType = 135

// solicitation answers a neighbour solicitation for an address that the balancer answers for (RFC
// 4861, 7.1.1 and 7.2.4), and passes other ICMPv6 to groups. plain: no extension header is before
// it.
func (o *oracle) solicitation(r *reading, plain bool) want {
	m := r.l4()
	start := uint32(pseudo(r.source, r.destination, icmp6, len(m)))
	if !plain || r.ttl != 255 || len(m) < 24 || m[0] != solicitationType || m[1] != 0 || sum(m, start) != 0xffff || r.source.IsMulticast() {
		return pass(neighbourOther)
	}
	target := address(m[8:24])
	anonymous := r.source.IsUnspecified()
	if !isOwned(target) || anonymous && r.destination != groupOf(target) {
		return pass(neighbourOther)
	}
	options := m[24:]
	for n := 0; len(options) > 0; n++ {
		if n == optionsMax || len(options) < 2 || options[1] == 0 || int(options[1])*8 > len(options) || options[0] == 1 && anonymous {
			return pass(neighbourOther)
		}
		options = options[int(options[1])*8:]
	}
	flags, to, station := byte(0x60), r.source, r.frame[6:12]
	if anonymous { // duplicate address detection (RFC 4862): the answer goes to all nodes
		flags, to, station = 0x20, netip.MustParseAddr("ff02::1"), []byte{0x33, 0x33, 0, 0, 0, 1}
	}
	reply := make([]byte, 32)
	reply[0], reply[4] = 136, flags
	copy(reply[8:], m[8:24])
	reply[24], reply[25] = 2, 1
	copy(reply[26:], arms[r.arm].mac)
	put16(reply[2:], ^uint16(sum(reply, uint32(pseudo(target, to, icmp6, len(reply))))))
	h := header{source: target, destination: to, ttl: 255, protocol: icmp6}
	out := h.append(link(nil, station, arms[r.arm].mac, typeIPv6), len(reply))
	return r.back(ndAnswered, append(out, reply...))
}

// optionsMax is the number of options that are read; a solicitation with more is left to the host.
const optionsMax = 8

// groupOf is the solicited-node group of an address (RFC 4291, 2.7.1).
func groupOf(a netip.Addr) netip.Addr {
	b := a.As16()
	return netip.AddrFrom16([16]byte{0xff, 2, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
}
