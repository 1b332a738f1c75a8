package packet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// withAffinity turns the tracking of clients on.
func (p *placed) withAffinity() {
	p.Helper()
	p.change(func(r *reconcile.ServiceRecord) { r.Tracking, r.AffinityTimeout = model.TrackingAuto, affinity })
}

// TestAffinitySlots: in settled slots, all flows of a client go to one backend, and clients
// spread over all of them, by either forwarding.
func TestAffinitySlots(t *testing.T) {
	t.Parallel()
	for _, port := range []uint16{portMoving, portMovingNAT} {
		p := newWorld(t).place(port)
		p.withAffinity()
		for _, k := range kinds {
			used := map[string]int{}
			for client := range 60 {
				first := p.follow(p.packet(k, client, 1, "S"))
				used[first]++
				for flow := uint16(2); flow < 12; flow++ {
					if got := p.follow(p.packet(k, client, flow, "S")); got != first {
						t.Fatalf("port %d, %s: client %d went to %s and to %s", port, k, client, first, got)
					}
				}
			}
			for _, letter := range movingLetters {
				if used[string(letter)] < 8 {
					t.Errorf("port %d, %s: 60 clients spread as %v", port, k, used)
				}
			}
		}
		if n := len(p.rememberedTable()); n != 0 {
			t.Errorf("port %d: %d entries were made in settled slots", port, n)
		}
	}
}

// TestAffinityNAT: a client's later connections follow its entry; the flows of NAT have their own.
func TestAffinityNAT(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMovingNAT)
	p.withAffinity()
	for _, k := range kinds {
		client := p.newClient()
		p.write(transitionAB)
		p.expect(p.packet(k, client, 1, "S"), "A", "client A")
		p.write(slotSpec{state: reconcile.Transition, current: 'C', previous: 'B'})
		p.expect(p.packet(k, client, 2, "S"), "A", "client A") // a second change moves no client
		p.write(slotSpec{state: reconcile.Marked, current: 'C'})
		p.expect(p.packet(k, client, 3, "S"), "A", "client A")
		other := p.newClient()
		p.expect(p.packet(k, other, 1, "S"), "C", "")
		p.write(slotSpec{state: reconcile.Settled, current: 'B'})
		p.expect(p.packet(k, client, 4, "S"), "B", "client A")
		for port, want := range map[uint16]string{1: "A", 2: "A", 3: "A", 4: "B"} {
			p.expect(p.packet(k, client, port, "A"), want, "client A") // each flow with its first backend
		}
		p.write(transitionDB)
		drained := p.newClient()
		p.expect(p.packet(k, drained, 1, "S"), "B", map[bool]string{false: "flow B syn", true: "flow B"}[k.udp])
	}
	p.soundTable()
}

// TestAffinityDrawn: if the backend is drawn at random, a client keeps its backend while it is remembered, and may get
// any one after that.
func TestAffinityDrawn(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMovingNAT)
	p.change(func(r *reconcile.ServiceRecord) {
		r.Tracking, r.AffinityTimeout, r.Policy.Draws = model.TrackingAlways, affinity, true
	})
	for _, k := range kinds {
		client, used := p.newClient(), map[string]int{}
		for flow := uint16(1); flow <= 60; flow++ {
			drawn := p.follow(p.packet(k, client, flow, "S"))
			used[drawn]++
			for later := flow + 100; later <= flow+1000; later += 100 {
				if got := p.follow(p.packet(k, client, later, "S")); got != drawn {
					t.Fatalf("%s: a client that is remembered went to %s and to %s", k, drawn, got)
				}
			}
			p.age(clientOf(p.packet(k, client, flow, "S")), int(affinity/time.Second)+3)
		}
		for _, letter := range movingLetters {
			if used[string(letter)] < 8 {
				t.Errorf("%s: a client that was forgotten 60 times drew %v", k, used)
			}
		}
	}
	p.soundTable()
}

// TestAffinityNATCountsPackets: a client stays with its backend as long as one of its flows there goes on, and a
// packet that comes too late does not bring it back.
func TestAffinityNATCountsPackets(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMovingNAT)
	p.withAffinity()
	alive, over := int(affinity/time.Second)/2-1, int(affinity/time.Second)+3 // ticks
	for _, k := range kinds {
		busy, late := p.newClient(), p.newClient()
		key := func(client int) flowKey { return clientOf(p.packet(k, client, 1, "S")) }
		seen := func(client int) uint16 { return p.rememberedTable()[key(client)].seen }
		later := func(client int) {
			p.ageFlow(p.packet(k, client, 1, "A"))
			p.expect(p.packet(k, client, 1, "A"), "A", "client A")
		}
		p.write(transitionAB)
		p.expect(p.packet(k, busy, 1, "S"), "A", "client A")
		p.expect(p.packet(k, late, 1, "S"), "A", "client A")
		p.age(key(busy), alive)
		before := seen(busy)
		p.expect(p.packet(k, busy, 1, "A"), "A", "client A")
		if is := seen(busy); is != before {
			t.Errorf("%s: a packet within a second of the last was noted with the client", k)
		}
		later(busy)
		if is := seen(busy) - before; int(is) < alive {
			t.Errorf("%s: a packet was noted with the client %d ticks after the one before, which was %d", k, is, alive)
		}
		p.age(key(busy), alive)
		p.age(key(late), over)
		later(late)
		p.write(slotSpec{state: reconcile.Transition, current: 'C', previous: 'B'})
		p.expect(p.packet(k, busy, 2, "S"), "A", "client A")
		p.expect(p.packet(k, late, 2, "S"), "B", "client B")
		before = seen(late)
		p.age(key(late), alive)
		p.ageFlow(p.packet(k, late, 1, "A"))
		p.expect(p.packet(k, late, 1, "A"), "A", "client B") // by now its client has another backend
		if is := seen(late); is != before-uint16(alive) {
			t.Errorf("%s: a packet to another backend than the client's was noted with the client", k)
		}
	}
	p.soundTable()
}

