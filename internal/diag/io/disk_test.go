package io

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/sensor"
)

// loop makes a block device of fileBytes, which nobody else uses, over a file.
func loop(t *testing.T) (device string) {
	t.Helper()
	path, _ := onDisk(t)
	return loopOf(t, path)
}

// loopOf makes a block device over a file.
func loopOf(t *testing.T, path string) (device string) {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no loop devices: %v", err)
	}
	defer control.Close()
	backing, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer backing.Close()
	for {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			t.Skipf("no loop devices: %v", err)
		}
		device = fmt.Sprintf("/dev/loop%d", number)
		f, err := os.OpenFile(device, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		err = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_FD, int(backing.Fd()))
		if err == unix.EBUSY { // another process was faster
			f.Close()
			continue
		}
		if err != nil {
			t.Fatalf("make %s of %s: %v", device, path, err)
		}
		t.Cleanup(func() {
			if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil {
				t.Errorf("remove %s: %v", device, err)
			}
			f.Close()
		})
		return device
	}
}

// folder is a new folder on a disk. Where the tests run in memory, as in a virtual machine, it is in a file system of
// its own on a loop device.
func folder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	var stat unix.Stat_t
	if err := unix.Stat(dir, &stat); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev))); err == nil {
		return dir
	}
	return fileSystem(t)
}

// fileSystem is the folder of a new file system on a loop device.
func fileSystem(t *testing.T) string {
	t.Helper()
	mount := filepath.Join(t.TempDir(), "mount")
	if err := os.Mkdir(mount, 0o700); err != nil {
		t.Fatal(err)
	}
	device := loopWithFiles(t)
	if err := unix.Mount(device, mount, "ext2", 0, ""); err != nil {
		t.Fatalf("mount %s: %v", device, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mount, 0); err != nil {
			t.Errorf("unmount %s: %v", mount, err)
		}
	})
	return mount
}

// loopWithFiles is a loop device with a file system that is not mounted.
func loopWithFiles(t *testing.T) (device string) {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 8*fileBytes)); err != nil {
		t.Fatal(err)
	}
	device = loopOf(t, image)
	if out, err := exec.Command("mke2fs", device).CombinedOutput(); err != nil {
		t.Fatalf("make a file system on %s: %v\n%s", device, err, out)
	}
	return device
}

// account is the kernel's count of the bytes that a disk has read and written since the boot.
func account(t *testing.T, name string) (read, written uint64) {
	t.Helper()
	stats, err := diskstats()
	if err != nil {
		t.Fatal(err)
	}
	d, known := stats[name]
	if !known {
		t.Fatalf("/proc/diskstats has no %s", name)
	}
	return d.bytes[0], d.bytes[1]
}

// TestRowsAddUpToTheDisk compares the rows, the table of disks and the kernel's own counters of a disk that nobody else
// uses. The IO of its backing file is another disk's.
func TestRowsAddUpToTheDisk(t *testing.T) { inEachWay(t, testRowsAddUpToTheDisk) }

func testRowsAddUpToTheDisk(t *testing.T, sensors []sensor.Sensor) {
	device := loop(t)
	name := filepath.Base(device)
	c := watch(t, 0, sensors...)
	readBefore, writtenBefore := account(t, name)
	pids := map[uint32]bool{}
	for _, does := range []string{"buffered write", "direct write", "direct read", "buffered read"} {
		pids[runProcess(t, does, device)] = true
		flush(t, device)
		drop(t, device)
	}
	i := interval(t, c)
	read, written := account(t, name)
	read, written = read-readBefore, written-writtenBefore
	sum := Row{}
	for _, r := range i.Rows {
		if r.Device != name {
			continue
		}
		if !pids[r.PID] && r.ReadBytes+r.WriteBytes > fileBytes/50 {
			t.Errorf("a row of another process: %+v", r)
		}
		sum = plus(sum, r)
	}
	if sum.ReadBytes != read || sum.WriteBytes != written {
		t.Errorf("the rows have %d bytes read and %d written, and the kernel counted %d and %d", sum.ReadBytes, sum.WriteBytes, read, written)
	}
	near(t, "bytes read", read, 2*fileBytes, 20)
	near(t, "bytes written", written, 2*fileBytes, 20)
	for _, d := range i.Disks {
		if d.Name != name {
			continue
		}
		near(t, "bytes read by the table of disks", uint64(d.ReadBytes*i.Seconds+0.5), read, 1)
		near(t, "bytes written by the table of disks", uint64(d.WriteBytes*i.Seconds+0.5), written, 1)
		if d.Wait <= 0 || d.ReadWait <= 0 || d.WriteWait <= 0 || d.ReadRate <= 0 || d.WriteRate <= 0 || d.Util < 0 || d.Util > 100 {
			t.Errorf("the table of disks has gaps: %+v", d)
		}
		return
	}
	t.Errorf("the table of disks has no %s: %+v", name, i.Disks)
}

