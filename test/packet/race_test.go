package packet_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// meeting lets two threads begin each round together.
type meeting struct{ arrived atomic.Int64 }

func (m *meeting) wait(round int) {
	m.arrived.Add(1)
	for m.arrived.Load() < int64(2*(round+1)) {
		runtime.Gosched()
	}
}

// twoCPUs returns two runners on different CPUs.
func twoCPUs(t *testing.T, w *world) [2]*runner {
	t.Helper()
	if runtime.NumCPU() < 2 {
		t.Skip("needs two CPUs: runs packets on both at once")
	}
	return [2]*runner{w.newRunner(0), w.newRunner(1)}
}

// race runs the frames of each side, pair by pair at the same moment.
func race(t *testing.T, w *world, frames [2][][]byte) (out [2][]result) {
	t.Helper()
	cpus := twoCPUs(t, w)
	var start meeting
	var both sync.WaitGroup
	for side := range 2 {
		out[side] = make([]result, len(frames[side]))
		both.Go(func() {
			cpus[side].do(func() {
				for i, frame := range frames[side] {
					start.wait(i)
					r := &out[side][i]
					r.verdict, r.frame, r.err = w.d.RunPacket(armA, frame)
				}
			})
		})
	}
	both.Wait()
	return out
}

// TestSameFirstPacketOnTwoCPUs: one flow is made, both packets follow it.
func TestSameFirstPacketOnTwoCPUs(t *testing.T) {
	const rounds = 3000
	for _, forwarding := range []struct {
		name string
		port uint16
	}{{"nat", portNAT}, {"nat-destination", portDestination}} {
		t.Run(forwarding.name, func(t *testing.T) {
			w := newWorld(t, withLimits(func(l *model.Limits) { l.Flows = 4 * rounds }))
			var frames [2][][]byte
			for n := range uint16(rounds) {
				frame := packet.Must(kinds[n%4].fromClient(10000+n, forwarding.port, "S"))
				frames[0], frames[1] = append(frames[0], frame), append(frames[1], frame)
			}
			out := race(t, w, frames)
			for i := range rounds {
				a, b := out[0][i], out[1][i]
				must(t, a.err)
				must(t, b.err)
				switch {
				case a.verdict == kernel.XDPDrop || b.verdict == kernel.XDPDrop:
					t.Fatalf("round %d: a packet was dropped: %v", i, w.reasons())
				case !bytes.Equal(a.frame, b.frame):
					t.Fatalf("round %d: one packet, two ways:\n%s", i, differences(a.frame, b.frame))
				}
			}
			if reasons := w.reasons(); len(reasons) > 0 {
				t.Errorf("nothing happened, but counted is %v", reasons)
			}
			if table := w.soundTable(); len(table) != 2*rounds {
				t.Errorf("the table has %d entries for %d flows", len(table), rounds)
			}
			if n := w.created(); n != rounds {
				t.Errorf("%d flows were counted, %d made", n, rounds)
			}
		})
	}
}

// TestDifferentFirstPacketsOnTwoCPUs: all want ports of one pool, and none gets another's.
func TestDifferentFirstPacketsOnTwoCPUs(t *testing.T) {
	const rounds, pool = 2000, 4096
	w := newWorld(t, withLimits(func(l *model.Limits) { l.Flows = 8 * rounds }), withPorts(value.PortRange{First: 20000, Last: 20000 + pool - 1}))
	udp := kind{udp: true} // its flows never yield their port
	var frames [2][][]byte
	for n := range uint16(rounds) {
		frames[0] = append(frames[0], packet.Must(udp.fromClient(10000+n, portNAT, "")))
		frames[1] = append(frames[1], packet.Must(udp.fromClient(40000+n, portNAT, "")))
	}
	out := race(t, w, frames)
	owner := map[netip.AddrPort]int{}
	forwarded := 0
	for side := range 2 {
		for i, r := range out[side] {
			must(t, r.err)
			if r.verdict == kernel.XDPDrop {
				continue
			}
			forwarded++
			p, err := packet.Parse(r.frame)
			must(t, err)
			me := side*rounds + i + 1
			if other := owner[sourceOf(p)]; other != 0 {
				t.Errorf("flows %d and %d both have %s", other, me, sourceOf(p))
			}
			owner[sourceOf(p)] = me
		}
	}
	// The pool is 98 % full in the end, so a few find no port in their tries.
	if n := w.reasons()["ports_exhausted"]; int(n) != 2*rounds-forwarded || forwarded < 2*rounds*95/100 {
		t.Errorf("%d of %d flows were made; %v", forwarded, 2*rounds, w.reasons())
	}
	if table := w.soundTable(); len(table) != 2*forwarded {
		t.Errorf("the table has %d entries for %d flows", len(table), forwarded)
	}
}

