package packet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
)

// expect sends a packet and checks its backend and the entries afterwards.
func (p *placed) expect(in packet.Packet, want, memory string) {
	p.Helper()
	if got := p.follow(in); got != want {
		p.Errorf("%s went to %q, want %q", in, got, want)
	}
	if got := p.memory(in); got != memory {
		p.Errorf("after %s, remembered is %q, want %q", in, got, memory)
	}
}

// TestPreviousBefore: if the table has changed its size, the previous backend is found in the
// table before: the previous one of a slot there in transition, otherwise the current one.
func TestPreviousBefore(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	for _, before := range []struct {
		slot slotSpec
		want string // backend of flows older than the change
	}{
		{slotSpec{state: reconcile.Settled, current: 'C'}, "C"},
		{slotSpec{state: reconcile.Settled, current: 'C', previous: 'A'}, "C"},
		{slotSpec{state: reconcile.Marked, current: 'C', previous: 'A'}, "C"},
		{slotSpec{state: reconcile.Closing, current: 'C', previous: 'A'}, "C"},
		{slotSpec{state: reconcile.Transition, current: 'C', previous: 'A'}, "A"},
		{slotSpec{state: reconcile.Transition, current: 'C'}, "B"},
		{slotSpec{state: reconcile.Settled, current: 'X'}, "B"},
		{slotSpec{state: reconcile.Transition, current: 'C', previous: 'X'}, "B"},
		{slotSpec{state: reconcile.Settled}, "B"},
	} {
		for _, drains := range []bool{false, true} {
			for _, six := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, drains %v, IPv6 %v", before.slot, drains, six), func(t *testing.T) {
					p := p.on(t)
					p.tableBefore(before.slot)
					p.write(transitionFore)
					udp := before.want
					if drains && udp != "B" { // the table before does not have that, but the backend does
						p.draining(rune(udp[0]), true)
						defer p.draining(rune(udp[0]), false)
						udp = "B"
					}
					tcp := kind{six: six}
					p.expect(p.packet(tcp, 1, 1, "S"), "B", "flow B syn")
					p.expect(p.packet(tcp, 1, 2, "A"), before.want, "flow "+before.want)
					p.expect(p.packet(kind{udp: true, six: six}, 1, 3, ""), udp, "flow "+udp)
					must(t, p.remembered.Delete(p.rawRemembered(flowOf(p.packet(tcp, 1, 1, "")))))
					must(t, p.remembered.Delete(p.rawRemembered(flowOf(p.packet(tcp, 1, 2, "")))))
					must(t, p.remembered.Delete(p.rawRemembered(flowOf(p.packet(kind{udp: true, six: six}, 1, 3, "")))))
				})
			}
		}
	}
}

// TestPreviousBeforeBySameHash: a flow's place in the table before follows from its hash there,
// so it keeps the backend that it had with that table.
func TestPreviousBeforeBySameHash(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.tracked(model.TrackingAuto)
	const flows = 300
	for _, six := range []bool{false, true} {
		k := kind{six: six}
		var before [flows]string
		used := map[string]int{}
		for n := range before { // the reconciler's own table: all three backends
			before[n] = p.follow(p.packet(k, 1, uint16(n+1), "A"))
			used[before[n]]++
		}
		if len(used) != len(movingLetters) {
			t.Fatalf("300 flows went to %v", used)
		}
		h := half(six)
		record := p.records[h]
		old := record
		record.BeforeOffset, record.BeforeSize = old.Offset, old.Size
		record.Offset, record.Size = 61000+uint32(h)*509, 509
		slots := make(reconcile.Table, record.Size)
		for i := range slots {
			slots.Set(i, p.slot(slotSpec{state: reconcile.Transition, current: rune(movingLetters[i%3]), before: true}, six))
		}
		must(t, p.d.WriteSlots(record.Offset, slots))
		must(t, p.d.PutService(record))
		for n := range before {
			if got := p.follow(p.packet(k, 1, uint16(n+1), "A")); got != before[n] {
				t.Errorf("IPv6 %v: flow %d went to %s before the table changed its size, and to %s afterwards", six, n, before[n], got)
			}
		}
	}
}

// step is a packet of a flow and the flags of its entry afterwards.
type step struct{ flags, want string }

