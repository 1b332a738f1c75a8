package packet_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// The moving services have three backends a family, named by letters:
//
//	A  the previous backend of slots that change
//	B  the current one
//	C  the backend of entries, so that none of them is mistaken for another
//	X  A's place in another generation: a removed backend
const movingLetters = "ABC"

func movingBackend(letter rune, six bool) netip.Addr {
	n := 0x41 + letter - 'A'
	if six {
		return addr(fmt.Sprintf("2001:db8:2::%x", n))
	}
	return addr(fmt.Sprintf("10.0.0.%d", n))
}

func movingBackends() (list []netip.Addr) {
	for _, letter := range movingLetters {
		list = append(list, movingBackend(letter, false), movingBackend(letter, true))
	}
	return list
}

// placed is a service whose slots and record the test writes itself, without the reconciler, which must
// not be used in that world any more.
type placed struct {
	*world
	port    uint16 // of the direct VIP
	records [2]reconcile.ServiceRecord
	refs    [2]map[rune]reconcile.BackendRef
	clients int // clients handed out so far
}

// place takes over a service. Half 0 is IPv4, half 1 IPv6.
func (w *world) place(port uint16) *placed {
	w.Helper()
	p := &placed{world: w, port: port}
	contents, err := w.d.Contents()
	must(w, err)
	for half, vip := range []netip.Addr{directVIP4, directVIP6} {
		index, ok := contents.Frontends[model.Frontend{Address: vip, Ports: value.PortRange{First: port, Last: port}, Protocol: model.TCP}]
		if !ok {
			w.Fatalf("there is no service at %s port %d", vip, port)
		}
		p.records[half] = contents.Services[index]
		p.refs[half] = map[rune]reconcile.BackendRef{0: {}}
		for _, b := range contents.Backends {
			for _, letter := range movingLetters {
				if b.Address == movingBackend(letter, half == 1) && b.Port == 0 {
					p.refs[half][letter] = b.BackendRef
				}
			}
		}
		gone := p.refs[half]['A']
		gone.Generation++
		p.refs[half]['X'] = gone
	}
	return p
}

// moving is the direct service in transition from A to B, with tracking auto.
func (w *world) moving() *placed {
	p := w.place(portMoving)
	p.tracked(model.TrackingAuto)
	p.write(slotSpec{state: reconcile.Transition, current: 'B', previous: 'A'})
	return p
}

func half(six bool) int {
	if six {
		return 1
	}
	return 0
}

// slotSpec is a slot with letters for its backends; 0: none.
type slotSpec struct {
	state             reconcile.SlotState
	current, previous rune
	drains, before    bool
}

func (s slotSpec) String() string {
	words := []string{[]string{"settled", "transition", "closing", "marked"}[s.state]}
	for _, part := range []struct {
		is   bool
		text string
	}{{s.previous != 0, string(s.previous)}, {true, "to"}, {s.current != 0, string(s.current)}, {s.current == 0, "nobody"}, {s.drains, "draining"}, {s.before, "before"}} {
		if part.is {
			words = append(words, part.text)
		}
	}
	return strings.Join(words, " ")
}

func (p *placed) slot(s slotSpec, six bool) reconcile.Slot {
	return reconcile.Slot{State: s.state, Current: p.refs[half(six)][s.current], Previous: p.refs[half(six)][s.previous],
		PreviousDrains: s.drains, PreviousBefore: s.before}
}

// write writes the same word into all slots of the service.
func (p *placed) write(s slotSpec) {
	p.Helper()
	for i, record := range p.records {
		must(p, p.d.WriteSlots(record.Offset, slices.Repeat(reconcile.NewTable([]reconcile.Slot{p.slot(s, i == 1)}), int(record.Size))))
	}
}

// change changes the service's records and writes them.
func (p *placed) change(change func(*reconcile.ServiceRecord)) {
	p.Helper()
	for i := range p.records {
		change(&p.records[i])
		must(p, p.d.PutService(p.records[i]))
	}
}

func (p *placed) tracked(how model.Tracking) {
	p.Helper()
	p.change(func(r *reconcile.ServiceRecord) { r.Tracking = how })
}

