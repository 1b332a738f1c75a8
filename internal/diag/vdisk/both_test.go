package vdisk

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/machine"
	"github.com/shunt-lb/shunt/sensor"
)

// The guest's operations on its file: writes past the page cache, each with its number as pattern, reads of some of them,
// and one write through the page cache.
const (
	insideWrites     = 40
	insideReads      = 10
	insideBytes      = 8192
	insideFileBytes  = 8 << 20
	insideCached     = insideFileBytes - 1<<20 // place of the write by the page cache
	insideCachedSize = 64 << 10
	insideFile       = "/mnt/folder/data"
)

// insideProbe is a place that each write of the guest passes before its IO; the guest has one in interrupts, too.
var insideProbe = Probe{ProbeKernel, "ext4_file_write_iter"}

// insideOffsets are the offsets of the guest's writes, in this order: no two in one place, and none beside another.
func insideOffsets() []uint64 {
	random := rand.New(rand.NewPCG(51, 8))
	var all []uint64
	for _, slot := range random.Perm(insideCached / (4 * insideBytes))[:insideWrites] {
		all = append(all, uint64(slot)*4*insideBytes+insideBytes)
	}
	return all
}

// TestMain is also the first process of the guest, which has this program as its init.
func TestMain(m *testing.M) {
	if os.Getpid() != 1 {
		os.Exit(m.Run())
	}
	be := beInside
	if os.Getenv(begunAgain) == "" {
		be = beginAgain
	}
	err := be()
	fmt.Println("guest:", err)
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART) // qemu's -no-reboot ends here
	select {}
}

// begunAgain is set in the environment of the guest's first process once its file systems are there.
const begunAgain = "SHUNT_BEGUN_AGAIN"

// beginAgain mounts the file systems of a machine that has none, and runs this program anew in the same process: the
// library that loads programs looks for mounts once, before main is called.
func beginAgain() error {
	if err := machine.Mount([][2]string{{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}, {"tmpfs", "/tmp"}, {"bpf", "/sys/fs/bpf"},
		{"debugfs", "/sys/kernel/debug"}, {"tracefs", "/sys/kernel/tracing"}}...); err != nil {
		return err
	}
	return unix.Exec("/init", os.Args, append(os.Environ(), begunAgain+"=1"))
}

// beInside is the guest: it records its half into its memory while it writes, and writes the recording to its second disk.
func beInside() error {
	modules, err := filepath.Glob("/modules/*")
	if err != nil {
		return err
	}
	for _, path := range modules { // in the order of their names
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil {
			return fmt.Errorf("load %s: %w", path, err)
		}
	}
	for range 3000 { // a minute, until the driver has found the disks
		if _, err = os.Stat("/dev/vdb"); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond) // there is no event to wait for
	}
	if err := errors.Join(err, os.MkdirAll("/mnt", 0o755)); err != nil {
		return err
	}
	disk := "/dev/vda"
	if slices.Contains(os.Args, insideDelay) {
		if err := delayDisk("vda", insideDelayMs); err != nil {
			return err
		}
		disk = "/dev/dm-0"
	}
	if err := unix.Mount(disk, "/mnt", "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount the disk: %w", err)
	}
	if err := prepareInside(); err != nil {
		return err
	}
	b, err := sensor.FindBTF("")
	if err != nil {
		return err
	}
	if slices.Contains(os.Args, insideCost) {
		return costInside(b)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	worked := make(chan error, 1)
	o := Options{Guest: true, BTF: b, Path: "/tmp/guest.rec", Limit: 16 << 20, Probes: []Probe{insideProbe, {ProbeKernel, "iomap_dio_bio_end_io"}}}
	o.ready = func() {
		go func() {
			worked <- workInside()
			stop()
		}()
	}
	if err := Record(ctx, o, os.Stdout); err != nil {
		return err
	}
	if err := <-worked; err != nil {
		return err
	}
	recording, err := os.ReadFile(o.Path)
	if err != nil {
		return err
	}
	out, err := os.OpenFile("/dev/vdb", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = out.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(recording))), recording...))
	return errors.Join(err, out.Sync(), out.Close(), unix.Unmount("/mnt", 0))
}

// prepareInside makes the file, with places for all its bytes.
func prepareInside() error {
	if err := os.MkdirAll(filepath.Dir(insideFile), 0o755); err != nil {
		return err
	}
	f, err := os.Create(insideFile)
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, insideFileBytes))
	return errors.Join(err, f.Sync(), f.Close())
}

