package protect

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// The kernel's answer is that of the explanation before, for each operation: of trusted programs and others, of programs that ran before the
// policy and programs that begin after it, and when labels have left memory.
func TestExplainsAsTheKernelDecides(t *testing.T) {
	b := newBench(t)
	var tries []struct{ row, operation, path, program, dir, environment string }
	var dirs []string
	for i, try := range []struct{ row, operation, path string }{
		{"open-write", policy.Write, "prot/f"}, {"hard-link-from-before", policy.Write, "out/l"}, {"create", policy.Create, "prot/new"}, {"unlink", policy.Delete, "prot/f"},
		{"rename-within", policy.Rename, "prot/f"}, {"link-out", policy.Link, "prot/f"}, {"chmod", policy.Chmod, "prot/sub/../f"}, {"mount-over-folder-above", policy.Mount, ""},
	} {
		for j, program := range []string{b.Trusted, b.Other, b.Trusted} {
			environment := ""
			if j == 2 {
				environment = "LD_PRELOAD=/nowhere.so"
			}
			dir := b.Folder(fmt.Sprintf("%d-%d", i, j))
			dirs = append(dirs, dir)
			tries = append(tries, struct{ row, operation, path, program, dir, environment string }{try.row, try.operation, try.path, program, dir, environment})
		}
	}
	old, err := trial.Begin(b.Trusted, "wait", b.Root)
	if err != nil {
		t.Fatal(err)
	}
	defer old.End() //nolint:errcheck // it only waits
	if e, err := Explain(kernel.DefaultPinRoot, b.Root, 1); e != nil || err != nil {
		t.Errorf("before there is protection: %+v, %v", e, err)
	}
	b.start(rule(b, policy.Deny, dirs...))
	b.Evict()
	ask := func(path string, pid int) *judge.Explanation {
		t.Helper()
		e, err := Explain(kernel.DefaultPinRoot, path, pid)
		if err != nil || e == nil || e.From != judge.FromKernel || !e.Enforced {
			t.Fatalf("%+v, %v", e, err)
		}
		return e
	}
	denials := 0
	for _, try := range tries {
		h, err := trial.Begin(try.program, try.row, try.dir, try.environment)
		if err != nil {
			t.Fatal(err)
		}
		e := ask(filepath.Join(try.dir, try.path), h.Cmd.Process.Pid)
		said, err := h.Attempt()
		if err != nil {
			t.Fatal(err)
		}
		denied := strings.HasPrefix(said, "refused 1 ")
		if a := trial.AnswerOf(e, try.operation); (a.Verdict == judge.Denied) != denied || denied && !slices.Equal(a.Rules, []string{"life"}) {
			t.Errorf("%s by %s %s: %s; the explanation: %+v", try.row, filepath.Base(try.program), try.environment, said, e)
		}
		if denied {
			denials++
		}
		if try.environment != "" && (len(e.Process.Untrusted) != 1 || !strings.Contains(e.Process.Untrusted[0].Why, "LD_PRELOAD")) {
			t.Errorf("%+v", e.Process)
		}
	}
	if denials != len(tries)*2/3 {
		t.Errorf("%d of %d were denied", denials, len(tries))
	}
	e := ask(filepath.Join(dirs[0], "prot"), old.Cmd.Process.Pid)
	if trial.AnswerOf(e, policy.Create).Verdict != judge.Allowed || len(e.Process.Trusted) != 1 || e.Process.Trusted[0].PID != old.Cmd.Process.Pid {
		t.Errorf("a process from before: %+v", e)
	}
	if e := ask(b.Trusted, os.Getpid()); trial.AnswerOf(e, "write-program").Verdict != judge.Denied || trial.AnswerOf(e, policy.Write).Verdict != judge.Allowed {
		t.Errorf("a trusted program's file: %+v", e)
	}
	if _, err := Stop(kernel.DefaultPinRoot); err != nil {
		t.Fatal(err)
	}
	if e, err := Explain(kernel.DefaultPinRoot, b.Root, 1); e != nil || err != nil {
		t.Errorf("after the end: %+v, %v", e, err)
	}
}

// A policy that is not in force is not enforced, and the explanation says why; without a policy in force there is no explanation.
func TestExplainsWithoutAPolicyInForce(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	p := policy.Policy{Rules: []policy.Rule{{Name: "data", Paths: []string{dir}, Deny: []string{policy.Write}, Mode: policy.Deny}}}
	if e, err := ExplainPolicy(p, dir, os.Getpid()); err != nil || e.Enforced || e.Why == "" {
		t.Errorf("%+v, %v", e, err)
	}
	if e, err := Explain(filepath.Join(dir, "nothing"), dir, os.Getpid()); e != nil || err != nil {
		t.Errorf("%+v, %v", e, err)
	}
}
