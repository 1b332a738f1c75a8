package packet_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
)

// segmentMost is the value of tcp_mss in these tests.
const segmentMost = 1300

var (
	sackPermitted = []byte{4, 2}
	timestamps    = []byte{8, 10, 1, 2, 3, 4, 5, 6, 7, 8}
	nothing       = []byte{1}
)

func optionsOf(parts ...[]byte) []byte { return slices.Concat(parts...) }

// segmentOptions are a SYN's options, before and after the bound.
var segmentOptions = []struct {
	name      string
	in, after []byte
}{
	{"larger", packet.MSS(1460), packet.MSS(segmentMost)},
	{"largest", packet.MSS(65535), packet.MSS(segmentMost)},
	{"equal", packet.MSS(segmentMost), packet.MSS(segmentMost)},
	{"smaller", packet.MSS(536), packet.MSS(536)},
	{"one more", packet.MSS(segmentMost + 1), packet.MSS(segmentMost)},
	{"after others", optionsOf(sackPermitted, timestamps, packet.MSS(1460)), optionsOf(sackPermitted, timestamps, packet.MSS(segmentMost))},
	{"at an odd place", optionsOf(nothing, packet.MSS(1460), nothing, nothing, nothing), optionsOf(nothing, packet.MSS(segmentMost), nothing, nothing, nothing)},
	{"at the end of the longest", optionsOf(bytes.Repeat(nothing, 36), packet.MSS(1460)), optionsOf(bytes.Repeat(nothing, 36), packet.MSS(segmentMost))},
	{"none", nil, nil},
	{"no such option", optionsOf(nothing, nothing, timestamps), optionsOf(nothing, nothing, timestamps)},
	{"behind the end", optionsOf([]byte{0, 0, 0, 0}, packet.MSS(1460)), optionsOf([]byte{0, 0, 0, 0}, packet.MSS(1460))},
	{"of another length", []byte{2, 3, 255, 0}, []byte{2, 3, 255, 0}},
	{"cut off", []byte{1, 1, 2, 4}, []byte{1, 1, 2, 4}},
	{"without its length", []byte{1, 1, 1, 2}, []byte{1, 1, 1, 2}},
	{"behind a length of nothing", optionsOf([]byte{30, 0, 1, 1}, packet.MSS(1460)), optionsOf([]byte{30, 0, 1, 1}, packet.MSS(1460))},
	{"behind a length beyond", optionsOf([]byte{30, 44, 1, 1}, packet.MSS(1460)), optionsOf([]byte{30, 44, 1, 1}, packet.MSS(1460))},
}

func boundSegments(s *model.Service) { s.Policy.TCPMSS = segmentMost }

// TestSegmentsAreBounded: a SYN's segment size is reduced to tcp_mss, in both directions under NAT,
// and towards the backend with direct return; nothing else in it changes.
func TestSegmentsAreBounded(t *testing.T) {
	t.Parallel()
	for _, mode := range []model.Attach{model.AttachNative, model.AttachGeneric} {
		w := newWorld(t, withMode(mode))
		all := services()
		for i := range all {
			boundSegments(&all[i])
		}
		w.apply(all)
		clientPort := uint16(40000)
		for _, six := range []bool{false, true} {
			k := kind{six: six}
			for _, o := range segmentOptions {
				for _, sum := range []packet.Checksum{{}, partial} {
					clientPort++
					t.Run(fmt.Sprintf("%s/%s/%s/%v", mode, k, o.name, sum.Mode), func(t *testing.T) {
						boundBothWays(t, w, k, clientPort, o.in, o.after, sum, mode == model.AttachGeneric)
					})
				}
			}
		}
	}
}

func boundBothWays(t *testing.T, w *world, k kind, clientPort uint16, in, after []byte, sum packet.Checksum, generic bool) {
	t.Helper()
	before, then := packet.TCPOptions(in...), packet.TCPOptions(after...)
	left := packet.TransportChecksum(packet.Checksum{}) // a packet that leaves is complete …
	var notes []string
	if sum == partial {
		notes = []string{"checksum_completed"}
		if generic { // … unless the kernel completes it
			left = packet.TransportChecksum(partial)
		}
	}
	v := ways[0]
	syn := k.fromClient(clientPort, v.port, "S", packet.Data("early"), packet.TransportChecksum(sum), before)
	trial{in: syn, end: leaves, notes: notes, want: v.expected(w, k, syn.With(then, left))}.try(t, w)

	sent := w.send(armA, syn)
	answer := sent.Reverse().With(packet.MACs(beMAC, v.own), packet.TTL(64), flagged("SA"), packet.TransportChecksum(sum), before)
	trial{arm: v.arm, in: answer, end: leaves, notes: notes, want: func(packet.Packet) packet.Packet {
		return answer.With(routed, between(destinationOf(syn), sourceOf(syn)), packet.MACs(ownA, router), then, left)
	}}.try(t, w)

	if generic {
		notes = nil // direct return leaves all of that to the kernel there
	}
	for _, d := range []directWay{wayOf(model.ForwardingDSRL2, false), wayOf(model.ForwardingDSRIPIP, true), wayOf(model.ForwardingDSRGUE, false)} {
		in := k.toDirect(clientPort, d.port, "S", packet.Data("early"), packet.TransportChecksum(sum), before)
		trial{in: in, end: leaves, notes: notes, want: d.expected(in.With(then, left), single(d.source()))}.try(t, w)
	}
}

// TestOnlySYNsAreBounded: tcp_mss does not change options of other packets, and without it no
// packet's.
func TestOnlySYNsAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v, k := ways[0], kind{}
	w.applyWith("nat", boundSegments)
	w.send(armA, k.fromClient(40000, v.port, "S", packet.TCPOptions(packet.MSS(1460)...)))
	in := k.fromClient(40000, v.port, "A", packet.TCPOptions(packet.MSS(1460)...))
	trial{in: in, end: leaves, want: v.expected(w, k, in)}.try(t, w)
	w.apply(services())
	in = k.fromClient(40001, v.port, "S", packet.TCPOptions(packet.MSS(1460)...))
	trial{in: in, end: leaves, want: v.expected(w, k, in)}.try(t, w)
}

// TestBoundSegmentsThatLookUnfinished: a complete checksum may have the value that a sender leaves to
// hardware. The bound must not take it for an open one.
func TestBoundSegmentsThatLookUnfinished(t *testing.T) {
	t.Parallel()
	for _, mode := range []model.Attach{model.AttachNative, model.AttachGeneric} {
		w := newWorld(t, withMode(mode))
		w.applyWith("nat", boundSegments)
		for _, k := range []kind{{}, {six: true}} {
			v := ways[0]
			make := func(payload uint16) packet.Packet {
				return k.fromClient(40000, v.port, "S", packet.Data(word(payload)), packet.TCPOptions(packet.MSS(1460)...))
			}
			// The payload for which the two sums are equal.
			found := -1
			for n := 0; n < 1<<16 && found < 0; n++ {
				p := make(uint16(n))
				if isComplete(p.With(packet.TransportChecksum(partial))) {
					found = n
				}
			}
			if found < 0 {
				t.Fatalf("%s: no payload makes a checksum look unfinished", k)
			}
			in := make(uint16(found))
			trial{in: in, end: leaves, want: v.expected(w, k, in.With(packet.TCPOptions(packet.MSS(segmentMost)...)))}.try(t, w)
		}
	}
}
