package vdisk

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/sensor"
)

// drive is a program of qemu that does IO on an image by commands: the block layer of a virtual machine without the
// machine.
type drive struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// need skips where the test cannot run.
func need(t *testing.T, programs ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("needs %s", p)
		}
	}
}

func run(t *testing.T, name string, arguments ...string) string {
	t.Helper()
	out, err := exec.Command(name, arguments...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(arguments, " "), err, out)
	}
	return string(out)
}

func openDrive(t *testing.T, options ...string) *drive {
	t.Helper()
	d := &drive{t: t, cmd: exec.Command("qemu-io", options...)}
	var err error
	if d.in, err = d.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	d.cmd.Stderr = os.Stderr
	d.out = bufio.NewReader(out)
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = d.in.Close()
		if err := d.cmd.Wait(); err != nil {
			t.Errorf("qemu-io: %v", err)
		}
	})
	d.answer() // it is there
	return d
}

// do gives commands, each when the one before has its answer: the program reads one at a time. It returns the answers,
// which may be about requests of earlier commands.
func (d *drive) do(commands ...string) (answers string) {
	d.t.Helper()
	for _, c := range commands {
		if _, err := io.WriteString(d.in, c+"\n"); err != nil {
			d.t.Fatal(err)
		}
		text := d.answer()
		if strings.Contains(text, "failed") || strings.Contains(text, "rror") {
			d.t.Fatalf("qemu-io: %s: %s", c, text)
		}
		answers += text
	}
	return answers
}

// answer is the program's output until it asks for the next command.
func (d *drive) answer() string {
	const prompt = "qemu-io> "
	var text []byte
	for !bytes.HasSuffix(text, []byte(prompt)) {
		one, err := d.out.ReadByte()
		if err != nil {
			d.t.Fatalf("qemu-io ended: %v: %s", err, text)
		}
		text = append(text, one)
	}
	return strings.TrimSuffix(string(text), prompt)
}

// untilEndsAreSeen records anew while the kernel has left an end out (endUnseen), which the report must then have said.
func untilEndsAreSeen(t *testing.T, record func() *Report) *Report {
	t.Helper()
	for attempt := 1; ; attempt++ {
		r := record()
		unseen := r.Sum.Missing[endUnseen]
		if unseen == 0 || attempt == 5 {
			return r
		}
		if r.Sum.Joined+unseen != r.Sum.Requests {
			t.Fatalf("%d ends were left out: %+v", unseen, r.Sum)
		}
		t.Logf("attempt %d: %d ends were left out", attempt, unseen)
	}
}

// record records the IO of the drive during work, and reports it.
func (d *drive) record(o Options, work func()) *Report {
	d.t.Helper()
	var err error
	if o.BTF, err = sensor.FindBTF(""); err != nil {
		d.t.Fatal(err)
	}
	o.PID = d.cmd.Process.Pid
	if o.Path == "" {
		o.Path = filepath.Join(d.t.TempDir(), "recording")
	}
	if o.Limit == 0 {
		o.Limit = 64 << 20
	}
	ctx, stop := context.WithCancel(d.t.Context())
	defer stop()
	ready := make(chan struct{})
	o.ready = func() { close(ready) }
	var said bytes.Buffer
	ended := make(chan error, 1)
	go func() { ended <- Record(ctx, o, &said) }()
	select {
	case <-ready:
	case err := <-ended:
		d.t.Fatalf("record: %v\n%s", err, said.String())
	}
	work()
	stop()
	select {
	case err = <-ended:
	case <-time.After(time.Minute):
		d.t.Fatal("the recorder does not end")
	}
	if err != nil {
		d.t.Fatalf("record: %v\n%s", err, said.String())
	}
	d.t.Log("\n" + said.String())
	file, err := os.Open(o.Path)
	if err != nil {
		d.t.Fatal(err)
	}
	defer file.Close()
	rec, err := Decode(file)
	if err != nil {
		d.t.Fatal(err)
	}
	return Of(rec)
}

// disk is a disk of the test's own: a loop device with a file system.
type disk struct{ device, folder string }

