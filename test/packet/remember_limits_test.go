package packet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
)

// tick is the clock that entries age by. It is read from an entry whose flow gets a packet,
// because that costs no budget.
func (p *placed) tick(of packet.Packet) uint16 {
	p.Helper()
	p.follow(of)
	return p.rememberedTable()[flowOf(of)].seen
}

// nextTick waits for the next tick, and returns it.
func (p *placed) nextTick(of packet.Packet) uint16 {
	p.Helper()
	before := p.tick(of)
	now := before
	p.eventually("the next tick", 20*time.Second, func() bool {
		now = p.tick(of)
		return now != before
	})
	return now
}

// TestBudget: half of the new entries of a tick is for first packets; the other half is for
// flows in their middle. A packet that cannot be remembered goes where its flow's next packets
// will go.
func TestBudget(t *testing.T) {
	t.Parallel()
	all := newWorld(t).place(portMoving)
	all.clients = 10
	all.tracked(model.TrackingAuto)
	const budget = 4 // so few packets that a tick is enough on a slow machine
	for _, c := range []struct {
		name         string
		slot         slotSpec
		first, later string // destinations of packets that cannot be remembered
		udp          string
	}{
		{"previous lives", transitionAB, "A", "A", "A"},
		{"previous drains", transitionDB, "A", "A", "B"},
		{"no previous", transitionB, "B", "B", "B"},
		{"previous gone", transitionXB, "B", "B", "B"},
		{"there and back", transitionAA, "A", "A", "A"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := all.on(t)
			current := string(c.slot.current)
			remembered := p.packet(kind{}, 1, 1, "A")
			p.budget(1000)
			p.remember(kind{}, 1, 1, 'C', "A")
			p.write(c.slot)
			p.budget(budget)
			// All steps have to happen within one tick; if they did not, again with other
			// flows.
			for attempt := 1; ; attempt++ {
				client := all.newClient()
				at := p.nextTick(remembered)
				before, counts := p.reasons(), map[string]int{}
				send := func(name string, k kind, ports uint16, flags string) {
					for n := range uint16(2 * budget) {
						in := p.packet(k, client, ports+n, flags)
						counts[name+" to "+p.follow(in)]++
						if p.memory(in) != "" {
							counts[name+" remembered"]++
						}
					}
				}
				send("first", kind{}, 1000, "S")
				send("first again", kind{}, 1000, "S") // the forgotten ones are still forgotten
				send("UDP", kind{udp: true}, 2000, "")
				send("later", kind{}, 3000, "A")
				if p.tick(remembered) != at && attempt < 50 {
					continue
				}
				want := map[string]int{}
				add := func(name string, n int) { want[name] += n }
				for _, name := range []string{"first", "first again"} {
					add(name+" remembered", budget/2)
					add(name+" to "+current, budget/2)
					add(name+" to "+c.first, budget+budget/2)
				}
				add("UDP to "+c.udp, 2*budget)
				add("later remembered", budget/2)
				add("later to "+c.later, 2*budget)
				if fmt.Sprint(counts) != fmt.Sprint(want) {
					t.Errorf("in tick %d: %v\nwant %v", at, counts, want)
				}
				if moved := p.moved(before); moved["not_remembered"] != 13*budget/2 || len(moved) != 1 {
					t.Errorf("counted %v, want %d not_remembered", moved, 13*budget/2)
				}
				return
			}
		})
	}
}

// TestTableFull: as with a budget that is used up, in every tracking that remembers.
func TestTableFull(t *testing.T) {
	t.Parallel()
	const places = 64
	p := newWorld(t, withLimits(func(l *model.Limits) { l.Remembered = places })).place(portMoving)
	p.budget(1 << 20)
	p.tracked(model.TrackingAuto)
	p.write(transitionAB)
	var flows []packet.Packet
	for n := range uint16(places) {
		in := p.packet(kinds[n%4], 1, n, "S")
		p.follow(in)
		flows = append(flows, in)
	}
	if n := len(p.rememberedTable()); n != places {
		t.Fatalf("%d flows fit, want %d", n, places)
	}
	full := func(slot slotSpec, tracking model.Tracking, first, later, udp string) {
		t.Helper()
		p.change(func(r *reconcile.ServiceRecord) { r.Tracking = tracking })
		p.write(slot)
		before := p.reasons()
		for _, six := range []bool{false, true} {
			client := p.newClient() + 1000
			p.expect(p.packet(kind{six: six}, client, 1, "S"), first, "")
			p.expect(p.packet(kind{six: six}, client, 1, "A"), later, "")
			p.expect(p.packet(kind{six: six}, client, 2, "A"), later, "")
			p.expect(p.packet(kind{udp: true, six: six}, client, 1, ""), udp, "")
		}
		if moved := p.moved(before); moved["not_remembered"] != 8 || len(moved) != 1 {
			t.Errorf("%s, %s: counted %v, want 8 not_remembered", slot, tracking, moved)
		}
	}
	full(transitionAB, model.TrackingAuto, "A", "A", "A")
	full(transitionDB, model.TrackingAuto, "A", "A", "B")
	full(transitionB, model.TrackingAuto, "B", "B", "B")
	full(transitionAB, model.TrackingAlways, "A", "A", "A")
	full(settledAB, model.TrackingAlways, "B", "B", "B")
	// Remembered flows stay remembered, and a flow that ends makes room.
	p.change(func(r *reconcile.ServiceRecord) { r.Tracking = model.TrackingAuto })
	p.write(slotSpec{state: reconcile.Transition, current: 'C', previous: 'C'})
	for _, in := range flows {
		want := "B"
		if in.UDP != nil {
			want = "A"
		}
		if got := p.follow(in); got != want {
			t.Errorf("%s went to %s, want %s", in, got, want)
		}
	}
	p.age(flowOf(flows[0]), 1<<15)
	p.expect(flows[0], "C", "flow C syn")
}
