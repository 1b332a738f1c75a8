package protect

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
	"github.com/shunt-lb/shunt/internal/kernel"
)

func rule(b *bench, mode string, dirs ...string) policy.Policy {
	r := policy.Rule{Name: "life", Deny: policy.Operations, Trust: policy.Trust{Programs: policy.Programs(b.Trusted)}, Mode: mode}
	for _, dir := range dirs {
		r.Paths = append(r.Paths, filepath.Join(dir, "prot"))
	}
	return policy.Policy{Rules: []policy.Rule{r}}
}

// agent is another process with a guard, to be killed.
func agent(_ *bufio.Reader, dir string) {
	b := &bench{Bench: &trial.Bench{Trusted: filepath.Join(filepath.Dir(dir), "trusted")}}
	g, err := Start(kernel.DefaultPinRoot, rule(b, policy.Deny, dir), slog.New(slog.DiscardHandler))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	time.Sleep(time.Hour) // until it is killed
	g.Close()
}

// TestProtectionOutlivesItsAgent kills the agent, and tries before, after, when another one has taken over,
// and when the protection has been ended.
func TestProtectionOutlivesItsAgent(t *testing.T) {
	b := newBench(t)
	dir, next := b.Folder("first"), b.Folder("second")
	h, err := trial.Begin(b.Other, "agent", dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := Stop(kernel.DefaultPinRoot); err != nil {
			t.Error(err)
		}
	})
	b.Expect(true, b.Other, "open-write", dir, "with the agent")
	if _, err := Start(kernel.DefaultPinRoot, rule(b, policy.Deny, next), slog.New(slog.DiscardHandler)); !errors.Is(err, ErrListening) {
		t.Errorf("a second agent: %v", err)
	}
	if err := h.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = h.End() // it was killed
	b.Expect(true, b.Other, "open-write", dir, "after the agent was killed")
	b.Evict()
	b.Expect(true, b.Other, "unlink", dir, "after inodes have left memory as well")
	b.Expect(false, b.Trusted, "open-write", dir, "after the agent was killed")
	status, err := Look(kernel.DefaultPinRoot)
	if err != nil || status == nil {
		t.Fatal(status, err)
	}
	if status.Listening || status.Denied != 3 || status.Unheard != 3 || status.Hooks < 24 || len(status.Rules) != 1 || status.Rules[0].Name != "life" {
		t.Errorf("the status without an agent: %+v", status)
	}

	g := b.start(rule(b, policy.Deny, next))
	if !g.Adopted || g.Unheard != 3 {
		t.Errorf("the next agent: taken over %v, unheard %d", g.Adopted, g.Unheard)
	}
	told := b.listen(g)
	if after, err := Look(kernel.DefaultPinRoot); err != nil || !after.Listening || after.Hooks != status.Hooks || after.Unheard != 0 {
		t.Errorf("the status with the next agent: %+v %v", after, err)
	}
	b.Expect(false, b.Other, "open-write", dir, "of the policy before")
	b.Expect(true, b.Other, "open-write", next, "of the next policy")
	b.Expect(false, b.Trusted, "open-write", next, "of the next policy")
	if all := told(); len(all) != 1 || !all[0].Denied || all[0].Comm != "other" || all[0].Path != filepath.Join(next, "prot/f") {
		t.Errorf("told: %v", all)
	}
	g.Close()
	if was, err := Stop(kernel.DefaultPinRoot); !was || err != nil {
		t.Errorf("stop: %v %v", was, err)
	}
	b.Expect(false, b.Other, "open-write", next, "after the end")
	if status, err := Look(kernel.DefaultPinRoot); status != nil || err != nil {
		t.Errorf("the status after the end: %+v %v", status, err)
	}
	if was, err := Stop(kernel.DefaultPinRoot); was || err != nil {
		t.Errorf("a second stop: %v %v", was, err)
	}
}