// TestClaimsOfTwoCPUs: two flows that begin at the same moment, with a choice of two ports, get
// one each. They choose the same one in every second round, and either CPU may be first.
func TestClaimsOfTwoCPUs(t *testing.T) {
	const rounds, first = 3000, 2000
	w := newWorld(t, withLimits(func(l *model.Limits) { l.Flows = 8 * rounds }), withPorts(value.PortRange{First: 20000, Last: 20001}))
	// A backend without a port gets the VIP's, so each round has ports of its own to claim.
	w.apply(append(services(), model.Service{Name: "wide", Forwarding: model.ForwardingNAT, Announce: model.AnnounceL2, TableSize: 251,
		Frontends: []model.Frontend{{Address: vip4, Ports: value.PortRange{First: first, Last: first + rounds - 1}, Protocol: model.UDP}},
		Backends:  []model.Backend{{Weight: 1, BackendAddress: model.BackendAddress{Address: backend4}}}}))
	var frames [2][][]byte
	for n := range uint16(rounds) {
		for side := range frames {
			in := kind{udp: true}.fromClient(uint16(10000*(side+1)), first+n, "")
			frames[side] = append(frames[side], packet.Must(in))
		}
	}
	out := race(t, w, frames)
	for i := range rounds {
		var claimed [2]netip.AddrPort
		for side := range claimed {
			r := out[side][i]
			must(t, r.err)
			if r.verdict == kernel.XDPDrop {
				t.Fatalf("round %d: a packet was dropped: %v", i, w.reasons())
			}
			p, err := packet.Parse(r.frame)
			must(t, err)
			claimed[side] = sourceOf(p)
		}
		if claimed[0] == claimed[1] {
			t.Fatalf("round %d: both flows have %s", i, claimed[0])
		}
	}
	if table := w.soundTable(); len(table) != 4*rounds {
		t.Errorf("the table has %d entries for %d flows", len(table), 2*rounds)
	}
}

// TestForeignValues puts values into a flow's entry that a reader can meet there while the
// element is being given to another flow: another's value, whole or in part. No packet may
// follow it.
func TestForeignValues(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		t.Run(k.String(), func(t *testing.T) {
			in, other := k.fromClient(10000, portNAT, "S"), k.fromClient(10001, portKept, "S")
			want := packet.Must(w.send(armA, in))
			w.send(armA, other)
			key, own := w.rawFlow(in)
			_, foreign := w.rawFlow(other)
			values := map[string][]byte{"another's value": foreign}
			for at := range own {
				// The clock, the state and the next hop to a client change while an entry lives.
				if at >= 8 && at < 13 || at >= 16 && at < 24 {
					continue
				}
				value := bytes.Clone(own)
				value[at] ^= 1
				values[fmt.Sprintf("byte %d", at)] = value
				half := append(bytes.Clone(own[:at]), foreign[at:]...)
				if at > 0 && !bytes.Equal(half, own) {
					values[fmt.Sprintf("from byte %d on", at)] = half
				}
			}
			for name, value := range values {
				must(t, w.flows.Put(key, value))
				before := w.reasons()
				r := w.cpu.run(armA, packet.Must(in))
				must(t, r.err)
				moved := w.moved(before)
				if r.verdict != kernel.XDPDrop || moved["flow_recycled"] == 0 || moved["claim_race"] != 1 {
					t.Errorf("%s: verdict %d, counted %v; a packet was to find no flow, and no room for one", name, r.verdict, moved)
				}
			}
			must(t, w.flows.Put(key, own))
			if got := w.cpu.run(armA, packet.Must(in)); !bytes.Equal(got.frame, want) {
				t.Errorf("with its own value again:\n%s", differences(want, got.frame))
			}
		})
	}
	w.soundTable()
}