// TestAffinitySwitchedOn: an entry from before the switch is of another slot. Its flow goes on with it, but a SYN with
// its tuple is a new connection's, which a scan has to see in its own slot.
func TestAffinitySwitchedOn(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	for _, six := range []bool{false, true} {
		p.change(func(r *reconcile.ServiceRecord) { r.Tracking, r.AffinityTimeout = model.TrackingAuto, 0 })
		k, goesOn, again := kind{six: six}, p.newClient(), p.newClient()
		for _, client := range []int{goesOn, again} {
			p.remember(k, client, 1, 'C', "S")
			p.expect(p.packet(k, client, 1, "A"), "C", "flow C")
		}
		p.withAffinity()
		p.write(transitionAB)
		p.expect(p.packet(k, goesOn, 1, "A"), "C", "flow C")
		p.expect(p.packet(k, again, 1, "S"), "A", "client A")
	}
}

// TestNATWithoutAffinity: flows of NAT have entries of their own in every state of a slot.
func TestNATWithoutAffinity(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMovingNAT)
	p.change(func(r *reconcile.ServiceRecord) { r.Tracking = model.TrackingNone })
	for _, k := range kinds {
		for _, slot := range []slotSpec{settledAB, transitionAB, closingAB, markedAB} {
			client := p.newClient()
			p.write(slot)
			p.expect(p.packet(k, client, 1, "S"), "B", "")
			p.write(slotSpec{state: reconcile.Settled, current: 'C'})
			p.expect(p.packet(k, client, 1, "A"), "B", "")
			p.expect(p.packet(k, client, 2, "S"), "C", "")
		}
	}
}

// TestAffinityDraining: a client whose backend drains keeps its connections, and gets new ones to others. Each of
// these is found by its own entry, because the client's own entry names the draining backend; in every state in which
// entries are looked up.
func TestAffinityDraining(t *testing.T) {
	t.Parallel()
	all := newWorld(t).place(portMoving)
	all.withAffinity()
	for _, slot := range []slotSpec{transitionAB, transitionB, transitionAA, closingAB, markedAB} {
		for _, six := range []bool{false, true} {
			client := all.newClient()
			t.Run(fmt.Sprintf("%s/IPv6 %v", slot, six), func(t *testing.T) {
				p, tcp, udp := all.on(t), kind{six: six}, kind{udp: true, six: six}
				p.draining('C', false)
				p.remember(tcp, client, 1, 'C', "S")
				p.draining('C', true)
				p.write(slot)
				want := string(slot.current)
				p.expect(p.packet(tcp, client, 1, "A"), "C", "client C") // its connection
				p.expect(p.packet(tcp, client, 2, "S"), want, "flow "+want+" syn, client C")
				p.expect(p.packet(tcp, client, 2, "S"), want, "flow "+want+" syn, client C")
				p.expect(p.packet(tcp, client, 2, "A"), want, "flow "+want+", client C")
				p.expect(p.packet(tcp, client, 1, "A+"), "C", "client C")
				p.expect(p.packet(udp, client, 3, ""), want, "flow "+want+", client C")
				if slot.state == reconcile.Transition {
					return
				}
				// The scan at the end of a transition must not take the flow's entry for one that the slot makes
				// superfluous.
				for range 2 {
					if _, err := p.d.ScanRemembered(); err != nil {
						t.Fatal(err)
					}
				}
				p.expect(p.packet(tcp, client, 2, "A"), want, "flow "+want+", client C")
				p.draining('C', false)
				p.expect(p.packet(tcp, client, 4, "S"), "C", "client C")
			})
		}
	}
}

// TestAffinityDrainingNotRemembered: if a new connection of such a client cannot be remembered, its next packets
// follow the client's entry, so the first one must as well.
func TestAffinityDrainingNotRemembered(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.withAffinity()
	for _, slot := range []slotSpec{transitionAB, transitionB, closingAB, markedAB} {
		for _, six := range []bool{false, true} {
			tcp, client := kind{six: six}, p.newClient()
			p.budget(1000)
			p.draining('C', false)
			before := p.reasons()
			p.remember(tcp, client, 1, 'C', "S")
			p.draining('C', true)
			p.write(slot)
			p.budget(0)
			p.expect(p.packet(tcp, client, 2, "S"), "C", "client C")
			p.expect(p.packet(tcp, client, 2, "A"), "C", "client C")
			if n := p.moved(before)["not_remembered"]; n != 1 {
				t.Errorf("%s: %d were not remembered, want 1", slot, n)
			}
		}
	}
}
