package ping

import (
	"bytes"
	"encoding/binary"
	"encoding/xml"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/sensor"
	"github.com/shunt-lb/shunt/test/golden"
)

// TestClockIsBounded has random ways over random drifting clocks: the true offset is within the bound, no way is
// negative, and no jump is seen.
func TestClockIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ahead := rapid.Int64Range(-1e15, 1e15).Draw(t, "ahead")
		drift := float64(rapid.IntRange(-90, 90).Draw(t, "drift")) * 1e-6
		server := func(ns int64) int64 { return ns + ahead + int64(math.Round(drift*float64(ns-1e9))) }
		var c clock
		now := int64(1e9)
		for range rapid.IntRange(1, 40).Draw(t, "probes") {
			now += rapid.Int64Range(0, 2e9).Draw(t, "pause")
			way := func(name string) int64 { return rapid.Int64Range(100, 50e6).Draw(t, name) }
			out := now
			now += way("there")
			receive := server(now)
			now += way("within")
			answer := server(now)
			now += way("back")
			offset, err, ok := c.add(out, receive, answer, now)
			if !ok || c.jumps != 0 {
				t.Fatalf("ok %v, %d jumps", ok, c.jumps)
			}
			here := bridge(offset, out, receive, answer, now)
			if here(receive) < out || here(answer) < here(receive) || now < here(answer) {
				t.Fatalf("a way is negative: sent %d, received %d, answered %d, back %d", out, here(receive), here(answer), now)
			}
			if truth := server(now) - now; max(truth-offset, offset-truth) > err+1 {
				t.Fatalf("the offset is %d ns, and not %d ± %d", truth, offset, err)
			}
		}
	})
}

func TestClockHasADrift(t *testing.T) {
	var c clock
	for ns := int64(1e9); ns < 31e9; ns += 1e8 {
		c.add(ns, ns+1000+ns/50_000, ns+2000+ns/50_000, ns+3000) // 20 ppm
	}
	rate, err, ok := c.drift()
	if !ok || math.Abs(rate-20e-6) > err || err > 1e-6 {
		t.Errorf("got %g ± %g, %v, want 20e-6", rate, err, ok)
	}
}

func TestClockThatJumps(t *testing.T) {
	var c clock
	c.add(1000, 2000, 3000, 4000)
	offset, err, ok := c.add(10_000, 1_011_000, 1_012_000, 13_000)
	if !ok || c.jumps != 1 || abs(offset-1_000_000) > err {
		t.Errorf("got %d ± %d, %v, %d jumps", offset, err, ok, c.jumps)
	}
	if _, _, ok := c.add(20_000, 500, 900_000, 20_100); ok {
		t.Error("an answer that was sent long before it was received by more than any offset explains is accepted")
	}
}

func TestReportsArriveAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var all []seen
		var b []byte
		for range rapid.IntRange(0, 20).Draw(t, "entries") {
			n := func(name string) uint64 { return rapid.Uint64().Draw(t, name) }
			s := seen{n("sequence"), n("receive"), n("softirq"), n("queue"), n("driver"), n("socket"), n("woken"), n("user"), n("dropped"),
				rapid.StringMatching("[A-Z_]{0,64}").Draw(t, "reason")}
			all = append(all, s)
			b = s.append(b)
		}
		got, err := parseReport(b, uint64(len(all)))
		if err != nil || !reflect.DeepEqual(got, all) {
			t.Fatalf("got %v, %v, want %v", got, err, all)
		}
		if _, err := parseReport(append(b, 0), uint64(len(all))); err == nil {
			t.Fatal("a byte too many is accepted")
		}
		if _, err := parseReport(b, uint64(len(all))+1); err == nil {
			t.Fatal("an entry too few is accepted")
		}
	})
}

// FuzzReport gives the decoders messages as any host may send them.
func FuzzReport(f *testing.F) {
	b := make([]byte, headBytes)
	head{kind: 2, session: 7, sequence: 1}.put(b)
	f.Add(seen{sequence: 1, reason: "NO_SOCKET\x1b"}.append(b))
	f.Add(appendTrail(b, 7, []place{{at: 1, netns: 2, ifindex: 3, point: 5, reason: "NO_SOCKET\x1b"}}))
	f.Add(stampEntry{1, true, stamp{2, 3, "drop\x1b", "no_backend", hookTC}}.append(b))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHead(b)
		if err != nil {
			return
		}
		all, err := parseReport(b[headBytes:], h.sequence)
		if err == nil && uint64(len(all)) != h.sequence {
			t.Errorf("%d entries, and %d were said", len(all), h.sequence)
		}
		stamps, err := parseStamps(b[headBytes:], h.sequence)
		if err == nil && uint64(len(stamps)) != h.sequence {
			t.Errorf("%d stamps, and %d were said", len(stamps), h.sequence)
		}
		for _, s := range stamps {
			all = append(all, seen{reason: s.verdict}, seen{reason: s.reason})
		}
		_, places, err := parseTrail(b[headBytes:])
		if err == nil && len(places) != int(b[headBytes+2]) {
			t.Errorf("%d places, and %d were said", len(places), b[headBytes+2])
		}
		for _, one := range places {
			all = append(all, seen{reason: one.reason})
			_ = one.public(serverHost, 0, 0).String()
		}
		for _, s := range all {
			if strings.ContainsFunc(s.reason, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("%q can control a terminal", s.reason)
			}
		}
	})
}

