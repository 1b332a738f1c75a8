package packet_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// TestBackendDown: of the NAT flows of a backend that goes down, UDP flows and connections
// that it has not answered go to others with their next packet; established connections stay,
// in both directions. If it is down in one service only, all stay.
func TestBackendDown(t *testing.T) {
	t.Parallel()
	const port, count = 71, 100
	pool := func(name string, protocol model.Protocol, down int) model.Service {
		s := model.Service{Name: name, Forwarding: model.ForwardingNAT, Announce: model.AnnounceNone, TableSize: 1021,
			Frontends: []model.Frontend{{Address: vip4, Ports: value.PortRange{First: port, Last: port}, Protocol: protocol}}}
		for i := range 3 {
			s.Backends = append(s.Backends, model.Backend{Weight: 1, Observed: model.BackendObservation{Idle: i == down, Down: i == down}, BackendAddress: model.BackendAddress{
				Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(100 + i)}), Port: backendPort}})
		}
		return s
	}
	for _, c := range []struct {
		name        string
		k           kind
		established bool
		inBoth      bool // it is down in the other service, too
		moves       bool
	}{
		{"udp", kind{udp: true}, true, true, true},
		{"tcp unanswered", kind{}, false, true, true},
		{"tcp established", kind{}, true, true, false},
		{"udp, up elsewhere", kind{udp: true}, true, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			apply := func(down int) {
				other := -1
				if c.inBoth {
					other = down
				}
				protocols := []model.Protocol{model.TCP, model.UDP}
				if c.k.udp {
					protocols[0], protocols[1] = protocols[1], protocols[0]
				}
				w.apply(append(services(), pool("pool", protocols[0], down), pool("other", protocols[1], other)))
			}
			apply(-1)
			flags, next := "S", "S"
			if c.established {
				next = "A"
			}
			var before [count]packet.Packet
			for n := range uint16(count) {
				before[n] = w.send(armA, c.k.fromClient(20000+n, port, flags))
				if c.established {
					w.send(armC, before[n].Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64), flagged("SA")))
					w.send(armA, c.k.fromClient(20000+n, port, "A"))
				}
			}
			apply(1)
			gone, counted, there := netip.MustParseAddr("10.0.0.101"), w.reasons(), 0
			for n := range uint16(count) {
				after := w.send(armA, c.k.fromClient(20000+n, port, next))
				was, is := before[n].Destination(), after.Destination()
				if was == gone {
					there++
					if c.established && !c.moves {
						// The backend's later packets reach the client.
						w.send(armC, before[n].Reverse().With(packet.MACs(beMAC, ownC), packet.TTL(64), flagged("A")))
					}
				}
				if moved := was != is; moved != (was == gone && c.moves) {
					t.Errorf("flow %d went to %s and goes to %s", n, was, is)
				}
			}
			if n := w.moved(counted)["flow_moved"]; there < count/8 || n != uint64(there) && c.moves || n != 0 && !c.moves {
				t.Errorf("%d of %d flows were with it, and %d were counted as moved", there, count, n)
			}
			// New flows go to others, whether or not the old flows stay.
			for n := range uint16(count) {
				if to := w.send(armA, c.k.fromClient(30000+n, port, "S")).Destination(); to == gone {
					t.Fatalf("new flow %d goes to a backend that is down", n)
				}
			}
			w.soundTable()
			apply(-1)
			for n := range uint16(count) {
				if to := w.send(armA, c.k.fromClient(40000+n, port, "S")).Destination(); to == gone {
					return
				}
			}
			t.Error("it is up again, and takes no new flows")
		})
	}
}

// TestRememberedDown: with direct return, only established connections follow entries of a
// backend that is down, and slots in transition from it.
func TestRememberedDown(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.tracked(model.TrackingAuto)
	down := func(letter rune, is bool) {
		for i := range p.records {
			must(p, p.d.PutBackend(reconcile.BackendRecord{BackendRef: p.refs[i][letter], Draining: is, Down: is,
				BackendAddress: model.BackendAddress{Address: movingBackend(letter, i == 1)}}))
		}
	}
	for _, six := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv6 %v", six), func(t *testing.T) {
			p := p.on(t)
			tcp, udp, client := kind{six: six}, kind{udp: true, six: six}, p.newClient()
			p.remember(tcp, client, 1, 'C', "S")
			p.remember(tcp, client, 2, 'C', "A")
			p.remember(udp, client, 3, 'C', "")
			p.write(slotSpec{state: reconcile.Transition, current: 'B', previous: 'A'})
			down('C', true)
			p.expect(p.packet(tcp, client, 2, "A+"), "C", "flow C")
			p.expect(p.packet(tcp, client, 1, "S"), "B", "flow B syn")
			p.expect(p.packet(udp, client, 3, ""), "A", "flow A")
			down('C', false)
			p.write(slotSpec{state: reconcile.Transition, current: 'B', previous: 'A', drains: true})
			down('A', true)
			p.expect(p.packet(tcp, client, 4, "A"), "A", "flow A")
			p.expect(p.packet(tcp, client, 5, "S"), "B", "flow B syn")
			p.expect(p.packet(udp, client, 6, ""), "B", "flow B")
			p.expect(p.packet(udp, client, 3, ""), "B", "flow B")
			down('A', false)
		})
	}
}
