package packet_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// conversation is one flow through the nat service, played from both sides.
type conversation struct {
	w     *world
	k     kind
	port  uint16 // the client's
	to    uint16 // the VIP's
	outer netip.AddrPort
}

func (w *world) converse(k kind, port uint16) *conversation {
	return &conversation{w: w, k: k, port: port, to: portNAT}
}

// say sends one packet: "c" or "b" for the side, then TCP flags, then "+" for payload.
func (c *conversation) say(words ...string) {
	c.w.Helper()
	for _, word := range words {
		side, flags := word[:1], word[1:]
		var edits []packet.Edit
		if n := len(flags); n > 0 && flags[n-1] == '+' {
			flags = flags[:n-1]
			edits = append(edits, packet.Data("payload"))
		}
		if side == "c" {
			c.outer = sourceOf(c.w.send(armA, c.k.fromClient(c.port, c.to, flags, edits...)))
			continue
		}
		answer := c.k.packet(netip.AddrPortFrom(c.k.pick(backend4, backend6), backendPort), c.outer, flags,
			append([]packet.Edit{packet.MACs(beMAC, ownC)}, edits...)...)
		got := c.w.send(armC, answer)
		if want := sourceOf(c.k.fromClient(c.port, c.to, "")); destinationOf(got) != want {
			c.w.Fatalf("the answer went to %s, not to %s", destinationOf(got), want)
		}
	}
}

// entry is the flow's client entry; its twin must be in the same state.
func (c *conversation) entry() flowEntry {
	c.w.Helper()
	table := c.w.soundTable()
	in := c.k.fromClient(c.port, c.to, "")
	protocol := uint8(6)
	if c.k.udp {
		protocol = 17
	}
	e, ok := table[flowKey{sourceOf(in), destinationOf(in), protocol}]
	if !ok {
		c.w.Fatalf("there is no flow of %s", in)
	}
	if twin := table[flowKey{e.destination, e.source, protocol}]; twin.state != e.state {
		c.w.Errorf("one half is %s, the other %s", e.state, twin.state)
	}
	return e
}

// TestStates plays connections and checks the flow after each packet.
func TestStates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	open := slotted | replied | established
	type step struct {
		word string
		want flowState
	}
	begin := []step{{"cS", 0}, {"bSA", replied}, {"cA", open}}
	for i, c := range []struct {
		name  string
		steps []step
	}{
		{"retransmitted handshake", []step{{"cS", 0}, {"cS", 0}, {"bSA", replied}, {"cS", replied}, {"bSA", replied}, {"cA+", open}}},
		{"client closes first", append(slices.Clone(begin), step{"cFA", open | finClient}, step{"bA", open | finClient},
			step{"bFA", open | finClient | finBackend}, step{"cA", open | finClient | finBackend})},
		{"backend closes first", append(slices.Clone(begin), step{"bFA", open | finBackend | backendFirst}, step{"cA", open | finBackend | backendFirst},
			step{"cFA", open | finBackend | backendFirst | finClient})},
		{"half-closed, and the backend goes on", append(slices.Clone(begin), step{"cFA", open | finClient}, step{"bA+", open | finClient})},
		{"data after a FIN restores", append(slices.Clone(begin), step{"cFA", open | finClient}, step{"cA+", open},
			step{"bFA", open | finBackend | backendFirst}, step{"bA+", open})},
		{"reset by the client, and restored", append(slices.Clone(begin), step{"cR", open | reset}, step{"cA+", open})},
		{"reset by the backend, and restored", append(slices.Clone(begin), step{"bR", open | reset}, step{"bA+", open})},
		{"refused", []step{{"cS", 0}, {"bRA", reset}, {"cS", 0}, {"bSA", replied}}},
		{"SYN on an open connection changes nothing", append(slices.Clone(begin), step{"cS", open}, step{"bA", open})},
		{"SYN on a closed one begins anew", append(slices.Clone(begin), step{"cFA", open | finClient}, step{"bFA", open | finClient | finBackend},
			step{"cS", slotted}, step{"bSA", slotted | replied}, step{"cA", open})},
	} {
		for _, k := range []kind{{}, {six: true}} {
			t.Run(fmt.Sprintf("%s/%s", k, c.name), func(t *testing.T) {
				mine := *w
				mine.TB = t
				flow := mine.converse(k, uint16(30000+i))
				var outer netip.AddrPort
				for n, s := range c.steps {
					flow.say(s.word)
					if outer.IsValid() && flow.outer != outer {
						t.Errorf("step %d, %s: the source went from %s to %s", n, s.word, outer, flow.outer)
					}
					outer = flow.outer
					if have := flow.entry().state; have != s.want {
						t.Fatalf("step %d, %s: the flow is %s, want %s", n, s.word, have, s.want)
					}
					mine.checkOpenFlows()
				}
			})
		}
	}
	if len(w.openFlows()) == 0 {
		t.Fatal("no case leaves an open flow")
	}
	w.apply(nil)
	if open := w.countedOpen(); len(open) > 0 {
		t.Errorf("flows of services and backends that are gone count as open: %v", open)
	}
}