// TestChecksum has a message with a right checksum: the sum of all is 0. RFC 1071.
func TestChecksum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 4, 70).Draw(t, "message")
		b[2], b[3] = 0, 0
		binary.BigEndian.PutUint16(b[2:], checksum(b))
		if sum := checksum(b); sum != 0 {
			t.Fatalf("the sum is %#x", sum)
		}
	})
}

func TestQuantiles(t *testing.T) {
	var h histogram
	if got := h.spread(); got != (Spread{}) {
		t.Errorf("of nothing: %+v", got)
	}
	for ns := range int64(100_000) {
		h.add(ns)
	}
	got := h.spread()
	near := func(got, want int64) bool { return abs(got-want) <= want/32 }
	if !near(got.Median, 50_000) || !near(got.P99, 99_000) || got.Max != 99_999 {
		t.Errorf("got %+v", got)
	}
	h.add(math.MaxInt64)
	h.add(-5)
	if got := h.spread(); got.Max != math.MaxInt64 {
		t.Errorf("got %+v", got)
	}
	for v := int64(1); v > 0; v *= 3 {
		if m := middle(bucket(uint64(v))); !near(m, v) {
			t.Errorf("%d is counted as %d", v, m)
		}
	}
}

// TestOffsetOfATimeNamespace reads the file as time_namespaces(7) shows it.
func TestOffsetOfATimeNamespace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "offsets")
	if err := os.WriteFile(path, []byte("monotonic          100         5\nboottime             0         0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := clockAhead(path); err != nil || got != -100_000_000_005 {
		t.Errorf("got %d, %v", got, err)
	}
	if got, err := clockAhead(path + " missing"); err != nil || got != 0 {
		t.Errorf("without the file: %d, %v", got, err)
	}
	if err := os.WriteFile(path, []byte("other 1 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := clockAhead(path); err == nil {
		t.Error("a file without the clock is accepted")
	}
}

// shownPending are probes of each kind.
func shownPending() []*pending {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	here := row{AtNs: [5]uint64{1000, 2000, 9000, 9500, 9900}}
	return []*pending{
		{sequence: 1, time: at, sent: 500, user: 12_000, woken: 10_000, here: here, known: true,
			server: &seen{receive: 1_003_000, softirq: 1_004_000, queue: 1_005_000, driver: 1_006_000, socket: 1_004_100, woken: 1_004_200, user: 1_005_000}},
		{sequence: 2, time: at, sent: 500, user: 12_000, here: here, known: true},
		{sequence: 3, time: at, sent: 500, here: row{AtNs: [5]uint64{1000, 2000}}, known: true,
			server: &seen{receive: 1_003_000, softirq: 1_004_000, queue: 1_005_000, dropped: 1_005_001, reason: "QDISC_DROP"}},
		{sequence: 4, time: at, sent: 500, here: row{AtNs: [5]uint64{1000, 2000, 9000}, DroppedNs: 9001, DropReason: 2}, known: true},
		{sequence: 5, time: at, sent: 500, known: true, sendFailure: "network is unreachable"},
		{sequence: 6, time: at, sent: 500, here: row{AtNs: [5]uint64{1000, 2000}}, known: true},
		{sequence: 7, time: at, sent: 500, user: 12_000, here: row{AtNs: [5]uint64{1000, 2000, 9000, 8500, 9900}}, known: true},
		{sequence: 8, time: at, sent: 500, user: 12_000},
		{sequence: 9, time: at, sent: 500, user: 12_000, woken: 10_000, here: here, known: true, isUDP: true,
			stamps: [2]stamp{{5_002_500, 5_002_700, "send_on", "", hookTC}, {5_008_000, 5_008_300, "send_back", "", hookXDP}},
			server: &seen{receive: 1_003_000, softirq: 1_003_500, queue: 1_005_500, driver: 1_006_000, socket: 1_004_100, woken: 1_004_200, user: 1_005_000}},
		{sequence: 10, time: at, sent: 500, user: 12_000, here: here, known: true, stamps: [2]stamp{{5_005_000, 5_005_400, "answer", "echo_answered", hookXDP}}},
		{sequence: 11, time: at, sent: 500, here: row{AtNs: [5]uint64{1000, 2000}}, known: true, isUDP: true, stamps: [2]stamp{{5_002_500, 5_002_700, "drop", "no_backend", hookXDP}}},
	}
}

// shown are these probes as reported.
func shown() []Probe {
	number := func(n uint32) string { return map[uint32]string{2: "NO_SOCKET"}[n] }
	var c clock
	balancer := teller{order: 1}
	var probes []Probe
	for _, p := range shownPending() {
		p.teller = &balancer
		if p.sequence >= 10 { // answered by a balancer, and dropped by one
			p.unshown = 1
		}
		probes = append(probes, p.settle(&c, 0, number, new(room)))
	}
	return probes
}

func TestGolden(t *testing.T) {
	for name, p := range map[string]*Printer{"run.txt": {}, "run.json": {JSON: true}} {
		var out bytes.Buffer
		p.Out, p.Above = &out, time.Microsecond
		way := Sensors[0].Ways[1]
		results := []sensor.Result{{Sensor: Sensors[0], Got: &way, Refused: []sensor.Refusal{{Way: Sensors[0].Ways[0], Reason: "EPERM"}}}, {Sensor: Sensors[1]}}
		o := Options{BTF: sensor.BTF{From: "a file"}, Server: netip.MustParseAddr("10.0.0.2"), Interval: time.Second, Bytes: 556}
		if err := p.start(results, o); err != nil {
			t.Fatal(err)
		}
		sum := newSum()
		for _, probe := range append(shown(), Probe{Sequence: 12, RoundTrip: 10}) {
			sum.add(probe)
			if err := p.probe(probe); err != nil {
				t.Fatal(err)
			}
		}
		c := &client{sent: 12, duplicate: 1, told: 1, lateStamp: 2, otherStamp: 3}
		for _, host := range []string{"10.0.0.8", "10.0.0.9"} {
			c.teller(netip.MustParseAddr(host)).stamps = 4
		}
		c.clock.jumps = 1
		c.clock.fit = fit{}
		for ns := int64(1e9); ns < 6e9; ns += 1e9 {
			c.clock.fit.add(sample{ns, ns / 100_000, 500})
		}
		if err := p.summary(sum.summary(c, map[string]uint64{"queue": 2, "driver": 0})); err != nil {
			t.Fatal(err)
		}
		golden.Require(t, filepath.Join("testdata", name), out.String())
	}
}

// TestImageHasProbesThatAreNotShown draws probes below the round trip from which on probes are printed, too.
func TestImageHasProbesThatAreNotShown(t *testing.T) {
	var out bytes.Buffer
	p := Printer{Out: &out, Above: time.Hour, Image: &Image{}}
	for _, one := range shown() {
		one.Lost = false
		if err := p.probe(one); err != nil {
			t.Fatal(err)
		}
	}
	var drawn bytes.Buffer
	if err := p.Image.Write(&drawn); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("%d probes answered", len(shown())); out.Len() > 0 || !strings.Contains(drawn.String(), want) {
		t.Errorf("printed %q, and %q is not in %s", out.String(), want, drawn.String())
	}
}

// TestImage draws probes of each kind, and more than there are columns: none is left out, the largest and the lost ones are there, and
// it is XML.
func TestImage(t *testing.T) {
	var few Image
	for _, p := range shown() {
		few.Add(p)
	}
	var out bytes.Buffer
	if err := few.Write(&out); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/image.svg", out.String())

	var none Image
	out.Reset()
	if err := none.Write(&out); err != nil || xml.Unmarshal(out.Bytes(), new(any)) != nil || !strings.Contains(out.String(), "no probe") {
		t.Errorf("%v, %s", err, out.String())
	}

	var many Image
	begin := time.Unix(0, 0)
	const count = 100_003
	for n := range count {
		many.Add(Probe{Sequence: uint64(n), Time: begin.Add(time.Duration(n) * time.Millisecond), RoundTrip: 1000 + int64(n*7919%5000), Lost: n%1000 == 999, Stages: []Stage{{"wire.out", 1000}}})
	}
	var answered, lost uint64
	for i, p := range many.points {
		answered, lost = answered+p.answered, lost+p.lost
		if p.most < p.least || i > 0 && p.from < many.points[i-1].to {
			t.Fatalf("point %d: %+v after %+v", i, p, many.points[i-1])
		}
	}
	if answered != count-100 || lost != 100 || len(many.points) < imageColumns/2 || len(many.points) > imageColumns {
		t.Errorf("%d answered, %d lost in %d points", answered, lost, len(many.points))
	}
	if len(many.slowest) != imageSlowest || many.slowest[0].RoundTrip != 5999 || many.slowest[imageSlowest-1].RoundTrip != 5999 {
		t.Errorf("the slowest: %+v", many.slowest)
	}
}
