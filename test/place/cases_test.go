package place_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// scene is a history that a test writes step by step.
func scene(t *testing.T, w *world, tell func(h *history)) {
	t.Helper()
	h := newHistory(w, nil, newTally(), breakage{})
	defer func() {
		t.Helper()
		if f, ok := recover().(failure); ok {
			t.Fatalf("%v\nhistory, by time in quanta:\n%s", f, strings.Join(h.trace, "\n"))
		}
	}()
	tell(h)
	h.checkEntries()
	t.Log(h.count)
}

// web is a service with these backends, "22" for 10.0.0.22 with weight 1 and "22*3" for weight 3.
func web(backends string, changes ...func(*model.Service)) model.Service {
	s := model.Service{Name: "web", Frontends: frontends(0), Forwarding: model.ForwardingDSRIPIP, TableSize: 251}
	for _, text := range strings.Fields(backends) {
		last, weight, weighted := strings.Cut(text, "*")
		b := model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0." + last)}, Weight: 1}
		if weighted {
			n, err := strconv.Atoi(weight)
			if err != nil {
				panic(err)
			}
			b.Weight = uint16(n)
		}
		s.Backends = append(s.Backends, b)
	}
	for _, change := range changes {
		change(&s)
	}
	return s
}

func backendNumber(n int) model.BackendAddress {
	return model.BackendAddress{Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})}
}

// configure applies these services.
func (h *history) configure(services ...model.Service) {
	for _, s := range services {
		h.log("%s: %s", s.Name, describe(s))
	}
	h.desired.Services = model.Shared(services)
	h.apply()
}

// elapse lets time pass and makes the reconciler settle the slots that are due.
func (h *history) elapse(quanta float64) {
	h.log("%.1f quanta pass", quanta)
	h.advance(time.Duration(quanta * float64(quantum)))
	h.settle()
}

// tuple is a flow of the first service, IPv4, that has not begun.
func (h *history) tuple(protocol model.Protocol) *flow {
	f := &flow{service: h.desired.Services[0].Name, state: syn}
	for _, front := range h.desired.Services[0].Frontends {
		if front.Protocol == protocol && front.Address.Is4() {
			f.frontend = front
		}
	}
	if protocol == model.UDP {
		f.state = udp
	}
	f.client = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + h.ports/60000)}), uint16(1024+h.ports%60000))
	h.ports++
	f.current = h.currentOf(f)
	if h.slotOf(f).State != reconcile.Settled {
		f.periods = []period{{last: h.now()}}
	}
	h.flows = append(h.flows, f)
	h.count.flows++
	return f
}

// says sends a packet of the flow.
func (h *history) says(f *flow, k kind) {
	f.kind, f.payload = k, k == data || k == udp
	h.send(f)
}

// dial begins flows that go on at once: a handshake without losses, or a UDP packet.
func (h *history) dial(protocol model.Protocol, n int) (all []*flow) {
	for range n {
		f := h.tuple(protocol)
		if all = append(all, f); protocol == model.UDP {
			h.says(f, udp)
			continue
		}
		h.says(f, syn)
		f.holder, f.answered = f.synsTo[0], true
		h.says(f, data)
	}
	return all
}

// speak makes each of these flows send, and returns the flows that are lost then.
func (h *history) speak(flows []*flow) (lost []*flow) {
	for _, f := range flows {
		if f.dead {
			continue
		}
		k := data
		if f.frontend.Protocol == model.UDP {
			k = udp
		}
		if h.says(f, k); f.dead {
			lost = append(lost, f)
		}
	}
	return lost
}

// expectLost requires at least so many lost flows, all because of the cause.
func (h *history) expectLost(lost []*flow, least int, why cause) {
	total := 0
	for _, n := range h.count.losses {
		total += n
	}
	if len(lost) < least || h.count.losses[why] != len(lost) || total != len(lost) {
		h.fail("%d flows were lost, expected at least %d, and all because of %q: %v", len(lost), least, why, h.count.losses)
	}
	clear(h.count.losses)
}

