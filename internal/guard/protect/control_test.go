package protect

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// ownProgram is the executable of this process.
func ownProgram(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// switchOn switches a controller on for the cgroups below the named ones.
func (g groups) switchOn(controller string, names ...string) {
	g.t.Helper()
	for _, name := range names {
		folder := g.root
		if name != "" {
			folder += g.path(name)
		}
		file := filepath.Join(folder, "cgroup.subtree_control")
		text, err := os.ReadFile(file)
		if err != nil {
			g.t.Fatal(err)
		}
		if has(strings.TrimSpace(string(text)), controller) {
			continue
		}
		if err := trial.PutText(file, "+"+controller); err != nil {
			g.t.Fatalf("%s of %s: %v", controller, folder, err)
		}
		g.t.Cleanup(func() { _ = trial.PutText(file, "-"+controller) }) // the cgroup may be gone
	}
}

// TestFilesOfCgroups tries each way twice: a program that is not trusted is refused and changes nothing, and a trusted program is not refused and
// changes something.
func TestFilesOfCgroups(t *testing.T) {
	b := newBench(t)
	groups := newGroups(t)
	groups.make("group", "group-2", "free", "free-2")
	groups.switchOn("memory", "", "group", "free")
	groups.make("group/inner", "group/inner/most", "free/inner", "free/inner/most")
	above, free := groups.root+groups.path("group"), groups.root+groups.path("free")
	early := map[string]*trial.Helper{} // they have something from before the policy
	for _, c := range trial.Controls {
		for _, program := range []string{b.Other, b.Trusted} {
			if !c.IsFromBefore() {
				continue
			}
			h, err := trial.Begin(program, c.Name, above)
			if err != nil {
				t.Fatal(err)
			}
			early[program+c.Name] = h
		}
	}
	rule := policy.Rule{Name: "group", Cgroup: groups.path("group/inner"), Deny: []string{policy.Kill, policy.Move}, Trust: policy.Trust{Programs: policy.Programs(b.Trusted, ownProgram(t))}, Mode: policy.Deny}
	g := b.start(policy.Policy{Rules: []policy.Rule{rule}})
	told := b.listen(g)
	try := func(c *trial.Control, program, dir, group string, isDenied bool) {
		t.Run(c.Name+"/"+filepath.Base(program)+" in "+group, func(t *testing.T) {
			sub := b.with(t)
			sub.testControl(groups, c, early[program+c.Name], program, dir, group, isDenied)
		})
	}
	for i := range trial.Controls {
		c := &trial.Controls[i]
		try(c, b.Other, above, "group", true)
		try(c, b.Trusted, above, "group", false)
		if c.IsFree {
			try(c, b.Other, free, "free", false)
		}
	}
	t.Run("explanations", func(t *testing.T) { b.explainControls(t, groups, above) })
	t.Run("what is free", func(t *testing.T) { b.testFreeControls(t, groups, above) })
	rule.Deny = []string{policy.Kill}
	if err := g.Apply(policy.Policy{Rules: []policy.Rule{rule}}); err != nil {
		t.Fatal(err)
	}
	try(controlOf("move-out"), b.Other, above, "group", false)
	try(controlOf("move-in"), b.Other, above, "group", true)
	for _, name := range []string{"move-in", "begin-in-it"} { // which cross the root, as move-out does
		try(controlOf(name), b.Other, free, "free", false)
	}
	rule.Mode = policy.Audit
	if err := g.Apply(policy.Policy{Rules: []policy.Rule{rule}}); err != nil {
		t.Fatal(err)
	}
	try(controlOf("cgroup.freeze-below"), b.Other, above, "group", false)
	attempts := told()
	for i := range trial.Controls {
		c := &trial.Controls[i]
		if !slices.ContainsFunc(attempts, func(a judge.Attempt) bool { return a.Denied && isAbout(c, a, b.Other, groups) }) {
			t.Errorf("%s was denied, and no event says so", c.Name)
		}
	}
	if c := controlOf("cgroup.freeze-below"); !slices.ContainsFunc(attempts, func(a judge.Attempt) bool { return !a.Denied && isAbout(c, a, b.Other, groups) }) {
		t.Errorf("%s was audited, and no event says so", c.Name)
	}
	if denied := slices.DeleteFunc(attempts, func(a judge.Attempt) bool { return !a.Denied }); len(denied) != len(trial.Controls)+1 {
		t.Errorf("%d operations were denied, and %d were tried: %v", len(denied), len(trial.Controls)+1, denied)
	}
}

func controlOf(name string) *trial.Control {
	return &trial.Controls[slices.IndexFunc(trial.Controls, func(c trial.Control) bool { return c.Name == name })]
}

// isAbout reports whether an event is about this way.
func isAbout(c *trial.Control, a judge.Attempt, program string, groups groups) bool {
	want := groups.path("group") + c.File
	if c.File == "" {
		want = "/cgroup.procs"
	}
	return a.Operation == c.Operation && a.Program == program && a.Target == 0 && strings.HasSuffix(a.Path, want) && slices.Equal(a.Rules, []string{"group"}) &&
		(c.File != "" || !strings.Contains(a.Path, "shunt-narrow"))
}

// testControl tries a way on a new process in the rule's cgroup.
func (b *bench) testControl(groups groups, c *trial.Control, h *trial.Helper, program, dir, group string, isDenied bool) {
	b.t.Helper()
	target, err := trial.Begin(b.Guarded, "wait", "")
	if err != nil {
		b.t.Fatal(err)
	}
	groups.move(target.Cmd.Process.Pid, group+"/inner")
	if h == nil {
		if h, err = trial.Begin(program, c.Name, dir); err != nil {
			b.t.Fatal(err)
		}
	}
	said, err := h.Attempt()
	if err != nil {
		b.t.Error(err)
	}
	isChanged := c.Changes != nil && c.Changes(dir, target.Cmd.Process.Pid)
	for _, file := range []string{"cgroup.freeze", "inner/cgroup.freeze", "inner/most/cgroup.freeze"} {
		err = errors.Join(err, trial.PutText(filepath.Join(dir, file), "0"))
	}
	if err := errors.Join(err, trial.PutText(filepath.Join(dir, "memory.max"), "max"), trial.PutText(filepath.Join(dir, "inner/memory.max"), "max")); err != nil {
		b.t.Error(err)
	}
	var exit *exec.ExitError
	err = target.End()
	isEnded := errors.As(err, &exit)
	if err != nil && !isEnded {
		b.t.Error(err)
	}
	want := "done"
	if isDenied {
		want = fmt.Sprintf("refused %d ", unix.EPERM)
	}
	if !strings.HasPrefix(said, want) || isEnded != (c.IsKill && !isDenied) || isChanged != (c.Changes != nil && !isDenied) {
		b.t.Errorf("%s, it ended the target: %v, it changed something: %v; denied should be %v", said, isEnded, isChanged, isDenied)
	}
}

// testFreeControls expects that programs may do operations that end, stop or move no process of the rule.
func (b *bench) testFreeControls(t *testing.T, groups groups, dir string) {
	for _, r := range trial.Frees {
		h, err := trial.Begin(b.Other, r.Name, dir)
		if err != nil {
			t.Fatal(err)
		}
		if r.Name == "move-between-others" { // it begins below the common parent
			groups.move(h.Cmd.Process.Pid, "group-2")
		}
		if said, err := h.Attempt(); said != "done" || err != nil {
			t.Errorf("%s: %s %v", r.Name, said, err)
		}
	}
	for _, name := range []string{"one", "two"} {
		if err := os.Remove(filepath.Join(dir+"-2", name)); err != nil {
			t.Error(err)
		}
	}
	h, err := trial.Begin(b.Other, "cgroup.freeze-below", dir)
	if err != nil {
		t.Fatal(err)
	}
	groups.move(h.Cmd.Process.Pid, "group/inner")
	said, err := h.Attempt()
	if err := errors.Join(err, trial.PutText(filepath.Join(dir, "inner/most/cgroup.freeze"), "0")); said != "done" || err != nil {
		t.Errorf("a process of the rule: %s %v", said, err)
	}
}

// TestGroupsAreWatched expects the programs of ofGroups to be attached only while a rule names a cgroup, also after a change of agents.
func TestGroupsAreWatched(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(b.Root, "f")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	plain := policy.Policy{Rules: []policy.Rule{{Name: "file", Paths: []string{path}, Deny: []string{policy.Write}, Mode: policy.Audit}}}
	grouped := policy.Policy{Rules: []policy.Rule{{Name: "group", Cgroup: "/shunt-narrow-none", Deny: []string{policy.Kill}, Mode: policy.Audit}}}
	expect := func(when string, want bool) {
		t.Helper()
		for _, name := range ofGroups {
			pins, err := filepath.Glob(filepath.Join(linksFolder(kernel.DefaultPinRoot), "*", name))
			if err != nil || len(pins) > 1 || (len(pins) == 1) != want {
				t.Errorf("%s: %v %v, want one: %v", when, pins, err, want)
			}
		}
	}
	g := b.start(plain)
	expect("without a cgroup", false)
	for _, p := range []policy.Policy{grouped, grouped, plain, grouped} {
		if err := g.Apply(p); err != nil {
			t.Fatal(err)
		}
		expect("after a load", p.Rules[0].Cgroup != "")
	}
	g.Close()
	g = b.start(grouped)
	expect("with another agent", true)
	g.Close()
	b.start(plain)
	expect("with another agent, without a cgroup", false)
}

// explainControls expects the explanations of files of cgroups to be the kernel's decisions.
func (b *bench) explainControls(t *testing.T, groups groups, dir string) {
	for _, c := range []struct {
		program, in, file, operation, want string
	}{
		{b.Other, "", "/inner/cgroup.kill", policy.Kill, judge.Denied}, {b.Trusted, "", "/inner/cgroup.kill", policy.Kill, judge.Allowed}, {b.Other, "group/inner", "/inner/cgroup.kill", policy.Kill, judge.Allowed},
		{b.Other, "", "/inner/most/cgroup.procs", policy.Kill, judge.Denied}, {b.Other, "", "/memory.max", policy.Kill, judge.Denied}, {b.Other, "", "/cgroup.procs", policy.Kill, judge.Allowed},
		{b.Other, "", "/cgroup.procs", policy.Move, judge.Denied}, {b.Other, "", "/../cgroup.procs", policy.Move, judge.Denied}, {b.Other, "", "-2/cgroup.kill", policy.Kill, judge.Allowed},
	} {
		h, err := trial.Begin(c.program, "wait", dir)
		if err != nil {
			t.Fatal(err)
		}
		if c.in != "" {
			groups.move(h.Cmd.Process.Pid, c.in)
		}
		e, err := Explain(kernel.DefaultPinRoot, dir+c.file, h.Cmd.Process.Pid)
		if err := errors.Join(err, h.End()); err != nil {
			t.Fatal(err)
		}
		if trial.AnswerOf(e, c.operation).Verdict != c.want || len(e.Operations) > 2 {
			t.Errorf("%s of %s by %s in %q: %+v", c.operation, c.file, filepath.Base(c.program), c.in, e)
		}
	}
}