// holder of flows is a service or a backend, by its index.
type holder struct {
	of    string
	index uint32
}

// openFlows is the number of open flows in the table, by service and by backend.
func (w *world) openFlows() map[holder]uint64 {
	w.Helper()
	found := map[holder]uint64{}
	for _, e := range w.flowTable() {
		closed := e.state&reset != 0 || e.state&finClient != 0 && e.state&finBackend != 0
		if e.direction == 0 && e.state&established != 0 && e.state&dead == 0 && !closed {
			found[holder{"service", uint32(e.service)}]++
			found[holder{"backend", e.backend & 0xfffff}]++
		}
	}
	return found
}

// countedOpen is the programs' count of the same.
func (w *world) countedOpen() map[holder]uint64 {
	w.Helper()
	counts, err := w.d.OpenFlows()
	must(w, err)
	found := map[holder]uint64{}
	for of, each := range map[string][]uint64{"service": counts.Services, "backend": counts.Backends} {
		for i, n := range each {
			if n > 0 {
				found[holder{of, uint32(i)}] = n
			}
		}
	}
	return found
}

func (w *world) checkOpenFlows() {
	w.Helper()
	if difference := cmp.Diff(w.openFlows(), w.countedOpen(), cmp.AllowUnexported(holder{})); difference != "" {
		w.Errorf("open flows (-in the table +counted):\n%s", difference)
	}
}

// TestUDPStates: two packets each way are an established flow.
func TestUDPStates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range []kind{{udp: true}, {udp: true, six: true}} {
		flow := w.converse(k, 30000)
		for i, want := range []flowState{0, replied, slotted | replied | established} {
			flow.say([]string{"c", "b", "c"}[i])
			if have := flow.entry().state; have != want {
				t.Errorf("%s, packet %d: the flow is %s, want %s", k, i+1, have, want)
			}
			w.checkOpenFlows()
		}
	}
}

