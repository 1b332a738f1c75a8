package packet_test

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// deserted are services without a backend for new flows, by forwarding: one without any, and one
// whose backends have weight 0. They answer, unless silent.
func deserted(silent bool) (all []model.Service, ports map[string]uint16) {
	ports = map[string]uint16{}
	port := uint16(600)
	for _, forwarding := range []model.Forwarding{model.ForwardingNAT, model.ForwardingNATDestination, model.ForwardingDSRL2, model.ForwardingDSRIPIP, model.ForwardingDSRGUE} {
		for _, left := range []string{"none", "weight 0"} {
			s := model.Service{Name: fmt.Sprintf("deserted-%d", port), Forwarding: forwarding, Announce: model.AnnounceL2, Policy: model.Policy{Rejects: !silent}}
			vips := []netip.Addr{vip4, vip6}
			if forwarding.Direct() {
				vips = []netip.Addr{directVIP4, directVIP6}
			}
			for _, vip := range vips {
				for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
					s.Frontends = append(s.Frontends, model.Frontend{Address: vip, Ports: value.PortRange{First: port, Last: port}, Protocol: protocol})
				}
			}
			if left != "none" {
				for _, a := range []netip.Addr{keeper4, keeper6} {
					s.Backends = append(s.Backends, model.Backend{BackendAddress: model.BackendAddress{Address: a}})
				}
			}
			all = append(all, s)
			ports[fmt.Sprintf("%s, %s", forwarding, left)] = port
			port++
		}
	}
	return all, ports
}

// toDeserted is a packet to one of these services.
func (k kind) toDeserted(port uint16, flags string, edits ...packet.Edit) packet.Packet {
	if port >= 604 {
		return k.toDirect(40000, port, flags, edits...)
	}
	return k.fromClient(40000, port, flags, edits...)
}

// resetOf is the reset of RFC 9293, section 3.10.7.1, for a segment.
func resetOf(segment packet.Packet) packet.Packet {
	length := uint32(len(segment.Payload))
	for _, flag := range segment.TCP.Flags {
		if flag == 'S' || flag == 'F' {
			length++
		}
	}
	out := packet.NewTCP(destinationOf(segment), sourceOf(segment), "R",
		packet.MACs(segment.Ethernet.Destination, segment.Ethernet.Source), packet.Sequence(segment.TCP.Ack, 0),
		func(p *packet.Packet) { p.TCP.Window = 0 })
	for _, flag := range segment.TCP.Flags {
		if flag == 'A' {
			return out
		}
	}
	out.TCP.Flags = "RA"
	out.TCP.Seq, out.TCP.Ack = 0, segment.TCP.Seq+length
	return out
}

// unreachableOf is the "port unreachable" from a datagram's destination.
func unreachableOf(in packet.Packet) packet.Packet {
	kind, code := uint8(3), uint8(3)
	if in.IPv6 != nil {
		kind, code = 1, 4
	}
	in.Trailer = nil // it is no part of the datagram
	out := packet.NewError(in.Destination(), kind, code, 0, in, packet.MACs(in.Ethernet.Destination, in.Ethernet.Source))
	if out.IPv4 != nil {
		out.IPv4.TOS = 0xc0
	}
	return out
}

// rejection is the answer to a packet, and its reason.
func rejection(in packet.Packet) (reason string, want func(packet.Packet) packet.Packet) {
	if in.UDP != nil {
		return "rejected_unreachable", func(packet.Packet) packet.Packet { return unreachableOf(in) }
	}
	return "rejected_reset", func(packet.Packet) packet.Packet { return resetOf(in) }
}

// TestReject has every forwarding, family and protocol, and every shape of segment.
func TestReject(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	all, ports := deserted(false)
	w.apply(append(services(), all...))
	for name, port := range ports {
		for _, k := range kinds {
			shapes := []struct {
				name, flags string
				edits       []packet.Edit
			}{
				{"SYN", "S", []packet.Edit{packet.Sequence(1000, 0), packet.TCPOptions(packet.MSS(1460)...)}},
				{"data", "PA", []packet.Edit{packet.Sequence(0xfffffff0, 77), packet.Data(make([]byte, 1400))}},
				{"FIN with ACK", "FA", []packet.Edit{packet.Sequence(5, 0x80000001)}},
				{"no ACK", "SFP", []packet.Edit{packet.Sequence(0xffffffff, 9), packet.Data("odd")}},
				{"nothing", "", []packet.Edit{packet.Sequence(7, 8)}},
				{"SYN with ACK", "SA", []packet.Edit{packet.Sequence(1, 2)}},
			}
			if k.udp {
				shapes = shapes[:2]
				shapes[0].edits, shapes[1].edits = nil, shapes[1].edits[1:]
			}
			for _, s := range shapes {
				in := k.toDeserted(port, s.flags, s.edits...)
				reason, want := rejection(in)
				table(t, w, []trial{{name: fmt.Sprintf("%s/%s/%s", name, k, s.name), in: in, end: leaves, reason: reason, want: want}})
			}
		}
	}
	w.emptyTables()
	if left := w.flowTable(); len(left) != 0 {
		t.Errorf("%d entries are left of flows that nobody took", len(left))
	}
}

