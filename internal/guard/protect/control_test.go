package protect

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// control is a way to end, stop or limit the processes of a cgroup by files of cgroups, or to move a process among them. Its attempt gets
// DIR, the folder of a cgroup:
//
//	DIR             above the rule's
//	DIR/inner       the rule's, with the target
//	DIR/inner/most  below it
//	DIR-2           beside
type control struct {
	row
	file    string                            // how the path of the event ends; empty: the file of the hierarchy's root
	changes func(dir string, target int) bool // whether the attempt had its effect; nil: it ends the target, or isKill is false
	isFree  bool                              // it is also tried on a cgroup that no rule names
}

func (w *work) inGroup(name string) string { return filepath.Join(w.dir, name) }
func (w *work) beside() string             { return w.dir + "-2" }

// putText writes a text to a file of a cgroup.
func putText(path, text string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(text))
	return errors.Join(err, unix.Close(fd))
}

func puts(file, text string) func(*work) error {
	return func(w *work) error { return putText(w.inGroup(file), text) }
}

// holds returns a check of the text of a cgroup's file.
func holds(file, want string) func(string, int) bool {
	return func(dir string, _ int) bool {
		text, _ := os.ReadFile(filepath.Join(dir, file))
		return strings.TrimSpace(string(text)) == want
	}
}

// targetOf returns the number of the process in the rule's cgroup.
func targetOf(w *work) (string, error) {
	text, err := os.ReadFile(w.inGroup("inner/cgroup.procs"))
	number, _, _ := strings.Cut(string(text), "\n")
	return number, err
}

// isBeside reports whether the target was moved out.
func isBeside(dir string, target int) bool {
	at, err := cgroupOf(target)
	return err == nil && strings.HasSuffix(at, filepath.Base(dir)+"-2")
}

// elsewhereMounted mounts a file system in a mount namespace of this thread's own, and calls then there.
func elsewhereMounted(from, kind string, flags uintptr, isFile bool, then func(at string) error) error {
	if err := elsewhere(); err != nil {
		return err
	}
	at, err := os.MkdirTemp("", "shunt-")
	if err != nil {
		return err
	}
	point := filepath.Join(at, "point")
	if isFile {
		err = os.WriteFile(point, nil, 0o600)
	} else {
		err = os.Mkdir(point, 0o700)
	}
	if err == nil {
		if err = unix.Mount(from, point, kind, flags, ""); err == nil {
			err = then(point)
			err = errors.Join(err, unix.Unmount(point, unix.MNT_DETACH))
		}
	}
	return errors.Join(err, os.RemoveAll(at))
}