// TestRememberedFlags has each packet's effect on a flow's entry.
func TestRememberedFlags(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.tracked(model.TrackingAuto)
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"opened", []step{{"S", "B syn"}, {"A", "B"}, {"PA+", "B"}}},
		{"retransmitted SYN", []step{{"S", "B syn"}, {"S", "B syn"}, {"A", "B"}}},
		{"SYN with data", []step{{"S+", "B syn"}, {"S+", "B syn"}, {"A", "B"}}},
		{"half-closed", []step{{"S", "B syn"}, {"A", "B"}, {"FA", "B fin"}, {"A", "B fin"}, {"A", "B fin"}}},
		{"FIN with data", []step{{"S", "B syn"}, {"A", "B"}, {"FA+", "B fin"}}},
		{"data after a FIN", []step{{"S", "B syn"}, {"A", "B"}, {"FA", "B fin"}, {"A+", "B"}}},
		{"reset", []step{{"S", "B syn"}, {"A", "B"}, {"R", "B reset"}, {"R", "B reset"}}},
		{"reset, and it goes on", []step{{"S", "B syn"}, {"A", "B"}, {"R", "B reset"}, {"A", "B"}}},
		{"reset before an answer", []step{{"S", "B syn"}, {"R", "B syn reset"}, {"A", "B"}}},
		{"reset of a closed one", []step{{"S", "B syn"}, {"A", "B"}, {"FA", "B fin"}, {"R", "B fin reset"}}},
		{"SYN on an open one", []step{{"S", "B syn"}, {"A", "B"}, {"S", "B"}}},
		{"FIN at once", []step{{"S", "B syn"}, {"FA", "B fin"}}},
	} {
		for _, state := range []slotSpec{transitionAB, closingAB, markedAB} {
			for _, six := range []bool{false, true} {
				client := p.newClient()
				t.Run(fmt.Sprintf("%s/%s/IPv6 %v", c.name, state, six), func(t *testing.T) {
					p := p.on(t)
					p.write(transitionAB)
					for i, s := range c.steps {
						in := p.packet(kind{six: six}, client, 1, s.flags)
						p.expect(in, "B", "flow "+s.want)
						if i == 0 { // from then on the other states must keep it as well
							other := state
							other.current = 'C'
							p.write(other)
						}
					}
				})
			}
		}
	}
}

// TestRememberedAgain: a SYN after a FIN or a reset opens another connection, which is placed
// anew, and remembered in a transition only.
func TestRememberedAgain(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.tracked(model.TrackingAuto)
	for _, closing := range []string{"FA", "R"} {
		for _, state := range []slotSpec{transitionAB, closingAB, markedAB} {
			client := p.newClient()
			t.Run(fmt.Sprintf("%s/%s", closing, state), func(t *testing.T) {
				p := p.on(t)
				p.write(transitionAB)
				for _, flags := range []string{"S", "A", closing} {
					p.follow(p.packet(kind{}, client, 1, flags))
				}
				other := state
				other.current = 'C'
				p.write(other)
				first, then := "", ""
				if state == transitionAB {
					first, then = "flow C syn", "flow C"
				}
				p.expect(p.packet(kind{}, client, 1, "S"), "C", first)
				p.expect(p.packet(kind{}, client, 1, "A"), "C", then)
			})
		}
	}
}

