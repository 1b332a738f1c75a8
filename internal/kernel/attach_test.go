package kernel

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// counting is a program that adds 1 to its map at each run and returns verdict.
func counting(t *testing.T, kind ebpf.ProgramType, at ebpf.AttachType, to string, verdict int32) (*ebpf.Program, *ebpf.Map) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads programs")
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "runs", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "counting", Type: kind, AttachType: at, AttachTo: to, License: "GPL", Instructions: asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, verdict).WithSymbol("out"), asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p, m
}

func runs(t *testing.T, m *ebpf.Map) (n uint64) {
	t.Helper()
	if err := m.Lookup(uint32(0), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// waitForRuns waits until a program has run more often than before.
func waitForRuns(t *testing.T, m *ebpf.Map, before uint64, cause func()) {
	t.Helper()
	for until := time.Now().Add(30 * time.Second); runs(t, m) <= before; cause() {
		if time.Now().After(until) {
			t.Fatal("the program has not run within 30 s")
		}
	}
}

// requireRefused requires the parts of a refusal that people need.
func requireRefused(t *testing.T, err error, target string) {
	t.Helper()
	var no *RefusedError
	if !errors.As(err, &no) || !strings.Contains(no.Target, target) || no.Reason == "" || no.Remedy == "" {
		t.Errorf("refused with %+v, %v; want the target %s, a reason and a remedy", no, err, target)
	}
}

// newCgroup makes a folder in the first cgroup2 file system there is.
func newCgroup(t *testing.T) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		var fs unix.Statfs_t
		if unix.Statfs(root, &fs) != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		folder, err := os.MkdirTemp(root, "shunt-test-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(folder); err != nil {
				t.Error(err)
			}
		})
		return folder
	}
	t.Fatal("no cgroup2 file system is mounted at /sys/fs/cgroup or below")
	return ""
}

