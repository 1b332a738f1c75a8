package sensor

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event/storm"
)

var (
	byFunction   = Way{Kind: Fentry, Target: "__set_task_comm", Program: "sh_rename_fn"}
	byProbe      = Way{Kind: Kprobe, Target: "__set_task_comm", Program: "sh_rename_kp"}
	byTyped      = Way{Kind: TPBTF, Target: "task_rename", Program: "sh_rename_btf"}
	byRaw        = Way{Kind: RawTP, Target: "task_rename", Program: "sh_rename_raw", Loses: "types"}
	byTracepoint = Way{Kind: Tracepoint, Target: "task/task_rename", Program: "sh_rename_tp"}
	byNothing    = Way{Kind: RawTP, Target: "no_such_tracepoint", Program: "sh_rename_raw"}
)

func open(t *testing.T, without string, ways ...Way) (*Set, error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	spec, err := storm.LoadStorm()
	if err != nil {
		t.Fatal(err)
	}
	set, err := Open(spec, []Sensor{{Name: "renames", Ways: ways, Without: without}},
		Options{Constants: map[string]any{"only_tgid": uint32(os.Getpid())}})
	if set != nil {
		t.Cleanup(func() {
			if err := set.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return set, err
}

// rename changes the name of a thread so many times, and restores it.
func rename(t *testing.T, times int) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before [16]byte
	if err := unix.Prctl(unix.PR_GET_NAME, uintptr(unsafe.Pointer(&before)), 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	for range times {
		if err := unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&before)), 0, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
}

func counted(t *testing.T, set *Set) (count uint64) {
	t.Helper()
	if err := set.Maps["sh_renames"].Lookup(uint32(0), &count); err != nil {
		t.Fatal(err)
	}
	return count
}

// TestTheFirstWayThatWorksIsKept holds on every kernel: the attached way counts exactly and once, and each way
// before it was refused with a reason.
func TestTheFirstWayThatWorksIsKept(t *testing.T) {
	ways := []Way{byNothing, byFunction, byProbe, byTyped, byRaw, byTracepoint}
	set, err := open(t, "", ways...)
	if err != nil {
		t.Fatal(err)
	}
	result := set.Results[0]
	t.Log(result)
	if result.Got == nil || len(result.Refused) == 0 || *result.Got != ways[len(result.Refused)] {
		t.Fatalf("got %v after %d refusals", result.Got, len(result.Refused))
	}
	for _, f := range result.Refused {
		if f.Reason == "" || strings.Contains(f.Reason, "\n") {
			t.Errorf("%v was refused with the reason %q", f.Way, f.Reason)
		}
	}
	if !strings.Contains(result.String(), "refused: raw_tp no_such_tracepoint (") {
		t.Errorf("the line does not say what was refused: %v", result)
	}
	rename(t, 5)
	if n := counted(t, set); n != 5 {
		t.Errorf("%v counted %d of 5", result.Got, n)
	}
	if missed, err := set.Missed(); err != nil || len(missed) != 1 || missed["renames"] != 0 {
		t.Errorf("missed: %v, %v; renames are made by this process alone, one after the other", missed, err)
	}
	if err := set.Detach(); err != nil {
		t.Fatal(err)
	}
	rename(t, 5)
	if n := counted(t, set); n != 5 {
		t.Errorf("a detached sensor counted: %d", n)
	}
}

// TestSensorThatIsNotNeeded is attached only if none of the programs in its Unless is.
func TestSensorThatIsNotNeeded(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	for _, test := range []struct {
		unless []string
		want   uint64 // of each rename
	}{{nil, 2}, {[]string{"sh_rename_tp", byTyped.Program}, 2}, {[]string{"sh_rename_tp", byRaw.Program}, 1}} {
		spec, err := storm.LoadStorm()
		if err != nil {
			t.Fatal(err)
		}
		set, err := Open(spec, []Sensor{{Name: "first", Ways: []Way{byRaw}}, {Name: "second", Ways: []Way{byTyped}, Unless: test.unless}},
			Options{Constants: map[string]any{"only_tgid": uint32(os.Getpid())}})
		if err != nil {
			t.Fatal(err)
		}
		rename(t, 3)
		if n := counted(t, set); n != 3*test.want || uint64(len(set.Results)) != test.want || set.Holds("second") != (test.want == 2) {
			t.Errorf("unless %v: counted %d, and %v", test.unless, n, set.Results)
		}
		if err := set.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestIteratorRunsOnceAtOpen counts the threads of this process, which the test keeps.
func TestIteratorRunsOnceAtOpen(t *testing.T) {
	const held = 5
	var all sync.WaitGroup
	ready, end := make(chan struct{}), make(chan struct{})
	for range held {
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			ready <- struct{}{}
			<-end
		})
		<-ready
	}
	defer all.Wait()
	defer close(end)
	threads := func() uint64 {
		all, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return uint64(len(all))
	}
	before := threads()
	set, err := open(t, "", Way{Kind: Iter, Target: "task", Program: "sh_threads"})
	if err != nil {
		t.Fatal(err)
	}
	// The Go runtime may start a thread at any time, and ends none.
	if n := counted(t, set); n < before || n > threads() || before < held {
		t.Errorf("counted %d of %d threads", n, before)
	}
	n := counted(t, set)
	if rename(t, 5); counted(t, set) != n {
		t.Error("the program ran after Open")
	}
}

func TestEachWayCountsOrSaysWhyNot(t *testing.T) {
	worked := 0
	for _, way := range []Way{byFunction, byProbe, byTyped, byRaw, byTracepoint} {
		set, err := open(t, "nothing is counted", way)
		if err != nil {
			t.Fatal(err)
		}
		t.Log(set.Results[0])
		if set.Results[0].Got == nil {
			if way == byTyped || way == byRaw {
				t.Errorf("every supported kernel has %v: %v", way, set.Results[0])
			}
			continue
		}
		worked++
		rename(t, 3)
		if n := counted(t, set); n != 3 {
			t.Errorf("%v counted %d of 3", way, n)
		}
	}
	if worked < 2 {
		t.Errorf("only %d ways worked", worked)
	}
}

func TestWithoutAWay(t *testing.T) {
	set, err := open(t, "", byNothing)
	if !errors.Is(err, ErrNoWay) || set == nil || !strings.Contains(err.Error(), "no_such_tracepoint") {
		t.Errorf("got %v, %v; want ErrNoWay with the refusal, and what there is", set, err)
	}
	set, err = open(t, "renames are not counted", byNothing)
	if err != nil || set.Results[0].Got != nil || !strings.Contains(set.Results[0].String(), "renames are not counted") {
		t.Errorf("a sensor that is not needed: %v", err)
	}
}

func TestOpenRefusesConstantsThatAreNotThere(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	spec, err := storm.LoadStorm()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(spec, nil, Options{Constants: map[string]any{"nosuch": uint32(1)}}); err == nil || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("got %v", err)
	}
}

func TestComplaint(t *testing.T) {
	log := []string{"0: R1=ctx()", "R1 invalid mem access 'trusted_ptr_or_null_'", "processed 4 insns (limit 1000000)", ""}
	err := &ebpf.VerifierError{Cause: syscall.EACCES, Log: log}
	if got := reason(byTyped, err); got != "permission denied: R1 invalid mem access 'trusted_ptr_or_null_'" {
		t.Errorf("got %q", got)
	}
	if got := reason(byFunction, syscall.EPERM); !strings.Contains(got, "trampolines") {
		t.Errorf("got %q", got)
	}
}

// TestWithoutPrivileges runs itself as another user, and expects a refusal in plain words.
func TestWithoutPrivileges(t *testing.T) {
	if os.Getenv("SHUNT_TEST_UNPRIVILEGED") != "" {
		spec, err := storm.LoadStorm()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Open(spec, nil, Options{}); !errors.Is(err, ErrPrivilege) {
			t.Fatalf("got %v, want ErrPrivilege", err)
		}
		return
	}
	self, err := os.Open("/proc/self/exe") // the folder of the test's binary may be closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	command := exec.Command("/proc/self/fd/3", "-test.run", "^TestWithoutPrivileges$", "-test.v")
	command.ExtraFiles = []*os.File{self}
	command.Dir = "/"
	command.Env = append(os.Environ(), "SHUNT_TEST_UNPRIVILEGED=1")
	if os.Geteuid() == 0 {
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	out, err := command.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestWithoutPrivileges") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestLockdownIsKnown(t *testing.T) {
	file := t.TempDir() + "/lockdown"
	for text, want := range map[string]bool{"none [integrity] confidentiality\n": false, "none integrity [confidentiality]\n": true} {
		write(t, file, text)
		if got := isConfidential(file); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	if isConfidential(file + "/x") {
		t.Error("a file that is not there says that the kernel is locked down")
	}
}
