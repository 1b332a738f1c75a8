package wire_test

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/shunt-lb/shunt/internal/lb/wire"
)

var (
	ours     = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	theirs   = net.HardwareAddr{2, 0, 0, 0, 0, 9}
	everyone = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	nobody   = net.HardwareAddr{0, 0, 0, 0, 0, 0}

	our4, their4 = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.7")
	our6, their6 = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::12:abcd")
)

// Another implementation reads every ARP frame: its sender, its target, and the address in question.
func TestARPFrames(t *testing.T) {
	for _, c := range []struct {
		name   string
		build  func() ([]byte, error)
		to     net.HardwareAddr
		sender netip.Addr
		marked bool
	}{
		{"probe", func() ([]byte, error) { return wire.Probe(ours, their4) }, everyone, netip.IPv4Unspecified(), false},
		{"bid", func() ([]byte, error) { return wire.Bid(ours, theirs, their4) }, theirs, netip.IPv4Unspecified(), true},
		{"announcement", func() ([]byte, error) { return wire.Announcement(ours, their4) }, everyone, their4, true},
		{"question to all", func() ([]byte, error) { return wire.Question(ours, nil, our4, their4) }, everyone, our4, false},
		{"question to one", func() ([]byte, error) { return wire.Question(ours, theirs, our4, their4) }, theirs, our4, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			frame := build(t, c.build)
			if len(frame) != 60 {
				t.Errorf("%d bytes: the shortest Ethernet frame has 60 without its check sequence", len(frame))
			}
			read := decode(t, frame)
			checkMACs(t, read, c.to)
			arp, ok := read.Layer(layers.LayerTypeARP).(*layers.ARP)
			if !ok {
				t.Fatalf("no ARP in %s", read)
			}
			if arp.AddrType != layers.LinkTypeEthernet || arp.Protocol != layers.EthernetTypeIPv4 || arp.HwAddressSize != 6 || arp.ProtAddressSize != 4 {
				t.Errorf("not IPv4 over Ethernet: %+v", arp)
			}
			if want := map[bool]uint16{false: layers.ARPRequest, true: layers.ARPReply}[c.name == "bid"]; arp.Operation != want {
				t.Errorf("operation %d, want %d", arp.Operation, want)
			}
			sameBytes(t, "sender's hardware address", arp.SourceHwAddress, ours)
			sameBytes(t, "sender's address", arp.SourceProtAddress, c.sender.AsSlice())
			sameBytes(t, "target's hardware address", arp.DstHwAddress, nobody)
			sameBytes(t, "target's address", arp.DstProtAddress, their4.AsSlice())
			checkMark(t, frame, c.marked)
		})
	}
}