func (h *history) expectKept(lost []*flow) {
	if len(lost) > 0 {
		h.fail("%d flows were lost: %v", len(lost), h.count.losses)
	}
}

// where selects flows.
func where(flows []*flow, is func(*flow) bool) (some []*flow) {
	for _, f := range flows {
		if is(f) {
			some = append(some, f)
		}
	}
	return some
}

func (h *history) states() map[reconcile.SlotState]int {
	states := map[reconcile.SlotState]int{}
	for _, record := range h.rules.services {
		for _, slot := range h.rules.slots[record.Offset : record.Offset+record.Size] {
			states[slot.State]++
		}
	}
	return states
}

// least fails if a case has too few flows to mean anything.
func (h *history) least(n int, flows []*flow, what string) {
	if len(flows) < n {
		h.fail("only %d flows %s: the test tests nothing", len(flows), what)
	}
}

// TestHardCases are the situations in which balancers of this kind lose connections.
func TestHardCases(t *testing.T) {
	w := newWorld(t, 4096)
	for _, c := range []struct {
		name string
		tell func(*history)
	}{
		{"a second change before the first has settled", secondChange},
		{"there and back again", thereAndBack},
		{"idle through settling", idleThrough},
		{"SYN before the change and after it", synTwice},
		{"SYN with data", synWithData},
		{"a backend dies while its flows are remembered", backendDies},
		{"a backend removed and added again", removedAndAdded},
		{"indices reused", indicesReused},
		{"settled slots touch no table", settledUntouched},
		{"a restart keeps UDP", restartKeepsUDP},
		{"table sizes changed twice", sizesChanged},
		{"half closed", halfClosedKept},
		{"a client whose backend drains", clientDrains},
		{"tracking none and back", untrackedMeanwhile},
	} {
		t.Run(c.name, func(t *testing.T) {
			scene(t, w, c.tell)
		})
	}
}

// secondChange: a slot names A, then B, then C, within one settle time. A flow of A that was
// silent during the first change has no entry, and B never heard of it. It is found because the
// slot keeps A as its previous backend through the second change; and because that change begins
// the settle time anew, it may be silent for as long again. Flows of B were remembered when they
// began. Therefore a second change replaces the current backend only.
func secondChange(h *history) {
	h.configure(web("21"))
	old := h.dial(model.TCP, 300)
	h.configure(web("21 22"))
	middle := h.dial(model.TCP, 300)
	first := map[*flow]model.BackendAddress{}
	for _, f := range old {
		first[f] = h.currentOf(f)
	}
	h.elapse(5)
	h.configure(web("21 22 23 24"))
	replaced := where(middle, func(f *flow) bool { return f.holder == backendNumber(22) && h.currentOf(f) != f.holder })
	h.least(20, replaced, "began on the second backend and saw it replaced")
	silent := where(old, func(f *flow) bool { return first[f] != f.holder && h.currentOf(f) != first[f] })
	h.least(20, silent, "of the first backend saw both changes in silence")
	h.elapse(5) // 10 since the first change, which would have settled by now without the second
	h.expectKept(h.speak(silent))
	h.expectKept(h.speak(middle))
	old = where(old, func(f *flow) bool {
		return h.currentOf(f) == f.holder || first[f] != f.holder && h.currentOf(f) != first[f]
	})
	h.elapse(8)
	h.expectKept(h.speak(old))
	h.expectKept(h.speak(middle))
	if n := h.states()[reconcile.Marked]; n == 0 {
		h.fail("no slot is marked, though flows disagree: %v", h.states())
	}
}

