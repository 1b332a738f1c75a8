package gate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
)

// await waits until the keeper's status meets a condition.
func (k *keeper) await(what string, is func(Status) bool) {
	k.b.t.Helper()
	for until := time.Now().Add(time.Minute); !is(k.status()); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			k.b.t.Fatalf("%s: %+v", what, k.status())
		}
	}
}

func (k *keeper) awaitObjects(what string, n int) {
	k.b.t.Helper()
	k.await(fmt.Sprintf("%s: %d files are to be remembered", what, n), func(s Status) bool { return s.Objects == n })
}

// Files that end are forgotten, but not a file that has another name, or is still open. The table has a limit, and a
// new file beyond it is counted.
func TestGateForgets(t *testing.T) {
	b := newBench(t)
	const room = 40
	k, file := b.keepOne(ward{ObjectsMax: room})
	folder := filepath.Dir(file)
	before := k.status().Objects
	made := func(name string) string { return filepath.Join(folder, name) }
	bring := func(name string) { // its making is no open there
		t.Helper()
		outside := filepath.Join(b.Root, "new")
		if err := errors.Join(os.WriteFile(outside, []byte("x"), 0o644), os.Rename(outside, made(name))); err != nil {
			t.Fatal(err)
		}
	}
	const files = 10
	for round := range 3 { // numbers are used again
		for i := range files {
			bring(fmt.Sprint("f", i))
		}
		if err := errors.Join(os.MkdirAll(made("d/deeper"), 0o755), os.Symlink("f", made("link"))); err != nil {
			t.Fatal(err)
		}
		k.awaitObjects("after names were made", before+files+2)
		b.Expect(true, b.Other, "write-path", made("f3"), fmt.Sprint("in round ", round))
		var errs []error
		for i := range files {
			errs = append(errs, os.Remove(made(fmt.Sprint("f", i))))
		}
		if err := errors.Join(append(errs, os.RemoveAll(made("d")), os.Remove(made("link")))...); err != nil {
			t.Fatal(err)
		}
		k.awaitObjects("after they were deleted", before)
	}

	bring("held")
	bring("linked")
	outside := filepath.Join(b.Root, "outside")
	held, err := os.Open(made("held"))
	if err = errors.Join(err, os.Link(made("linked"), outside)); err != nil {
		t.Fatal(err)
	}
	bring("last")
	k.awaitObjects("with names that stay", before+3)
	if err := errors.Join(os.Remove(made("held")), os.Remove(made("linked")), os.Remove(made("last"))); err != nil {
		t.Fatal(err)
	}
	k.awaitObjects("when one is open, and one has another name", before+2)
	b.Expect(true, b.Other, "write-path", outside, "a file that has another name")
	b.Expect(true, b.Other, "write-path", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), held.Fd()), "a file without a name that is open")
	if err := errors.Join(held.Close(), os.Remove(outside)); err != nil {
		t.Fatal(err)
	}
	k.awaitObjects("at the end", before)

	if s := k.status(); s.Unread > 0 {
		t.Errorf("%+v", s)
	}
	for i := range room {
		bring(fmt.Sprint("many", i))
	}
	k.await("of many files", func(s Status) bool { return s.Unread > 0 && s.Objects < before+room })
	k.write(ward{Policy: policy.Policy{Rules: []policy.Rule{{Name: "one", Paths: []string{folder}, Deny: []string{policy.Write}, Mode: policy.Deny}}}})
	if answer := k.ask("reload"); !strings.Contains(answer, "can protect at most 40") {
		t.Error(answer)
	}
}

// A file with the number of a deleted trusted program is not trusted any more.
func TestGateForgetsPrograms(t *testing.T) {
	g := &Gate{}
	at := judge.Inode{Device: 1, Number: 2}
	programs := map[judge.Inode]judge.Marks{at: {Trusts: 1}, {Device: 1, Number: 3}: {Trusts: 1}}
	r := &ruling{reading: judge.NewReading(nil)}
	r.reading.Marks[at] = judge.Marks{Trusts: 1}
	r.programs.Store(&programs)
	g.forget(r, fresh{gone: "handle", was: at})
	if now := *r.programs.Load(); len(now) != 1 || len(programs) != 2 || len(r.reading.Marks) != 0 {
		t.Errorf("%v, and before %v", now, programs)
	}
}

