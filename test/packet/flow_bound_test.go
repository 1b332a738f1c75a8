package packet_test

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// tenant is a service by index and generation.
type tenant struct {
	index      uint16
	generation uint8
}

// countedFlows is the number of existing flows that were counted when they began (NONCE_COUNTED in types.h).
func (w *world) countedFlows() map[tenant]int {
	w.Helper()
	const counted = 0x40000000
	found := map[tenant]int{}
	var k, v []byte
	all := w.flows.Iterate()
	for all.Next(&k, &v) {
		if v[71] == 0 && binary.NativeEndian.Uint32(v[60:])&counted != 0 {
			found[tenant{binary.NativeEndian.Uint16(v[68:]), v[70]}]++
		}
	}
	must(w, all.Err())
	return found
}

// checkFlowCounts compares the programs' counts with the existing flows.
func (w *world) checkFlowCounts() {
	w.Helper()
	m, flows := w.pinned("sh_svc_flows"), w.countedFlows()
	for i := range m.MaxEntries() {
		var value struct {
			Count      int32
			Generation uint32
		}
		must(w, m.Lookup(i, &value))
		if want := flows[tenant{uint16(i), uint8(value.Generation)}]; int(value.Count) != want {
			w.Errorf("service %d, generation %d, is said to have %d flows, and has %d", i, value.Generation, value.Count, want)
		}
	}
}

// atMost bounds a service's flows.
func atMost(n uint32) func(*model.Service) {
	return func(s *model.Service) { s.Policy.FlowsMax = n }
}

// TestFlowsOfAService: no more than the bound, of either family; existing flows go on, and when one has ended, another
// may begin.
func TestFlowsOfAService(t *testing.T) {
	t.Parallel()
	const bound = 3
	short := 200 * time.Millisecond
	w := newWorld(t, withTimeouts(func(o *model.Timeouts) { o.TCPHandshake = short }))
	for _, s := range filtered[:2] {
		w.applyWith(s.name, atMost(bound))
		for _, six := range []bool{false, true} {
			tcp, udp := kind{six: six}, kind{six: six, udp: true}
			first, second := w.converse(tcp, 1), w.converse(udp, 2)
			first.to, second.to = s.port, s.port
			if s.name == "nat" {
				first.say("cS", "bSA", "cA")
				second.say("c", "b", "c")
			} else {
				w.send(armA, tcp.fromClient(1, s.port, "S"))
				w.send(armA, udp.fromClient(2, s.port, ""))
			}
			w.send(armA, tcp.fromClient(3, s.port, "S"))
			for _, k := range []kind{tcp, udp} {
				for _, flags := range []string{"S", "A"} {
					if got := w.refusedFor(k.fromClient(4, s.port, flags)); got != "service_full" {
						t.Errorf("%s to %s: the flow beyond the bound: %q", k, s.name, got)
					}
				}
			}
			for port, k := range map[uint16]kind{1: tcp, 2: udp, 3: tcp} {
				if got := w.refusedFor(k.fromClient(port, s.port, "S")); got != "" {
					t.Errorf("%s to %s: a packet of a flow that is there: %q", k, s.name, got)
				}
			}
			w.soundTable()
			w.eventually("the handshake is over, and another flow may begin", 20*time.Second, func() bool {
				must(t, w.d.Heartbeat())
				_, err := w.d.Sweep()
				must(t, err)
				return w.refusedFor(tcp.fromClient(4, s.port, "S")) == ""
			})
			w.soundTable()
		}
		w.apply(services())
	}
}

