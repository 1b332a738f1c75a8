package packet_test

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestOuterSourceConfigured: one address for all, independent of the interface's.
func TestOuterSourceConfigured(t *testing.T) {
	t.Parallel()
	four, six := addr("203.0.113.5"), addr("2001:db8:5::5")
	w := newWorld(t, withOuter(model.Encapsulation{GUEPort: 1234, Sources4: single(four), Sources6: single(six)}))
	for _, v := range directWays {
		for _, k := range kinds {
			in := k.toDirect(40000, v.port, "S")
			source := four
			if v.six {
				source = six
			}
			expected := v.expected(in, single(source))
			t.Run(fmt.Sprintf("%s/%s", v.name, k), func(t *testing.T) {
				trial{in: in, end: leaves, want: func(got packet.Packet) packet.Packet {
					want := expected(got)
					if v.forwarding == model.ForwardingDSRGUE {
						want.UDP.DestinationPort = 1234
					}
					return want
				}}.try(t, w)
			})
		}
	}
}

// outers are the parts that vary in the outer headers of many flows, each seen twice.
type outers struct {
	sources map[netip.Addr]int
	ports   map[uint16]int
	labels  map[uint32]int
}

// sendMany sends the same packets twice and expects the same outer headers for the same flow.
func sendMany(t *testing.T, w *world, k kind, v directWay, count int, prefix netip.Prefix) outers {
	t.Helper()
	out := outers{map[netip.Addr]int{}, map[uint16]int{}, map[uint32]int{}}
	fault := ""
	w.cpu.do(func() {
		for n := 0; n < count && fault == ""; n++ {
			var before packet.Packet
			for time := range 2 {
				in := k.toDirect(uint16(10000+n), v.port, []string{"S", "A"}[time], fields(0, true))
				r := w.runHere(armA, packet.Must(in))
				if r.err != nil || r.verdict != kernel.XDPRedirect {
					fault = fmt.Sprintf("%s: verdict %d, error %v", in, r.verdict, r.err)
					break
				}
				got, err := packet.Parse(r.frame)
				if err != nil {
					fault = err.Error()
					break
				}
				if diff := packet.Diff(v.expected(in, prefix)(got), got); diff != "" {
					fault = diff
				} else if time == 1 && (got.Source() != before.Source() || entropyOf(got) != entropyOf(before)) {
					fault = fmt.Sprintf("one flow, two outer headers: %s and %s", before, got)
				}
				before = got
			}
			out.sources[before.Source()]++
			port, label := entropyOf(before)[0], entropyOf(before)[1]
			out.ports[uint16(port)]++
			out.labels[label]++
		}
	})
	if fault != "" {
		t.Fatal(fault)
	}
	return out
}

// entropyOf is an outer header's hash of the flow: UDP source port and flow label.
func entropyOf(p packet.Packet) (e [2]uint32) {
	if p.UDP != nil {
		e[0] = uint32(p.UDP.SourcePort)
	}
	if p.IPv6 != nil {
		e[1] = p.IPv6.FlowLabel
	}
	return e
}

// TestOuterSourceVaries: a prefix gives each flow an address of its own, always the same, and all of
// its addresses are used, even the first.
func TestOuterSourceVaries(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		four, six string
		uses4     int // addresses that 2,000 flows have to use
		uses6     int
	}{
		{"203.0.113.0/24", "2001:db8:5::/120", 256, 256},
		{"203.0.113.64/26", "2001:db8:5::40/122", 64, 64},
		{"203.0.113.8/31", "2001:db8:5::8/127", 2, 2},
		{"203.0.113.6/32", "2001:db8:5::6/128", 1, 1},
		{"198.18.0.0/15", "2001:db8:5::/64", 1900, 1990},
		{"10.128.0.0/9", "2001:db8:5:ff00::/56", 1990, 1990},
	} {
		four, six := netip.MustParsePrefix(c.four), netip.MustParsePrefix(c.six)
		w.d.SetEncapsulation(model.Encapsulation{GUEPort: guePort, Sources4: four, Sources6: six})
		for _, v := range directWays {
			if v.oneArm || !v.forwarding.Encapsulates() {
				continue
			}
			k, prefix, uses := kind{six: v.six}, four, c.uses4
			if v.six {
				prefix, uses = six, c.uses6
			}
			t.Run(fmt.Sprintf("%s/%s", prefix, v.name), func(t *testing.T) {
				out := sendMany(t, w, k, v, 2000, prefix)
				// A fair choice of 256 leaves one out in 1 of 10 runs; the flows are the same in all.
				if n := len(out.sources); n < uses-2 || uses <= 64 && n != uses {
					t.Errorf("2,000 flows use %d addresses of %s, want %d", n, prefix, uses)
				}
				for a, n := range out.sources {
					if uses <= 256 && n > 3*2000/uses {
						t.Errorf("%s has %d of 2,000 flows", a, n)
					}
				}
			})
		}
	}
}

