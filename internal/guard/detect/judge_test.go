package detect

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
)

// module is the event of loading a kernel module. Machines whose kernel has none cannot have one loaded.
func module(name string) *rule.Event {
	return &rule.Event{Type: rule.Module, Path: "rootkit", Process: rule.Process{PID: 2, Program: "/usr/bin/" + name}}
}

func TestModuleRule(t *testing.T) {
	found := func(e *rule.Event) (names []string) {
		for _, v := range newJudge(rule.Builtin()).of(e) {
			names = append(names, v.rule.Name)
		}
		return names
	}
	if names := found(module("insmod")); len(names) != 1 || names[0] != "module-load" {
		t.Errorf("insmod: %v", names)
	}
	if names := found(module("systemd-udevd")); len(names) != 0 {
		t.Errorf("systemd-udevd: %v", names)
	}
}

func TestAChainIsToldOnce(t *testing.T) {
	r := rule.Rule{Name: "all", On: []string{rule.Exec}, If: "true"}
	if _, err := r.Prepare(); err != nil {
		t.Fatal(err)
	}
	j := newJudge([]rule.Rule{r})
	begin := time.Unix(1000, 0)
	parent := rule.Process{PID: 10, StartNs: 1}
	for i, c := range []struct {
		process   rule.Process
		ancestors []rule.Process
		after     time.Duration
		isNew     bool
	}{
		{process: parent, isNew: true},
		{process: parent},
		{process: rule.Process{PID: 11, StartNs: 2}, ancestors: []rule.Process{{PID: 12}, parent}},
		{process: rule.Process{PID: 10, StartNs: 5}, isNew: true}, // the number again, of another process
		{process: rule.Process{PID: 13, StartNs: 6}, ancestors: []rule.Process{{PID: 1}}, isNew: true},
		{process: parent, after: chainLasts, isNew: true},
	} {
		e := &rule.Event{Type: rule.Exec, Time: begin.Add(c.after), Process: c.process, Ancestors: c.ancestors}
		if v := j.of(e); len(v) != 1 || v[0].isNew != c.isNew {
			t.Errorf("case %d: %+v", i, v)
		}
	}
	if j.again != 2 {
		t.Errorf("%d of chains that were told of", j.again)
	}
	for pid := range uint32(chainsMax + 10) { // bounded
		j.of(&rule.Event{Type: rule.Exec, Process: rule.Process{PID: pid + 100}})
	}
	if len(j.chains[0]) > chainsMax {
		t.Errorf("%d processes are remembered", len(j.chains[0]))
	}
}

// Another process that has the number by now is left alone, and so is the first one.
func TestActLeavesOthersAlone(t *testing.T) {
	c := exec.Command("/proc/self/exe")
	c.Env = []string{doing + "=wait"}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	pid := uint32(c.Process.Pid)
	start, err := startOf(pid)
	if err != nil {
		t.Fatal(err)
	}
	if done := act(rule.Kill, rule.Process{PID: pid, StartNs: (start + 1) * process.TickNs}); done != "not killed: it has ended already" {
		t.Error(done)
	}
	if done := act(rule.Alert, rule.Process{PID: pid, StartNs: start * process.TickNs}); done != "" {
		t.Error(done)
	}
	if done := act(rule.Kill, rule.Process{PID: 1, StartNs: 0}); done != "not killed: it is the machine's first process" {
		t.Error(done)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("the process was not left alone: %v", err)
	}
	if done := act(rule.Kill, rule.Process{PID: pid, StartNs: start * process.TickNs}); done != "not killed: it has ended already" {
		t.Error(done)
	}
}

func TestContainerOf(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	for path, want := range map[string]string{"/": "", "/system.slice/ssh.service": "", "/docker/" + id: id, "/system.slice/docker-" + id + ".scope": id,
		"/kubepods/burstable/podx/cri-containerd-" + id + ".scope/child": id, "/docker/" + id[:63] + "g": ""} {
		if got := containerOf(path); got != want {
			t.Errorf("%s: %q", path, got)
		}
	}
}

func TestScopes(t *testing.T) {
	if s, err := scopeOf(""); err != nil || s != (scope{}) {
		t.Errorf("all processes: %+v, %v", s, err)
	}
	for folder, want := range map[string]string{"/proc": "/proc is no folder of cgroup v2", "/nowhere": "find the cgroup"} {
		if _, err := scopeOf(folder); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", folder, err)
		}
	}
}

func encoded(raw detectDetectEvent) []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(&raw)), unsafe.Sizeof(raw))...)
}

func TestDecodeRefuses(t *testing.T) {
	good := encoded(detectDetectEvent{Type: uint32(detectDetectTypeDETECT_EXEC)})
	for name, payload := range map[string][]byte{"short": good[1:], "another type": encoded(detectDetectEvent{Type: 99})} {
		if e, err := new(decoder).decode(event.Event{Payload: payload}); err == nil || !strings.Contains(err.Error(), "another version") {
			t.Errorf("%s: %+v, %v", name, e, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for kind := range typeWords {
		f.Add(encoded(detectDetectEvent{Type: uint32(kind), ProgramSize: 1 << 31, ObjectSize: 7, ArgsSize: 1 << 20, Fds: [4]detectDetectFd{{Kind: 99, RemotePort: 1}}}))
	}
	all := rule.Builtin()
	f.Fuzz(func(t *testing.T, payload []byte) {
		e, err := new(decoder).decode(event.Event{Payload: payload})
		if err != nil {
			return
		}
		if e.Type == "" || len(e.Ancestors) > 8 {
			t.Fatalf("%+v", e)
		}
		for _, v := range newJudge(all).of(e) {
			_ = found(v, e).String()
		}
	})
}

// A cgroup of the first hierarchy, or none, is refused before anything is attached.
func TestOpenRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	if w, err := Open(Options{Rules: rule.Builtin(), Cgroup: "/proc"}); err == nil {
		t.Error("watches", w.Close())
	}
}

// Without a rule that needs other sensors, only the sensors that are always needed are attached.
func TestSensorsAreThoseThatRulesNeed(t *testing.T) {
	count := func(o Options) int { return len(sensorsFor(o)) }
	if n := count(Options{}); n != 2 {
		t.Errorf("%d without a rule", n)
	}
	if n := count(Options{Rules: []rule.Rule{{On: []string{rule.MemFD}}}}); n != 3 {
		t.Errorf("%d for memfd", n)
	}
	if n := count(Options{All: true}); n != len(sources) {
		t.Errorf("%d for all", n)
	}
}