// thereAndBack: a change is rolled back before it has settled. The slot names A as current and
// as previous backend, and looks as if nothing had happened; but flows that began in between
// are on B, and must be looked up. After settling they keep the slot marked, until they end.
func thereAndBack(h *history) {
	first, second := web("21 22*0"), web("21*0 22")
	h.configure(first)
	old := h.dial(model.TCP, 200)
	h.configure(second)
	between := h.dial(model.TCP, 200)
	h.configure(first)
	for _, f := range between {
		if slot := h.slotOf(f); slot.State != reconcile.Transition || slot.Current != slot.Previous || f.holder != backendNumber(22) {
			h.fail("not the case that is meant: a flow of %s in %+v", f.holder, slot)
		}
	}
	h.expectKept(h.speak(old))
	h.expectKept(h.speak(between))
	for range 3 {
		h.elapse(4)
		h.expectKept(h.speak(between))
	}
	if n := h.states()[reconcile.Marked]; n == 0 {
		h.fail("no slot is marked, though flows disagree: %v", h.states())
	}
	for _, f := range between {
		h.says(f, fin)
	}
	h.elapse(8)
	h.elapse(8)
	if states := h.states(); states[reconcile.Settled] != 2*251 {
		h.fail("the flows have ended, but slots are still marked: %v", states)
	}
	h.expectKept(h.speak(old))
}

// idleThrough: a flow that sends nothing from before a change until after its slot has settled is
// unknown everywhere, and goes to the new backend. This is the price of keeping no state, and the
// settle time sets it. One packet within that time saves a flow, for as long as entries live; and
// a flow whose slot did not change needs none.
func idleThrough(h *history) {
	h.configure(web("21 22"))
	silent, speaking := h.dial(model.TCP, 200), h.dial(model.TCP, 200)
	h.configure(web("21 22 23"))
	moved := where(silent, func(f *flow) bool { return h.currentOf(f) != f.holder })
	h.elapse(4)
	h.expectKept(h.speak(speaking))
	h.elapse(4)
	h.expectKept(h.speak(speaking))
	lost := h.speak(silent)
	h.expectLost(lost, 20, idledThrough)
	if len(lost) != len(moved) {
		h.fail("%d flows were lost, but the slots of %d have changed", len(lost), len(moved))
	}
	h.elapse(19) // less than the timeout of established connections
	h.expectKept(h.speak(speaking))
	h.elapse(22) // longer than it
	h.expectLost(h.speak(speaking), 20, idledOver)
}

// synTwice: a SYN reaches X, its answer is lost, the slot changes to Y, and the client sends the
// SYN again. No program can tell it from a new connection's, so it goes to Y and is remembered
// there. Both backends now have half a connection, and the client takes the first answer; if that
// is X's, sent again by X's own timer, its ACK goes to Y, which answers with a reset. How often:
// with the initial timeout of 1 s on both sides (RFC 6298, 2.1), the client's second SYN and X's
// second SYN-ACK are sent half a round trip apart, and the two answers meet at the client at the
// same time but for jitter: about every second one breaks, of the connections whose first SYN-ACK
// was lost and whose slot changed within that second.
func synTwice(h *history) {
	const (
		connections = 2000
		lossPercent = 1.0 // of SYN-ACKs, in each direction alike
		rtt         = 50 * time.Millisecond
		jitter      = 5 * time.Millisecond // of each packet's way, evenly spread
		rto         = time.Second
	)
	rng := rand.New(rand.NewPCG(1, 1))
	way := func() time.Duration { return rtt/2 + time.Duration(rng.Int64N(int64(jitter))) }
	h.configure(web("21 22"))
	var opening []*flow
	for range connections {
		f := h.tuple(model.TCP)
		h.says(f, syn) // and its answer is lost
		opening = append(opening, f)
	}
	h.configure(web("21 22 23 24"))
	changed := where(opening, func(f *flow) bool { return h.currentOf(f) != f.synsTo[0] })
	h.least(500, changed, "had their slot changed")
	broken := 0
	for _, f := range opening {
		h.says(f, syn)
		if len(f.synsTo) == 1 {
			f.holder = f.synsTo[0]
		} else {
			ofX := way() + rto + way() // its first SYN-ACK left after one way, the second a timeout later
			ofY := rto + way() + way()
			for rng.Float64()*100 < lossPercent {
				ofX += 2 * rto
			}
			for rng.Float64()*100 < lossPercent {
				ofY += 2 * rto
			}
			if f.holder = f.synsTo[1]; ofX < ofY {
				f.holder = f.synsTo[0]
			}
		}
		f.answered = true
		if h.says(f, data); f.dead {
			broken++
		}
	}
	if broken != h.count.losses[twoSYNs] || broken < len(changed)*3/10 || broken > len(changed)*7/10 {
		h.fail("%d of %d broke: %v", broken, len(changed), h.count.losses)
	}
	share := float64(broken) / float64(len(changed))
	h.w.Logf("SYN before and after a change: of %d connections that lost their first SYN-ACK just before their slot changed, %d broke (%.0f %%). "+
		"With %.0f %% loss and 1 s to the second SYN, %.2f %% of the connections begun in the last second, in slots that change. "+
		"For example 1000 new connections/s and 5 %% of the slots: %.2f connections a change.",
		len(changed), broken, 100*share, lossPercent, share*lossPercent, 1000*0.05*lossPercent/100*share)
}