// TestExpiry shows flows that end by themselves, each after its own time, without a sweep. A packet within a second of
// the last one leaves the time as it is, so no timeout is less.
func TestExpiry(t *testing.T) {
	t.Parallel()
	short := 300 * time.Millisecond
	w := newWorld(t, withTimeouts(func(o *model.Timeouts) { o.TCPHandshake, o.TCPClosing, o.UDP = short, short, short }))
	tcp, udp := kind{}, kind{udp: true}
	flows := map[string]*conversation{
		"handshake": w.converse(tcp, 1), "established": w.converse(tcp, 2), "reset": w.converse(tcp, 3), "client first": w.converse(tcp, 4),
		"backend first": w.converse(tcp, 5), "udp": w.converse(udp, 6), "half-closed": w.converse(tcp, 7),
	}
	flows["handshake"].say("cS")
	flows["established"].say("cS", "bSA", "cA")
	flows["half-closed"].say("cS", "bSA", "cA", "cFA")
	flows["reset"].say("cS", "bSA", "cA", "cR")
	flows["client first"].say("cS", "bSA", "cA", "cFA", "bFA", "cA")
	flows["backend first"].say("cS", "bSA", "cA", "bFA", "cFA", "bA")
	flows["udp"].say("c", "b", "c")
	nonces := map[string]uint32{}
	for name, flow := range flows {
		nonces[name] = flow.entry().nonce
	}
	begin := time.Now()
	ask := func(name, word string, ended bool) {
		t.Helper()
		must(t, w.d.Heartbeat())
		flows[name].say(word)
		if now := flows[name].entry().nonce; (now != nonces[name]) != ended {
			t.Errorf("%s: ended is %v after %s, want %v", name, !ended, time.Since(begin), ended)
		}
	}
	after := func(d time.Duration) {
		w.eventually("time passes", time.Minute, func() bool { return time.Since(begin) > d })
	}
	after(1200 * time.Millisecond)
	ask("handshake", "cS", true)
	ask("reset", "cA", true)
	ask("udp", "c", true)
	ask("established", "cA", false)
	after(2600 * time.Millisecond) // a closed port rests 2 s, or 60 s if the backend closed first
	ask("client first", "cS", true)
	ask("backend first", "cA", false)
	ask("half-closed", "cA", false)
}

// TestHalfClosedTime: the time for which a half-closed connection stays is configured.
func TestHalfClosedTime(t *testing.T) {
	for _, c := range []struct {
		kept  time.Duration
		ended bool
	}{{300 * time.Millisecond, true}, {time.Hour, false}, {0, false}} {
		w := newWorld(t, withTimeouts(func(o *model.Timeouts) { o.TCPHalfClosed = c.kept }))
		flows := []*conversation{w.converse(kind{}, 1), w.converse(kind{}, 2)}
		flows[0].say("cS", "bSA", "cA", "cFA")
		flows[1].say("cS", "bSA", "cA", "bFA")
		nonces := []uint32{flows[0].entry().nonce, flows[1].entry().nonce}
		begin := time.Now()
		w.eventually("time passes", time.Minute, func() bool { return time.Since(begin) > 1300*time.Millisecond })
		for i, flow := range flows {
			must(t, w.d.Heartbeat())
			if flow.say("cA"); (flow.entry().nonce != nonces[i]) != c.ended {
				t.Errorf("kept for %s, closed first by side %d: ended is %v", c.kept, i, !c.ended)
			}
		}
	}
}

// TestLostTwin: an entry whose twin is gone has no claim on its port any more, so the client's next packet that matters
// begins a new flow.
func TestLostTwin(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range kinds {
		flow := w.converse(k, 30000)
		flow.say("cS", "bSA", "cA")
		before := flow.entry().nonce
		twin, _ := w.rawFlow(k.packet(netip.AddrPortFrom(k.pick(backend4, backend6), backendPort), flow.outer, ""))
		must(t, w.flows.Delete(twin))
		if k.udp { // only time changes an established UDP flow
			begin := time.Now()
			w.eventually("time passes", time.Minute, func() bool { return time.Since(begin) > 1200*time.Millisecond })
		}
		flow.say("cFA+")
		if flow.entry().nonce == before {
			t.Errorf("%s: half a flow went on", k)
		}
	}
}

// TestSweep frees the entries that are over and leaves the rest.
func TestSweep(t *testing.T) {
	t.Parallel()
	short := 100 * time.Millisecond
	w := newWorld(t, withTimeouts(func(o *model.Timeouts) { o.TCPHandshake = short }))
	for port := range uint16(50) {
		w.converse(kind{}, 1000+port).say("cS")
	}
	stays := w.converse(kind{}, 2000)
	stays.say("cS", "bSA", "cA")
	expired := uint64(0)
	w.eventually("handshakes are swept away", time.Minute, func() bool {
		r, err := w.d.Sweep()
		must(t, err)
		expired += r.Expired
		return r.Flows == 1
	})
	if expired != 100 {
		t.Errorf("%d entries were removed, want the 100 of 50 handshakes", expired)
	}
	if stays.entry().state&established == 0 || len(w.flowTable()) != 2 {
		t.Error("the established flow is not what is left")
	}
}