// watchLoop watches a new loop device, and returns its file and name, and the kernel's account of all disks at the
// beginning.
func watchLoop(t *testing.T) (device, name string, c *Collector, begun map[string]diskstat) {
	t.Helper()
	device = loop(t)
	c = watch(t, 0)
	begun, err := diskstats()
	if err != nil {
		t.Fatal(err)
	}
	return device, filepath.Base(device), c, begun
}

// TestEndsUnseenAreCounted takes ends of requests out of the sensor's count, as if the kernel had not run it for them:
// exactly as many more are missed, and each once.
func TestEndsUnseenAreCounted(t *testing.T) {
	for op, does := range []string{"direct read", "direct write"} {
		t.Run(does, func(t *testing.T) { endsUnseenAreCounted(t, op, does) })
	}
}

func endsUnseenAreCounted(t *testing.T, op int, does string) {
	device, name, c, begun := watchLoop(t)
	runProcess(t, does, device)
	sums, err := c.diskSums()
	if err != nil {
		t.Fatal(err)
	}
	const taken = 7
	seen, isTaken := uint64(0), false
	for key, sum := range sums {
		if c.names.device(key) != name {
			continue
		}
		seen = sum.accounted()[op]
		var each []disk
		if err := c.set.Maps[ioMapShIoDisks].Lookup(key, &each); err != nil {
			t.Fatal(err)
		}
		for i := range each {
			if !isTaken && each[i].Requests[op] >= taken {
				each[i].Requests[op] -= taken
				seen, isTaken = seen-taken, true
			}
		}
		if err := c.set.Maps[ioMapShIoDisks].Put(key, each); err != nil {
			t.Fatal(err)
		}
	}
	ended, err := diskstats()
	if err != nil {
		t.Fatal(err)
	}
	want := int64(ended[name].requests[op] - begun[name].requests[op] - seen)
	if !isTaken || want < taken {
		t.Fatalf("the kernel counted %d of %s, and the sensor %d", ended[name].requests[op]-begun[name].requests[op], name, seen)
	}
	unseen := func(i Interval) uint64 { return []uint64{i.ReadsUnseen, i.WritesUnseen}[op] }
	i := interval(t, c)
	if got := c.unseen[name][op].most; got != want || unseen(i) < uint64(want) || i.Missed() < uint64(want) {
		t.Errorf("of %s %d are unseen, want %d; of all disks %d, and %d missed", name, got, want, unseen(i), i.Missed())
	}
	if interval(t, c); c.unseen[name][op].most != want {
		t.Errorf("of %s %d are unseen after an interval without requests, want %d", name, c.unseen[name][op].most, want)
	}
	c.sampled = true
	c.unseen[name][op].base -= taken // as if so many more had ended without the sensor
	runProcess(t, does, device)
	if i := interval(t, c); unseen(i) != 0 {
		t.Errorf("%d are unseen where not every IO is watched", unseen(i))
	}
}

// TestWritesAreCountedAsTheKernelDoes has writes with a flush before or behind them, which end twice, flushes alone, and operations that the
// kernel's account takes for writes, and one that it does not. The sensor counts each once.
func TestWritesAreCountedAsTheKernelDoes(t *testing.T) {
	device, name, c, begun := watchLoop(t)
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_DIRECT|unix.O_DSYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(page) }()
	const each = 50
	for n := range int64(each) {
		if _, err := f.WriteAt(page, n*4096); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		for _, request := range []uint{unix.BLKZEROOUT, unix.BLKDISCARD} {
			part := [2]uint64{uint64(n) * 4096, 4096}
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(unsafe.Pointer(&part))); errno != 0 {
				t.Logf("operation %#x: %v", request, errno) // a backing file system without holes
			}
		}
	}
	ended, err := diskstats()
	if err != nil {
		t.Fatal(err)
	}
	sums, err := c.diskSums()
	if err != nil {
		t.Fatal(err)
	}
	kernel := ended[name].requests[1] - begun[name].requests[1]
	for key, sum := range sums {
		if c.names.device(key) != name {
			continue
		}
		seen := sum.accounted()[1]
		t.Logf("the kernel counted %d writes, the sensor %d, of these %d of other kinds", kernel, seen, sum.OtherWrites)
		// Linux 6.18 does not run the sensor for a few (docs/design/28-sensors.md).
		if kernel < 2*each || seen > kernel || kernel-seen > kernel/20 {
			t.Errorf("the kernel counted %d writes of %s, and the sensor %d", kernel, name, seen)
		}
		if got := c.unseen[name][1].base; got != int64(begun[name].requests[1]) {
			t.Errorf("the comparison begins at %d, want %d", got, begun[name].requests[1])
		}
		return
	}
	t.Errorf("the sensor has not seen %s", name)
}
