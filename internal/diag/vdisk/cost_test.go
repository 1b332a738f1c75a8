package vdisk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/machine"
	"github.com/shunt-lb/shunt/sensor"
)

// turns is the number of measurements, without a recorder and with one alternately.
const turns = 9

// inTurns measures work without a recorder and with one, in turns.
func inTurns(work func() float64, record func(work func())) (without, with []float64) {
	work() // first, so that caches and files are there
	for range turns {
		without = append(without, work())
		record(func() { with = append(with, work()) })
	}
	return without, with
}

// compared describes the measurements in words.
func compared(without, with []float64) string {
	one := func(all []float64) string {
		slices.Sort(all)
		return fmt.Sprintf("%.1f to %.1f, median %.1f", all[0], all[len(all)-1], all[len(all)/2])
	}
	return fmt.Sprintf("without %s; with a recorder %s", one(without), one(with))
}

func soak(t *testing.T) {
	t.Helper()
	if os.Getenv("SHUNT_SOAK") == "" {
		t.Skip("takes minutes; SHUNT_SOAK=1 runs it")
	}
}

// inMemory is a folder in memory, so that the disk's own time hides nothing.
func inMemory(t *testing.T) string {
	t.Helper()
	folder, err := os.MkdirTemp("/dev/shm", "shunt-vdisk-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	return folder
}

// TestCostOfRecording has a program write with and without a recorder of the host's half, in turns, and prints the
// additional CPU time.
func TestCostOfRecording(t *testing.T) {
	soak(t)
	need(t, "qemu-img", "qemu-io")
	path := filepath.Join(inMemory(t), "vm.raw")
	run(t, "qemu-img", "create", "-q", "-f", "raw", "-o", "preallocation=full", path, "64M")
	q := openDrive(t, "-f", "raw", "-i", "threads", path)
	const writes = 500
	without, with := inTurns(func() float64 {
		before := cpuTime(t, q.cmd.Process.Pid)
		for i := range writes {
			q.do(fmt.Sprintf("aio_write -q %dk 4k", i*64))
		}
		q.do("aio_flush")
		return float64(cpuTime(t, q.cmd.Process.Pid)-before) / writes / 1000
	}, func(work func()) { q.record(Options{}, work) })
	t.Logf("us of CPU time a write of qemu: %s", compared(without, with))
}

// TestCostOfTheGuestsHalf has a thread write past the page cache to a disk in memory, with and without a recorder of
// the guest's half, and prints the additional time.
func TestCostOfTheGuestsHalf(t *testing.T) {
	soak(t)
	t.Setenv("TMPDIR", inMemory(t))
	d := newDisk(t)
	path := filepath.Join(d.folder, "data")
	if err := os.WriteFile(path, make([]byte, insideFileBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, "sync", path)
	f, err := openDirect(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	without, with := inTurns(func() float64 { return f.write(t.Error) }, func(work func()) {
		recordInside(t, nil, func() error { work(); return nil })
	})
	t.Logf("us a write in a guest: %s", compared(without, with))
}

// directFile is written to past the page cache, by one thread.
type directFile struct {
	*os.File
	buffer []byte
}

func openDirect(path string) (f directFile, err error) {
	if f.File, err = os.OpenFile(path, os.O_WRONLY|unix.O_DIRECT, 0); err != nil {
		return f, err
	}
	f.buffer, err = unix.Mmap(-1, 0, insideBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	return f, err
}

// write writes 200 times, and returns the time of each write in us.
func (f directFile) write(failed func(...any)) float64 {
	const writes = 200
	offsets := insideOffsets()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := time.Now()
	for i := range writes {
		if _, err := f.WriteAt(f.buffer, int64(offsets[i%len(offsets)])); err != nil {
			failed(err)
		}
	}
	return float64(time.Since(began).Microseconds()) / writes
}

// insideCost is the argument of the guest's first process that has it measure its half's recorder, print the result,
// and go on writing.
const (
	insideCost = "cost"
	costTold   = "the cost is told"
)

// recordWhile records for as long as some work takes, and removes the recording.
func recordWhile(ctx context.Context, o Options, work func()) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	worked := make(chan struct{})
	o.ready = func() {
		go func() {
			work()
			close(worked)
			stop()
		}()
	}
	if err := Record(ctx, o, new(strings.Builder)); err != nil {
		return err
	}
	<-worked
	return os.Remove(o.Path)
}

func costInside(b sensor.BTF) error {
	f, err := openDirect(insideFile)
	if err != nil {
		return err
	}
	var failed error
	fail := func(why ...any) { failed = errors.New(fmt.Sprint(why...)) }
	without, with := inTurns(func() float64 { return f.write(fail) }, func(work func()) {
		if err := recordWhile(context.Background(), Options{Guest: true, BTF: b, Path: "/tmp/cost.rec", Limit: 16 << 20}, work); err != nil {
			fail(err)
		}
	})
	if failed != nil {
		return failed
	}
	fmt.Printf("us a write inside: %s\n%s\n", compared(without, with), costTold)
	for failed == nil {
		f.write(fail)
	}
	return failed
}

// TestCostOnAMachine has a virtual machine write all the time, and prints the writes a second without a recorder and
// with one, of the guest's half and then of the host's.
func TestCostOnAMachine(t *testing.T) {
	soak(t)
	need(t, machine.Emulator)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	c, at := insideMachine(ctx, t, newDisk(t), "6.12", "", insideCost)
	begin := startMachine(t, c)
	begin()
	var console []byte
	for !strings.Contains(string(console), costTold) {
		if ctx.Err() != nil || strings.Contains(string(console), "guest: ") {
			t.Fatalf("the guest failed:\n%s", console)
		}
		time.Sleep(100 * time.Millisecond) // there is no event to wait for
		var err error
		if console, err = os.ReadFile(at("console")); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("\n%s", console)
	b, err := sensor.FindBTF("")
	if err != nil {
		t.Fatal(err)
	}
	work := func() float64 {
		began, before := time.Now(), writtenBy(t, c.Process.Pid)
		time.Sleep(3 * time.Second) // the time that is measured
		return float64(writtenBy(t, c.Process.Pid)-before) / insideBytes / time.Since(began).Seconds()
	}
	without, with := inTurns(work, func(work func()) {
		if err := recordWhile(ctx, Options{PID: c.Process.Pid, BTF: b, Path: at("cost.rec"), Limit: 64 << 20}, work); err != nil {
			t.Fatal(err)
		}
	})
	t.Logf("writes a second of the machine: %s", compared(without, with))
}

// writtenBy is the number of bytes that a process has written to disks.
func writtenBy(t *testing.T, pid int) (bytes uint64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if n, _ := fmt.Sscanf(line, "write_bytes: %d", &bytes); n == 1 {
			return bytes
		}
	}
	t.Fatalf("no write_bytes in %s", text)
	return 0
}

// cpuTime is the CPU time of a process's threads, in ns.
func cpuTime(t *testing.T, pid int) (sum uint64) {
	t.Helper()
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		var ns uint64
		if _, err := fmt.Sscan(string(text), &ns); err != nil {
			t.Fatal(err)
		}
		sum += ns
	}
	return sum
}
