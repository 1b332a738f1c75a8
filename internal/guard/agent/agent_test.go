package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/lab"
)

// Ten times as many notes as the queue has room for cost no alert, and losses are counted exactly.
func TestNotesCannotEvictAlerts(t *testing.T) {
	q := newQueue()
	const alerts, notes = 128, 10 * waitMax
	for i := range notes {
		if i%(notes/alerts) == 0 {
			q.put(protectionName, Line{Attempt: &judge.Attempt{Denied: true}})
		}
		q.put(detectionName, Line{Found: &detect.Found{Action: rule.Log}})
	}
	ofAlerts, ofNotes := q.counts()
	protection, detection := q.heardOf(protectionName), q.heardOf(detectionName)
	if ofAlerts != (Told{alerts, 0}) || ofNotes != (Told{waitMax, notes - waitMax}) || protection != (heard{alerts, alerts}) || detection != (heard{notes, 0}) {
		t.Errorf("alerts %+v, notes %+v, protection %+v, detection %+v", ofAlerts, ofNotes, protection, detection)
	}
	for i := range alerts + waitMax {
		if l, is := q.take(); !is || l.IsAlert() != (i < alerts) {
			t.Fatalf("line %d: %v, %+v", i, is, l)
		}
	}
	if _, is := q.take(); is {
		t.Error("there is one more")
	}
	for range waitMax + 7 { // alerts are bounded, too, and their loss is said
		q.put(detectionName, Line{Found: &detect.Found{Action: rule.Kill}})
	}
	if of, _ := q.counts(); of != (Told{alerts + waitMax, 7}) {
		t.Errorf("%+v", of)
	}
}

// sandbox is an agent, and a cgroup whose processes it watches.
type sandbox struct {
	t       *testing.T
	agent   *Agent
	folder  string // of the agent
	journal string // of decoys
	group   *os.File
	mutex   sync.Mutex
	told    map[string]map[uint32]int // by rule and process: the number of reports
	fails   error                     // of the output

	switched []Switched
	closed   bool
}

// runs is a rule that finds a program with a name. Its file may have another name: many tools are one program.
func runs(name string, action string) rule.Rule {
	return ruleOn(rule.Exec, name, fmt.Sprintf("process.comm == %q", name), action)
}

func ruleOn(on, name, condition, action string) rule.Rule {
	r := rule.Rule{Name: name, On: []string{on}, If: condition, Severity: "low", Action: action, Tell: "{process.program}"}
	if _, err := r.Prepare(); err != nil {
		panic(err)
	}
	return r
}

// detects is a policy with these rules, and none of the built-in ones.
func detects(rules ...rule.Rule) policy.Policy {
	d := policy.Detection{IsOn: true, Rules: rules}
	for _, r := range rule.Builtin() {
		d.Disable = append(d.Disable, r.Name)
	}
	return policy.Policy{Detection: d}
}

func newSandbox(t *testing.T, p policy.Policy) *sandbox {
	t.Helper()
	return newSandboxWith(t, p, func(*sandbox, *Options) {})
}

// newSandboxWith has change do something before the agent starts.
func newSandboxWith(t *testing.T, p policy.Policy, change func(*sandbox, *Options)) *sandbox {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	folder, remove, err := lab.MakeCgroup(fmt.Sprintf("shunt-agent-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	s := &sandbox{t: t, folder: filepath.Join(t.TempDir(), "guard"), told: map[string]map[uint32]int{}}
	if s.group, err = os.Open(folder); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.group.Close() })
	s.journal = t.TempDir()
	o := Options{Root: t.TempDir(), Folder: s.folder, Decoys: s.journal, Cgroup: folder, Log: slog.New(slog.DiscardHandler), Say: t.Output(), Tell: s.tell}
	change(s, &o)
	s.agent, err = Start(p, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && !s.closed { // a limit of CPU would hold for the following tests, too
			_ = s.agent.Close()
		}
	})
	return s
}

func (s *sandbox) tell(l Line) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if l.Switched != nil {
		s.switched = append(s.switched, *l.Switched)
		return s.fails
	}
	if l.Attempt != nil {
		return s.fails
	}
	of := s.told[l.Found.Rule]
	if of == nil {
		of = map[uint32]int{}
		s.told[l.Found.Rule] = of
	}
	of[l.Found.Event.Process.PID]++
	return s.fails
}

