package packet_test

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
)

const (
	guePort          = 6080 // IANA "gue"
	gueSourceFirst   = 0xc000
	protocolIPv4     = 4  // IANA: IPv4 encapsulation
	protocolIPv6     = 41 // IANA: IPv6 encapsulation
	tunnelTTL        = 64
	outerIP4, outerG = 20, 12 // sizes of an outer IPv4 header, and of UDP with GUE
	outerIP6         = 40
)

// directWay is one way of handing a client's packet to a backend that answers it directly.
type directWay struct {
	name       string
	port       uint16 // of the VIP
	forwarding model.Forwarding
	six        bool // the outer header is IPv6; of no meaning for dsr-l2
	oneArm     bool
}

// directWays are every mode, over either family, out of either interface.
var directWays = func() (ways []directWay) {
	port := uint16(8000)
	add := func(forwarding model.Forwarding, six bool, name string) {
		for _, oneArm := range []bool{false, true} {
			v := directWay{name: name + "-two-arms", port: port, forwarding: forwarding, six: six, oneArm: oneArm}
			if oneArm {
				v.name = name + "-one-arm"
			}
			ways = append(ways, v)
			port++
		}
	}
	add(model.ForwardingDSRL2, false, "dsr-l2")
	add(model.ForwardingDSRIPIP, false, "dsr-ipip-over-4")
	add(model.ForwardingDSRIPIP, true, "dsr-ipip-over-6")
	add(model.ForwardingDSRGUE, false, "dsr-gue-over-4")
	add(model.ForwardingDSRGUE, true, "dsr-gue-over-6")
	return ways
}()

// wayOf finds the way with two arms.
func wayOf(forwarding model.Forwarding, six bool) directWay {
	for _, v := range directWays {
		if v.forwarding == forwarding && v.six == six && !v.oneArm {
			return v
		}
	}
	panic(fmt.Sprintf("there is no service with %s", forwarding))
}

// backends are the backends of the way's service. One of a single family serves clients of both.
func (v directWay) backends() []netip.Addr {
	four, six := addr("10.0.0.30"), addr("2001:db8:2::30")
	if v.oneArm {
		four, six = addr("192.0.2.30"), addr("2001:db8:1::30")
	}
	switch {
	case v.forwarding == model.ForwardingDSRL2:
		return []netip.Addr{four, six}
	case v.six:
		return []netip.Addr{six}
	}
	return []netip.Addr{four}
}

func (v directWay) own() net.HardwareAddr {
	if v.oneArm {
		return ownA
	}
	return ownC
}

// source is the address of the interface towards the backend.
func (v directWay) source() netip.Addr {
	return map[[2]bool]netip.Addr{{false, false}: addr("10.0.0.1"), {false, true}: addr("2001:db8:2::1"),
		{true, false}: addr("192.0.2.1"), {true, true}: addr("2001:db8:1::1")}[[2]bool{v.oneArm, v.six}]
}

// outerSize is the number of bytes that the outer headers add.
func (v directWay) outerSize() int {
	size := 0
	if v.forwarding.Encapsulates() {
		size = outerIP4
		if v.six {
			size = outerIP6
		}
	}
	if v.forwarding == model.ForwardingDSRGUE {
		size += outerG
	}
	return size
}

// toDirect is a client's packet to a port of a VIP with direct return.
func (k kind) toDirect(clientPort, vipPort uint16, flags string, edits ...packet.Edit) packet.Packet {
	return k.packet(netip.AddrPortFrom(k.pick(client4, client6), clientPort), netip.AddrPortFrom(k.pick(directVIP4, directVIP6), vipPort), flags,
		append([]packet.Edit{packet.MACs(router, ownA)}, edits...)...)
}

