package packet

import (
	"bytes"
	"encoding/hex"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"pgregory.net/rapid"
)

// addresses compare by value; go-cmp must not look inside them.
var addresses = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

// samples has one packet of every kind that the constructors make.
func samples() map[string]Packet {
	const v4, v4to, v6, v6to = "198.51.100.7:40000", "192.0.2.10:80", "[2001:db8::7]:40000", "[2001:db8::10]:80"
	syn := TCP4(v4, v4to, "S", TCPOptions(MSS(1460)...))
	return map[string]Packet{
		"tcp4 syn":          syn,
		"tcp4 data":         TCP4(v4, v4to, "PA", Sequence(1, 2), Data("GET / HTTP/1.1\r\n\r\n")),
		"tcp4 odd length":   TCP4(v4, v4to, "A", Data("odd")),
		"tcp4 ip options":   TCP4(v4, v4to, "A", IPv4Options(7, 7, 4, 0, 0, 0, 0, 0)),
		"tcp4 partial":      TCP4(v4, v4to, "A", TransportChecksum(Checksum{Mode: Partial})),
		"tcp4 zero":         TCP4(v4, v4to, "A", TransportChecksum(Checksum{Mode: Zero})),
		"tcp4 wrong":        TCP4(v4, v4to, "A", TransportChecksum(ChecksumValue(0x1234))),
		"tcp4 tagged":       TCP4(v4, v4to, "S", Tagged(7), Tagged(4095)),
		"tcp4 padded":       TCP4(v4, v4to, "S", func(p *Packet) { p.Trailer = make([]byte, 6) }),
		"tcp6 syn":          TCP6(v6, v6to, "S"),
		"tcp6 partial":      TCP6(v6, v6to, "FA", TransportChecksum(Checksum{Mode: Partial}), Data("x")),
		"tcp6 extensions":   TCP6(v6, v6to, "S", Extended(Padding(0, 1), Padding(60, 40), Extension{Type: 51, Body: make([]byte, 10)})),
		"tcp6 first part":   TCP6(v6, v6to, "S", Fragmented(9, 0, true)),
		"tcp6 last part":    TCP6(v6, v6to, "S", Data("left over"), Fragmented(9, 1480, false)),
		"udp4":              UDP4(v4, v4to, Data("hello")),
		"udp4 no checksum":  UDP4(v4, v4to, TransportChecksum(Checksum{Mode: Zero}), Data("hello")),
		"udp4 partial":      UDP4(v4, v4to, TransportChecksum(Checksum{Mode: Partial})),
		"udp4 lying length": UDP4(v4, v4to, Data("hello"), func(p *Packet) { p.UDP.Length = 9 }),
		"udp4 no length":    UDP4(v4, v4to, Data("hello"), func(p *Packet) { p.UDP.Length = LengthZero }),
		"udp4 last part":    UDP4(v4, v4to, Data("left over"), Fragmented(9, 1480, false)),
		"udp6":              UDP6(v6, v6to, Data("hello")),
		"echo4":             NewEcho("198.51.100.7", "192.0.2.10", 1, 2, Data("ping")),
		"echo6":             NewEcho("2001:db8::7", "2001:db8::10", 1, 2, Data("ping")),
		"too big 4":         NewError("10.0.0.9", 3, 4, 1280, syn),
		"too big 6":         NewError("2001:db8::9", 2, 0, 1280, TCP6(v6, v6to, "A", Data(make([]byte, 2000)))),
		"arp request":       NewARPRequest(SourceMAC, "10.0.0.1", "10.0.0.2"),
		"arp reply":         NewARPReply(SourceMAC, "10.0.0.1", DestinationMAC, "10.0.0.2"),
		"solicitation":      NewNeighbourSolicitation(SourceMAC, "2001:db8::7", "2001:db8::10"),
		"advertisement":     NewNeighbourAdvertisement(SourceMAC, "2001:db8::10", DestinationMAC, "2001:db8::7"),
		"another protocol":  {Ethernet: Ethernet{Source: SourceMAC, Destination: DestinationMAC, Type: 0x88b5}, Payload: []byte{1}},
	}
}