// TestRejectHeaders: the answer has plain headers, with any headers in front of the segment.
func TestRejectHeaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	all, ports := deserted(false)
	w.apply(append(services(), all...))
	for _, name := range []string{"nat, none", "dsr-ipip, none"} {
		for _, k := range kinds {
			more := packet.IPv4Options(1, 1, 1, 1, 1, 1, 1, 0)
			if k.six {
				more = packet.Extended(packet.Padding(packet.ProtocolHopByHop, 1), packet.Padding(packet.ProtocolDestinationOptions, 2))
			}
			in := k.toDeserted(ports[name], "S", packet.Data("data"), more)
			reason, want := rejection(in)
			padded := k.toDeserted(ports[name], "S", func(p *packet.Packet) { p.Trailer = make([]byte, 20) })
			reasonPadded, wantPadded := rejection(padded)
			table(t, w, []trial{
				{name: fmt.Sprintf("%s/%s/longer headers", name, k), in: in, end: leaves, reason: reason, want: want},
				{name: fmt.Sprintf("%s/%s/padding behind it", name, k), in: padded, end: leaves, reason: reasonPadded, want: wantPadded},
			})
		}
	}
}

// TestRejectIsSilent: no answer if the service is configured so, or if an answer is forbidden.
func TestRejectIsSilent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	all, ports := deserted(true)
	w.apply(append(services(), all...))
	for name, port := range ports {
		for _, k := range kinds {
			table(t, w, []trial{{name: fmt.Sprintf("silent/%s/%s", name, k), in: k.toDeserted(port, "S"), end: drops, reason: "no_backend"}})
		}
	}
	all, ports = deserted(false)
	w.apply(append(services(), all...))
	for _, six := range []bool{false, true} {
		k := kind{six: six}
		for _, flags := range []string{"R", "RA"} {
			table(t, w, []trial{
				{name: fmt.Sprintf("%s/%s with nat", k, flags), in: k.toDeserted(ports["nat, none"], flags), reason: "not_ours"},
				{name: fmt.Sprintf("%s/%s with dsr", k, flags), in: k.toDeserted(ports["dsr-gue, none"], flags), end: drops, reason: "no_backend"},
			})
		}
	}
}

// TestRejectPartialChecksums: in generic mode the kernel completes the checksum that the sender left
// open, and the sum of the pseudo-header has to be there; in native mode the answer is complete.
func TestRejectPartialChecksums(t *testing.T) {
	t.Parallel()
	for _, mode := range []model.Attach{model.AttachNative, model.AttachGeneric} {
		w := newWorld(t, withMode(mode))
		all, ports := deserted(false)
		w.apply(append(services(), all...))
		for _, k := range []kind{{}, {six: true}} {
			in := k.toDeserted(ports["nat, none"], "S", packet.TransportChecksum(packet.Checksum{Mode: packet.Partial}))
			want := resetOf(in)
			if mode == model.AttachGeneric {
				want.TCP.Checksum = packet.Checksum{Mode: packet.Partial}
			}
			// The sender of fragments has completed the checksum, so a fragment's only looks
			// unfinished.
			first := cut(k.toDeserted(ports["nat, none"], "S", pattern(600)), 1, 400)[0].With(packet.TransportChecksum(partial))
			table(t, w, []trial{
				{name: fmt.Sprintf("%s/%s", mode, k), in: in, end: leaves, reason: "rejected_reset",
					want: func(packet.Packet) packet.Packet { return want }},
				{name: fmt.Sprintf("%s/%s/fragment", mode, k), in: first, end: leaves, reason: "rejected_reset",
					want: func(packet.Packet) packet.Packet { return resetOf(first) }},
			})
		}
	}
}

// TestRejectIsLimited: floods are answered in part and counted; errors and resets have limits of
// their own.
func TestRejectIsLimited(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	all, ports := deserted(false)
	w.apply(append(services(), all...))
	for _, k := range kinds {
		in := packet.Must(k.toDeserted(ports["nat, none"], "S"))
		reason, sent, rate := "rejected_reset", uint64(30000), 10000.0
		if k.udp {
			reason, sent, rate = "rejected_unreachable", 1000, 100
		}
		before, began := w.reasons(), time.Now()
		w.cpu.do(func() {
			for range sent {
				_, _, _ = w.d.RunPacket(armA, in)
			}
		})
		// A full bucket, and its refill meanwhile; an emulated machine may not send more.
		allowed := uint64(rate * (1.1 + time.Since(began).Seconds()))
		moved := w.moved(before)
		if n := moved[reason] + moved["icmp_limited"]; n != sent || moved[reason] > allowed || moved[reason] == 0 && !k.six {
			t.Errorf("%s: %d packets were counted as %v; at most %d may be answered", k, sent, moved, allowed)
		}
		if sent <= allowed {
			t.Logf("%s: too slow to see the limit", k)
		}
	}
}

