package io

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
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
		if err == unix.EBUSY { // somebody else was faster
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
	image, mount := filepath.Join(dir, "image"), filepath.Join(dir, "mount")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 8*fileBytes), os.Mkdir(mount, 0o700)); err != nil {
		t.Fatal(err)
	}
	device := loopOf(t, image)
	if out, err := exec.Command("mke2fs", device).CombinedOutput(); err != nil {
		t.Fatalf("%s is on no disk, and making a file system on %s failed: %v\n%s", dir, device, err, out)
	}
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

// TestRowsAddUpToTheDisk compares the rows, the table of disks and the kernel's own counters of a disk that nobody
// else uses. What its backing file costs is another disk's.
func TestRowsAddUpToTheDisk(t *testing.T) {
	device := loop(t)
	name := filepath.Base(device)
	c := watch(t, 0)
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

// TestReadsUnseenAreCounted takes ends of reads out of the sensor's count, as if the kernel had not run it for them: as many more are
// missed, exactly, and each once.
func TestReadsUnseenAreCounted(t *testing.T) {
	device := loop(t)
	name := filepath.Base(device)
	c := watch(t, 0)
	begun, err := diskstats()
	if err != nil {
		t.Fatal(err)
	}
	runProcess(t, "direct read", device)
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
		seen = sum.Requests[0]
		var each []disk
		if err := c.set.Maps[ioMapShIoDisks].Lookup(key, &each); err != nil {
			t.Fatal(err)
		}
		for i := range each {
			if !isTaken && each[i].Requests[0] >= taken {
				each[i].Requests[0] -= taken
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
	want := int64(ended[name].requests[0] - begun[name].requests[0] - seen)
	if !isTaken || want < taken {
		t.Fatalf("the kernel counted %d reads of %s, and the sensor %d", ended[name].requests[0]-begun[name].requests[0], name, seen)
	}
	i := interval(t, c)
	if got := c.unseen[name].most; got != want || i.ReadsUnseen < uint64(want) || i.Missed() < uint64(want) {
		t.Errorf("of %s %d reads are unseen, want %d; of all disks %d, and %d missed", name, got, want, i.ReadsUnseen, i.Missed())
	}
	if interval(t, c); c.unseen[name].most != want {
		t.Errorf("of %s %d reads are unseen after an interval without reads, want %d", name, c.unseen[name].most, want)
	}
	c.sampled = true
	c.unseen[name].base -= taken // as if so many more had ended without the sensor
	runProcess(t, "direct read", device)
	if i := interval(t, c); i.ReadsUnseen != 0 {
		t.Errorf("%d reads are unseen where not every IO is watched", i.ReadsUnseen)
	}
}
