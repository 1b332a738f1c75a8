package packet_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/vishvananda/netlink"
)

// judgeWrapped compares a packet with the one inside the outer headers: they are equal, except
// for the TTL, the checksum that depends on it, and a checksum that was completed.
func judgeWrapped(in, out []byte, completed bool) string {
	outer, err := packet.Parse(out)
	if err != nil {
		return fmt.Sprintf("%d bytes came, %d left that are no packet: %v", len(in), len(out), err)
	}
	payload, protocol := outer.Payload, uint8(0)
	switch {
	case outer.UDP != nil && len(payload) > 4 && payload[0] == 0 && payload[2] == 0 && payload[3] == 0:
		protocol, payload = payload[1], payload[4:]
	case outer.UDP == nil && outer.IPv4 != nil:
		protocol = outer.IPv4.Protocol
	case outer.UDP == nil && outer.IPv6 != nil:
		protocol = outer.IPv6.NextHeader
	}
	if want := map[byte]uint8{4: protocolIPv4, 6: protocolIPv6}[in[14]>>4]; want != protocol {
		return fmt.Sprintf("%d bytes came, %d left, with the inner protocol %d, want %d", len(in), len(out), protocol, want)
	}
	want := append([]byte(nil), in[14:]...)
	if len(payload) > len(want) {
		return fmt.Sprintf("%d bytes came, %d left, of them %d inside", len(in), len(out), len(payload))
	}
	want = want[:len(payload)]
	if protocol == protocolIPv4 {
		want[8]--
		// RFC 1624, equation 3, for the word whose high octet is the TTL
		s := uint32(^binary.BigEndian.Uint16(want[10:])) + uint32(^uint16(0x0100))
		s = s&0xffff + s>>16
		binary.BigEndian.PutUint16(want[10:], ^uint16(s&0xffff+s>>16))
	} else {
		want[7]--
	}
	different := 0
	for i := range want {
		if want[i] != payload[i] {
			different++
		}
	}
	if different > 0 && (!completed || different > 2) {
		return fmt.Sprintf("it is not inside as it came:\n%s", differences(append(in[:14:14], want...), append(in[:14:14], payload...)))
	}
	return ""
}

// TestDirectEnds checks every reason with which a packet to a direct VIP can end.
func TestDirectEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		for _, v := range directWays {
			in := func(edits ...packet.Edit) packet.Packet { return k.toDirect(40000, v.port, "S", edits...) }
			name := v.name + "/" + k.String() + "/"
			long := packet.Extended(packet.Padding(packet.ProtocolDestinationOptions, 256))
			routing := packet.Extended(packet.Extension{Type: packet.ProtocolRouting, Body: append([]byte{4, 1, 0, 0, 0, 0}, make([]byte, 16)...)})
			table(t, w, []trial{
				{name: name + "VLAN", in: in(packet.Tagged(5)), reason: "vlan"},
				{name: name + "another station's", in: in(packet.MACs(router, foreign)), reason: "other_mac"},
			})
			if k.six {
				mapped := in(between(netip.MustParseAddrPort("[::ffff:192.0.2.7]:40000"), destinationOf(in())))
				table(t, w, []trial{
					{name: name + "too deep", in: in(long), end: drops, reason: "extension_limit"},
					{name: name + "source-routed", in: in(routing), reason: "source_routed"},
					{name: name + "mapped address", in: mapped, end: drops, reason: "mapped_address"},
				})
			}
		}
		table(t, w, []trial{
			{name: k.String() + "/no backend", in: k.toDirect(40000, portNobody, "S"), end: drops, reason: "no_backend"},
			{name: k.String() + "/no backend, later", in: k.toDirect(40000, portNobody, "A"), end: drops, reason: "no_backend"},
			{name: k.String() + "/no next hop", in: k.toDirect(40000, portUnresolved, "S"), end: drops, reason: "unresolved"},
			{name: k.String() + "/no service", in: k.toDirect(40000, portNothing, "S"), reason: "no_service"},
		})
		other := k.packet(sourceOf(k.toDirect(1, 1, "")), destinationOf(k.toDirect(1, directWays[0].port, "")), "S", packet.MACs(router, ownA))
		sctp := other.With(func(p *packet.Packet) {
			p.TCP, p.UDP, p.Payload = nil, nil, make([]byte, 12)
			if p.IPv4 != nil {
				p.IPv4.Protocol = 132
			} else {
				p.IPv6.NextHeader = 132
			}
		})
		table(t, w, []trial{{name: k.String() + "/SCTP", in: sctp, reason: "protocol"}})
	}
	w.emptyTables()
}