// TestOuterEntropyWithinASlot: the slot depends on the high bits of a flow's hash, and the value that
// spreads a backend's flows over its queues must not: their flow labels differ in the high bits too,
// which the flows of one slot would otherwise share.
func TestOuterEntropyWithinASlot(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.write(slotSpec{state: reconcile.Settled})
	record := p.records[half(true)]
	must(t, p.d.WriteSlots(record.Offset+17, reconcile.NewTable([]reconcile.Slot{p.slot(slotSpec{state: reconcile.Settled, current: 'C'}, true)})))
	flows, high := 0, map[uint32]int{}
	p.cpu.do(func() {
		for port := range uint16(30000) {
			r := p.runHere(armA, packet.Must(p.packet(kind{six: true}, 1, port, "S")))
			if r.err != nil || r.verdict != kernel.XDPRedirect {
				continue
			}
			if got, err := packet.Parse(r.frame); err == nil {
				flows++
				high[got.IPv6.FlowLabel>>12]++
			}
		}
	})
	// About 120 flows; as many fair choices of 256 meet about 95 values.
	if flows < 60 || len(high) < flows/2 {
		t.Errorf("%d flows of one slot have %d values in the high 8 bits of their flow labels", flows, len(high))
	}
}

// TestOuterEntropy: flow labels and GUE's source ports tell flows apart.
func TestOuterEntropy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, v := range directWays {
		if v.oneArm || !v.forwarding.Encapsulates() {
			continue
		}
		for _, k := range kinds {
			t.Run(fmt.Sprintf("%s/%s", v.name, k), func(t *testing.T) {
				const flows = 1000
				out := sendMany(t, w, k, v, flows, single(v.source()))
				// Of 16,384 ports, 1,000 fair choices meet 30 twice.
				if n := len(out.ports); v.forwarding == model.ForwardingDSRGUE && n < flows*95/100 {
					t.Errorf("%d flows have %d source ports", flows, n)
				}
				if n := len(out.labels); v.six && n < flows*99/100 {
					t.Errorf("%d flows have %d flow labels", flows, n)
				}
			})
		}
	}
}

// TestOuterIdentification: routers may fragment only packets for which the client allows it, and then
// every packet has its own number (RFC 6864, 4.1); a packet that may not be fragmented needs no
// number.
func TestOuterIdentification(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, v := range []directWay{wayOf(model.ForwardingDSRIPIP, false), wayOf(model.ForwardingDSRGUE, false)} {
		for _, k := range kinds {
			ids := map[uint16]bool{}
			for range 200 {
				got := w.send(armA, k.toDirect(40000, v.port, "A", fields(0, false)))
				ids[got.IPv4.ID] = true
			}
			if k.six && (len(ids) != 1 || !ids[0]) || !k.six && len(ids) < 190 {
				t.Errorf("%s, %s: 200 packets have %d identifications", v.name, k, len(ids))
			}
		}
	}
}

// tooBig is the VIP's answer to a packet, with the size that would fit.
func tooBig(in packet.Packet, mtu uint32) packet.Packet {
	about := in.With(func(p *packet.Packet) { p.Trailer = nil })
	back := packet.MACs(ownA, router)
	if in.IPv6 != nil {
		return packet.NewError(in.Destination(), 2, 0, mtu, about, back)
	}
	return packet.NewError(in.Destination(), 3, 4, mtu, about, back, func(p *packet.Packet) { p.IPv4.TOS = 0xc0 })
}

func (w *world) setMTU(mtu int) {
	w.cpu.do(func() {
		for _, arm := range []string{armA, armC} {
			link, err := netlink.LinkByName(arm)
			must(w, errors.Join(err, netlink.LinkSetMTU(link, mtu), w.d.RefreshInterface(arm)))
		}
	})
}

// TestTooBigForNAT is the same without an outer header, for client and backend alike.
func TestTooBigForNAT(t *testing.T) {
	t.Parallel()
	const mtu = 1400
	for _, v := range ways {
		w := newWorld(t)
		w.setMTU(mtu)
		for _, k := range kinds {
			in := k.fromClient(41000, v.port, "S")
			there := w.send(armA, in)
			back := there.Reverse().With(packet.MACs(beMAC, v.own), packet.TTL(64), flagged("A"))
			_ = w.send(v.arm, back)
			for _, more := range []int{0, 1, 100} {
				fill := packet.Data(make([]byte, mtu-len(packet.Quote(in, 0))+more))
				in := k.fromClient(41000, v.port, "A", fill)
				c := trial{in: in, end: leaves, want: v.expected(w, k, in)}
				b := trial{arm: v.arm, in: back.With(fill), end: leaves}
				b.want = func(packet.Packet) packet.Packet {
					return b.in.With(routed, between(destinationOf(in), sourceOf(in)), packet.MACs(ownA, router))
				}
				if more > 0 {
					c.reason, b.reason = "too_big_answered", "too_big_answered"
					c.want = func(packet.Packet) packet.Packet { return tooBig(in, mtu) }
					b.want = func(packet.Packet) packet.Packet { return tooBig(b.in, mtu).With(packet.MACs(v.own, beMAC)) }
				}
				t.Run(fmt.Sprintf("%s/%s/client/%+d", v.name, k, more), func(t *testing.T) { c.try(t, w) })
				t.Run(fmt.Sprintf("%s/%s/backend/%+d", v.name, k, more), func(t *testing.T) { b.try(t, w) })
				if more > 0 && !k.six {
					c = trial{in: in.With(func(p *packet.Packet) { p.IPv4.DF = false }), end: drops, reason: "too_big"}
					t.Run(fmt.Sprintf("%s/%s/client/%+d, DF clear", v.name, k, more), func(t *testing.T) { c.try(t, w) })
				}
			}
		}
	}
}

