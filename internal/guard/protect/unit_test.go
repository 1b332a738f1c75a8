package protect

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

func TestRefusalSaysWhatToDo(t *testing.T) {
	eperm := fmt.Errorf("load program: %w", unix.EPERM)
	for _, c := range []struct {
		modules modules
		err     error
		isRoot  bool
		want    string // empty: it is no Refusal
	}{
		{modules{"lockdown,yama", true}, eperm, true, "Boot with lsm=lockdown,yama,bpf on"},
		{modules{"", true}, eperm, true, "Boot with lsm=bpf on"},
		{modules{"lockdown,bpf", true}, eperm, true, "Boot a kernel that allows BPF trampolines"},
		{modules{}, eperm, true, "mount -t securityfs"},
		{modules{}, eperm, false, "Run it as root"},
		{modules{"bpf", true}, unix.ENOMEM, true, ""},
	} {
		err := c.modules.refusal(c.err, c.isRoot)
		var refused *Refusal
		if is := errors.As(err, &refused); is != (c.want != "") || is && !strings.Contains(refused.Remedy, c.want) {
			t.Errorf("%+v: %v", c, err)
		}
		if !errors.Is(err, c.err) {
			t.Errorf("%v hides %v", err, c.err)
		}
	}
	if r := (modules{"yama,bpf", true}).inactive(); r != nil {
		t.Error(r)
	}
	if r := (modules{"yama", true}).inactive(); r == nil {
		t.Error("a kernel that runs no such program is not refused")
	}
}

func TestMasks(t *testing.T) {
	masks := masksOf([]policy.Rule{
		{Paths: []string{"/a"}, Deny: []string{policy.Write, policy.Mount}, Mode: policy.Deny},
		{Paths: []string{"/a"}, Deny: []string{policy.Write}, Mode: policy.Audit},
		{Paths: []string{"/a"}, Deny: []string{policy.Chmod}, Mode: policy.Deny},
		{Program: "/p", Deny: []string{policy.Kill}, Mode: policy.Deny},
		{Program: "/p", Deny: []string{policy.Memory}, Mode: policy.Audit},
	})
	for op, want := range map[guardGuardOp]guardGuardMasks{
		guardGuardOpGUARD_WRITE: {Denied: 1, Audited: 2}, guardGuardOpGUARD_MOUNT: {Denied: 1}, guardGuardOpGUARD_CHMOD: {Denied: 4},
		guardGuardOpGUARD_LINK: {}, guardGuardOpGUARD_PROGRAM: {Denied: 5, Audited: 2}, guardGuardOpGUARD_TRACE: {Denied: 5, Audited: 2 | 16},
		guardGuardOpGUARD_KILL: {Denied: 8},
	} {
		if masks[op] != want {
			t.Errorf("%s: %+v, want %+v", wordOf(op), masks[op], want)
		}
	}
	masks = masksOf([]policy.Rule{
		{IsDetected: true, Paths: []string{"/a"}, Deny: []string{policy.Read}, By: []string{"/p"}, Mode: policy.Deny},
		{IsDetected: true, Deny: []string{policy.BPF, policy.AnyTrace}, Trust: policy.Trust{Programs: policy.Programs("/q")}, Mode: policy.Deny},
		{IsUpdaters: true, Trust: policy.Trust{Programs: policy.Programs("/u")}, Mode: policy.Audit},
	})
	for op, want := range map[guardGuardOp]guardGuardMasks{
		guardGuardOpGUARD_READ: {Denied: 1, Only: 1}, guardGuardOpGUARD_BPF: {Denied: 2}, guardGuardOpGUARD_TRACE_ANY: {Denied: 2},
		guardGuardOpGUARD_PROGRAM: {Denied: 2, Audited: 4}, guardGuardOpGUARD_TRACE: {Denied: 2, Audited: 4}, guardGuardOpGUARD_KILL: {},
	} {
		if masks[op] != want {
			t.Errorf("of rules of detection, %s: %+v, want %+v", wordOf(op), masks[op], want)
		}
	}
	others := []string{policy.Read, policy.Exec, policy.AnyMount, policy.Module, policy.BPF, policy.AnyTrace, policy.Move}
	if known := len(policy.Operations) + len(policy.ProcessOperations) + len(others); len(operations) != known {
		t.Errorf("%d operations have a number, and a policy knows %d", len(operations), known)
	}
	if got := wordOf(guardGuardOpGUARD_TRACE); got != "trace" {
		t.Error(got)
	}
	if got := wordOf(99); got != "operation-99" {
		t.Error(got)
	}
}

