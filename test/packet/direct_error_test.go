package packet_test

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
)

// errorAbout is an ICMP error of a router on the clients' side about a backend's answer to a client's
// packet. quoted is the number of quoted bytes; 0 is as many as possible.
func errorAbout(in packet.Packet, kindOf [2]uint8, quoted int, edits ...packet.Edit) packet.Packet {
	speaker := addr("203.0.113.1")
	if in.IPv6 != nil {
		speaker = addr("2001:db8:77::1")
	}
	answer := in.Reverse().With(packet.TTL(61), packet.Data(make([]byte, 700)))
	if in.TCP != nil {
		answer.TCP.Flags = "A"
	}
	out := packet.NewError(speaker, kindOf[0], kindOf[1], 1300, answer, packet.MACs(router, ownA))
	if quoted > 0 && out.ICMP != nil {
		out.ICMP.Quote = out.ICMP.Quote[:quoted]
	} else if quoted > 0 {
		out.ICMPv6.Quote = out.ICMPv6.Quote[:quoted]
	}
	return out.With(edits...)
}

// quotedHeader is the size of the network header that an error quotes.
func (k kind) quotedHeader() int {
	if k.six {
		return 40
	}
	return 20
}

// TestErrorsToBackends: each type, whole and with 8 octets of the transport header, goes to the
// backend of the client's packets, in the same way.
func TestErrorsToBackends(t *testing.T) {
	t.Parallel()
	for _, mode := range modes() {
		w := newWorld(t, withMode(mode))
		for _, v := range directWays {
			for _, k := range kinds {
				in := k.toDirect(45000, v.port, "A")
				for _, kindOf := range errorTypes[k.six] {
					for _, quoted := range []int{0, k.quotedHeader() + 8, k.quotedHeader() + 15} {
						e := errorAbout(in, kindOf, quoted)
						table(t, w, []trial{{name: fmt.Sprintf("%s/%s/%s/%d.%d quoting %d", mode, v.name, k, kindOf[0], kindOf[1], quoted),
							in: e, end: leaves, notes: []string{"icmp_to_backend"}, want: v.expected(e, single(v.source()))}})
					}
				}
			}
		}
		w.emptyTables()
	}
}

// TestErrorsToNoBackend: errors without a backend pass to the host unchanged, or end with a reason.
func TestErrorsToNoBackend(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		kindOf, v := errorTypes[k.six][0], wayOf(model.ForwardingDSRIPIP, false)
		in := k.toDirect(45000, v.port, "A")
		about := func(in packet.Packet, edits ...packet.Edit) packet.Packet { return errorAbout(in, kindOf, 0, edits...) }
		other := k.pick(directRangeVIP4, directRangeVIP6)
		mismatch := about(in).With(func(p *packet.Packet) { // to one address, about another's packet
			if p.IPv4 != nil {
				p.IPv4.Destination = other
			} else {
				p.IPv6.Destination = other
			}
		})
		redirect := about(in).With(func(p *packet.Packet) {
			if p.ICMP != nil {
				p.ICMP.Type, p.ICMP.Code = 5, 1
			} else {
				p.ICMPv6.Type, p.ICMPv6.Code = 137, 0
				p.Payload, p.ICMPv6.Quote = p.ICMPv6.Quote, nil
			}
		})
		table(t, w, []trial{
			{name: k.String() + "/TTL 1", in: about(in, packet.TTL(1)), reason: "icmp"},
			{name: k.String() + "/no service", in: about(k.toDirect(45000, portNothing, "A")), reason: "icmp"},
			{name: k.String() + "/no flow of NAT", in: about(k.toDirect(45000, portNAT, "A")), reason: "icmp"},
			{name: k.String() + "/nobody", in: about(k.toDirect(45000, portNobody, "A")), reason: "icmp"},
			{name: k.String() + "/no next hop", in: about(k.toDirect(45000, portUnresolved, "A")), end: drops, reason: "unresolved"},
			{name: k.String() + "/another's packet", in: mismatch, reason: "icmp"},
			{name: k.String() + "/no error", in: redirect, reason: "icmp"},
		})
		for _, n := range []int{0, 8, 19, k.quotedHeader(), k.quotedHeader() + 7} {
			short := about(in).With(func(p *packet.Packet) {
				if p.ICMP != nil {
					p.ICMP.Quote = p.ICMP.Quote[:n]
				} else {
					p.ICMPv6.Quote = p.ICMPv6.Quote[:n]
				}
			})
			table(t, w, []trial{{name: fmt.Sprintf("%s/quote of %d bytes", k, n), in: short, reason: "icmp"}})
		}
	}
}

