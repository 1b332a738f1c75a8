package packet_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/vishvananda/netlink"
)

// This host is a node of a cluster with direct return between nodes: clients are behind armA; behind armC are the other node,
// 10.0.0.30 or 2001:db8:2::30, and this node's pods, backend4 and backend6.
const (
	portAway     = 1074 // the other node
	portHere     = 1075 // this node
	portBoth     = 1076
	portEmpty    = 1077  // this node, which has no endpoint any more, and says so
	portMissing  = 1078  // this node, without a service of level 2, which a source always declares
	nodePort     = 30080 // at the nodes' own addresses; this node
	portUnlisted = 1079  // no service of either level
)

// The address of another node, which has come here in a tunnel.
var otherNode4, otherNode6 = addr("192.0.2.99"), addr("2001:db8:1::99")

// tunnelledServices are both levels.
func tunnelledServices(forwarding model.Forwarding) []model.Service {
	var all []model.Service
	add := func(name string, forwarding model.Forwarding, protocol model.Protocol, policy model.Policy, ports uint16, addresses []netip.Addr, backends ...model.BackendAddress) {
		s := model.Service{Name: name, Forwarding: forwarding, Announce: model.AnnounceNone, TableSize: 251, Policy: policy}
		for _, a := range addresses {
			for _, p := range []model.Protocol{model.TCP, model.UDP} {
				s.Frontends = append(s.Frontends, model.Frontend{Address: a, Ports: value.PortRange{First: ports, Last: ports}, Protocol: p | protocol})
			}
		}
		for _, b := range backends {
			s.Backends = append(s.Backends, model.Backend{BackendAddress: b, Weight: 1})
		}
		all = append(all, s)
	}
	node := func(addresses ...netip.Addr) (list []model.BackendAddress) {
		for _, a := range addresses {
			list = append(list, model.BackendAddress{Address: a})
		}
		return list
	}
	vips := []netip.Addr{directVIP4, directVIP6}
	hosts := []netip.Addr{hostVIP4, hostVIP6}
	both := model.Policy{Tunnelled: true}
	here, away := node(ownBackend4, ownBackend6), node(addr("10.0.0.30"), addr("2001:db8:2::30"))
	pods := []model.BackendAddress{{Address: backend4, Port: backendPort}, {Address: backend6, Port: backendPort}}
	add("away", forwarding, 0, both, portAway, vips, away...)
	add("here", forwarding, 0, both, portHere, vips, here...)
	add("both", forwarding, 0, both, portBoth, vips, append(here, away...)...)
	add("empty", forwarding, 0, both, portEmpty, vips, here...)
	add("missing", forwarding, 0, model.Policy{Tunnelled: true, Rejects: true}, portMissing, vips, here...)
	add("port", forwarding, 0, both, nodePort, hosts, here...)
	inner := model.ForwardingNATDestination
	for _, port := range []uint16{portAway, portHere, portBoth} {
		add(fmt.Sprint("inner", port), inner, model.Tunnelled, model.Policy{}, port, vips, pods...)
	}
	add("inner-empty", inner, model.Tunnelled, model.Policy{Rejects: true}, portEmpty, vips)
	add("inner-port", inner, model.Tunnelled, model.Policy{}, nodePort, []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}, pods...)
	return all
}

type tunnelledWorld struct {
	*world
	beside *decap.Beside
	wanted decap.Wanted
}

