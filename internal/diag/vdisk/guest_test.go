package vdisk

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/machine"
)

// The guest's writes: each 16 sectors, with a pattern of its own from 1 on.
const (
	guestWrites     = 40
	guestWriteBytes = 16 * 512
	guestFirst      = 0x8000 // sector of the first write
	guestStep       = 0x6480 // sectors from one to the next, modulo 65536: an odd multiple of 128, so none is hit again
)

// bootSector is a guest of 512 bytes: the BIOS starts it from the disk's first sector, and writes to the disk for it (int
// 0x13, function 0x43, of the "BIOS Enhanced Disk Drive" services) by the virtio device. At the end
// it switches the machine off.
func bootSector() []byte {
	const (
		base    = 0x7c00
		pattern = base + 64
		packet  = base + 72
		sector  = packet + 8
		buffer  = 0x8000
		exit    = 0x501 // the port of isa-debug-exit
	)
	word := func(n int) []byte { return binary.LittleEndian.AppendUint16(nil, uint16(n)) }
	code := bytes.Join([][]byte{
		{0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0xfc}, // ax, ds, es: 0; strings go up
		{0xa0}, word(pattern), // again: al = [pattern]
		{0xbf}, word(buffer), {0xb9}, word(guestWriteBytes), {0xf3, 0xaa}, // fill the buffer with it
		{0xb8, 0x00, 0x43, 0xb2, 0x80, 0xbe}, word(packet), {0xcd, 0x13}, // write it
		{0x72, 0x1a},                // if that failed: to the end
		{0xfe, 0x06}, word(pattern), // the next pattern
		{0x81, 0x06}, word(sector), word(guestStep), // the next sector
		{0x80, 0x3e}, word(pattern), {guestWrites + 1, 0x75, 0xd8}, // again, but after the last one
		{0xba}, word(exit), {0xb0, 0x00, 0xee, 0xf4, 0xeb, 0xfd}, // switch off: all is well
		{0xba}, word(exit), {0xb0, 0x01, 0xee, 0xf4}, // switch off: it failed
	}, nil)
	boot := make([]byte, 512)
	copy(boot, code)
	boot[pattern-base] = 1
	copy(boot[packet-base:], bytes.Join([][]byte{{16, 0}, word(guestWriteBytes / 512), word(buffer), word(0), word(guestFirst)}, nil))
	boot[510], boot[511] = 0x55, 0xaa
	return boot
}

// prompt waits until the monitor asks for a command: the disk is open.
func prompt(t *testing.T, out io.Reader) {
	t.Helper()
	var text []byte
	for one := make([]byte, 1); !bytes.HasSuffix(text, []byte("(qemu) ")); text = append(text, one...) {
		if _, err := out.Read(one); err != nil {
			t.Fatalf("the emulator ended: %v: %s", err, text)
		}
	}
}

// recordMachine starts a virtual machine that waits at its monitor, and records it from its first instruction to its last. The
// caller waits for it; if the test fails it is killed.
func recordMachine(ctx context.Context, t *testing.T, c *exec.Cmd, path string, limit int64) {
	t.Helper()
	begin := startMachine(t, c)
	o := Options{PID: c.Process.Pid, Path: path, Limit: limit, ready: begin}
	var said bytes.Buffer
	if err := Record(ctx, o, &said); err != nil {
		t.Fatalf("%v\n%s", err, said.String())
	}
}

// startMachine starts a virtual machine that waits at its monitor until begin is called. If the test fails it is killed.
func startMachine(t *testing.T, c *exec.Cmd) (begin func()) {
	t.Helper()
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // it has ended unless the test failed
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	prompt(t, out)
	go func() { _, _ = io.Copy(io.Discard, out) }()
	return func() { _, _ = io.WriteString(in, "cont\n") }
}

// TestAGuestsWrites has a virtual machine write to its virtio disk, from its first instruction to its last.
func TestAGuestsWrites(t *testing.T) {
	need(t, machine.Emulator)
	d := newDisk(t)
	path, _ := image(t, d.folder)
	boot := filepath.Join(t.TempDir(), "boot")
	if err := os.WriteFile(boot, bootSector(), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, "qemu-io", "-c", "write -s "+boot+" 0 512", path)
	r := untilEndsAreSeen(t, func() *Report { return recordGuest(t, path) })
	if r.Sum.Joined != r.Sum.Requests || r.Sum.Offsets[other] != 0 || r.Sum.Extents[other] != 0 || r.Sum.Ops["write"] != guestWrites {
		t.Errorf("%+v", r.Sum)
	}
	n := 0
	for _, one := range r.Requests {
		checkSum(t, one)
		if one.Op != "write" {
			continue
		}
		if want := uint64((guestFirst+n*guestStep)%65536) * 512; one.Offset != want || one.Bytes != guestWriteBytes || one.Offsets != same || one.Extents != same || len(one.Mapped) != 1 {
			t.Fatalf("want the guest's write at %d: %+v", want, one)
		}
		n++
		holds(t, one.Mapped[0].File, one.Mapped[0].Offset, one.Bytes, byte(n))
		for _, s := range one.Sectors {
			if s.File == path && s.Offset >= one.Mapped[0].Offset && s.Offset < one.Mapped[0].Offset+one.Bytes {
				holds(t, d.device, s.Sector*512, min(s.Bytes, guestWriteBytes), byte(n))
			}
		}
	}
	if testing.Verbose() {
		var text bytes.Buffer
		if err := r.Print(&text, 10); err != nil {
			t.Fatal(err)
		}
		t.Log("\n" + text.String())
	}
}

// recordGuest boots the guest from the image, and records it to its end.
func recordGuest(t *testing.T, path string) *Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, machine.Emulator, "-accel", "tcg", "-m", "64", "-nodefaults", "-no-user-config", "-display", "none", "-S", "-monitor", "stdio",
		"-device", "isa-debug-exit,iobase=0x501,iosize=1", "-drive", "if=virtio,format=qcow2,cache=none,aio=native,file="+path)
	recording := filepath.Join(t.TempDir(), "recording")
	recordMachine(ctx, t, c, recording, 16<<20)
	var ended *exec.ExitError
	if err := c.Wait(); !errors.As(err, &ended) || ended.ExitCode() != 1 {
		t.Fatalf("the guest: %v, want exit code 1", err)
	}
	file, err := os.Open(recording)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rec, err := Decode(file)
	if err != nil {
		t.Fatal(err)
	}
	return Of(rec)
}