// TestFlowBoundThatChanges: older flows do not count, a lower bound ends none, a renamed service keeps its count, and a
// service in the place of a removed one begins at zero.
func TestFlowBoundThatChanges(t *testing.T) {
	t.Parallel()
	w, syn := newWorld(t), func(port uint16) packet.Packet { return kind{}.fromClient(port, portNAT, "S") }
	w.applyWith("nat", atMost(0))
	w.send(armA, syn(1))
	w.applyWith("nat", atMost(2))
	w.send(armA, syn(2))
	w.send(armA, syn(3))
	for _, change := range []func(*model.Service){atMost(2), atMost(1)} {
		w.applyWith("nat", change)
		if got := w.refusedFor(syn(4)); got != "service_full" {
			t.Errorf("the flow beyond the bound: %q", got)
		}
		for port := range uint16(3) {
			w.send(armA, syn(port+1))
		}
	}
	w.soundTable()
	named := func(name string) func(*model.Service) {
		return func(s *model.Service) { s.Name, s.Policy.FlowsMax = name, 2 }
	}
	w.applyWith("nat", named("heir"))
	w.send(armA, syn(2))
	if got := w.refusedFor(syn(5)); got != "service_full" {
		t.Errorf("the flow beyond the bound, after the service got another name: %q", got)
	}
	w.soundTable()
	w.apply(slices.DeleteFunc(services(), func(s model.Service) bool { return s.Name == "nat" }))
	w.applyWith("nat", named("other"))
	before := w.reasons()
	w.send(armA, syn(2)) // of a removed service: a new flow
	w.send(armA, syn(5))
	if moved := w.moved(before); moved["flow_moved"] != 1 {
		t.Errorf("counted %v, want one flow_moved", moved)
	}
	if got := w.refusedFor(syn(6)); got != "service_full" {
		t.Errorf("the flow beyond the bound of the service that took the place: %q", got)
	}
	w.soundTable()
	c, err := w.d.Contents()
	must(t, err)
	for _, record := range c.Services { // the next tenant of the same index
		if record.Name == "other" {
			record.Generation++
			must(t, w.d.PutService(record))
		}
	}
	w.send(armA, syn(2))
	w.soundTable()
}

// TestFlowBoundWithoutDaemon: without a daemon, which would lift the bound again.
func TestFlowBoundWithoutDaemon(t *testing.T) {
	t.Parallel()
	w := newWorld(t, withoutHeartbeat)
	w.applyWith("nat", atMost(1))
	for port := range uint16(5) {
		if _, left := w.try(armA, kind{}.fromClient(port+1, portNAT, "S")); !left {
			t.Errorf("SYN %d was dropped: %v", port, w.reasons())
		}
	}
	w.soundTable()
}

// TestFlowCountsInAFlood: the end of a flow lowers the count, whether it ends for its place among the handshakes, for its
// port or by the sweep, and on any CPU.
func TestFlowCountsInAFlood(t *testing.T) {
	const each, bound = 6000, 500
	short := 100 * time.Millisecond
	w := newWorld(t, withPorts(value.PortRange{First: 2000, Last: 2000 + 1199}),
		withTimeouts(func(o *model.Timeouts) { o.TCPHandshake = short }))
	for _, most := range []uint32{bound, 1 << 20} {
		w.applyWith("nat", atMost(most))
		var waiting sync.WaitGroup
		var errs [2]error
		for cpu := range errs {
			r := w.newRunner(cpu)
			waiting.Go(func() {
				r.do(func() {
					for i := range each {
						_, _, err := w.d.RunPacket(armA, packet.Must(kind{six: i%5 == 0}.fromClient(uint16(1024+i/2+cpu*each), portNAT, "S")))
						if i%1000 == 999 {
							_, swept := w.d.Sweep()
							err = errors.Join(err, swept, w.d.Heartbeat())
						}
						errs[cpu] = errors.Join(errs[cpu], err)
					}
				})
			})
		}
		waiting.Wait()
		must(t, errors.Join(errs[:]...))
		w.soundTable()
		reasons := w.reasons()
		t.Logf("%d flows are counted; %v", w.countedFlows(), reasons)
		if most == bound && reasons["service_full"] == 0 {
			t.Errorf("the bound of %d was not reached", most)
		}
	}
	if reasons := w.reasons(); reasons["handshake_evicted"]+reasons["port_taken"] == 0 {
		t.Errorf("no flow made room for another: %v", reasons)
	}
}