// TestBackendRemoved moves the flows of a removed backend, at their next packet, and no others; the flows of a removed
// service belong to no service.
func TestBackendRemoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const port, count = 70, 200
	pool := model.Service{Name: "pool", Forwarding: model.ForwardingNAT, Announce: model.AnnounceL2, TableSize: 1021,
		Frontends: []model.Frontend{{Address: vip4, Ports: value.PortRange{First: port, Last: port}, Protocol: model.TCP}}}
	for i := range byte(4) {
		pool.Backends = append(pool.Backends, model.Backend{Weight: 1, BackendAddress: model.BackendAddress{
			Address: netip.AddrFrom4([4]byte{10, 0, 0, 100 + i}), Port: backendPort}})
	}
	w.apply(append(services(), pool))
	all := func() (out []packet.Packet) {
		for n := range uint16(count) {
			out = append(out, w.send(armA, kind{}.fromClient(20000+n, port, "A")))
		}
		return out
	}
	before := all()
	gone := pool.Backends[1].Address
	pool.Backends = slices.Delete(pool.Backends, 1, 2)
	w.apply(append(services(), pool))
	counted := w.reasons()
	moved := uint64(0)
	for i, p := range all() {
		switch {
		case p.Destination() == gone:
			t.Fatalf("flow %d still goes to the backend that was removed", i)
		case before[i].Destination() == gone:
			moved++
		case packet.Diff(before[i], p) != "":
			t.Errorf("flow %d had another backend, and changed:\n%s", i, packet.Diff(before[i], p))
		}
	}
	if n := w.moved(counted)["flow_moved"]; n != moved || moved < count/8 {
		t.Errorf("%d flows moved, %d were counted, of %d over 4 backends", moved, n, count)
	}
	w.soundTable()
	w.apply(services())
	trial{in: kind{}.fromClient(20000, port, "A"), reason: "no_service", notes: []string{"flow_moved"}}.try(t, w)
}

// TestTupleComesBack: connections on the tuples of closed ones are placed by the present table. If it leaves one with
// its backend, the port is kept; otherwise the port rests.
func TestTupleComesBack(t *testing.T) {
	t.Parallel()
	const port, count = 70, 200
	for _, k := range []kind{{}, {six: true}} {
		t.Run(k.String(), func(t *testing.T) {
			w := newWorld(t)
			server := func(n byte) netip.Addr {
				return k.pick(netip.AddrFrom4([4]byte{10, 0, 0, n}), addr(fmt.Sprintf("2001:db8:2::%x", n)))
			}
			pool := func(name string, port uint16, change func(*model.Backend), backends ...byte) model.Service {
				s := model.Service{Name: name, Forwarding: model.ForwardingNAT, Announce: model.AnnounceL2, TableSize: 1021,
					Frontends: []model.Frontend{{Address: k.pick(vip4, vip6), Ports: value.PortRange{First: port, Last: port}, Protocol: model.TCP}}}
				s.Policy.FlowsMax = 1 << 20 // no bound here: soundTable compares the count with the flows
				for _, n := range backends {
					b := model.Backend{Weight: 1, BackendAddress: model.BackendAddress{Address: server(n), Port: backendPort}}
					if n == 100 {
						change(&b)
					}
					s.Backends = append(s.Backends, b)
				}
				return s
			}
			as := func(*model.Backend) {}
			// all begins a connection on each tuple, closes it from the backend's side, and records its backend.
			all := func(step string) (to []netip.Addr, sources []netip.AddrPort) {
				for n := range uint16(count) {
					syn := k.fromClient(20000+n, port, "S")
					out := w.send(armA, syn)
					if again := w.send(armA, syn); packet.Diff(out, again) != "" {
						t.Fatalf("%s: the SYN of flow %d is sent elsewhere when it comes again:\n%s", step, n, packet.Diff(out, again))
					}
					for _, flags := range []string{"SA", "A", "FA", "A"} {
						w.send(armC, k.packet(destinationOf(out), sourceOf(out), flags, packet.MACs(beMAC, ownC)))
						w.send(armA, k.fromClient(20000+n, port, strings.TrimPrefix(flags, "S")))
					}
					to, sources = append(to, out.Destination()), append(sources, sourceOf(out))
				}
				w.soundTable()
				return to, sources
			}
			number := func(of []netip.Addr, n byte) (count int) {
				for _, a := range of {
					if a == server(n) {
						count++
					}
				}
				return count
			}
			w.apply(append(services(), pool("pool", port, as, 100, 101)))
			before, sources := all("at first")
			again, same := all("again")
			if !slices.Equal(before, again) || !slices.Equal(sources, same) {
				t.Error("with the same table, connections on closed ones' tuples have other backends or ports")
			}
			w.apply(append(services(), pool("pool", port, func(b *model.Backend) { b.Weight = 0 }, 100, 101)))
			if to, _ := all("drained"); number(to, 101) != count {
				t.Errorf("%d of %d connections are with a backend that drains", number(to, 100), count)
			}
			w.apply(append(services(), pool("pool", port, as, 100, 101, 102)))
			to, _ := all("undrained")
			for _, n := range []byte{100, 101, 102} {
				if number(to, n) < count/6 {
					t.Errorf("%d of %d connections are with backend %d, of three", number(to, n), count, n)
				}
			}
			// Another service that does not check it keeps the backend from being down in all services.
			w.apply(append(services(), pool("pool", port, func(b *model.Backend) { b.Observed.Idle, b.Observed.Down = true, true }, 100, 101, 102), pool("unchecked", 71, as, 100)))
			if to, _ := all("down in this service"); number(to, 100) > 0 {
				t.Errorf("%d of %d connections are with a backend that is down", number(to, 100), count)
			}
		})
	}
}