func newDisk(t *testing.T) disk {
	t.Helper()
	need(t, "losetup", "mke2fs", "qemu-img", "qemu-io")
	folder := t.TempDir()
	file := filepath.Join(folder, "disk")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 256<<20), os.Mkdir(filepath.Join(folder, "mnt"), 0o700)); err != nil {
		t.Fatal(err)
	}
	d := disk{folder: filepath.Join(folder, "mnt")}
	arguments := []string{"--find", "--show", "--direct-io=on", file}
	out, err := exec.Command("losetup", arguments...).Output()
	if err != nil { // the file's own file system has no direct IO
		out = []byte(run(t, "losetup", "--find", "--show", file))
	}
	d.device = strings.TrimSpace(string(out))
	t.Cleanup(func() { run(t, "losetup", "--detach", d.device) })
	run(t, "mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.device)
	if err := unix.Mount(d.device, d.folder, "ext4", 0, ""); err != nil {
		t.Fatalf("mount %s: %v", d.device, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(d.folder, 0); err != nil {
			t.Errorf("unmount %s: %v", d.folder, err)
		}
	})
	return d
}

// image makes a qcow2 image of 64 MiB over a backing file that has the first 8 MiB.
func image(t *testing.T, folder string) (path, backing string) {
	t.Helper()
	backing, path = filepath.Join(folder, "base.qcow2"), filepath.Join(folder, "vm.qcow2")
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", backing, "64M")
	run(t, "qemu-io", "-c", "write 0 8M", backing)
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", "-b", backing, "-F", "qcow2", path)
	run(t, "sync", path, backing)
	return path, backing
}

// holds fails unless all bytes of a file or device from the offset on are the pattern, past the page cache: it compares
// the recording with the places of the data.
func holds(t *testing.T, path string, offset, bytes uint64, pattern byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	buffer, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(buffer) }()
	if _, err := f.ReadAt(buffer, int64(offset)); err != nil {
		t.Fatal(err)
	}
	if wrong := len(buffer) - bytesCount(buffer, pattern); wrong > 0 {
		t.Errorf("%s from %d on: %d of %d bytes are not %d", path, offset, wrong, bytes, pattern)
	}
}

func bytesCount(b []byte, pattern byte) int { return bytes.Count(b, []byte{pattern}) }

// TestRequestsAreFollowed writes and reads in each way that qemu has, at known offsets, with known patterns, and finds
// the patterns in the files and on the disk at the places of the report.
func TestRequestsAreFollowed(t *testing.T) {
	d := newDisk(t)
	const writes, reads = 40, 10
	for _, test := range [][2]string{{"threads", "qcow2"}, {"native", "qcow2"}, {"io_uring", "qcow2"}, {"native", "raw"}} {
		aio, format := test[0], test[1]
		t.Run(aio+" "+format, func(t *testing.T) {
			folder, err := os.MkdirTemp(d.folder, "")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(folder)
			path, backing := image(t, folder)
			if format == "raw" {
				path = filepath.Join(folder, "vm.raw")
				backing = path
				run(t, "qemu-img", "create", "-q", "-f", "raw", path, "64M")
				run(t, "qemu-io", "-f", "raw", "-c", "write 0 8M", path)
				run(t, "sync", path)
			}
			q := openDrive(t, "-n", "-f", format, "-i", aio, path)
			offset := func(i int) uint64 { return 16<<20 + uint64(i*7%writes)*(128<<10) }
			var commands []string
			for i := range writes {
				commands = append(commands, fmt.Sprintf("aio_write -P %d %d 64k", i+1, offset(i)))
			}
			commands = append(commands, "aio_flush")
			for i := range reads {
				commands = append(commands, fmt.Sprintf("aio_read %dk 16k", i*64))
			}
			r := untilEndsAreSeen(t, func() *Report {
				return q.record(Options{}, func() { q.do(append(commands, "aio_read 48M 64k", "aio_flush", "flush")...) })
			})
			nowhere := map[string]string{"qcow2": endsInQemu, "raw": endsInHole}[format]
			s := r.Sum
			if s.Requests != writes+reads+1 || s.Joined != s.Requests || s.Ops["write"] != writes || s.Ends[endsInDevice] != writes+reads || s.Ends[nowhere] != 1 {
				t.Errorf("%+v", s)
			}
			if s.Offsets[other] != 0 || s.Offsets[same] < writes+reads || s.Extents[same] != writes+reads {
				t.Errorf("places: %+v", s)
			}
			if t.Failed() {
				t.Fatalf("for example %+v", r.Requests[writes:])
			}
			for i, one := range r.Requests[:writes+reads] {
				checkSum(t, one)
				if i >= writes {
					if one.Op != "read" || one.Offset != uint64(i-writes)*(64<<10) || one.Bytes != 16<<10 || len(one.Mapped) != 1 || one.Mapped[0].File != backing {
						t.Errorf("want a read of %s: %+v", backing, one)
					}
					continue
				}
				if one.Op != "write" || one.Offset != offset(i) || one.Bytes != 64<<10 || len(one.Mapped) != 1 || one.Mapped[0].Bytes != one.Bytes || one.Mapped[0].File != path {
					t.Fatalf("want a write at %d: %+v", offset(i), one)
				}
				holds(t, one.Mapped[0].File, one.Mapped[0].Offset, one.Bytes, byte(i+1))
				found := uint64(0)
				for _, sector := range one.Sectors {
					if sector.File == path && sector.Offset >= one.Mapped[0].Offset && sector.Offset < one.Mapped[0].Offset+one.Bytes {
						found += sector.Bytes
						holds(t, d.device, sector.Sector*512, sector.Bytes, byte(i+1))
					}
				}
				if found != one.Bytes {
					t.Errorf("the sectors of the request's data have %d bytes of %d: %+v", found, one.Bytes, one)
				}
			}
		})
	}
}