func TestPathOf(t *testing.T) {
	names := func(text string) (raw []int8) {
		for _, c := range []byte(text) {
			raw = append(raw, int8(c))
		}
		return raw
	}
	points := map[uint32]string{1: "/", 2: "/srv"}
	for _, c := range []struct {
		device      uint32
		names, want string
	}{
		{1, "f\x00data\x00", "/data/f"}, {2, "f\x00data\x00", "/srv/data/f"}, {1, "", "/"}, {2, "", "/srv"}, {8<<20 | 1, "f\x00", "[8:1]/f"}, {1, "broken", "/broken"},
	} {
		if got := pathOf(points, c.device, names(c.names)); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

func TestMapped(t *testing.T) {
	file := inode{unix.Mkdev(8, 1), 42}
	for line, want := range map[string]struct {
		at inode
		access
	}{
		"7f00-7f01 rw-s 00000000 08:01 42   /srv/f": {file, access{read: true, write: true, shared: true}},
		"7f00-7f01 rw-p 00000000 08:01 42   /srv/f": {file, access{read: true}},
		"7f00-7f01 --xp 00000000 08:01 42   /srv/f": {file, access{read: true}},
		"7f00-7f01 -w-s 00000000 08:01 42   /srv/f": {file, access{read: true, write: true, shared: true}},
		"7f00-7f01 ---s 00000000 08:01 42   /srv/f": {file, access{shared: true}},
		"7f00-7f01 rw-p 00000000 00:00 0":           {},
		"7f00-7f01 rw-s 00000000 zz:01 42":          {},
		"7f00-7f01 rw-s 00000000 0801 42":           {},
		"":                                          {},
	} {
		if at, can := mapped(line); at != want.at || can != want.access {
			t.Errorf("%q: %+v %+v", line, at, can)
		}
	}
}

func TestShortAttemptIsRefused(t *testing.T) {
	if _, err := newNames(nil).attempt(event.Event{Payload: []byte("short")}); err == nil || !strings.Contains(err.Error(), "another version of shunt") {
		t.Error(err)
	}
}

// TestAttemptIsPrintable: an intruder chooses names, and must not reach the terminal with them.
func TestAttemptIsPrintable(t *testing.T) {
	a := Attempt{Denied: true, Operation: "write", Path: "/srv/\x1b[2Jf", Program: "/tmp/\x07p", PID: 7, Comm: "c\nd", Rules: []string{"data"}}
	if got, want := a.String(), "00:00:00.000 denied write of /srv/?[2Jf by /tmp/?p (pid 7, c?d): rule data"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestEnvironmentThatLoadsCode reads this process's own environment, and that of a process that was started with a
// variable that loads code.
func TestEnvironmentThatLoadsCode(t *testing.T) {
	for variable, want := range map[string]bool{"": true, "A=LD_PRELOAD": true, "LD_PRELOAD=": false, "PYTHONPATH=/x": false, "PYTHONUNBUFFERED=1": true, "BASH_ENV=x": false} {
		cmd := exec.Command("/bin/cat")
		cmd.Env = slices.DeleteFunc([]string{"B=1", variable}, func(string) bool { return variable == "" }) // none at all
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		id := cmd.Process.Pid
		// Linux 6.1 closes the files of the old program, for which Start waits, before the new one is in its place.
		for own := executable(os.Getpid()); executable(id) == own; {
			time.Sleep(time.Millisecond)
		}
		if got := plainEnvironment(id); got != want {
			t.Errorf("%s: plain %v, want %v", variable, got, want)
		}
		if parent, process, ok := origin(id); !ok || parent != os.Getpid() || process.Id != uint64(id) || process.Start == 0 || nameless(id) {
			t.Errorf("parent %d, process %+v, nameless %v", parent, process, nameless(id))
		}
		if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
			t.Error(err)
		}
	}
	if _, _, ok := origin(0); ok || plainEnvironment(0) || !nameless(0) {
		t.Error("a process that there is not is trusted")
	}
}

func TestProgramsAreExamined(t *testing.T) {
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256([]byte("program"))
	if err := examine(policy.Program{Path: file, SHA256: hex.EncodeToString(digest[:])}, trustOfScripts); err != nil {
		t.Error(err)
	}
	for want, p := range map[string]policy.Program{"is not the program that the policy trusts: its SHA-256 is " + hex.EncodeToString(digest[:]): {Path: file, SHA256: "00"},
		"is not a regular file": {Path: t.TempDir()}, "no such file": {Path: file + "x"}} {
		if err := examine(p, trustOfScripts); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := examine(policy.Program{Path: file}, trustOfScripts); err == nil || !strings.Contains(err.Error(), "is a script") {
		t.Error(err)
	}
	p := policy.Policy{Rules: []policy.Rule{{Name: "a", Program: file, At: "guard.yaml:3:7"}, {Name: "b", Paths: []string{"/srv"}, Trust: policy.Trust{Programs: policy.Programs(file, file+"x")}},
		{Name: "c", Program: "/proc/self/exe"}}}
	scripts := Scripts(p)
	if len(scripts) != 2 || scripts[0] != (Script{"guard.yaml:3:7", "rule \"a\": " + file + " is a script, and the program that runs is its interpreter, which opens the script by its name", processOfScript}) ||
		scripts[1].Remedy != trustOfScripts {
		t.Errorf("%v", scripts)
	}
	l := &labeler{marks: map[inode]marks{}}
	if err := l.guarded(1, p.Rules[0]); !errors.Is(err, errScript) || !strings.Contains(err.Error(), "pid-file") {
		t.Errorf("a script as the program of processes: %v", err)
	}
	all := interpreters(nil)
	shell, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil || !slices.Contains(all, shell) || slices.Contains(interpreters([]string{shell}), shell) {
		t.Errorf("the shell %s of %v: %v", shell, all, err)
	}
}

func TestOtherNamespacesAreRefused(t *testing.T) {
	if err := firstNamespaces(t.TempDir()); err == nil || !strings.Contains(err.Error(), "identify the pid namespace") {
		t.Error(err)
	}
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "pid"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := firstNamespaces(folder); err == nil || !strings.Contains(err.Error(), "not the machine's initial pid namespace") {
		t.Error(err)
	}
}

// TestEndedProcessesAreForgotten has one entry of this process, one of a process that does not exist, and one of a
// process that had this one's number before.
func TestEndedProcessesAreForgotten(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	spec, err := loadGuard()
	if err != nil {
		t.Fatal(err)
	}
	maps := map[string]*ebpf.Map{}
	for _, name := range []string{guardMapShG_tasks, guardMapShG_given0, guardMapShG_given1} {
		if maps[name], err = ebpf.NewMap(spec.Maps[name]); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = maps[name].Close() })
	}
	_, own, ok := origin(os.Getpid())
	if !ok {
		t.Fatal("this process is not in /proc")
	}
	earlier, never := own, guardGuardProcess{Id: 1 << 40, Start: own.Start}
	earlier.Start--
	for _, process := range []guardGuardProcess{own, earlier, never} {
		if err := errors.Join(maps[guardMapShG_tasks].Put(&process, &guardGuardTrust{Trusts: [2]uint64{1, 2}}),
			maps[guardMapShG_given0].Put(&process, &guardGuardGiven{Trusts: 4}), maps[guardMapShG_given1].Put(&process, &guardGuardGiven{Trusts: 8})); err != nil {
			t.Fatal(err)
		}
	}
	if err := forgetEnded(maps); err != nil {
		t.Fatal(err)
	}
	for name, m := range maps {
		var value []byte
		for _, process := range []guardGuardProcess{earlier, never} {
			if err := m.Lookup(&process, &value); !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Errorf("%s still has %+v: %v", name, process, err)
			}
		}
	}
	p, err := look(os.Getpid(), maps)
	if err != nil || p == nil {
		t.Fatal(p, err)
	}
	if p.kernel.Trusts != [2]uint64{1, 2} || p.given[0].Trusts != 4 || p.given[1].Trusts != 8 || p.parent != os.Getppid() {
		t.Errorf("this process has %+v", p)
	}
}

// A condition of detection is about one file: a folder in its place would deny everything below it.
func TestFoldersOfDetectionAreRefused(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		rule    policy.Rule
		refused bool
	}{
		{policy.Rule{Name: "a", IsDetected: true, Paths: []string{dir}}, true},
		{policy.Rule{Name: "a", IsDetected: true, Paths: []string{file}, By: []string{dir}}, true},
		{policy.Rule{Name: "a", IsDetected: true, Paths: []string{file}, By: []string{file}}, false},
		{policy.Rule{Name: "a", Paths: []string{dir}}, false},
	} {
		if err := onlyFiles(c.rule); (err != nil) != c.refused || c.refused && !strings.Contains(err.Error(), dir+" is a folder") {
			t.Errorf("%+v: %v", c.rule, err)
		}
	}
}
