package live_test

import (
	"context"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/bench/live"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/packet"
)

const firstPort = 4000

var (
	from = netip.MustParseAddr("192.0.2.1")
	to   = netip.MustParseAddrPort("192.0.2.2:7")
)

// link is two hosts; frames from the first arrive at the second, whose NAPI is on.
func link(t *testing.T) (near, far *lab.Host, offer live.Offer) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	l, err := lab.New("")
	must(err)
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	near, err = l.AddHost("near")
	must(err)
	far, err = l.AddHost("far")
	must(err)
	must(l.Connect(lab.End{Host: near, Interface: "eth0", IPv4: netip.PrefixFrom(from, 24)}, lab.End{Host: far, Interface: "eth0", IPv4: netip.PrefixFrom(to.Addr(), 24)}, lab.Cable{Queues: 1}))
	must(far.SetOffload("eth0", map[string]bool{"gro": true}))
	must(l.Ready(t.Context()))
	index, err := near.InterfaceIndex("eth0")
	must(err)
	frame := packet.Must(packet.NewUDP(netip.AddrPortFrom(from, firstPort), to, packet.MACs(near.Interfaces()[0].MAC, far.Interfaces()[0].MAC), packet.Data("\xff\xff and as much as a sample needs")))
	return near, far, live.Offer{Frame: frame, Flows: 4, Ifindex: index}
}

func generator(t *testing.T, o live.Offer) *live.Generator {
	t.Helper()
	g, err := live.NewGenerator(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// Each flow has its port, and all have correct checksums.
func TestFlows(t *testing.T) {
	near, far, offer := link(t)
	capture, err := far.Capture("eth0")
	if err != nil {
		t.Fatal(err)
	}
	g := generator(t, offer)
	if err := near.Run(func() error { _, _, err := g.Run(2 * offer.Flows); return err }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	seen := map[uint16]int{}
	for range 2 * offer.Flows {
		_, p, err := capture.Await(ctx, func(_ lab.Frame, p packet.Packet) bool { return p.UDP != nil && p.UDP.DestinationPort == to.Port() })
		if err != nil {
			t.Fatal(err)
		}
		if p.UDP.Checksum.Mode != packet.Correct || p.IPv4.Checksum.Mode != packet.Correct {
			t.Errorf("wrong checksum: %v", p)
		}
		seen[p.UDP.SourcePort]++
	}
	for i := range offer.Flows {
		if port := uint16(firstPort + i); seen[port] != 2 {
			t.Errorf("port %d in %d frames", port, seen[port])
		}
	}
}

// The sink takes the frames that it is told to take while it is open, and has a sample; Drop takes all.
func TestSink(t *testing.T) {
	near, far, offer := link(t)
	g := generator(t, offer)
	send := func() uint64 {
		t.Helper()
		var sent uint64
		if err := near.Run(func() (err error) { _, sent, err = g.Run(8); return err }); err != nil {
			t.Fatal(err)
		}
		return sent
	}
	sink := func(source netip.Addr) *live.Sink {
		t.Helper()
		s, err := live.NewSink(far, "eth0", source, to)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	await := func(s *live.Sink, taken, other uint64) {
		t.Helper()
		var a, b uint64
		for begin := time.Now(); time.Since(begin) < 20*time.Second; time.Sleep(time.Millisecond) {
			var err error
			if a, b, err = s.Counts(); err != nil || a == taken && b == other {
				break
			}
		}
		if sample, err := s.Sample(); a != taken || b != other || err != nil || (sample != nil) != (taken > 0) {
			t.Errorf("the sink has taken %d and seen %d others, and should %d and %d; sample %x, %v", a, b, taken, other, sample, err)
		}
	}
	right := sink(from)
	send() // closed
	if err := right.SetOpen(true); err != nil {
		t.Fatal(err)
	}
	await(right, send(), 0)
	if err := right.Close(); err != nil {
		t.Fatal(err)
	}
	wrong := sink(to.Addr())
	if err := wrong.SetOpen(true); err != nil {
		t.Fatal(err)
	}
	await(wrong, 0, send())
	if err := wrong.Close(); err != nil {
		t.Fatal(err)
	}
	for begin, n := time.Now(), uint64(0); n == 0; { // the kernel may deliver frames after the program is gone
		taken, err := live.Drop(far, "eth0")
		if err != nil {
			t.Fatal(err)
		}
		send()
		if n, err = taken(); err != nil || n == 0 && time.Since(begin) > 20*time.Second {
			t.Fatalf("%d frames were dropped, %v", n, err)
		}
	}
}

// A pace is a limit, and ends.
func TestPace(t *testing.T) {
	near, _, offer := link(t)
	offer.Paced = true
	g := generator(t, offer)
	var sent uint64
	if err := near.Run(func() (err error) { sent, err = g.Pace(10_000, 50*time.Millisecond); return err }); err != nil {
		t.Fatal(err)
	}
	if all, err := g.Sent(); sent == 0 || sent > 501 || all != sent || err != nil {
		t.Errorf("%d frames, %d in all, %v; 500 were asked for", sent, all, err)
	}
	if err := near.Run(func() (err error) { _, sent, err = g.Run(100); return err }); err != nil || sent > 0 {
		t.Errorf("%d frames were sent after the time, %v", sent, err)
	}
}

func TestRefusals(t *testing.T) {
	frame := make([]byte, 64)
	frame[42], frame[43] = 0xff, 0xff
	for name, o := range map[string]live.Offer{
		"a short frame":  {Frame: frame[:40], Flows: 1},
		"no flow":        {Frame: frame},
		"three flows":    {Frame: frame, Flows: 3},
		"nothing spare":  {Frame: make([]byte, 64), Flows: 2},
		"too many flows": {Frame: frame, Flows: 1 << 17},
	} {
		if g, err := live.NewGenerator(o); err == nil {
			t.Errorf("%s was accepted", name)
			_ = g.Close()
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads a BPF program")
	}
	g := generator(t, live.Offer{Frame: frame, Flows: 1})
	if _, err := g.Pace(1, time.Millisecond); err == nil {
		t.Error("a generator without a pace kept one")
	}
}
