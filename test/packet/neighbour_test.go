package packet_test

import (
	"net"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/packet"
)

// TestARP: requests for our own addresses are answered, and no others.
func TestARP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	asker := addr("192.0.2.254")
	ask := func(target netip.Addr) packet.Packet { return packet.NewARPRequest(router, asker, target) }
	padded := ask(vip4).With(func(p *packet.Packet) { p.Trailer = make([]byte, 18) })
	probe := packet.NewARPRequest(router, netip.IPv4Unspecified(), vip4)
	answered := func(in packet.Packet) func(packet.Packet) packet.Packet {
		return func(packet.Packet) packet.Packet {
			return packet.NewARPReply(ownA, in.ARP.TargetAddress, router, in.ARP.SenderAddress,
				func(p *packet.Packet) { p.Trailer = in.Trailer })
		}
	}
	yes := func(name string, in packet.Packet) trial {
		return trial{name: name, in: in, end: leaves, reason: "arp_answered", want: answered(in)}
	}
	no := func(name string, in packet.Packet) trial {
		return trial{name: name, in: in, reason: "neighbour_other"}
	}
	direct := ask(vip4).With(packet.MACs(router, ownA))
	announcement := packet.NewARPRequest(foreign, vip4, vip4)
	fromGroup := ask(vip4).With(func(p *packet.Packet) { p.ARP.SenderMAC = net.HardwareAddr{1, 0, 0x5e, 0, 0, 1} })
	table(t, w, []trial{
		yes("VIP", ask(vip4)), yes("VIP, frame padded", padded), yes("VIP, unicast", direct), yes("probe for a duplicate", probe),
		yes("NAT source", ask(sources[0])),
		no("host's own", ask(hostVIP4)), no("VIP that is not owned", ask(rangeVIP4)), no("nobody's", ask(addr("192.0.2.77"))),
		no("announcement", announcement), no("reply", packet.NewARPReply(router, asker, ownA, vip4)),
		no("sender that is a group", fromGroup),
	})
	must(t, w.d.SetOwned(vip4, store.OwnedNever))
	table(t, w, []trial{no("VIP given up", ask(vip4))})
	must(t, w.d.SetOwned(vip4, store.OwnedForever))
	table(t, w, []trial{yes("VIP owned again", ask(vip4))})
}

// TestND does the same over IPv6.
func TestND(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	asker := addr("2001:db8:1::fe")
	ask := func(target netip.Addr, edits ...packet.Edit) packet.Packet {
		return packet.NewNeighbourSolicitation(router, asker, target, edits...)
	}
	optionless := func(p *packet.Packet) { p.ICMPv6.Neighbour.LinkAddress = nil }
	answered := func(packet.Packet) packet.Packet {
		return packet.NewNeighbourAdvertisement(ownA, vip6, router, asker)
	}
	defended := func(packet.Packet) packet.Packet {
		return packet.NewNeighbourAdvertisement(ownA, vip6, mac("33:33:00:00:00:01"), addr("ff02::1"),
			func(p *packet.Packet) { p.ICMPv6.Neighbour.Solicited = false })
	}
	direct := ask(vip6, packet.MACs(router, ownA), func(p *packet.Packet) { p.IPv6.Destination = vip6 })
	probe := packet.NewNeighbourSolicitation(router, netip.IPv6Unspecified(), vip6, optionless)
	badProbe := packet.NewNeighbourSolicitation(router, netip.IPv6Unspecified(), vip6)
	yes := func(name string, in packet.Packet) trial {
		return trial{name: name, in: in, end: leaves, reason: "nd_answered", want: answered}
	}
	no := func(name string, in packet.Packet) trial {
		return trial{name: name, in: in, reason: "neighbour_other"}
	}
	wrong := ask(vip6)
	wrong = wrong.With(packet.TransportChecksum(packet.ChecksumValue(0x1234)))
	table(t, w, []trial{
		yes("VIP", ask(vip6)), yes("VIP, unicast", direct), yes("VIP, no option", ask(vip6, optionless)),
		{name: "probe for a duplicate", in: probe, end: leaves, reason: "nd_answered", want: defended},
		no("probe with a MAC", badProbe), no("host's own", ask(hostVIP6)), no("VIP that is not owned", ask(rangeVIP6)),
		no("nobody's", ask(addr("2001:db8:1::77"))), no("routed", ask(vip6, packet.TTL(254))), no("wrong checksum", wrong),
		no("code 1", ask(vip6, func(p *packet.Packet) { p.ICMPv6.Code = 1 })),
		no("empty option", ask(vip6, func(p *packet.Packet) { p.ICMPv6.Neighbour.Options = make([]byte, 8) })),
		no("behind an extension header", ask(vip6, packet.Extended(packet.Padding(packet.ProtocolHopByHop, 1)))),
		no("advertisement", packet.NewNeighbourAdvertisement(router, vip6, mac("33:33:00:00:00:01"), addr("ff02::1"))),
	})
	must(t, w.d.SetOwned(vip6, store.OwnedNever))
	table(t, w, []trial{no("VIP given up", ask(vip6))})
}
