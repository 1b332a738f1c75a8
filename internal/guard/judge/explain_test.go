package judge

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

func (e *Explanation) of(operation string) Answer {
	i := slices.IndexFunc(e.Operations, func(a Answer) bool { return a.Operation == operation })
	if i < 0 {
		return Answer{}
	}
	return e.Operations[i]
}

// stage is a folder of files, with copies of dash as programs.
type stage struct {
	t    *testing.T
	path string
}

func newStage(t *testing.T) *stage {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	shell, err := os.ReadFile("/bin/dash")
	if os.Getenv("SHUNT_KERNEL_TEST") != "" && errors.Is(err, os.ErrNotExist) {
		t.Skip("the guest has no dash")
	}
	if err != nil {
		t.Fatal(err)
	}
	s := &stage{t, dir}
	for _, folder := range []string{"data", "bin", "out"} {
		err = errors.Join(err, os.Mkdir(s.in(folder), 0o755))
	}
	for _, program := range []string{"bin/app", "bin/lone", "bin/job", "out/copy"} {
		err = errors.Join(err, os.WriteFile(s.in(program), shell, 0o755))
	}
	if err = errors.Join(err, os.WriteFile(s.in("data/f"), nil, 0o600), os.Link(s.in("data/f"), s.in("out/l")), os.Symlink(s.in("data"), s.in("out/s"))); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *stage) in(name string) string { return filepath.Join(s.path, name) }

func (s *stage) policy() policy.Policy {
	return policy.Policy{Rules: []policy.Rule{
		{Name: "data", Paths: []string{s.in("data")}, Deny: []string{policy.Write, policy.Create, policy.Delete}, Mode: policy.Deny,
			Trust: policy.Trust{Programs: policy.Programs(s.in("bin/app")), Children: true}},
		{Name: "alone", Paths: []string{s.in("data/f")}, Deny: []string{policy.Write}, Mode: policy.Audit, Trust: policy.Trust{Programs: policy.Programs(s.in("bin/lone"))}},
	}}
}

// run starts a program with a command of the shell that it is, and returns the number that the command writes. It ends with the test.
func (s *stage) run(program, command string, environment ...string) int {
	s.t.Helper()
	c := exec.Command(s.in(program), "-c", command)
	c.Env = environment
	in, err := c.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		_ = in.Close()
		_, _ = io.Copy(io.Discard, out)
		_ = c.Wait()
	})
	var id int
	if _, err := fmt.Fscan(out, &id); err != nil {
		s.t.Fatal(err)
	}
	return id
}

