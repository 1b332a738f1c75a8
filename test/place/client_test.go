package place_test

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	wire "github.com/shunt-lb/shunt/internal/packet"
)

// frame is the packet as a frame.
func (p packet) frame() []byte {
	from, to := p.client, netip.AddrPortFrom(p.frontend.Address, p.frontend.Ports.First)
	edit := func(q *wire.Packet) {
		q.Ethernet.Source, q.Ethernet.Destination = routerMAC, ownMAC
		if p.payload {
			q.Payload = []byte("payload")
		}
	}
	if p.frontend.Protocol == model.UDP {
		return wire.Must(wire.NewUDP(from, to, edit))
	}
	return wire.Must(wire.NewTCP(from, to, [...]string{syn: "S", data: "A", fin: "FA", rst: "R"}[p.kind], edit))
}

// run sends a packet through the loaded program and returns the backend that it went to.
func (h *history) run(p packet) (model.BackendAddress, bool) {
	verdict, out, err := h.w.d.RunPacket(arm, p.frame())
	if err != nil {
		h.fail("%v", err)
	}
	if verdict != kernel.XDPTx && verdict != kernel.XDPRedirect {
		return model.BackendAddress{}, false
	}
	for _, b := range pool {
		if mac := backendMAC(b.Address); string(mac) == string(out[:6]) {
			return b, true
		}
	}
	h.fail("%s left towards %s, which is nobody's", p, net.HardwareAddr(out[:6]))
	return model.BackendAddress{}, false
}

func (p packet) String() string {
	return fmt.Sprintf("%s %s → %s", p.kind, p.client, p.frontend)
}

// open begins a flow of a service.
func (h *history) open(rng *rand.Rand, unheard bool) {
	s := h.desired.Services[rng.IntN(len(h.desired.Services))]
	f := &flow{service: s.Name, unheard: unheard, chattiness: []float64{0.9, 0.9, 0.4, 0.1, 0.03, 0.01}[rng.IntN(6)]}
	f.frontend = s.Frontends[rng.IntN(len(s.Frontends))]
	h.ports++
	client := netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + rng.IntN(60))})
	if f.frontend.Address.Is6() {
		client = netip.AddrFrom16([16]byte{0x20, 1, 0x0d, 0xb8, 5: 9, 15: byte(1 + rng.IntN(60))})
	}
	f.client = netip.AddrPortFrom(client, uint16(1024+h.ports%60000))
	f.state = syn
	if f.frontend.Protocol == model.UDP {
		f.state = udp
	}
	h.begin(f, rng)
}

func (h *history) begin(f *flow, rng *rand.Rand) {
	record, _ := h.rules.serviceOf(f.frontend)
	f.current, f.byClient = h.currentOf(f), record.AffinityTimeout > 0
	if h.slotOf(f).State == reconcile.Transition { // the transition of a closing slot has ended: the next change begins another
		f.periods = []period{{last: h.now()}}
	}
	f.mayStray = h.mayStray(f)
	h.flows = append(h.flows, f)
	h.count.flows++
	h.step(f, rng)
}

// reopen begins another connection with the tuple of one that has ended.
func (h *history) reopen(f *flow, rng *rand.Rand) {
	again := &flow{packet: f.packet, service: f.service, chattiness: f.chattiness, reused: true, state: syn}
	h.begin(again, rng)
}

// step is a flow's turn: it sends its next packet.
func (h *history) step(f *flow, rng *rand.Rand) {
	if f.dead {
		return
	}
	f.payload = false
	switch {
	case f.frontend.Protocol == model.UDP:
		f.kind, f.payload = udp, true
	case !f.answered:
		f.kind, f.payload = syn, rng.IntN(8) == 0 // with data: fast open
	case f.finished > 0:
		f.kind = data // acknowledges data of the other half
		if f.finished--; f.finished == 0 {
			h.send(f)
			f.dead = true
			if rng.IntN(4) == 0 {
				h.reopen(f, rng)
			}
			return
		}
	default:
		f.kind, f.payload = data, rng.IntN(2) == 0
		switch rng.IntN(40) {
		case 0:
			h.send(f)
			f.kind, f.payload, f.finished = fin, false, 1+rng.IntN(6)
		case 1:
			f.kind, f.payload = rst, false
		}
	}
	if f.dead {
		return
	}
	h.send(f)
	switch {
	case f.kind == rst:
		f.dead = true
	case f.kind == syn && !f.dead:
		h.answer(f, rng)
	}
}

// answer is the SYN-ACK's way to the client: it arrives, or is lost, or it is a late one of an
// earlier SYN.
func (h *history) answer(f *flow, rng *rand.Rand) {
	if f.unheard || len(f.synsTo) == 0 || rng.IntN(10) < 3 {
		f.unheard = false
		return
	}
	f.holder = f.synsTo[len(f.synsTo)-1]
	if rng.IntN(4) == 0 {
		f.holder = f.synsTo[rng.IntN(len(f.synsTo))]
	}
	f.answered = true
	f.holderGone = !h.isMember(f, f.holder) // a removal may have failed half-way
	if rng.IntN(5) > 0 {
		f.kind, f.payload = data, false
		h.send(f)
	}
}

