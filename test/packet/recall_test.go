package packet_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
)

// position is the index of an entry's slot in the array of slots.
func (p *placed) position(e rememberedEntry) uint32 {
	p.Helper()
	for _, r := range p.records {
		if r.Index == e.service {
			return r.Offset + uint32(uint64(e.hash)*uint64(r.Size)>>32)
		}
	}
	p.Fatalf("an entry is of service %d", e.service)
	return 0
}

// scan runs ScanRemembered and expects the slots of these flows to be marked, and no others.
func (p *placed) scan(marked ...packet.Packet) {
	p.Helper()
	table, want := p.rememberedTable(), map[uint32]bool{}
	for _, in := range marked {
		e, ok := table[flowOf(in)]
		if !ok {
			p.Fatalf("nothing is remembered of %s", in)
		}
		want[p.position(e)] = true
	}
	got, err := p.d.ScanRemembered()
	must(p, err)
	if !maps.Equal(got, want) {
		p.Errorf("marked are the slots %v, want %v", got, want)
	}
}

// TestScan: an expired entry goes in every state; an entry that agrees with a closing or marked
// slot goes, too; and if an entry with another living backend is left, the slot is marked.
func TestScan(t *testing.T) {
	t.Parallel()
	all := newWorld(t).place(portMoving)
	for _, tracking := range []model.Tracking{model.TrackingAuto, model.TrackingAlways} {
		for _, slot := range []slotSpec{settledAB, transitionAB, closingAB, markedAB} {
			for _, k := range kinds {
				client := all.newClient()
				t.Run(fmt.Sprintf("%s/%s/%s", tracking, slot, k), func(t *testing.T) {
					p := all.on(t)
					p.tracked(model.TrackingAuto)
					remember := func(port uint16, letter rune) packet.Packet {
						p.remember(k, client, port, letter, "A")
						return p.packet(k, client, port, "A")
					}
					differs, also, agrees := remember(1, 'C'), remember(2, 'A'), remember(3, 'B')
					over, overToo, young := remember(4, 'C'), remember(5, 'B'), remember(6, 'C')
					gone := remember(7, 'C')
					p.rewriteRemembered(flowOf(gone), func(v []byte) { p.sealAs(k, flowOf(gone), v, 'X') })
					limit := 7440
					if k.udp {
						limit = 300
					}
					p.age(flowOf(over), limit+3)
					p.age(flowOf(overToo), limit+3)
					p.age(flowOf(young), limit/2-1)
					p.tracked(tracking)
					p.write(slot)
					looked := slot.state == reconcile.Closing || slot.state == reconcile.Marked
					if looked {
						p.scan(differs, also, young)
					} else {
						p.scan()
					}
					kept := map[string]packet.Packet{"differs": differs, "differs too": also, "young": young, "agrees": agrees, "gone": gone}
					ended := map[string]packet.Packet{"over": over, "over, and agrees": overToo}
					if looked && tracking == model.TrackingAuto {
						ended["agrees"], ended["gone"] = agrees, gone
						delete(kept, "agrees")
						delete(kept, "gone")
					}
					table := p.rememberedTable()
					for name, in := range kept {
						if _, ok := table[flowOf(in)]; !ok {
							t.Errorf("an entry that %s is gone", name)
						}
					}
					for name, in := range ended {
						if _, ok := table[flowOf(in)]; ok {
							t.Errorf("an entry that is %s is still there", name)
						}
					}
					for _, in := range kept { // for the next case
						must(t, p.remembered.Delete(p.rawRemembered(flowOf(in))))
					}
				})
			}
		}
	}
}

// sealAs changes a value to another backend, with the seal that belongs to it. The seal is a sum,
// and the word's share of it a product (remembered_seal of bpf/lb/remember.h).
func (p *placed) sealAs(k kind, key flowKey, v []byte, letter rune) {
	p.Helper()
	const mix5 = 0x9b05688c2b3e6c1f
	word, seal := binary.NativeEndian.Uint64(v[8:]), binary.NativeEndian.Uint64(v)
	next := word&^0xfffffff | uint64(p.refs[half(k.six)][letter].Generation)<<20 | uint64(p.refs[half(k.six)][letter].Index)
	binary.NativeEndian.PutUint64(v[8:], next)
	binary.NativeEndian.PutUint64(v, seal+(next-word)*mix5)
	if e := decodeRemembered(v); e.backend != p.refs[half(k.six)][letter] {
		p.Fatalf("the entry of %v was to be of %c: %+v", key, letter, e)
	}
}