// newTunnelledWorld is such a node. The way to clients is by the router behind armA.
func newTunnelledWorld(t *testing.T, mode model.Attach, forwarding model.Forwarding) *tunnelledWorld {
	t.Helper()
	w := &tunnelledWorld{world: newWorld(t, withMode(mode)), wanted: decap.Wanted{Tunnelled: true, Senders: decapFroms, GUEPort: decapPort,
		VIPs: []netip.Addr{directVIP4, directVIP6, hostVIP4, hostVIP6, otherNode4, otherNode6}}}
	w.apply(append(services(), tunnelledServices(forwarding)...))
	w.beside = decap.NewBeside(w.d, slog.New(slog.NewTextHandler(io.Discard, nil)))
	var err error
	w.cpu.do(func() {
		err = errors.Join(forwardingOnLoopback(), addAddress(armC, decapOwn4.String()+"/24"), addAddress(armC, decapOwn6.String()+"/64"),
			routeBy(armA, "198.51.100.0/24", "192.0.2.254"), routeBy(armA, "2001:db8:9::/64", "2001:db8:1::254"),
			neighbour(armA, net.ParseIP("192.0.2.254").To4(), router), neighbour(armA, net.ParseIP("2001:db8:1::254"), router))
		if mode != model.AttachTC {
			err = errors.Join(err, w.beside.Follow([]string{armA, armC}, w.wanted, false))
		}
	})
	must(t, err)
	t.Cleanup(w.beside.Close)
	return w
}

func addAddress(iface, text string) error {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(text)
	if err != nil {
		return err
	}
	return netlink.AddrAdd(dev, address)
}

func routeBy(iface, network, gateway string) error {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return err
	}
	_, to, err := net.ParseCIDR(network)
	if err != nil {
		return err
	}
	return netlink.RouteReplace(&netlink.Route{LinkIndex: dev.Attrs().Index, Dst: to, Gw: net.ParseIP(gateway)})
}

// table runs trials in their order. To sh_xdp a tunnel's packet is not for a service, which it counts.
func (w *tunnelledWorld) table(t *testing.T, trials []trial) {
	t.Helper()
	for i, c := range trials {
		if slices.ContainsFunc(append(c.notes, c.reason), func(reason string) bool { return strings.HasPrefix(reason, "decap_") }) {
			trials[i].notes = append([]string{"not_ours"}, c.notes...)
		}
	}
	table(t, w.world, trials)
}

// taken is the reason that a shell's packet is counted for when it comes out.
func (s shell) taken() string {
	if s.gue {
		return "decap_gue"
	}
	return "decap_ipip"
}

// to is a client's packet to a service of a node.
func (k kind) to(clientPort uint16, address4, address6 netip.Addr, port uint16, flags string, edits ...packet.Edit) packet.Packet {
	return k.packet(netip.AddrPortFrom(k.pick(client4, client6), clientPort), netip.AddrPortFrom(k.pick(address4, address6), port), flags,
		append([]packet.Edit{packet.MACs(router, ownA)}, edits...)...)
}

// toPod is the frame that such a packet becomes on its way to a pod.
func (k kind) toPod(in packet.Packet) packet.Packet {
	return in.With(routed, between(sourceOf(in), netip.AddrPortFrom(k.pick(backend4, backend6), backendPort)), packet.MACs(ownC, beMAC))
}

// answered are the frames of a pod's answer, as it comes and as it leaves.
func answered(in, atPod packet.Packet, edits ...packet.Edit) (answer, left packet.Packet) {
	answer = atPod.Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64), packet.Data("an answer of some bytes")).With(edits...)
	return answer, answer.With(routed, between(destinationOf(in), sourceOf(in)), packet.MACs(ownA, router))
}

// TestTunnelledOtherNode: level 1 puts a packet for another node into outer headers, as every service with direct return does.
func TestTunnelledOtherNode(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" || *forwarding != "all" {
		return
	}
	for _, mode := range modes() {
		for _, forwarding := range []model.Forwarding{model.ForwardingDSRIPIP, model.ForwardingDSRGUE} {
			w := newTunnelledWorld(t, mode, forwarding)
			for _, k := range kinds {
				in := k.to(40000, directVIP4, directVIP6, portAway, "S", packet.Data("hello"))
				v := wayOf(forwarding, k.six)
				w.table(t, []trial{{name: fmt.Sprint(mode, "/", forwarding, "/", k), in: in, end: leaves, want: v.expected(in, single(v.source()))}})
			}
			if n := len(w.flowTable()); n > 0 {
				t.Errorf("%s/%s: %d entries of flows", mode, forwarding, n)
			}
		}
	}
}

