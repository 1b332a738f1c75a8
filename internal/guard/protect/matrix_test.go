package protect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// bench is a trial.Bench under protection by security hooks.
type bench struct {
	*trial.Bench
	t *testing.T
}

func newBench(t *testing.T) *bench {
	t.Helper()
	needLSM(t)
	return &bench{trial.NewBench(t), t}
}

// with returns the bench for a test below.
func (b *bench) with(t *testing.T) *bench { return &bench{b.With(t), t} }

// work is a folder of Bench.Folder.
type work struct{ dir string }

func (w work) prot(name string) string { return filepath.Join(w.dir, "prot", name) }
func (w work) out(name string) string  { return filepath.Join(w.dir, "out", name) }

// start loads a policy, and ends the protection with the test.
func (b *bench) start(p policy.Policy) *Guard {
	b.t.Helper()
	g, err := Start(kernel.DefaultPinRoot, p, slog.New(slog.DiscardHandler))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		g.Close()
		if _, err := Stop(kernel.DefaultPinRoot); err != nil {
			b.t.Error(err)
		}
	})
	return g
}

// listen collects the reported attempts until the test ends.
func (b *bench) listen(g *Guard) (told func() []judge.Attempt) {
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	var all []judge.Attempt
	done := make(chan error, 1)
	go func() {
		done <- g.Listen(ctx, func(a judge.Attempt) error {
			mu.Lock()
			defer mu.Unlock()
			all = append(all, a)
			return nil
		})
	}()
	var once sync.Once
	stop := func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				b.t.Error(err)
			}
		})
	}
	b.t.Cleanup(stop)
	return func() []judge.Attempt {
		stop()
		return all
	}
}

// TestMatrix tries every operation of the matrix three times: by a program that is not trusted, by one that is,
// and by the first one on files that are not protected. The first is denied and changes nothing, and the
// others show that the operation works, and changes something.
func TestMatrix(t *testing.T) {
	began := time.Now()
	phase := func(name string) { t.Logf("%s after %v", name, time.Since(began).Round(time.Second/10)) }
	b := newBench(t)
	phase("the bench")
	rule := policy.Rule{Name: "matrix", Deny: policy.Operations, Trust: policy.Trust{Programs: policy.Programs(b.Trusted)}, Mode: policy.Deny}
	var tries []*trial.Try
	for i := range trial.Matrix {
		for _, a := range trial.Actors {
			one := b.Prepare(&trial.Matrix[i], a)
			tries = append(tries, one)
			if !a.IsFree {
				rule.Paths = append(rule.Paths, filepath.Join(one.Dir, "prot"))
				rule.Trust.Programs = append(rule.Trust.Programs, policy.Program{Path: filepath.Join(one.Dir, "out", "program")})
			}
		}
	}
	phase("the files and processes")
	bystander, err := trial.Begin(b.Other, "wait", "")
	if err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(b.Root, "pid")
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(bystander.Cmd.Process.Pid)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	trust, both := policy.Trust{Programs: policy.Programs(b.Trusted)}, []string{policy.Kill, policy.Ptrace}
	rules := []policy.Rule{rule,
		{Name: "processes", Program: b.Guarded, Deny: both, Trust: trust, Mode: policy.Deny},
		{Name: "bystander", PIDFile: pidFile, Deny: both, Trust: trust, Mode: policy.Deny},
		{Name: "self", IsSelf: true, Deny: policy.ProcessOperations, Trust: policy.Trust{IsInit: true}, Mode: policy.Deny}}
	g := b.start(policy.Policy{Rules: rules})
	phase("the policy")
	told := b.listen(g)
	// Files that are not open leave memory, and their labels with them.
	b.Evict()
	for _, one := range tries {
		one.Was = trial.Snapshot(one.Dir)
		t.Run(one.Row.Name+"/"+one.Actor.Name, func(t *testing.T) { b.judge(t, one) })
	}
	t.Run("processes", func(t *testing.T) { b.testProcesses(t, g, bystander) })
	phase("the tries")
	attempts := told()
	phase("the events")
	for i := range trial.Matrix {
		r := &trial.Matrix[i]
		if r.NotCovered != "" {
			continue
		}
		if !wasTold(attempts, r, b.Other) {
			t.Errorf("%s was denied, and no event says so", r.Name)
		}
	}
	if s := g.reader.By()[0]; s.Lost > 0 || s.Broken > 0 {
		t.Errorf("the stream of events: %+v", s)
	}
	b.expectMapping(g)
}

