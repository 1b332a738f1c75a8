package protect

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/judge"
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

// Every operation that a rule can forbid has a number, and every number an operation. Events have words of the policy's language.
func TestOperationsHaveNumbers(t *testing.T) {
	others := []string{policy.Read, policy.Exec, policy.AnyMount, policy.Module, policy.BPF, policy.AnyTrace, policy.Move}
	masks := judge.MasksOf([]policy.Rule{{Paths: []string{"/a"}, Deny: slices.Concat(policy.Operations, policy.ProcessOperations, others), Mode: policy.Deny}})
	for operation := range masks {
		if _, is := operations[operation]; !is {
			t.Errorf("%s has no number", operation)
		}
	}
	if len(operations) != len(masks) || len(operations) != int(guardGuardOpGUARD_OP_COUNT) {
		t.Errorf("%d operations have a number, a policy knows %d and the kernel's programs %d", len(operations), len(masks), guardGuardOpGUARD_OP_COUNT)
	}
	for op, want := range map[guardGuardOp]string{guardGuardOpGUARD_TRACE: "trace", guardGuardOpGUARD_TRACE_ANY: "trace", guardGuardOpGUARD_MOUNT_ANY: "mount", guardGuardOpGUARD_PROGRAM: "write-program", 99: "operation-99"} {
		if got := wordOf(op); got != want {
			t.Errorf("%d: %s, want %s", op, got, want)
		}
	}
}

// A scope is the same after the way into the kernel and back.
func TestScopesInTheKernel(t *testing.T) {
	for _, s := range []judge.Scope{{}, {HasUser: true}, {HasUser: true, User: 4242, Cgroup: "/a"}, {Cgroup: "/system.slice/app.service"}} {
		if got := narrowOf(s).scope(); got != s {
			t.Errorf("%+v, want %+v", got, s)
		}
	}
	if got := narrowOf(judge.Scope{Cgroup: "/a/bc"}); got.Depth != 2 || got.HasUser != 0 || event.Text(got.Names[1][:]) != "bc" {
		t.Errorf("%+v", got)
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
	file := judge.Inode{Device: unix.Mkdev(8, 1), Number: 42}
	for line, want := range map[string]struct {
		at judge.Inode
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
	self := judge.Look(os.Getpid())
	if self == nil {
		t.Fatal("this process is not in /proc")
	}
	own := guardGuardProcess{Id: uint64(os.Getpid()), Start: self.Start}
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
	if p.kernel.Trusts != [2]uint64{1, 2} || p.given[0].Trusts != 4 || p.given[1].Trusts != 8 || p.Parent != os.Getppid() {
		t.Errorf("this process has %+v", p)
	}
}
