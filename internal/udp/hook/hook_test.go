package hook

import (
	"bytes"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// inHost runs a test in a namespace that has the interface eth0, with two queues.
func inHost(t *testing.T, do func(t *testing.T)) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	l, err := lab.New("")
	must(t, err)
	t.Cleanup(func() { must(t, l.Close()) })
	client, err := l.AddHost("client")
	must(t, err)
	server, err := l.AddHost("server")
	must(t, err)
	must(t, l.Connect(lab.End{Host: server, Interface: "eth0"}, lab.End{Host: client, Interface: "eth0"}, lab.Cable{Queues: 2}))
	must(t, server.Run(func() error { do(t); return nil }))
}

// beside is an address and port that has the bucket of another one, and its hash or not. Its own address is from near on.
func beside(other, near string, hashToo bool) string {
	one, at := netip.MustParseAddrPort(other), netip.MustParseAddrPort(near)
	for ip := at.Addr(); ; ip = ip.Next() {
		if found := netip.AddrPortFrom(ip, at.Port()); found != one && bucket(found) == bucket(one) && (hash(found) == hash(one)) == hashToo {
			return found.String()
		}
	}
}

// hinted are the hashes that the program looks for.
func hinted(t *testing.T, h *Hook) (all []uint32) {
	t.Helper()
	for at := range uint32(udpLeaseLimitLEASE_BUCKETS) {
		var word uint64
		must(t, h.objects.Maps[udpMapShUdHints].Lookup(at, &word))
		for bit := range uint32(udpLeaseLimitLEASE_HINTS) {
			if word>>bit&1 == 1 {
				all = append(all, at*uint32(udpLeaseLimitLEASE_HINTS)+bit)
			}
		}
	}
	return all
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// open attaches, and binds a socket of the lease to queue 0.
func open(t *testing.T, serves ...string) (h *Hook, lease int) {
	t.Helper()
	h, err := Attach(Options{Interface: "eth0", Mode: kernel.ModeAuto})
	if err != nil {
		t.Error(err)
		panic("no hook")
	}
	t.Cleanup(func() { must(t, h.Close()) })
	return h, begin(t, h, serves...)
}

// begin begins a lease with a socket on queue 0.
func begin(t *testing.T, h *Hook, serves ...string) (lease int) {
	t.Helper()
	lease, err := h.Begin()
	must(t, err)
	plan, err := xsk.Plan(64, 2048, false)
	must(t, err)
	memory, err := xsk.NewMemory(plan.Size())
	must(t, err)
	socket, err := xsk.Prepare(h.Ifindex, 0, plan, memory)
	if err != nil {
		t.Error(err)
		panic("no socket")
	}
	t.Cleanup(func() { must(t, socket.Close()); must(t, memory.Close()) })
	must(t, socket.Bind(xsk.Auto, 10*time.Second))
	must(t, h.Bind(lease, 0, socket.FD()))
	for _, address := range serves {
		must(t, h.Serve(lease, netip.MustParseAddrPort(address)))
	}
	return lease
}

// Every kind of packet, through the loaded program: which go to a socket, which pass, and how they are counted.
func TestPackets(t *testing.T) {
	const to4, to6, from4, from6 = "192.0.2.10:5000", "[2001:db8::10]:5000", "198.51.100.7:40000", "[2001:db8:c::7]:40000"
	edit := func(frame []byte, at int, value byte) []byte {
		frame = slices.Clone(frame)
		frame[at] = value
		return frame
	}
	inHost(t, func(t *testing.T) {
		h, lease := open(t, to4, to6)
		own := macOf(t)
		build := func(from, to string, edits ...packet.Edit) []byte {
			return packet.Must(packet.NewUDP(from, to, append(edits, packet.Data("hello"), packet.MACs([]byte{2, 9, 9, 9, 9, 9}, own))...))
		}
		extension := func(p *packet.Packet) {
			p.IPv6.Extensions = []packet.Extension{{Type: 60, Body: []byte{1, 4, 0, 0, 0, 0}}}
		}
		plain4, plain6 := build(from4, to4), build(from6, to6)
		mapped := func(at int) []byte { // 192.0.2.10 in IPv6
			return slices.Replace(slices.Clone(plain6), at, at+16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 10)
		}
		for _, c := range []struct {
			name    string
			frame   []byte
			matched bool
			passed  string // the counter
		}{
			{"IPv4", plain4, true, ""},
			{"IPv6", plain6, true, ""},
			{"IPv4, an unfinished checksum", build(from4, to4, packet.TransportChecksum(packet.Checksum{Mode: packet.Partial})), true, ""},
			{"to a group's MAC", edit(plain4, 0, 1), true, ""},
			{"Ethernet's padding", append(slices.Clone(plain4), make([]byte, 20)...), true, ""},
			{"another port", build(from4, "192.0.2.10:5001"), false, ""},
			{"another address", build(from4, "192.0.2.11:5000"), false, ""},
			{"another IPv6 address", build(from6, "[2001:db8::11]:5000"), false, ""},
			{"another address with the same hash", build(from4, beside(to4, "192.0.2.11:5000", true)), false, ""},
			{"another IPv6 address with the same hash", build(from6, beside(to6, "[2001:db8::11]:5000", true)), false, ""},
			{"an IPv4 destination in IPv6", mapped(14 + 24), false, ""},
			{"an IPv4 source in IPv6", mapped(14 + 8), false, ""},
			{"IPv6 of another version", edit(plain6, 14, 0x70), false, "malformed"},
			{"another station", edit(plain4, 5, 99), false, ""},
			{"TCP", packet.Must(packet.NewTCP(from4, to4, "S", packet.MACs([]byte{2, 9, 9, 9, 9, 9}, own))), false, ""},
			{"ARP", packet.Must(packet.NewARPRequest([]byte{2, 9, 9, 9, 9, 9}, "192.0.2.1", "192.0.2.10")), false, ""},
			{"VLAN", build(from4, to4, packet.Tagged(7)), false, ""},
			{"IPv4 options", build(from4, to4, packet.IPv4Options(1, 1, 1, 0)), false, "options"},
			{"an IPv6 extension header", build(from6, to6, extension), false, "options"},
			{"the first fragment", edit(plain4, 14+6, 0x20), false, "fragment"},
			{"a later fragment", edit(plain4, 14+7, 7), false, "fragment"},
			{"IPv6 fragment", build(from6, to6, func(p *packet.Packet) {
				p.IPv6.Extensions = []packet.Extension{{Type: 44, Body: []byte{0, 1, 0, 0, 0, 7}}}
			}), false, "fragment"},
			{"cut in the IP header", plain4[:14+18], false, "malformed"},
			{"cut in the UDP header", edit(plain4[:14+20+6], 14+3, 26), false, "malformed"},
			{"shorter than it says", plain4[:len(plain4)-1], false, "malformed"},
			{"IPv6 shorter than it says", plain6[:len(plain6)-1], false, "malformed"},
			{"UDP's length below its header", edit(plain4, 14+20+5, 7), false, "malformed"},
			{"UDP's length beyond the packet", edit(plain4, 14+20+5, 200), false, "malformed"},
			{"IPv4 with a bad header length", edit(plain4, 14, 0x44), false, "malformed"},
		} {
			countBefore, err := h.Counts(lease, 0)
			must(t, err)
			before, err := h.Passed()
			must(t, err)
			verdict, out, err := h.RunPacket(c.frame)
			must(t, err)
			count, err := h.Counts(lease, 0)
			must(t, err)
			after, err := h.Passed()
			must(t, err)
			want := uint32(kernel.XDPPass)
			if c.matched {
				want = kernel.XDPRedirect
			}
			if verdict != want {
				t.Errorf("%s: verdict %d, want %d", c.name, verdict, want)
			}
			if got := count.Matched - countBefore.Matched; got != 0 != c.matched || count.PassedNoSocket != 0 {
				t.Errorf("%s: matched %d times, and %d passed without a socket", c.name, got, count.PassedNoSocket)
			}
			for name := range after {
				if got, want := after[name]-before[name], uint64(0); name == c.passed && got != 1 || name != c.passed && got != want {
					t.Errorf("%s: counted %d times as %s", c.name, got, name)
				}
			}
			if string(out) != string(c.frame) {
				t.Errorf("%s: the program has changed the packet", c.name)
			}
		}
	})
}

// Without a socket, without an address and after its end, a lease's datagrams pass.
func TestLifeOfALease(t *testing.T) {
	inHost(t, func(t *testing.T) {
		h, lease := open(t, "192.0.2.10:5000")
		frame := packet.Must(packet.NewUDP("198.51.100.7:40000", "192.0.2.10:5000", packet.MACs([]byte{2, 9, 9, 9, 9, 9}, macOf(t))))
		expect := func(when string, verdict uint32, want Count) {
			t.Helper()
			got, _, err := h.RunPacket(frame)
			must(t, err)
			count, err := h.Counts(lease, 0)
			must(t, err)
			if got != verdict || count != want {
				t.Errorf("%s: verdict %d, %+v; want %d, %+v", when, got, count, verdict, want)
			}
		}
		expect("served", kernel.XDPRedirect, Count{Matched: 1})
		must(t, h.Unbind(lease, 0))
		expect("without a socket", kernel.XDPPass, Count{Matched: 2, PassedNoSocket: 1})
		must(t, h.Withdraw(lease, netip.MustParseAddrPort("192.0.2.10:5000")))
		expect("withdrawn", kernel.XDPPass, Count{Matched: 2, PassedNoSocket: 1})
		must(t, h.Serve(lease, netip.MustParseAddrPort("[::ffff:192.0.2.10]:5000"))) // the same address
		expect("served again", kernel.XDPPass, Count{Matched: 3, PassedNoSocket: 2})

		other, err := h.Begin()
		must(t, err)
		if err := h.Serve(other, netip.MustParseAddrPort("192.0.2.10:5000")); err == nil || !strings.Contains(err.Error(), "lease 0 has it") {
			t.Errorf("an address of another lease: %v", err)
		}
		must(t, h.End(lease))
		must(t, h.End(lease))
		expect("ended", kernel.XDPPass, Count{Matched: 3, PassedNoSocket: 2})
		again, err := h.Begin()
		must(t, err)
		if again != lease {
			t.Errorf("the free number %d was not taken, but %d", lease, again)
		}
		expect("begun again", kernel.XDPPass, Count{})
	})
}

// A frame that has got its time, and then no socket takes it, passes as it came.
func TestStampIsTakenAway(t *testing.T) {
	inHost(t, func(t *testing.T) {
		h, lease := open(t)
		h.Stamp(lease)
		must(t, h.Serve(lease, netip.MustParseAddrPort("192.0.2.10:5000")))
		frame := packet.Must(packet.NewUDP("198.51.100.7:40000", "192.0.2.10:5000", packet.MACs([]byte{2, 9, 9, 9, 9, 9}, macOf(t))))
		if verdict, _, err := h.RunPacket(frame); err != nil || verdict != kernel.XDPRedirect {
			t.Errorf("with a socket: %d, %v", verdict, err)
		}
		must(t, h.Unbind(lease, 0))
		verdict, out, err := h.RunPacket(frame)
		must(t, err)
		if verdict != kernel.XDPPass || !bytes.Equal(out, frame) {
			t.Errorf("%d: %x; want %d: %x", verdict, out, kernel.XDPPass, frame)
		}
		passed, err := h.Passed()
		must(t, err)
		if count, err := h.Counts(lease, 0); err != nil || count != (Count{2, 1, 0}) || passed["unstamped"] != 0 {
			t.Errorf("%+v, %v, %v", count, passed, err)
		}
	})
}

// An element that is another key's, as a reader may see it while the kernel recycles it, is a miss.
func TestRecycledElementIsAMiss(t *testing.T) {
	inHost(t, func(t *testing.T) {
		h, _ := open(t, "192.0.2.10:5000")
		frame := packet.Must(packet.NewUDP("198.51.100.7:40000", "192.0.2.10:5000", packet.MACs([]byte{2, 9, 9, 9, 9, 9}, macOf(t))))
		k, _ := key(netip.MustParseAddrPort("192.0.2.10:5000"))
		_, foreign := key(netip.MustParseAddrPort("192.0.2.10:5001"))
		at := bucket(netip.MustParseAddrPort("192.0.2.10:5000"))
		must(t, h.objects.Maps[udpMapShUdDirect].Put(at, udpLeaseDirect{Key: k, Lease: udpLease{Index: 0, Check: foreign}}))
		if verdict, _, err := h.RunPacket(frame); err != nil || verdict != kernel.XDPPass {
			t.Errorf("found by its bucket: verdict %d, %v", verdict, err)
		}
		must(t, h.objects.Maps[udpMapShUdDirect].Put(at, udpLeaseDirect{}))
		if verdict, _, err := h.RunPacket(frame); err != nil || verdict != kernel.XDPRedirect {
			t.Errorf("found by its hash: verdict %d, %v", verdict, err)
		}
		must(t, h.objects.Maps[udpMapShUdLeases].Put(k, udpLease{Index: 0, Check: foreign}))
		if verdict, _, err := h.RunPacket(frame); err != nil || verdict != kernel.XDPPass {
			t.Errorf("found by its hash, as another key's: verdict %d, %v", verdict, err)
		}
	})
}

// Of several addresses and ports in one bucket, one is found by it and the others by their hash. When that one goes, another takes
// its turn; and each is served all the time.
func TestOneBucketForSeveral(t *testing.T) {
	inHost(t, func(t *testing.T) {
		const one = "192.0.2.10:5000"
		served := []string{one, beside(one, "192.0.2.11:5000", false), beside(one, "[2001:db8::10]:5000", false), beside(one, "192.0.2.11:5000", true)}
		at := bucket(netip.MustParseAddrPort(one))
		h, lease := open(t, served...)
		expect := func(address string, verdict uint32) {
			t.Helper()
			from := "198.51.100.7:40000"
			if address[0] == '[' {
				from = "[2001:db8:c::7]:40000"
			}
			frame := packet.Must(packet.NewUDP(from, address, packet.MACs([]byte{2, 9, 9, 9, 9, 9}, macOf(t))))
			if got, _, err := h.RunPacket(frame); err != nil || got != verdict {
				t.Errorf("%s: verdict %d, want %d: %v", address, got, verdict, err)
			}
		}
		for left := range served {
			var held udpLeaseDirect
			must(t, h.objects.Maps[udpMapShUdDirect].Lookup(at, &held))
			if seated := h.direct[at]; !slices.Contains(served[left:], seated.String()) || held.Key.Port != kernel.ToWire(seated.Port()) {
				t.Errorf("without the first %d, the bucket has %s: %+v", left, seated, held)
			}
			hashes := map[uint32]bool{}
			for _, address := range served[left:] {
				hashes[hash(netip.MustParseAddrPort(address))] = true
			}
			if got := hinted(t, h); !slices.Equal(got, slices.Sorted(maps.Keys(hashes))) {
				t.Errorf("without the first %d, the program looks for the hashes %v", left, got)
			}
			for i, address := range served {
				if i < left {
					expect(address, kernel.XDPPass)
				} else {
					expect(address, kernel.XDPRedirect)
				}
			}
			must(t, h.Withdraw(lease, netip.MustParseAddrPort(served[left])))
		}
		expect(served[len(served)-1], kernel.XDPPass)
		if hashes := hinted(t, h); len(h.direct)+len(hashes) != 0 {
			t.Errorf("buckets are left: %v, and hashes: %v", h.direct, hashes)
		}
		must(t, h.Serve(lease, netip.MustParseAddrPort(served[3])))
		expect(served[3], kernel.XDPRedirect)
	})
}

func TestRefusals(t *testing.T) {
	inHost(t, func(t *testing.T) {
		h, lease := open(t)
		for what, err := range map[string]error{
			"no port":        h.Serve(lease, netip.MustParseAddrPort("192.0.2.10:0")),
			"any address":    h.Serve(lease, netip.MustParseAddrPort("0.0.0.0:5000")),
			"no such lease":  h.Serve(7, netip.MustParseAddrPort("192.0.2.10:5000")),
			"queue 64":       h.Bind(lease, 64, 0),
			"lease 64":       h.Bind(64, 0, 0),
			"not a socket":   h.Bind(lease, 0, 0),
			"queue -1":       h.Unbind(lease, -1),
			"a second hook":  second(),
			"no interface":   attach("nosuch"),
			"not Ethernet":   attach("lo"),
			"a full program": full(h),
		} {
			if err == nil {
				t.Errorf("%s was accepted", what)
			}
		}
		if err := second(); err == nil || !strings.Contains(err.Error(), "sh_udp") {
			t.Errorf("the error of an occupied interface does not name the program: %v", err)
		}
	})
}

func attach(iface string) error {
	h, err := Attach(Options{Interface: iface, Mode: kernel.ModeAuto})
	if err == nil {
		_ = h.Close()
	}
	return err
}

func second() error { return attach("eth0") }

func full(h *Hook) error {
	for range MaxLeases {
		if _, err := h.Begin(); err != nil {
			return err
		}
	}
	return nil
}

func TestNames(t *testing.T) {
	spec, err := loadUdp()
	must(t, err)
	for name := range spec.Maps {
		if !strings.HasPrefix(name, ".") && (len(name) > 15 || !strings.HasPrefix(name, "sh_ud_")) {
			t.Errorf("map %s: names begin with sh_ud_ and have at most 15 characters", name)
		}
	}
	if len(passedNames) != int(udpLeasePassPASSED_COUNT) {
		t.Errorf("%d of %d counters have a name", len(passedNames), udpLeasePassPASSED_COUNT)
	}
}

func macOf(t *testing.T) []byte {
	t.Helper()
	dev, err := device("eth0")
	must(t, err)
	return dev
}

func device(name string) ([]byte, error) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	return i.HardwareAddr, nil
}

