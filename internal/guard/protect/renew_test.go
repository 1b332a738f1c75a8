package protect

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// unpack makes the file beside a program that is to take its place, as dpkg does.
func unpack(path string) error {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	fd, err := unix.Open(path+".dpkg-new", unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), path)
	_, err = file.Write(self)
	return errors.Join(err, file.Chown(0, 0), file.Chmod(0o755), file.Sync(), file.Close())
}

// install puts the new file in the program's place, with the old one beside it until that has worked, as dpkg does.
func install(path string) error {
	_ = os.Remove(path + ".dpkg-tmp")
	return errors.Join(os.Link(path, path+".dpkg-tmp"), os.Rename(path+".dpkg-new", path), os.Remove(path+".dpkg-tmp"))
}

// upgrades are the ways of package managers and others with a program.
var upgrades = []row{
	{name: "upgrade", attempt: func(w *work) error { return errors.Join(unpack(w.dir), install(w.dir)) }},
	{name: "unpack", attempt: func(w *work) error { return unpack(w.dir) }},
	{name: "install", attempt: func(w *work) error { return install(w.dir) }},
	{name: "unpack-before-install", before: func(w *work) error { return unpack(w.dir) }, attempt: func(w *work) error { return install(w.dir) }},
	{name: "truncate-path", attempt: func(w *work) error { return unix.Truncate(w.dir, 1<<20) }},
}

// TestUpgradesKeepTrust has an updater and other programs replace a trusted program by the system calls of dpkg, and
// has the new program write to a file that the old one was trusted with. No policy is loaded in between.
func TestUpgradesKeepTrust(t *testing.T) {
	b := newBench(t)
	updater := filepath.Join(b.root, "updater")
	b.copy(b.trusted, updater)
	data := filepath.Join(b.root, "data")
	if err := os.WriteFile(data, []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	path := func(name string) string { return filepath.Join(b.root, "programs", name) }
	if err := os.Mkdir(path(""), 0o755); err != nil {
		t.Fatal(err)
	}
	programs := []string{"updated", "twice", "by another", "made by another", "written in between", "truncated in between", "reloaded"}
	var trusted []string
	for _, name := range append(programs, "guarded") {
		b.copy(b.trusted, path(name))
		if name != "guarded" {
			trusted = append(trusted, path(name))
		}
	}
	service, log := path("service"), filepath.Join(b.root, "log")
	b.copy(b.trusted, service)
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
			b.expect(!isTrusted, path(name), "write-path", data, when+name)
			b.evict()
		}
		b.expect(isTrusted, b.other, "write-path", path(name), name+" itself") // others may write a program that is not trusted
	}
	b.expect(true, b.other, "write-path", updater, "the updater itself")
	b.expect(false, updater, "upgrade", path("updated"), "upgrade")
	expect(true, "updated")
	b.expect(false, updater, "upgrade", path("twice"), "upgrade")
	b.expect(false, updater, "upgrade", path("twice"), "a second upgrade")
	expect(true, "twice")
	b.expect(false, b.other, "upgrade", path("by another"), "upgrade by another program")
	expect(false, "by another")
	b.expect(false, b.other, "unpack", path("made by another"), "unpack by another program")
	b.expect(false, updater, "install", path("made by another"), "install")
	expect(false, "made by another")
	for name, operation := range map[string]string{"written in between": "write-path", "truncated in between": "truncate-path"} {
		h, err := begin(updater, "unpack-before-install", path(name))
		if err != nil {
			t.Fatal(err)
		}
		b.expect(false, b.other, operation, path(name)+".dpkg-new", "before it is installed")
		if said, err := h.attempt(); err != nil || said != "done" {
			t.Fatal(said, err)
		}
		b.expect(false, b.other, "write-path", path(name), name) // nothing can execute its contents now
	}
	b.expect(false, updater, "upgrade", path("guarded"), "upgrade")
	b.expectGuarded(path("guarded"))
	b.expect(false, updater, "upgrade", updater, "upgrade of itself")
	b.expect(false, updater, "upgrade", path("reloaded"), "upgrade by the new one")
	expect(true, "reloaded")
	b.testRunningService(t, g, p, updater, service, log)
	expect(true, "updated")
	b.expect(false, updater, "upgrade", path("updated"), "upgrade after the policy was loaded again")
	expect(true, "updated")
}

// testRunningService upgrades a program while it runs, and loads the policy again before it is started again.
func (b *bench) testRunningService(t *testing.T, g *Guard, p policy.Policy, updater, service, log string) {
	running, err := begin(service, "write-path", log)
	if err != nil {
		t.Fatal(err)
	}
	b.expect(false, updater, "upgrade", service, "upgrade of a service")
	if err := g.Apply(p); err != nil {
		t.Fatal(err)
	}
	if said, err := running.attempt(); err != nil || said != "done" {
		t.Errorf("what ran before the upgrade, after the policy was loaded again: %s %v", said, err)
	}
	b.expect(false, service, "write-path", log, "the new service")
	b.expect(false, b.other, "upgrade", service, "upgrade by another program")
	if err := g.Apply(p); err != nil {
		t.Fatal(err)
	}
	b.expect(false, service, "write-path", log, "what is there when the policy is loaded")
}

// expectGuarded expects that nobody may end a program's process.
func (b *bench) expectGuarded(program string) {
	b.t.Helper()
	h, err := begin(program, "wait", "")
	if err != nil {
		b.t.Fatal(err)
	}
	dir := b.folder("guarded-process")
	if err := os.WriteFile(filepath.Join(dir, "out", "pid"), []byte(itoa(h.cmd.Process.Pid)), 0o644); err != nil {
		b.t.Fatal(err)
	}
	b.expect(true, b.other, "kill", dir, "a process of the new program")
	if err := h.end(); err != nil {
		b.t.Error(err)
	}
}

// TestInterpretersStayThat: an interpreter that is replaced, by anybody, passes no trust on.
func TestInterpretersStayThat(t *testing.T) {
	b := newBench(t)
	dir := b.folder("files")
	g := b.start(rule(b, policy.Deny, dir))
	shell := filepath.Join(b.root, "shell")
	b.copy(b.trusted, shell)
	l := &labeler{key: g.coll.Programs[guardProgShKey], labels: g.maps[labelMaps[g.number&1]], files: g.maps[fileMaps[g.number&1]], generation: g.number, marks: map[inode]marks{}}
	if _, _, err := l.labelPath(shell, marks{trusts: 1, guards: 1, interprets: 1}); err != nil {
		t.Fatal(err)
	}
	b.expect(false, b.other, "upgrade", shell, "an interpreter")
	if err := opened(shell, func(fd int) error {
		m, err := l.labelled(fd)
		if m != (marks{interprets: 1}) {
			t.Errorf("the new one has %+v", m)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
