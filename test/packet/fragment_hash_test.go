package packet_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

var hashedVIP4, hashedVIP6 = addr("192.0.2.18"), addr("2001:db8:1::18")

// hashed is a service whose slots the addresses alone decide, with a VIP of its own.
func hashed(change ...func(*model.Service)) model.Service {
	s := model.Service{Name: "hashed", Forwarding: model.ForwardingDSRIPIP, Announce: model.AnnounceL2, TableSize: 251,
		Policy: model.Policy{HashAddresses: true}}
	for _, vip := range []netip.Addr{hashedVIP4, hashedVIP6} {
		for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
			for _, port := range []uint16{80, 81} {
				s.Frontends = append(s.Frontends, model.Frontend{Address: vip, Ports: value.PortRange{First: port, Last: port}, Protocol: protocol})
			}
		}
	}
	for _, b := range movingBackends() {
		s.Backends = append(s.Backends, model.Backend{BackendAddress: model.BackendAddress{Address: b}, Weight: 1})
	}
	for _, c := range change {
		c(&s)
	}
	return s
}

// toHashed is a packet of the client with this number.
func (k kind) toHashed(client int, port, vipPort uint16, edits ...packet.Edit) packet.Packet {
	from := k.pick(addr(fmt.Sprintf("198.18.0.%d", client)), addr(fmt.Sprintf("2001:db8:18::%x", client)))
	return k.packet(netip.AddrPortFrom(from, port), netip.AddrPortFrom(k.pick(hashedVIP4, hashedVIP6), vipPort), "S",
		append([]packet.Edit{packet.MACs(router, ownA)}, edits...)...)
}

// TestHashOfAddresses: all flows of a client go to one backend, and so do fragments, also if
// this balancer or another has not seen the first one.
func TestHashOfAddresses(t *testing.T) {
	t.Parallel()
	fleet := []*world{newWorld(t), newWorld(t)}
	for _, w := range fleet {
		w.apply(append(services(), hashed()))
	}
	for _, k := range kinds {
		used := map[netip.Addr]int{}
		for client := 1; client <= 60; client++ {
			home := fleet[0].send(armA, k.toHashed(client, 40000, 80)).Destination()
			used[home]++
			for port := uint16(40001); port < 40004; port++ {
				if to := fleet[client%2].send(armA, k.toHashed(client, port, 80+port%2)).Destination(); to != home {
					t.Errorf("%s: a flow of client %d went to %s, and one before to %s", k, client, to, home)
				}
			}
			parts := cut(k.toHashed(client, 40000, 80, pattern(3000)), uint32(client), 1000, 2000)
			var outer []packet.Packet
			for i, at := range []struct{ part, balancer int }{{1, 0}, {2, 1}, {0, 1}, {1, 1}} {
				w := fleet[at.balancer]
				c := trial{in: parts[at.part], end: leaves, want: func(got packet.Packet) packet.Packet {
					outer = append(outer, got)
					return got
				}}
				if at.part > 0 {
					c.notes = []string{"fragment_followed"}
				}
				c.try(t, w)
				if outer[i].Destination() != home {
					t.Errorf("%s: fragment %d of client %d went to %s by balancer %d, and its flow to %s", k, at.part, client, outer[i].Destination(), at.balancer, home)
				}
			}
		}
		if len(used) < 3 {
			t.Errorf("%s: the clients' flows went to %v, want all three backends", k, used)
		}
	}
}