// TestTunnelledHere: a packet for this node itself is translated without an outer header, in both directions, and each flow has its own entries.
func TestTunnelledHere(t *testing.T) {
	t.Parallel()
	if *hook == "vlan" || *forwarding != "all" {
		return
	}
	for _, mode := range modes() {
		w := newTunnelledWorld(t, mode, model.ForwardingDSRGUE)
		for _, k := range kinds {
			for _, c := range []struct {
				name string
				in   packet.Packet
			}{
				{"VIP", k.to(40000, directVIP4, directVIP6, portHere, "S", packet.Data("hello"))},
				{"node port", k.to(40000, hostVIP4, hostVIP6, nodePort, "S", packet.Data("hello"))},
			} {
				atPod := k.toPod(c.in)
				if c.name == "node port" { // the client has one flow to the pod with this port already
					var got packet.Packet
					trial{in: c.in, end: leaves, want: func(out packet.Packet) packet.Packet { got = out; return out }}.try(t, w.world)
					if got.Source() != c.in.Source() || destinationOf(got) != destinationOf(atPod) || sourceOf(got) == sourceOf(atPod) {
						t.Errorf("%s/%s: it left as %s", mode, k, got)
					}
					atPod = got
				} else {
					trial{in: c.in, end: leaves, want: func(packet.Packet) packet.Packet { return atPod }}.try(t, w.world)
				}
				answer, left := answered(c.in, atPod, flagged("SA"))
				w.table(t, []trial{{name: fmt.Sprint(mode, "/", k, "/", c.name, "/answer"), arm: armC, in: answer, end: leaves,
					want: func(packet.Packet) packet.Packet { return left }}})
			}
			w.table(t, []trial{
				{name: fmt.Sprint(mode, "/", k, "/the last hop"), in: k.to(40001, directVIP4, directVIP6, portHere, "S", packet.TTL(1)), end: leaves, reason: "ttl_exceeded"},
				{name: fmt.Sprint(mode, "/", k, "/no service of level 2"), in: k.to(40002, directVIP4, directVIP6, portMissing, "S"), end: drops, reason: "tunnelled_unknown"},
				{name: fmt.Sprint(mode, "/", k, "/no endpoint"), in: k.to(40003, directVIP4, directVIP6, portEmpty, "S"), end: leaves, reason: rejected(k)},
			})
		}
		for _, k := range kinds {
			whole := k.to(47000, directVIP4, directVIP6, portHere, "S", pattern(3001))
			parts, left := cut(whole, 47, 1400, 2800), cut(k.toPod(whole), 47, 1400, 2800)
			w.table(t, []trial{
				{name: fmt.Sprint(mode, "/", k, "/first fragment"), in: parts[0], end: leaves, want: func(packet.Packet) packet.Packet { return left[0] }},
				follows("", parts[2], left[2]), follows("", parts[1], left[1]),
			})
		}
		w.soundTable()
	}
}

func rejected(k kind) string {
	if k.udp {
		return "rejected_unreachable"
	}
	return "rejected_reset"
}