// TestRecycledValues makes and ends flows on one CPU, as fast as it can, while the other
// forwards packets: of a flow that stays, of one that is ended all the time, and back.
func TestRecycledValues(t *testing.T) {
	const packets = 20000
	w := newWorld(t, withLimits(func(l *model.Limits) { l.Flows = 64 }))
	cpus := twoCPUs(t, w)
	stays := w.converse(kind{}, 10000)
	stays.say("cS", "bSA", "cA")
	forth := kind{}.fromClient(10000, portNAT, "A", packet.Data("forth"))
	back := packet.NewTCP(netip.AddrPortFrom(backend4, backendPort), stays.outer, "A", packet.MACs(beMAC, ownC), packet.Data("back"))
	wantForth, wantBack := packet.Must(w.send(armA, forth)), packet.Must(w.send(armC, back))
	ended := kind{}.fromClient(10001, portNAT, "S")

	var stop atomic.Bool
	var hammer sync.WaitGroup
	hammer.Go(func() {
		cpus[1].do(func() {
			var frames [][]byte
			for n := range uint16(4096) { // to another backend, from the same table of 2,176
				frames = append(frames, packet.Must(kind{}.fromClient(20000+n, portKept, "S")))
			}
			for i := 0; !stop.Load(); i++ {
				_, _, _ = w.d.RunPacket(armA, frames[i%len(frames)])
			}
		})
	})
	before := w.reasons()
	frames := []struct {
		arm  string
		in   []byte
		want func([]byte) string
	}{
		{armA, packet.Must(forth), func(got []byte) string { return differencesBut(wantForth, got) }},
		{armC, packet.Must(back), func(got []byte) string { return differencesBut(wantBack, got) }},
		{armA, packet.Must(ended), func(got []byte) string {
			p, err := packet.Parse(got)
			if err != nil {
				return err.Error()
			}
			return packet.Diff(ways[0].expected(w, kind{}, ended)(p), p)
		}},
	}
	faults := 0
	for i := 0; i < packets && faults < 5; i++ {
		if i%1000 == 0 {
			must(t, w.d.Heartbeat())
		}
		f := frames[i%len(frames)]
		r := cpus[0].run(f.arm, f.in)
		if r.err != nil || r.verdict == kernel.XDPDrop || r.verdict == kernel.XDPPass {
			t.Errorf("packet %d: verdict %d, error %v; %v", i, r.verdict, r.err, w.moved(before))
			faults++
		} else if diff := f.want(r.frame); diff != "" {
			t.Errorf("packet %d left with what is not its own:\n%s", i, diff)
			faults++
		}
	}
	stop.Store(true)
	hammer.Wait()
	moved := w.moved(before)
	if moved["handshake_evicted"] < packets/10 {
		t.Errorf("only %d flows were ended meanwhile: this showed little", moved["handshake_evicted"])
	}
	t.Logf("meanwhile: %v", moved)
	w.soundTable()
}

// differencesBut returns the differences, or "".
func differencesBut(want, got []byte) string {
	if bytes.Equal(want, got) {
		return ""
	}
	return differences(want, got)
}
