package packet_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
)

var partial = packet.Checksum{Mode: packet.Partial}

// checksumOf is the transport checksum as it is on the wire.
func checksumOf(p packet.Packet) uint16 {
	frame := packet.Must(p)
	at := 14 + 20
	if p.IPv6 != nil {
		at = 14 + 40
	}
	if p.UDP != nil {
		at += 6
	} else {
		at += 16
	}
	return uint16(frame[at])<<8 | uint16(frame[at+1])
}

// sum adds in one's complement.
func sum(a, b uint16) uint16 {
	s := uint32(a) + uint32(b)
	return uint16(s + s>>16)
}

func word(n uint16) []byte { return []byte{byte(n >> 8), byte(n)} }

// TestPartialChecksums: a sender on veth leaves the checksum to hardware that does not exist.
// Native mode completes it; generic mode leaves that to the kernel, which still knows that it
// is open.
func TestPartialChecksums(t *testing.T) {
	t.Parallel()
	for _, mode := range []model.Attach{model.AttachNative, model.AttachGeneric} {
		w := newWorld(t, withMode(mode))
		w.setMTU(9000) // for the longest packet
		for _, k := range kinds {
			for i, size := range []int{0, 1, 2, 3, 511, 512, 513, 1400, 3000, 4001, 8000} {
				payload := bytes.Repeat([]byte{0xa5, 0x17, 0xff}, size)[:size]
				in := k.fromClient(uint16(40000+i), portNAT, "S", packet.Data(payload), packet.TransportChecksum(partial))
				expected := ways[0].expected(w, k, in)
				t.Run(fmt.Sprintf("%s/%s/%d bytes", mode, k, size), func(t *testing.T) {
					sent := w.send(armA, in) // with a port that the program chooses
					whole := packet.TransportChecksum(packet.Checksum{})
					if checksumOf(sent.With(whole)) == checksumOf(sent.With(packet.TransportChecksum(partial))) {
						return // 1 in 65,536: the complete and the partial one are the same
					}
					trial{in: in, end: leaves, notes: []string{"checksum_completed"}, want: func(got packet.Packet) packet.Packet {
						if mode == model.AttachGeneric {
							return expected(got)
						}
						return expected(got).With(packet.TransportChecksum(packet.Checksum{}))
					}}.try(t, w)
					answer := w.send(armA, in).Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64), packet.TransportChecksum(partial))
					trial{arm: armC, in: answer, end: leaves, notes: []string{"checksum_completed"}, want: func(packet.Packet) packet.Packet {
						back := answer.With(routed, between(destinationOf(in), sourceOf(in)), packet.MACs(ownA, router))
						if mode == model.AttachGeneric {
							return back
						}
						return back.With(packet.TransportChecksum(packet.Checksum{}))
					}}.try(t, w)
				})
			}
		}
	}
}

// TestCompleteChecksumThatLooksPartial: 1 in 65,536 complete ones does, and is valid as it is.
func TestCompleteChecksumThatLooksPartial(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		in := k.fromClient(40000, portNAT, "S", packet.Data("\x00\x00"))
		looks := checksumOf(in.With(packet.TransportChecksum(partial)))
		in = in.With(packet.Data(word(sum(^looks, checksumOf(in)))))
		if in := checksumOf(in); in != looks {
			t.Fatalf("%s: the packet was to have the checksum %#x, it has %#x", k, looks, in)
		}
		t.Run(k.String(), func(t *testing.T) {
			trial{in: in, end: leaves, want: func(got packet.Packet) packet.Packet {
				return ways[0].expected(w, k, in)(got).With(packet.TransportChecksum(packet.Checksum{}))
			}}.try(t, w)
		})
	}
}

// TestUDPZero: zero stands for no checksum (RFC 768), so it stays, and no checksum may become
// zero.
func TestUDPZero(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range []kind{{udp: true}, {udp: true, six: true}} { // over IPv6 tunnels have no checksum (RFC 6935)
		in := k.fromClient(40000, portNAT, "", packet.Data("data"), packet.TransportChecksum(packet.Checksum{Mode: packet.Zero}))
		t.Run(k.String()+": none stays none", func(t *testing.T) {
			trial{in: in, end: leaves, want: ways[0].expected(w, k, in)}.try(t, w)
		})
	}
	for _, k := range []kind{{udp: true}, {udp: true, six: true}} {
		for i, before := range []packet.Checksum{{}, partial} {
			if before == partial && !unfinishedInBytes() {
				continue
			}
			v := ways[2] // nat-destination: the packet that leaves is known beforehand
			in := k.fromClient(uint16(41000+i), v.port, "", packet.Data("\x00\x00"))
			in = in.With(packet.Data(word(checksumOf(v.expected(w, k, in)(packet.Packet{})))))
			want := v.expected(w, k, in)(packet.Packet{})
			if n := checksumOf(want); n != 0xffff {
				t.Fatalf("the packet was to leave with the checksum 0xffff, it would with %#x", n)
			}
			in = in.With(packet.TransportChecksum(before))
			var counted []string
			if before == partial {
				counted = []string{"checksum_completed"}
			}
			t.Run(fmt.Sprintf("%s, %s: a computed zero is 0xffff", k, before), func(t *testing.T) {
				trial{in: in, end: leaves, notes: counted, want: func(got packet.Packet) packet.Packet {
					if n := checksumOf(got); n != 0xffff {
						t.Errorf("the checksum is %#x, want 0xffff", n)
					}
					return want
				}}.try(t, w)
			})
		}
	}
}

// TestWrongChecksumStaysWrong: the receiver has to find the damage.
func TestWrongChecksumStaysWrong(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		in := k.fromClient(40000, portNAT, "S", packet.Data("data"))
		in = in.With(packet.TransportChecksum(packet.ChecksumValue(checksumOf(in) ^ 0x0100)))
		t.Run(k.String(), func(t *testing.T) {
			got := w.send(armA, in)
			checksum := packet.Checksum{}
			if k.udp {
				checksum = got.UDP.Checksum
			} else {
				checksum = got.TCP.Checksum
			}
			if checksum.Mode != packet.Wrong {
				t.Errorf("it left as %s, checksum %s", got, checksum)
			}
		})
	}
}