// TestRememberedLife: the time for which an entry lives depends on its last packet. An expired
// entry counts as missing.
func TestRememberedLife(t *testing.T) {
	t.Parallel()
	p := newWorld(t, withTimeouts(func(o *model.Timeouts) {
		o.TCPEstablished, o.TCPHandshake, o.TCPClosing, o.UDP = 3*time.Hour, 60*time.Second, 20*time.Second, 8*time.Minute
	})).place(portMoving)
	const halfClosed = 4 * time.Minute
	for _, c := range []struct {
		name     string
		udp      bool
		steps    []string
		affinity time.Duration
		timeout  time.Duration
	}{
		{"handshake", false, []string{"S"}, 0, 60 * time.Second},
		{"handshake, SYN again", false, []string{"S", "S"}, 0, 60 * time.Second},
		{"established", false, []string{"S", "A"}, 0, 3 * time.Hour},
		{"in its middle", false, []string{"A"}, 0, 3 * time.Hour},
		{"half-closed", false, []string{"S", "A", "FA"}, 0, halfClosed},
		{"half-closed, and acknowledges", false, []string{"S", "A", "FA", "A"}, 0, halfClosed},
		{"FIN taken back", false, []string{"S", "A", "FA", "A+"}, 0, 3 * time.Hour},
		{"reset", false, []string{"S", "A", "R"}, 0, 20 * time.Second},
		{"reset taken back", false, []string{"S", "A", "R", "A"}, 0, 3 * time.Hour},
		{"closed and reset", false, []string{"S", "A", "FA", "R"}, 0, 20 * time.Second},
		{"begun anew", false, []string{"S", "A", "FA", "S"}, 0, 60 * time.Second},
		{"UDP", true, []string{"", ""}, 0, 8 * time.Minute},
		{"client", false, []string{"S"}, 100 * time.Second, 100 * time.Second},
		{"client whose flow was reset", false, []string{"S", "R"}, 100 * time.Second, 100 * time.Second},
		{"client by UDP", true, []string{""}, 100 * time.Second, 100 * time.Second},
	} {
		for _, over := range []bool{false, true} {
			for _, six := range []bool{false, true} {
				client := p.newClient()
				t.Run(fmt.Sprintf("%s, over %v, IPv6 %v", c.name, over, six), func(t *testing.T) {
					p := p.on(t)
					p.change(func(r *reconcile.ServiceRecord) { r.Tracking, r.AffinityTimeout = model.TrackingAuto, c.affinity })
					p.write(slotSpec{state: reconcile.Transition, current: 'C'})
					k := kind{udp: c.udp, six: six}
					for _, flags := range c.steps {
						p.follow(p.packet(k, client, 1, flags))
					}
					key, of := flowOf(p.packet(k, client, 1, "")), "flow"
					if c.affinity > 0 {
						key, of = clientOf(p.packet(k, client, 1, "")), "client"
					}
					// A tick lasts 1 to 2 s, at any rate of jiffies.
					ticks := int(c.timeout/time.Second)/2 - 1
					if over {
						ticks = int(c.timeout/time.Second) + 3
					}
					seen := p.rememberedTable()[key].seen
					p.age(key, ticks)
					p.write(transitionAB)
					want := "C"
					if over {
						want = "A"
					}
					flags := "A"
					if c.udp {
						flags = ""
					}
					in := p.packet(k, client, 1, flags)
					if got := p.follow(in); got != want {
						t.Errorf("aged by %d ticks, it went to %q, want %q", ticks, got, want)
					}
					if e := p.rememberedTable()[key]; e.backend != p.refs[half(six)][rune(want[0])] || e.seen-seen > 60 {
						t.Errorf("then the %s is remembered as %+v, it was seen at %d", of, e, seen)
					}
				})
			}
		}
	}
}

// TestRememberedClocks: an entry may be seen a tick ahead by another CPU; any other value out of
// range counts as older than any timeout.
func TestRememberedClocks(t *testing.T) {
	t.Parallel()
	p := newWorld(t, withTimeouts(func(o *model.Timeouts) { o.TCPEstablished = 12 * time.Hour })).place(portMoving)
	p.tracked(model.TrackingAuto)
	for _, c := range []struct {
		ticks int
		want  string
	}{{-1, "C"}, {0, "C"}, {1, "C"}, {12 * 3600 / 2, "C"}, {0xf100, "A"}, {-1000, "A"}, {-0x4000, "A"}} {
		client := p.newClient()
		p.remember(kind{}, client, 1, 'C', "A")
		in := p.packet(kind{}, client, 1, "A")
		p.write(transitionAB)
		// Between reading the clock and using it, it may move on by one, which the margins allow.
		p.age(flowOf(in), c.ticks)
		if got := p.follow(in); got != c.want {
			t.Errorf("an entry of an age of %d ticks led to %q, want %q", c.ticks, got, c.want)
		}
	}
}