// do runs a program of the machine in the cgroup, and returns its process id.
func (s *sandbox) do(name string, arguments ...string) uint32 {
	s.t.Helper()
	runtime.LockOSThread() // with whose thread it would end
	defer runtime.UnlockOSThread()
	c := exec.Command(name, arguments...)
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(s.group.Fd()), Pdeathsig: syscall.SIGKILL}
	if text, err := c.CombinedOutput(); err != nil {
		s.t.Fatalf("%s: %v: %s", name, err, text)
	}
	return uint32(c.Process.Pid)
}

func (s *sandbox) status() Status {
	s.t.Helper()
	status, err := Ask(s.folder)
	if err != nil || status == nil {
		s.t.Fatalf("ask: %+v, %v", status, err)
	}
	return *status
}

func (s *sandbox) close() Status {
	s.t.Helper()
	s.closed = true
	if err := s.agent.Close(); err != nil {
		s.t.Error(err)
	}
	return s.agent.Status()
}

// While rules and sensors are exchanged again and again, each process is found once: none is missed, none told twice.
func TestNothingIsMissedWhileRulesAreExchanged(t *testing.T) {
	one := detects(runs("true", rule.Alert))
	other := detects(ruleOn(rule.MemFD, "memory", "true", rule.Alert), runs("true", rule.Alert))
	s := newSandbox(t, one)
	ended := make(chan error, 1)
	go func() {
		for i := range 6 {
			p := other
			if i%2 == 1 {
				p = one
			}
			if err := s.agent.Apply(p); err != nil {
				ended <- err
				return
			}
		}
		close(ended)
	}()
	var pids []uint32
	for exchanging := true; exchanging; {
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			exchanging = false
		default:
		}
		pids = append(pids, s.do("true"))
	}
	status := s.close()
	t.Logf("%d processes; %+v", len(pids), status)
	if status.Reloads != 6 || status.Features[1].Lost != 0 || status.Features[1].Alerts != uint64(len(pids)) {
		t.Errorf("%d processes were begun: %+v", len(pids), status)
	}
	for _, pid := range pids {
		if n := s.told["true"][pid]; n != 1 {
			t.Errorf("process %d was told of %d times", pid, n)
		}
	}
}

// Detection is switched off and on while the agent works, a policy that cannot be applied changes nothing, and the
// status has the features that are on.
func TestFeaturesAreSwitched(t *testing.T) {
	s := newSandbox(t, detects(runs("true", rule.Alert)))
	if _, err := Start(detects(), Options{Folder: s.folder}); !errors.Is(err, protect.ErrListening) {
		t.Errorf("a second agent: %v", err)
	}
	s.do("true")
	if status := s.status(); status.PID != os.Getpid() || !status.IsOn() || status.Features[1].Rules != 1 || status.Features[0].On {
		t.Errorf("%+v", status)
	}
	// A path that does not exist cannot be protected, on any kernel.
	bad := detects()
	bad.Rules = []policy.Rule{{Name: "data", Paths: []string{"/nowhere/at/all"}, Deny: []string{policy.Write}, Mode: policy.Deny}}
	if err := s.agent.Apply(bad); err == nil {
		t.Error("a policy of what does not exist was applied")
	}
	s.do("true")
	if err := s.agent.Apply(policy.Policy{}); err != nil {
		t.Fatal(err)
	}
	s.do("true") // nobody looks
	if status := s.status(); status.IsOn() || status.Features[1].Alerts != 2 || !status.Features[1].Since.IsZero() {
		t.Errorf("after it was switched off: %+v", status)
	}
	if err := s.agent.Apply(detects(runs("true", rule.Alert))); err != nil {
		t.Fatal(err)
	}
	s.do("true")
	status := s.close()
	if status.Features[1].Alerts != 3 || len(s.told["true"]) != 3 || status.Alerts != (Told{3, 0}) {
		t.Errorf("%+v: %v", status, s.told)
	}
	if status, err := Ask(s.folder); err != nil || status != nil {
		t.Errorf("after the end: %+v, %v", status, err)
	}
}