// TestTunnelledArrives: a packet of another node becomes one for a pod, from the client's address, and the answer goes from the VIP to the client.
// The first packet may come bare and the next in any tunnel, or the other way round: a flow does not depend on it.
func TestTunnelledArrives(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" || *forwarding != "all" {
		return
	}
	for _, mode := range modes() {
		w := newTunnelledWorld(t, mode, model.ForwardingDSRIPIP)
		port := uint16(41000)
		for _, s := range shells() {
			for _, k := range kinds {
				for name, at := range map[string]struct {
					four, six netip.Addr
					port      uint16
				}{"VIP": {directVIP4, directVIP6, portAway}, "a port of this node": {hostVIP4, hostVIP6, nodePort}, "a port of another node": {otherNode4, otherNode6, nodePort}} {
					name = fmt.Sprint(mode, "/", s, "/", k, "/", name)
					port++
					in := k.to(port, at.four, at.six, at.port, "S", packet.Data("hello"))
					atPod := k.toPod(in)
					wantPod := func(packet.Packet) packet.Packet { return atPod }
					answer, left := answered(in, atPod, flagged("SA"))
					again := in.With(flagged("A"))
					w.table(t, []trial{
						{name: name, arm: armC, in: s.carry(in), end: leaves, reason: s.taken(), want: wantPod},
						{name: name + "/answer", arm: armC, in: answer, end: leaves, want: func(packet.Packet) packet.Packet { return left }},
						{name: name + "/again", arm: armC, in: s.carry(again), end: leaves, reason: s.taken(), want: func(packet.Packet) packet.Packet { return k.toPod(again) }},
					})
				}
			}
		}
		for _, k := range kinds {
			in := k.to(42000, directVIP4, directVIP6, portHere, "S", packet.Data("hello"))
			again := in.With(flagged("A"))
			w.table(t, []trial{
				{name: k.String() + "/bare", in: in, end: leaves, want: func(packet.Packet) packet.Packet { return k.toPod(in) }},
				{name: k.String() + "/then in a tunnel", arm: armC, in: shell{gue: true}.carry(again), end: leaves, reason: "decap_gue", want: func(packet.Packet) packet.Packet { return k.toPod(again) }},
			})
		}
		w.soundTable()
	}
}

// TestTunnelledEnds: nothing that has come out of a tunnel reaches the stack or another tunnel, and a stranger's tunnel is not touched.
func TestTunnelledEnds(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" || *forwarding != "all" {
		return
	}
	for _, mode := range modes() {
		w := newTunnelledWorld(t, mode, model.ForwardingDSRIPIP)
		for _, s := range shells() {
			for _, k := range kinds {
				name := fmt.Sprint(mode, "/", s, "/", k)
				to := func(port uint16, edits ...packet.Edit) packet.Packet {
					return k.to(43000, directVIP4, directVIP6, port, "S", edits...)
				}
				taken := []string{s.taken()}
				lost := func(what string, in packet.Packet) trial {
					return trial{name: name + "/" + what, arm: armC, in: s.carry(in), end: drops, reason: "tunnelled_unknown", notes: taken}
				}
				alone := func(what string, in packet.Packet) trial { return trial{name: name + "/" + what, arm: armC, in: in} }
				pod := to(portAway).With(between(sourceOf(to(portAway)), netip.AddrPortFrom(k.pick(backend4, backend6), backendPort)))
				stranger := s.carry(to(portAway)).With(func(p *packet.Packet) { resource(p, addr("10.0.1.1"), addr("2001:db8:3::1")) })
				trials := []trial{
					lost("no service of either level", to(portUnlisted)),
					lost("no service of level 2", to(portMissing)),
					{name: name + "/the last hop", arm: armC, in: s.carry(to(portAway, packet.TTL(1))), end: leaves, reason: "ttl_exceeded", notes: taken},
					{name: name + "/no endpoint any more", arm: armC, in: s.carry(to(portEmpty)), end: leaves, reason: rejected(k), notes: taken},
					{name: name + "/another sender", arm: armC, in: stranger, end: drops, reason: "decap_sender"},
				}
				w.table(t, trials)
				for _, c := range []trial{alone("for a pod's own address", s.carry(pod)), alone("another inner destination", s.carry(toVIP(k.six)))} {
					t.Run(c.name, func(t *testing.T) {
						before := w.reasons()
						frame := packet.Must(c.in)
						r := w.cpu.run(armC, bytes.Clone(frame))
						if moved := w.moved(before); r.err != nil || r.verdict != kernel.XDPPass || !bytes.Equal(r.frame, frame) || moved["decap_not_vip"] != 1 {
							t.Errorf("verdict %d, counted %v, %v\n%x, want it as it came\n%x", r.verdict, moved, r.err, r.frame, frame)
						}
					})
				}
			}
			for _, six := range decapFamily {
				k := kind{six: six}
				ping := packet.NewEcho(k.pick(client4, client6), k.pick(directVIP4, directVIP6), 1, 1)
				other := k.to(43001, directVIP4, directVIP6, portAway, "S").With(func(p *packet.Packet) {
					p.TCP, p.Payload = nil, make([]byte, 20)
					if p.IPv4 != nil {
						p.IPv4.Protocol = 132
					} else {
						p.IPv6.NextHeader = 132
					}
				})
				again := shell{}.carry(k.to(43002, directVIP4, directVIP6, portAway, "S")) // a tunnel in the tunnel
				again = again.With(func(p *packet.Packet) { readdress(p, directVIP4, directVIP6) })
				for what, in := range map[string]packet.Packet{"echo": ping, "SCTP": other, "another tunnel": again} {
					w.table(t, []trial{{name: fmt.Sprint(mode, "/", s, "/", k, "/", what), arm: armC, in: s.carry(in), end: drops, reason: "tunnelled_unknown", notes: []string{s.taken()}}})
				}
			}
		}
		if n := w.reasons()["internal"]; n > 0 {
			t.Errorf("%s: internal was counted %d times", mode, n)
		}
	}
}

