package ping

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/internal/kernel"
)

func TestStampsArriveAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := relay{}
		var sent []relayed
		to := []netip.Addr{server4, server6}
		for range rapid.IntRange(0, 100).Draw(t, "stamps") {
			session := rapid.Uint64Range(1, 2).Draw(t, "session")
			word := func(name string) string { return rapid.StringMatching("[a-z_]{0,64}").Draw(t, name) }
			sent = append(sent, relayed{session, to[session-1], stampEntry{rapid.Uint64().Draw(t, "sequence"), rapid.Bool().Draw(t, "answer"),
				stamp{rapid.Uint64().Draw(t, "begin"), rapid.Uint64().Draw(t, "end"), word("verdict"), word("reason"), hook(rapid.Bool().Draw(t, "tc"))}}})
		}
		r.ready = append(r.ready, sent...)
		var got [2][]stampEntry
		told, notSent := r.tell(func(message []byte, client netip.Addr) error {
			h, err := parseHead(message[icmpBytes:])
			if err != nil || len(message) > reportBytes || client != to[h.session-1] {
				t.Fatalf("%d bytes to %v: %+v, %v", len(message), client, h, err)
			}
			all, err := parseStamps(message[icmpBytes+headBytes:], h.sequence)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := parseStamps(append(message[icmpBytes+headBytes:], 0), h.sequence); err == nil {
				t.Fatal("a byte too many is accepted")
			}
			if _, err := parseStamps(message[icmpBytes+headBytes:], h.sequence+1); err == nil {
				t.Fatal("an entry too few is accepted")
			}
			got[h.session-1] = append(got[h.session-1], all...)
			return nil
		})
		var want [2][]stampEntry
		for _, s := range sent {
			want[s.session-1] = append(want[s.session-1], s.stampEntry)
		}
		if !reflect.DeepEqual(got, want) || told != uint64(len(sent)) || notSent != 0 || len(r.ready) != 0 {
			t.Fatalf("told of %d, %d not: %+v, want %+v", told, notSent, got, want)
		}
	})
}

// TestABalancerIsPlacedInOrder has three random clocks, and random ways through a balancer: no stage is negative, the
// stages of one clock are right, all add up, and the balancer's offset is within its bound.
func TestABalancerIsPlacedInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ahead := func(name string) uint64 { return uint64(rapid.Int64Range(1e15, 2e15).Draw(t, name)) }
		server, balancer := ahead("server"), ahead("balancer")
		way := rapid.SampledFrom([]via{viaOut, viaBoth, viaAnswered}).Draw(t, "via")
		var c clock
		var b teller
		now := uint64(1e9)
		for range rapid.IntRange(1, 10).Draw(t, "probes") {
			at := func(name string) uint64 {
				now += uint64(rapid.Int64Range(100, 5e6).Draw(t, name))
				return now
			}
			p := &pending{teller: &b, known: true, isUDP: rapid.Bool().Draw(t, "udp")}
			p.sent = at("sent")
			p.here.AtNs[0], p.here.AtNs[1] = at("queue"), at("driver")
			p.stamps[0] = stamp{at("balancer") + balancer, at("verdict") + balancer, "send_on", "", hookTC}
			if way == viaAnswered {
				p.stamps[0].verdict = verdictAnswer
			} else {
				s := &seen{receive: at("receive") + server, softirq: at("softirq") + server}
				if p.isUDP {
					s.socket, s.woken, s.user = at("socket")+server, at("woken")+server, at("user")+server
				}
				s.queue, s.driver = at("server queue")+server, at("server driver")+server
				if rapid.Bool().Draw(t, "reported") {
					p.server = s
				}
			}
			if way == viaBoth {
				p.stamps[1] = stamp{at("answer") + balancer, at("answer's verdict") + balancer, "send_back", "", hookXDP}
			}
			p.here.AtNs[2], p.here.AtNs[3], p.here.AtNs[4] = at("client receive"), at("client softirq"), at("client socket")
			p.woken, p.user = at("client woken"), at("client user")
			v := p.settle(&c, 0, nil, new(room))
			sum := int64(0)
			for _, s := range v.Stages {
				if sum += s.Ns; s.Ns < 0 || s.Name == "" {
					t.Fatalf("a stage is negative: %v", v)
				}
			}
			if !v.AddsUp || sum != v.RoundTrip {
				t.Fatalf("the stages have %d ns of %d: %v", sum, v.RoundTrip, v)
			}
			name := map[via]string{viaOut: "balancer.out", viaBoth: "balancer.out", viaAnswered: "balancer.answer"}[way]
			if got, want := v.of(name), int64(p.stamps[0].end-p.stamps[0].begin); got != want {
				t.Fatalf("%s has %d ns, want %d: %v", name, got, want, v)
			}
			if k := v.Balancer.Clock; abs(k.OffsetNs-int64(balancer)) > k.ErrorNs+1 {
				t.Fatalf("the balancer is %d ns ahead, and not %d ± %d", balancer, k.OffsetNs, k.ErrorNs)
			}
		}
	})
}

