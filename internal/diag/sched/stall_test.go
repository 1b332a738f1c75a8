package sched

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
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
	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/internal/event"
)

// TestInterruptsThatAreOffAreFound has the kernel hold interrupts off for known times, by a program at a tracepoint
// where they are off, in this test's own thread, beside tasks that do other things on the same CPU.
func TestInterruptsThatAreOffAreFound(t *testing.T) {
	decoys := []uint32{begin(t, "spin"), begin(t, "sleep"), begin(t, "spin")}
	signal(t, decoys[2], unix.SIGSTOP)
	s := openStalls(t)
	truth := holdInterrupts(t, 20, func() { s.read(t, 10*time.Millisecond) })
	s.end(t)
	compare(t, truth, s.all, s.threshold, decoys)
}

// TestWaitsLeaveRoomForStalls lets unread waits fill their half of the ring before interrupts are held.
func TestWaitsLeaveRoomForStalls(t *testing.T) {
	decoys := []uint32{begin(t, "spin"), begin(t, "spin"), begin(t, "spin"), begin(t, "spin")}
	s := openStalls(t)
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		m, err := s.c.missed()
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("waits do not fill their half of the ring: %+v, %v", m, err)
		}
		if m.Untold > 0 {
			break
		}
	}
	// The waits that nobody has read stay where they are.
	for _, decoy := range decoys[1:] {
		signal(t, decoy, unix.SIGSTOP)
	}
	truth := holdInterrupts(t, 10, func() {})
	ending := s.end(t)
	if s.waits == 0 || ending.Received != s.waits+uint64(len(s.all)) {
		t.Errorf("%d waits and %d stalls of %+v", s.waits, len(s.all), ending)
	}
	compare(t, truth, s.all, s.threshold, decoys)
}

// TestDurationBeginsWithTheSensors is about both tools: loading programs may take longer than the duration that the
// user asks for.
func TestDurationBeginsWithTheSensors(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	o := Options{Threshold: time.Second, Duration: 50 * time.Millisecond}
	for name, tool := range map[string]func(io.Writer) error{
		"irqoff": func(out io.Writer) error { return Stalls(t.Context(), o, true, out) },
		"runq":   func(out io.Writer) error { return RunQueues(t.Context(), o, 1, true, out) },
	} {
		var out bytes.Buffer
		if err := tool(&out); err != nil {
			t.Fatal(err)
		}
		lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
		var last struct {
			Type    string
			Seconds float64
		}
		if err := json.Unmarshal(lines[len(lines)-1], &last); err != nil || last.Type != "summary" || last.Seconds < o.Duration.Seconds() {
			t.Errorf("%s: %v after %v: %+v", name, err, o.Duration, last)
		}
	}
}

// stalls is the tool at work, and the stalls that it has reported.
type stalls struct {
	c         *collector
	names     *symbol.Table
	threshold time.Duration
	all       []Stall
	waits     uint64
}

