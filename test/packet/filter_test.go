package packet_test

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
)

// filtered is a service of each forwarding, by its port and its VIPs.
var filtered = []struct {
	name   string
	port   uint16
	direct bool
}{
	{"nat", portNAT, false}, {"destination", portDestination, false},
	{"dsr-l2-two-arms", wayOf(model.ForwardingDSRL2, false).port, true},
	{"dsr-ipip-over-4-two-arms", wayOf(model.ForwardingDSRIPIP, false).port, true},
	{"dsr-gue-over-6-two-arms", wayOf(model.ForwardingDSRGUE, true).port, true},
}

// applyWith makes the usual services, one of them changed.
func (w *world) applyWith(name string, change func(*model.Service)) {
	w.Helper()
	all := services()
	i := slices.IndexFunc(all, func(s model.Service) bool { return s.Name == name })
	change(&all[i])
	w.apply(all)
}

// lists gives a service lists of sources.
func lists(allow, deny string) func(*model.Service) {
	return func(s *model.Service) { s.AllowFrom, s.DenyFrom = prefixes(allow), prefixes(deny) }
}

func prefixes(text string) (list []netip.Prefix) {
	for _, word := range strings.Fields(text) {
		list = append(list, netip.MustParsePrefix(word))
	}
	return list
}

// from is a packet of a source to the port of a VIP.
func (k kind) from(source netip.Addr, sourcePort, vipPort uint16, direct bool, flags string) packet.Packet {
	vip := k.pick(vip4, vip6)
	if direct {
		vip = k.pick(directVIP4, directVIP6)
	}
	return k.packet(netip.AddrPortFrom(source, sourcePort), netip.AddrPortFrom(vip, vipPort), flags, packet.MACs(router, ownA))
}

// refusedFor returns the reason why a packet is dropped, or "" if it leaves. Any other counted
// reason is a fault.
func (w *world) refusedFor(p packet.Packet) string {
	w.Helper()
	before := w.reasons()
	_, left := w.try(armA, p)
	moved := w.moved(before)
	for reason, n := range moved {
		if left || n != 1 || len(moved) > 1 {
			w.Fatalf("%s: left is %v, and counted was %v", p, left, moved)
		}
		return reason
	}
	if !left {
		w.Fatalf("%s was dropped without a reason", p)
	}
	return ""
}

// TestSourcesInLists: the longest prefix decides, in either list; a source in no list is
// allowed if the service has no allow list.
func TestSourcesInLists(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	port := uint16(20000)
	for _, c := range []struct {
		allow, deny string
		sources     string // the allowed ones, then "/", then the denied ones
	}{
		{"", "", "198.51.100.7 203.0.113.9 2001:db8:9::7 /"},
		{"198.51.100.0/24 2001:db8:9::/48", "", "198.51.100.0 198.51.100.255 2001:db8:9::7 2001:db8:9:ffff::1 / 198.51.101.0 198.51.99.255 203.0.113.9 2001:db8:8::1 2001:db8:a::1"},
		{"", "198.51.100.0/24 2001:db8:9::/48", "198.51.101.0 198.51.99.255 203.0.113.9 2001:db8:8::1 / 198.51.100.0 198.51.100.255 2001:db8:9::7"},
		{"198.51.100.0/24 198.51.100.7/32 2001:db8:9::7/128", "198.51.100.0/29 2001:db8:9::/64",
			"198.51.100.7 198.51.100.8 2001:db8:9::7 / 198.51.100.6 198.51.100.1 198.51.99.255 2001:db8:9::6 2001:db8:9:1::7"},
		{"0.0.0.0/0", "203.0.113.0/24", "198.51.100.7 / 203.0.113.9 2001:db8:9::7"},
		{"::/0", "2001:db8:9::/65", "2001:db8:9:0:8000::1 2001:db8:8::1 / 2001:db8:9::7 2001:db8:9:0:7fff::1 198.51.100.7"},
		{"", "0.0.0.0/0", "2001:db8:9::7 / 198.51.100.7"},
	} {
		for _, s := range filtered {
			if !isKept(s.direct) {
				continue
			}
			w.applyWith(s.name, lists(c.allow, c.deny))
			may := "" // the reason
			for _, word := range strings.Fields(c.sources) {
				if word == "/" {
					may = "denied"
					continue
				}
				source := addr(word)
				for _, udp := range []bool{false, true} {
					k := kind{udp: udp, six: source.Is6()}
					port++
					for _, flags := range []string{"S", "A"} { // in the middle of a flow, too
						if got := w.refusedFor(k.from(source, port, s.port, s.direct, flags)); got != may {
							t.Errorf("allow %q, deny %q: %s from %s to service %s: %q, want %q", c.allow, c.deny, flags, source, s.name, got, may)
						}
					}
				}
			}
			w.apply(services())
		}
	}
	w.soundTable()
}