// TestTwoBalancersOnTheWay has two hosts with stamps of one probe, and two programs on one of them, in any order of arrival: one host's stamps are
// shown, and each other one is counted.
func TestTwoBalancersOnTheWay(t *testing.T) {
	type told struct {
		host  netip.Addr
		stamp stampEntry
	}
	near, far := netip.MustParseAddr("10.0.0.8"), netip.MustParseAddr("10.0.0.9")
	out := func(begin uint64, verdict string) stampEntry {
		return stampEntry{1, false, stamp{begin, begin + 5, verdict, "", hookXDP}}
	}
	back := func(begin uint64) stampEntry {
		return stampEntry{1, true, stamp{begin, begin + 5, "send_back", "", hookXDP}}
	}
	for _, c := range []struct {
		what  string
		all   []told    // the first one's host is met first
		shown [2]uint64 // 0: any
		twice int       // messages that came twice
	}{
		{"one", []told{{near, out(100, "send_on")}, {near, back(300)}}, [2]uint64{100, 300}, 0},
		{"a message that comes twice", []told{{near, out(100, "send_on")}, {near, out(100, "send_on")}}, [2]uint64{100, 0}, 1},
		{"two hosts", []told{{near, out(100, "send_on")}, {near, back(300)}, {far, out(7200, "send_on")}, {far, back(7300)}}, [2]uint64{100, 300}, 0},
		{"two programs of a host", []told{{near, out(100, "pass")}, {near, out(110, "send_on")}, {near, back(300)}, {near, back(320)}}, [2]uint64{100, 320}, 0},
		{"the second program of a host drops it", []told{{near, out(100, "pass")}, {near, out(110, "drop")}}, [2]uint64{110, 0}, 0},
		{"the second host drops it", []told{{near, out(100, "send_on")}, {far, out(7200, "drop")}}, [2]uint64{7200, 0}, 0},
		{"the second host drops the answer, and the first has none", []told{{near, out(100, "send_on")}, {far, out(7200, "send_on")}, {far, stampEntry{1, true, stamp{7300, 7305, "drop", "", hookXDP}}}}, [2]uint64{0, 7300}, 0},
	} {
		for range 50 {
			client := &client{slots: make([]pending, 2), session: 7}
			client.teller(c.all[0].host)
			p := client.slot(1)
			*p = pending{sequence: 1, state: isOpen, known: true}
			all := slices.Clone(c.all)
			rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			for _, one := range all {
				client.takeStamps(arrival{head: head{session: 7, sequence: 1}, from: newPeer(one.host, 0, 0), payload: one.stamp.append(nil)})
			}
			for i, want := range c.shown {
				if got := p.stamps[i].begin; want != 0 && got != want {
					t.Fatalf("%s: the stamp of %d is shown, want that of %d; they came in this order: %v", c.what, got, want, all)
				}
			}
			unshown := p.unshown
			if p.stampCount()+int(unshown)+c.twice != len(all) {
				t.Fatalf("%s: of %d stamps %d are shown, and %d are said not to be; they came in this order: %v", c.what, len(all), p.stampCount(), unshown, all)
			}
			var known uint64
			for _, one := range client.tellers {
				known += one.stamps
			}
			if known != uint64(len(all)) || client.lateStamp != 0 {
				t.Fatalf("%s: of %d stamps %d are counted, and %d are late", c.what, len(all), known, client.lateStamp)
			}
			p.state = isReady
			client.takeStamps(arrival{head: head{session: 7, sequence: 1}, from: newPeer(far, 0, 0), payload: out(100, "send_on").append(nil)})
			if client.lateStamp != 1 || p.unshown != unshown {
				t.Fatalf("%s: a stamp of a probe that is over: %d are late", c.what, client.lateStamp)
			}
		}
	}
	// Any host may send stamps: so many are remembered.
	crowd := &client{slots: make([]pending, 2)}
	*crowd.slot(1) = pending{sequence: 1, state: isOpen}
	for n := range byte(tellersMax + 3) {
		crowd.takeStamps(arrival{head: head{sequence: 1}, from: newPeer(netip.AddrFrom4([4]byte{10, 0, 0, n}), 0, 0), payload: out(100, "send_on").append(nil)})
	}
	if len(crowd.tellers) != tellersMax || crowd.lateStamp != 3 {
		t.Errorf("%d hosts are remembered, and the stamps of %d are left out", len(crowd.tellers), crowd.lateStamp)
	}
}