// TestHashOfAddressesWithNAT: a client's flows have one backend, independent of the balancer's
// other services, so that two balancers with different files agree.
func TestHashOfAddressesWithNAT(t *testing.T) {
	t.Parallel()
	for _, forwarding := range []model.Forwarding{model.ForwardingNAT, model.ForwardingNATDestination} {
		t.Run(string(forwarding), func(t *testing.T) {
			service := hashed(func(s *model.Service) { s.Forwarding = forwarding })
			alone := newWorld(t, withServices(service))
			beside := newWorld(t, withServices(append(allServices(), service)...))
			for _, k := range kinds {
				used := map[netip.Addr]int{}
				for client := 1; client <= 40; client++ {
					home := beside.send(armA, k.toHashed(client, 40000, 80)).Destination()
					used[home]++
					for port := uint16(40001); port < 40004; port++ {
						if to := alone.send(armA, k.toHashed(client, port, 80+port%2)).Destination(); to != home {
							t.Errorf("%s: client %d has a flow at %s, and by the other balancer one at %s", k, client, to, home)
						}
					}
				}
				if len(used) < 3 {
					t.Errorf("%s: the clients' flows went to %v, want all three backends", k, used)
				}
			}
		})
	}
}

// TestMartianFragments: a later fragment that is placed by its addresses must have valid ones,
// too.
func TestMartianFragments(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.apply(append(services(), hashed()))
	for i, k := range kinds {
		later := cut(k.toHashed(1, 40000, 80, pattern(2000)), uint32(i), 1000)[1]
		for _, s := range sourcesOf[k.six] {
			c := trial{in: later.With(from(addr(s.address))), end: drops, reason: s.reason}
			if s.reason == "" {
				c.end, c.reason = leaves, "fragment_followed"
			}
			t.Run(fmt.Sprintf("%s/%s", k, s.address), func(t *testing.T) { c.try(t, w) })
		}
		itself := from(k.pick(hashedVIP4, hashedVIP6))
		trial{in: later.With(itself), end: drops, reason: "loop"}.try(t, w)
	}
}

// TestHashOfAddressesWhereItDoesNotDecide: a fragment whose backend cannot be known is dropped.
func TestHashOfAddressesWhereItDoesNotDecide(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := uint32(0)
	ends := func(name string, end outcome, reason string) {
		t.Helper()
		for _, k := range kinds {
			id++
			c := trial{in: cut(k.toHashed(1, 40000, 80, pattern(2000)), id, 1000)[1], end: end, reason: reason}
			t.Run(name+"/"+k.String(), func(t *testing.T) { c.try(t, w) })
		}
	}
	apply := func(all ...model.Service) { w.apply(append(services(), all...)) }
	moving := func(state reconcile.SlotState) {
		t.Helper()
		contents, err := w.d.Contents()
		must(t, err)
		for index, s := range contents.Services {
			if s.Name == "hashed" {
				slots := slices.Clone(contents.Slots[index])
				for i, slot := range slots.All() {
					slot.State = state
					slots.Set(i, slot)
				}
				must(t, w.d.WriteSlots(s.Offset, slots))
			}
		}
	}
	apply(hashed())
	ends("settled", leaves, "fragment_followed")
	for _, state := range []reconcile.SlotState{reconcile.Transition, reconcile.Closing, reconcile.Marked} {
		moving(state)
		ends(fmt.Sprintf("state %d", state), drops, "fragment_early")
	}
	moving(reconcile.Settled)
	ends("settled again", leaves, "fragment_followed")
	other := hashed(func(s *model.Service) {
		s.Name, s.Frontends = "other", slices.Clone(s.Frontends)
		for i := range s.Frontends {
			s.Frontends[i].Ports = value.PortRange{First: 82, Last: 82}
		}
		s.Frontends = slices.Compact(s.Frontends)
	})
	apply(hashed(), other)
	ends("two services", drops, "fragment_early")
	apply(hashed())
	ends("one service again", leaves, "fragment_followed")
	apply(hashed(func(s *model.Service) { s.Tracking = model.TrackingAlways }))
	ends("remembered always", drops, "fragment_early")
	apply(hashed(func(s *model.Service) { s.Policy.HashAddresses = false }))
	ends("hash of the flow", drops, "fragment_early")
	apply(hashed(func(s *model.Service) { s.Forwarding = model.ForwardingNATDestination }))
	ends("NAT", drops, "fragment_early")
	apply(hashed(func(s *model.Service) { s.Backends = nil }))
	ends("no backend", drops, "no_backend")
	apply()
	ends("no service", passes, "not_ours")
}