// synWithData: TCP Fast Open (RFC 7413) carries a request in the SYN. Sent again in a
// transition it must reach the same backend, which has worked on it already; it is still a SYN,
// so that its entry lives only as long as an unfinished handshake, and a flood of them is as
// cheap to forget as one of plain SYNs.
func synWithData(h *history) {
	h.configure(web("21 22"))
	h.configure(web("21 22 23"))
	var flows []*flow
	for range 200 {
		f := h.tuple(model.TCP)
		for range 2 { // the second is a retransmission
			f.kind, f.payload = syn, true
			h.send(f)
		}
		flows = append(flows, f)
	}
	changed := where(flows, func(f *flow) bool { return h.slotOf(f).State == reconcile.Transition })
	h.least(20, changed, "began in a transition")
	if n := len(h.w.entries()); n != len(changed) {
		h.fail("%d flows are remembered, %d began in a transition", n, len(changed))
	}
	h.configure(web("21 22 23 24"))
	for _, f := range changed { // once more, although the slot may name another backend now
		f.kind, f.payload = syn, true
		if h.send(f); len(f.synsTo) != 1 {
			h.fail("the request of one SYN reached %v", f.synsTo)
		}
	}
	half := flows[:100]
	for _, f := range half {
		f.holder, f.answered = f.synsTo[0], true
	}
	h.expectKept(h.speak(half))
	h.elapse(2) // longer than handshakes are remembered
	if _, err := h.w.d.Recall(); err != nil {
		h.fail("%v", err)
	}
	_ = h.rules.scan(map[uint32]bool{})
	for _, f := range flows[100:] {
		if h.w.isRemembered(keyOf(f.packet)) {
			h.fail("%s is remembered like a connection", f.packet)
		}
	}
}

// backendDies: flows are remembered on B, and B is removed. Their next packet finds an entry of a
// missing backend; it must go to a living backend at once (UDP has no handshake that would fail
// and begin anew), be remembered there while the slot is in transition, and no other flow may
// move.
func backendDies(h *history) {
	h.configure(web("21 22"))
	h.configure(web("21 22 23"))
	flows := append(h.dial(model.TCP, 300), h.dial(model.UDP, 300)...)
	doomed := where(flows, func(f *flow) bool { return f.holder == backendNumber(22) })
	h.least(100, doomed, "are on the backend that dies")
	remembered := where(doomed, func(f *flow) bool { return h.w.isRemembered(keyOf(f.packet)) })
	h.least(10, remembered, "of them are remembered")
	h.configure(web("21 23"))
	lost := h.speak(flows)
	h.expectLost(lost, len(doomed), removed)
	// Their next packets count as those of new flows.
	var again []*flow
	for _, f := range lost {
		g := &flow{packet: f.packet, service: f.service, state: data, holder: h.rules.expect(f.packet).now(h), answered: true, reused: true}
		if f.frontend.Protocol == model.UDP {
			g.state = udp
		}
		g.current = h.currentOf(g)
		again = append(again, g)
	}
	h.flows = append(h.flows, again...)
	h.expectKept(h.speak(again))
	h.elapse(4)
	h.expectKept(h.speak(again))
	h.elapse(4)
	h.expectKept(h.speak(again))
}