// checkSum fails unless the layers add up.
func checkSum(t *testing.T, r Request) {
	t.Helper()
	sum := uint64(0)
	for _, ns := range r.Layers {
		sum += ns
	}
	if sum != r.Ns || r.Ns == 0 {
		t.Errorf("the layers have %d ns of %d: %+v", sum, r.Ns, r)
	}
}

// group is a cgroup of the test's own.
type group struct{ folder, file, format string }

func newGroup(t *testing.T) group {
	t.Helper()
	g := group{"/sys/fs/cgroup/blkio", "blkio.throttle.write_iops_device", "%d:%d %d"}
	if _, err := os.Stat(filepath.Join(g.folder, g.file)); err != nil {
		g = group{"/sys/fs/cgroup", "io.max", "%d:%d wiops=%d"}
		if err := os.WriteFile(filepath.Join(g.folder, "cgroup.subtree_control"), []byte("+io"), 0); err != nil {
			t.Skipf("needs limits of IO by cgroup: %v", err)
		}
	}
	var err error
	if g.folder, err = os.MkdirTemp(g.folder, "shunt-vdisk-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(g.folder); err != nil {
			t.Errorf("remove the cgroup: %v", err)
		}
	})
	return g
}

// limit allows a process so many writes a second to the device.
func (g group) limit(t *testing.T, pid int, device uint64, writes int) {
	t.Helper()
	for name, text := range map[string]string{g.file: fmt.Sprintf(g.format, unix.Major(device), unix.Minor(device), writes), "cgroup.procs": fmt.Sprint(pid)} {
		if err := os.WriteFile(filepath.Join(g.folder, name), []byte(text), 0); err != nil {
			t.Fatalf("limit IO: %v", err)
		}
	}
}

// TestTheSlowLayerIsNamed makes a layer slow, and no other: half a second for a request, much more than it takes elsewhere on a busy machine.
func TestTheSlowLayerIsNamed(t *testing.T) {
	d := newDisk(t)
	newGroup(t) // skips where there is none
	for _, test := range []struct {
		layer   Layer
		options []string
	}{
		{InQemu, []string{"--object", "throttle-group,id=slow,x-iops-write=2", "-n", "-i", "native", "--image-opts",
			"driver=throttle,throttle-group=slow,file.driver=qcow2,file.file.driver=file,file.file.aio=native,file.file.cache.direct=on,file.file.filename=%s"}},
		{Limited, []string{"-n", "-f", "qcow2", "-i", "threads", "%s"}},
		{InDevice, []string{"-n", "-f", "qcow2", "-i", "native", "%s"}},
	} {
		t.Run(test.layer.String()+" "+test.options[len(test.options)-2], func(t *testing.T) {
			folder, err := os.MkdirTemp(d.folder, "")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(folder)
			path, _ := image(t, folder)
			g := newGroup(t)
			q := openDrive(t, slices.Concat(test.options[:len(test.options)-1], []string{strings.ReplaceAll(test.options[len(test.options)-1], "%s", path)})...)
			q.do("aio_write 16M 1M", "aio_flush", "flush") // so that the image's tables have been written
			device := d.device
			if test.layer == InDevice {
				device = filepath.Dir(d.folder)
			}
			if test.layer != InQemu {
				g.limit(t, q.cmd.Process.Pid, numberOf(t, device), 2)
			}
			r := untilEndsAreSeen(t, func() *Report {
				return q.record(Options{}, func() {
					text := ""
					for i := range 4 {
						text += q.do(fmt.Sprintf("aio_write %dk 4k", 16384+i*64))
						// One after the other: otherwise the later ones would wait for a thread meanwhile. aio_flush
						// would disable qemu's throttle.
						for strings.Count(text, "wrote ") <= i {
							text += q.do("sleep 10") // of the program: it goes on with its requests meanwhile
						}
					}
				})
			})
			if r.Sum.Requests != 4 || r.Sum.Joined != 4 || r.Sum.Slow() != test.layer.String() || r.Sum.Layers[test.layer.String()].Share < 50 {
				t.Errorf("want %v: %+v", test.layer, r.Sum)
			}
		})
	}
}

