package packet_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
)

// floodSize is the number of SYNs of different flows; SHUNT_SOAK=1 sends a million.
func floodSize() int {
	if os.Getenv("SHUNT_SOAK") != "" {
		return 1_000_000
	}
	return 100_000
}

// flooder makes SYNs, each of another client and port. Their checksums are wrong, which only the
// backend has to notice.
type flooder struct {
	frame []byte
	n     uint32
}

func newFlooder(port uint16) *flooder {
	return &flooder{frame: packet.Must(kind{}.toDirect(40000, port, "S"))}
}

func (f *flooder) next() []byte {
	const ip, ports = 14, 14 + 20
	f.n++
	binary.BigEndian.PutUint32(f.frame[ip+12:], 0x64400000+f.n>>4) // 100.64.0.0/10 on
	binary.BigEndian.PutUint16(f.frame[ports:], 1024+uint16(f.n%16*4001))
	return f.frame
}

// TestFloodOfSettledSlots: a flood of settled slots leaves no trace.
func TestFloodOfSettledSlots(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, v := range []directWay{wayOf(model.ForwardingDSRIPIP, false), wayOf(model.ForwardingDSRL2, false)} {
		f, before, fault := newFlooder(v.port), w.reasons(), ""
		w.cpu.do(func() {
			for i := 0; i < floodSize() && fault == ""; i++ {
				if i%10_000 == 0 {
					must(t, w.d.Heartbeat())
				}
				if verdict, _, err := w.d.RunPacket(armA, f.next()); err != nil || verdict != kernel.XDPRedirect {
					fault = fmt.Sprintf("SYN %d: verdict %d, error %v", i, verdict, err)
				}
			}
		})
		moved := w.moved(before)
		delete(moved, "checksum_completed") // 1 in 65,536 wrong checksums looks unfinished
		if fault != "" || len(moved) > 0 {
			t.Errorf("%s: %s; counted %v", v.name, fault, moved)
		}
	}
	w.emptyTables()
}

// TestFloodInTransition: a flood costs balance, not connections: connections that are older than
// the change and connections that are opened during the flood keep their backend.
func TestFloodInTransition(t *testing.T) {
	t.Parallel()
	const old, opened = 200, 400
	for _, limit := range []struct {
		name            string
		entries, budget uint32 // of entries, and of new ones in a tick
	}{
		{"a full table", 4096, 4096},
		{"a budget used up", 1 << 20, 400}, // also by a slow machine
	} {
		t.Run(limit.name, func(t *testing.T) {
			p := newWorld(t, withLimits(func(l *model.Limits) { l.Remembered = limit.entries })).place(portMoving)
			p.budget(limit.budget)
			p.tracked(model.TrackingAuto)
			p.write(slotSpec{state: reconcile.Settled, current: 'A'})
			connections := map[uint16]string{} // the client's port to its backend
			say := func(port uint16, flags string) {
				if want, got := connections[port], p.follow(p.packet(kind{six: port%2 == 1}, 9, port, flags)); want == "" {
					connections[port] = got
				} else if got != want {
					t.Errorf("the connection from port %d is with %s, and its %s went to %s", port, want, flags, got)
					connections[port] = got
				}
			}
			for port := range uint16(old) {
				say(port, "S")
				say(port, "A")
			}
			p.write(transitionAB)
			f, each := newFlooder(portMoving), floodSize()/opened
			for n := range uint16(opened) {
				must(t, p.d.Heartbeat())
				p.flood(f, each)
				say(old+n, "S")
				p.flood(f, each/10)
				say(old+n, "A")
				say(n%old, "A+")
				say(old+n/2, "A+")
			}
			spread := map[string]int{}
			for port := range uint16(old + opened) {
				say(port, "A+")
				if port >= old {
					spread[connections[port]]++
				}
			}
			reasons := p.reasons()
			if reasons["not_remembered"] == 0 {
				t.Errorf("everything was remembered, so this showed little: %v", reasons)
			}
			t.Logf("new connections went to %v; %d flows are remembered; counted %v", spread, len(p.rememberedTable()), reasons)
		})
	}
}

// flood sends SYNs, all of which must leave.
func (p *placed) flood(f *flooder, count int) {
	p.Helper()
	fault := ""
	p.cpu.do(func() {
		for i := 0; i < count && fault == ""; i++ {
			if verdict, _, err := p.d.RunPacket(armA, f.next()); err != nil || verdict != kernel.XDPRedirect {
				fault = fmt.Sprintf("SYN %d: verdict %d, error %v", f.n, verdict, err)
			}
		}
	})
	if fault != "" {
		p.Fatal(fault)
	}
}