// TestRejectOfAFlow: a NAT flow whose last backend is removed ends at its next packet; in either
// direction no entry is left, and the client's next packets get the same answer.
func TestRejectOfAFlow(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.String(), func(t *testing.T) {
			w := newWorld(t)
			all, ports := deserted(false)
			port := ports["nat, none"]
			w.apply(append(services(), withBackends(all, port, 1)...))
			in := k.toDeserted(port, "S")
			sent := w.send(armA, in)
			w.send(armC, sent.Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64), flagged("SA")))
			data := in.With(flagged("A"), packet.Data("hello"))
			if !k.udp {
				data = data.With(packet.Sequence(100, 200))
			}
			w.send(armA, data)

			w.apply(append(services(), withBackends(all, port, 0)...))
			w.send(armA, data) // draining: the flow goes on
			other := k.toDeserted(port, "S", func(p *packet.Packet) {
				if k.udp {
					p.UDP.SourcePort++
				} else {
					p.TCP.SourcePort++
				}
			})
			reason, want := rejection(other)
			trial{in: other, end: leaves, reason: reason, want: want}.try(t, w)

			w.apply(append(services(), all...))
			reason, want = rejection(data)
			trial{in: data, end: leaves, reason: reason, notes: []string{"flow_moved"}, want: want}.try(t, w)
			trial{in: data, end: leaves, reason: reason, want: want}.try(t, w)
			if left := w.flowTable(); len(left) != 0 {
				t.Errorf("entries are left of a flow that nobody has: %v", left)
			}
		})
	}
}

// withBackends gives the service of a port backends of this weight, which no other service has.
func withBackends(all []model.Service, port, weight uint16) []model.Service {
	out := append([]model.Service(nil), all...)
	for i := range out {
		if out[i].Frontends[0].Ports.First == port {
			for _, a := range []netip.Addr{addr("10.0.0.77"), addr("2001:db8:2::77")} {
				out[i].Backends = append(out[i].Backends[:len(out[i].Backends):len(out[i].Backends)], model.Backend{BackendAddress: model.BackendAddress{Address: a}, Weight: weight})
			}
		}
	}
	return out
}

// TestRejectBesideDrainingFlows: with direct return, known flows of a backend that drains go on while
// new ones are answered; so do flows that are older than the change.
func TestRejectBesideDrainingFlows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.moving()
	p.change(func(r *reconcile.ServiceRecord) { r.Policy.Rejects = true })
	for _, six := range []bool{false, true} {
		k := kind{six: six}
		client := p.newClient()
		p.remember(k, client, 40000, 'A', "A")
		p.write(slotSpec{state: reconcile.Transition, previous: 'A', drains: true})
		if got := p.follow(p.packet(k, client, 40000, "A")); got != "A" {
			t.Errorf("%s: a remembered flow of the draining backend went to %q, want A", k, got)
		}
		if got := p.follow(p.packet(k, client, 40001, "A")); got != "A" {
			t.Errorf("%s: an older flow went to %q, want A", k, got)
		}
		in := p.packet(k, client, 40002, "S")
		reason, want := rejection(in)
		trial{in: in, end: leaves, reason: reason, want: want}.try(t, w)
	}
}

// TestErrorsAboutOpenChecksums: if the sk_buff says that the transport checksum is still open, it is
// also open in the error that quotes the packet. On the wire it has to be right.
func TestErrorsAboutOpenChecksums(t *testing.T) {
	t.Parallel()
	w := newWorld(t, withMode(model.AttachGeneric))
	for _, k := range []kind{{udp: true}, {udp: true, six: true}} {
		ip, family := 20, 4
		if k.six {
			ip, family = 40, 6
		}
		for _, open := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/open=%v", k, open), func(t *testing.T) {
				in := k.fromClient(40000, portRefused, "", packet.Data("odd"))
				if open {
					in = in.With(packet.TransportChecksum(partial))
				}
				r := w.cpu.run(armA, packet.Must(in))
				must(t, r.err)
				if end, err := outcomeOf(r.verdict); err != nil || end != leaves {
					t.Fatalf("it %s: %v; reasons so far: %v", end, err, w.reasons())
				}
				message := r.frame[14+ip:]
				quoted := message[8+ip:]
				if open { // as the kernel, or the card, does when the frame leaves
					binary.BigEndian.PutUint16(quoted[6:], ^sum16(0, quoted))
				}
				start := uint32(0)
				if family == 6 { // RFC 4443, 2.3: the pseudo-header
					start = uint32(sum16(uint32(len(message)+58), r.frame[14+8:14+40]))
				}
				if sum := sum16(start, message); sum != 0xffff {
					t.Errorf("the error's checksum is wrong on the wire: the sum is %#x", sum)
				}
			})
		}
	}
}

// sum16 is the folded sum of RFC 1071, from a start on.
func sum16(sum uint32, data []byte) uint16 {
	for i, b := range data {
		if i%2 == 0 {
			sum += uint32(b) << 8
		} else {
			sum += uint32(b)
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