// TestErrorsFollowFlows: in every state of the slot, with and without an entry of the flow or the
// client, an error goes to the backend of the flow's packets. It leaves no trace: no entry, no new
// time in one.
func TestErrorsFollowFlows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	slots := []slotSpec{
		{state: reconcile.Settled, current: 'B'},
		{state: reconcile.Transition, current: 'B', previous: 'A'},
		{state: reconcile.Transition, current: 'B', previous: 'A', drains: true},
		{state: reconcile.Transition, current: 'B', previous: 'X'},
		{state: reconcile.Closing, current: 'B'},
		{state: reconcile.Marked, current: 'B'},
	}
	for _, affinityTime := range []time.Duration{0, affinity} {
		for _, tracking := range []model.Tracking{model.TrackingAuto, model.TrackingAlways, model.TrackingNone} {
			p := w.place(portMoving)
			for _, slot := range slots {
				for _, k := range kinds {
					for _, entry := range []rune{0, 'C'} {
						name := fmt.Sprintf("affinity %s/%s/%s/%s/entry %c", affinityTime, tracking, slot, k, max(entry, '-'))
						t.Run(name, func(t *testing.T) {
							p.on(t).errorFollows(k, slot, entry, tracking, affinityTime)
						})
					}
				}
			}
		}
	}
}

func (p *placed) errorFollows(k kind, slot slotSpec, entry rune, tracking model.Tracking, affinityTime time.Duration) {
	p.Helper()
	client := 1 + len(p.rememberedTable()) // a client without any entry
	in := p.packet(k, client, 40000, "A")
	p.change(func(r *reconcile.ServiceRecord) { r.Tracking, r.AffinityTimeout = model.TrackingAuto, affinityTime })
	if entry != 0 {
		p.remember(k, client, 40000, entry, "A")
		for key := range p.rememberedTable() {
			if key == flowOf(in) || key == clientOf(in) {
				p.age(key, 2)
			}
		}
	}
	p.change(func(r *reconcile.ServiceRecord) { r.Tracking = tracking })
	p.write(slot)
	before := p.rememberedTable()
	went := p.follow(errorAbout(in, errorTypes[k.six][0], k.quotedHeader()+8))
	if after := p.rememberedTable(); !maps.Equal(before, after) {
		p.Errorf("an error has changed what is remembered:\nbefore %v\nafter  %v", before, after)
	}
	if want := p.follow(in); went != want {
		p.Errorf("an error about the flow went to %q, and the flow to %q", went, want)
	}
}

// TestErrorsOfAFleet: another balancer with the same configuration, which has seen no packet of the
// flows, sends errors to the backends that have them.
func TestErrorsOfAFleet(t *testing.T) {
	t.Parallel()
	one, two := newWorld(t), newWorld(t)
	for _, k := range kinds {
		used := map[netip.Addr]bool{}
		for port := uint16(40000); port < 40040; port++ {
			in := k.toDirect(port, portMoving, "S")
			flow := one.send(armA, in)
			e := two.send(armA, errorAbout(in, errorTypes[k.six][0], 0))
			if flow.Destination() != e.Destination() {
				t.Fatalf("%s from port %d: the flow is with %s, the error went to %s", k, port, flow.Destination(), e.Destination())
			}
			used[flow.Destination()] = true
		}
		if len(used) != len(movingLetters) {
			t.Errorf("%s: 40 flows are with %v, so this proves little", k, used)
		}
	}
	two.emptyTables()
}