func workInside() error {
	f, err := os.OpenFile(insideFile, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	buffer, err := unix.Mmap(-1, 0, insideBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		return err
	}
	offsets := insideOffsets()
	for i, offset := range offsets {
		copy(buffer, bytes.Repeat([]byte{byte(i + 1)}, insideBytes))
		if _, err := f.WriteAt(buffer, int64(offset)); err != nil {
			return err
		}
	}
	for i, offset := range offsets[:insideReads] {
		if _, err := f.ReadAt(buffer, int64(offset)); err != nil {
			return err
		}
		if bytesCount(buffer, byte(i+1)) != insideBytes {
			return fmt.Errorf("at %d, other bytes are read than were written", offset)
		}
	}
	cached, err := os.OpenFile(insideFile, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = cached.WriteAt(bytes.Repeat([]byte{200}, insideCachedSize), insideCached)
	return errors.Join(err, cached.Sync(), cached.Close(), f.Close())
}

// insideModules are the modules that a guest of Debian's cloud kernel needs, in the order in which they are loaded. Some kernels have
// some of them built in.
var insideModules = []string{"virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio", "virtio_pci", "virtio_blk", "crc16", "mbcache", "jbd2", "crc32c_generic", "ext4", "dm_mod", "dm_delay"}

// insideKernel is the newest kernel of the series that test/kernel has fetched: its image, and its modules.
func insideKernel(t *testing.T, series string) (image, modules string) {
	t.Helper()
	images, err := filepath.Glob("../../../.tools/kernels/" + series + ".*/boot/vmlinuz-*")
	if err != nil {
		t.Fatal(err)
	}
	if len(images) == 0 {
		t.Skipf("needs Debian's kernel: go run ./test/kernel --kernels %s fetches it", series)
	}
	image = images[len(images)-1]
	return image, filepath.Join(filepath.Dir(filepath.Dir(image)), "lib/modules", strings.TrimPrefix(filepath.Base(image), "vmlinuz-"))
}

// packInside writes the guest's files: this program, and modules.
func packInside(t *testing.T, modules, to string) {
	t.Helper()
	f, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	buffered := bufio.NewWriterSize(f, 1<<20)
	a := machine.NewArchive(buffered)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.AddProgram("/init", self); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	err = filepath.Walk(modules, func(path string, _ os.FileInfo, err error) error {
		if name, _, is := strings.Cut(filepath.Base(path), ".ko"); is {
			found[strings.ReplaceAll(name, "-", "_")] = path
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range insideModules {
		path, is := found[name]
		if !is {
			continue // built in
		}
		content, err := os.ReadFile(path)
		if strings.HasSuffix(path, ".xz") {
			content, err = exec.Command("xz", "-dc", path).Output()
		}
		if err == nil {
			err = a.Add(fmt.Sprintf("/modules/%02d-%s", i, name), content, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(a.Close(), buffered.Flush()); err != nil {
		t.Fatal(err)
	}
}

// insideMachine is the guest, with a file system in an image over another one. Options are qemu's, of the drive, and
// arguments are those of the guest's first process. at returns the paths of its files.
func insideMachine(ctx context.Context, t *testing.T, d disk, series, options, arguments string) (c *exec.Cmd, at func(string) string) {
	t.Helper()
	kernel, modules := insideKernel(t, series)
	folder, err := os.MkdirTemp(d.folder, "")
	if err != nil {
		t.Fatal(err)
	}
	at = func(name string) string { return filepath.Join(folder, name) }
	initrd := at("initrd")
	packInside(t, modules, initrd)
	run(t, "mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0", at("raw"), "48M")
	run(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", at("raw"), at("base.qcow2"))
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", "-b", at("base.qcow2"), "-F", "qcow2", at("vm.qcow2"))
	run(t, "qemu-img", "create", "-q", "-f", "raw", at("out"), "20M")
	run(t, "sync", at("base.qcow2"), at("vm.qcow2"))
	version := run(t, machine.Emulator, "--version")
	return exec.CommandContext(ctx, machine.Emulator, "-accel", machine.Accelerator(version), "-cpu", "max", "-smp", "2", "-m", "512", "-no-reboot", "-nodefaults", "-no-user-config", "-display", "none",
		"-S", "-monitor", "stdio", "-kernel", kernel, "-initrd", initrd, "-append", "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic tsc=unstable -- "+arguments, "-serial", "file:"+at("console"),
		"-drive", "if=virtio,format=qcow2,cache=none,aio=native,file="+at("vm.qcow2")+options, "-drive", "if=virtio,format=raw,file="+at("out")), at
}

// bootInside boots the guest, records both halves, and returns the two recordings.
func bootInside(t *testing.T, d disk, series, options, arguments string) (host, guest *Recording) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c, at := insideMachine(ctx, t, d, series, options, arguments)
	recordMachine(ctx, t, c, at("host.rec"), 64<<20)
	console, err := os.ReadFile(at("console"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the guest's console:\n%s", console)
	if !strings.Contains(string(console), "guest: <nil>") {
		t.Fatal("the guest failed")
	}
	written, err := os.ReadFile(at("out"))
	if err != nil {
		t.Fatal(err)
	}
	size := binary.LittleEndian.Uint64(written)
	guest = decode(t, written[8:8+size])
	text, err := os.ReadFile(at("host.rec"))
	if err != nil {
		t.Fatal(err)
	}
	if keep := os.Getenv("SHUNT_KEEP_RECORDINGS"); keep != "" {
		if err := errors.Join(os.WriteFile(filepath.Join(keep, "guest.rec"), written[8:8+size], 0o600), os.WriteFile(filepath.Join(keep, "host.rec"), text, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return decode(t, text), guest
}

func decode(t *testing.T, text []byte) *Recording {
	t.Helper()
	rec, err := Decode(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// TestBothHalves boots Debian's kernel, whose program writes to a file at known offsets: each request is joined from
// the file's offset down to the host's disk, and the bytes are at the places of the report.
func TestBothHalves(t *testing.T) {
	if os.Getenv("SHUNT_SOAK") == "" {
		t.Skip("boots a guest; SHUNT_SOAK=1 runs it")
	}
	need(t, machine.Emulator)
	d := newDisk(t)
	for _, test := range []struct{ series, options, arguments, slow string }{
		{"6.1", "", "", ""},
		{"6.12", ",throttling.iops-total=20", "", InQemu.String()}, // which holds each back for 50 ms
		{"6.1", "", insideDelay, insideQueue},
		{"6.12", "", insideDelay, insideQueue},
	} {
		t.Run(test.series+test.options+test.arguments, func(t *testing.T) {
			var both *Both
			host := untilEndsAreSeen(t, func() *Report {
				host, guest := bootInside(t, d, test.series, test.options, test.arguments)
				var err error
				if both, err = Join(guest, host); err != nil {
					t.Fatal(err)
				}
				return both.Host
			})
			var text bytes.Buffer
			if err := both.Print(&text, 10); err != nil {
				t.Fatal(err)
			}
			t.Log("\n" + text.String())
			if both.Sum.Joined != both.Sum.Requests || host.Sum.Offsets[other] != 0 || host.Sum.Extents[other] != 0 || both.Sum.Extents[other] != 0 {
				t.Errorf("%+v: %+v", both.Sum, host.Sum)
			}
			checkInside(t, both, test.arguments == insideDelay)
			if slow := slow(both.Sum.Layers); test.slow != "" && slow != test.slow {
				t.Errorf("the layer %s is named, want %s: %+v", slow, test.slow, both.Sum)
			}
		})
	}
}

// checkInside finds the guest's writes and reads in the report, each with its offset in the file. On a device mapper, each write
// waits in it.
func checkInside(t *testing.T, both *Both, onMapper bool) {
	t.Helper()
	want := map[string][]uint64{"write": insideOffsets(), "read": insideOffsets()[:insideReads]}
	got := map[string][]uint64{}
	for _, r := range both.Requests {
		checkInsideSum(t, r)
		if len(r.Files) == 1 && r.Files[0].File == insideFile && r.Files[0].Bytes == insideBytes && r.Files[0].Offset < insideCached {
			got[r.Op] = append(got[r.Op], r.Files[0].Offset)
			if r.Host == nil || r.Extents != same || r.Host.Offsets != same || r.Host.Extents != same || r.Host.Offset != r.Offset || len(r.Host.Mapped) == 0 {
				t.Errorf("%+v: %+v", r, r.Host)
			}
			// The kernel counts in ticks, so it may be one less.
			if onMapper && r.Op == "write" && r.Layers[insideQueue] < insideDelayMs*900_000 {
				t.Errorf("the device mapper holds each write back for %d ms: %+v", insideDelayMs, r)
			}
		}
	}
	checkInsideParts(t, both)
	for op, offsets := range want {
		if !slices.Equal(got[op], offsets) {
			t.Errorf("%ss at %v, want %v", op, got[op], offsets)
		}
	}
}

// checkInsideParts finds the guest's writes at their probe, in the layer of the guest's file systems. At the function that
// ends IO, which runs in interrupts, no request is.
func checkInsideParts(t *testing.T, both *Both) {
	t.Helper()
	atProbe := 0
	for _, r := range both.Requests {
		parts := r.Parts[insideFiles]
		if _, is := parts[insideProbe.String()]; is {
			atProbe++
			if r.Op != "write" || parts[""]+parts[insideProbe.String()] != r.Layers[insideFiles] {
				t.Errorf("parts of a write's %d ns: %+v", r.Layers[insideFiles], r)
			}
		}
	}
	passes := both.Sum.Passes
	if atProbe < insideWrites || len(passes) != 2 || passes[0].Count < insideWrites || passes[1].Count != 0 {
		t.Errorf("%d requests at the probe, want %d: %+v", atProbe, insideWrites, passes)
	}
}
