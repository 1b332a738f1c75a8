package packet_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"golang.org/x/sys/unix"
)

// cut makes fragments of a packet that end at the offsets in at (bytes behind the IP headers,
// multiples of 8), and one of the rest. The packet's extension headers stay in front of each
// fragment header.
func cut(p packet.Packet, id uint32, at ...int) []packet.Packet {
	p = p.With()
	number, headers := uint8(0), 20
	if p.IPv6 != nil {
		number, headers = p.IPv6.NextHeader, 40
		for _, e := range p.IPv6.Extensions {
			headers += 2 + len(e.Body)
		}
	} else {
		number, headers = p.IPv4.Protocol, 20+len(p.IPv4.Options)
	}
	upper := packet.Quote(p, 0)[headers:]
	var parts []packet.Packet
	for i, from := 0, 0; i <= len(at); i++ {
		to := len(upper)
		if i < len(at) {
			to = at[i]
		}
		part := p.With(func(p *packet.Packet) {
			p.TCP, p.UDP, p.Payload = nil, nil, upper[from:to]
			if p.IPv4 != nil {
				p.IPv4.Protocol = number
			} else {
				p.IPv6.NextHeader = number
			}
		}, packet.Fragmented(id, uint16(from), i < len(at)))
		parts = append(parts, reparsed(part))
		from = to
	}
	return parts
}

// reparsed is the packet as a reader of its bytes sees it, if it can be read.
func reparsed(p packet.Packet) packet.Packet {
	if read, err := packet.Parse(packet.Must(p)); err == nil {
		return read
	}
	return p
}

// pattern is data that differs from byte to byte.
func pattern(size int) packet.Edit {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i*7 + i>>8)
	}
	return packet.Data(data)
}

// follows is a trial of a later fragment that leaves as want.
func follows(arm string, in, want packet.Packet) trial {
	return trial{arm: arm, in: in, end: leaves, notes: []string{"fragment_followed"}, want: func(packet.Packet) packet.Packet { return want }}
}

// TestFragmentsThroughNAT: in both directions, the fragments that leave are the fragments of the
// packet that would have left whole: ports and checksum in the first, addresses in all.
func TestFragmentsThroughNAT(t *testing.T) {
	t.Parallel()
	for _, mode := range modes() {
		w := newWorld(t, withMode(mode))
		for _, v := range ways {
			for _, k := range kinds {
				t.Run(fmt.Sprintf("%s/%s/%s", mode, v.name, k), func(t *testing.T) {
					at := []int{1400, 2800}
					whole := k.fromClient(40000, v.port, "S", pattern(3001))
					parts := cut(whole, 0x12345678, at...)
					var left packet.Packet
					trial{in: parts[0], end: leaves, want: func(got packet.Packet) packet.Packet {
						left = v.expected(w, k, whole)(got)
						return cut(left, 0x12345678, at...)[0]
					}}.try(t, w)
					for _, i := range []int{2, 1, 1} { // in any order, and twice
						follows("", parts[i], cut(left, 0x12345678, at...)[i]).try(t, w)
					}
					answer := left.Reverse().With(packet.MACs(beMAC, v.own), packet.TTL(64), pattern(2222), flagged("SA"))
					parts = cut(answer, 99, at[0])
					back := cut(answer.With(routed, between(destinationOf(whole), sourceOf(whole)), packet.MACs(ownA, router)), 99, at[0])
					trial{arm: v.arm, in: parts[0], end: leaves, want: func(packet.Packet) packet.Packet { return back[0] }}.try(t, w)
					follows(v.arm, parts[1], back[1]).try(t, w)
				})
			}
		}
	}
}