// The kernel decides an open as the explanation before it says, which says of other operations that nobody enforces
// them.
func TestGateExplains(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(b.Folder("one"), "prot", "f")
	rule := policy.Rule{Name: "one", Paths: []string{filepath.Dir(file)}, Deny: []string{policy.Write, policy.Delete}, Trust: policy.Trust{Programs: policy.Programs(b.Trusted)}, Mode: policy.Deny}
	elsewhere := policy.Rule{Name: "elsewhere", Paths: []string{file}, Deny: []string{policy.Write}, Trust: policy.Trust{Programs: policy.Programs(b.Trusted, b.Other), User: "4242"}, Mode: policy.Audit}
	k := b.gate(ward{Policy: policy.Policy{Rules: []policy.Rule{rule, elsewhere}}})
	made := filepath.Join(filepath.Dir(file), "new")
	if err := os.Rename(filepath.Join(b.Root, "one", "out", "source"), made); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ program, path, environment, write, why string }{
		{b.Trusted, file, "", judge.Audited, "the rule names its executable"},
		{b.Trusted, file, "LD_PRELOAD=/nowhere.so", judge.Denied, "LD_PRELOAD"},
		{b.Other, file, "", judge.Denied, "it does not name " + b.Other},
		{b.Other, made, "", judge.Denied, "it does not name " + b.Other},
		{b.Other, b.Trusted, "", judge.Allowed, ""},
		{b.Other, filepath.Join(b.Root, "one", "out", "program"), "", judge.Allowed, ""},
	} {
		h, err := trial.Begin(c.program, "write-path", c.path, c.environment)
		if err != nil {
			t.Fatal(err)
		}
		e := k.explain(c.path, h.Cmd.Process.Pid)
		said, err := h.Attempt()
		if err != nil {
			t.Fatal(err)
		}
		isDenied := trial.AnswerOf(e, policy.Write).Verdict == judge.Denied || trial.AnswerOf(e, "write-program").Verdict == judge.Denied
		if e.From != judge.FromOpens || !e.Enforced || trial.AnswerOf(e, policy.Write).Verdict != c.write || !strings.Contains(trial.WhyOf(e, "one"), c.why) || isDenied != strings.HasPrefix(said, "refused 1 ") {
			t.Errorf("%s by %s %s: %s, and the explanation was %+v", c.path, c.program, c.environment, said, e)
		}
		if want := map[bool]string{true: judge.Unenforced, false: judge.Allowed}[c.program == b.Other && strings.HasPrefix(c.path, filepath.Dir(file)) || c.environment != ""]; trial.AnswerOf(e, policy.Delete).Verdict != want {
			t.Errorf("%s by %s %s: %+v", c.path, c.program, c.environment, trial.AnswerOf(e, policy.Delete))
		}
		if c.write == judge.Audited && !strings.Contains(trial.WhyOf(e, "elsewhere"), "as user 4242, but its real user is 0") {
			t.Errorf("%+v", e.Process)
		}
	}
	own, err := judge.CgroupOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	want := uint64(0)
	if root := cgroup.Root(); root != "" {
		if want, err = cgroup.ID(root + own); err != nil {
			t.Fatal(err)
		}
	}
	k.await("the refusals are counted", func(s Status) bool { return s.Denied >= 4 && s.Waited >= s.Denied+s.Audited && s.Took > 0 })
	if told := k.told(); len(told) == 0 || slices.ContainsFunc(told, func(a judge.Attempt) bool { return a.CgroupID != want }) {
		t.Errorf("not of cgroup %d: %+v", want, told)
	}
}