// TestTooBig: with its outer header a packet may be as long as the MTU towards the backend, and not a
// byte longer: then its sender is told. The padding of the Ethernet frame does not count. No error is
// sent about a packet that routers might have fragmented.
func TestTooBig(t *testing.T) {
	t.Parallel()
	for _, mtu := range []int{1500, 1400} {
		w := newWorld(t) // a fresh program may send as many errors at once as one MTU needs
		w.setMTU(mtu)
		for _, v := range directWays {
			if !v.forwarding.Encapsulates() {
				continue
			}
			for _, k := range kinds {
				for _, more := range []int{-1, 0, 1, 100} {
					in := k.toDirect(40000, v.port, "A", padded)
					in = in.With(packet.Data(make([]byte, mtu-v.outerSize()-len(packet.Quote(in, 0))+len(in.Trailer)+more)))
					c := trial{in: in, end: leaves, want: v.expected(in, single(v.source()))}
					if more > 0 {
						c.reason = "too_big_answered"
						c.want = func(packet.Packet) packet.Packet { return tooBig(in, uint32(mtu-v.outerSize())) }
					}
					t.Run(fmt.Sprintf("MTU %d/%s/%s/%+d", mtu, v.name, k, more), func(t *testing.T) { c.try(t, w) })
					if more <= 0 || k.six {
						continue
					}
					c = trial{in: in.With(func(p *packet.Packet) { p.IPv4.DF = false }), end: drops, reason: "too_big"}
					t.Run(fmt.Sprintf("MTU %d/%s/%s/%+d, DF clear", mtu, v.name, k, more), func(t *testing.T) { c.try(t, w) })
				}
			}
		}
	}
}

// TestErrorsThatMayNotBeSent: to a source that is no martian, but that RFC 1122, 3.2.2 does not let us
// answer. The packets that would have been answered are dropped, and not passed to the host.
func TestErrorsThatMayNotBeSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nobody := from(addr("240.0.0.1"))
	for _, v := range directWays {
		for _, k := range kinds {
			if k.six || !v.forwarding.Encapsulates() {
				continue
			}
			table(t, w, []trial{
				{name: fmt.Sprintf("%s/%s/too long", v.name, k), in: k.toDirect(40000, v.port, "A", packet.Data(make([]byte, 1480)), nobody), end: drops, reason: "icmp_limited"},
				{name: fmt.Sprintf("%s/%s/TTL 1", v.name, k), in: k.toDirect(40000, v.port, "A", packet.TTL(1), nobody), end: drops, reason: "icmp_limited"},
			})
		}
	}
}

// TestNoOuterSource: a host without an address of the family, and none configured.
func TestNoOuterSource(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.cpu.do(func() {
		for _, arm := range []string{armA, armC} {
			link, err := netlink.LinkByName(arm)
			must(t, err)
			addresses, err := netlink.AddrList(link, unix.AF_UNSPEC)
			must(t, err)
			for _, a := range addresses {
				must(t, netlink.AddrDel(link, &a))
			}
		}
		for _, arm := range []string{armA, armC} {
			must(t, w.d.RefreshInterface(arm))
		}
	})
	each := func(name string, has4, has6 bool, prefix4, prefix6 netip.Prefix) {
		for _, v := range directWays {
			for _, k := range kinds {
				in := k.toDirect(40000, v.port, "S")
				prefix, has := prefix4, has4
				if v.six {
					prefix, has = prefix6, has6
				}
				c := trial{in: in, end: leaves, want: v.expected(in, prefix)}
				if !has && v.forwarding.Encapsulates() {
					c.end, c.reason = drops, "no_source"
				}
				t.Run(fmt.Sprintf("%s/%s/%s", name, v.name, k), func(t *testing.T) { c.try(t, w) })
			}
		}
	}
	four, six := netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:5::/64")
	each("none", false, false, netip.Prefix{}, netip.Prefix{})
	w.d.SetEncapsulation(model.Encapsulation{GUEPort: guePort, Sources4: four})
	each("IPv4 configured", true, false, four, netip.Prefix{})
	w.d.SetEncapsulation(model.Encapsulation{GUEPort: guePort, Sources6: six})
	each("IPv6 configured", false, true, netip.Prefix{}, six)
}