// TestAnswersPastTheVIP: if NAT keeps the client's address, a client that connects to the backend itself, from the port
// of a closed connection to the VIP, gets the backend's answers unchanged. Answers of a connection through the VIP come
// from the VIP, also on a closed one's ports.
func TestAnswersPastTheVIP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, k := range []kind{{}, {six: true}} {
		for _, end := range [][2]string{{"cFA", "bFA"}, {"bFA", "cFA"}, {"cR"}, {"bR"}} {
			for _, to := range []uint16{portDestination, portNAT} {
				t.Run(fmt.Sprintf("%s/port %d/%s", k, to, strings.Join(end[:], " ")), func(t *testing.T) {
					mine := *w
					mine.TB = t
					flow := mine.converse(k, uint16(33000+len(w.soundTable())))
					flow.to = to
					closed := []string{"cS", "bSA", "cA", "cA+"}
					for _, word := range end {
						if word != "" {
							closed = append(closed, word)
						}
					}
					flow.say(closed...)
					flow.say("cS", "bSA", "cA", "bA+") // through the VIP again
					flow.say(closed[4:]...)
					answer := k.packet(netip.AddrPortFrom(k.pick(backend4, backend6), backendPort), flow.outer, "SA", packet.MACs(beMAC, ownC))
					if to == portNAT { // not the client's port: the earlier answer once more
						flow.say("bSA")
						return
					}
					trial{arm: armC, in: answer, end: passes, reason: "not_ours"}.try(t, &mine)
					for _, flags := range []string{"A", "FA"} {
						trial{arm: armC, in: answer.With(flagged(flags)), end: passes, reason: "not_ours"}.try(t, &mine)
					}
					mine.soundTable()
					flow.say("cS", "bSA", "cA")
				})
			}
		}
	}
}

