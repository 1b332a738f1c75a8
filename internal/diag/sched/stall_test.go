package sched

import (
	"context"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/sched/hold"
	"github.com/shunt-lb/shunt/internal/event"
)

// TestInterruptsThatAreOffAreFound has the kernel hold interrupts off for known times, by a program at a tracepoint
// where they are off, in this test's own thread.
func TestInterruptsThatAreOffAreFound(t *testing.T) {
	decoys := []uint32{begin(t, "spin"), begin(t, "sleep"), begin(t, "spin")} // on the same CPU
	signal(t, decoys[2], unix.SIGSTOP)
	coll, l := holder(t, "hrtimer_start", "sh_hold_irq")
	defer coll.Close()
	defer l.Close()
	const threshold = 5 * time.Millisecond
	names, err := readSymbols()
	if err != nil {
		t.Fatal(err)
	}
	c, err := open(Options{Threshold: threshold}, stallSensors(threshold), late(threshold))
	if err != nil {
		t.Fatal(err)
	}
	defer c.release()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	one.Set(aCPU())
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	var truth []hold.HoldHold
	for range 20 {
		h := hold.HoldHold{ForNs: uint64(2*threshold) + rand.Uint64N(uint64(30*time.Millisecond)), Tid: uint32(unix.Gettid())}
		if err := coll.Maps["sh_holds"].Put(uint32(0), h); err != nil {
			t.Fatal(err)
		}
		nap := unix.NsecToTimespec(int64(20 * time.Millisecond))
		_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &nap, nil)
		if err := coll.Maps["sh_holds"].Lookup(uint32(0), &h); err != nil {
			t.Fatal(err)
		}
		if h.EndNs == 0 {
			t.Fatal("the kernel did not hold interrupts off")
		}
		truth = append(truth, h)
	}
	var all []Stall
	take := func(e event.Event) error {
		if schedSchedSensor(e.Sensor) == schedSchedSensorSCHED_WAITED {
			return nil
		}
		s, err := decodeStall(e, threshold, names)
		all = append(all, s)
		return err
	}
	short, done := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer done()
	if err := c.read(short, take); err != nil {
		t.Fatal(err)
	}
	if _, err := c.end(func(e event.Event) { _ = take(e) }); err != nil {
		t.Fatal(err)
	}
	compare(t, truth, all, threshold, decoys)
}

// compare fails unless nearly all that was held was found, with its duration, and nothing of the decoys.
func compare(t *testing.T, truth []hold.HoldHold, all []Stall, threshold time.Duration, decoys []uint32) {
	t.Helper()
	found, wrong := 0, 0
	for _, h := range truth {
		for _, s := range all {
			if s.Kind == IRQOff && s.TID == h.Tid && s.endNs >= h.EndNs && s.endNs < h.EndNs+uint64(period(threshold)) {
				found++
				took := h.EndNs - h.BeginNs
				if off := max(took, s.Nanos) - min(took, s.Nanos); off > uint64(period(threshold))+s.Steal {
					wrong++
					t.Logf("held for %d us, and told are %d us with %d us of steal", took/1000, s.Nanos/1000, s.Steal/1000)
				}
				break
			}
		}
	}
	kinds := map[Kind]int{}
	for _, s := range all {
		kinds[s.Kind]++
		// The held lock may keep another CPU waiting, with interrupts off, until it is let go of.
		caused := slices.ContainsFunc(truth, func(h hold.HoldHold) bool {
			return s.endNs > h.BeginNs && s.endNs < h.EndNs+uint64(period(threshold))
		})
		if s.Kind == IRQOff && slices.Contains(decoys, s.PID) && !caused {
			t.Errorf("a decoy is told of: %+v", s)
		}
	}
	t.Logf("found %d of %d, %d with a wrong duration; all that was told: %v", found, len(truth), wrong, kinds)
	if found*100 < len(truth)*95 || wrong*20 > len(truth) {
		t.Errorf("found %d of %d, %d of them with a wrong duration", found, len(truth), wrong)
	}
}

// TestLongSoftirqIsFound has a program hold a softirq of this test's thread, which is busy until that has happened.
func TestLongSoftirqIsFound(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	const threshold = 5 * time.Millisecond
	names, err := readSymbols()
	if err != nil {
		t.Fatal(err)
	}
	// The sensor is before the holder at the tracepoint, so that it sees the beginning.
	c, err := open(Options{PID: 1<<32 - 1, Threshold: threshold}, stallSensors(threshold), late(threshold))
	if err != nil {
		t.Fatal(err)
	}
	defer c.release()
	coll, l := holder(t, "softirq_entry", "sh_hold_soft")
	defer coll.Close()
	defer l.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h := hold.HoldHold{ForNs: uint64(4 * threshold), Tid: uint32(unix.Gettid()), IsSoftirq: 1}
	if err := coll.Maps["sh_holds"].Put(uint32(0), h); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); h.EndNs == 0; {
		if err := coll.Maps["sh_holds"].Lookup(uint32(0), &h); err != nil || time.Now().After(deadline) {
			t.Fatalf("no softirq came: %v", err)
		}
	}
	found := false
	if _, err := c.end(func(e event.Event) {
		s, err := decodeStall(e, threshold, names)
		if err != nil {
			t.Error(err)
			return
		}
		t.Logf("%+v", s)
		found = found || s.Kind == Softirq && s.TID == h.Tid && s.Softirq != "" && s.Nanos >= h.EndNs-h.BeginNs && s.endNs >= h.EndNs
	}); err != nil {
		t.Fatal(err)
	}
	if !found {
		t.Errorf("a softirq of %d us was not told of", (h.EndNs-h.BeginNs)/1000)
	}
}

// holder attaches one of the programs that keep a CPU busy.
func holder(t *testing.T, tracepoint, program string) (*ebpf.Collection, link.Link) {
	t.Helper()
	spec, err := hold.LoadHold()
	if err != nil {
		t.Fatal(err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatal(err)
	}
	l, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: tracepoint, Program: coll.Programs[program]})
	if err != nil {
		coll.Close()
		t.Fatal(err)
	}
	return coll, l
}