// TestTunnelledAnswersOfOurOwn: a reset, or an error, goes by the route to the client, and not to the node that the packet came from.
func TestTunnelledAnswersOfOurOwn(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" || *forwarding != "all" {
		return
	}
	w := newTunnelledWorld(t, model.AttachNative, model.ForwardingDSRIPIP)
	for _, k := range kinds {
		for reason, in := range map[string]packet.Packet{
			rejected(k):    k.to(43000, directVIP4, directVIP6, portEmpty, "S"),
			"ttl_exceeded": k.to(43000, directVIP4, directVIP6, portAway, "S", packet.TTL(1)),
		} {
			r := w.cpu.run(armC, packet.Must(shell{}.carry(in)))
			must(t, r.err)
			out, err := packet.Parse(r.frame)
			must(t, err)
			if r.verdict != kernel.XDPRedirect || out.Destination() != in.Source() || !bytes.Equal(out.Ethernet.Destination, router) || !bytes.Equal(out.Ethernet.Source, ownA) {
				t.Errorf("%s, %s: verdict %d, and it left as %s", k, reason, r.verdict, out)
			}
		}
	}
}

// TestTunnelledWithoutARoute: a client that the kernel knows no way to is not looked for where the frame came from, which is another node.
func TestTunnelledWithoutARoute(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" || *forwarding != "all" {
		return
	}
	w := newTunnelledWorld(t, model.AttachNative, model.ForwardingDSRIPIP)
	from := netip.MustParseAddrPort("203.0.113.7:40000")
	k := kind{}
	in := k.packet(from, netip.AddrPortFrom(directVIP4, portAway), "S", packet.MACs(router, ownA))
	atPod := k.toPod(in)
	answer, _ := answered(in, atPod, flagged("SA"))
	w.table(t, []trial{
		{name: "there", arm: armC, in: shell{}.carry(in), end: leaves, reason: "decap_ipip", want: func(packet.Packet) packet.Packet { return atPod }},
		{name: "back", arm: armC, in: answer, end: drops, reason: "unresolved"},
	})
}