// numberOf is a device's own number, or that of the device that a folder is on.
func numberOf(t *testing.T, path string) uint64 {
	t.Helper()
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		t.Fatal(err)
	}
	if stat.Mode&unix.S_IFMT == unix.S_IFBLK {
		return stat.Rdev
	}
	return stat.Dev
}

// without is the sensors, of which some have symbols that no program has.
func without(names ...string) []sensor.Sensor {
	all := sensors()
	for i := range all {
		if slices.Contains(names, all[i].Name) {
			all[i].Ways = []sensor.Way{{Kind: sensor.Uprobe, Target: "no_such_symbol", Program: all[i].Ways[0].Program}}
		}
	}
	return all
}

// TestSymbolsThatAreMissing takes symbols away: the rest is reported, and the losses are named.
func TestSymbolsThatAreMissing(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	for _, test := range []struct {
		name  string
		lost  []string
		check func(Sum) bool
		says  string
	}{
		{"all", []string{"ends", "to threads", "to the kernel's AIO", "to io_uring", "block writes", "block reads", "coroutines", "flushes", "writes", "reads"},
			func(s Sum) bool { return s.Joined == s.Requests && s.Ops["write"] >= 10 && s.Ends[endsInDevice] >= 10 }, "not of the guest"},
		{"coroutines", []string{"coroutines"},
			func(s Sum) bool {
				return s.Requests == 10 && s.Joined == 0 && s.Missing["its end is not in the recording"] == 10
			}, "coroutines: not attached"},
		{"hand-over", []string{"to threads"},
			func(s Sum) bool { return s.Requests == 10 && s.Joined == 10 && s.Ends[endsInQemu] == 10 }, "to threads: not attached"},
	} {
		t.Run(test.name, func(t *testing.T) {
			path, _ := image(t, t.TempDir())
			q := openDrive(t, "-n", "-f", "qcow2", "-i", "threads", path)
			q.do("aio_write 16M 1M", "aio_flush", "flush")
			r := q.record(Options{sensors: without(test.lost...)}, func() {
				for i := range 10 {
					q.do(fmt.Sprintf("aio_write %dk 4k", 16384+i*64))
				}
				q.do("aio_flush")
			})
			var out bytes.Buffer
			if err := r.Print(&out, 3); err != nil {
				t.Fatal(err)
			}
			if !test.check(r.Sum) || !strings.Contains(out.String(), test.says) {
				t.Errorf("%+v\n%s", r.Sum, out.String())
			}
			for _, one := range r.Requests {
				if one.Ns > 0 {
					checkSum(t, one)
				}
			}
		})
	}
}