// A program at a cgroup, sock_ops too, is refused where there is no cgroup. A pinned link is taken over with
// another program, and ended where it is another cgroup's.
func TestAttachCgroup(t *testing.T) {
	p, _ := counting(t, ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect, "", 1)
	second, _ := counting(t, ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect, "", 1)
	_, err := AttachCgroup(p, "counting", t.TempDir(), ebpf.AttachCGroupInet4Connect)
	requireRefused(t, err, "the cgroup /")
	ops, _ := counting(t, ebpf.SockOps, ebpf.AttachCGroupSockOps, "", 0)
	a, b := newCgroup(t), newCgroup(t)
	l, err := AttachCgroup(ops, "counting", a, ebpf.AttachCGroupSockOps)
	if err != nil {
		t.Fatal(err)
	}
	if err := DropLink(l); err != nil {
		t.Error(err)
	}
	pins, err := os.MkdirTemp(DefaultPinRoot, "shunt-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(pins) })
	path := filepath.Join(pins, "connect4")
	var ids []uint32
	for _, step := range []struct {
		p      *ebpf.Program
		cgroup string
	}{{p, a}, {second, a}, {second, b}} {
		l, err := PinCgroup(step.p, "counting", step.cgroup, ebpf.AttachCGroupInet4Connect, path)
		if l == nil || err != nil {
			t.Fatal(l, err)
		}
		info, err := l.Info()
		if err != nil {
			t.Fatal(err)
		}
		want, err := step.p.Info()
		if err != nil {
			t.Fatal(err)
		}
		if id, _ := want.ID(); info.Program != id {
			t.Errorf("the link has program %d, want %d", info.Program, id)
		}
		ids = append(ids, uint32(info.ID))
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if ids[0] != ids[1] || ids[1] == ids[2] {
		t.Errorf("the links are %v: want the first taken over, and a new one for another cgroup", ids)
	}
	if err := RemoveLink(path); err != nil {
		t.Error(err)
	}
}

// Programs that observe run for their events, and no more after Close.
func TestAttachToTracepoints(t *testing.T) {
	for name, c := range map[string]struct {
		kind   ebpf.ProgramType
		at     ebpf.AttachType
		to     string
		attach func(p *ebpf.Program) (io.Closer, error)
		cause  func()
	}{
		"tp_btf": {ebpf.Tracing, ebpf.AttachTraceRawTp, "task_rename", func(p *ebpf.Program) (io.Closer, error) { return AttachTracing(p, "counting") }, renameThread},
		"raw_tp": {ebpf.RawTracepoint, ebpf.AttachNone, "", func(p *ebpf.Program) (io.Closer, error) { return AttachRawTracepoint(p, "task_rename") }, renameThread},
		"timer":  {ebpf.PerfEvent, ebpf.AttachNone, "", func(p *ebpf.Program) (io.Closer, error) { return AttachTimer(p, time.Millisecond) }, func() {}},
		"uprobe": {ebpf.Kprobe, ebpf.AttachNone, "", func(p *ebpf.Program) (io.Closer, error) {
			var files Executables
			l, err := files.AttachUprobe(p, "/proc/self/exe", "github.com/shunt-lb/shunt/internal/kernel.renameThread", os.Getpid(), 0)
			if errors.Is(err, link.ErrNoSymbol) { // "go test" strips the symbols of a binary that it runs at once
				return files.attach(p, "/proc/self/exe", "renameThread", &link.UprobeOptions{PID: os.Getpid(), Address: offset(t, renameThread)}, (*link.Executable).Uprobe)
			}
			return l, err
		}, renameThread},
	} {
		t.Run(name, func(t *testing.T) {
			p, m := counting(t, c.kind, c.at, c.to, 0)
			l, err := c.attach(p)
			if err != nil {
				t.Fatal(err)
			}
			waitForRuns(t, m, 0, c.cause)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// renameThread gives the calling thread the name that it has.
//
//go:noinline
func renameThread() {
	_ = os.WriteFile("/proc/thread-self/comm", []byte("shunt-test"), 0)
}

// offset is the offset of a function of this process's program in its file.
func offset(t *testing.T, f func()) uint64 {
	t.Helper()
	at := uint64(reflect.ValueOf(f).Pointer())
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var first, last, from uint64
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s %x", &first, &last, &rights, &from); err != nil {
			t.Fatal(err)
		}
		if at >= first && at < last {
			return at - first + from
		}
	}
	t.Fatalf("no file has what is at %#x", at)
	return 0
}

// The symbols of a file are read once: functions are looked up in the symbols of a file that is gone.
func TestSymbolsAreReadOnce(t *testing.T) {
	probe, _ := counting(t, ebpf.Kprobe, ebpf.AttachNone, "", 0)
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, text, 0o700); err != nil {
		t.Fatal(err)
	}
	var files, others Executables
	if _, err := files.AttachUprobe(probe, file, "no_such_function", 0, 0); !errors.Is(err, link.ErrNoSymbol) {
		t.Error(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if _, err := files.AttachUretprobe(probe, file, "no_such_function", 0); !errors.Is(err, link.ErrNoSymbol) {
		t.Errorf("read again: %v", err)
	}
	if _, err := others.AttachUprobe(probe, file, "no_such_function", 0, 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is gone, and the error is %v", err)
	}
}

// Each kind refuses a target that does not exist with the target, the reason and a remedy.
func TestAttachRefused(t *testing.T) {
	raw, _ := counting(t, ebpf.RawTracepoint, ebpf.AttachNone, "", 0)
	_, err := AttachRawTracepoint(raw, "no_such_tracepoint")
	requireRefused(t, err, "the raw tracepoint no_such_tracepoint")
	probe, _ := counting(t, ebpf.Kprobe, ebpf.AttachNone, "", 0)
	var files Executables
	_, err = files.AttachUprobe(probe, "/proc/self/exe", "no_such_function", 0, 0)
	requireRefused(t, err, "the function no_such_function of /proc/self/exe")
	_, err = files.AttachUprobe(probe, "/no/such/file", "main.main", 0, 0)
	requireRefused(t, err, "/no/such/file")
	_, err = AttachKprobe(probe, "no_such_function", 0)
	requireRefused(t, err, "no_such_function by a kprobe")
	tracepoint, _ := counting(t, ebpf.TracePoint, ebpf.AttachNone, "", 0)
	_, err = AttachTracepoint(tracepoint, "no_such/tracepoint")
	requireRefused(t, err, "the tracepoint no_such/tracepoint")
	if _, err = AttachTracepoint(tracepoint, "task_rename"); err == nil || !strings.Contains(err.Error(), "group/name") {
		t.Errorf("a tracepoint without its group: %v", err)
	}
	_, err = AttachTimer(raw, time.Millisecond) // not of the type perf_event
	requireRefused(t, err, "a timer of 1ms")
	_, err = AttachTracing(raw, "counting")
	requireRefused(t, err, "the hook that it was loaded for")
	_, err = AttachLSM(raw, "counting")
	requireRefused(t, err, "its security hook")
}

// A program of a map of sockets runs for each message that a socket in it sends; a second one is refused, and the
// first has its place again after Close.
func TestAttachSockMap(t *testing.T) {
	p, m := counting(t, ebpf.SkMsg, ebpf.AttachSkMsgVerdict, "", 1)
	other, _ := counting(t, ebpf.SkMsg, ebpf.AttachSkMsgVerdict, "", 1)
	sockets, err := ebpf.NewMap(&ebpf.MapSpec{Name: "sockets", Type: ebpf.SockMap, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer sockets.Close()
	c, err := AttachSockMap(p, "counting", sockets, ebpf.AttachSkMsgVerdict)
	if err != nil {
		t.Fatal(err)
	}
	_, err = AttachSockMap(other, "counting", sockets, ebpf.AttachSkMsgVerdict)
	requireRefused(t, err, "sockets")
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := net.Dial("tcp4", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	file, err := conn.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := sockets.Put(uint32(0), uint32(file.Fd())); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("1")); err != nil || runs(t, m) != 1 {
		t.Errorf("after one message the program has run %d times: %v", runs(t, m), err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Errorf("again: %v", err)
	}
	if c, err = AttachSockMap(other, "counting", sockets, ebpf.AttachSkMsgVerdict); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	plain, err := ebpf.NewMap(&ebpf.MapSpec{Name: "plain", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	_, err = AttachSockMap(p, "counting", plain, ebpf.AttachSkMsgVerdict)
	requireRefused(t, err, "plain")
}

// A pinned link of a tracepoint is replaced, so that nothing is seen twice.
func TestPinTracing(t *testing.T) {
	p, _ := counting(t, ebpf.Tracing, ebpf.AttachTraceRawTp, "task_rename", 0)
	pins, err := os.MkdirTemp(DefaultPinRoot, "shunt-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(pins) })
	path := filepath.Join(pins, "link")
	for range 2 {
		l, err := PinTracing(p, "counting", path)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := PinTracing(p, "counting", filepath.Join(pins, "no", "folder")); err == nil {
		t.Error("pinned in a folder that does not exist")
	}
	if err := RemoveLink(path); err != nil {
		t.Error(err)
	}
}
