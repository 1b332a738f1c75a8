package agent

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/gate"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// denies is a policy with a rule of detection that denies a program, which is the test's own.
func denies(t *testing.T) (p policy.Policy, program string) {
	t.Helper()
	folder, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/bin/true")
	program = filepath.Join(folder, "true")
	if err = errors.Join(err, os.WriteFile(program, text, 0o755)); err != nil {
		t.Fatal(err)
	}
	p = detects(ruleOn(rule.Exec, "true", `process.program == "`+program+`"`, rule.Deny))
	p.Detection.Denials = []policy.Rule{{Name: "true", IsDetected: true, Paths: []string{program}, Deny: []string{policy.Exec}, Severity: "low", Mode: policy.Deny}}
	return p, program
}

// pins is a folder where the guard mounts its bpffs.
func pins(t *testing.T) string {
	folder := t.TempDir()
	t.Cleanup(func() {
		if err := unix.Unmount(folder, 0); err != nil {
			t.Error(err)
		}
	})
	return folder
}

// Where the kernel does not deny, a rule that denies is a fault, unless the policy allows that: then opens are denied as long as the agent is at work.
func TestDenialOfAKernelThatRefuses(t *testing.T) {
	var refused *protect.Refusal
	if !errors.As(protect.Enforces(), &refused) {
		t.Skip("this kernel lets BPF programs decide: TestDenials of protect is for it")
	}
	p, program := denies(t)
	a, err := Start(p, Options{Root: pins(t), Folder: filepath.Join(t.TempDir(), "guard"), Log: slog.New(slog.DiscardHandler), Say: t.Output(), Tell: func(Line) error { return nil }})
	if !errors.As(err, &refused) {
		t.Errorf("it is not refused: %v", err)
		if err == nil {
			_ = a.Close()
		}
	}
	p.IsDegraded = true
	var attempts []judge.Attempt
	s := newSandboxWith(t, p, func(of *sandbox, o *Options) {
		o.Root = pins(t)
		o.Tell = func(l Line) error {
			if l.Attempt != nil {
				attempts = append(attempts, *l.Attempt)
			}
			return of.tell(l)
		}
	})
	if s.agent.Refusal() == nil || s.agent.Gate() == nil {
		t.Error("it is not said that only opens are denied")
	}
	const tryIt = `if "$0"; then exit 3; fi` // by another process: see protect's tests
	s.do("/bin/sh", "-c", tryIt, program)
	e, err := Explain(s.folder, program, os.Getpid())
	if err != nil || e == nil || e.From != judge.FromOpens || !slices.ContainsFunc(e.Operations, func(a judge.Answer) bool { return a.Operation == policy.Exec && a.Verdict == judge.Denied }) {
		t.Errorf("the explanation is %+v, %v", e, err)
	}
	if _, err := Explain(s.folder, program, 1<<22+1); err == nil || !strings.Contains(err.Error(), "there is no process") {
		t.Error(err)
	}
	if err := s.agent.Apply(policy.Policy{IsDegraded: true, Detection: policy.Detection{}}); err != nil || s.agent.Gate() != nil {
		t.Errorf("without rules it goes on: %v", err)
	}
	if e, err := Explain(s.folder, program, os.Getpid()); e != nil || err != nil {
		t.Errorf("without rules, the explanation is %+v, %v", e, err)
	}
	if e, err := Explain(t.TempDir(), program, os.Getpid()); e != nil || err != nil {
		t.Errorf("without an agent, the explanation is %+v, %v", e, err)
	}
	s.do("/bin/sh", "-c", `"$0"`, program)
	if err := s.agent.Apply(p); err != nil {
		t.Fatal(err)
	}
	s.do("/bin/sh", "-c", tryIt, program)
	for until := time.Now().Add(time.Minute); s.status().Features[0].Opens.Denied < 1 && time.Now().Before(until); time.Sleep(time.Millisecond) { // it is counted after the answer
	}
	if f := s.status().Features[0]; !f.On || f.Why == "" || f.Failed() || f.Opens == nil || f.Opens.Denied != 1 || f.Opens.Objects != 1 {
		t.Errorf("%+v", f)
	}
	s.close() // which reports all remaining events
	if len(attempts) != 2 || attempts[1].Operation != policy.Exec || !attempts[1].Denied || attempts[1].Path != program || attempts[1].Severity != "low" {
		t.Errorf("%+v", attempts)
	}
	if note, err := gate.Look(s.folder); err != nil || note == nil || note.Killed || note.Ended.IsZero() {
		t.Errorf("after the end: %+v %v", note, err)
	}
	s.do("/bin/sh", "-c", `"$0"`, program)
}

// Protection that is switched off denies nothing, and the rule goes on reporting; a rule that is switched off neither
// denies nor reports.
func TestDenialThatIsSwitchedOff(t *testing.T) {
	p, _ := denies(t)
	without := func(names ...string) policy.Policy {
		var off []Off
		for _, name := range names {
			off = append(off, Off{Name: name})
		}
		return without(p, off)
	}
	if q := without(protectionName); len(q.Enforced()) > 0 || len(q.Detection.Active()) != 1 {
		t.Errorf("without protection: %+v", q)
	}
	for _, names := range [][]string{{detectionName}, {detectionName + "/true"}} {
		if q := without(names...); len(q.Enforced()) > 0 || len(q.Detection.Active()) > 0 {
			t.Errorf("without %v: %+v", names, q)
		}
	}
	if q := without(); len(q.Enforced()) != 1 {
		t.Errorf("%+v", q)
	}
}