// TestSourceRemoved: answers to a NAT source are ours as long as it exists, and not for a packet longer, although the
// program notes the addresses that answers come to.
func TestSourceRemoved(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.String(), func(t *testing.T) {
			// With nat-destination, answers may come to any address.
			plain := slices.DeleteFunc(services(), func(s model.Service) bool { return s.Forwarding != model.ForwardingNAT })
			w := newWorld(t, withServices(plain...))
			c := w.converse(k, 20000)
			c.say("cS", "bSA", "cA", "b+", "b+")
			use := func(list []netip.Addr) {
				_, err := w.reconciler.Apply(reconcile.Desired{Services: model.Shared(plain), NATSources: list, Limits: w.options.Limits})
				must(t, err)
			}
			use(slices.DeleteFunc(slices.Clone(sources), func(a netip.Addr) bool { return a == c.outer.Addr() }))
			answer := k.packet(netip.AddrPortFrom(k.pick(backend4, backend6), backendPort), c.outer, "A", packet.MACs(beMAC, ownC))
			trial{arm: armC, in: answer, reason: "not_ours"}.try(t, w)
			use(sources)
			c.say("b+", "c+", "b+")
		})
	}
}

// TestBackendLeavesOneService moves its flows of that service, of NAT or remembered, while another service goes on with
// the same backend, and with its flows there.
func TestBackendLeavesOneService(t *testing.T) {
	t.Parallel()
	for _, forwarding := range []model.Forwarding{model.ForwardingNAT, model.ForwardingDSRIPIP} {
		if !isKept(forwarding.Direct()) {
			continue
		}
		for _, k := range kinds {
			t.Run(fmt.Sprintf("%s/%s", forwarding, k), func(t *testing.T) {
				w := newWorld(t)
				const left, kept, count = 70, 71, 100
				pool := func(port uint16, backends ...byte) model.Service {
					s := model.Service{Name: fmt.Sprintf("pool-%d", port), Forwarding: forwarding, Announce: model.AnnounceL2, TableSize: 251, Tracking: model.TrackingAlways}
					for _, protocol := range []model.Protocol{model.TCP, model.UDP} {
						s.Frontends = append(s.Frontends, model.Frontend{Address: k.pick(directVIP4, directVIP6), Ports: value.PortRange{First: port, Last: port}, Protocol: protocol})
					}
					for _, n := range backends {
						s.Backends = append(s.Backends, model.Backend{Weight: 1, BackendAddress: model.BackendAddress{
							Address: k.pick(netip.AddrFrom4([4]byte{10, 0, 0, n}), addr(fmt.Sprintf("2001:db8:2::%x", n)))}})
					}
					return s
				}
				all := func(port uint16) (to []netip.Addr) {
					for n := range uint16(count) {
						to = append(to, w.send(armA, k.toDirect(20000+n, port, "A")).Destination())
					}
					return to
				}
				both := pool(left, 100, 101, 102)
				w.apply(append(services(), both, pool(kept, 100, 101, 102)))
				gone := both.Backends[1].Address
				before, others := all(left), all(kept)
				w.apply(append(services(), pool(left, 100, 102), pool(kept, 100, 101, 102)))
				moved := 0
				for i, to := range all(left) {
					switch {
					case to == gone:
						t.Fatalf("flow %d still goes to the backend that has left its service", i)
					case before[i] == gone:
						moved++
					case to != before[i]:
						t.Errorf("flow %d went to %s, and goes to %s", i, before[i], to)
					}
				}
				if moved < count/8 {
					t.Errorf("%d of %d flows moved, of three backends", moved, count)
				}
				if now := all(kept); !slices.Equal(now, others) {
					t.Errorf("flows of the other service went to %s, and go to %s", others, now)
				}
				w.soundTable()
			})
		}
	}
}

// TestConnectionsOnOneTupleAreCounted: a client that takes its port again begins a flow, and a repeated SYN begins
// none.
func TestConnectionsOnOneTupleAreCounted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, six := range []bool{false, true} {
		c := w.converse(kind{six: six}, 31000)
		before := w.created()
		for n := range uint64(3) {
			c.say("cS", "cS", "bSA", "bSA", "cA", "cFA", "bFA", "cA")
			if got := w.created() - before; got != n+1 {
				t.Errorf("IPv6 is %t: %d connections on one tuple, %d flows counted", six, n+1, got)
			}
		}
	}
}