// beginInside starts a process that is in a cgroup from its beginning (clone3(2), CLONE_INTO_CGROUP).
func beginInside(folder string) error {
	fd, err := unix.Open(folder, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.Command(self, "wait", "")
	child.Env = os.Environ()
	child.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
	return child.Run()
}

// opensBefore opens a file of a cgroup before the policy is loaded.
func opensBefore(path func(w *work) string) func(*work) error {
	return func(w *work) (err error) {
		w.fd, err = unix.Open(path(w), unix.O_WRONLY|unix.O_CLOEXEC, 0)
		return err
	}
}

// oldWrite writes by the descriptor from before.
func oldWrite(text func(*work) (string, error)) func(*work) error {
	return func(w *work) error {
		what, err := text(w)
		if err == nil {
			_, err = unix.Write(w.fd, []byte(what))
		}
		return err
	}
}

func ownNumber(*work) (string, error) { return itoa(os.Getpid()), nil }
func digit(*work) (string, error)     { return "1", nil }

func moveOut(w *work) error {
	target, err := targetOf(w)
	if err != nil {
		return err
	}
	return putText(filepath.Join(w.beside(), "cgroup.procs"), target)
}

// controls lists these ways. A section of docs/reference/guard-matrix.md is made from it.
var controls = []control{
	{row: row{name: "cgroup.kill", group: "of the cgroup", operation: policy.Kill, isKill: true, attempt: puts("inner/cgroup.kill", "1")}, file: "/inner/cgroup.kill", isFree: true},
	{row: row{name: "cgroup.freeze", group: "of the cgroup", operation: policy.Kill, attempt: puts("inner/cgroup.freeze", "1")}, file: "/inner/cgroup.freeze", changes: holds("inner/cgroup.freeze", "1"), isFree: true},
	{row: row{name: "memory.max", group: "of the cgroup", operation: policy.Kill, attempt: puts("inner/memory.max", "1073741824")}, file: "/inner/memory.max", changes: holds("inner/memory.max", "1073741824")},
	{row: row{name: "cgroup.freeze-below", group: "of a cgroup below", operation: policy.Kill, attempt: puts("inner/most/cgroup.freeze", "1")}, file: "/inner/most/cgroup.freeze", changes: holds("inner/most/cgroup.freeze", "1")},
	{row: row{name: "cgroup.kill-above", group: "of a cgroup above", operation: policy.Kill, isKill: true, attempt: puts("cgroup.kill", "1")}, file: "/cgroup.kill"},
	{row: row{name: "cgroup.freeze-above", group: "of a cgroup above", operation: policy.Kill, attempt: puts("cgroup.freeze", "1")}, file: "/cgroup.freeze", changes: holds("cgroup.freeze", "1")},
	{row: row{name: "memory.max-above", group: "of a cgroup above", operation: policy.Kill, attempt: puts("memory.max", "1073741824")}, file: "/memory.max", changes: holds("memory.max", "1073741824")},
	{row: row{name: "cgroup.kill-by-bind-mount", group: "by another name", operation: policy.Kill, isKill: true, attempt: func(w *work) error {
		return elsewhereMounted(w.inGroup("inner/cgroup.kill"), "", unix.MS_BIND, true, func(at string) error { return putText(at, "1") })
	}}, file: "/inner/cgroup.kill"},
	{row: row{name: "cgroup.kill-by-another-mount", group: "by another name", operation: policy.Kill, isKill: true, attempt: func(w *work) error {
		return elsewhereMounted("cgroup2", "cgroup2", 0, false, func(at string) error {
			return putText(filepath.Join(at, filepath.Base(w.dir), "inner/cgroup.kill"), "1")
		})
	}}, file: "/inner/cgroup.kill"},
	{row: row{name: "cgroup.kill-in-a-cgroup-namespace", group: "by another name", operation: policy.Kill, isKill: true, attempt: func(w *work) error {
		if err := elsewhere(); err != nil {
			return err
		}
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return err
		}
		return elsewhereMounted("cgroup2", "cgroup2", 0, false, func(at string) error {
			return putText(filepath.Join(at, filepath.Base(w.dir), "inner/cgroup.kill"), "1")
		})
	}}, file: "/inner/cgroup.kill"},
	{row: row{name: "cgroup.kill-by-handle", group: "by another name", operation: policy.Kill, isKill: true, attempt: func(w *work) error {
		handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, w.inGroup("inner/cgroup.kill"), 0)
		if err != nil {
			return err
		}
		mount, err := unix.Open(w.dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		fd, err := unix.OpenByHandleAt(mount, handle, unix.O_WRONLY)
		if err != nil {
			return err
		}
		_, err = unix.Write(fd, []byte("1"))
		return err
	}}, file: "/inner/cgroup.kill"},
	{row: row{name: "cgroup.kill-opened-by-io_uring", group: "by another name", operation: policy.Kill, attempt: func(w *work) error {
		return ringPath(18, w.inGroup("inner/cgroup.kill"), 0, unix.O_WRONLY) // IORING_OP_OPENAT
	}}, file: "/inner/cgroup.kill"},
	{row: row{name: "cgroup.kill-by-a-descriptor-from-before", group: "by a descriptor from before", operation: policy.Kill, isKill: true,
		before:  opensBefore(func(w *work) string { return w.inGroup("inner/cgroup.kill") }),
		attempt: oldWrite(digit)}, file: "/inner/cgroup.kill"},
	{row: row{name: "move-in", group: "moving a process in", operation: policy.Kill, attempt: func(w *work) error {
		return putText(w.inGroup("inner/cgroup.procs"), itoa(os.Getpid()))
	}}, file: "/inner/cgroup.procs"},
	{row: row{name: "move-in-by-a-descriptor-from-before", group: "moving a process in", operation: policy.Kill,
		before:  opensBefore(func(w *work) string { return w.inGroup("inner/cgroup.procs") }),
		attempt: oldWrite(ownNumber)}, file: "/inner/cgroup.procs"},
	{row: row{name: "begin-in-it", group: "moving a process in", operation: policy.Kill, attempt: func(w *work) error { return beginInside(w.inGroup("inner")) }}, file: "/inner/cgroup.procs"},
	{row: row{name: "move-out", group: "moving a process out", operation: policy.Move, attempt: moveOut}, changes: isBeside},
	{row: row{name: "move-out-by-a-descriptor-from-before", group: "moving a process out", operation: policy.Move,
		before:  opensBefore(func(w *work) string { return filepath.Join(w.beside(), "cgroup.procs") }),
		attempt: oldWrite(targetOf)}, changes: isBeside},
}

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
		if err := putText(file, "+"+controller); err != nil {
			g.t.Fatalf("%s of %s: %v", controller, folder, err)
		}
		g.t.Cleanup(func() { _ = putText(file, "-"+controller) }) // the cgroup may be gone
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
	early := map[string]*helper{} // they have something from before the policy
	for _, c := range controls {
		for _, program := range []string{b.other, b.trusted} {
			if c.before == nil {
				continue
			}
			h, err := begin(program, c.name, above)
			if err != nil {
				t.Fatal(err)
			}
			early[program+c.name] = h
		}
	}
	rule := policy.Rule{Name: "group", Cgroup: groups.path("group/inner"), Deny: []string{policy.Kill, policy.Move}, Trust: policy.Trust{Programs: policy.Programs(b.trusted, ownProgram(t))}, Mode: policy.Deny}
	g := b.start(policy.Policy{Rules: []policy.Rule{rule}})
	told := b.listen(g)
	try := func(c *control, program, dir, group string, isDenied bool) {
		t.Run(c.name+"/"+filepath.Base(program)+" in "+group, func(t *testing.T) {
			sub := *b
			sub.t = t
			sub.testControl(groups, c, early[program+c.name], program, dir, group, isDenied)
		})
	}
	for i := range controls {
		c := &controls[i]
		try(c, b.other, above, "group", true)
		try(c, b.trusted, above, "group", false)
		if c.isFree {
			try(c, b.other, free, "free", false)
		}
	}
	t.Run("explanations", func(t *testing.T) { b.explainControls(t, groups, above) })
	t.Run("what is free", func(t *testing.T) { b.testFreeControls(t, groups, above) })
	rule.Deny = []string{policy.Kill}
	if err := g.Apply(policy.Policy{Rules: []policy.Rule{rule}}); err != nil {
		t.Fatal(err)
	}
	try(controlOf("move-out"), b.other, above, "group", false)
	try(controlOf("move-in"), b.other, above, "group", true)
	for _, name := range []string{"move-in", "begin-in-it"} { // which cross the root, as move-out does
		try(controlOf(name), b.other, free, "free", false)
	}
	rule.Mode = policy.Audit
	if err := g.Apply(policy.Policy{Rules: []policy.Rule{rule}}); err != nil {
		t.Fatal(err)
	}
	try(controlOf("cgroup.freeze-below"), b.other, above, "group", false)
	attempts := told()
	for i := range controls {
		c := &controls[i]
		if !slices.ContainsFunc(attempts, func(a Attempt) bool { return a.Denied && c.isAbout(a, b.other, groups) }) {
			t.Errorf("%s was denied, and no event says so", c.name)
		}
	}
	if c := controlOf("cgroup.freeze-below"); !slices.ContainsFunc(attempts, func(a Attempt) bool { return !a.Denied && c.isAbout(a, b.other, groups) }) {
		t.Errorf("%s was audited, and no event says so", c.name)
	}
	if denied := slices.DeleteFunc(attempts, func(a Attempt) bool { return !a.Denied }); len(denied) != len(controls)+1 {
		t.Errorf("%d operations were denied, and %d were tried: %v", len(denied), len(controls)+1, denied)
	}
}