// Where an address has a guard, a datagram that no socket takes is dropped and counted: by the lease that serves the
// address, or by the guard. Sockets get the others as ever, and packets that are no plain datagrams pass.
func TestGuard(t *testing.T) {
	for _, c := range []struct {
		name, from, to string
		taken          bool // by an earlier lease is the bucket, so that to is found by the kernel's hash
		stamped        bool
	}{
		{"IPv4, found by its bucket", "198.51.100.7:40000", "192.0.2.10:5000", false, false},
		{"IPv6, found by its bucket", "[2001:db8:c::7]:40000", "[2001:db8::10]:5000", false, true},
		{"IPv4, found by the hash", "198.51.100.7:40000", "192.0.2.10:5000", true, true},
		{"IPv6, found by the hash", "[2001:db8:c::7]:40000", "[2001:db8::10]:5000", true, false},
	} {
		t.Run(c.name, func(t *testing.T) { inHost(t, func(t *testing.T) { guarded(t, c.from, c.to, c.taken, c.stamped) }) })
	}
}

func guarded(t *testing.T, from, to string, taken, stamped bool) {
	h, lease := open(t)
	address := netip.MustParseAddrPort(to)
	if taken {
		other, err := h.Begin()
		must(t, err)
		must(t, h.Serve(other, netip.MustParseAddrPort(beside(to, "192.0.2.11:5000", false))))
	}
	guard, err := h.Begin()
	must(t, err)
	if stamped {
		h.Stamp(lease)
	}
	own := macOf(t)
	frame := packet.Must(packet.NewUDP(from, to, packet.MACs([]byte{2, 9, 9, 9, 9, 9}, own)))
	expect := func(when string, verdict uint32, served, guards Count) {
		t.Helper()
		got, _, err := h.RunPacket(frame)
		must(t, err)
		byLease, err := h.Counts(lease, 0)
		must(t, err)
		byGuard, err := h.Counts(guard, 0)
		must(t, err)
		if got != verdict || byLease != served || byGuard != guards {
			t.Errorf("%s: verdict %d, counted %+v and by the guard %+v; want %d, %+v and %+v", when, got, byLease, byGuard, verdict, served, guards)
		}
		if in := h.direct[bucket(address)]; (in == address) == taken && when != "before" && when != "after" {
			t.Errorf("%s: the bucket has %s", when, in)
		}
	}
	expect("before", kernel.XDPPass, Count{}, Count{})
	must(t, h.Guard(guard, address))
	expect("without a lease", kernel.XDPDrop, Count{}, Count{1, 0, 1})
	must(t, h.Serve(lease, address))
	expect("served", kernel.XDPRedirect, Count{1, 0, 0}, Count{1, 0, 1})
	must(t, h.Unbind(lease, 0))
	expect("without a socket", kernel.XDPDrop, Count{2, 0, 1}, Count{1, 0, 1})
	must(t, h.End(guard))
	expect("without its guard", kernel.XDPPass, Count{3, 1, 1}, Count{1, 0, 1})
	guard, err = h.Begin()
	must(t, err)
	must(t, h.Guard(guard, address))
	expect("guarded again", kernel.XDPDrop, Count{4, 1, 2}, Count{})
	must(t, h.Withdraw(lease, address))
	expect("withdrawn", kernel.XDPDrop, Count{4, 1, 2}, Count{1, 0, 1})
	fragment := slices.Clone(frame)
	if fragment[14+6] |= 0x20; address.Addr().Is4() {
		if verdict, _, err := h.RunPacket(fragment); err != nil || verdict != kernel.XDPPass {
			t.Errorf("a fragment: verdict %d, %v", verdict, err)
		}
	}
	third, err := h.Begin()
	must(t, err)
	if err := h.Guard(third, address); err == nil || !strings.Contains(err.Error(), "lease "+strconv.Itoa(guard)+" guards it already") {
		t.Errorf("a second guard: %v", err)
	}
	if err := h.Guard(60, address); err == nil || !strings.Contains(err.Error(), "there is no lease 60") {
		t.Errorf("a guard that is no lease: %v", err)
	}
	must(t, h.End(guard))
	expect("after", kernel.XDPPass, Count{4, 1, 2}, Count{1, 0, 1})
	if _, seated := h.direct[bucket(address)]; seated != taken || h.hashOwned(hash(address)) {
		t.Errorf("buckets are left: %v", h.direct)
	}
}