// TestLabels tries the life of labels and of trust, under one policy.
func TestLabels(t *testing.T) {
	b := newBench(t)
	dirs := map[string]string{}
	for _, name := range []string{"audited", "born", "reused", "evicted", "children"} {
		dirs[name] = b.Folder(name)
	}
	w := work{dirs["born"]}
	if err := errors.Join(os.Mkdir(w.out("tree"), 0o755), os.Mkdir(w.out("tree/deep"), 0o755), os.WriteFile(w.out("tree/deep/f"), []byte("x"), 0o644)); err != nil {
		b.t.Fatal(err)
	}
	reused := work{dirs["reused"]}
	if err := os.Rename(reused.out("source"), reused.prot("gone")); err != nil { // its number is one that files in out get
		b.t.Fatal(err)
	}
	p := rule(b, policy.Deny, dirs["born"], dirs["reused"], dirs["evicted"], dirs["children"])
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		b.t.Fatal(err)
	}
	p.Rules[0].Trust.Programs = append(p.Rules[0].Trust.Programs, policy.Program{Path: self}) // this process, which runs already, may do all
	p.Rules = append(p.Rules, rule(b, policy.Audit, dirs["audited"]).Rules...)
	p.Rules[1].Name = "audit"
	g := b.start(p)
	told := b.listen(g)
	for _, one := range []struct {
		name, dir string
		test      func(*bench, *Guard, string)
	}{
		{"new files are protected", "born", (*bench).testNewFiles},
		{"a number is used again", "reused", (*bench).testReusedNumber},
		{"labels leave memory", "evicted", (*bench).testEviction},
		{"trust does not spread", "children", (*bench).testChildren},
		{"audit allows", "audited", (*bench).testAudit},
		{"a load writes nothing in force", "evicted", (*bench).testLoadWritesNothingInForce},
	} {
		t.Run(one.name, func(t *testing.T) {
			sub := b.with(t)
			one.test(sub, g, dirs[one.dir])
		})
	}
	audited := 0
	for _, a := range told() {
		if a.Denied == strings.HasPrefix(a.Path, dirs["audited"]) || a.Program != b.Other {
			b.t.Errorf("told: %v", a)
		}
		if !a.Denied && a.Operation == policy.Write && a.Rules[0] == "audit" {
			audited++
		}
	}
	if audited < 2 { // opening, and each write
		b.t.Errorf("%d attempts were audited", audited)
	}
}

func (b *bench) testAudit(_ *Guard, dir string) {
	b.Expect(false, b.Other, "open-write", dir, "audited")
	b.Expect(false, b.Trusted, "open-append", dir, "audited")
}

// Files and folders that trusted programs make, move and link into a folder have its label, also below a folder that
// was moved in.
func (b *bench) testNewFiles(_ *Guard, dir string) {
	w := work{dir}
	steps := errors.Join(os.WriteFile(w.prot("born"), []byte("x"), 0o644), os.Mkdir(w.prot("folder"), 0o755), os.WriteFile(w.prot("folder/born"), []byte("x"), 0o644),
		os.Rename(w.out("source"), w.prot("moved")), os.Link(w.out("program"), w.prot("linked")), os.Rename(w.out("tree"), w.prot("tree")))
	if steps != nil {
		b.t.Fatal(steps)
	}
	for _, evicted := range []string{"", " after it has left memory"} {
		for _, name := range []string{"prot/born", "prot/folder/born", "prot/moved", "prot/linked", "out/program", "prot/tree/deep/f"} {
			b.Expect(true, b.Other, "write-path", filepath.Join(dir, name), name+evicted)
		}
		b.Evict()
	}
	b.Expect(false, b.Trusted, "write-path", filepath.Join(dir, "prot/tree/deep/f"), "trusted")
}

// A deleted file's number comes back for a file that nobody protects.
func (b *bench) testReusedNumber(g *Guard, dir string) {
	w := work{dir}
	number := func(path string) uint64 {
		var stat unix.Stat_t
		if err := unix.Stat(path, &stat); err != nil {
			b.t.Fatal(err)
		}
		return stat.Ino
	}
	was := number(w.prot("gone"))
	b.Expect(true, b.Other, "write-path", w.prot("gone"), "before it is deleted")
	b.Expect(false, b.Trusted, "unlink-path", w.prot("gone"), "trusted")
	reused := ""
	until := time.Now().Add(time.Minute)
	for i := 0; reused == "" && time.Now().Before(until); i++ {
		path := w.out(fmt.Sprint("new", i))
		if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
			b.t.Fatal(err)
		}
		if number(path) == was {
			reused = path
		}
	}
	if reused == "" {
		b.t.Fatal("the file system did not use the number again")
	}
	b.Evict()
	b.Expect(false, b.Other, "write-path", reused, "a file with the number of a deleted one")
	var file guardGuardFile
	var side guardGuardSide
	entries := g.maps[fileMaps[g.number&1]].Iterate()
	for entries.Next(&file, &side) {
		if file.Inode == was && side.Rules != 0 {
			b.t.Errorf("the deleted file has a label yet: %+v", file)
		}
	}
}

// testEviction checks that the way in which the other tests make inodes leave memory works.
func (b *bench) testEviction(g *Guard, dir string) {
	has := func() bool {
		fd, err := unix.Open(filepath.Join(dir, "out/l"), unix.O_PATH, 0)
		if err != nil {
			b.t.Fatal(err)
		}
		defer unix.Close(fd) //nolint:errcheck // nothing was written
		var side guardGuardSide
		err = g.maps[labelMaps[g.number&1]].Lookup(uint32(fd), &side)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			b.t.Fatal(err)
		}
		return err == nil
	}
	if _, err := os.Stat(filepath.Join(dir, "prot/f")); err != nil || !has() { // by its folder, which is labelled
		b.t.Fatal("no label", err)
	}
	b.Evict()
	if has() {
		b.t.Fatal("the inode did not leave memory")
	}
	b.Expect(true, b.Other, "hard-link-from-before", dir, "after it left memory")
}

