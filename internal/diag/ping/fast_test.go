package ping

import (
	"io"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestEveryProbeHasOneOutcome sends as fast as possible, with room for fewer probes than are sent.
func TestEveryProbeHasOneOutcome(t *testing.T) {
	h := build(t)
	h.serve(t, nil)
	count := uint64(30_000)
	if testing.Short() { // an emulated machine
		count = 3000
	}
	for _, to := range []netip.Addr{server4, server6} {
		outcomes := make([]int, count+1)
		begin := time.Now()
		probes, s := h.ping(t, Options{Server: to, Count: count, Bytes: 144}, func(p Probe) { outcomes[p.Sequence]++ })
		took := time.Since(begin)
		if uint64(len(probes)) != count || s.Sent != count || s.Answered+s.Lost != s.Sent || s.Forgotten != 0 || s.Duplicates != 0 || s.BrokenReports != 0 {
			t.Errorf("%v: %d outcomes, %+v", to, len(probes), s)
		}
		for n, got := range outcomes[1:] {
			if got != 1 {
				t.Fatalf("%v: probe %d has %d outcomes", to, n+1, got)
			}
		}
		for _, p := range probes {
			total := int64(0)
			for _, stage := range p.Stages {
				total += stage.Ns
			}
			if !p.Lost && (total != p.RoundTrip || !p.AddsUp) {
				t.Fatalf("the stages have %d ns of %d: %v", total, p.RoundTrip, p)
			}
		}
		t.Logf("%v: %.0f probes a second, %d answered, %d lost, %d unreported", to, float64(count)/took.Seconds(), s.Answered, s.Lost, s.Unreported)
	}
}

// TestMoreProbesThanRoom loses all of them: the sender waits for room, and no outcome is lost with it.
func TestMoreProbesThanRoom(t *testing.T) {
	h := build(t)
	h.ping(t, Options{Server: server4, Count: 1, Bytes: 144, Mode: ModePingpong}, nil)
	slow(t, h.client, 1) // no room for a packet
	o := Options{Server: server4, Count: 3 * rowsMin, Interval: time.Nanosecond, Bytes: 144, Patience: time.Second}
	probes := 0
	err := h.client.Run(func() error {
		c, err := openClient(o)
		if err != nil {
			return err
		}
		defer c.close()
		c.slots = c.slots[:rowsMin]
		return c.run(t.Context(), func(p Probe) error {
			if probes++; !p.Lost || p.Sequence != uint64(probes) {
				t.Errorf("outcome %d: %v", probes, p)
			}
			return nil
		})
	})
	if err != nil || probes != int(o.Count) {
		t.Errorf("%d outcomes of %d probes: %v", probes, o.Count, err)
	}
}

// TestThereIsRoomForTheRate has room for all probes of the patience at each rate that the interval allows.
func TestThereIsRoomForTheRate(t *testing.T) {
	for interval, want := range map[time.Duration]uint64{time.Second: rowsMin, time.Millisecond: rowsMin, 100 * time.Microsecond: 32768, 20 * time.Microsecond: rowsMax, 0: rowsMax} {
		if got := (Options{Interval: interval, Patience: patienceDefault}).underWay(); got != want {
			t.Errorf("a probe every %v has room for %d, want %d", interval, got, want)
		}
	}
}

// TestAProcessThatIsLateLosesNothing keeps the receiving thread away for longer than a probe is waited for, with more answers in
// its socket than it takes at once.
func TestAProcessThatIsLateLosesNothing(t *testing.T) {
	h := build(t)
	h.serve(t, nil)
	const count, away = 4 * passMax, 2 * time.Second
	late := time.Duration(0)
	probes, s := h.ping(t, Options{Server: server4, Count: count, Interval: 20 * time.Microsecond, Bytes: 144, Patience: 500 * time.Millisecond}, func(Probe) {
		for begin := time.Now(); late < away; late = time.Since(begin) {
			sleep(away - late)
		}
	})
	if s.Lost != 0 || s.Answered != count || s.Duplicates != 0 {
		t.Errorf("of %d probes %d were lost: %v", len(probes), s.Lost, s.LostAt)
	}
}

// TestNoAllocationForAProbe is about the work for each probe: at 50,000 a second, garbage would be collected all the
// time.
func TestNoAllocationForAProbe(t *testing.T) {
	all := shownPending()
	var c clock
	all[8].teller = &teller{}
	place := new(room)
	sum := newSum()
	out := &Printer{Out: io.Discard}
	number := func(uint32) string { return "" }
	allocations := testing.AllocsPerRun(1000, func() {
		for _, one := range []*pending{all[0], all[8]} {
			p := one.settle(&c, 0, number, place)
			sum.add(p)
			if err := out.probe(p); err != nil {
				t.Fatal(err)
			}
		}
	})
	if allocations != 0 {
		t.Errorf("an answered probe makes %v allocations", allocations)
	}
	box := newOutbox(newPeer(server4, 0, 0), 556, false)
	allocations = testing.AllocsPerRun(1000, func() { box.put(3, false, 0, 7, head{kind: 1, session: 2, sequence: 3}) })
	if allocations != 0 {
		t.Errorf("a message makes %v allocations", allocations)
	}
}

func TestPeersArriveAsTheyWere(t *testing.T) {
	for _, a := range []netip.Addr{server4, server6} {
		p := newPeer(a, 0, 7007)
		if p.address() != a || p.bytes() != map[bool]uint32{true: unix.SizeofSockaddrInet4, false: unix.SizeofSockaddrInet6}[a.Is4()] {
			t.Errorf("%v is %v in %d bytes", a, p.address(), p.bytes())
		}
	}
	if p := newPeer(netip.MustParseAddr("fe80::1"), 7, 0); p.Scope_id != 7 {
		t.Errorf("the zone is %d", p.Scope_id)
	}
}
