package main

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
)

// TestClientsDiffer shows that the largest number of flows has no two alike.
func TestClientsDiffer(t *testing.T) {
	from := netip.MustParsePrefix("198.18.0.0/15")
	seen := make(map[netip.AddrPort]bool, 1<<20)
	for i := range uint32(1 << 20) {
		c := client(from, i)
		if seen[c] || !from.Contains(c.Addr()) {
			t.Fatalf("flow %d has client %s: not in %s, or had before", i, c, from)
		}
		seen[c] = true
	}
}

// TestFrontRestores runs a program that changes length and bytes in a loop: every run must
// get the prepared packet, so the last one's output is one outer header and the packet.
func TestFrontRestores(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads a BPF program")
	}
	packets := make([]packetBytes, 4)
	for i := range packets {
		source := netip.AddrPortFrom(netip.MustParseAddr("198.18.0.1"), uint16(1000+i))
		frame := packet.Must(packet.NewTCP(source, netip.MustParseAddrPort("192.0.2.10:80"), "A", packet.Data(make([]byte, packetSize-54))))
		copy(packets[i][:], frame)
	}
	b, err := newBench(side{ifindex: 1}, packets, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.aim(b.ShStubPush); err != nil {
		t.Fatal(err)
	}
	o := b.side.options(make([]byte, packetSize), 1002) // ends with the second packet
	o.DataOut = make([]byte, 256)
	verdict, err := b.ShFront.Run(o)
	if err != nil || verdict != xdpTX {
		t.Fatalf("verdict %s, %v", verdictName(verdict), err)
	}
	if got, want := len(o.DataOut), packetSize+20; got != want {
		t.Fatalf("output of %d bytes, want %d", got, want)
	}
	const headers = 14 + 20 // outer
	if got, want := string(o.DataOut[headers:]), string(packets[1][14:]); got != want {
		t.Errorf("inner packet % x\nwant         % x", got, want)
	}
	if err := b.check(b.ShStubFind); err == nil {
		t.Error("the stub finds entries in an empty table")
	}
	keys, err := entryKeys(packets)
	if err == nil {
		err = b.fill(keys)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := b.check(b.ShStubFind); err != nil {
		t.Errorf("the stub that looks an entry up: %v", err)
	}
	if err := b.check(b.ShStubDrop); err == nil {
		t.Error("a program that drops everything passes the check of flows")
	}
	for name, program := range map[string]func() (float64, error){
		"drop": func() (float64, error) { return b.cost(b.ShStubDrop, 1_000_000) },
		"push": func() (float64, error) { return b.cost(b.ShStubPush, 1_000_000) },
	} {
		cost, err := program()
		if err != nil || cost <= 0 {
			t.Errorf("cost of %s is %v, %v", name, cost, err)
		}
		t.Logf("front + %s: %.0f ns", name, cost)
	}
}

// TestClientsDifferOverIPv6 is TestClientsDiffer for the IPv6 half.
func TestClientsDifferOverIPv6(t *testing.T) {
	from := netip.MustParsePrefix("198.18.0.0/15")
	seen := make(map[netip.AddrPort]bool, 1<<20)
	for i := range uint32(1 << 20) {
		c := client6(from, i)
		if seen[c] || !clients6.Contains(c.Addr()) {
			t.Fatalf("flow %d has client %s: not in %s, or had before", i, c, clients6)
		}
		seen[c] = true
	}
}

// TestPreparedPackets shows that packets of every kind have the front's length and are whole.
func TestPreparedPackets(t *testing.T) {
	s := &directSubject{}
	s.clients.mac, s.clients.peer = net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	for kind := range trafficNames {
		frame, err := s.frame(netip.MustParsePrefix("198.18.0.0/15"), kind, 7)
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		p, err := packet.Parse(frame)
		if err != nil || len(frame) != packetSize {
			t.Errorf("%s: %d bytes, want %d: %v", kind, len(frame), packetSize, err)
		}
		if (p.UDP != nil) != (kind == udp4) || (p.IPv6 != nil) != (kind == tcp6) {
			t.Errorf("%s: the packet is %s", kind, p)
		}
	}
	if _, err := s.frame(netip.MustParsePrefix("198.18.0.0/15"), "sctp4", 7); err == nil {
		t.Error("there are packets of a kind that is not known")
	}
}

// TestJudge gives rows just inside and just outside the aims.
func TestJudge(t *testing.T) {
	row := func(forwarding string, kind traffic, slots string, flows uint32, cost float64) directFigures {
		f := directFigures{Forwarding: forwarding, Traffic: kind, Slots: slots, Flows: flows}
		// One round at each of the machine's speeds, and one in which the speed changed.
		f.settle(costs{50, 100, 50}, costs{100, 200, 100}, costs{cost, 2 * cost, 7 * cost})
		return f
	}
	good := []directFigures{row("dsr-ipip", tcp4, slotsSettled, 1, 160), row("dsr-ipip", tcp4, slotsSettled, 1<<20, 165),
		row("dsr-ipip", tcp4, slotsTransition, 1, 500), row("dsr-gue", tcp6, slotsSettled, 1, 171), row("dsr-l2", udp4, slotsSettled, 1, 121)}
	if got := judge(good); strings.Contains(got, "NOT") || strings.Count(got, "met)") != 5 {
		t.Errorf("rows inside the aims:\n%s", got)
	}
	bad := []directFigures{row("dsr-ipip", tcp4, slotsSettled, 1, 160), row("dsr-ipip", tcp4, slotsSettled, 1<<20, 170),
		row("dsr-gue", tcp6, slotsSettled, 1, 173), row("dsr-l2", udp4, slotsSettled, 1, 123)}
	if got := judge(bad); strings.Count(got, "NOT met)") != 4 {
		t.Errorf("rows outside the aims, all but one:\n%s", got)
	}
}

// TestJudgeKatran gives a row at its aim beside katran, one above it, and two that have none.
func TestJudgeKatran(t *testing.T) {
	row := func(kind traffic, flows uint32, net float64) directFigures {
		return directFigures{Forwarding: "dsr-ipip", Traffic: kind, Slots: slotsSettled, Flows: flows, Katran: &peer{OfItsNet: ratio{Median: net}}}
	}
	got := judge([]directFigures{row(tcp4, 1, 0.35), row(tcp4, 65536, 0.5), row(tcp4, 1<<20, 0.11), row(tcp6, 1, 0.5)})
	if strings.Count(got, "of katran's") != 2 || !strings.Contains(got, "0.35 of katran's (aim: at most 0.35, met)") ||
		!strings.Contains(got, "0.11 of katran's (aim: at most 0.10, NOT met)") {
		t.Errorf("got:\n%s", got)
	}
}

// TestKatranStructs compares sizes with those of katran/lib/bpf/balancer_structs.h, which the kernel asks for.
func TestKatranStructs(t *testing.T) {
	for _, c := range []struct {
		value any
		size  int
	}{{katranVIP{}, 20}, {katranVIPMeta{}, 8}, {katranBackend{}, 20}, {katranControl{}, 8}, {katranCounters{}, 16}} {
		if got := binary.Size(c.value); got != c.size {
			t.Errorf("%T has %d bytes, want %d", c.value, got, c.size)
		}
	}
}

// TestKatranIsMissing checks the error for a directory without katran's source.
func TestKatranIsMissing(t *testing.T) {
	if _, err := exec.LookPath("clang-19"); err != nil {
		t.Skip("needs clang-19, which compiles katran")
	}
	_, err := loadKatran(options{katran: t.TempDir()}, net.HardwareAddr{2, 0, 0, 0, 0, 1})
	if err == nil || !strings.Contains(err.Error(), "Want a checkout of github.com/facebookincubator/katran") {
		t.Errorf("got: %v", err)
	}
}

// TestJudgeNAT gives one row at its aims, one above them, and one that has none.
func TestJudgeNAT(t *testing.T) {
	got := judgeNAT([]figures{
		{Flows: 1, ForwardRatio: ratio{Median: 1.5}, ReverseRatio: ratio{Median: 1.5}},
		{Flows: 65536, ForwardRatio: ratio{Median: 4.1}, ReverseRatio: ratio{Median: 4.1}},
		{Flows: 1 << 20, ForwardRatio: ratio{Median: 9}, ReverseRatio: ratio{Median: 9}},
	})
	if strings.Count(got, ", met)") != 2 || strings.Count(got, "NOT met)") != 2 || strings.Contains(got, "1048576") {
		t.Errorf("got:\n%s", got)
	}
}

// TestRatioOfRounds shows that a machine's change of speed is not taken for the program's.
func TestRatioOfRounds(t *testing.T) {
	push, shunt := costs{100, 100, 200, 200, 150}, costs{180, 180, 360, 360, 180}
	got := ratioOf(shunt, push, push)
	if got.Median != 0.8 || got.Lower != 0.8 || got.Upper != 0.8 {
		t.Errorf("%+v, want 0.8 in four rounds of five", got)
	}
	if of := ratioOf(costs{1, 2, 3, 4}, costs{0, 0, 0, 0}, costs{1, 1, 1, 1}); of != (ratio{1.75, 2.5, 3.25}) {
		t.Errorf("%+v are not the quartiles of 1, 2, 3 and 4", of)
	}
	if of := ratioOf(costs{3}, costs{1}, costs{2}); of != (ratio{1, 1, 1}) {
		t.Errorf("%+v of one round, which has 1", of)
	}
}