// TestFragmentsToDirectBackends: each fragment is wrapped whole, all in the same way.
func TestFragmentsToDirectBackends(t *testing.T) {
	t.Parallel()
	for _, mode := range modes() {
		w := newWorld(t, withMode(mode))
		for _, v := range directWays {
			for _, k := range kinds {
				for _, edits := range [][]packet.Edit{{}, {longer}} {
					t.Run(fmt.Sprintf("%s/%s/%s/%d", mode, v.name, k, len(edits)), func(t *testing.T) {
						parts := cut(k.toDirect(40000, v.port, "S", append(edits, pattern(2500))...), 7, 1200, 2400)
						var outer []packet.Packet
						for i, order := range []int{0, 2, 1} {
							c := trial{in: parts[order], end: leaves, want: func(got packet.Packet) packet.Packet {
								outer = append(outer, got)
								return v.expected(parts[order], single(v.source()))(got)
							}}
							if i > 0 {
								c.notes = []string{"fragment_followed"}
							}
							c.try(t, w)
						}
						for _, o := range outer {
							if o.UDP != nil && outer[0].UDP != nil && o.UDP.SourcePort != outer[0].UDP.SourcePort ||
								v.forwarding.Encapsulates() && o.IPv6 != nil && o.IPv6.FlowLabel != outer[0].IPv6.FlowLabel {
								t.Errorf("fragments of one datagram may take different ways:\n%s\n%s", outer[0], o)
							}
						}
					})
				}
			}
		}
		w.emptyTables()
	}
}

// TestFragmentsInAnyOrder: a fragment that comes before its first one is dropped, also while
// other datagrams are under way, and one that comes after it is sent.
func TestFragmentsInAnyOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := wayOf(model.ForwardingDSRIPIP, false)
	early := func(in packet.Packet) trial { return trial{in: in, end: drops, reason: "fragment_early"} }
	for i, k := range kinds {
		t.Run(k.String(), func(t *testing.T) {
			id := uint32(10 * i) // in IPv6 datagrams of two protocols are told apart by this alone
			first := func(in packet.Packet) trial {
				return trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}
			}
			later := func(in packet.Packet) trial {
				return trial{in: in, end: leaves, notes: []string{"fragment_followed"}, want: v.expected(in, single(v.source()))}
			}
			one, two := cut(k.toDirect(41000, v.port, "S", pattern(3000)), id+1, 1000, 2000), cut(k.toDirect(41001, v.port, "S", pattern(3000)), id+2, 1000, 2000)
			for _, c := range []trial{early(one[2]), early(two[1]), first(one[0]), early(two[2]), later(one[2]), first(two[0]),
				later(one[1]), later(two[1]), later(two[2])} {
				c.try(t, w)
			}
			other := one[1].With(func(p *packet.Packet) { // another client with the same identification
				if p.IPv4 != nil {
					p.IPv4.Source = addr("198.51.100.8")
				} else {
					p.IPv6.Source = addr("2001:db8:9::8")
				}
			})
			early(other).try(t, w)
			nat := cut(k.fromClient(41000, portNAT, "S", pattern(3000)), id+3, 1000, 2000)
			early(nat[1]).try(t, w)
			w.send(armA, nat[0])
			w.send(armA, nat[1])
			w.send(armA, nat[2])
		})
	}
	// RFC 791: in IPv4 the protocol, too, tells datagrams apart.
	w.send(armA, cut(kind{}.toDirect(42000, v.port, "S", pattern(900)), 9, 400)[0])
	early(cut(kind{udp: true}.toDirect(42000, v.port, "", pattern(900)), 9, 400)[1]).try(t, w)
}

// TestFragmentsStayWithTheFirst: neither a change of the table in the middle of a datagram nor
// the end of its flow's entry parts its fragments.
func TestFragmentsStayWithTheFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.place(portMoving)
	for _, k := range kinds {
		p.write(slotSpec{state: reconcile.Settled, current: 'A'})
		parts := cut(p.packet(k, p.newClient(), 40000, "S", pattern(3000)), 5, 1000, 2000)
		if to := p.follow(parts[0]); to != "A" {
			t.Fatalf("%s: the first fragment went to %q", k, to)
		}
		p.write(slotSpec{state: reconcile.Settled, current: 'B'})
		if to := p.follow(parts[1]); to != "A" {
			t.Errorf("%s: the second fragment went to %q, and the first to A", k, to)
		}
		if to := p.follow(parts[0]); to != "B" { // the datagram again: now all of it goes to B
			t.Errorf("%s: the first fragment of another datagram went to %q, want B", k, to)
		}
		if to := p.follow(parts[2]); to != "B" {
			t.Errorf("%s: the third fragment went to %q, want B", k, to)
		}
	}
}

