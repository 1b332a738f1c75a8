package packet_test

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
)

// frameMin is the size of the shortest frame that the kernel takes for a test run.
const frameMin = 14

// shortest is the smallest size of a given frame. If the kernel makes an sk_buff of it, an IP
// header has to be whole (bpf_prog_test_run_skb in net/bpf/test_run.c).
func shortest(frame []byte) int {
	const ip4, ip6 = 20, 40
	if *hook != "tc" {
		return frameMin
	}
	if binary.BigEndian.Uint16(frame[12:]) == 0x86dd {
		return frameMin + ip6
	}
	return frameMin + ip4
}

// TestTruncated cuts valid packets at each length: each part ends in exactly one reason.
func TestTruncated(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.moving()
	for name, frame := range seeds() {
		t.Run(name, func(t *testing.T) {
			for n := shortest(frame); n < len(frame); n++ {
				if fault := w.judge(armA, frame[:n]); fault != "" {
					t.Errorf("the first %d of %d bytes: %s", n, len(frame), fault)
				}
			}
		})
	}
}

// TestTruncatedAndAdjusted does the same with the true length in the IP header, so that the
// transport header is cut: such a packet is for us, and ends here.
func TestTruncatedAndAdjusted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		whole := packet.Must(k.fromClient(40000, portNAT, "S"))
		l4 := 14 + 20
		if k.six {
			l4 = 14 + 40
		}
		for n := l4; n < len(whole); n++ {
			frame := append([]byte(nil), whole[:n]...)
			setLength(frame, n)
			t.Run(fmt.Sprintf("%s/%d bytes of transport", k, n-l4), func(t *testing.T) {
				trial{raw: frame, end: drops, reason: "malformed_transport"}.try(t, w)
			})
		}
	}
}

// setLength sets the IP header's length to the end of the frame at n.
func setLength(frame []byte, n int) {
	if frame[14]>>4 == 4 {
		binary.BigEndian.PutUint16(frame[16:], uint16(n-14))
		return
	}
	binary.BigEndian.PutUint16(frame[18:], uint16(n-14-40))
}

// TestLies sends headers that contradict themselves or the frame.
func TestLies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const l4of4, l4of6 = 14 + 20, 14 + 40
	tcp4, tcp6 := kind{}.fromClient(40000, portNAT, "S"), kind{six: true}.fromClient(40000, portNAT, "S")
	udp4, udp6 := kind{udp: true}.fromClient(40000, portNAT, ""), kind{udp: true, six: true}.fromClient(40000, portNAT, "")
	edit := func(p packet.Packet, change func(b []byte)) []byte {
		b := packet.Must(p)
		change(b)
		return b
	}
	at := func(offset int, value byte) func([]byte) { return func(b []byte) { b[offset] = value } }
	at16 := func(offset int, value uint16) func([]byte) {
		return func(b []byte) { binary.BigEndian.PutUint16(b[offset:], value) }
	}
	extended := tcp6.With(packet.Extended(packet.Padding(packet.ProtocolHopByHop, 1)))
	const passesMalformed, dropsTransport = "malformed", "malformed_transport"
	for _, c := range []struct {
		name   string
		frame  []byte
		reason string
	}{
		{"IPv4 version 5", edit(tcp4, at(14, 0x55)), passesMalformed},
		{"IPv4 header of 16 bytes", edit(tcp4, at(14, 0x44)), passesMalformed},
		{"IPv4 header beyond the packet", edit(udp4, at(14, 0x4f)), passesMalformed},
		{"IPv4 total length 0", edit(tcp4, at16(16, 0)), passesMalformed},
		{"IPv4 total length below the header", edit(tcp4, at16(16, 19)), passesMalformed},
		{"IPv4 total length beyond the frame", edit(tcp4, at16(16, 41)), passesMalformed},
		{"IPv4 total length 65535", edit(tcp4, at16(16, 65535)), passesMalformed},
		{"IPv4 ends with its header", edit(tcp4, at16(16, 20)), dropsTransport},
		{"IPv6 version 4", edit(tcp6, at(14, 0x40)), passesMalformed},
		{"IPv6 payload beyond the frame", edit(tcp6, at16(18, 21)), passesMalformed},
		{"IPv6 payload 65535", edit(tcp6, at16(18, 65535)), passesMalformed},
		{"IPv6 payload 0 (jumbogram)", edit(tcp6, at16(18, 0)), dropsTransport},
		{"extension beyond the packet", edit(extended, at(l4of6+1, 255)), passesMalformed},
		{"extension one unit beyond", edit(extended, at(l4of6+1, 3)), passesMalformed},
		{"TCP data offset 0, IPv4", edit(tcp4, at(l4of4+12, 0x00)), dropsTransport},
		{"TCP data offset 16 bytes, IPv4", edit(tcp4, at(l4of4+12, 0x40)), dropsTransport},
		{"TCP data offset beyond, IPv4", edit(tcp4, at(l4of4+12, 0xf0)), dropsTransport},
		{"TCP data offset beyond, IPv6", edit(tcp6, at(l4of6+12, 0x60)), dropsTransport},
		{"UDP length 0, IPv4", edit(udp4, at16(l4of4+4, 0)), dropsTransport},
		{"UDP length 7, IPv4", edit(udp4, at16(l4of4+4, 7)), dropsTransport},
		{"UDP length beyond, IPv4", edit(udp4, at16(l4of4+4, 9)), dropsTransport},
		{"UDP length 0, IPv6", edit(udp6, at16(l4of6+4, 0)), dropsTransport},
		{"UDP length beyond, IPv6", edit(udp6, at16(l4of6+4, 9)), dropsTransport},
	} {
		t.Run(c.name, func(t *testing.T) {
			end := passes
			if c.reason == dropsTransport {
				end = drops
			}
			trial{raw: c.frame, end: end, reason: c.reason}.try(t, w)
		})
	}
}

// TestDamagedForOthers: a packet without a service passes, damaged or not.
func TestDamagedForOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		in := k.fromClient(40000, portNAT, "S")
		in = in.With(between(sourceOf(in), sourceOf(in)))
		whole := packet.Must(in)
		l4 := 14 + 20
		if k.six {
			l4 = 14 + 40
		}
		for n := l4; n < len(whole); n++ {
			frame := append([]byte(nil), whole[:n]...)
			setLength(frame, n)
			t.Run(fmt.Sprintf("%s/%d", k, n-l4), func(t *testing.T) {
				trial{raw: frame, reason: "not_ours"}.try(t, w)
			})
		}
	}
}

// TestEthernetPadding: bytes behind the IP packet belong to no header, and stay.
func TestEthernetPadding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i, k := range kinds {
		in := k.fromClient(uint16(40000+i), portNAT, "S", func(p *packet.Packet) { p.Trailer = []byte{1, 2, 3, 4, 5, 6} })
		t.Run(k.String(), func(t *testing.T) {
			trial{in: in, end: leaves, want: ways[0].expected(w, k, in)}.try(t, w)
		})
	}
}