// TestUDPHasTheProcessInTheRoundTrip sends probes of UDP: of both families, as small and as large as they can be, and to an address
// that the server has beside its own.
func TestUDPHasTheProcessInTheRoundTrip(t *testing.T) {
	h := build(t)
	other := netip.MustParseAddr("10.0.0.3")
	if err := h.server.AddAddress("eth0", netip.PrefixFrom(other, 24)); err != nil {
		t.Fatal(err)
	}
	const port = 7007
	h.serveWith(t, ServerOptions{Port: port}, nil)
	for _, c := range []struct {
		to    netip.Addr
		bytes int
	}{{server4, 556}, {server6, 556}, {other, BytesMin}, {server4, 1480}} {
		probes, s := h.ping(t, Options{Server: c.to, Count: 20, Interval: time.Millisecond, Bytes: c.bytes, Port: port}, nil)
		if s.Sent != 20 || s.Answered != 20 || s.Jumps != 0 || s.Duplicates != 0 || s.BrokenReports != 0 {
			t.Errorf("%v, %d bytes: %+v", c.to, c.bytes, s)
		}
		t.Log(probes[len(probes)-1])
		complete := 0
		for _, p := range probes {
			total := sumOfStages(t, p)
			if !p.Lost && (total != p.RoundTrip || !p.AddsUp || !p.Reported || p.Listener != nil || p.Balancer != nil) {
				t.Errorf("the stages have %d ns of %d: %v", total, p.RoundTrip, p)
			}
			if p.of("server.protocol") > 0 && p.of("server.send") > 0 && p.of("server.queue") > 0 && p.of("wire.back") > 0 {
				complete++
			}
		}
		if complete < len(probes)/2 {
			t.Errorf("%v, %d bytes: of %d probes %d have all stages of the process", c.to, c.bytes, len(probes), complete)
		}
	}
	// Nobody answers at another port, and the kernel's refusal ends nothing.
	if _, s := h.ping(t, Options{Server: server4, Count: 3, Interval: time.Millisecond, Bytes: 144, Port: port + 1, Patience: 100 * time.Millisecond}, nil); s.Lost != 3 {
		t.Errorf("to a port without a server: %+v", s)
	}
}

// TestUDPAtFullSpeed: every probe has one outcome, as with ICMP.
func TestUDPAtFullSpeed(t *testing.T) {
	h := build(t)
	h.serveWith(t, ServerOptions{Port: 7007}, nil)
	count := uint64(30_000)
	if testing.Short() { // an emulated machine
		count = 3000
	}
	begin := time.Now()
	outcomes := make([]int, count+1)
	_, s := h.ping(t, Options{Server: server4, Count: count, Bytes: 144, Port: 7007}, func(p Probe) { outcomes[p.Sequence]++ })
	for n, got := range outcomes[1:] {
		if got != 1 {
			t.Fatalf("probe %d has %d outcomes", n+1, got)
		}
	}
	if s.Sent != count || s.Answered+s.Lost != s.Sent || s.Forgotten != 0 || s.Duplicates != 0 || s.BrokenReports != 0 {
		t.Errorf("%+v", s)
	}
	t.Logf("%.0f probes a second, %d answered, %d lost, %d unreported", float64(count)/time.Since(begin).Seconds(), s.Answered, s.Lost, s.Unreported)
}