// now is the backend's address.
func (e expectation) now(h *history) model.BackendAddress {
	return h.rules.backends[e.to].BackendAddress
}

// removedAndAdded: B is removed and added again. Its server may have kept the connections, but no
// rule promises them; required is that old entries, which name B's former generation, are not
// followed against the slot, that new flows of B are kept, and that flows of others are not
// affected.
func removedAndAdded(h *history) {
	h.configure(web("21"))
	h.configure(web("21 22"))
	flows := h.dial(model.TCP, 400)
	others := where(flows, func(f *flow) bool { return f.holder != backendNumber(22) })
	stale := where(flows, func(f *flow) bool {
		return f.holder == backendNumber(22) && h.w.isRemembered(keyOf(f.packet))
	})
	h.least(10, stale, "are remembered on the backend that goes")
	h.configure(web("21 23"))
	h.expectKept(h.speak(others))
	h.configure(web("21 22"))
	h.expectKept(h.speak(others))
	fresh := h.dial(model.TCP, 200)
	h.speak(flows) // the rules decide: by their slots, as if there were no entry
	for _, f := range stale {
		if e := h.rules.entries[keyOf(f.packet)]; e != nil && !h.rules.alive(e.backend) {
			h.fail("%s still has the entry of a backend that is gone", f.packet)
		}
	}
	h.elapse(4)
	h.expectKept(h.speak(fresh))
	h.elapse(4)
	h.expectKept(h.speak(fresh))
	h.expectKept(h.speak(others))
}

// indicesReused: B is removed, and C takes its place in the array of backends. An entry of B names
// that place, but with B's generation, so it leads to no backend, and not to C.
func indicesReused(h *history) {
	h.configure(web("21"))
	h.configure(web("21 22"))
	flows := h.dial(model.TCP, 400)
	stale := where(flows, func(f *flow) bool {
		return f.holder == backendNumber(22) && h.w.isRemembered(keyOf(f.packet))
	})
	h.least(10, stale, "are remembered on the backend that goes")
	var was, is reconcile.BackendRef
	h.refs(backendNumber(22), &was)
	h.configure(web("21 23"))
	for n := 24; is.Index != was.Index; n++ { // until the place is given away
		if n > 25 {
			n = 24
		}
		h.configure(web(fmt.Sprintf("21 23 %d", n)))
		h.refs(backendNumber(n), &is)
		if is.Index == was.Index && is.Generation == was.Generation {
			h.fail("place %d has another tenant with the same generation", is.Index)
		}
		if is.Index != was.Index {
			h.configure(web("21 23"))
		}
	}
	tenant := h.rules.backends[is].BackendAddress
	elsewhere := where(stale, func(f *flow) bool { return h.currentOf(f) != tenant })
	h.least(5, elsewhere, "belong elsewhere by their slots")
	for _, f := range elsewhere {
		if to, _ := h.run(f.packet); to == tenant {
			h.fail("%s went to the new tenant of its backend's place", f.packet)
		}
		h.rules.expect(f.packet) // notes it
		h.w.forgetKey(keyOf(f.packet))
		delete(h.rules.entries, keyOf(f.packet))
	}
}

func (h *history) refs(b model.BackendAddress, to *reconcile.BackendRef) {
	for ref, record := range h.rules.backends {
		if record.BackendAddress == b {
			*to = ref
		}
	}
}

