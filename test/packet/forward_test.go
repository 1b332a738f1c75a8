package packet_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
)

// way is one way of forwarding, with the fields of a packet after it.
type way struct {
	name         string
	port         uint16 // of the VIP
	four, six    netip.Addr
	from4, from6 netip.Addr // source addresses of NAT; invalid: the client's own
	arm          string
	own          net.HardwareAddr
	keepsPort    bool // the backend gets the port the client asked for
}

var ways = []way{
	{name: "nat, two arms", port: portNAT, four: backend4, six: backend6, from4: sources[0], from6: sources[2], arm: armC, own: ownC},
	{name: "nat, one arm", port: portSameArm, four: sameArm4, six: sameArm6, from4: sources[1], from6: sources[3], arm: armA, own: ownA},
	{name: "nat-destination, two arms", port: portDestination, four: backend4, six: backend6, arm: armC, own: ownC},
	{name: "nat-destination, one arm", port: portSameArmDest, four: sameArm4, six: sameArm6, arm: armA, own: ownA},
	{name: "nat, backend without port", port: portKept, four: keeper4, six: keeper6, from4: sources[0], from6: sources[2], arm: armC, own: ownC, keepsPort: true},
}

// backend is the destination of the way's packets.
func (v way) backend(k kind) netip.AddrPort {
	port := backendPort
	if v.keepsPort {
		port = v.port
	}
	return netip.AddrPortFrom(k.pick(v.four, v.six), port)
}

// expected is the frame that a client's packet becomes, given the frame that left.
func (v way) expected(w *world, k kind, in packet.Packet) func(packet.Packet) packet.Packet {
	return func(got packet.Packet) packet.Packet {
		source := sourceOf(in)
		if v.from4.IsValid() {
			port, _ := ports(got)
			source = netip.AddrPortFrom(k.pick(v.from4, v.from6), w.inPool(port))
		}
		return in.With(routed, between(source, v.backend(k)), packet.MACs(v.own, beMAC))
	}
}

// TestForward sends a packet, its answer, and more of both.
func TestForward(t *testing.T) {
	t.Parallel()
	for _, mode := range modes() {
		w := newWorld(t, withMode(mode))
		for _, v := range ways {
			for _, k := range kinds {
				t.Run(fmt.Sprintf("%s/%s/%s", mode, v.name, k), func(t *testing.T) { forward(t, w, v, k) })
			}
		}
	}
}

func forward(t *testing.T, w *world, v way, k kind) {
	const clientPort = 40000
	in := k.fromClient(clientPort, v.port, "S", packet.Data("hello"), packet.TTL(2))
	trial{in: in, end: leaves, want: v.expected(w, k, in)}.try(t, w)
	sent := w.send(armA, in) // the same flow again: a retransmission
	at := sourceOf(sent)

	answer := sent.Reverse().With(packet.MACs(beMAC, v.own), packet.TTL(64), packet.Data("world!"), flagged("SA"))
	trial{arm: v.arm, in: answer, end: leaves, want: func(packet.Packet) packet.Packet {
		return answer.With(routed, between(destinationOf(in), sourceOf(in)), packet.MACs(ownA, router))
	}}.try(t, w)

	for _, flags := range []string{"A", "PA", "A", "FA"} {
		more := k.fromClient(clientPort, v.port, flags, packet.Data("more "+flags), packet.TTL(200))
		trial{in: more, end: leaves, want: func(packet.Packet) packet.Packet {
			return more.With(routed, between(at, v.backend(k)), packet.MACs(v.own, beMAC))
		}}.try(t, w)
	}
}

// flagged sets a TCP packet's flags and leaves others as they are.
func flagged(flags string) packet.Edit {
	return func(p *packet.Packet) {
		if p.TCP != nil {
			p.TCP.Flags = flags
		}
	}
}