// TestTunnelledFragments: later fragments follow the first, in a tunnel or bare, and one without a first one ends here.
func TestTunnelledFragments(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" || *forwarding != "all" {
		return
	}
	for _, mode := range modes() {
		w := newTunnelledWorld(t, mode, model.ForwardingDSRIPIP)
		for _, k := range kinds {
			for _, s := range shells() {
				name := fmt.Sprint(mode, "/", s, "/", k)
				id := uint32(w.created() + 77)
				whole := k.to(uint16(44000+id), directVIP4, directVIP6, portHere, "S", pattern(3001))
				parts, left := cut(whole, id, 1400, 2800), cut(k.toPod(whole), id, 1400, 2800)
				inTunnel := func(i int) trial {
					c := trial{name: fmt.Sprint(name, "/", i), arm: armC, in: s.carry(parts[i]), end: leaves, reason: s.taken(), want: func(packet.Packet) packet.Packet { return left[i] }}
					if i > 0 {
						c.notes = []string{"fragment_followed"}
					}
					return c
				}
				early := inTunnel(1)
				early.name, early.end, early.notes = name+"/before the first", drops, []string{"fragment_early"}
				w.table(t, []trial{early, inTunnel(0), inTunnel(2), inTunnel(1), follows("", parts[2], left[2])})
			}
			id := uint32(w.created() + 77)
			whole := k.to(uint16(44000+id), directVIP4, directVIP6, portHere, "S", pattern(3001))
			parts, left := cut(whole, id, 1400, 2800), cut(k.toPod(whole), id, 1400, 2800)
			later := shell{gue: true}.carry(parts[1])
			w.table(t, []trial{
				{name: fmt.Sprint(mode, "/", k, "/bare"), in: parts[0], end: leaves, want: func(packet.Packet) packet.Packet { return left[0] }},
				follows("", parts[2], left[2]),
				{name: fmt.Sprint(mode, "/", k, "/then in a tunnel"), arm: armC, in: later, end: leaves, reason: "decap_gue", notes: []string{"fragment_followed"}, want: func(packet.Packet) packet.Packet { return left[1] }},
			})
			// To another node all are wrapped, and their note does not wrap what comes out of a tunnel.
			id += 5000
			whole = k.to(uint16(44000+id), directVIP4, directVIP6, portAway, "S", pattern(3001))
			parts = cut(whole, id, 1400, 2800)
			v := wayOf(model.ForwardingDSRIPIP, k.six)
			w.table(t, []trial{
				{name: fmt.Sprint(mode, "/", k, "/to another node"), in: parts[0], end: leaves, want: v.expected(parts[0], single(v.source()))},
				{name: fmt.Sprint(mode, "/", k, "/not back again"), arm: armC, in: shell{}.carry(parts[1]), end: drops, reason: "decap_ipip", notes: []string{"fragment_early"}},
			})
		}
	}
}

// TestTunnelledErrors: an ICMP error to the VIP reaches the pod whose packet it quotes: bare at this node, by the other node's level 1, and
// out of a tunnel here.
func TestTunnelledErrors(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" || *forwarding != "all" {
		return
	}
	for _, mode := range modes() {
		w := newTunnelledWorld(t, mode, model.ForwardingDSRIPIP)
		for _, k := range kinds {
			for _, kindOf := range errorTypes[k.six] {
				name := fmt.Sprint(mode, "/", k, "/", kindOf)
				in := k.to(45000, directVIP4, directVIP6, portHere, "S", packet.Data("hello"))
				atPod := k.toPod(in)
				answer, left := answered(in, atPod)
				about := func(p packet.Packet, edits ...packet.Edit) packet.Packet {
					return packet.NewError(k.pick(addr("203.0.113.1"), addr("2001:db8:77::1")), kindOf[0], kindOf[1], 1300, p, append([]packet.Edit{packet.MACs(router, ownA)}, edits...)...)
				}
				toPod := about(answer.With(packet.TTL(63)), packet.MACs(ownC, beMAC), packet.TTL(63))
				wantPod := func(packet.Packet) packet.Packet { return toPod }
				w.table(t, []trial{
					{name: name + "/a flow", arm: armC, in: shell{}.carry(in), end: leaves, reason: "decap_ipip"},
					{name: name + "/bare", in: about(left), end: leaves, notes: []string{"icmp_translated"}, want: wantPod},
					{name: name + "/in a tunnel", arm: armC, in: shell{gue: true}.carry(about(left)), end: leaves, reason: "decap_gue", notes: []string{"icmp_translated"}, want: wantPod},
				})
				elsewhere := errorAbout(k.to(45001, directVIP4, directVIP6, portAway, "A"), kindOf, 0)
				v := wayOf(model.ForwardingDSRIPIP, k.six)
				w.table(t, []trial{
					{name: name + "/of another node's pod", in: elsewhere, end: leaves, notes: []string{"icmp_to_backend"}, want: v.expected(elsewhere, single(v.source()))},
					{name: name + "/of no flow, in a tunnel", arm: armC, in: shell{}.carry(elsewhere), end: drops, reason: "decap_ipip", notes: []string{"tunnelled_unknown"}},
				})
			}
		}
	}
}