// settledUntouched: in a settled slot packets of any number of flows leave no trace: a flood of
// SYNs takes no room in the table.
func settledUntouched(h *history) {
	h.configure(web("21 22 23"))
	for range 3000 {
		h.says(h.tuple(model.TCP), syn)
		h.says(h.tuple(model.UDP), udp)
	}
	if n := len(h.w.entries()); n != 0 {
		h.fail("%d flows of settled slots are remembered", n)
	}
}

// restartKeepsUDP: the daemon is killed and comes back, with slots settled, in transition, closing
// and marked; no flow moves, and slots in transition have their full time again.
func restartKeepsUDP(h *history) {
	h.configure(web("21 22"))
	old := h.dial(model.UDP, 300)
	h.configure(web("21 22 23"))
	young := h.dial(model.UDP, 300)
	h.elapse(5)
	h.restart()
	h.apply()
	h.elapse(5) // 10 since the change, but 5 since the restart
	h.expectKept(h.speak(old))
	h.expectKept(h.speak(young))
	h.elapse(1)
	h.fault.strike(after, 1) // of closing, grace, scan: killed after the slots have closed
	h.elapse(2)
	if n := h.states()[reconcile.Closing]; n == 0 {
		h.fail("no slot is closing: %v", h.states())
	}
	h.expectKept(h.speak(old))
	h.restart()
	h.expectKept(h.speak(young))
	h.settle()
	if n := h.states()[reconcile.Closing]; n != 0 {
		h.fail("%d slots are still closing after a restart", n)
	}
	h.expectKept(h.speak(old))
	h.expectKept(h.speak(young))
	h.restart()
	h.expectKept(h.speak(old))
}

// sizesChanged: a table of another size has other slots, and each flow's previous backend is found
// in the table before. While that table is needed, a third one does not take its place: flows that
// were silent through both changes are still on the first table's backends.
func sizesChanged(h *history) {
	size := func(n uint32) func(*model.Service) { return func(s *model.Service) { s.TableSize = n } }
	h.configure(web("21 22 23", size(251)))
	silent, old := h.dial(model.TCP, 300), h.dial(model.UDP, 300)
	h.configure(web("21 22 23", size(509)))
	h.elapse(3)
	h.expectKept(h.speak(old))
	young := h.dial(model.TCP, 300)
	h.configure(web("21 22 23", size(1021)))
	h.expectKept(h.speak(old))
	h.elapse(5)
	h.expectKept(h.speak(silent))
	h.expectKept(h.speak(old))
	h.expectKept(h.speak(young))
	h.elapse(4)
	h.expectKept(h.speak(append(append(silent, old...), young...)))
	for _, record := range h.rules.services {
		if record.BeforeSize != 0 {
			h.fail("the table before is kept for ever: %+v", record)
		}
	}
}

// halfClosedKept: a client that has closed its half still acknowledges the data that it receives;
// its FIN ends nothing, but shortens the time for which the flow may be idle.
func halfClosedKept(h *history) {
	h.configure(web("21 22"))
	flows := h.dial(model.TCP, 200)
	h.configure(web("21 22 23"))
	h.expectKept(h.speak(flows))
	h.elapse(8)
	for _, f := range flows {
		h.says(f, fin)
	}
	for range 5 {
		h.elapse(3) // less than 4 min
		for _, f := range flows {
			f.kind, f.payload = data, false
			if h.send(f); f.dead {
				h.fail("%s was lost though it was never idle for long", f.packet)
			}
		}
	}
}