// send sends the flow's packet, and judges its destination.
func (h *history) send(f *flow) {
	record, _ := h.rules.serviceOf(f.frontend)
	want := h.rules.expect(f.packet)
	to, left := h.run(f.packet)
	failed := false
	if want.remember != nil {
		if h.w.isRemembered(want.key) {
			h.rules.entries[want.key] = want.remember
		} else if !h.tight && !h.lossesOnly {
			h.failFlow(f, "%s was not remembered in %+v", f.packet, h.slotOf(f))
		} else if failed = h.tight; failed {
			want.to = want.otherwise
			h.count.refused++
		}
	}
	h.count.packets++
	f.note("%4.1f %s to %s", float64(h.now())/float64(quantum), f.kind, to)
	if expected, ok := h.rules.backends[want.to]; !h.lossesOnly && (ok != left || left && expected.BackendAddress != to) {
		h.failFlow(f, "%s went to %s, and by the rules to %s; its slot is %+v, failed to remember: %t, follows an entry: %t",
			f.packet, to, expected.BackendAddress, h.slotOf(f), failed, want.followed)
	}
	if !left {
		h.dropped(f)
		return
	}
	first := len(f.synsTo) == 0 && f.holder == model.BackendAddress{}
	if first && !f.reused {
		h.checkNewcomer(f, to, failed, record)
	}
	h.receive(f, to)
	if f.dead {
		return
	}
	h.seq++
	known := want.followed || want.remember != nil && !failed
	f.lapsed = !known && (f.lapsed || f.isOver(h.now(), record.AffinityTimeout))
	if f.kind != rst && f.frontend.Protocol == model.TCP {
		f.state = f.state.then(f.packet)
	}
	f.sent, f.sentSeq, f.unremembered = h.now(), h.seq, failed
	f.always = record.Tracking == model.TrackingAlways
	f.noted = f.always || h.slotOf(f).State != reconcile.Settled
	f.draining = h.drainsNow(f, f.holder)
	f.periods = f.periods[max(0, len(f.periods)-1):]
}

// receive is the backend's treatment of the packet.
func (h *history) receive(f *flow, to model.BackendAddress) {
	switch {
	case f.kind == syn && !f.answered:
		for _, had := range f.synsTo {
			if had == to {
				return
			}
		}
		f.synsTo = append(f.synsTo, to)
	case f.holder == model.BackendAddress{}:
		f.holder, f.holderGone = to, !h.isMember(f, to) // of UDP
	case f.holder != to:
		h.lose(f, to)
	}
}

// lose ends a flow whose packet did not reach the backend that holds it, if the document
// allows that.
func (h *history) lose(f *flow, to model.BackendAddress) {
	record, _ := h.rules.serviceOf(f.frontend)
	cause := f.lossCause(to, h.now(), h.settleOf(record), record.AffinityTimeout)
	if cause == never && (f.halfLeft || h.back[f.service][to]) {
		cause = halfRemoved
	}
	if cause == never {
		h.failFlow(f, "%s is lost without a permitted cause: %s holds it, %s got its packet; its slot is %+v",
			f.packet, f.holder, to, h.slotOf(f))
	}
	h.count.losses[cause]++
	f.dead = true
}

// dropped judges a packet that reached no backend. A new flow may find no backend that takes
// it.
func (h *history) dropped(f *flow) {
	if f.holder != (model.BackendAddress{}) {
		h.lose(f, model.BackendAddress{})
		return
	}
	sum := 0
	for _, weight := range members(h.desired, f.service, f.frontend.Address.Is6()) {
		sum += int(weight)
	}
	if sum > 0 && !h.inDoubt && len(f.synsTo) == 0 {
		h.failFlow(f, "%s was dropped; its slot is %+v", f.packet, h.slotOf(f))
	}
	h.count.unwanted++
	f.dead = true
}

// checkNewcomer requires that a new flow goes to a backend that takes new flows, with the
// document's exceptions.
func (h *history) checkNewcomer(f *flow, to model.BackendAddress, failed bool, record reconcile.ServiceRecord) {
	if h.inDoubt || failed || h.lossesOnly || h.slotOf(f).PreviousBefore {
		return
	}
	drains, known := h.weightless(record, to)
	if known && drains && record.AffinityTimeout == 0 {
		h.failFlow(f, "%s is new, and went to %s, which drains or is gone; its slot is %+v", f.packet, to, h.slotOf(f))
	}
	if known && drains {
		h.count.clientsOnDraining++
	}
}

func (f *flow) note(format string, a ...any) {
	f.log = append(f.log, fmt.Sprintf(format, a...))
}