// TestTunnelledFollows: senders and inner destinations change without the program being loaded again, and the switch goes off and on.
func TestTunnelledFollows(t *testing.T) {
	t.Parallel()
	if *hook != "xdp" || *forwarding != "all" {
		return
	}
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			w := newTunnelledWorld(t, mode, model.ForwardingDSRIPIP)
			frame := packet.Must(shell{}.carry(kind{}.to(46000, directVIP4, directVIP6, portHere, "S")))
			counts := func(what string, want ...string) {
				t.Helper()
				before := w.reasons()
				must(t, w.cpu.run(armC, bytes.Clone(frame)).err)
				moved := w.moved(before)
				for _, reason := range want {
					if moved[reason] != 1 {
						t.Errorf("%s: counted %v, want %v", what, moved, want)
					}
				}
			}
			follow := func(change func(*decap.Wanted)) {
				t.Helper()
				wanted := w.wanted
				change(&wanted)
				var err error
				w.cpu.do(func() { err = w.beside.Follow([]string{armA, armC}, wanted, false) })
				must(t, err)
			}
			program := func() (id uint32) {
				must(t, w.pinned("sh_decap_progs").Lookup(uint32(1), &id))
				return id
			}
			counts("at first", "decap_ipip")
			before := program()
			follow(func(o *decap.Wanted) { o.Senders = []netip.Prefix{netip.MustParsePrefix("10.0.0.77/32")} })
			counts("another sender", "decap_sender")
			follow(func(o *decap.Wanted) { o.VIPs = []netip.Addr{hostVIP4} })
			counts("another destination", "decap_not_vip")
			follow(func(*decap.Wanted) {})
			counts("as at first", "decap_ipip")
			if now := program(); now != before {
				t.Errorf("the program is %d, and was %d: it was loaded again", now, before)
			}
			follow(func(o *decap.Wanted) { *o = decap.Wanted{} })
			if r := w.cpu.run(armC, bytes.Clone(frame)); r.verdict != kernel.XDPPass || !bytes.Equal(r.frame, frame) {
				t.Errorf("switched off: verdict %d\n%x", r.verdict, r.frame)
			}
			if w.pinned("sh_tunnel_progs").Iterate().Next(new(uint32), new(uint32)) {
				t.Error("switched off: the program for packets out of tunnels is still there")
			}
			follow(func(*decap.Wanted) {})
			counts("on again", "decap_ipip")
			// All programs are loaded again, with another feature.
			limited := tunnelledServices(model.ForwardingDSRIPIP)
			for i := range limited {
				if limited[i].Forwarding == model.ForwardingNATDestination {
					limited[i].Policy.TCPMSS = 500
				}
			}
			w.apply(append(services(), limited...))
			in := kind{}.to(46001, directVIP4, directVIP6, portHere, "S", packet.TCPOptions(packet.MSS(1460)...))
			w.table(t, []trial{{name: "segments", arm: armC, in: shell{}.carry(in), end: leaves, reason: "decap_ipip",
				want: func(packet.Packet) packet.Packet {
					return kind{}.toPod(in).With(packet.TCPOptions(packet.MSS(500)...))
				}}})
		})
	}
}