func controlOf(name string) *control {
	return &controls[slices.IndexFunc(controls, func(c control) bool { return c.name == name })]
}

// isAbout reports whether an event is about this way.
func (c *control) isAbout(a Attempt, program string, groups groups) bool {
	want := groups.path("group") + c.file
	if c.file == "" {
		want = "/cgroup.procs"
	}
	return a.Operation == c.operation && a.Program == program && a.Target == 0 && strings.HasSuffix(a.Path, want) && slices.Equal(a.Rules, []string{"group"}) &&
		(c.file != "" || !strings.Contains(a.Path, "shunt-narrow"))
}

// testControl tries a way on a new process in the rule's cgroup.
func (b *bench) testControl(groups groups, c *control, h *helper, program, dir, group string, isDenied bool) {
	b.t.Helper()
	target, err := begin(b.guarded, "wait", "")
	if err != nil {
		b.t.Fatal(err)
	}
	groups.move(target.cmd.Process.Pid, group+"/inner")
	if h == nil {
		if h, err = begin(program, c.name, dir); err != nil {
			b.t.Fatal(err)
		}
	}
	said, err := h.attempt()
	if err != nil {
		b.t.Error(err)
	}
	isChanged := c.changes != nil && c.changes(dir, target.cmd.Process.Pid)
	for _, file := range []string{"cgroup.freeze", "inner/cgroup.freeze", "inner/most/cgroup.freeze"} {
		err = errors.Join(err, putText(filepath.Join(dir, file), "0"))
	}
	if err := errors.Join(err, putText(filepath.Join(dir, "memory.max"), "max"), putText(filepath.Join(dir, "inner/memory.max"), "max")); err != nil {
		b.t.Error(err)
	}
	var exit *exec.ExitError
	err = target.end()
	isEnded := errors.As(err, &exit)
	if err != nil && !isEnded {
		b.t.Error(err)
	}
	want := "done"
	if isDenied {
		want = fmt.Sprintf("refused %d ", unix.EPERM)
	}
	if !strings.HasPrefix(said, want) || isEnded != (c.isKill && !isDenied) || isChanged != (c.changes != nil && !isDenied) {
		b.t.Errorf("%s, it ended the target: %v, it changed something: %v; denied should be %v", said, isEnded, isChanged, isDenied)
	}
}

