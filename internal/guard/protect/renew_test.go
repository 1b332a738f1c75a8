package protect

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
)

// TestUpgradesKeepTrust has an updater and other programs replace a trusted program by the system calls of dpkg, and
// has the new program write to a file that the old one was trusted with. No policy is loaded in between.
func TestUpgradesKeepTrust(t *testing.T) {
	b := newBench(t)
	updater := filepath.Join(b.Root, "updater")
	b.Copy(b.Trusted, updater)
	data := filepath.Join(b.Root, "data")
	if err := os.WriteFile(data, []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	path := func(name string) string { return filepath.Join(b.Root, "programs", name) }
	if err := os.Mkdir(path(""), 0o755); err != nil {
		t.Fatal(err)
	}
	programs := []string{"updated", "twice", "by another", "made by another", "written in between", "truncated in between", "reloaded"}
	var trusted []string
	for _, name := range append(programs, "guarded") {
		b.Copy(b.Trusted, path(name))
		if name != "guarded" {
			trusted = append(trusted, path(name))
		}
	}
	service, log := path("service"), filepath.Join(b.Root, "log")
	b.Copy(b.Trusted, service)
	if err := os.WriteFile(log, []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := policy.Policy{Rules: []policy.Rule{
		{Name: "log", Paths: []string{log}, Deny: []string{policy.Write}, Trust: policy.Trust{Programs: policy.Programs(service)}, Mode: policy.Deny},
		{Name: "data", Paths: []string{data}, Deny: []string{policy.Write}, Trust: policy.Trust{Programs: policy.Programs(trusted...)}, Mode: policy.Deny},
		{Name: "process", Program: path("guarded"), Deny: []string{policy.Kill}, Mode: policy.Deny},
		{Name: "updaters", IsUpdaters: true, Trust: policy.Trust{Programs: policy.Programs(updater)}, Mode: policy.Deny},
	}}
	g := b.start(p)
	expect := func(isTrusted bool, name string) {
		t.Helper()
		for _, when := range []string{"after it was replaced: ", "after labels have left memory: "} {
			b.Expect(!isTrusted, path(name), "write-path", data, when+name)
			b.Evict()
		}
		b.Expect(isTrusted, b.Other, "write-path", path(name), name+" itself") // others may write a program that is not trusted
	}
	b.Expect(true, b.Other, "write-path", updater, "the updater itself")
	b.Expect(false, updater, "upgrade", path("updated"), "upgrade")
	expect(true, "updated")
	b.Expect(false, updater, "upgrade", path("twice"), "upgrade")
	b.Expect(false, updater, "upgrade", path("twice"), "a second upgrade")
	expect(true, "twice")
	b.Expect(false, b.Other, "upgrade", path("by another"), "upgrade by another program")
	expect(false, "by another")
	b.Expect(false, b.Other, "unpack", path("made by another"), "unpack by another program")
	b.Expect(false, updater, "install", path("made by another"), "install")
	expect(false, "made by another")
	for name, operation := range map[string]string{"written in between": "write-path", "truncated in between": "truncate-path"} {
		h, err := trial.Begin(updater, "unpack-before-install", path(name))
		if err != nil {
			t.Fatal(err)
		}
		b.Expect(false, b.Other, operation, path(name)+".dpkg-new", "before it is installed")
		if said, err := h.Attempt(); err != nil || said != "done" {
			t.Fatal(said, err)
		}
		b.Expect(false, b.Other, "write-path", path(name), name) // nothing can execute its contents now
	}
	b.Expect(false, updater, "upgrade", path("guarded"), "upgrade")
	b.expectGuarded(path("guarded"))
	b.Expect(false, updater, "upgrade", updater, "upgrade of itself")
	b.Expect(false, updater, "upgrade", path("reloaded"), "upgrade by the new one")
	expect(true, "reloaded")
	b.testRunningService(t, g, p, updater, service, log)
	expect(true, "updated")
	b.Expect(false, updater, "upgrade", path("updated"), "upgrade after the policy was loaded again")
	expect(true, "updated")
}

// testRunningService upgrades a program while it runs, and loads the policy again before it is started again.
func (b *bench) testRunningService(t *testing.T, g *Guard, p policy.Policy, updater, service, log string) {
	running, err := trial.Begin(service, "write-path", log)
	if err != nil {
		t.Fatal(err)
	}
	b.Expect(false, updater, "upgrade", service, "upgrade of a service")
	if err := g.Apply(p); err != nil {
		t.Fatal(err)
	}
	if said, err := running.Attempt(); err != nil || said != "done" {
		t.Errorf("what ran before the upgrade, after the policy was loaded again: %s %v", said, err)
	}
	b.Expect(false, service, "write-path", log, "the new service")
	b.Expect(false, b.Other, "upgrade", service, "upgrade by another program")
	if err := g.Apply(p); err != nil {
		t.Fatal(err)
	}
	b.Expect(false, service, "write-path", log, "what is there when the policy is loaded")
}

// expectGuarded expects that nobody may end a program's process.
func (b *bench) expectGuarded(program string) {
	b.t.Helper()
	h, err := trial.Begin(program, "wait", "")
	if err != nil {
		b.t.Fatal(err)
	}
	dir := b.Folder("guarded-process")
	if err := os.WriteFile(filepath.Join(dir, "out", "pid"), []byte(strconv.Itoa(h.Cmd.Process.Pid)), 0o644); err != nil {
		b.t.Fatal(err)
	}
	b.Expect(true, b.Other, "kill", dir, "a process of the new program")
	if err := h.End(); err != nil {
		b.t.Error(err)
	}
}

// TestInterpretersStayThat: an interpreter that is replaced, by anybody, passes no trust on.
func TestInterpretersStayThat(t *testing.T) {
	b := newBench(t)
	dir := b.Folder("files")
	g := b.start(rule(b, policy.Deny, dir))
	shell := filepath.Join(b.Root, "shell")
	b.Copy(b.Trusted, shell)
	l := &labeler{key: g.coll.Programs[guardProgShKey], labels: g.maps[labelMaps[g.number&1]], files: g.maps[fileMaps[g.number&1]], generation: g.number}
	if err := judge.Opened(shell, func(fd int) error {
		return l.label(fd, judge.Marks{Trusts: 1, Guards: 1, Interprets: 1})
	}); err != nil {
		t.Fatal(err)
	}
	b.Expect(false, b.Other, "upgrade", shell, "an interpreter")
	if err := judge.Opened(shell, func(fd int) error {
		m, err := l.labelled(fd)
		if m != (judge.Marks{Interprets: 1}) {
			t.Errorf("the new one has %+v", m)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