func openStalls(t *testing.T) *stalls {
	t.Helper()
	s := &stalls{threshold: 5 * time.Millisecond}
	var err error
	if s.names, err = symbol.Read(); err != nil {
		t.Fatal(err)
	}
	if s.c, err = open(Options{Threshold: s.threshold}, stallSensors(s.threshold), late(s.threshold)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.c.release(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *stalls) take(e event.Event) error {
	if schedSchedSensor(e.Sensor) == schedSchedSensorSCHED_WAITED {
		s.waits++
		return nil
	}
	one, err := decodeStall(e, s.threshold, s.names)
	s.all = append(s.all, one)
	return err
}

func (s *stalls) read(t *testing.T, d time.Duration) {
	t.Helper()
	ctx, done := context.WithTimeout(t.Context(), d)
	defer done()
	if err := s.c.read(ctx, s.take, nil); err != nil {
		t.Fatal(err)
	}
}

// end waits for two more ticks of the timer, because a late tick is reported by the next one, and takes the rest. Lost
// stalls would make the comparison pointless.
func (s *stalls) end(t *testing.T) Ending {
	t.Helper()
	samples := func() uint64 {
		var all []schedSchedCpu
		if err := s.c.set.Maps[schedMapShSchedCpus].Lookup(uint32(0), &all); err != nil {
			t.Fatal(err)
		}
		return all[aCPU()].Samples
	}
	for before, deadline := samples(), time.Now().Add(30*time.Second); samples() < before+2; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the timer does not tick")
		}
	}
	ending, err := s.c.end(func(e event.Event) {
		if err := s.take(e); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d waits, %d stalls; %+v", s.waits, len(s.all), ending)
	if ending.Lost != 0 || ending.Broken != 0 {
		t.Errorf("%d events lost and %d broken", ending.Lost, ending.Broken)
	}
	return ending
}

// holdInterrupts has interrupts off so many times in this thread on the CPU of aCPU, and calls between each time.
func holdInterrupts(t *testing.T, times int, between func()) (truth []hold.HoldHold) {
	t.Helper()
	coll, l := holder(t, "hrtimer_start", "sh_hold_irq")
	defer coll.Close()
	defer l.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	one.Set(aCPU())
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.SchedSetaffinity(0, &before) }()
	for range times {
		h := hold.HoldHold{ForNs: uint64(10*time.Millisecond) + rand.Uint64N(uint64(30*time.Millisecond)), Tid: uint32(unix.Gettid())}
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
		between()
	}
	return truth
}

// compare fails unless all holds were found, with their durations, and nothing of the decoys. The hypervisor may take
// the CPU between the end of a hold and the timer.
func compare(t *testing.T, truth []hold.HoldHold, all []Stall, threshold time.Duration, decoys []uint32) {
	t.Helper()
	found, wrong, stolen := 0, 0, 0
	for _, h := range truth {
		before := found
		for _, s := range all {
			// Without the hypervisor's time, the rest may be less than the threshold.
			isSteal := s.Kind == Steal && s.Nanos < s.Steal+uint64(threshold)
			if (s.Kind == IRQOff || isSteal) && s.TID == h.Tid && s.endNs >= h.EndNs && s.endNs < h.EndNs+uint64(period(threshold))+s.Steal {
				found++
				took := h.EndNs - h.BeginNs
				if isSteal {
					stolen++
					t.Logf("held for %d us, and told are %d us, of them %d us of steal", took/1000, s.Nanos/1000, s.Steal/1000)
				} else if off := max(took, s.Nanos) - min(took, s.Nanos); off > uint64(period(threshold))+s.Steal {
					wrong++
					t.Logf("held for %d us, and told are %d us with %d us of steal", took/1000, s.Nanos/1000, s.Steal/1000)
				}
				break
			}
		}
		if found == before {
			t.Logf("not found: held for %d us until %d", (h.EndNs-h.BeginNs)/1000, h.EndNs)
		}
		for _, s := range all {
			if found == before && s.endNs > h.BeginNs && s.endNs-s.Nanos < h.EndNs {
				t.Logf("  %d us after its end: %+v", (int64(s.endNs)-int64(h.EndNs))/1000, s)
			}
		}
	}
	kinds, told := map[Kind]int{}, 0
	// Where it is not known when the hypervisor takes the CPU, that may look like interrupts that are off. Where it
	// counts steal, it may leave some out: in 28 runs on a loaded virtual machine 4 decoys were reported with a steal
	// of 0. A tool that takes a decoy for interrupts that are off reports it at each tick, hundreds of times.
	uncounted, most := uncountedSteal(), 0
	cpus, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	if isVirtual(string(cpus)) {
		most = len(truth) / 2
	}
	for _, s := range all {
		kinds[s.Kind]++
		// The held lock may keep another CPU waiting, with interrupts off, until it is released.
		caused := slices.ContainsFunc(truth, func(h hold.HoldHold) bool {
			return s.endNs > h.BeginNs && s.endNs < h.EndNs+uint64(period(threshold))
		})
		if s.Kind == IRQOff && slices.Contains(decoys, s.PID) && !caused && uncounted == "" {
			told++
			t.Logf("a decoy is told of: %+v", s)
		}
	}
	if told > most {
		t.Errorf("decoys are told of %d times, want at most %d", told, most)
	}
	t.Logf("found %d of %d, %d of them as steal, %d with a wrong duration; all that was told: %v %s", found, len(truth), stolen, wrong, kinds, uncounted)
	if found < len(truth) || wrong > 0 {
		t.Errorf("found %d of %d, %d of them with a wrong duration", found, len(truth), wrong)
	}
}

// TestLongSoftirqIsFound has a program hold a softirq of this test's thread, which is busy until that has happened.
func TestLongSoftirqIsFound(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	const threshold = 5 * time.Millisecond
	names, err := symbol.Read()
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
	// Not by bpf(2): the kernel runs no program at a timer of the CPU while it reads a map (bpf_disable_instrumentation).
	memory, err := coll.Maps["sh_holds"].Memory()
	if err != nil {
		t.Fatal(err)
	}
	read := func() {
		raw := make([]byte, binary.Size(h))
		if _, err := memory.ReadAt(raw, 0); err != nil {
			t.Fatal(err)
		}
		if h, err = decode[hold.HoldHold](raw); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(30 * time.Second); h.EndNs == 0; read() {
		if time.Now().After(deadline) {
			t.Fatal("no softirq came")
		}
	}
	read() // the softirq may have come between two fields
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
