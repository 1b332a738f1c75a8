package vdisk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/sensor"
)

// TestFilesOfRequests records as in a guest, on this kernel, while it writes to a disk of its own at known offsets: past
// the page cache, and by it.
func TestFilesOfRequests(t *testing.T) {
	d := newDisk(t)
	path := filepath.Join(d.folder, "data")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const cached, cachedBytes, directBytes = 4 << 20, 256 << 10, 8192
	if _, err := f.Write(make([]byte, 8<<20)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	direct, err := os.OpenFile(path, os.O_WRONLY|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	buffer, err := unix.Mmap(-1, 0, directBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(buffer) }()
	offsets := []uint64{3 << 20, 64 << 10, 1 << 20, 128 << 10}
	g := recordInside(t, nil, func() error {
		for i, offset := range offsets {
			copy(buffer, bytes.Repeat([]byte{byte(i + 1)}, directBytes))
			if _, err := direct.WriteAt(buffer, int64(offset)); err != nil {
				return err
			}
		}
		_, err := f.WriteAt(bytes.Repeat([]byte{100}, cachedBytes), cached)
		return errors.Join(err, f.Sync())
	})
	name := filepath.Base(d.device)
	var got []uint64
	covered := uint64(0)
	for _, r := range g.Requests {
		if r.Disk != name || len(r.Files) == 0 || r.Files[0].File != path {
			continue
		}
		checkInsideSum(t, r)
		part := r.Files[0]
		if r.Op != "write" || r.Extents != same || len(r.Files) != 1 || r.Missing != "" && r.Missing != insideUnended {
			t.Errorf("%+v", r)
		}
		if part.Offset >= cached {
			covered += part.Bytes
			holds(t, d.device, r.Offset, r.Bytes, 100)
			continue
		}
		got = append(got, part.Offset)
		holds(t, d.device, r.Offset, r.Bytes, byte(len(got)))
		if r.Comm == "" || r.PID != os.Getpid() || r.Missing == "" && r.Layers[insideFiles] == 0 {
			t.Errorf("of this process, from its system call on: %+v", r)
		}
	}
	if !slices.Equal(got, offsets) || covered != cachedBytes {
		t.Errorf("writes past the page cache at %v, want %v; %d bytes by it, want %d: %+v", got, offsets, covered, cachedBytes, g.Sum)
	}
}

// recordInside records as in a guest, while work is done. Sensors are nil, or others than all.
func recordInside(t *testing.T, sensors []sensor.Sensor, work func() error) *Inside {
	t.Helper()
	o := Options{Guest: true, sensors: sensors, Path: filepath.Join(t.TempDir(), "recording"), Limit: 64 << 20}
	var err error
	if o.BTF, err = sensor.FindBTF(""); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	worked := make(chan error, 1)
	o.ready = func() {
		go func() {
			worked <- work()
			stop()
		}()
	}
	var said bytes.Buffer
	if err := Record(ctx, o, &said); err != nil {
		t.Fatalf("record: %v\n%s", err, said.String())
	}
	if err := <-worked; err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + said.String())
	text, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	g := OfGuest(decode(t, text))
	var out bytes.Buffer
	if err := g.Print(&out, 10); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + out.String())
	return g
}

// checkInsideSum fails unless the layers add up.
func checkInsideSum(t *testing.T, r InsideRequest) {
	t.Helper()
	sum := uint64(0)
	for _, ns := range r.Layers {
		sum += ns
	}
	if sum != r.Ns {
		t.Errorf("the layers have %d ns: %+v", sum, r)
	}
}

// TestSensorsOfTheGuestThatAreMissing takes sensors away: the rest is reported, and the losses are named. Without the
// requests to drivers there is nothing to report, and the recorder refuses.
func TestSensorsOfTheGuestThatAreMissing(t *testing.T) {
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
	missing := func(names ...string) []sensor.Sensor {
		all := guestSensors()
		for i := range all {
			if slices.Contains(names, all[i].Name) {
				all[i].Ways = []sensor.Way{{Kind: sensor.RawTP, Target: "no_such_tracepoint", Program: all[i].Ways[0].Program}}
			}
		}
		return all
	}
	for _, test := range []struct {
		lost      []string
		says      string
		files, fs bool
	}{
		{nil, "", true, true},
		{[]string{"bios"}, "bios: not attached; the files of all requests are unknown", false, false},
		{[]string{"calls", "returns"}, "calls: not attached; the time in the file system is unknown", true, false},
		{[]string{"splits", "remaps"}, "remaps: not attached; for volumes of device mapper, the disk is unknown", true, true},
	} {
		g := recordInside(t, missing(test.lost...), func() error { f.write(t.Error); return nil })
		var out bytes.Buffer
		if err := g.Print(&out, 1); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), test.says) {
			t.Errorf("%v: %q is not in\n%s", test.lost, test.says, out.String())
		}
		requests, files, fs := 0, 0, 0
		for _, r := range g.Requests {
			if r.Disk != filepath.Base(d.device) || r.Op != "write" || r.Bytes != insideBytes || r.Missing != "" {
				continue
			}
			checkInsideSum(t, r)
			requests++
			if len(r.Files) == 1 && r.Files[0].File == path {
				files++
			}
			if r.Layers[insideFiles] > 0 {
				fs++
			}
		}
		if requests < insideWrites || (files >= insideWrites) != test.files || (fs >= insideWrites) != test.fs {
			t.Errorf("%v: %d writes, %d with their file, %d with time in the file system: %+v", test.lost, requests, files, fs, g.Sum)
		}
	}
	for _, name := range []string{"completions", "issues"} {
		o := Options{Guest: true, Path: filepath.Join(t.TempDir(), "recording"), Limit: 1 << 20, sensors: missing(name)}
		if o.BTF, err = sensor.FindBTF(""); err != nil {
			t.Fatal(err)
		}
		if err := Record(t.Context(), o, io.Discard); !errors.Is(err, sensor.ErrNoWay) || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

// TestLimitOfTheGuestIsNamed limits a process's writes past the page cache by its cgroup, as a guest may.
func TestLimitOfTheGuestIsNamed(t *testing.T) {
	d := newDisk(t)
	group := newGroup(t) // skips where there is none
	path := filepath.Join(d.folder, "data")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, "sync", path)
	q := openDrive(t, "-n", "-f", "raw", "-i", "threads", path)
	q.do("aio_write 0 4k", "aio_flush")
	group.limit(t, q.cmd.Process.Pid, numberOf(t, d.device), 2)
	g := recordInside(t, nil, func() error {
		for i := range 4 {
			q.do(fmt.Sprintf("aio_write %dk 4k", i*64), "aio_flush")
		}
		return nil
	})
	held := 0
	for _, r := range g.Requests {
		if len(r.Files) == 1 && r.Files[0].File == path && r.Op == "write" && r.Missing == "" {
			checkInsideSum(t, r)
			if r.PID == q.cmd.Process.Pid && r.Layers[insideLimit] > r.Ns/2 {
				held++
			}
		}
	}
	if held < 2 {
		t.Errorf("%d of 4 writes were held back by the limit: %+v", held, g.Sum)
	}
}