// frees lists operations that a rule with a cgroup does not forbid.
var frees = []row{
	{name: "ask-whether-it-may", attempt: func(w *work) error { return unix.Access(w.inGroup("inner/cgroup.kill"), unix.W_OK) }},
	{name: "read-a-state", attempt: func(w *work) error { _, err := os.ReadFile(w.inGroup("inner/cgroup.freeze")); return err }},
	{name: "ask-to-be-told-of-pressure", attempt: func(w *work) error {
		fd, err := unix.Open(w.inGroup("inner/memory.pressure"), unix.O_RDWR, 0)
		if err != nil {
			return err
		}
		return unix.Close(fd)
	}},
	{name: "switch-a-controller-above", attempt: func(w *work) error { return putText(w.inGroup("cgroup.subtree_control"), "+memory") }},
	{name: "make-and-remove-a-cgroup-below", attempt: func(w *work) error {
		return errors.Join(os.Mkdir(w.inGroup("inner/new"), 0o755), os.Remove(w.inGroup("inner/new")))
	}},
	{name: "move-between-others", attempt: func(w *work) error {
		one, two := filepath.Join(w.beside(), "one"), filepath.Join(w.beside(), "two")
		if err := errors.Join(os.Mkdir(one, 0o755), os.Mkdir(two, 0o755)); err != nil {
			return err
		}
		return putText(filepath.Join(two, "cgroup.procs"), itoa(os.Getpid()))
	}},
}

// testFreeControls expects that programs may do operations that end, stop or move no process of the rule.
func (b *bench) testFreeControls(t *testing.T, groups groups, dir string) {
	for _, r := range frees {
		h, err := begin(b.other, r.name, dir)
		if err != nil {
			t.Fatal(err)
		}
		if r.name == "move-between-others" { // it begins below the common parent
			groups.move(h.cmd.Process.Pid, "group-2")
		}
		if said, err := h.attempt(); said != "done" || err != nil {
			t.Errorf("%s: %s %v", r.name, said, err)
		}
	}
	for _, name := range []string{"one", "two"} {
		if err := os.Remove(filepath.Join(dir+"-2", name)); err != nil {
			t.Error(err)
		}
	}
	h, err := begin(b.other, "cgroup.freeze-below", dir)
	if err != nil {
		t.Fatal(err)
	}
	groups.move(h.cmd.Process.Pid, "group/inner")
	said, err := h.attempt()
	if err := errors.Join(err, putText(filepath.Join(dir, "inner/most/cgroup.freeze"), "0")); said != "done" || err != nil {
		t.Errorf("a process of the rule: %s %v", said, err)
	}
}