// A program that a trusted one starts counts as itself.
func (b *bench) testChildren(_ *Guard, dir string) {
	b.Expect(true, b.Trusted, "start-other", filepath.Join(dir, "prot/f"), "by a child of a trusted program")
	b.Expect(false, b.Trusted, "start-trusted", filepath.Join(dir, "prot/f"), "by a child that is trusted itself")
}

// TestStartFails expects that a failed start leaves nothing behind, and that a failed change leaves the policy.
func TestStartFails(t *testing.T) {
	b := newBench(t)
	dir := b.Folder("kept")
	missing := rule(b, policy.Deny, filepath.Join(b.Root, "missing"))
	if err := os.Symlink(dir, filepath.Join(b.Root, "symbolic")); err != nil {
		t.Fatal(err)
	}
	symbolic := rule(b, policy.Deny, filepath.Join(b.Root, "symbolic"))
	for want, p := range map[string]policy.Policy{"missing/prot does not exist. Make it first": missing, "leads through a symbolic link. Write " + dir + "/prot": symbolic} {
		if _, err := Start(kernel.DefaultPinRoot, p, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := os.Stat(kernel.Directory(kernel.DefaultPinRoot, product)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a failed start leaves: %v", err)
	}
	b.refuseLayout(rule(b, policy.Deny, dir))
	g := b.start(rule(b, policy.Deny, dir))
	g.Close()
	if _, err := Start(kernel.DefaultPinRoot, missing, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a policy with a missing path was taken")
	}
	b.Expect(true, b.Other, "open-write", dir, "after a change that failed")
	b.Expect(false, b.Trusted, "open-write", dir, "after a change that failed")
}

// refuseLayout expects that pins of another layout are refused by name, until they are removed.
func (b *bench) refuseLayout(p policy.Policy) {
	b.t.Helper()
	of := kernel.MapDirectory(kernel.DefaultPinRoot, product, abi+7)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		b.t.Fatal(err)
	}
	defer m.Close() //nolint:errcheck // of a test
	if err := errors.Join(os.MkdirAll(of, 0o700), m.Pin(filepath.Join(of, "any"))); err != nil {
		b.t.Fatal(err)
	}
	_, startErr := Start(kernel.DefaultPinRoot, p, slog.New(slog.DiscardHandler))
	_, lookErr := Look(kernel.DefaultPinRoot)
	for _, err := range []error{startErr, lookErr} {
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("layout %d", abi+7)) || !strings.Contains(err.Error(), "`shunt guard stop`") {
			b.t.Errorf("pins of another layout: %v", err)
		}
	}
	if was, err := Stop(kernel.DefaultPinRoot); !was || err != nil {
		b.t.Errorf("stop: %v %v", was, err)
	}
}

// A load writes, before it switches, only sides that no hook reads: so the changes that a program makes at that moment
// stay.
func (b *bench) testLoadWritesNothingInForce(g *Guard, dir string) {
	now, next := g.number&1, g.number&1^1
	w := work{dir}
	fd, err := unix.Open(w.prot("f"), unix.O_PATH, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	read := func(side uint64, file guardGuardFile) (all [2]guardGuardSide) {
		if err := errors.Join(g.maps[fileMaps[side]].Lookup(&file, &all[0]), g.maps[labelMaps[side]].Lookup(uint32(fd), &all[1])); err != nil {
			b.t.Fatal(err)
		}
		return all
	}
	l := &labeler{key: g.coll.Programs[guardProgShKey], labels: g.maps[labelMaps[next]], files: g.maps[fileMaps[next]], generation: g.number + 1}
	file, err := l.identity(fd)
	if err = errors.Join(err, l.label(fd, judge.Marks{Rules: 1 << 9})); err != nil {
		b.t.Fatal(err)
	}
	was := read(now, file)
	if was[0].Generation != g.number || was[0].Rules == 0 || was[1] != was[0] {
		b.t.Fatalf("in force: %+v", was)
	}
	if err := l.label(fd, judge.Marks{Rules: 1 << 8, Above: 1 << 7}); err != nil {
		b.t.Fatal(err)
	}
	if is := read(now, file); is != was {
		b.t.Errorf("in force before %+v, and after it %+v", was, is)
	}
	if is := read(next, file); is[0] != is[1] || is[0].Rules != 1<<9|1<<8 || is[0].Above != 1<<7 || is[0].Generation != g.number+1 {
		b.t.Errorf("of the next policy: %+v", is)
	}
	b.Expect(true, b.Other, "open-write", dir, "while a policy is being loaded")
}

// Where processes have other numbers no policy can be loaded, and Enforces says so too.
func TestEnforcesNothingFromOtherNamespaces(t *testing.T) {
	needLSM(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SHUNT_GUARD_ENFORCES=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "this is not the machine's initial pid namespace") {
		t.Errorf("%v: %s", err, out)
	}
}