// TestRememberedBackendGone: the flows of a removed backend are placed anew, also if another has
// taken its place, or it has come back.
func TestRememberedBackendGone(t *testing.T) {
	t.Parallel()
	all := newWorld(t).place(portMoving)
	all.tracked(model.TrackingAuto)
	for _, how := range []string{"removed", "replaced", "back again"} {
		for _, slot := range []slotSpec{transitionAB, closingAB, markedAB} {
			t.Run(fmt.Sprintf("%s/%s", how, slot), func(t *testing.T) {
				p, client := all.on(t), all.newClient()
				for _, k := range kinds {
					p.remember(k, client, 1, 'C', "A")
					p.remember(k, client, 2, 'C', "S")
				}
				for i := range p.records {
					gone := p.refs[i]['C']
					must(t, p.d.DeleteBackend(gone))
					next := reconcile.BackendRecord{BackendRef: gone}
					next.Generation++
					switch how {
					case "replaced":
						next.Address = []model.BackendAddress{{Address: keeper4}, {Address: keeper6}}[i].Address
						must(t, p.d.PutBackend(next))
					case "back again":
						next.Address = movingBackend('C', i == 1)
						must(t, p.d.PutBackend(next))
					}
				}
				p.write(slot)
				for _, k := range kinds {
					want, first, memory, of := "B", "B", "", ""
					if slot.state == reconcile.Transition {
						want, first, memory, of = "A", "A", "flow A", "flow A"
						if !k.udp {
							first, of = "B", "flow B syn"
						}
					}
					p.expect(p.packet(k, client, 1, "A"), want, memory)
					p.expect(p.packet(k, client, 2, "S"), first, of)
				}
				for i := range p.records { // C for the next case, at the same index
					next := p.refs[i]['C']
					next.Generation += 2
					p.refs[i]['C'] = next
				}
				p.draining('C', false)
				must(t, p.way('C'))
			})
		}
	}
}

// TestRememberedOfAnotherService: entries of a removed service are not followed.
func TestRememberedOfAnotherService(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	for _, k := range kinds {
		p.change(func(r *reconcile.ServiceRecord) { r.Tracking, r.AffinityTimeout = model.TrackingAuto, 0 })
		p.remember(k, 1, 1, 'C', "A")
		p.change(func(r *reconcile.ServiceRecord) { r.Generation++ })
		p.write(transitionAB)
		p.expect(p.packet(k, 1, 1, "A"), "A", "flow A")
		// A client's entry is found only by its own service's generation, so the old one stays.
		p.change(func(r *reconcile.ServiceRecord) { r.AffinityTimeout = affinity })
		p.remember(k, 2, 1, 'C', "A")
		p.change(func(r *reconcile.ServiceRecord) { r.Generation++ })
		p.write(transitionAB)
		in := p.packet(k, 2, 1, "A")
		if got := p.follow(in); got != "A" {
			t.Errorf("%s: it went to %q, want A", k, got)
		}
		if _, err := p.d.ScanRemembered(); err != nil {
			t.Fatal(err)
		}
		if got := p.memory(in); got != "client A" || len(p.rememberedTable()) != 1 {
			t.Errorf("%s: remembered is %q, and all is %v", k, got, p.rememberedTable())
		}
		must(t, p.remembered.Delete(p.rawRemembered(clientOf(in))))
	}
}

// TestForeignRemembered puts values into an entry that a reader can meet there while the element
// is being given to another flow. No packet may follow it.
func TestForeignRemembered(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.tracked(model.TrackingAuto)
	for _, k := range kinds {
		p.remember(k, 1, 1, 'C', "A")
		p.remember(k, 1, 2, 'C', "A")
		in := p.packet(k, 1, 1, "A")
		key := p.rawRemembered(flowOf(in))
		own, err := p.remembered.LookupBytes(key)
		must(t, err)
		foreign, err := p.remembered.LookupBytes(p.rawRemembered(flowOf(p.packet(k, 1, 2, "A"))))
		must(t, err)
		values := map[string][]byte{"another's value": foreign}
		for at := range own {
			for _, bit := range []byte{1, 0x80} {
				position := (at-8)*8 + map[byte]int{1: 0, 0x80: 7}[bit]
				if position >= seenShift && position < flagsShift+8 {
					continue // flags and time change while an entry lives
				}
				value := append([]byte(nil), own...)
				value[at] ^= bit
				values[fmt.Sprintf("byte %d, %#x", at, bit)] = value
			}
		}
		p.write(transitionAB)
		for name, value := range values {
			must(t, p.remembered.Put(key, value))
			before := p.reasons()
			got := p.follow(in)
			if moved := p.moved(before); got != "A" || moved["flow_recycled"] == 0 || moved["not_remembered"] != 1 {
				t.Errorf("%s, %s: it went to %q, counted %v; it was to find no entry, and no room for one", k, name, got, moved)
			}
		}
		must(t, p.remembered.Put(key, own))
		p.expect(in, "C", "flow C")
	}
}
