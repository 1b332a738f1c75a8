package io

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

const fileBytes = 8 << 20

// TestMain is also the process whose IO is watched: it does the work that SHUNT_TEST_IO names, and ends.
func TestMain(m *testing.M) {
	switch does := os.Getenv("SHUNT_TEST_IO"); does {
	case "":
	case doesElsewhere:
		if err := workElsewhere(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	default:
		before, err1 := ownIO()
		err2 := work(does, os.Getenv("SHUNT_TEST_FILE"))
		after, err3 := ownIO()
		if err := errors.Join(err1, err2, err3); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(after[0]-before[0], after[1]-before[1])
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// checksum keeps the compiler from leaving reads out.
var checksum byte

// work reads or writes the whole file.
func work(does, path string) error {
	flags := os.O_RDWR
	if strings.HasPrefix(does, "direct") {
		flags |= unix.O_DIRECT
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if does == "mmap write" || does == "mmap read" {
		data, err := unix.Mmap(int(f.Fd()), 0, fileBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		for i := 0; i < len(data); i += os.Getpagesize() {
			if checksum += data[i]; does == "mmap write" {
				data[i]++
			}
		}
		return unix.Munmap(data)
	}
	buffer, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		return err
	}
	for at := int64(0); at < fileBytes; at += int64(len(buffer)) {
		if strings.HasSuffix(does, "write") {
			_, err = f.WriteAt(buffer, at)
		} else {
			_, err = f.ReadAt(buffer, at)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ownIO is the kernel's count of the bytes that this process has had read from disks and written to them (proc_pid_io(5)).
func ownIO() (all [2]uint64, err error) {
	text, err := os.ReadFile("/proc/self/io")
	for line := range strings.Lines(string(text)) {
		for i, name := range []string{"read_bytes:", "write_bytes:"} {
			if value, is := strings.CutPrefix(line, name); is && err == nil {
				_, err = fmt.Sscan(value, &all[i])
			}
		}
	}
	return all, err
}

// runProcess runs the work in a process of its own, and returns its id when it has ended.
func runProcess(t *testing.T, does, path string) uint32 {
	t.Helper()
	pid, _ := runCounted(t, does, path)
	return pid
}

// runCounted is runProcess, with the kernel's account of the process's bytes, read and written.
func runCounted(t *testing.T, does, path string) (pid uint32, account [2]uint64) {
	t.Helper()
	c := exec.Command("/proc/self/exe", "-test.run", "^$")
	c.Env = append(os.Environ(), "SHUNT_TEST_IO="+does, "SHUNT_TEST_FILE="+path)
	out, err := c.CombinedOutput()
	if err == nil {
		_, err = fmt.Sscan(string(out), &account[0], &account[1])
	}
	if err != nil {
		t.Fatalf("%s: %v\n%s", does, err, out)
	}
	return uint32(c.Process.Pid), account
}

// onDisk is a file of fileBytes on a disk, written and not in the page cache.
func onDisk(t *testing.T) (path string, inode uint64) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	path = filepath.Join(folder(t), "file of the test")
	if err := os.WriteFile(path, []byte(strings.Repeat("x", fileBytes)), 0o600); err != nil {
		t.Fatal(err)
	}
	flush(t, path)
	drop(t, path)
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		t.Fatal(err)
	}
	return path, stat.Ino
}

func flush(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

// drop takes a file that has been flushed out of the page cache.
func drop(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
}

// inEachWay runs a test with this kernel's sensors, and with those of a kernel that refuses programs at tp_btf.
func inEachWay(t *testing.T, test func(t *testing.T, sensors []sensor.Sensor)) {
	t.Run("best way", func(t *testing.T) { test(t, Sensors) })
	t.Run("tp_btf refused", func(t *testing.T) {
		var all []sensor.Sensor
		for _, s := range Sensors {
			s.Ways = slices.Clone(s.Ways)
			for n := range s.Ways {
				if s.Ways[n].Kind == sensor.TPBTF {
					s.Ways[n].Target = "no_such_tracepoint"
				}
			}
			all = append(all, s)
		}
		test(t, all)
	})
}

// watch begins to watch, with the given sensors in place of the view's, if there are any; each is attached in the first
// way that is not refused.
func watch(t *testing.T, inode uint64, sensors ...sensor.Sensor) *Collector {
	t.Helper()
	c, err := Open(Options{Inode: inode, sensors: sensors})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		summary, err := c.Close()
		if err != nil || summary.Lost != 0 || summary.Broken != 0 { // of a disk without files there are no names
			t.Errorf("close: %v, %v", summary, err)
		}
	})
	for _, r := range c.Results() {
		t.Log(r)
		if r.Got == nil || len(r.Refused) == 0 && r.Got.Target == "no_such_tracepoint" || len(r.Refused) > 0 && r.Got.Loses == "" {
			t.Errorf("got %v", r)
		}
	}
	return c
}

func interval(t *testing.T, c *Collector) Interval {
	t.Helper()
	i, err := c.Interval()
	if err != nil {
		t.Fatal(err)
	}
	if i.MissedBytes != 0 {
		t.Errorf("%d bytes were missed", i.MissedBytes)
	}
	return i
}

// near fails unless got is want within so many thousandths.
func near(t *testing.T, what string, got, want, thousandths uint64) {
	t.Helper()
	if difference := max(got, want) - min(got, want); difference*1000 > want*thousandths {
		t.Errorf("%s: %d, want %d within %d ‰", what, got, want, thousandths)
	}
}

// metadataBytes bounds the difference between the kernel's account of a process and its writes to a file of the test:
// pages of the file system.
const metadataBytes = 8 << 12

// TestRowsAreTrue has a process read or write a known number of bytes in each possible way.
func TestRowsAreTrue(t *testing.T) { inEachWay(t, testRowsAreTrue) }

func testRowsAreTrue(t *testing.T, sensors []sensor.Sensor) {
	for _, test := range []struct {
		does                     string
		read, write, thousandths uint64
	}{
		{"direct read", fileBytes, 0, 5},
		{"direct write", 0, fileBytes, 5},
		{"buffered read", fileBytes, 0, 20},
		{"buffered write", 0, fileBytes, 20},
		{"mmap read", fileBytes, 0, 20},
		{"mmap write", fileBytes, fileBytes, 20},
	} {
		t.Run(test.does, func(t *testing.T) {
			path, inode := onDisk(t)
			c := watch(t, inode, sensors...)
			pid, account := runCounted(t, test.does, path)
			flush(t, path) // by this process, which has not written
			i := interval(t, c)
			if len(i.Rows) != 1 {
				t.Fatalf("want one row, of process %d: %+v", pid, i.Rows)
			}
			r := i.Rows[0]
			t.Logf("%+v", r)
			near(t, "bytes read", r.ReadBytes, test.read, test.thousandths)
			near(t, "bytes written", r.WriteBytes, test.write, test.thousandths)
			near(t, "bytes read, by the kernel's account of the process", r.ReadBytes, account[0], test.thousandths)
			// The account also has pages of the file system that the process has made dirty, such as that of the file's
			// times.
			least := account[1] - min(account[1], metadataBytes)
			near(t, "bytes written, by the kernel's account of the process", r.WriteBytes, min(max(r.WriteBytes, least), account[1]), test.thousandths)
			if r.PID != pid || r.Inode != inode || r.Path != path || r.Unattributed || r.Comm == "" || r.Device == "" {
				t.Errorf("want process %d, inode %d, %s: %+v", pid, inode, path, r)
			}
			if (r.Reads > 0) != (test.read > 0) || (r.Writes > 0) != (test.write > 0) {
				t.Errorf("requests do not fit the bytes: %+v", r)
			}
			if again := interval(t, c); len(again.Rows) != 0 {
				t.Errorf("the next interval counts it again: %+v", again.Rows)
			}
		})
	}
}

// TestFlushByTheKernel waits for a kworker to flush, which the writer is charged with, in a later interval and
// after its end.
func TestFlushByTheKernel(t *testing.T) { inEachWay(t, testFlushByTheKernel) }

func testFlushByTheKernel(t *testing.T, sensors []sensor.Sensor) {
	path, inode := onDisk(t)
	c := watch(t, inode, sensors...)
	pid := runProcess(t, "buffered write", path)
	before := interval(t, c)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil { // has the kernel's threads flush, and waits for them
		t.Fatal(err)
	}
	after := interval(t, c)
	written := uint64(0)
	for _, r := range append(before.Rows, after.Rows...) {
		if r.PID != pid || r.Unattributed {
			t.Errorf("want process %d only: %+v", pid, r)
		}
		written += r.WriteBytes
	}
	near(t, "bytes written", written, fileBytes, 20)
}

func TestDeletedFileIsMarked(t *testing.T) {
	path, inode := onDisk(t)
	c := watch(t, inode)
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	runProcess(t, "direct read", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()))
	i := interval(t, c)
	if len(i.Rows) != 1 || i.Rows[0].Path != path+" (deleted)" || i.Rows[0].ReadBytes != fileBytes {
		t.Errorf("want %s (deleted): %+v", path, i.Rows)
	}
}

// TestWrittenBefore flushes pages that were written before the watching began: no process is blamed.
func TestWrittenBefore(t *testing.T) {
	path, inode := onDisk(t)
	runProcess(t, "buffered write", path)
	c := watch(t, inode)
	flush(t, path)
	i := interval(t, c)
	if i.UnattributedBytes != i.Bytes || i.Bytes == 0 || len(i.Rows) == 0 || !i.Rows[0].Unattributed {
		t.Errorf("want all of it unattributed: %+v", i)
	}
	if time.Since(i.Time) > time.Minute || i.Seconds <= 0 {
		t.Errorf("the interval's time: %+v", i)
	}
}

// TestRowsThatAreTooMany has room for one row only: the IO without a row is counted.
func TestRowsThatAreTooMany(t *testing.T) {
	path, inode := onDisk(t)
	c, err := Open(Options{Inode: inode, rows: 1})
	if err != nil {
		t.Fatal(err)
	}
	runProcess(t, "direct read", path)
	runProcess(t, "direct write", path)
	i, err := c.Interval()
	if err != nil {
		t.Fatal(err)
	}
	if len(i.Rows) != 1 || i.MissedBytes != fileBytes || i.UnattributedBytes != fileBytes || i.Bytes != 2*fileBytes {
		t.Errorf("want one row and the rest missed: %+v", i)
	}
	if _, err := c.Close(); err != nil {
		t.Error(err)
	}
}

// TestSizesOfWrites has writes of a known size, straight to the disk, and the kernel's writes of dirty pages.
func TestSizesOfWrites(t *testing.T) {
	path, inode := onDisk(t)
	c, err := Open(Options{Inode: inode, Sizes: true})
	if err != nil {
		t.Fatal(err)
	}
	runProcess(t, "direct write", path)
	direct := interval(t, c)
	runProcess(t, "buffered write", path)
	flush(t, path)
	flushed := interval(t, c)
	if _, err := c.Close(); err != nil {
		t.Error(err)
	}
	for what, i := range map[string]Interval{"direct": direct, "flushed": flushed} {
		if len(i.Rows) != 1 {
			t.Fatalf("%s: want one row: %+v", what, i.Rows)
		}
		r, sum := i.Rows[0], uint64(0)
		t.Logf("%s: %+v", what, r)
		for _, n := range r.WriteSizes {
			sum += n
		}
		if sum != r.Writes || sum == 0 {
			t.Errorf("%s: %d writes, and by size %v", what, r.Writes, r.WriteSizes)
		}
	}
	// The process writes 64 KiB at a time, and each is a request; or two, where the file system has cut the file there.
	const writes = fileBytes >> 16
	if r := direct.Rows[0]; r.WriteBytes != fileBytes || r.WriteSizes[3] < writes*9/10 || r.Writes < writes || r.Writes > writes*11/10 {
		t.Errorf("want %d writes of 64 KiB: %+v", writes, r)
	}
}

// TestSampleOfIOs watches one IO of 4: its estimates are within five times their error, which one of many million is
// not.
func TestSampleOfIOs(t *testing.T) {
	path, inode := onDisk(t)
	c, err := Open(Options{Inode: inode})
	if err != nil {
		t.Fatal(err)
	}
	runProcess(t, "direct write", path)
	const rounds = 8
	total, exact, each := uint64(0), 0, uint64(0)
	for _, r := range interval(t, c).Rows { // all are watched: this is the number of requests for the file
		each += r.Writes
	}
	if each < fileBytes>>16 {
		t.Fatalf("%d requests for %d bytes", each, fileBytes)
	}
	m := c.Member()
	if err := m.Resample(4); err != nil {
		t.Fatal(err)
	}
	for range rounds {
		runProcess(t, "direct write", path)
		i := interval(t, c)
		if i.Sample != 4 {
			t.Errorf("the interval is of a sample of 1/%d, want 1/4", i.Sample)
		}
		told := uint64(0)
		for _, r := range i.Rows {
			told += r.Writes
			if r.Writes%4 != 0 || r.WriteBytes%4 != 0 || r.WriteBytes > r.Writes<<16 {
				t.Errorf("%d writes and %d bytes are not four times those of requests of up to 64 KiB", r.Writes, r.WriteBytes)
			}
		}
		total += told
		if told == each {
			exact++
		}
	}
	if _, err := c.Close(); err != nil {
		t.Error(err)
	}
	t.Logf("%d of %d writes, exact in %d of %d rounds", total, rounds*each, exact, rounds)
	if all := float64(rounds * each); math.Abs(float64(total)-all) > 5*math.Sqrt(3*all) {
		t.Errorf("a sample of 1/4 tells of %d of %d writes", total, rounds*each)
	}
	// A sample is right by chance in 8 % of the rounds, and all IOs are in each.
	if exact == rounds {
		t.Errorf("each of %d rounds tells of exactly its %d writes, as if all were watched", rounds, each)
	}
}

// TestBudgetOfIO has a limit that any sensor exceeds: the sample becomes the smallest, then sensors are detached, and
// each interval names the change.
func TestBudgetOfIO(t *testing.T) {
	path, inode := onDisk(t)
	c, err := Open(Options{Inode: inode, MaxCPU: 1e-9})
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	for deadline := time.Now().Add(time.Minute); ; {
		runProcess(t, "direct write", path)
		i := interval(t, c)
		if i.Spending == nil {
			t.Fatal("nothing is told of the budget")
		}
		if i.Change != "" {
			told = append(told, i.Change)
		}
		if i.AtEnd || time.Now().After(deadline) {
			break
		}
	}
	whole := c.Spending()
	if _, err := c.Close(); err != nil {
		t.Error(err)
	}
	all := strings.Join(told, "\n")
	t.Log(all)
	for _, want := range []string{"from now on one IO of 2 is watched", fmt.Sprintf("one IO of %d is", sampleMax), `the sensor "disks" is detached`, withoutWriters, "cannot watch less"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is not told", want)
		}
	}
	if whole.Change != strings.Join(told, "; ") || whole.Percent <= 0 {
		t.Errorf("the whole: %+v", whole)
	}
}

// TestNamesAreTakenMeanwhile writes more files in one interval than the buffer of events has room for.
func TestNamesAreTakenMeanwhile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	dir := fileSystem(t)
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	c := watch(t, 0)
	const batch, batches = 300, 8
	room := int(c.set.Maps[event.MapEvents].MaxEntries()) / int(ioIoConstantIO_PATH_BYTES)
	if batch*batches <= room {
		t.Fatalf("the buffer has room for %d names: write more than %d files", room, batch*batches)
	}
	var files []string
	known := func() (n int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, called := range c.names.files {
			if strings.Contains(called.path, "one of many") {
				n++
			}
		}
		return n
	}
	for n := range batches {
		for i := range batch {
			path := filepath.Join(dir, fmt.Sprintf("one of many %d", n*batch+i))
			if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			files = append(files, path)
		}
		if err := unix.Syncfs(int(root.Fd())); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(20 * time.Second); known() < len(files); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("of %d files the names of %d are known", len(files), known())
			}
		}
	}
	shown := map[string]bool{}
	for _, r := range interval(t, c).Rows {
		shown[filepath.Base(r.Path)] = true
	}
	for _, path := range files {
		if !shown[filepath.Base(path)] {
			t.Fatalf("%s is in no row", path)
		}
	}
}