// wasTold looks for the event of an operation.
func wasTold(attempts []judge.Attempt, r *trial.Row, program string) bool {
	for _, a := range attempts {
		if a.Denied && a.Operation == r.Operation && a.Program == program && a.Rules[0] == ruleOfRow(r) &&
			(strings.Contains(a.Path, "/"+r.Name+".untrusted") || r.IsAboutProcess() && a.Target != 0) {
			return true
		}
	}
	return false
}

// expectMapping expects the mappings that no hook sees to be reported, but not the trusted program's.
func (b *bench) expectMapping(g *Guard) {
	b.t.Helper()
	var rows []string
	for _, m := range g.Mapped {
		row, is := strings.CutSuffix(m.Path, ".untrusted/prot/f")
		if rows = append(rows, filepath.Base(row)); !is || m.Program != b.Other || m.Can != policy.Write {
			b.t.Errorf("a mapping from before the policy: %+v", m)
		}
	}
	slices.Sort(rows)
	if want := []string{"old-mapping-filled-by-userfaultfd", "old-writable-mapping"}; !slices.Equal(rows, want) {
		b.t.Errorf("mappings from before the policy are of %q, want %q", rows, want)
	}
}

func (b *bench) judge(t *testing.T, one *trial.Try) {
	said := b.MakeTry(t, one)
	is := trial.Snapshot(one.Dir)
	isEnded := false
	if one.Target != nil {
		err := one.Target.End()
		var exit *exec.ExitError
		if isEnded = errors.As(err, &exit); err != nil && !(isEnded && one.Row.IsKill) {
			t.Errorf("the target: %v", err)
		}
	}
	isChanged := is != one.Was || isEnded || one.Row.IsAboutProcess() && !one.Row.IsKill
	isRefused := one.Actor.Name == "untrusted" || one.Actor.IsTrusted && one.Row.IsNobodys
	if isRefused && one.Row.NotCovered == "" {
		want := fmt.Sprintf("refused %d ", cmp.Or(one.Row.Errno, unix.EPERM))
		if one.Row.IsSilent {
			want = "done"
		}
		if !strings.HasPrefix(said, want) {
			t.Errorf("not denied: %s", said)
		}
		if is != one.Was || isEnded {
			t.Errorf("ended: %v, changed from\n%s\nto\n%s", isEnded, one.Was, is)
		}
		return
	}
	if said != "done" || !isChanged {
		t.Errorf("%s, changed: %v; it should work, and change something", said, isChanged)
	}
}

// ruleOfRow is the rule that denies the row's operation.
func ruleOfRow(r *trial.Row) string {
	if r.IsGuarded {
		return "processes"
	}
	return "matrix"
}

// testProcesses tries the protection of a process that its number names, and of the guard's own.
func (b *bench) testProcesses(t *testing.T, g *Guard, bystander *trial.Helper) {
	sub := b.with(t)
	dir := b.Folder("bystander")
	if err := os.WriteFile(filepath.Join(dir, "out", "pid"), []byte(strconv.Itoa(bystander.Cmd.Process.Pid)), 0o644); err != nil {
		t.Fatal(err)
	}
	sub.Expect(true, b.Other, "kill", dir, "a process that its number names")
	sub.Expect(true, b.Other, "signal-parent", dir, "the guard's own")
	sub.Expect(true, b.Trusted, "signal-parent", dir, "the guard's own")
	sub.Expect(false, b.Trusted, "kill", dir, "a process that its number names")
	var exit *exec.ExitError
	if err := bystander.End(); !errors.As(err, &exit) {
		t.Errorf("a trusted program's signal did not end it: %v", err)
	}
	init, err := look(1, g.maps)
	if err != nil || init == nil {
		t.Fatal(err)
	}
	if given := init.given[g.number&1]; given.Generation != g.number || given.Trusts != 1<<3 {
		t.Errorf("process 1 is trusted: %+v", given)
	}
}
