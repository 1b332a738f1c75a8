package protect

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
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

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

func itoa(n int) string { return strconv.Itoa(n) }

// bench is a disk of the test's own, with three programs that are copies of this test's binary.
type bench struct {
	t              *testing.T
	root           string
	trusted, other string
	guarded        string // whose processes a rule protects
}

// newBench makes a file system with ext4, whose inodes leave memory, in a file. With a journal, the number of a
// deleted file is used again at once; without one, after a minute at the earliest.
func newBench(t *testing.T) *bench {
	t.Helper()
	needLSM(t)
	return newDisk(t)
}

// newDisk is newBench for kernels without BPF LSM, too.
func newDisk(t *testing.T) *bench {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, root: filepath.Join(dir, "disk")}
	image := filepath.Join(dir, "image")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 256<<20), os.Mkdir(b.root, 0o755)); err != nil {
		t.Fatal(err)
	}
	b.run("mke2fs", "-F", "-j", "-J", "size=4", image)
	b.run("mount", "-t", "ext4", "-o", "loop,user_xattr,acl", image, b.root)
	t.Cleanup(func() {
		if err := unix.Unmount(b.root, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	b.trusted, b.other, b.guarded = filepath.Join(b.root, "trusted"), filepath.Join(b.root, "other"), filepath.Join(b.root, "guarded")
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{b.trusted, b.other, b.guarded} {
		if err := os.WriteFile(program, self, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

func (b *bench) run(program string, args ...string) {
	b.t.Helper()
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		b.t.Fatalf("%s %v: %v\n%s", program, args, err, out)
	}
}

// folder makes a folder with the files that an operation is tried on.
func (b *bench) folder(name string) string {
	b.t.Helper()
	dir := filepath.Join(b.root, name)
	w := work{dir: dir}
	page := strings.Repeat("kept\n", 1000)
	for _, folder := range []string{w.prot("sub"), w.prot("empty"), w.out("")} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			b.t.Fatal(err)
		}
	}
	for _, file := range []string{w.prot("f"), w.prot("g"), w.prot("sub/h"), w.out("source"), w.out("program")} {
		if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
			b.t.Fatal(err)
		}
	}
	if err := errors.Join(os.Link(w.prot("f"), w.out("l")), unix.Setxattr(w.prot("f"), "user.kept", []byte("x"), 0)); err != nil {
		b.t.Fatal(err)
	}
	return dir
}

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
func (b *bench) listen(g *Guard) (told func() []Attempt) {
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	var all []Attempt
	done := make(chan error, 1)
	go func() {
		done <- g.Listen(ctx, func(a Attempt) error {
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
	return func() []Attempt {
		stop()
		return all
	}
}

// snapshot is everything that an operation could change in a folder.
func snapshot(dir string) string {
	var s strings.Builder
	w := work{dir: dir}
	for _, top := range []string{w.prot(""), w.out("program")} {
		_ = filepath.WalkDir(top, func(name string, d fs.DirEntry, err error) error {
			var stat unix.Stat_t
			if err == nil {
				err = unix.Lstat(name, &stat)
			}
			if err != nil {
				fmt.Fprintf(&s, "%s: %v\n", name, err)
				return nil
			}
			fmt.Fprintf(&s, "%s dev %d ino %d mode %o links %d owner %d:%d size %d mtime %d.%09d blocks %d", name, stat.Dev, stat.Ino, stat.Mode, stat.Nlink,
				stat.Uid, stat.Gid, stat.Size, stat.Mtim.Sec, stat.Mtim.Nsec, stat.Blocks)
			if d.Type().IsRegular() {
				text, _ := os.ReadFile(name)
				var names [1024]byte
				n, _ := unix.Listxattr(name, names[:])
				flags := uint32(0)
				if fd, err := unix.Open(name, unix.O_RDONLY, 0); err == nil {
					flags, _ = unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
					_ = unix.Close(fd)
				}
				fmt.Fprintf(&s, " sum %x xattrs %q flags %x", sha256.Sum256(text), names[:max(n, 0)], flags)
			}
			s.WriteString("\n")
			return nil
		})
	}
	return s.String()
}

// actor tries an operation in a place that is protected or not.
type actor struct {
	name      string
	isTrusted bool
	isFree    bool
}

var actors = []actor{{name: "untrusted"}, {name: "trusted", isTrusted: true}, {name: "free", isFree: true}}

// try is one operation by one actor.
type try struct {
	row    *row
	actor  actor
	dir    string
	helper *helper // if it has something from before the policy
	target *helper
	was    string
}

func (b *bench) prepare(r *row, a actor) *try {
	b.t.Helper()
	t := &try{row: r, actor: a, dir: b.folder(r.name + "." + a.name)}
	if r.setup != nil {
		if err := r.setup(t.dir); err != nil {
			b.t.Fatalf("%s: %v", r.name, err)
		}
	}
	var err error
	if r.isAboutProcess() {
		program := b.trusted
		if r.isGuarded {
			program = b.guarded
		}
		if a.isFree {
			program = b.other
		}
		if t.target, err = begin(program, "wait", t.dir); err == nil {
			err = os.WriteFile(filepath.Join(t.dir, "out", "pid"), []byte(itoa(t.target.cmd.Process.Pid)), 0o644)
		}
	}
	if err == nil && r.before != nil {
		t.helper, err = begin(b.program(a), r.name, t.dir)
	}
	if err != nil {
		b.t.Fatalf("%s: %v", r.name, err)
	}
	return t
}

func (b *bench) program(a actor) string {
	if a.isTrusted {
		return b.trusted
	}
	return b.other
}

// TestMatrix tries every operation of the matrix three times: by a program that is not trusted, by one that is,
// and by the first one on files that are not protected. The first is denied and changes nothing, and the
// others show that the operation works, and changes something.
func TestMatrix(t *testing.T) {
	began := time.Now()
	phase := func(name string) { t.Logf("%s after %v", name, time.Since(began).Round(time.Second/10)) }
	b := newBench(t)
	phase("the bench")
	rule := policy.Rule{Name: "matrix", Deny: policy.Operations, Trust: policy.Trust{Programs: policy.Programs(b.trusted)}, Mode: policy.Deny}
	var tries []*try
	for i := range matrix {
		for _, a := range actors {
			one := b.prepare(&matrix[i], a)
			tries = append(tries, one)
			if !a.isFree {
				rule.Paths = append(rule.Paths, filepath.Join(one.dir, "prot"))
				rule.Trust.Programs = append(rule.Trust.Programs, policy.Program{Path: filepath.Join(one.dir, "out", "program")})
			}
		}
	}
	phase("the files and processes")
	bystander, err := begin(b.other, "wait", "")
	if err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(b.root, "pid")
	if err := os.WriteFile(pidFile, []byte(itoa(bystander.cmd.Process.Pid)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	trust, both := policy.Trust{Programs: policy.Programs(b.trusted)}, []string{policy.Kill, policy.Ptrace}
	rules := []policy.Rule{rule,
		{Name: "processes", Program: b.guarded, Deny: both, Trust: trust, Mode: policy.Deny},
		{Name: "bystander", PIDFile: pidFile, Deny: both, Trust: trust, Mode: policy.Deny},
		{Name: "self", IsSelf: true, Deny: policy.ProcessOperations, Trust: policy.Trust{IsInit: true}, Mode: policy.Deny}}
	g := b.start(policy.Policy{Rules: rules})
	phase("the policy")
	told := b.listen(g)
	// Files that are not open leave memory, and their labels with them.
	b.evict()
	for _, one := range tries {
		one.was = snapshot(one.dir)
		t.Run(one.row.name+"/"+one.actor.name, func(t *testing.T) { b.judge(t, one) })
	}
	t.Run("processes", func(t *testing.T) { b.testProcesses(t, g, bystander) })
	phase("the tries")
	attempts := told()
	phase("the events")
	for i := range matrix {
		r := &matrix[i]
		if r.notCovered != "" {
			continue
		}
		if !wasTold(attempts, r, b.other) {
			t.Errorf("%s was denied, and no event says so", r.name)
		}
	}
	if s := g.reader.By()[0]; s.Lost > 0 || s.Broken > 0 {
		t.Errorf("the stream of events: %+v", s)
	}
	b.expectMapping(g)
}

// wasTold looks for the event of an operation.
func wasTold(attempts []Attempt, r *row, program string) bool {
	for _, a := range attempts {
		if a.Denied && a.Operation == r.operation && a.Program == program && a.Rules[0] == r.rule() &&
			(strings.Contains(a.Path, "/"+r.name+".untrusted") || r.isAboutProcess() && a.Target != 0) {
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
		if rows = append(rows, filepath.Base(row)); !is || m.Program != b.other || m.Can != policy.Write {
			b.t.Errorf("a mapping from before the policy: %+v", m)
		}
	}
	slices.Sort(rows)
	if want := []string{"old-mapping-filled-by-userfaultfd", "old-writable-mapping"}; !slices.Equal(rows, want) {
		b.t.Errorf("mappings from before the policy are of %q, want %q", rows, want)
	}
}

// makeTry has a try made, and returns its helper's result.
func (b *bench) makeTry(t *testing.T, one *try) string {
	h := one.helper
	if h == nil {
		var err error
		if h, err = begin(b.program(one.actor), one.row.name, one.dir); err != nil {
			t.Fatal(err)
		}
	}
	said, err := h.attempt()
	if err != nil {
		t.Fatalf("%s: %v", said, err)
	}
	return said
}

func (b *bench) judge(t *testing.T, one *try) {
	said := b.makeTry(t, one)
	is := snapshot(one.dir)
	isEnded := false
	if one.target != nil {
		err := one.target.end()
		var exit *exec.ExitError
		if isEnded = errors.As(err, &exit); err != nil && !(isEnded && one.row.isKill) {
			t.Errorf("the target: %v", err)
		}
	}
	isChanged := is != one.was || isEnded || one.row.isAboutProcess() && !one.row.isKill
	isRefused := one.actor.name == "untrusted" || one.actor.isTrusted && one.row.isNobodys
	if isRefused && one.row.notCovered == "" {
		want := fmt.Sprintf("refused %d ", cmp.Or(one.row.errno, unix.EPERM))
		if one.row.isSilent {
			want = "done"
		}
		if !strings.HasPrefix(said, want) {
			t.Errorf("not denied: %s", said)
		}
		if is != one.was || isEnded {
			t.Errorf("ended: %v, changed from\n%s\nto\n%s", isEnded, one.was, is)
		}
		return
	}
	if said != "done" || !isChanged {
		t.Errorf("%s, changed: %v; it should work, and change something", said, isChanged)
	}
}

func (r *row) isAboutProcess() bool { return r.isTrace || r.isGuarded }

// rule is the rule that denies the row's operation.
func (r *row) rule() string {
	if r.isGuarded {
		return "processes"
	}
	return "matrix"
}

// testProcesses tries the protection of a process that its number names, and of the guard's own.
func (b *bench) testProcesses(t *testing.T, g *Guard, bystander *helper) {
	sub := *b
	sub.t = t
	dir := b.folder("bystander")
	if err := os.WriteFile(filepath.Join(dir, "out", "pid"), []byte(itoa(bystander.cmd.Process.Pid)), 0o644); err != nil {
		t.Fatal(err)
	}
	sub.expect(true, b.other, "kill", dir, "a process that its number names")
	sub.expect(true, b.other, "signal-parent", dir, "the guard's own")
	sub.expect(true, b.trusted, "signal-parent", dir, "the guard's own")
	sub.expect(false, b.trusted, "kill", dir, "a process that its number names")
	var exit *exec.ExitError
	if err := bystander.end(); !errors.As(err, &exit) {
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