// TestFragmentNotesAge: a note is used for 30 seconds.
func TestFragmentNotesAge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	notes := w.pinned("sh_fragments")
	for _, k := range kinds {
		for _, in := range []packet.Packet{k.fromClient(43000, portNAT, "S", pattern(3000)), k.toDirect(43000, directWays[0].port, "S", pattern(3000))} {
			parts := cut(in, 11, 1000, 2000)
			w.send(armA, parts[0])
			w.ageNotes(notes, 29)
			w.send(armA, parts[1])
			w.ageNotes(notes, 2)
			trial{in: parts[2], end: drops, reason: "fragment_early"}.try(t, w)
			w.send(armA, parts[0])
			w.send(armA, parts[2])
		}
	}
}

// ageNotes makes all notes older.
func (w *world) ageNotes(notes *ebpf.Map, seconds uint32) {
	w.Helper()
	var k, v []byte
	var keys, values [][]byte
	all := notes.Iterate()
	for all.Next(&k, &v) {
		keys, values = append(keys, bytes.Clone(k)), append(values, bytes.Clone(v))
	}
	must(w, all.Err())
	var jiffy unix.Timespec // the resolution of the coarse clocks
	must(w, unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &jiffy))
	rate := uint32((int64(time.Second) + jiffy.Nano()/2) / jiffy.Nano())
	for i := range keys {
		seen := values[i][8:12] // the low half of struct flow's life
		binary.NativeEndian.PutUint32(seen, binary.NativeEndian.Uint32(seen)-seconds*rate)
		must(w, notes.Put(keys[i], values[i]))
	}
}

// TestFragmentsThatLie: a fragment that makes a judgement of flags or ports worthless is
// dropped.
func TestFragmentsThatLie(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	tiny := func(name string, in packet.Packet) trial {
		return trial{name: name, in: in, end: drops, reason: "fragment_tiny"}
	}
	for _, k := range kinds {
		for _, in := range []packet.Packet{k.fromClient(44000, portNAT, "S", pattern(300)), k.toDirect(44000, directWays[2].port, "S", pattern(300))} {
			name := func(what string) string { return fmt.Sprintf("%s/%s/%s", k, in.Destination(), what) }
			none := in.With(func(p *packet.Packet) { p.TCP, p.UDP, p.Payload = nil, nil, nil }, numbered(in), packet.Fragmented(1, 0, true))
			table(t, w, []trial{tiny(name("nothing"), none), tiny(name("8 bytes"), cut(in, 1, 8)[0])}[:2-asInt(k.udp)])
			if k.udp {
				short := in.With(func(p *packet.Packet) { p.UDP.Length = 7 })
				table(t, w, []trial{{name: name("length of 7"), in: cut(short, 1, 160)[0], end: drops, reason: "malformed_transport"}})
				w.send(armA, cut(in, 2, 8)[0]) // the header whole, and nothing else
				w.send(armA, cut(in, 2, 8)[1])
				continue
			}
			options := in.With(packet.TCPOptions(bytes.Repeat([]byte{1}, 40)...))
			w.send(armA, cut(in, 3, 24)[0])
			table(t, w, []trial{
				tiny(name("16 bytes"), cut(in, 1, 16)[0]),
				tiny(name("a cut header"), cut(options, 1, 56)[0]),
				tiny(name("over the first at 8"), cut(in, 3, 8)[1]),
				tiny(name("over the first at 16"), cut(in, 3, 16)[1]),
			})
			w.send(armA, cut(in, 3, 24)[1])
		}
	}
	k := kind{six: true}
	in := k.fromClient(44001, portNAT, "S", pattern(300))
	behind := in.With(packet.Fragmented(4, 0, true), packet.Extended(packet.Padding(packet.ProtocolDestinationOptions, 2)))
	w.send(armA, behind)
	cutChain := behind.With(func(p *packet.Packet) {
		p.TCP, p.Payload, p.IPv6.Extensions, p.IPv6.NextHeader = nil, []byte{6, 1, 1, 4, 0, 0, 0, 0}, p.IPv6.Extensions[:1], packet.ProtocolDestinationOptions
	})
	table(t, w, []trial{tiny("extension header cut", cutChain)})
}

func asInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// numbered gives a packet without transport header the protocol number of another.
func numbered(of packet.Packet) packet.Edit {
	return func(p *packet.Packet) {
		if p.IPv4 != nil {
			p.IPv4.Protocol = of.IPv4.Protocol
		} else {
			p.IPv6.NextHeader = of.IPv6.NextHeader
		}
	}
}

// TestFragmentsOfNobody: fragments without a service pass unchanged.
func TestFragmentsOfNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i, k := range kinds {
		id := uint32(10 * i)
		name := func(what string) string { return k.String() + "/" + what }
		passing := func(what string, in packet.Packet, reason string) trial {
			return trial{name: name(what), in: in, reason: reason}
		}
		stray := cut(k.fromClient(45000, portNAT, "S", pattern(300)), id+1, 160)
		unserved := cut(k.fromClient(45000, portNothing, "S", pattern(300)), id+2, 160)
		host := cut(k.packet(sourceOf(k.fromClient(45000, 1, "")), netip.AddrPortFrom(k.pick(hostVIP4, hostVIP6), portNothing),
			"S", packet.MACs(router, ownA), pattern(300)), id+3, 160)
		elsewhere := func(p packet.Packet) packet.Packet {
			return p.With(func(p *packet.Packet) {
				if p.IPv4 != nil {
					p.IPv4.Destination = addr("192.0.2.77")
				} else {
					p.IPv6.Destination = addr("2001:db8:1::77")
				}
			})
		}
		table(t, w, []trial{
			passing("first, elsewhere", elsewhere(stray[0]), "not_ours"), passing("later, elsewhere", elsewhere(stray[1]), "not_ours"),
			passing("tiny, elsewhere", elsewhere(cut(k.fromClient(45000, portNAT, "S", pattern(300)), 1, 8)[0]), "not_ours"),
			passing("first, no service", unserved[0], "no_service"), passing("later, no service", unserved[1], "no_service"),
			passing("later first, the host's own", host[1], "fragment"), passing("first, the host's own", host[0], "no_service"),
			passing("later, the host's own", host[1], "no_service"),
		})
	}
	echo := packet.NewEcho(client4, vip4, 1, 2, packet.MACs(router, ownA), pattern(300))
	echo6 := packet.NewEcho(client6, vip6, 1, 2, packet.MACs(router, ownA), pattern(300))
	for i, in := range []packet.Packet{echo, echo6} {
		trial{in: in.With(packet.Fragmented(1, 0, true)), reason: "fragment"}.try(t, w)
		trial{in: in.With(packet.Fragmented(1, 160, false)), reason: "fragment"}.try(t, w)
		if i == 1 { // RFC 6980: not even a whole one
			trial{in: in.With(packet.Fragmented(1, 0, false)), reason: "fragment"}.try(t, w)
		}
	}
	for _, protocol := range []uint8{47, 50, 59, 132, 255} { // GRE, ESP, none, SCTP, reserved
		for _, k := range []kind{{}, {six: true}} {
			other := k.fromClient(45000, portNAT, "S").With(func(p *packet.Packet) {
				p.TCP, p.Payload = nil, make([]byte, 64)
				if p.IPv4 != nil {
					p.IPv4.Protocol = protocol
				} else {
					p.IPv6.NextHeader = protocol
				}
			})
			for _, offset := range []uint16{0, 64} {
				name := fmt.Sprintf("%s/protocol %d at %d", k, protocol, offset)
				trial{name: name, in: other.With(packet.Fragmented(1, offset, true)), reason: "fragment"}.try(t, w)
			}
		}
	}
}