func TestBuildThenParseGivesThePacketBack(t *testing.T) {
	for name, want := range samples() {
		b, err := Build(want)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got, err := Parse(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if d := Diff(want, got); d != "" {
			t.Errorf("%s:\n%s", name, d)
		}
	}
}

// A wrong length of an IP packet is a fault that Parse names.
func TestParseRefusesWhatLies(t *testing.T) {
	tcp4, tcp6 := Must(TCP4("10.0.0.1:1", "10.0.0.2:2", "S")), Must(TCP6("[2001:db8::1]:1", "[2001:db8::2]:2", "S"))
	edited := func(b []byte, at int, value byte) []byte {
		b = bytes.Clone(b)
		b[at] = value
		return b
	}
	for _, c := range []struct {
		name  string
		frame []byte
		want  string
	}{
		{"nothing", nil, "ethernet: 0 bytes are left, 14 are needed"},
		{"ethernet alone", tcp4[:14], "ipv4: 0 bytes"},
		{"half a tcp header", tcp4[:14+30], "ipv4: 30 bytes are left, 40 are needed"},
		{"ipv4 version 5", edited(tcp4, 14, 0x55), "version is 5"},
		{"ipv4 header of 16", edited(tcp4, 14, 0x44), "header length 16"},
		{"ipv4 header longer than the frame", edited(tcp4[:14+20], 14, 0x4f), "20 bytes are left, 60"},
		{"ipv4 total below header", edited(tcp4, 17, 19), "total length 19"},
		{"tcp header of 16", edited(tcp4, 14+20+12, 0x40), "header length 16"},
		{"tcp header past the end", edited(tcp4, 14+20+12, 0xf0), "tcp: 20 bytes are left, 60 are needed"},
		{"ipv6 length past the end", edited(tcp6, 14+5, 21), "ipv6: 60 bytes are left, 61"},
		{"ipv6 extension past the end", edited(edited(tcp6, 14+6, 60), 14+41, 200), "extension 60: 20 bytes are left, 1608"},
		{"vlan without tag", edited(tcp4[:14], 12, 0x81), "vlan: 0 bytes"},
		{"arp cut", append(bytes.Clone(tcp4[:12]), 8, 6, 0, 1, 8, 0, 6, 4, 0, 1), "arp: 8 bytes are left, 28"},
	} {
		_, err := Parse(c.frame)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got error %v, want %q in it", c.name, err, c.want)
		}
	}
}

func TestBuildRefusesNonsense(t *testing.T) {
	tcp := TCP4("10.0.0.1:1", "10.0.0.2:2", "S")
	for _, c := range []struct {
		edit Edit
		want string
	}{
		{func(p *Packet) { p.UDP = &UDP{} }, "more than one of TCP, UDP"},
		{func(p *Packet) { p.IPv6 = &IPv6{} }, "more than one of ARP, IPv4"},
		{func(p *Packet) { p.TCP.Flags = "SX" }, `'X' is not one of`},
		{func(p *Packet) { p.TCP.Options = []byte{1} }, "1 bytes of options"},
		{func(p *Packet) { p.IPv4.FragmentOffset = 7 }, "multiple of 8"},
		{func(p *Packet) { p.IPv4.Source = netip.IPv6Loopback() }, "both must be IPv4"},
		{func(p *Packet) { p.IPv4.Protocol = 17 }, "protocol is 17"},
		{func(p *Packet) { p.Ethernet.Type = TypeIPv6 }, "type 0x86dd"},
		{func(p *Packet) { p.Ethernet.Source = nil }, "must have 6 bytes"},
		{func(p *Packet) { p.VLANs = []VLAN{{ID: 4096}} }, "vlan id 4096"},
		{func(p *Packet) { p.Payload = make([]byte, 70000) }, "does not fit"},
	} {
		p := tcp.With(c.edit)
		if _, err := Build(p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got error %v, want %q in it", err, c.want)
		}
	}
}

// gopacket judges our serialization: it decodes our bytes, computes lengths and checksums by its
// own code, and must arrive at the same bytes.
func TestBuildAgreesWithGopacket(t *testing.T) {
	for name, p := range samples() {
		if strings.Contains(p.String(), "[") && p.IPv6 == nil || p.IPv6 != nil && strings.Contains(p.String(), "checksum") ||
			strings.Contains(name, "part") || name == "another protocol" || strings.Contains(name, "extensions") || len(p.Trailer) > 0 {
			continue // deliberately wrong, or of a form that gopacket does not write
		}
		ours := Must(p)
		decoded := gopacket.NewPacket(ours, layers.LayerTypeEthernet, gopacket.Default)
		if decoded.ErrorLayer() != nil {
			t.Errorf("%s: gopacket: %v", name, decoded.ErrorLayer().Error())
			continue
		}
		var parts []gopacket.SerializableLayer
		for _, l := range decoded.Layers() {
			part, ok := l.(gopacket.SerializableLayer)
			if !ok {
				part = gopacket.Payload(append(bytes.Clone(l.LayerContents()), l.LayerPayload()...))
			}
			if s, ok := l.(interface {
				SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
			}); ok {
				if err := s.SetNetworkLayerForChecksum(decoded.NetworkLayer()); err != nil {
					t.Fatal(err)
				}
			}
			parts = append(parts, part)
			if !ok {
				break
			}
		}
		buffer := gopacket.NewSerializeBuffer()
		options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
		if err := gopacket.SerializeLayers(buffer, options, parts...); err != nil {
			t.Errorf("%s: gopacket: %v", name, err)
			continue
		}
		padded := append(bytes.Clone(ours), make([]byte, max(0, 60-len(ours)))...) // as gopacket does
		if !bytes.Equal(padded, buffer.Bytes()) {
			t.Errorf("%s:\n ours     %x\n gopacket %x", name, ours, buffer.Bytes())
		}
	}
}