// expected is the frame that a client's packet becomes, given the frame that left: the outer
// header's source, its entropy and its identification are the program's choice, within limits.
func (v directWay) expected(in packet.Packet, sources netip.Prefix, edits ...packet.Edit) func(packet.Packet) packet.Packet {
	return func(got packet.Packet) packet.Packet {
		if v.forwarding == model.ForwardingDSRL2 {
			return in.With(packet.MACs(v.own(), beMAC)).With(edits...)
		}
		source := sources.Addr()
		if sources.Contains(got.Source()) {
			source = got.Source()
		}
		inner := in.With(routed, func(p *packet.Packet) { p.Trailer = nil }).With(edits...)
		out := packet.Packet{Ethernet: packet.Ethernet{Source: v.own(), Destination: beMAC}, Payload: packet.Quote(inner, 0), Trailer: in.Trailer}
		tos, protocol := uint8(0), uint8(protocolIPv4)
		if in.IPv4 != nil {
			tos = in.IPv4.TOS
		} else {
			tos, protocol = in.IPv6.TrafficClass, protocolIPv6
		}
		if v.forwarding == model.ForwardingDSRGUE {
			out.UDP = &packet.UDP{SourcePort: gueSourceFirst, DestinationPort: guePort, Checksum: packet.Checksum{Mode: packet.Zero}}
			if got.UDP != nil && got.UDP.SourcePort >= gueSourceFirst {
				out.UDP.SourcePort = got.UDP.SourcePort
			}
			out.Payload = append([]byte{0, protocol, 0, 0}, out.Payload...)
			protocol = packet.ProtocolUDP
		}
		if v.six {
			out.IPv6 = &packet.IPv6{Source: source, Destination: v.backends()[0], HopLimit: tunnelTTL, TrafficClass: tos, NextHeader: protocol}
			if got.IPv6 != nil {
				out.IPv6.FlowLabel = got.IPv6.FlowLabel
			}
			return out
		}
		out.IPv4 = &packet.IPv4{Source: source, Destination: v.backends()[0], TTL: tunnelTTL, TOS: tos, Protocol: protocol, DF: true}
		if in.IPv4 != nil && !in.IPv4.DF {
			out.IPv4.DF = false
			if got.IPv4 != nil {
				out.IPv4.ID = got.IPv4.ID
			}
		}
		return out
	}
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// fields sets the octet that carries DSCP and ECN, and whether routers may fragment.
func fields(tos uint8, df bool) packet.Edit {
	return func(p *packet.Packet) {
		if p.IPv4 != nil {
			p.IPv4.TOS, p.IPv4.DF, p.IPv4.ID = tos, df, 0x1234
		} else {
			p.IPv6.TrafficClass, p.IPv6.FlowLabel = tos, 0xabcde
		}
	}
}

// padded adds Ethernet padding.
func padded(p *packet.Packet) { p.Trailer = []byte{1, 2, 3, 4, 5, 6} }

// longer gives a packet a longer network header.
func longer(p *packet.Packet) {
	if p.IPv4 != nil {
		packet.IPv4Options(1, 1, 1, 1, 1, 1, 1, 0)(p)
		return
	}
	packet.Extended(packet.Padding(packet.ProtocolHopByHop, 1), packet.Padding(packet.ProtocolDestinationOptions, 2))(p)
}

// TestDirect sends packets of every shape through every way.
func TestDirect(t *testing.T) {
	t.Parallel()
	for _, mode := range modes() {
		w := newWorld(t, withMode(mode))
		for _, v := range directWays {
			for _, k := range kinds {
				for _, c := range []struct {
					name  string
					edits []packet.Edit
				}{
					{"plain", nil},
					{"data", []packet.Edit{packet.Data("hello")}},
					{"TTL 2", []packet.Edit{packet.TTL(2)}},
					{"TTL 255", []packet.Edit{packet.TTL(255)}},
					{"DSCP and ECN 1", []packet.Edit{fields(0xb9, true)}},
					{"DSCP and ECN 2", []packet.Edit{fields(0x06, false)}},
					{"DSCP and ECN all", []packet.Edit{fields(0xff, false)}},
					{"padding", []packet.Edit{padded}},
					{"longer headers", []packet.Edit{longer, packet.Data("data"), fields(0x28, true)}},
					{"longer headers and padding", []packet.Edit{longer, padded}},
					{"1,360 bytes", []packet.Edit{packet.Data(bytes.Repeat([]byte{7}, 1360))}},
					{"no checksum", []packet.Edit{packet.TransportChecksum(packet.Checksum{Mode: packet.Zero})}},
					{"a wrong checksum", []packet.Edit{packet.TransportChecksum(packet.ChecksumValue(0xdead))}},
				} {
					for _, flags := range []string{"S", "A", "R", "FA"} {
						if flags != "S" && (k.udp || c.edits != nil) {
							continue
						}
						in := k.toDirect(40000, v.port, flags, c.edits...)
						t.Run(fmt.Sprintf("%s/%s/%s/%s %s", mode, v.name, k, c.name, flags), func(t *testing.T) {
							trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}.try(t, w)
						})
					}
				}
			}
		}
		w.emptyTables()
	}
}