// tableBefore gives the service a table before, with the same word in all slots.
func (p *placed) tableBefore(s slotSpec) {
	p.Helper()
	const first, count = 60000, 503 // behind all slots that the reconciler has used
	for i := range p.records {
		p.records[i].BeforeOffset, p.records[i].BeforeSize = first+uint32(i)*count, count
		must(p, p.d.WriteSlots(p.records[i].BeforeOffset, slices.Repeat(reconcile.NewTable([]reconcile.Slot{p.slot(s, i == 1)}), count)))
	}
	p.change(func(*reconcile.ServiceRecord) {})
}

// draining sets whether a backend has weight 0 everywhere.
func (p *placed) draining(letter rune, is bool) {
	p.Helper()
	for i := range p.records {
		must(p, p.d.PutBackend(reconcile.BackendRecord{BackendRef: p.refs[i][letter],
			BackendAddress: model.BackendAddress{Address: movingBackend(letter, i == 1)}, Draining: is}))
	}
}

// way sets the hop to a backend whose record has been written again.
func (p *placed) way(letter rune) error {
	var errs []error
	for i := range p.records {
		errs = append(errs, p.d.SetHop(p.refs[i][letter], store.Hop{Interface: p.ifindex[armC], MAC: beMAC}))
	}
	return errors.Join(errs...)
}

// packet is from a client with this number, whose flows all have different ports.
func (p *placed) packet(k kind, client int, port uint16, flags string, edits ...packet.Edit) packet.Packet {
	if len(flags) > 0 && flags[len(flags)-1] == '+' {
		flags, edits = flags[:len(flags)-1], append(edits, packet.Data("payload"))
	}
	from := netip.AddrFrom4([4]byte{198, 18, byte(client >> 8), byte(client)})
	if k.six {
		b := addr("2001:db8:18::").As16()
		b[14], b[15] = byte(client>>8), byte(client)
		from = netip.AddrFrom16(b)
	}
	return k.packet(netip.AddrPortFrom(from, port), netip.AddrPortFrom(k.pick(directVIP4, directVIP6), p.port), flags,
		append([]packet.Edit{packet.MACs(router, ownA)}, edits...)...)
}

// newClient is the number of an unused client.
func (p *placed) newClient() int {
	p.clients++
	return p.clients
}

// follow sends a packet and returns the backend that it went to, "" if none.
func (p *placed) follow(in packet.Packet) string {
	p.Helper()
	out, ok := p.try(armA, in)
	if !ok {
		return ""
	}
	for _, letter := range movingLetters {
		if out.Destination() == movingBackend(letter, in.IPv6 != nil) {
			return string(letter)
		}
	}
	p.Fatalf("%s became %s, which goes to no backend of the service", in, out)
	return ""
}

// memory describes the remembered entries of a packet's flow and of its client: "flow B syn, client A".
func (p *placed) memory(in packet.Packet) string {
	p.Helper()
	table := p.rememberedTable()
	var words []string
	for _, of := range []struct {
		name string
		key  flowKey
	}{{"flow", flowOf(in)}, {"client", clientOf(in)}} {
		if e, ok := table[of.key]; ok {
			words = append(words, p.describe(of.name, e, in.IPv6 != nil))
		}
	}
	return strings.Join(words, ", ")
}

func (p *placed) describe(name string, e rememberedEntry, six bool) string {
	p.Helper()
	letter := "?"
	for l, ref := range p.refs[half(six)] {
		if l != 0 && ref == e.backend {
			letter = string(l)
		}
	}
	if record := p.records[half(six)]; e.service != record.Index || e.generation != record.Generation {
		letter += " of another service"
	}
	if (e.flags&rememberedClient != 0) != (name == "client") {
		p.Errorf("the entry of a %s has the flags %s", name, e.flags)
	}
	if flags := e.flags &^ rememberedClient; flags != 0 {
		letter += " " + strings.Trim(flags.String(), "[]")
	}
	return name + " " + letter
}

// remember makes an entry with this backend for a packet's flow or client, in the program's way: by a
// first packet while the slots are in transition to it.
func (p *placed) remember(k kind, client int, port uint16, letter rune, flags string) {
	p.Helper()
	p.write(slotSpec{state: reconcile.Transition, current: letter})
	if got := p.follow(p.packet(k, client, port, flags)); got != string(letter) {
		p.Fatalf("a packet went to %q, want %c", got, letter)
	}
}

// on is the same service in another test.
func (p *placed) on(t *testing.T) *placed {
	mine, itsWorld := *p, *p.world
	itsWorld.TB = t
	mine.world = &itsWorld
	return &mine
}
