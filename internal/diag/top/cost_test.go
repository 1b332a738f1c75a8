package top

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/sensor"
	"github.com/shunt-lb/shunt/test/disk"
)

// TestCostOfTop measures this thread's CPU time for a direct read from a disk in memory, and for a byte to another task
// on the same CPU and back, without the tool and with it, in turns, and tells how often each sensor ran meanwhile and
// how long. It measures, and does not judge.
//
//	SHUNT_SOAK=1 go test ./internal/diag/top -run TestCostOfTop -v
func TestCostOfTop(t *testing.T) {
	if os.Getenv("SHUNT_SOAK") == "" {
		t.Skip("measures, and does not judge; SHUNT_SOAK=1 runs it")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const turns, slots, times = 12, 20, 1000
	for _, work := range []struct {
		name string
		do   func(times int)
	}{
		{"direct read of 4 KiB", reads(t)},
		{"byte to another task and back", handing(t)},
	} {
		var without, with []float64
		var sensors bill
		work.do(times) // first, so that caches and files are there
		sliced := func(to *[]float64) {
			for range slots {
				*to = append(*to, micros(times, work.do))
			}
		}
		for range turns {
			sliced(&without)
			watched(t, &sensors, func() { sliced(&with) }, func() { work.do(times) })
		}
		t.Logf("%s: us of CPU time: without %s; with diag top %s", work.name, spread(without), spread(with))
		for _, name := range sensors.sorted() {
			c := sensors.by[name]
			t.Logf("  %-16s %6.2f runs, %6.0f ns each, %6.0f ns in all; %8.0f runs and %6.3f ms a second", name, float64(c.Runs)/float64(turns*times),
				float64(c.Took)/float64(max(1, c.Runs)), float64(c.Took)/float64(turns*times), float64(c.Runs)/sensors.in.Seconds(), 1000*c.Took.Seconds()/sensors.in.Seconds())
		}
	}
}

// micros is the CPU time of this thread for each time.
func micros(times int, do func(int)) float64 {
	cpu := func() int64 {
		var u unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_THREAD, &u) // cannot fail with this argument
		return u.Utime.Nano() + u.Stime.Nano()
	}
	before := cpu()
	do(times)
	return float64(cpu()-before) / float64(times) / 1000
}

// spread is the least, the deciles at both ends and the median. Other work of the machine only adds to a slice, so the
// lower ones say most.
func spread(all []float64) string {
	slices.Sort(all)
	at := func(part int) float64 { return all[part*(len(all)-1)/10] }
	return fmt.Sprintf("least %.2f, first decile %.2f, median %.2f, last decile %.2f", at(0), at(1), at(5), at(9))
}

// bill has the work of sensors by name, on all CPUs, and the time in which it was done.
type bill struct {
	by map[string]sensor.Cost
	in time.Duration
}

// sorted has the dearest sensor first.
func (b bill) sorted() []string {
	return slices.SortedFunc(maps.Keys(b.by), func(one, other string) int { return cmp.Compare(b.by[other].Took, b.by[one].Took) })
}

func (b *bill) add(by map[string]sensor.Cost) {
	if b.by == nil {
		b.by = map[string]sensor.Cost{}
	}
	for name, one := range by {
		sum := b.by[name]
		b.by[name] = sensor.Cost{Runs: sum.Runs + one.Runs, Took: sum.Took + one.Took}
	}
}

// watched does work while the tool shows a screen each second to nobody, and then again while the kernel counts the
// time of the sensors, which takes time too.
func watched(t *testing.T, sensors *bill, work, again func()) {
	t.Helper()
	c, err := open(Options{Interval: time.Second, Threshold: 10 * time.Millisecond}, parts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		for ctx.Err() == nil {
			second, end := context.WithTimeout(ctx, time.Second)
			_, err := c.screen(second)
			end()
			if err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	work()
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	again()
	for _, m := range []sensor.Member{c.io.Member(), c.sched.Member()} {
		by, err := m.Set.Costs()
		if err != nil {
			t.Error(err)
		}
		sensors.add(by)
	}
	sensors.in += time.Since(began)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := stats.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.close(); err != nil {
		t.Error(err)
	}
}

// reads are direct reads from a loop device over a file in memory.
func reads(t *testing.T) func(int) {
	t.Helper()
	const bytes = 64 << 20
	f, err := os.OpenFile(disk.InMemory(t, bytes), os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	block, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		t.Fatal(err)
	}
	descriptor := int(f.Fd())
	return func(times int) {
		for n := range times {
			if _, err := unix.Pread(descriptor, block, int64(n)*4096%bytes); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// handing hands a byte to another thread on the same CPU, and back.
func handing(t *testing.T) func(int) {
	t.Helper()
	var there, back [2]int
	for _, p := range []*[2]int{&there, &back} {
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, fd := range []int{there[1], back[0]} {
			_ = unix.Close(fd)
		}
	})
	pin := func() (before unix.CPUSet) {
		var one unix.CPUSet
		_ = unix.SchedGetaffinity(0, &before)
		for n := range 1024 {
			if before.IsSet(n) {
				one.Set(n)
				break
			}
		}
		_ = unix.SchedSetaffinity(0, &one)
		return before
	}
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its CPU
		pin()
		one := make([]byte, 1)
		for {
			if n, err := unix.Read(there[0], one); n != 1 || err != nil {
				break
			}
			if _, err := unix.Write(back[1], one); err != nil {
				break
			}
		}
		_, _ = unix.Close(there[0]), unix.Close(back[1])
	}()
	return func(times int) {
		before := pin()
		defer func() { _ = unix.SchedSetaffinity(0, &before) }()
		one := make([]byte, 1)
		for range times {
			if _, err := unix.Write(there[1], one); err != nil {
				t.Fatal(err)
			}
			if _, err := unix.Read(back[0], one); err != nil {
				t.Fatal(err)
			}
		}
	}
}