// TestGroupsAreWatched expects the programs of ofGroups to be attached only while a rule names a cgroup, also after a change of agents.
func TestGroupsAreWatched(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(b.root, "f")
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
		{b.other, "", "/inner/cgroup.kill", policy.Kill, Denied}, {b.trusted, "", "/inner/cgroup.kill", policy.Kill, Allowed}, {b.other, "group/inner", "/inner/cgroup.kill", policy.Kill, Allowed},
		{b.other, "", "/inner/most/cgroup.procs", policy.Kill, Denied}, {b.other, "", "/memory.max", policy.Kill, Denied}, {b.other, "", "/cgroup.procs", policy.Kill, Allowed},
		{b.other, "", "/cgroup.procs", policy.Move, Denied}, {b.other, "", "/../cgroup.procs", policy.Move, Denied}, {b.other, "", "-2/cgroup.kill", policy.Kill, Allowed},
	} {
		h, err := begin(c.program, "wait", dir)
		if err != nil {
			t.Fatal(err)
		}
		if c.in != "" {
			groups.move(h.cmd.Process.Pid, c.in)
		}
		e, err := Explain(kernel.DefaultPinRoot, dir+c.file, h.cmd.Process.Pid)
		if err := errors.Join(err, h.end()); err != nil {
			t.Fatal(err)
		}
		if e.of(c.operation).Verdict != c.want || len(e.Operations) > 2 {
			t.Errorf("%s of %s by %s in %q: %+v", c.operation, c.file, filepath.Base(c.program), c.in, e)
		}
	}
}

func TestControlIn(t *testing.T) {
	const mounts = "24 30 0:22 / /sys rw - sysfs sysfs rw\n" +
		"31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n" +
		"55 30 0:27 /system.slice/app.service /mnt/own rw - cgroup2 cgroup2 rw\n" +
		"56 30 0:28 / /mnt/first rw - cgroup cgroup rw,freezer\n"
	for path, want := range map[string]controlFile{
		"/sys/fs/cgroup/cgroup.procs":                {"/", "cgroup.procs"},
		"/sys/fs/cgroup/system.slice/a/cgroup.kill":  {"/system.slice/a", "cgroup.kill"},
		"/mnt/own/cgroup.freeze":                     {"/system.slice/app.service", "cgroup.freeze"},
		"/mnt/own/below/cgroup.freeze":               {"/system.slice/app.service/below", "cgroup.freeze"},
		"/mnt/first/a/freezer.state":                 {},
		"/sys/fs/cgroup-of-another-kind/cgroup.kill": {},
	} {
		if c, is := controlIn(mounts, path); c != want || is != (want != controlFile{}) {
			t.Errorf("%s: %+v %v, want %+v", path, c, is, want)
		}
	}
	if _, is := controlAt("/proc/self/status"); is {
		t.Error("a file of /proc is one of a cgroup")
	}
}

func TestRulesAboutAControlFile(t *testing.T) {
	group := func(path string) guardGuardNarrow {
		n, err := groupOf(policy.Rule{Cgroup: path})
		if err != nil {
			t.Skip(err)
		}
		return n
	}
	groups := narrows{0: group("/a/b"), 1: group("/a"), 2: group("/ab")}
	for _, c := range []struct {
		file       controlFile
		kill, move uint64
	}{
		{controlFile{"/a/b", "cgroup.kill"}, 1 | 2, 0}, {controlFile{"/a/b/c", "cgroup.procs"}, 1 | 2, 0}, {controlFile{"/a", "cgroup.kill"}, 1 | 2, 0}, {controlFile{"/a", "cpu.max"}, 2, 0},
		{controlFile{"/a", "cgroup.procs"}, 2, 1}, {controlFile{"/", "cgroup.procs"}, 0, 1 | 2 | 4}, {controlFile{"/", "memory.max"}, 1 | 2 | 4, 0}, {controlFile{"/a/b", "memory.pressure"}, 0, 0},
		{controlFile{"/a/b", "cgroup.pressure"}, 1 | 2, 0}, {controlFile{"/abc", "cgroup.kill"}, 0, 0},
	} {
		if got := c.file.about(&groups); got[guardGuardOpGUARD_KILL] != c.kill || got[guardGuardOpGUARD_MOVE] != c.move {
			t.Errorf("%+v: %v", c.file, got)
		}
	}
}