// clientDrains: with affinity a client is remembered, not its flows. When its backend drains, its
// connections stay and the next ones go to others; so both are of one client, in one slot, and
// must be told apart in every state of it: each new one has an entry of its own, which takes
// precedence over the client's, is made in marked slots too, and which no scan takes for needless
// because it agrees with the slot.
func clientDrains(h *history) {
	affinity := func(s *model.Service) { s.AffinityTimeout = affinityLong }
	h.configure(web("21 22", affinity))
	h.configure(web("21 22 23", affinity)) // all slots that change are in transition
	connect := func() (all []*flow) {
		for client := range byte(100) {
			f := h.tuple(model.TCP)
			f.client = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 101, client}), f.client.Port())
			f.current, f.byClient = h.currentOf(f), true
			h.says(f, syn)
			f.holder, f.answered = f.synsTo[0], true
			h.says(f, data)
			all = append(all, f)
		}
		return all
	}
	old := connect()
	h.configure(web("21*0 22 23", affinity))
	var moved []*flow
	for _, f := range connect() {
		if f.holder == backendNumber(21) {
			h.fail("%s is new, and went to the backend that drains", f.packet)
		}
		moved = append(moved, f)
	}
	staying := where(old, func(f *flow) bool { return f.holder == backendNumber(21) })
	h.least(10, staying, "are on the backend that drains")
	for range 4 {
		h.elapse(6)
		h.expectKept(h.speak(old))
		h.expectKept(h.speak(moved))
		moved = append(moved, connect()...)
		h.expectKept(h.speak(moved))
	}
	if h.states()[reconcile.Marked] == 0 {
		h.fail("no slot is marked, though connections stay: %v", h.states())
	}
	h.expectKept(h.speak(old))
}

// untrackedMeanwhile: while nothing is remembered, flows go where their slots lead. When flows are
// remembered again, older entries do not lead them away.
func untrackedMeanwhile(h *history) {
	for _, affinity := range []time.Duration{0, affinityLong} {
		service := func(backends string, tracking model.Tracking) model.Service {
			return web(backends, func(s *model.Service) { s.Tracking, s.AffinityTimeout = tracking, affinity })
		}
		h.configure(service("21 22*0", model.TrackingAlways))
		old := h.dial(model.TCP, 100)
		h.configure(service("21*0 22", model.TrackingNone))
		if n := len(h.w.entries()); n != 0 {
			h.fail("%d entries are left where nothing is remembered", n)
		}
		h.expectLost(h.speak(old), len(old), untracked)
		var flows []*flow
		for _, was := range old { // the same clients and ports
			f := &flow{packet: was.packet, service: was.service, state: syn, reused: true}
			h.begin(f, rand.New(rand.NewPCG(1, 1)))
			f.holder, f.answered, f.unheard, f.dead = h.currentOf(f), true, false, false
			flows = append(flows, f)
		}
		h.configure(service("21*0 22", model.TrackingAlways))
		h.expectKept(h.speak(flows))
		h.configure(service("21 22*0", model.TrackingAuto))
		h.expectKept(h.speak(flows))
		h.configure()
	}
}

// TestFullTable: the table has room for few. A SYN that cannot be remembered goes to the previous
// backend, because its next packets will go there: while the slot is in transition a full table
// costs balance, not connections. Then only flows that were not remembered before their slot
// settled may be lost.
func TestFullTable(t *testing.T) {
	w := newWorld(t, 64)
	w.tight = true
	for _, c := range []struct {
		name   string
		budget uint32
	}{{"no room", 1 << 30}, {"no budget", 0}} {
		t.Run(c.name, func(t *testing.T) {
			w.setBudget(c.budget)
			defer w.setBudget(1 << 30)
			scene(t, w, func(h *history) {
				h.configure(web("21 22"))
				old := h.dial(model.TCP, 300)
				h.configure(web("21 22 23 24"))
				young, flood := h.dial(model.TCP, 300), h.dial(model.UDP, 300)
				for range 7 {
					h.elapse(1)
					h.expectKept(h.speak(old))
					h.expectKept(h.speak(young))
					h.expectKept(h.speak(flood))
				}
				h.elapse(1)
				all := append(append(old, young...), flood...)
				lost := h.speak(all)
				h.w.Logf("none was lost in transition; %d of %d flows were when their slots had settled", len(lost), len(all))
				h.expectLost(lost, 100, notRemembered)
			})
		})
	}
}
