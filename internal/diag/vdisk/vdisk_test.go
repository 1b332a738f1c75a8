package vdisk

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/sensor"
)

// drive is a program of qemu that does IO on an image as it is told: the block layer of a virtual machine without
// the machine.
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

// do gives commands, each when the one before has its answer: the program reads one a time.
func (d *drive) do(commands ...string) {
	d.t.Helper()
	for _, c := range commands {
		if _, err := io.WriteString(d.in, c+"\n"); err != nil {
			d.t.Fatal(err)
		}
		if text := d.answer(); strings.Contains(text, "failed") || strings.Contains(text, "rror") {
			d.t.Fatalf("qemu-io: %s: %s", c, text)
		}
	}
}

// answer is what the program says until it asks for the next command.
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

// record records what the drive does during work, and reports it.
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
	o.Ready = func() { close(ready) }
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

// image makes a qcow2 image of 64 MiB over a backing file that has the first 8 MiB.
func image(t *testing.T, folder string) (path, backing string) {
	t.Helper()
	backing, path = filepath.Join(folder, "base.qcow2"), filepath.Join(folder, "vm.qcow2")
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", backing, "64M")
	run(t, "qemu-io", "-c", "write 0 8M", backing)
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", "-b", backing, "-F", "qcow2", path)
	return path, backing
}

func TestWritesOfAnImage(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	for _, aio := range []string{"threads", "native", "io_uring"} {
		t.Run(aio, func(t *testing.T) {
			path, backing := image(t, t.TempDir())
			d := openDrive(t, "-n", "-f", "qcow2", "-i", aio, path)
			var commands []string
			for i := range 40 {
				commands = append(commands, fmt.Sprintf("aio_write -P %d %dk 64k", i+1, 16384+(i*7%40)*128))
			}
			commands = append(commands, "aio_flush")
			for i := range 10 {
				commands = append(commands, fmt.Sprintf("aio_read %dk 16k", i*64))
			}
			r := d.record(Options{}, func() { d.do(append(commands, "aio_flush")...) })
			t.Logf("%+v", r.Sum)
			for _, one := range r.Slowest(60) {
				t.Logf("%+v", one)
			}
			t.Log(path, backing)
		})
	}
}