// The sums are added up word by word here, so that Build and Parse cannot be wrong together.
func TestKnownBytes(t *testing.T) {
	p := UDP4("10.0.0.1:1000", "10.0.0.2:2000", Data("ab"), func(p *Packet) { p.IPv4.ID = 1 })
	ip := []uint32{0x4500, 0x001e, 0x0001, 0x4000, 0x4011, 0x0a00, 0x0001, 0x0a00, 0x0002}
	udp := []uint32{0x0a00, 0x0001, 0x0a00, 0x0002, 0x0011, 0x000a, 1000, 2000, 0x000a, 0x6162}
	add := func(words []uint32) uint16 {
		var s uint32
		for _, w := range words {
			s += w
		}
		return ^uint16(s>>16 + s&0xffff)
	}
	b := Must(p)
	if got, want := hex.EncodeToString(b[24:26]), hex.EncodeToString([]byte{byte(add(ip) >> 8), byte(add(ip))}); got != want {
		t.Errorf("ip checksum %s, want %s", got, want)
	}
	if got, want := hex.EncodeToString(b[40:42]), hex.EncodeToString([]byte{byte(add(udp) >> 8), byte(add(udp))}); got != want {
		t.Errorf("udp checksum %s, want %s", got, want)
	}
	partial := Must(p.With(TransportChecksum(Checksum{Mode: Partial})))
	sum := ^add(udp[:6]) // the pseudo-header, folded and not inverted
	if got := uint16(partial[40])<<8 | uint16(partial[41]); got != sum {
		t.Errorf("partial checksum %04x, want %04x", got, sum)
	}
}

func TestUDPChecksumThatComputesToZeroIsWrittenAsOnes(t *testing.T) {
	p := UDP4("10.0.0.1:1000", "10.0.0.2:2000", Data([]byte{0, 0}))
	right := uint16(Must(p)[40])<<8 | uint16(Must(p)[41])
	p = p.With(Data([]byte{byte(right >> 8), byte(right)})) // adds the difference of the sum to all ones
	b := Must(p)
	if b[40] != 0xff || b[41] != 0xff {
		t.Fatalf("checksum %x, want ffff", b[40:42])
	}
	if got, err := Parse(b); err != nil || got.UDP.Checksum != (Checksum{}) {
		t.Errorf("parsed as %v (%v), want correct", got.UDP.Checksum, err)
	}
}

func TestOtherZeroIsRightForTCP(t *testing.T) {
	p := TCP4("10.0.0.1:1000", "10.0.0.2:2000", "A", Data([]byte{0, 0}))
	right := uint16(Must(p)[50])<<8 | uint16(Must(p)[51])
	p = p.With(Data([]byte{byte(right >> 8), byte(right)}))
	b := Must(p)
	if b[50] != 0 || b[51] != 0 {
		t.Fatalf("checksum %x, want 0000", b[50:52])
	}
	b[50], b[51] = 0xff, 0xff
	got, err := Parse(b)
	if err != nil || got.TCP.Checksum.Mode != Correct {
		t.Errorf("parsed as %v (%v), want correct", got.TCP.Checksum, err)
	}
	if d := Diff(p, got); d != "" {
		t.Errorf("differs:\n%s", d)
	}
	if !bytes.Equal(Must(got), b) {
		t.Error("Build does not write the other zero back")
	}
}