// emptyTables expects that no packet was remembered.
func (w *world) emptyTables() {
	w.Helper()
	if n, m := len(w.flowTable()), len(w.rememberedTable()); n != 0 || m != 0 {
		w.Errorf("sh_flows has %d entries and sh_remembered %d, want none", n, m)
	}
}

// TestDirectExtensionHeaders: every header keeps its place, inside.
func TestDirectExtensionHeaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	chain := []packet.Extension{packet.Padding(packet.ProtocolHopByHop, 1), packet.Padding(packet.ProtocolDestinationOptions, 2),
		{Type: packet.ProtocolRouting, Body: make([]byte, 6)}, {Type: packet.ProtocolAH, Body: make([]byte, 22)}}
	for n := range chain {
		for _, udp := range []bool{false, true} {
			k := kind{udp: udp, six: true}
			for _, v := range directWays {
				in := k.toDirect(40000, v.port, "S", packet.Extended(chain[:n+1]...), packet.Data("data"))
				t.Run(fmt.Sprintf("%s/%s/%d headers", v.name, k, n+1), func(t *testing.T) {
					trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}.try(t, w)
				})
			}
		}
	}
	for n := 4; n <= 40; n += 4 {
		for _, v := range directWays {
			in := kind{}.toDirect(40000, v.port, "S", packet.IPv4Options(bytes.Repeat([]byte{1}, n)...))
			t.Run(fmt.Sprintf("%s/%d bytes of options", v.name, n), func(t *testing.T) {
				trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}.try(t, w)
			})
		}
	}
}

// TestDirectPartialChecksums: native mode completes the checksum that the sender left to hardware,
// inside the outer header too; generic mode leaves it to the kernel, which still knows that it is
// open.
func TestDirectPartialChecksums(t *testing.T) {
	t.Parallel()
	for _, mode := range []model.Attach{model.AttachNative, model.AttachGeneric} {
		w := newWorld(t, withMode(mode))
		for _, v := range directWays {
			for _, k := range kinds {
				for _, size := range []int{0, 1, 2, 511, 513, 1360} {
					in := k.toDirect(40000, v.port, "S", packet.Data(bytes.Repeat([]byte{0xa5, 0x17, 0xff}, size)[:size]), packet.TransportChecksum(partial))
					c := trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}
					if mode == model.AttachNative {
						c.notes = []string{"checksum_completed"}
						c.want = v.expected(in, single(v.source()), packet.TransportChecksum(packet.Checksum{}))
					}
					t.Run(fmt.Sprintf("%s/%s/%s/%d bytes", mode, v.name, k, size), func(t *testing.T) { c.try(t, w) })
				}
			}
		}
	}
}

// TestDirectChecksumThatLooksPartial is complete, and stays as it is.
func TestDirectChecksumThatLooksPartial(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, v := range directWays {
		for _, k := range kinds {
			in := k.toDirect(40000, v.port, "S", packet.Data("\x00\x00"))
			looks := checksumOf(in.With(packet.TransportChecksum(partial)))
			in = in.With(packet.Data(word(sum(^looks, checksumOf(in)))))
			if in := checksumOf(in); in != looks {
				t.Fatalf("%s: the packet was to have the checksum %#x, it has %#x", k, looks, in)
			}
			in = in.With(packet.TransportChecksum(packet.Checksum{}))
			t.Run(fmt.Sprintf("%s/%s", v.name, k), func(t *testing.T) {
				trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}.try(t, w)
			})
		}
	}
}