// TestListsOfOthers: a service's lists hold for no other service, and not for the next one in
// its place.
func TestListsOfOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	syn := func(port uint16) packet.Packet { return kind{}.from(client4, port, portNAT, false, "S") }
	w.applyWith("nat", lists("203.0.113.0/24", ""))
	if got := w.refusedFor(syn(1)); got != "denied" {
		t.Errorf("the service's own lists: %q", got)
	}
	if got := w.refusedFor(kind{}.from(client4, 1, portSameArm, false, "S")); got != "" {
		t.Errorf("another service: %q", got)
	}
	w.applyWith("nat", func(s *model.Service) { s.Name = "other" })
	if got := w.refusedFor(syn(2)); got != "" {
		t.Errorf("the service that took its place: %q", got)
	}
	if n := w.count("sh_filters"); n != 0 {
		t.Errorf("%d prefixes are left", n)
	}
}

// count is the number of elements of a hash or trie.
func (w *world) count(name string) (n int) {
	w.Helper()
	m := w.pinned(name)
	key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
	all := m.Iterate()
	for all.Next(&key, &value) {
		n++
	}
	must(w, all.Err())
	return n
}

// TestManyPrefixes has as many prefixes as the limit permits, half of them in the allow list.
func TestManyPrefixes(t *testing.T) {
	t.Parallel()
	const each = 5000
	w := newWorld(t)
	at := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)}) }
	many := func(s *model.Service) {
		for i := range each {
			s.AllowFrom = append(s.AllowFrom, netip.PrefixFrom(at(2*i), 32))
			s.DenyFrom = append(s.DenyFrom, netip.PrefixFrom(at(2*i+1), 32))
		}
	}
	begin := time.Now()
	w.applyWith("nat", many)
	t.Logf("%d prefixes took %s", w.count("sh_filters"), time.Since(begin))
	for i := 0; i < 2*each; i += 501 {
		if got, want := w.refusedFor(kind{}.from(at(i), 1, portNAT, false, "S")), map[bool]string{true: "denied"}[i%2 == 1]; got != want {
			t.Errorf("source %s: %q, want %q", at(i), got, want)
		}
	}
}

// TestDeniedMeanwhile: tracked flows go on, and a closed one is not begun again. Direct return
// does not know flows.
func TestDeniedMeanwhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, six := range []bool{false, true} {
		k := kind{six: six}
		open, closed, direct := w.converse(k, 31000), w.converse(k, 31001), wayOf(model.ForwardingDSRIPIP, false)
		open.say("cS", "bSA", "cA")
		closed.say("cS", "bSA", "cA", "cFA", "bFA", "cA")
		w.send(armA, k.toDirect(31000, direct.port, "S"))

		w.applyWith("nat", lists("", "198.51.100.0/24 2001:db8:9::/48"))
		open.say("cA+", "bA+", "cS", "bA", "cA")
		if got := w.refusedFor(k.fromClient(31002, portNAT, "S")); got != "denied" {
			t.Errorf("%s: a new flow: %q", k, got)
		}
		state := closed.entry().state
		if got := w.refusedFor(k.fromClient(31001, portNAT, "S")); got != "denied" || closed.entry().state != state {
			t.Errorf("%s: a new connection on a closed one's tuple: %q, and the flow is %s", k, got, closed.entry().state)
		}
		closed.say("cA", "bA")

		w.applyWith(direct.name, lists("", "198.51.100.0/24 2001:db8:9::/48"))
		if got := w.refusedFor(k.toDirect(31000, direct.port, "A")); got != "denied" {
			t.Errorf("%s: the next packet with direct return: %q", k, got)
		}
		w.apply(services())
		w.send(armA, k.toDirect(31000, direct.port, "A"))
		closed.say("cS", "bSA", "cA")
	}
}

// bounded gives a service a rate.
func bounded(rate uint32) func(*model.Service) {
	return func(s *model.Service) { s.Policy.SourceRate = rate }
}

