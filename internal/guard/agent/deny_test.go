package agent

import (
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// denies is a policy with a rule of detection that denies a program.
func denies(t *testing.T) (p policy.Policy, program string) {
	t.Helper()
	program, err := filepath.EvalSymlinks("/bin/true")
	if err != nil {
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

// Where the kernel does not deny, a rule that denies is a fault, unless the policy allows that: then each alert says that nothing was denied.
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
	var told []detect.Found
	s := newSandboxWith(t, p, func(of *sandbox, o *Options) {
		o.Root = pins(t)
		o.Tell = func(l Line) error {
			if l.Found != nil && l.IsAlert() {
				told = append(told, *l.Found)
			}
			return of.tell(l)
		}
	})
	s.do(program)
	if s.agent.Refusal() == nil {
		t.Error("it is not said that nothing is enforced")
	}
	s.close() // which tells all that is there
	if len(told) != 1 || told[0].Rule != "true" || !strings.HasPrefix(told[0].Done, "NOT denied") {
		t.Errorf("%+v", told)
	}
}

// Protection that is switched off denies nothing, and the rule goes on telling; a rule that is switched off is neither denied nor told.
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