// A policy that is not in force explains inodes and chains in the same way, by any name, and names the member of the
// chain that lost the trust.
func TestExplainsAPolicy(t *testing.T) {
	s := newStage(t)
	const child = `%s -c 'echo $$; read x'; :`
	for _, c := range []struct {
		name, program, command string
		environment            []string
		path, operation        string
		want                   Answer
		why                    string // of the rule data
	}{
		{"named", "bin/app", "echo $$; read x", nil, "data/f", policy.Delete, Answer{Verdict: Allowed, Trusted: []string{"data"}}, "the rule names its executable"},
		{"one rule trusts it, the other audits", "bin/app", "echo $$; read x", nil, "data/f", policy.Write, Answer{Verdict: Audited, Rules: []string{"alone"}, Trusted: []string{"data"}}, "the rule names"},
		{"not named", "out/copy", "echo $$; read x", nil, "data/f", policy.Delete, Answer{Verdict: Denied, Rules: []string{"data"}}, "A copy"},
		{"by a hard link", "out/copy", "echo $$; read x", nil, "out/l", policy.Write, Answer{Verdict: Denied, Rules: []string{"data"}}, "A copy"},
		{"by a symbolic link", "out/copy", "echo $$; read x", nil, "out/s/f", policy.Write, Answer{Verdict: Denied, Rules: []string{"data"}}, "A copy"},
		{"a new name", "out/copy", "echo $$; read x", nil, "data/new", policy.Create, Answer{Verdict: Denied, Rules: []string{"data"}}, "A copy"},
		{"what is not there", "out/copy", "echo $$; read x", nil, "data/new", policy.Delete, Answer{Verdict: NoObject}, "A copy"},
		{"no operation of the rule", "out/copy", "echo $$; read x", nil, "data/f", policy.Chmod, Answer{Verdict: Allowed}, "A copy"},
		{"started", "bin/app", fmt.Sprintf(child, s.in("bin/job")), nil, "data/f", policy.Delete, Answer{Verdict: Allowed, Trusted: []string{"data"}}, "it comes from process"},
		{"an interpreter", "bin/app", fmt.Sprintf(child, "/bin/sh"), nil, "data/f", policy.Delete, Answer{Verdict: Denied, Rules: []string{"data"}}, "an interpreter that the rule does not list"},
		{"below an interpreter", "bin/app", `/bin/sh -c "` + s.in("bin/job") + ` -c 'echo \$\$; read x'; :"; :`, nil, "data/f", policy.Delete, Answer{Verdict: Denied, Rules: []string{"data"}},
			"an interpreter that the rule does not list"},
		{"an environment that loads code", "bin/app", "LD_AUDIT=/nowhere.so " + fmt.Sprintf(child, s.in("bin/job")), nil, "data/f", policy.Delete, Answer{Verdict: Denied, Rules: []string{"data"}},
			"its environment has LD_AUDIT, which loads code"},
		{"named, with such an environment", "bin/app", "echo $$; read x", []string{"LD_AUDIT=/nowhere.so"}, "data/f", policy.Delete, Answer{Verdict: Denied, Rules: []string{"data"}}, "lost its trust: its environment has LD_AUDIT"},
		{"a trusted program's file", "out/copy", "echo $$; read x", nil, "bin/lone", "write-program", Answer{Verdict: Audited, Rules: []string{"alone"}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			id := s.run(c.program, c.command, c.environment...)
			e, err := ExplainPolicy(s.policy(), s.in(c.path), id)
			if err != nil {
				t.Fatal(err)
			}
			got := e.of(c.operation)
			if got.Verdict != c.want.Verdict || !slices.Equal(got.Rules, c.want.Rules) || !slices.Equal(got.Trusted, c.want.Trusted) {
				t.Errorf("%+v, want %+v", got, c.want)
			}
			if e.From != FromPolicy || e.Enforced || e.Process.PID != id || e.Process.Chain[len(e.Process.Chain)-1].PID != 1 {
				t.Errorf("%+v", e)
			}
			if got := whyOf(e, "data"); !strings.Contains(got, c.why) || (got == "") != (c.why == "") {
				t.Errorf("%q, want %q", got, c.why)
			}
		})
	}
	lone := s.run("bin/lone", fmt.Sprintf(child, s.in("bin/job")))
	e, err := ExplainPolicy(s.policy(), s.in("data/f"), lone)
	if err != nil || !strings.Contains(whyOf(e, "alone"), "does not trust programs that its programs start") {
		t.Errorf("%+v, %v", e, err)
	}
	replaced := s.run("bin/job", "echo $$; read x")
	if err := os.Remove(s.in("bin/job")); err != nil {
		t.Fatal(err)
	}
	if e, err = ExplainPolicy(s.policy(), s.in("data/f"), replaced); err != nil || !strings.Contains(whyOf(e, "data"), "deleted or replaced since") {
		t.Errorf("%+v, %v", e, err)
	}
}

func whyOf(e *Explanation, rule string) string {
	for _, r := range slices.Concat(e.Process.Trusted, e.Process.Untrusted) {
		if r.Rule == rule {
			return r.Why
		}
	}
	return ""
}

func TestExplainRefuses(t *testing.T) {
	s := newStage(t)
	ended := exec.Command("/bin/true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	for want, ask := range map[string]func() error{
		"there is no process": func() error {
			_, err := ExplainPolicy(s.policy(), s.in("data/f"), ended.Process.Pid)
			return err
		},
		"a new name in an existing folder": func() error {
			_, err := ExplainPolicy(s.policy(), s.in("nowhere/f"), os.Getpid())
			return err
		},
		"does not exist": func() error {
			p := s.policy()
			p.Rules[0].Paths = []string{s.in("nowhere")}
			_, err := ExplainPolicy(p, s.in("data/f"), os.Getpid())
			return err
		},
	} {
		if err := ask(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A file that was moved into a protected folder with its own folder has the rules of the nearest one above.
func TestExplainsWhatWasMoved(t *testing.T) {
	dir := t.TempDir()
	inside := filepath.Join(dir, "in", "side")
	if err := errors.Join(os.MkdirAll(inside, 0o755), os.WriteFile(filepath.Join(inside, "f"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	b := &Book{Label: func(path string) (m Marks, err error) {
		if path == dir {
			m.Rules = 1
		}
		return m, nil
	}}
	for _, b.Moved = range []bool{false, true} {
		m, err := b.under(filepath.Join(inside, "f"))
		if err != nil || (m.Rules == 1) != b.Moved {
			t.Errorf("moved %v: %+v, %v", b.Moved, m, err)
		}
	}
	if m, err := b.under("/"); err != nil || m.Rules != 0 {
		t.Errorf("%+v, %v", m, err)
	}
}