// A storm of ten times as many events of one stream as its buffer has room for costs no alert of another stream, and
// losses are counted.
func TestStormCostsNoAlert(t *testing.T) {
	const opened, batches = 20_000, 20 // at some 4 KB each, of 8 MB
	file := filepath.Join(t.TempDir(), "noise")
	s := newSandbox(t, detects(ruleOn(rule.Open, "noise", fmt.Sprintf("file.path == %q", file), rule.Log), runs("true", rule.Alert)))
	begin := time.Now()
	// Each in a chain of its own: of a chain a rule tells once.
	s.do("sh", "-c", fmt.Sprintf("b=0; while [ $b -lt %d ]; do i=0; while [ $i -lt %d ]; do : > %s; i=$((i+1)); done; b=$((b+1)); done & "+
		"n=0; while [ $n -lt %d ]; do sh -c /bin/true; n=$((n+1)); done; wait", batches, opened/batches, file, batches))
	for range batches {
		s.do("true")
	}
	status := s.close()
	d := status.Features[1]
	t.Logf("%d events, lost %v in %v: %v", d.Events, d.LostBy, time.Since(begin).Round(time.Millisecond), len(s.told["true"]))
	if d.Events+d.Lost < opened || d.Lost != d.LostBy["often"] || d.LostBy["exec"] != 0 {
		t.Errorf("%d events were made, %d received, lost %v", opened, d.Events, d.LostBy)
	}
	if n := len(s.told["true"]); n < batches || status.Alerts.Lost != 0 {
		t.Errorf("%d processes were told of, want %d: %+v", n, batches, status)
	}
}

// An output that cannot be written to ends the agent, which says so.
func TestOutputThatFails(t *testing.T) {
	s := newSandbox(t, detects(runs("true", rule.Alert)))
	full := errors.New("no space left on device")
	s.mutex.Lock()
	s.fails = full
	s.mutex.Unlock()
	s.do("true")
	if err := s.agent.Wait(t.Context()); !errors.Is(err, full) {
		t.Error(err)
	}
	s.close()
}

func TestAskRefuses(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(socketIn(folder), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := Ask(folder); s != nil || err != nil && !strings.Contains(err.Error(), "ask the agent") {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := lock(socketIn(folder)); err == nil {
		t.Error("a file was taken for a folder")
	}
}

// Decoys are put out when the policy names them, taken over without a gap, and removed when the policy does not name
// them any more; the end leaves them.
func TestDecoysAreSwitched(t *testing.T) {
	data := t.TempDir()
	puts := func(folders ...string) policy.Policy {
		return policy.Policy{Decoys: []policy.Decoys{{Folders: folders, Action: rule.Stop}}}
	}
	if err := os.Mkdir(filepath.Join(data, "in"), 0o755); err != nil {
		t.Fatal(err)
	}
	s := newSandbox(t, puts(data))
	stand := func(want int) {
		t.Helper()
		all, err := decoy.List(s.journal)
		if err != nil || len(all) != want {
			t.Errorf("%d decoys, want %d, %v", len(all), want, err)
		}
		for _, d := range all {
			if d.State != decoy.Stands {
				t.Errorf("%+v", d)
			}
		}
		f := s.status().Features[2]
		if f.On != (want > 0) || f.On && (f.Decoys == nil || f.Decoys.Stand != want) {
			t.Errorf("%+v", f)
		}
	}
	stand(8)
	for range 3 {
		if err := s.agent.Apply(puts(data, filepath.Join(data, "in"))); err != nil {
			t.Fatal(err)
		}
		stand(16)
		if err := s.agent.Apply(puts(filepath.Join(data, "in"))); err != nil {
			t.Fatal(err)
		}
		stand(8)
	}
	if err := s.agent.Apply(puts(filepath.Join(data, "nowhere"))); err == nil {
		t.Error("decoys in a folder that does not exist")
	}
	stand(8)
	if err := s.agent.Apply(policy.Policy{}); err != nil {
		t.Fatal(err)
	}
	stand(0)
	if err := s.agent.Apply(puts(data)); err != nil {
		t.Fatal(err)
	}
	s.close()
	if all, err := decoy.List(s.journal); err != nil || len(all) != 8 {
		t.Errorf("after the end: %+v, %v", all, err)
	}
}

// A program that is stopped is reported as an alert, in the queue of alerts.
func TestDecoysAlert(t *testing.T) {
	data := t.TempDir()
	s := newSandbox(t, policy.Policy{Decoys: []policy.Decoys{{Folders: []string{data}, Action: rule.Kill}}})
	c := exec.Command("sh", "-c", "for f in *; do head -c 512 /dev/urandom > \"$f\"; done")
	c.Dir = data
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Run(); err == nil {
		t.Error("it was not ended")
	}
	status := s.close()
	if f := status.Features[2]; f.Alerts != 1 || status.Alerts.Told != 1 || len(s.told[decoy.RuleEncryptor]) != 1 || len(s.told[decoy.RuleTouched]) == 0 { // and perhaps an event that comes after its end
		t.Errorf("%+v: %v", status, s.told)
	}
}
