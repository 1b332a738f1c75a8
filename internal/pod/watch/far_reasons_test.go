package watch_test

import (
	"context"
	"net"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// mac is the Ethernet address of a node's uplink.
func (w *world) mac() (mac net.HardwareAddr) {
	w.Helper()
	w.uplink(func(l netlink.Link) error {
		mac = l.Attrs().HardwareAddr
		return nil
	})
	return mac
}

// Packets that come in by the uplink and need the host go to it, and are counted by reason.
func TestPacketsThatNeedTheHostAtTheUplink(t *testing.T) {
	pair := newPair(t, shortcut.Checked)
	families(t, func(t *testing.T, is6 bool) {
		w, other := *pair[0], pair[1]
		w.T = t
		to, from := netip.AddrPortFrom(w.Address(0, is6), 9), netip.AddrPortFrom(other.Address(0, is6), 4000)
		outside := netip.MustParseAddrPort("10.99.0.1:4000")
		if is6 {
			outside = netip.MustParseAddrPort("[2001:db8:99::1]:4000")
		}
		frame := func(p packet.Packet, edits ...packet.Edit) []byte {
			return packet.Must(p.With(append(edits, packet.MACs(other.mac(), w.mac()))...))
		}
		options := packet.IPv4Options(1, 1, 1, 0) // three times no operation, and the end: RFC 791
		if is6 {
			options = packet.Extended(packet.Extension{Type: packet.ProtocolHopByHop, Body: []byte{1, 4, 0, 0, 0, 0}}) // PadN: RFC 8200, 4.2
		}
		w.must(w.Node.SetMTU(w.Interface(0), 1400))
		cut := frame(packet.NewTCP(from, to, "A"))
		for _, c := range []struct {
			reason string
			frame  []byte
		}{
			{"source", frame(packet.NewUDP(outside, to))},
			{"malformed", cut[:len(cut)-10]},
			{"fragment", frame(packet.NewUDP(from, to), packet.Fragmented(7, 0, true), packet.Data(make([]byte, 16)))},
			{"options", frame(packet.NewUDP(from, to), options)},
			{"protocol", frame(packet.NewEcho(from.Addr(), to.Addr(), 1, 1))},
			{"ttl", frame(packet.NewUDP(from, to), packet.TTL(1))},
			{"handshake", frame(packet.NewTCP(from, to, "S"))},
			{"unknown", frame(packet.NewTCP(netip.AddrPortFrom(from.Addr(), 4001), to, "A"))},
			{"unanswered", frame(packet.NewUDP(netip.AddrPortFrom(from.Addr(), 4002), to))}, // the second, as the first is unknown
			{"oversize", frame(packet.NewUDP(from, to), packet.Data(make([]byte, 1430)))},
		} {
			before := w.status().From[bed.Uplink]
			w.until("a packet is left alone for "+c.reason, func() bool {
				w.must(other.Node.Send(bed.Uplink, c.frame))
				return w.status().From[bed.Uplink][c.reason].Packets > before[c.reason].Packets
			})
			if now := w.status().From[bed.Uplink]["taken"].Packets; now != before["taken"].Packets {
				t.Errorf("%s: %d packets took the shortcut", c.reason, now-before["taken"].Packets)
			}
		}
		w.must(w.Node.SetMTU(w.Interface(0), 1500))

		// Packets for the host itself are not counted.
		before := w.status().From[bed.Uplink]
		w.must(other.Node.Send(bed.Uplink, frame(packet.NewUDP(outside, netip.AddrPortFrom(map[bool]netip.Addr{false: netip.MustParseAddr("192.168.7.1"), true: netip.MustParseAddr("2001:db8:7::1")}[is6], 9)))))
		across(t, pair, is6) // by which time it has come in
		if now := w.status().From[bed.Uplink]; now["not_local"] != before["not_local"] || now["unprepared"].Packets == 0 {
			t.Errorf("after a packet for the host, and a connection that conntrack had to be told of: %v", now)
		}
	})
}

// A connection to a service, whose one endpoint is on the other node: its answers go back through the translation.
func TestServicesOfAnotherNode(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			vip, endpoint := netip.MustParseAddrPort("10.97.0.20:80"), netip.AddrPortFrom(bed.AddressOn(2, 0, false), 8080)
			pair := newPair(t, mode, plain.Service{Address: vip, Endpoint: endpoint, Protocol: unix.IPPROTO_TCP})
			l, err := pair[1].Pods[0].Listen("tcp", endpoint.String())
			pair[0].must(err)
			defer l.Close()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			c, err := pair[0].Pods[0].Dial(ctx, "tcp", vip.String())
			pair[0].must(err)
			defer c.Close()
			s, err := l.Accept()
			pair[0].must(err)
			defer s.Close()
			pair[0].exchange(c, s, 100_000)
			if from := pair[0].status().From[bed.Uplink]; from["nat"].Packets == 0 || from["taken"].Packets != 0 {
				t.Errorf("of the answers there are %v", from)
			}
		})
	}
}
