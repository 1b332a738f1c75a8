package rules

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// Of a network only the first bits are known: an expression about the other bits may match or not.
func TestPartialAddresses(t *testing.T) {
	const saddr, daddr, saddr6, daddr6 = 12, 16, 8, 24 // RFC 791, 3.1; RFC 8200, 3
	for _, c := range []struct {
		what         string
		network      string
		offset, size uint32
		op           uint32
		data         []byte
		want         answer
	}{
		{"its own octets", "10.244.2.0/24", daddr, 3, unix.NFT_CMP_EQ, []byte{10, 244, 2}, yes},
		{"a wider network", "10.244.2.0/24", daddr, 2, unix.NFT_CMP_EQ, []byte{10, 244}, yes},
		{"another network", "10.244.2.0/24", daddr, 3, unix.NFT_CMP_EQ, []byte{10, 244, 3}, no},
		{"another wider network", "10.244.2.0/24", daddr, 1, unix.NFT_CMP_EQ, []byte{192}, no},
		{"an address in it", "10.244.2.0/24", daddr, 4, unix.NFT_CMP_EQ, []byte{10, 244, 2, 9}, maybe},
		{"an address outside", "10.244.2.0/24", daddr, 4, unix.NFT_CMP_EQ, []byte{10, 244, 3, 9}, no},
		{"not an address in it", "10.244.2.0/24", daddr, 4, unix.NFT_CMP_NEQ, []byte{10, 244, 2, 9}, maybe},
		{"not an address outside", "10.244.2.0/24", daddr, 4, unix.NFT_CMP_NEQ, []byte{10, 244, 3, 9}, yes},
		{"not its own octets", "10.244.2.0/24", daddr, 3, unix.NFT_CMP_NEQ, []byte{10, 244, 2}, no},
		{"at most an address", "10.244.2.0/24", daddr, 4, unix.NFT_CMP_LTE, []byte{10, 244, 9, 9}, maybe},
		{"the last octet alone", "10.244.2.0/24", daddr + 3, 1, unix.NFT_CMP_EQ, []byte{9}, maybe},
		{"the last two octets", "10.244.2.0/24", daddr + 2, 2, unix.NFT_CMP_EQ, []byte{2, 9}, maybe},
		{"the last two octets, another third", "10.244.2.0/24", daddr + 2, 2, unix.NFT_CMP_EQ, []byte{3, 9}, no},
		{"bits that fill no octet", "10.244.32.0/20", daddr, 3, unix.NFT_CMP_EQ, []byte{10, 244, 33}, maybe},
		{"the octets before them", "10.244.32.0/20", daddr, 3, unix.NFT_CMP_EQ, []byte{10, 245, 33}, no},
		{"fewer bits than an octet", "128.0.0.0/1", daddr, 1, unix.NFT_CMP_EQ, []byte{10}, maybe},
		{"a whole address", "10.244.2.9/32", daddr, 4, unix.NFT_CMP_EQ, []byte{10, 244, 2, 9}, yes},
		{"a whole address, another", "10.244.2.9/32", daddr, 4, unix.NFT_CMP_EQ, []byte{10, 244, 2, 8}, no},
		{"the other end's address", "10.244.2.0/24", saddr, 4, unix.NFT_CMP_EQ, []byte{10, 244, 1, 1}, yes},
		{"IPv6, its own octets", "2001:db8:244:2::/64", daddr6, 8, unix.NFT_CMP_EQ, []byte{0x20, 1, 0x0d, 0xb8, 2, 0x44, 0, 2}, yes},
		{"IPv6, another", "2001:db8:244:2::/64", daddr6, 8, unix.NFT_CMP_EQ, []byte{0x20, 1, 0x0d, 0xb8, 2, 0x44, 0, 3}, no},
		{"IPv6, an address in it", "2001:db8:244:2::/64", daddr6, 16, unix.NFT_CMP_EQ, []byte{0x20, 1, 0x0d, 0xb8, 2, 0x44, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1}, maybe},
		{"IPv6, the other end's", "2001:db8:244:2::/64", saddr6, 2, unix.NFT_CMP_EQ, []byte{0x20, 1}, yes},
	} {
		network := netip.MustParsePrefix(c.network)
		own := netip.MustParseAddr("10.244.1.1")
		if network.Addr().Is6() {
			own = netip.MustParseAddr("2001:db8:244:1::1")
		}
		j := &judge{packets: Packets{From: []netip.Addr{own}, To: []netip.Addr{network.Addr()}, ToBits: network.Bits()}}
		if a := compare(j.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, c.offset, c.size), c.op, c.data); a != c.want {
			t.Errorf("%s: %s at %d, operator %d with %v, is %d; want %d", c.what, c.network, c.offset, c.op, c.data, a, c.want)
		}
		// The other way round the network is the source.
		j.packets = Packets{From: j.packets.To, FromBits: network.Bits(), To: j.packets.From}
		offset := map[uint32]uint32{saddr: daddr, daddr: saddr, daddr + 2: saddr + 2, daddr + 3: saddr + 3}[c.offset]
		if network.Addr().Is6() {
			offset = map[uint32]uint32{saddr6: daddr6, daddr6: saddr6}[c.offset]
		}
		if a := compare(j.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, c.size), c.op, c.data); a != c.want {
			t.Errorf("%s, as the source: %s at %d, operator %d with %v, is %d; want %d", c.what, c.network, offset, c.op, c.data, a, c.want)
		}
	}
}

// The result of a mask over octets that are not all known is unknown.
func TestPartialAddressesUnderMasks(t *testing.T) {
	mask := func(octets ...byte) []byte {
		return append([]byte{byte(4 + len(octets)), 0, unix.NFTA_DATA_VALUE, 0}, octets...)
	}
	one := []byte{0, 0, 0, 1}
	for bits, want := range map[int]answer{20: maybe, 32: no} {
		j := &judge{packets: Packets{From: []netip.Addr{netip.MustParseAddr("10.244.1.1")}, To: []netip.Addr{netip.MustParseAddr("10.244.32.0")}, ToBits: bits}, registers: map[uint32][][]byte{}}
		j.registers[1] = j.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 16, 4)
		j.bitwise(&expression{name: "bitwise", attributes: map[uint16][]byte{
			unix.NFTA_BITWISE_SREG: one, unix.NFTA_BITWISE_DREG: one,
			unix.NFTA_BITWISE_MASK: mask(255, 255, 240, 0), unix.NFTA_BITWISE_XOR: mask(0, 0, 0, 0),
		}})
		if a := compare(j.registers[1], unix.NFT_CMP_EQ, []byte{10, 244, 48, 0}); a != want {
			t.Errorf("of 10.244.32.0/%d, 10.244.48.0/20 is %d; want %d", bits, a, want)
		}
	}
}