func TestDiffNamesFields(t *testing.T) {
	want := TCP4("198.51.100.7:40000", "192.0.2.10:80", "SA", TTL(63), Data("hello world"))
	got := want.With(TTL(64), Tagged(7), Data("hello there"), TransportChecksum(Checksum{Mode: Partial}), func(p *Packet) {
		p.TCP.DestinationPort = 8080
	})
	const expected = `ip.ttl: want 63, got 64
tcp.destination_port: want 80, got 8080
tcp.checksum: want correct, got partial
vlan[0]: want none, got vlan 7
payload: want 11 bytes, got 11; first difference at byte 6: want "world", got "there"
`
	if d := cmp.Diff(expected, Diff(want, got)); d != "" {
		t.Error(d)
	}
	if d := Diff(want, UDP6("[2001:db8::1]:1", "[2001:db8::2]:2")); !strings.Contains(d, "ip: want one, got none\nip6: want none, got one\ntcp: want one") {
		t.Error(d)
	}
	if d := Diff(want, want.With(func(p *Packet) { p.TCP.Flags = "AS" })); d != "" {
		t.Errorf("the order of flags is a difference:\n%s", d)
	}
	if d := DiffBytes(want, Must(want)[:40]); !strings.HasPrefix(d, "frame: parse frame of 40 bytes: ipv4:") {
		t.Error(d)
	}
}

func TestWithLeavesTheOriginalAlone(t *testing.T) {
	for name, p := range samples() {
		before := p.String()
		p.With(TTL(9), TransportChecksum(Checksum{Mode: Zero}), Tagged(1)).Reverse()
		if after := p.String(); after != before {
			t.Errorf("%s: was %s, is %s", name, before, after)
		}
	}
}

func TestString(t *testing.T) {
	for name, want := range map[string]string{
		"tcp4 partial":    "198.51.100.7:40000 > 192.0.2.10:80 tcp A seq 0 ack 0 win 64240 ttl 64 df len 0 [tcp checksum partial]",
		"tcp4 tagged":     "vlan 7 vlan 4095 198.51.100.7:40000 > 192.0.2.10:80 tcp S seq 0 ack 0 win 64240 ttl 64 df len 0",
		"tcp6 extensions": "[2001:db8::7]:40000 > [2001:db8::10]:80 tcp S seq 0 ack 0 win 64240 hlim 64 ext 0 ext 60 ext 51 len 0",
		"udp4 no length":  "198.51.100.7:40000 > 192.0.2.10:80 udp ttl 64 df len 5 [udp length 0]",
		"udp4 last part":  "198.51.100.7 > 192.0.2.10 protocol 17 ttl 64 fragment 9 at 1480 len 17",
		"too big 4": "10.0.0.9 > 198.51.100.7 icmp unreachable code 4 mtu 1280 about " +
			"(198.51.100.7:40000 > 192.0.2.10:80 tcp S seq 0 ack 0 win 64240 ttl 64 df len 0) ttl 64 df len 0",
		"echo6":        "2001:db8::7 > 2001:db8::10 icmp6 echo request id 1 seq 2 hlim 64 len 4",
		"arp request":  "arp who has 10.0.0.2, tell 10.0.0.1 (02:00:00:00:00:01)",
		"solicitation": "2001:db8::7 > ff02::1:ff00:10 icmp6 neighbour solicitation code 0 for 2001:db8::10 (02:00:00:00:00:01) hlim 255 len 0",
	} {
		if got := samples()[name].String(); got != want {
			t.Errorf("%s:\n got  %s\n want %s", name, got, want)
		}
	}
}

// Every cut of a quote is readable as far as it goes, and builds back to the same bytes.
func TestParseQuoteAtEveryLength(t *testing.T) {
	for name, p := range samples() {
		if p.IPv4 == nil && p.IPv6 == nil {
			continue
		}
		whole := Quote(p, 0)
		least := 40
		if p.IPv4 != nil {
			least = 20 + len(p.IPv4.Options)
		}
		for n := least; n <= len(whole); n++ {
			got, err := ParseQuote(whole[:n])
			if err != nil {
				t.Errorf("%s cut at %d: %v", name, n, err)
				break
			}
			back, err := BuildIP(got)
			if err != nil || !bytes.Equal(back, whole[:n]) {
				t.Errorf("%s cut at %d: built back as %x (%v), want %x", name, n, back, err, whole[:n])
				break
			}
			if p.TCP != nil && len(p.Trailer) == 0 && p.IPv4 != nil && n >= least+8 && got.TCP.SourcePort != p.TCP.SourcePort {
				t.Errorf("%s cut at %d: the ports are lost", name, n)
			}
		}
	}
}

func TestRoundTripOfRandomPackets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := randomPacket(t)
		b, err := Build(want)
		if err != nil {
			t.Fatalf("%s: %v", want, err)
		}
		got, err := Parse(b)
		if err != nil {
			t.Fatalf("%s: %v", want, err)
		}
		if d := cmp.Diff(want, got, addresses); d != "" {
			t.Fatalf("%s (-built +parsed):\n%s", want, d)
		}
		if d := Diff(want, got); d != "" {
			t.Fatalf("%s:\n%s", want, d)
		}
	})
}