// stamped writes stamps into the ring of an instance as a program does, one of each session, from the ring's first place on.
func stamped(t *testing.T, ring map[string]*ebpf.Map, begun uint64, sessions ...uint64) {
	t.Helper()
	for i, session := range sessions {
		number := begun + uint64(i) + 1
		var b []byte
		for _, n := range []uint64{number, session, 1, 1000, 2000} {
			b = binary.NativeEndian.AppendUint64(b, n)
		}
		source := server4.As16()
		b = append(binary.NativeEndian.AppendUint32(append(b, source[:]...), 7), 0, 0, 0, 1)
		if err := ring[kernel.StampMap].Put(uint32(number-1), b); err != nil {
			t.Fatal(err)
		}
		if err := ring[kernel.StampCountMap].Put(uint32(0), number); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTheRelayFollowsInstances: a relay reports the stamps of instances that were there before it, of one that begins
// later, and of one that ends and begins anew. It reports each stamp once, also the last ones before an end, and those
// behind a stamp that was never ended.
func TestTheRelayFollowsInstances(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make BPF maps")
	}
	root := kernel.DefaultPinRoot
	if err := kernel.Mount(root, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	name := func(which string) string { return fmt.Sprintf("shunt-relay-%d-%s", os.Getpid(), which) }
	begin := func(which string) map[string]*ebpf.Map {
		t.Helper()
		ring, err := kernel.MakeStamps(root, name(which))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			kernel.CloseMaps(ring)
			if err := os.RemoveAll(kernel.Directory(root, name(which))); err != nil {
				t.Error(err)
			}
		})
		return ring
	}
	end := func(which string) {
		t.Helper()
		if err := kernel.RemoveStamps(root, name(which)); err != nil {
			t.Fatal(err)
		}
	}
	a, b := begin("a"), begin("b")
	stamped(t, a, 0, 1) // before the relay begins
	r, err := openRelay(root)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	told := map[uint64]int{}
	read := func(what string, sessions ...uint64) {
		t.Helper()
		r.looked = time.Time{} // it is time to look for instances
		if err := r.read(nil); err != nil {
			t.Fatal(err)
		}
		clear(told)
		for _, one := range r.ready {
			if told[one.session]++; one.hook != hookTC || one.to != server4 || one.took() != 1000 {
				t.Errorf("%s: %+v", what, one)
			}
		}
		r.ready = r.ready[:0]
		want := map[uint64]int{}
		for _, s := range sessions {
			want[s] = 1
		}
		if !maps.Equal(told, want) {
			t.Errorf("%s: told of %v, want %v", what, told, want)
		}
	}
	stamped(t, a, 1, 2)
	stamped(t, b, 0, 3)
	read("of two that were there", 2, 3)
	c := begin("c")
	stamped(t, c, 0, 4)
	read("nothing is new of the two, and the third is found")
	read("of the third, from its first stamp on", 4)
	stamped(t, a, 2, 5)
	end("a")
	read("of one that has ended", 5)
	if got := len(r.rings.Rings()); got != 2 {
		t.Errorf("%d rings are open after one has ended", got)
	}
	if err := b[kernel.StampCountMap].Put(uint32(0), uint64(2)); err != nil { // its second stamp was begun, and never ended
		t.Fatal(err)
	}
	stamped(t, b, 2, 6)
	end("b")
	b, a = begin("b"), begin("a") // both anew before the relay looks
	stamped(t, b, 0, 7)
	stamped(t, a, 0, 8)
	read("of one's old ring", 6)
	read("of both new rings", 7, 8)
	read("of each once")
	end("a")
	end("b")
	end("c")
	read("of none")
	if r.has() || r.rings.Missed() != 1 {
		t.Errorf("%d rings are left, and %d stamps missed, want the one that was not ended", len(r.rings.Rings()), r.rings.Missed())
	}
}