// TestNarrowestFrontendWins sends to ports that an exact port, a range and any all have.
func TestNarrowestFrontendWins(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		for port, want := range map[uint16]netip.Addr{
			0: k.pick(any4, any6), 1: k.pick(any4, any6), 400: k.pick(any4, any6), 401: k.pick(range4, range6),
			442: k.pick(range4, range6), 443: k.pick(exact4, exact6), 444: k.pick(range4, range6),
			498: k.pick(range4, range6), 499: k.pick(any4, any6), 65535: k.pick(any4, any6),
		} {
			in := k.packet(netip.AddrPortFrom(k.pick(client4, client6), 41000), netip.AddrPortFrom(k.pick(rangeVIP4, rangeVIP6), port), "S",
				packet.MACs(router, ownA))
			t.Run(fmt.Sprintf("%s/%d", k, port), func(t *testing.T) {
				trial{in: in, end: leaves, want: func(got packet.Packet) packet.Packet {
					chosen, _ := ports(got)
					return in.With(routed, packet.MACs(ownC, beMAC),
						between(netip.AddrPortFrom(k.pick(sources[0], sources[2]), w.inPool(chosen)), netip.AddrPortFrom(want, port)))
				}}.try(t, w)
			})
		}
	}
}

// TestNewFlowsThatCannotBe: each obstacle has a reason.
func TestNewFlowsThatCannotBe(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		table(t, w, []trial{
			{name: fmt.Sprintf("%s/no backend", k), in: k.fromClient(42000, portNobody, "S"), end: drops, reason: "no_backend"},
			{name: fmt.Sprintf("%s/no service", k), in: k.fromClient(42000, portNothing, "S"), end: passes, reason: "no_service"},
		})
		if !k.six {
			table(t, w, []trial{
				{name: fmt.Sprintf("%s/no next hop", k), in: k.fromClient(42000, portUnresolved, "S"), end: drops, reason: "unresolved"},
				{name: fmt.Sprintf("%s/no source address", k), in: k.fromClient(42000, portUnsourced, "S"), end: drops, reason: "no_source"},
			})
		}
	}
}

// TestBackendIsItsOwnClient: full NAT works for a backend that connects to its own VIP.
func TestBackendIsItsOwnClient(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		t.Run(k.String(), func(t *testing.T) {
			self := netip.AddrPortFrom(k.pick(backend4, backend6), 43000)
			vip := netip.AddrPortFrom(k.pick(vip4, vip6), portNAT)
			in := k.packet(self, vip, "S", packet.MACs(beMAC, ownC))
			out := w.send(armC, in)
			if diff := packet.Diff(ways[0].expected(w, k, in)(out), out); diff != "" {
				t.Fatalf("it left wrong:\n%s", diff)
			}
			answer := out.Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64), flagged("SA"))
			trial{arm: armC, in: answer, end: leaves, want: func(packet.Packet) packet.Packet {
				return answer.With(routed, between(vip, self), packet.MACs(ownC, beMAC))
			}}.try(t, w)
		})
	}
}

// TestClientPortIsTaken: with nat-destination the client keeps its port, unless another of its
// flows to the same backend has it; then both work, each with its own.
func TestClientPortIsTaken(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		t.Run(k.String(), func(t *testing.T) {
			first, second := k.fromClient(40000, portDestination, "S"), k.fromClient(40000, portDestinationToo, "S")
			one, two := w.send(armA, first), w.send(armA, second)
			if sourceOf(one) != sourceOf(first) {
				t.Errorf("the first flow went from %s to %s", sourceOf(first), sourceOf(one))
			}
			if at := sourceOf(two); at == sourceOf(one) || at.Addr() != second.Source() || w.inPool(at.Port()) != at.Port() {
				t.Errorf("the second flow has %s, the first %s", at, sourceOf(one))
			}
			for _, c := range []struct{ in, out packet.Packet }{{first, one}, {second, two}} {
				answer := c.out.Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64), flagged("SA"))
				trial{arm: armC, in: answer, end: leaves, want: func(packet.Packet) packet.Packet {
					return answer.With(routed, between(destinationOf(c.in), sourceOf(c.in)), packet.MACs(ownA, router))
				}}.try(t, w)
			}
		})
	}
}