// TestSourceRate: a source has a second's worth of new flows, and as many more each second.
func TestSourceRate(t *testing.T) {
	t.Parallel()
	const rate, tries = 5, 40
	w := newWorld(t)
	port, fresh := uint16(1000), byte(0)
	for _, s := range filtered {
		if !isKept(s.direct) {
			continue
		}
		w.applyWith(s.name, bounded(rate))
		for _, k := range kinds {
			if s.direct && k.udp {
				continue // no packet shows the begin of a flow
			}
			fresh++ // a new address, or a new /64
			own := k.pick(netip.AddrFrom4([4]byte{100, 64, fresh, 1}), netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0, 9, 1, fresh, 15: 1}))
			other := k.pick(own.Next(), netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 0, 9, 2, fresh, 15: 1}))
			same := k.pick(own, own.Next())
			begin, passed, first := time.Now(), 0, port
			for range tries {
				port++
				switch got := w.refusedFor(k.from([]netip.Addr{own, same}[port%2], port, s.port, s.direct, "S")); got {
				case "":
					passed++
				case "source_rate":
				default:
					t.Fatalf("%s to %s: %s", k, s.name, got)
				}
			}
			if most := rate + int(time.Since(begin).Seconds()*rate) + 1; passed < rate || passed > most {
				t.Errorf("%s to %s: %d of %d new flows, want %d to %d", k, s.name, passed, tries, rate, most)
			}
			for _, flags := range []string{"A", "FA", "S"} { // of an existing flow, again
				if flags == "S" && s.direct {
					continue // a SYN is another new flow there
				}
				if got := w.refusedFor(k.from([]netip.Addr{own, same}[(first+1)%2], first+1, s.port, s.direct, flags)); got != "" {
					t.Errorf("%s to %s: %s of a known flow: %q", k, s.name, flags, got)
				}
			}
			for range rate {
				port++
				if got := w.refusedFor(k.from(other, port, s.port, s.direct, "S")); got != "" {
					t.Errorf("%s to %s: another source: %q", k, s.name, got)
				}
			}
			w.eventually("the source may begin flows again", 10*time.Second, func() bool {
				port++
				return w.refusedFor(k.from(own, port, s.port, s.direct, "S")) == ""
			})
		}
		w.apply(services())
	}
}

// TestRateOfWhoIsDenied: a source that the lists deny uses up no room.
func TestRateOfWhoIsDenied(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.applyWith("nat", func(s *model.Service) {
		lists("198.51.100.0/24", "")(s)
		bounded(3)(s)
	})
	for port := range uint16(10) {
		if got := w.refusedFor(kind{}.from(addr("203.0.113.9"), 1+port, portNAT, false, "S")); got != "denied" {
			t.Errorf("SYN %d: %q", port, got)
		}
	}
	if n := w.count("sh_source_rates"); n != 0 {
		t.Errorf("%d sources are counted", n)
	}
}

// TestSpoofedSources: a flood from more sources than there is room for does not take a real
// source's share, and a source that exceeds its share stays bounded while it keeps sending.
func TestSpoofedSources(t *testing.T) {
	t.Parallel()
	const rate, every = 200, 500
	w, way := newWorld(t), wayOf(model.ForwardingDSRIPIP, false)
	w.applyWith(way.name, bounded(rate))
	frame := packet.Must(kind{}.toDirect(40000, way.port, "S"))
	run := func(source uint32, port int) uint32 {
		const ip, ports = 14, 14 + 20
		binary.BigEndian.PutUint32(frame[ip+12:], source)
		binary.BigEndian.PutUint16(frame[ports:], uint16(port))
		verdict, _, err := w.d.RunPacket(armA, frame)
		if err != nil {
			return 0
		}
		return verdict
	}
	fault, refused, greedy, last := "", 0, 0, time.Now()
	begin := last
	w.cpu.do(func() {
		for i := 0; i < floodSize() && fault == ""; i++ {
			if i%10_000 == 0 {
				must(t, w.d.Heartbeat())
			}
			if run(0x64400000+uint32(i), 1024) != kernel.XDPRedirect {
				fault = fmt.Sprintf("spoofed SYN %d was dropped", i)
			}
			if i%50 == 0 && run(0xc6336408, 1024+i%60000) == kernel.XDPRedirect {
				greedy++
			}
			if i%every == 0 && time.Since(last) > time.Second/rate*2 {
				last = time.Now()
				if run(0xc6336407, 1024+i%60000) != kernel.XDPRedirect {
					refused++
				}
			}
		}
	})
	if fault != "" || refused > 0 {
		t.Errorf("%s; %d SYNs of a real source were dropped", fault, refused)
	}
	most := rate + int(time.Since(begin).Seconds()*rate) + 1
	if greedy < rate || greedy > most {
		t.Errorf("a source that exceeds its rate began %d flows, want %d to %d", greedy, rate, most)
	}
	n := w.count("sh_source_rates")
	t.Logf("%d SYNs in %s; %d sources are remembered, the greedy one began %d flows", floodSize(), time.Since(begin), n, greedy)
	if n > 1<<16 || n < 1<<14 {
		t.Errorf("%d sources are remembered", n)
	}
}