// TestDirectFrontends: an exact port precedes a range, and a range precedes any, each with its own
// forwarding; NAT serves another port of the same VIP; and a packet to a port without a service
// passes.
func TestDirectFrontends(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		for port, want := range map[uint16]struct {
			backend netip.Addr
			way     string
		}{
			0: {way: "l2"}, 400: {way: "l2"}, 401: {range4, "gue"}, 442: {range4, "gue"}, 443: {exact4, "ipip"},
			444: {range4, "gue"}, 498: {range4, "gue"}, 499: {way: "l2"}, 65535: {way: "l2"},
		} {
			in := k.packet(netip.AddrPortFrom(k.pick(client4, client6), 41000), netip.AddrPortFrom(k.pick(directRangeVIP4, directRangeVIP6), port), "S",
				packet.MACs(router, ownA))
			t.Run(fmt.Sprintf("%s/%d", k, port), func(t *testing.T) {
				got := w.send(armA, in)
				way := "ipip"
				switch {
				case got.Destination() == in.Destination():
					way = "l2"
				case got.UDP != nil:
					way = "gue"
				}
				if way != want.way || want.backend.IsValid() && got.Destination() != want.backend {
					t.Errorf("it left by %s to %s, want %s to %s", way, got.Destination(), want.way, want.backend)
				}
			})
		}
		nat := k.toDirect(41000, portNAT, "S")
		t.Run(fmt.Sprintf("%s/NAT on the same VIP", k), func(t *testing.T) {
			trial{in: nat, end: leaves, want: ways[0].expected(w, k, nat)}.try(t, w)
			sent := w.send(armA, nat)
			answer := sent.Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64), flagged("SA"))
			trial{arm: armC, in: answer, end: leaves, want: func(packet.Packet) packet.Packet {
				return answer.With(routed, between(destinationOf(nat), sourceOf(nat)), packet.MACs(ownA, router))
			}}.try(t, w)
		})
		table(t, w, []trial{
			{name: k.String() + "/port of no service", in: k.toDirect(41000, portNothing, "S"), reason: "no_service"},
			{name: k.String() + "/port of no service, later", in: k.toDirect(41000, portNothing, "A"), reason: "no_service"},
		})
	}
	if n := len(w.rememberedTable()); n != 0 {
		t.Errorf("%d flows were remembered", n)
	}
}

// TestDirectCounts: packets are traffic of service and backend, and first ones new flows.
func TestDirectCounts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, v := range directWays {
		for _, k := range kinds {
			before := w.traffic()
			size := uint64(0)
			for _, flags := range []string{"S", "A", "PA"} {
				in := k.toDirect(40000, v.port, flags, packet.Data("data"))
				size += uint64(len(packet.Must(in)))
				w.send(armA, in)
			}
			got := w.traffic()
			first := uint64(1)
			if k.udp {
				first = 0 // the program cannot know the first packet of a UDP flow
			}
			if n, b, f := got.PacketsIn-before.PacketsIn, got.BytesIn-before.BytesIn, got.FlowsCreated-before.FlowsCreated; n != 3 || b != size || f != first {
				t.Errorf("%s, %s: counted %d packets, %d bytes, %d flows; want 3, %d, %d", v.name, k, n, b, f, size, first)
			}
		}
	}
}

// traffic is the traffic of all services, which must equal that of all backends.
func (w *world) traffic() (services struct{ PacketsIn, BytesIn, FlowsCreated uint64 }) {
	w.Helper()
	counters, err := w.d.Counters()
	must(w, err)
	backends := services
	for _, c := range counters.Services {
		services.PacketsIn, services.BytesIn, services.FlowsCreated = services.PacketsIn+c.PacketsIn, services.BytesIn+c.BytesIn, services.FlowsCreated+c.FlowsCreated
	}
	for _, c := range counters.Backends {
		backends.PacketsIn, backends.BytesIn, backends.FlowsCreated = backends.PacketsIn+c.PacketsIn, backends.BytesIn+c.BytesIn, backends.FlowsCreated+c.FlowsCreated
	}
	if services != backends {
		w.Errorf("the services have counted %+v, their backends %+v", services, backends)
	}
	return services
}