// TestScanCounts: Recall returns the counts of its finds.
func TestScanCounts(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.tracked(model.TrackingAuto)
	for n := range uint16(10) {
		p.remember(kinds[n%4], 1, n, 'C', "A")
	}
	for n := range uint16(7) {
		p.remember(kinds[n%4], 2, n, 'B', "A")
	}
	for n := range uint16(3) {
		p.remember(kinds[n%4], 3, n, 'A', "A")
		p.age(flowOf(p.packet(kinds[n%4], 3, n, "")), 8000)
	}
	for _, c := range []struct {
		slot slotSpec
		want store.RecallResult
	}{
		{transitionAB, store.RecallResult{Entries: 20, Expired: 3}},
		{settledAB, store.RecallResult{Entries: 17}},
		{closingAB, store.RecallResult{Entries: 17, Agreed: 7, Marked: 10}},
		{markedAB, store.RecallResult{Entries: 10, Marked: 10}},
		{slotSpec{state: reconcile.Marked, current: 'C'}, store.RecallResult{Entries: 10, Agreed: 10}},
		{markedAB, store.RecallResult{}},
	} {
		p.write(c.slot)
		got, err := p.d.Recall()
		must(t, err)
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", c.slot, got, c.want)
		}
	}
}

// TestScanWhilePacketsFlow scans the table all the time while another CPU changes its entries with
// every packet. Every scan finds the flows that differ; flows that agree end or stay; none changes
// its backend.
func TestScanWhilePacketsFlow(t *testing.T) {
	const flows, scans = 64, 300
	p := newWorld(t).place(portMoving)
	cpus := twoCPUs(t, p.world)
	p.tracked(model.TrackingAuto)
	var frames [][]byte
	var differing []packet.Packet
	for n := range uint16(2 * flows) {
		k := kind{six: n%2 == 1}
		letter := rune("CB"[n/flows])
		p.remember(k, 1, n, letter, "A")
		if letter == 'C' {
			differing = append(differing, p.packet(k, 1, n, "A"))
		}
		for _, flags := range []string{"FA", "A+"} { // each undoes the other's note
			frames = append(frames, packet.Must(p.packet(k, 1, n, flags)))
		}
	}
	p.write(closingAB)
	must(t, p.d.Grace())
	var stop atomic.Bool
	var sender sync.WaitGroup
	var sent atomic.Int64
	fault := ""
	sender.Go(func() {
		cpus[1].do(func() {
			for i := 0; !stop.Load() && fault == ""; i++ {
				at := i % len(frames)
				want := movingBackend(rune("CB"[at/2/flows]), at/2%2 == 1)
				verdict, frame, err := p.d.RunPacket(armA, frames[at])
				got, err2 := packet.Parse(frame)
				if err != nil || err2 != nil || verdict != kernel.XDPRedirect || got.Destination() != want {
					fault = fmt.Sprintf("packet %d: verdict %d, %v, %v, to %s, want %s", i, verdict, err, err2, got.Destination(), want)
				}
				sent.Add(1)
			}
		})
	})
	p.eventually("packets are sent", 20*time.Second, func() bool { return sent.Load() > int64(len(frames)) || fault != "" })
	for range scans {
		p.scan(differing...)
	}
	stop.Store(true)
	sender.Wait()
	if fault != "" {
		t.Error(fault)
	}
	p.scan(differing...)
	if n := len(p.rememberedTable()); n != flows {
		t.Errorf("%d entries are left, want %d", n, flows)
	}
	t.Logf("%d packets meanwhile", sent.Load())
}

// TestStoryOfASlot: settled, changed, closing, marked, and settled again, with flows of every age.
func TestStoryOfASlot(t *testing.T) {
	t.Parallel()
	p := newWorld(t).place(portMoving)
	p.tracked(model.TrackingAuto)
	for _, k := range kinds {
		client := p.newClient()
		at := func(port uint16, flags string) packet.Packet { return p.packet(k, client, port, flags) }
		p.write(slotSpec{state: reconcile.Settled, current: 'A'})
		p.expect(at(1, "S"), "A", "")
		p.expect(at(2, "S"), "A", "")
		p.write(transitionAB)
		p.expect(at(1, "A"), "A", "flow A") // an old flow that sends
		younger := "B"
		if k.udp {
			younger = "A"
		}
		p.follow(at(3, "S"))
		p.expect(at(3, "A"), younger, "flow "+younger) // a flow that was opened meanwhile
		p.write(slotSpec{state: reconcile.Closing, current: 'B'})
		must(t, p.d.Grace())
		if k.udp {
			p.scan(at(1, ""), at(3, ""))
		} else {
			p.scan(at(1, ""))
		}
		p.write(slotSpec{state: reconcile.Marked, current: 'B'})
		p.expect(at(1, "A"), "A", "flow A")
		p.follow(at(3, "A"))
		p.expect(at(2, "A"), "B", "") // it was idle all the time: it is lost
		p.expect(at(4, "S"), "B", "")
		p.age(flowOf(at(1, "")), 8000)
		if k.udp {
			p.age(flowOf(at(3, "")), 8000)
		}
		p.scan()
		p.write(slotSpec{state: reconcile.Settled, current: 'B'})
		if n := len(p.rememberedTable()); n != 0 {
			t.Errorf("%s: %d entries are left", k, n)
		}
		want := p.follow(at(4, "A"))
		if want != "B" {
			t.Errorf("%s: a flow went to %s", k, want)
		}
	}
}