// TestAtomicFragments: a whole packet with a fragment header (RFC 6946) is treated like any
// other packet.
func TestAtomicFragments(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, udp := range []bool{false, true} {
		k := kind{udp: udp, six: true}
		atomic := packet.Fragmented(6, 0, false)
		for _, v := range ways {
			in := k.fromClient(46000, v.port, "S", pattern(100)).With(atomic)
			trial{in: in, end: leaves, want: v.expected(w, k, in)}.try(t, w)
			if !unfinishedInBytes() {
				continue
			}
			in = k.fromClient(46000, v.port, "S", pattern(100), packet.TransportChecksum(partial)).With(atomic)
			trial{in: in, end: leaves, notes: []string{"checksum_completed"}, want: v.expected(w, k, in.With(packet.TransportChecksum(packet.Checksum{})))}.try(t, w)
		}
		for _, v := range directWays {
			in := k.toDirect(46000, v.port, "S", pattern(100)).With(atomic)
			trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}.try(t, w)
		}
		trial{in: cut(k.fromClient(46000, portNAT, "S", pattern(100)), 6, 40)[1], end: drops, reason: "fragment_early"}.try(t, w)
	}
}

// TestFragmentsThatEndHere: an error is sent for a first fragment, and in IPv6 for each
// fragment.
func TestFragmentsThatEndHere(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		w := newWorld(t)
		for _, in := range []packet.Packet{k.fromClient(47000, portNAT, "S", pattern(3000)), k.toDirect(47000, wayOf(model.ForwardingDSRIPIP, false).port, "S", pattern(3000))} {
			short := cut(in.With(packet.TTL(1)), 21, 1400)
			trial{in: short[0], end: leaves, reason: "ttl_exceeded"}.try(t, w)
			trial{in: short[1], end: drops, reason: "fragment_early"}.try(t, w)
			w.send(armA, cut(in, 21, 1400)[0])
			if k.six {
				trial{in: short[1], end: leaves, reason: "ttl_exceeded"}.try(t, w)
			} else {
				trial{in: short[1], end: drops, reason: "icmp_limited"}.try(t, w)
			}
		}
		long := cut(k.toDirect(47001, wayOf(model.ForwardingDSRIPIP, false).port, "S", pattern(3000)), 22, 1448)
		if k.six { // 1496 bytes and an outer header
			trial{in: long[0], end: leaves, reason: "too_big_answered"}.try(t, w)
		} else {
			long = cut(k.toDirect(47001, wayOf(model.ForwardingDSRIPIP, false).port, "S", pattern(3000)), 22, 1472)
			trial{in: long[0], end: drops, reason: "too_big"}.try(t, w)
		}
		trial{in: long[1], end: drops, reason: "fragment_early"}.try(t, w)
	}
}

// TestFirstFragmentsChecksumThatLooksUnfinished: the sender of the fragments has completed the
// checksum. It is updated, and the program sums nothing of an incomplete datagram.
func TestFirstFragmentsChecksumThatLooksUnfinished(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		in := k.fromClient(48000, portNAT, "S", pattern(3000))
		first := cut(in, 31, 1400)[0]
		looks := checksumOf(first.With(packet.TransportChecksum(partial)))
		first = first.With(packet.TransportChecksum(packet.ChecksumValue(looks)))
		trial{in: first, end: leaves, want: func(got packet.Packet) packet.Packet {
			// It changes by the same amount as a right one.
			right, changed := checksumOf(in), checksumOf(ways[0].expected(w, k, in)(got))
			gained := sum(^looks, sum(^changed, right))
			return ways[0].expected(w, k, first)(got).With(packet.TransportChecksum(packet.ChecksumValue(^gained)))
		}}.try(t, w)
	}
}
