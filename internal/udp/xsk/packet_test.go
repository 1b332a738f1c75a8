package xsk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
)

func udp4(t testing.TB, payload string, edits ...packet.Edit) []byte {
	t.Helper()
	return packet.Must(packet.NewUDP("198.51.100.7:40000", "192.0.2.10:5000", append(edits, packet.Data(payload))...))
}

func udp6(t testing.TB, payload string, edits ...packet.Edit) []byte {
	t.Helper()
	return packet.Must(packet.NewUDP("[2001:db8:c::7]:40000", "[2001:db8::10]:5000", append(edits, packet.Data(payload))...))
}

func TestParse(t *testing.T) {
	for _, c := range []struct {
		frame    []byte
		from, to string
		payload  string
	}{
		{udp4(t, "hello"), "198.51.100.7:40000", "192.0.2.10:5000", "hello"},
		{udp6(t, "hello"), "[2001:db8:c::7]:40000", "[2001:db8::10]:5000", "hello"},
		{udp4(t, ""), "198.51.100.7:40000", "192.0.2.10:5000", ""},
		{append(udp4(t, "padded"), 0, 0, 0), "198.51.100.7:40000", "192.0.2.10:5000", "padded"},
	} {
		p, err := Parse(c.frame)
		if err != nil {
			t.Errorf("%x: %v", c.frame, err)
			continue
		}
		if p.Source != netip.MustParseAddrPort(c.from) || p.Destination != netip.MustParseAddrPort(c.to) || string(p.Payload) != c.payload {
			t.Errorf("%s → %s: %q; want %s → %s: %q", p.Source, p.Destination, p.Payload, c.from, c.to, c.payload)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	edit := func(frame []byte, at int, value byte) []byte { frame[at] = value; return frame }
	for name, frame := range map[string][]byte{
		"TCP":              packet.Must(packet.NewTCP("198.51.100.7:40000", "192.0.2.10:5000", "S")),
		"options":          udp4(t, "hello", packet.IPv4Options(1, 1, 1, 0)),
		"VLAN":             udp4(t, "hello", packet.Tagged(7)),
		"a fragment":       edit(udp4(t, "hello"), 14+6, 0x20),
		"a later fragment": edit(udp4(t, "hello"), 14+7, 1),
		"IPv4's size":      edit(udp4(t, "hello"), 14+3, 255),
		"UDP's size":       edit(udp4(t, "hello"), 14+20+5, 7),
		"UDP's size over":  edit(udp4(t, "hello"), 14+20+5, 200),
		"IPv6's size":      edit(udp6(t, "hello"), 14+5, 255),
		"an IPv6 header":   edit(udp6(t, "hello"), 14+6, 0),
		"no UDP in IPv6":   edit(udp6(t, "hello"), 14+5, 4),
	} {
		if _, err := Parse(frame); !errors.Is(err, ErrNotUDP) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReply(t *testing.T) {
	partial := packet.TransportChecksum(packet.Checksum{Mode: packet.Partial})
	for name, frame := range map[string][]byte{
		"IPv4": udp4(t, "hello"), "IPv6": udp6(t, "hello!"), "IPv4 unfinished": udp4(t, "odd", partial), "IPv6 unfinished": udp6(t, "even", partial),
		"padded": append(udp4(t, ""), make([]byte, 18)...),
	} {
		asked, err := packet.Parse(frame)
		if err != nil {
			t.Fatal(err)
		}
		before := bytes.Clone(frame)
		size, err := reply(frame)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		answer, err := packet.Parse(frame[:size])
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if answer.Source() != asked.Destination() || answer.Destination() != asked.Source() ||
			answer.UDP.SourcePort != asked.UDP.DestinationPort || answer.UDP.DestinationPort != asked.UDP.SourcePort ||
			!bytes.Equal(answer.Ethernet.Source, asked.Ethernet.Destination) || !bytes.Equal(answer.Ethernet.Destination, asked.Ethernet.Source) {
			t.Errorf("%s: %v was answered by %v", name, asked, answer)
		}
		if answer.UDP.Checksum.Mode != packet.Correct || answer.IPv4 != nil && answer.IPv4.Checksum.Mode != packet.Correct {
			t.Errorf("%s: a wrong checksum: %v", name, answer)
		}
		payload := 14 + 28
		if answer.IPv6 != nil {
			payload = 14 + 48
		}
		if !bytes.Equal(frame[payload:size], before[payload:size]) {
			t.Errorf("%s: the payload has changed", name)
		}
	}
}

// FuzzParse: no frame reads beyond its bounds, a packet that is accepted is one, and its answer is as well.
func FuzzParse(f *testing.F) {
	f.Add(udp4(f, "hello"))
	f.Add(udp6(f, "hello"))
	f.Add(udp4(f, "hello", packet.IPv4Options(1, 1, 1, 0)))
	for _, frame := range [][]byte{udp4(f, "hello"), udp6(f, "hello")} { // UDP's length is less than IP's
		udp := len(frame) - len("hello") - udpSize
		binary.BigEndian.PutUint16(frame[udp+4:], udpSize+1)
		f.Add(frame)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		p, err := Parse(frame)
		if err != nil {
			return
		}
		if len(p.Payload)+28 > len(frame)-14 || p.Source.Addr().Is4() != (binary.BigEndian.Uint16(frame[12:]) == 0x800) {
			t.Fatalf("%+v of %d bytes", p, len(frame))
		}
		payload := bytes.Clone(p.Payload)
		size, err := reply(frame)
		if err != nil {
			t.Fatalf("a packet that was read was not answered: %v", err)
		}
		answer, err := Parse(frame[:size])
		if err != nil || answer.Source != p.Destination || answer.Destination != p.Source || !bytes.Equal(answer.Payload, payload) {
			t.Fatalf("%+v, %v", answer, err)
		}
	})
}