// TestDirectTTL: wrapping a packet is a hop; dsr-l2 is a switch.
func TestDirectTTL(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		w := newWorld(t) // a fresh program may send as many errors at once as one world needs
		for _, v := range directWays {
			for ttl := range uint8(3) {
				in := k.toDirect(45000, v.port, "S", packet.TTL(ttl), packet.Data("data"))
				c := trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}
				if ttl < 2 && v.forwarding.Encapsulates() {
					c.reason = "ttl_exceeded"
					c.want = func(packet.Packet) packet.Packet { return expired(k, hostVIP4, hostVIP6, in) }
				}
				t.Run(fmt.Sprintf("%s/%s/TTL %d", v.name, k, ttl), func(t *testing.T) { c.try(t, w) })
			}
		}
	}
}

// TestDirectBackendGone: the slot names a backend that was removed, or whose place another one
// has.
func TestDirectBackendGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	contents, err := w.d.Contents()
	must(t, err)
	for _, b := range contents.Backends {
		for _, v := range directWays {
			for _, a := range v.backends() {
				if b.Address == a {
					must(t, w.d.DeleteBackend(b.BackendRef))
				}
			}
		}
	}
	gone := func(name string) {
		for _, v := range directWays {
			for _, k := range kinds {
				table(t, w, []trial{{name: fmt.Sprintf("%s/%s/%s", name, v.name, k), in: k.toDirect(40000, v.port, "S"), end: drops, reason: "backend_gone"}})
			}
		}
	}
	gone("removed")
	for _, b := range contents.Backends {
		b.Generation++
		b.Address = keeper4
		must(t, w.d.PutBackend(b))
	}
	gone("replaced")
}

// TestDirectCut cuts packets with the true length in the IP header, so that the transport
// header is cut: such a packet is for us, and ends here.
func TestDirectCut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, v := range directWays {
		for _, k := range kinds {
			whole := packet.Must(k.toDirect(40000, v.port, "S"))
			l4 := 14 + 20
			if k.six {
				l4 = 14 + 40
			}
			for n := l4; n < len(whole); n++ {
				frame := append([]byte(nil), whole[:n]...)
				setLength(frame, n)
				t.Run(fmt.Sprintf("%s/%s/%d bytes of transport", v.name, k, n-l4), func(t *testing.T) {
					trial{raw: frame, end: drops, reason: "malformed_transport"}.try(t, w)
				})
			}
		}
	}
	w.emptyTables()
}

// TestDirectSilentDaemon: without a heartbeat the kernel's routes and neighbours lead to a
// backend, of either family and from clients of either.
func TestDirectSilentDaemon(t *testing.T) {
	t.Parallel()
	w := newWorld(t, withoutHeartbeat)
	moved, elsewhere := mac("02:00:00:00:00:bf"), "shunt-x"
	var err error
	w.cpu.do(func() {
		err = errors.Join(forwardingOnLoopback(),
			netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: elsewhere}, PeerName: elsewhere + "-peer"}), route(elsewhere, unresolved.AsSlice()),
			neighbour(elsewhere, unresolved.AsSlice(), moved))
		for _, v := range directWays {
			arm := armC
			if v.oneArm {
				arm = armA
			}
			for _, a := range v.backends() {
				err = errors.Join(err, neighbour(arm, a.AsSlice(), moved))
			}
		}
	})
	must(t, err)
	for _, v := range directWays {
		for _, k := range kinds {
			in := k.toDirect(40000, v.port, "S")
			before := w.reasons()
			got := w.send(armA, in)
			if diff := packet.Diff(v.expected(in, single(v.source()))(got).With(packet.MACs(v.own(), moved)), got); diff != "" {
				t.Errorf("%s, %s: it left wrong:\n%s", v.name, k, diff)
			}
			if n := w.moved(before)["fib_fallback"]; n != 1 {
				t.Errorf("%s, %s: the kernel was asked %d times, want 1", v.name, k, n)
			}
		}
	}
	for _, k := range kinds { // a way out of an interface that is not ours
		before := w.reasons()
		r := w.cpu.run(armA, packet.Must(k.toDirect(40000, portUnresolved, "S")))
		must(t, r.err)
		if moved := w.moved(before); len(moved) != 1 || moved["egress_unlisted"] != 1 {
			t.Errorf("%s: verdict %d, counted %v, want one egress_unlisted", k, r.verdict, moved)
		}
	}
}