// randomPacket draws a packet in the form Parse gives: derived fields set, no empty slices.
func randomPacket(t *rapid.T) Packet {
	some := func(name string, least, most, step int) []byte {
		n := rapid.IntRange(least/step, most/step).Draw(t, name+" units") * step
		if n == 0 {
			return nil
		}
		return rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, name)
	}
	mac := func(name string) net.HardwareAddr { return some(name, 6, 6, 6) }
	port, word, octet := rapid.Uint16(), rapid.Uint32(), rapid.Byte()
	p := Packet{Ethernet: Ethernet{Source: mac("source"), Destination: mac("destination")}}
	for range rapid.IntRange(0, 2).Draw(t, "tags") {
		p.VLANs = append(p.VLANs, VLAN{
			Type: rapid.SampledFrom([]uint16{TypeVLAN, TypeQinQ}).Draw(t, "tag type"),
			ID:   rapid.Uint16Range(0, 4095).Draw(t, "id"), Priority: rapid.Uint8Range(0, 7).Draw(t, "priority"),
			DropEligible: rapid.Bool().Draw(t, "drop eligible"),
		})
	}
	six := rapid.Bool().Draw(t, "ipv6")
	if six {
		p.IPv6 = &IPv6{
			Source: netip.AddrFrom16([16]byte(some("from", 16, 16, 16))), Destination: netip.AddrFrom16([16]byte(some("to", 16, 16, 16))),
			HopLimit: octet.Draw(t, "hop limit"), TrafficClass: octet.Draw(t, "class"), FlowLabel: word.Draw(t, "label") & 0xfffff,
		}
		for range rapid.IntRange(0, 3).Draw(t, "extensions") {
			kind := rapid.SampledFrom([]uint8{0, 43, 60, 135}).Draw(t, "extension")
			p.IPv6.Extensions = append(p.IPv6.Extensions, Extension{Type: kind, Body: some("body", 8, 64, 8)[2:]})
		}
	} else {
		p.IPv4 = &IPv4{
			Source: netip.AddrFrom4([4]byte(some("from", 4, 4, 4))), Destination: netip.AddrFrom4([4]byte(some("to", 4, 4, 4))),
			TTL: octet.Draw(t, "ttl"), TOS: octet.Draw(t, "tos"), ID: port.Draw(t, "ip id"),
			DF: rapid.Bool().Draw(t, "df"), Options: some("options", 0, 40, 4),
		}
	}
	p.Payload = some("payload", 0, 64, 1)
	switch rapid.SampledFrom([]string{"tcp", "udp", "icmp"}).Draw(t, "transport") {
	case "tcp":
		p.TCP = &TCP{
			SourcePort: port.Draw(t, "source port"), DestinationPort: port.Draw(t, "destination port"),
			Seq: word.Draw(t, "seq"), Ack: word.Draw(t, "ack"), Window: port.Draw(t, "window"), Urgent: port.Draw(t, "urgent"),
			Reserved: rapid.Uint8Range(0, 7).Draw(t, "reserved"), Options: some("tcp options", 0, 40, 4),
		}
		p.TCP.Flags = (&TCP{Flags: rapid.StringOfN(rapid.RuneFrom([]rune(flagLetters)), 0, 9, -1).Draw(t, "flags")}).sortedFlags()
	case "udp":
		p.UDP = &UDP{SourcePort: port.Draw(t, "source port"), DestinationPort: port.Draw(t, "destination port")}
	case "icmp":
		if six {
			p.ICMPv6 = &ICMPv6{Type: 128, Code: octet.Draw(t, "code"), Rest: word.Draw(t, "rest")}
		} else {
			p.ICMP = &ICMP{Type: 8, Code: octet.Draw(t, "code"), Rest: word.Draw(t, "rest")}
		}
	}
	return p.normal()
}

// FuzzParse: no input panics, and every frame that parses builds back to the very same bytes.
func FuzzParse(f *testing.F) {
	for _, p := range samples() {
		f.Add(Must(p))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Parse(b)
		_ = p.String()
		if d := Diff(p, p); d != "" {
			t.Fatalf("differs from itself:\n%s", d)
		}
		if err == nil {
			back, err := Build(p)
			if err != nil || !bytes.Equal(b, back) {
				t.Fatalf("%s\nin   %x\nback %x (%v)", p, b, back, err)
			}
		}
		q, err := ParseQuote(b)
		_ = q.String()
		if err == nil {
			back, err := BuildIP(q)
			if err != nil || !bytes.Equal(b, back) {
				t.Fatalf("quote %s\nin   %x\nback %x (%v)", q, b, back, err)
			}
		}
	})
}
