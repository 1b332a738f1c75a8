package packet_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
)

// notes are reasons that are counted on a packet's way and do not end it.
var notes = map[string]bool{
	"flow_recycled": true, "handshake_evicted": true, "flows_full": true, "port_taken": true, "fib_fallback": true,
	"checksum_completed": true, "icmp_translated": true, "icmp_to_backend": true, "flow_moved": true, "not_remembered": true,
	"fragment_followed": true,
}

// answers are reasons with which an answer leaves in the packet's place.
var answers = map[string]bool{"arp_answered": true, "nd_answered": true, "echo_answered": true, "ttl_exceeded": true, "too_big_answered": true,
	"rejected_reset": true, "rejected_unreachable": true}

// passing are reasons with which a packet goes on to the host.
var passing = map[string]bool{
	"not_ip": true, "other_mac": true, "multicast": true, "not_ours": true, "no_service": true, "vlan": true, "fragment": true,
	"protocol": true, "icmp": true, "source_routed": true, "neighbour_other": true, "malformed": true,
}

// judge runs any frame and returns a result that must not happen, or "": an error, a verdict
// that is not ours, an end without a reason or with two, or one whose kind does not fit the
// verdict; and a packet that passes changed.
func (w *world) judge(arm string, frame []byte) string {
	w.Helper()
	must(w, w.d.Heartbeat())
	before := w.reasons()
	r := w.cpu.run(arm, bytes.Clone(frame))
	if r.err != nil {
		return r.err.Error()
	}
	end, err := outcomeOf(r.verdict)
	if err != nil {
		return err.Error()
	}
	moved := w.moved(before)
	ends, reason := uint64(0), ""
	for name, n := range moved {
		if !notes[name] {
			ends, reason = ends+n, name
		}
	}
	switch {
	case moved["internal"] > 0:
		return "a helper refused what must succeed (internal)"
	case ends > 1:
		return fmt.Sprintf("it %s with several reasons: %v", end, moved)
	case end == passes && !passing[reason], end == drops && (passing[reason] || answers[reason] || reason == ""),
		end == leaves && reason != "" && !answers[reason]:
		return fmt.Sprintf("it %s with the reason %q", end, reason)
	case end == passes && !bytes.Equal(frame, r.frame):
		return fmt.Sprintf("it passes, but not as it came:\n%s", differences(frame, r.frame))
	case end == leaves && reason == "" && len(r.frame) != len(frame):
		return judgeWrapped(frame, r.frame, moved["checksum_completed"] > 0)
	}
	return ""
}

// seeds are valid packets of every kind, whole.
func seeds() map[string][]byte {
	all := map[string][]byte{}
	add := func(name string, p packet.Packet) { all[name] = packet.Must(p) }
	for _, k := range kinds {
		syn := k.fromClient(40000, portNAT, "S", packet.Data("0123456789"))
		add(k.String(), syn)
		add(k.String()+", TTL 1", k.fromClient(40000, portNAT, "S", packet.TTL(1)))
		for _, v := range directWays {
			add(k.String()+", "+v.name, k.toDirect(40000, v.port, "S", packet.Data("0123456789")))
		}
		add(k.String()+", direct, TTL 1", k.toDirect(40000, directWays[2].port, "S", packet.TTL(1)))
		for i, part := range cut(k.toDirect(40000, directWays[2].port, "S", packet.Data(make([]byte, 100))), 1, 40, 80) {
			add(fmt.Sprintf("%s, direct, fragment %d", k, i), part)
		}
		add(k.String()+", direct, partial checksum", k.toDirect(40000, directWays[2].port, "S", packet.TransportChecksum(partial)))
		add(k.String()+", direct, longer headers", k.toDirect(40000, directWays[2].port, "S", longer, padded))
		add(k.String()+", direct, slot in transition", k.toDirect(40000, portMoving, "S", packet.Data("0123456789")))
		add(k.String()+", nat-destination", k.fromClient(40000, portDestination, "S", packet.Data("0123456789")))
		add(k.String()+", direct, error about it", errorAbout(k.toDirect(40000, directWays[2].port, "A"), errorTypes[k.six][0], 0))
		add(k.String()+", refused", k.fromClient(40000, portRefused, "S", packet.Data("0123456789")))
		add(k.String()+", direct, refused", k.toDirect(40000, portRefused, "S", longer))
		add(k.String()+", VLAN", syn.With(packet.Tagged(5)))
		for i, part := range cut(k.fromClient(40000, portNAT, "S", packet.Data(make([]byte, 100))), 1, 40, 80) {
			add(fmt.Sprintf("%s, fragment %d", k, i), part)
		}
		add(k.String()+", partial checksum", syn.With(packet.TransportChecksum(packet.Checksum{Mode: packet.Partial})))
		about := k.packet(netip.AddrPortFrom(k.pick(vip4, vip6), portNAT), netip.AddrPortFrom(k.pick(client4, client6), 40000), "A", packet.Data("quoted"))
		unreachable, code := uint8(3), uint8(4)
		if k.six {
			unreachable, code = 2, 0
		}
		add(k.String()+", error about it", packet.NewError(k.pick(addr("203.0.113.1"), addr("2001:db8:77::1")), unreachable, code, 1400, about, packet.MACs(router, ownA)))
	}
	add("TCP with options", kind{}.fromClient(40000, portNAT, "S", packet.TCPOptions(packet.MSS(1460)...), packet.IPv4Options(1, 1, 1, 1)))
	add("extension headers", kind{six: true}.fromClient(40000, portNAT, "S", packet.Extended(
		packet.Padding(packet.ProtocolHopByHop, 1), packet.Padding(packet.ProtocolDestinationOptions, 2),
		packet.Extension{Type: packet.ProtocolRouting, Body: make([]byte, 6)}, packet.Extension{Type: packet.ProtocolAH, Body: make([]byte, 22)})))
	add("echo", packet.NewEcho(client4, vip4, 1, 2, packet.MACs(router, ownA), packet.Data("ping")))
	add("echo over IPv6", packet.NewEcho(client6, vip6, 1, 2, packet.MACs(router, ownA), packet.Data("ping")))
	add("ARP request", packet.NewARPRequest(router, "192.0.2.254", "192.0.2.10"))
	add("neighbour solicitation", packet.NewNeighbourSolicitation(router, "2001:db8:1::fe", "2001:db8:1::10"))
	add("duplicate address detection", packet.NewNeighbourSolicitation(router, "::", "2001:db8:1::10", func(p *packet.Packet) { p.ICMPv6.Neighbour.LinkAddress = nil }))
	return all
}

// FuzzPacket sends packets with all kinds of changes through the loaded program.
func FuzzPacket(f *testing.F) {
	for _, frame := range seeds() {
		f.Add(frame, false)
		f.Add(frame, true)
	}
	w := newWorld(f)
	w.moving()
	f.Fuzz(func(t *testing.T, frame []byte, second bool) {
		if len(frame) < frameMin || len(frame) > 9000 {
			t.Skip("not a frame that the kernel takes")
		}
		arm := armA
		if second {
			arm = armC
			if len(frame) > 6 && bytes.Equal(frame[:6], ownA) {
				copy(frame, ownC)
			}
		}
		mine := *w
		mine.TB = t
		if fault := mine.judge(arm, frame); fault != "" {
			t.Errorf("%s\n%x", fault, frame)
		}
	})
}