// Another implementation reads every frame of neighbour discovery, checksum included.
func TestNeighbourDiscoveryFrames(t *testing.T) {
	group := netip.MustParseAddr("ff02::1:ff12:abcd") // RFC 4291 section 2.7.1: the last 24 bits
	groupMAC := net.HardwareAddr{0x33, 0x33, 0xff, 0x12, 0xab, 0xcd}
	allNodes, allNodesMAC := netip.MustParseAddr("ff02::1"), net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
	source := layers.ICMPv6Option{Type: layers.ICMPv6OptSourceAddress, Data: ours}
	for _, c := range []struct {
		name      string
		build     func() ([]byte, error)
		to        net.HardwareAddr
		from, dst netip.Addr
		kind      uint8
		options   layers.ICMPv6Options
		marked    bool
	}{
		{"probe", func() ([]byte, error) { return wire.Probe(ours, their6) },
			groupMAC, netip.IPv6Unspecified(), group, layers.ICMPv6TypeNeighborSolicitation, nil, false},
		{"bid", func() ([]byte, error) { return wire.Bid(ours, theirs, their6) },
			theirs, netip.IPv6Unspecified(), group, layers.ICMPv6TypeNeighborSolicitation, layers.ICMPv6Options{{Type: 253, Data: []byte("shunt1")}}, true},
		{"announcement", func() ([]byte, error) { return wire.Announcement(ours, their6) },
			allNodesMAC, their6, allNodes, layers.ICMPv6TypeNeighborAdvertisement,
			layers.ICMPv6Options{{Type: layers.ICMPv6OptTargetAddress, Data: ours}, {Type: 253, Data: []byte("shunt1")}}, true},
		{"question to all", func() ([]byte, error) { return wire.Question(ours, nil, our6, their6) },
			groupMAC, our6, group, layers.ICMPv6TypeNeighborSolicitation, layers.ICMPv6Options{source}, false},
		{"question to one", func() ([]byte, error) { return wire.Question(ours, theirs, our6, their6) },
			theirs, our6, their6, layers.ICMPv6TypeNeighborSolicitation, layers.ICMPv6Options{source}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			frame := build(t, c.build)
			read := decode(t, frame)
			checkMACs(t, read, c.to)
			ip, ok := read.NetworkLayer().(*layers.IPv6)
			if !ok {
				t.Fatalf("no IPv6 in %s", read)
			}
			if ip.HopLimit != 255 {
				t.Errorf("hop limit %d: receivers ignore all but 255", ip.HopLimit)
			}
			sameBytes(t, "source", ip.SrcIP, c.from.AsSlice())
			sameBytes(t, "destination", ip.DstIP, c.dst.AsSlice())
			icmp, ok := read.Layer(layers.LayerTypeICMPv6).(*layers.ICMPv6)
			if !ok {
				t.Fatalf("no ICMPv6 in %s", read)
			}
			if code := icmp.TypeCode.Code(); (code == 0) == (c.name == "bid") {
				t.Errorf("the code is %d", code)
			}
			if err := icmp.SetNetworkLayerForChecksum(ip); err != nil {
				t.Fatal(err)
			}
			if err, wrong := read.VerifyChecksums(); err != nil || len(wrong) > 0 {
				t.Errorf("checksums: %v %v", err, wrong)
			}
			var target net.IP
			var options layers.ICMPv6Options
			var kind uint8
			for _, layer := range read.Layers() {
				switch l := layer.(type) {
				case *layers.ICMPv6NeighborSolicitation:
					kind, target, options = layers.ICMPv6TypeNeighborSolicitation, l.TargetAddress, l.Options
				case *layers.ICMPv6NeighborAdvertisement:
					kind, target, options = layers.ICMPv6TypeNeighborAdvertisement, l.TargetAddress, l.Options
					if l.Flags != 0x20 {
						t.Errorf("flags %#x: override alone is 0x20", l.Flags)
					}
				}
			}
			if kind != c.kind {
				t.Fatalf("type %d, want %d, in %s", kind, c.kind, read)
			}
			sameBytes(t, "target", target, their6.AsSlice())
			if len(options) != len(c.options) {
				t.Fatalf("options %v, want %v", options, c.options)
			}
			for i, o := range options {
				if o.Type != c.options[i].Type || !bytes.Equal(o.Data, c.options[i].Data) {
					t.Errorf("option %v, want %v", o, c.options[i])
				}
			}
			checkMark(t, frame, c.marked)
		})
	}
}

// A question about an address of the other family is an error.
func TestQuestionOfTwoFamilies(t *testing.T) {
	for _, source := range []netip.Addr{our4, our6} {
		target := their6
		if source.Is6() {
			target = their4
		}
		if frame, err := wire.Question(ours, nil, source, target); err == nil {
			t.Errorf("%s asks for %s: %x", source, target, frame)
		}
	}
}

func build(t *testing.T, build func() ([]byte, error)) []byte {
	t.Helper()
	frame, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return frame
}

func decode(t *testing.T, frame []byte) gopacket.Packet {
	t.Helper()
	read := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default)
	if failed := read.ErrorLayer(); failed != nil {
		t.Fatalf("%x: %v", frame, failed.Error())
	}
	return read
}

func checkMACs(t *testing.T, read gopacket.Packet, to net.HardwareAddr) {
	t.Helper()
	ethernet, ok := read.LinkLayer().(*layers.Ethernet)
	if !ok {
		t.Fatalf("no Ethernet in %s", read)
	}
	sameBytes(t, "Ethernet source", ethernet.SrcMAC, ours)
	sameBytes(t, "Ethernet destination", ethernet.DstMAC, to)
}

func checkMark(t *testing.T, frame []byte, marked bool) {
	t.Helper()
	if is := wire.IsMarked(frame); is != marked {
		t.Errorf("has shunt's mark: %t, want %t", is, marked)
	}
}

func sameBytes(t *testing.T, name string, is, want []byte) {
	t.Helper()
	if !bytes.Equal(is, want) {
		t.Errorf("%s %x, want %x", name, is, want)
	}
}
