package io

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// loop makes a block device of fileBytes, which nobody else uses, over a file.
func loop(t *testing.T) (device string) {
	t.Helper()
	path, _ := onDisk(t)
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

// diskstats is what the kernel says that a disk has read and written since the boot, in bytes.
func diskstats(t *testing.T, name string) (read, written uint64) {
	t.Helper()
	text, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var major, minor int
		var disk string
		var n [8]uint64
		if _, err := fmt.Sscan(line, &major, &minor, &disk, &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6]); err == nil && disk == name {
			return n[2] * 512, n[6] * 512
		}
	}
	t.Fatalf("/proc/diskstats has no %s", name)
	return 0, 0
}

// TestRowsAddUpToTheDisk compares the rows, the table of disks and the kernel's own counters of a disk that nobody
// else uses. What its backing file costs is another disk's.
func TestRowsAddUpToTheDisk(t *testing.T) {
	device := loop(t)
	name := filepath.Base(device)
	c := watch(t, 0)
	readBefore, writtenBefore := diskstats(t, name)
	pids := map[uint32]bool{}
	for _, does := range []string{"buffered write", "direct write", "direct read", "buffered read"} {
		pids[runProcess(t, does, device)] = true
		flush(t, device)
		drop(t, device)
	}
	i := interval(t, c)
	read, written := diskstats(t, name)
	read, written = read-readBefore, written-writtenBefore
	if len(i.NotRun) > 0 {
		t.Logf("not run: %v", i.NotRun)
	}
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
		// An interrupt of another disk may come while an end is counted; that is counted too. A request has up to
		// 1280 KB here (BLK_DEF_MAX_SECTORS_CAP).
		slack := float64(i.NotRun["disks"]) * 1280 * 1024
		seen, real := (d.ReadBytes+d.WriteBytes)*i.Seconds, float64(read+written)
		if seen > real+1 || seen < real-slack-1 {
			t.Errorf("the table of disks has %.0f bytes, and the kernel counted %.0f; not run: %v", seen, real, i.NotRun)
		}
		if d.Wait <= 0 || d.ReadWait <= 0 || d.WriteWait <= 0 || d.ReadRate <= 0 || d.WriteRate <= 0 || d.Util < 0 || d.Util > 100 {
			t.Errorf("the table of disks has gaps: %+v", d)
		}
		return
	}
	t.Errorf("the table of disks has no %s: %+v", name, i.Disks)
}