// TestRecordingThatIsFull: a recording ends by itself at its limit, has the events up to there, and is not overwritten.
func TestRecordingThatIsFull(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	path, _ := image(t, t.TempDir())
	q := openDrive(t, "-n", "-f", "qcow2", "-i", "threads", path)
	recording := filepath.Join(t.TempDir(), "recording")
	const room = 100 * (frameBytes + eventBytes)
	r := q.record(Options{Path: recording, Limit: room}, func() {
		for i := range 40 {
			q.do(fmt.Sprintf("aio_write %dk 64k", 16384+i*64))
		}
		q.do("aio_flush")
	})
	tail := r.Recording.Tail
	if len(r.Recording.Events) != 100 || tail == nil || !strings.Contains(tail.Ended, "limit") || tail.Skipped == 0 || tail.Skipped+100 != tail.Events.Received {
		t.Errorf("%d events, %+v", len(r.Recording.Events), tail)
	}
	var out bytes.Buffer
	if err := r.Print(&out, 1); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("limit of %d bytes\n%d events came when the recording was full", room, tail.Skipped); !strings.Contains(out.String(), want) {
		t.Errorf("%q is not in\n%s", want, out.String())
	}
	var stat unix.Stat_t
	if err := unix.Stat(recording, &stat); err != nil || stat.Mode&0o777 != 0o600 {
		t.Errorf("%v: the mode of the recording is %o", err, stat.Mode)
	}
	err := Record(t.Context(), Options{PID: q.cmd.Process.Pid, Path: recording, Limit: room}, io.Discard)
	if !errors.Is(err, os.ErrExist) {
		t.Errorf("a recording that exists: %v", err)
	}
}

// TestTheKernelsSensors attach on each kernel that is supported.
func TestTheKernelsSensors(t *testing.T) {
	need(t)
	types, err := sensor.FindBTF("")
	if err != nil {
		t.Fatal(err)
	}
	for _, guest := range []bool{false, true} {
		results, err := Examine(types, guest)
		if err != nil || len(results) != 7 {
			t.Fatalf("%v: %v", err, results)
		}
		for _, r := range results {
			if r.Got == nil {
				t.Error(r)
			}
		}
	}
}

func TestWhatIsRefused(t *testing.T) {
	need(t)
	err := Record(t.Context(), Options{PID: 1 << 30, Path: "/no/such"}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "no process") {
		t.Errorf("no process: %v", err)
	}
	ended := exec.Command("/proc/self/exe", "-test.run", "^$")
	if err := ended.Start(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Waitid(unix.P_PID, ended.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if err := Record(t.Context(), Options{PID: ended.Process.Pid, Path: "/no/such"}, io.Discard); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("a process that has ended: %v", err)
	}
	if err := ended.Wait(); err != nil {
		t.Error(err)
	}
	for number, name := range clusterFiles {
		on := func(path string, of *unix.Statfs_t) error {
			of.Type = number
			return nil
		}
		file, err := os.Create(filepath.Join(t.TempDir(), "image"))
		if err != nil {
			t.Fatal(err)
		}
		err = Record(t.Context(), Options{PID: os.Getpid(), Path: "/no/such", statfs: on}, io.Discard)
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "cluster file system") {
			t.Errorf("%s: %v", name, err)
		}
		_ = file.Close()
	}
}

// A file that is closed while open files are listed is left out.
func TestAFileIsClosed(t *testing.T) {
	files, err := openFiles(os.Getpid(), func(string, *unix.Statfs_t) error { return unix.ENOENT })
	if len(files) > 0 || err != nil {
		t.Errorf("%v, %v", files, err)
	}
}

// TestTheProcessEnds has the process end while it is recorded: the recording ends, and has the places of the files.
func TestTheProcessEnds(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	path, _ := image(t, t.TempDir())
	c := exec.Command("qemu-io", "-n", "-f", "qcow2", path)
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
	if _, err := out.Read(make([]byte, 1)); err != nil { // it asks for a command, so the image is open
		t.Fatal(err)
	}
	// A process that has ended is there until it is waited for.
	o := Options{PID: c.Process.Pid, Path: filepath.Join(t.TempDir(), "recording"), Limit: 1 << 20}
	o.ready = func() {
		_, _ = io.WriteString(in, "aio_write 16M 64k\n")
		_ = in.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var said bytes.Buffer
	if err := Record(ctx, o, &said); err != nil || !strings.Contains(said.String(), "the process has ended") {
		t.Errorf("%v\n%s", err, said.String())
	}
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
	file, err := os.Open(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rec, err := Decode(file)
	if err != nil {
		t.Fatal(err)
	}
	if s := Of(rec).Sum; s.Requests != 1 || s.Joined != 1 || s.Offsets[same] != 1 || s.Extents[same] != 1 {
		t.Errorf("%+v", s)
	}
}
