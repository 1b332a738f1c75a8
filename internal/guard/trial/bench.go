package trial

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Bench is a disk of the test's own, with three programs that are copies of this test's binary.
type Bench struct {
	Root           string
	Trusted, Other string
	Guarded        string // whose processes a rule protects

	t *testing.T
}

// NewBench makes a file system with ext4, whose inodes leave memory, in a file. With a journal, the number of a
// deleted file is used again at once; without one, after a minute at the earliest.
func NewBench(t *testing.T) *Bench {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	b := &Bench{t: t, Root: filepath.Join(dir, "disk")}
	image := filepath.Join(dir, "image")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 256<<20), os.Mkdir(b.Root, 0o755)); err != nil {
		t.Fatal(err)
	}
	b.run("mke2fs", "-F", "-j", "-J", "size=4", image)
	b.run("mount", "-t", "ext4", "-o", "loop,user_xattr,acl", image, b.Root)
	t.Cleanup(func() {
		if err := unix.Unmount(b.Root, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	b.Trusted, b.Other, b.Guarded = filepath.Join(b.Root, "trusted"), filepath.Join(b.Root, "other"), filepath.Join(b.Root, "guarded")
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{b.Trusted, b.Other, b.Guarded} {
		if err := os.WriteFile(program, self, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// With returns the bench for a test below.
func (b *Bench) With(t *testing.T) *Bench {
	sub := *b
	sub.t = t
	return &sub
}

func (b *Bench) run(program string, args ...string) {
	b.t.Helper()
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		b.t.Fatalf("%s %v: %v\n%s", program, args, err, out)
	}
}

// Folder makes a folder with the files that an operation is tried on.
func (b *Bench) Folder(name string) string {
	b.t.Helper()
	dir := filepath.Join(b.Root, name)
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

// Copy copies a program.
func (b *Bench) Copy(from, to string) {
	b.t.Helper()
	text, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, text, 0o755)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// Evict has the kernel drop from memory all files that are not open. The first pass removes pages and names, which
// hold inodes.
func (b *Bench) Evict() {
	b.t.Helper()
	unix.Sync()
	for range 2 {
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
			b.t.Fatal(err)
		}
	}
}

// Attempt has a program try an operation, and reports whether it was denied.
func (b *Bench) Attempt(program, operation, dir string) (denied bool) {
	b.t.Helper()
	h, err := Begin(program, operation, dir)
	if err != nil {
		b.t.Fatal(err)
	}
	said, err := h.Attempt()
	if err != nil {
		b.t.Fatal(err)
	}
	return strings.HasPrefix(said, fmt.Sprintf("refused %d ", unix.EPERM))
}

// Expect has a program try an operation, and compares whether it was denied.
func (b *Bench) Expect(denied bool, program, operation, dir, when string) {
	b.t.Helper()
	if got := b.Attempt(program, operation, dir); got != denied {
		b.t.Errorf("%s, %s by %s: denied %v, want %v", when, operation, filepath.Base(program), got, denied)
	}
}

// Snapshot is everything that an operation could change in a folder.
func Snapshot(dir string) string {
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

// Actor tries an operation in a place that is protected or not.
type Actor struct {
	Name      string
	IsTrusted bool
	IsFree    bool
}

// Actors try each row.
var Actors = []Actor{{Name: "untrusted"}, {Name: "trusted", IsTrusted: true}, {Name: "free", IsFree: true}}

// Try is one operation by one actor.
type Try struct {
	Row    *Row
	Actor  Actor
	Dir    string
	Helper *Helper // if it has something from before the policy
	Target *Helper
	Was    string // the Snapshot before it
}

// Prepare makes the files and processes of a try, before a policy is loaded.
func (b *Bench) Prepare(r *Row, a Actor) *Try {
	b.t.Helper()
	t := &Try{Row: r, Actor: a, Dir: b.Folder(r.Name + "." + a.Name)}
	if r.setup != nil {
		if err := r.setup(t.Dir); err != nil {
			b.t.Fatalf("%s: %v", r.Name, err)
		}
	}
	var err error
	if r.IsAboutProcess() {
		program := b.Trusted
		if r.IsGuarded {
			program = b.Guarded
		}
		if a.IsFree {
			program = b.Other
		}
		if t.Target, err = Begin(program, "wait", t.Dir); err == nil {
			err = os.WriteFile(filepath.Join(t.Dir, "out", "pid"), []byte(strconv.Itoa(t.Target.Cmd.Process.Pid)), 0o644)
		}
	}
	if err == nil && r.before != nil {
		t.Helper, err = Begin(b.Program(a), r.Name, t.Dir)
	}
	if err != nil {
		b.t.Fatalf("%s: %v", r.Name, err)
	}
	return t
}

// Program returns the executable of an actor.
func (b *Bench) Program(a Actor) string {
	if a.IsTrusted {
		return b.Trusted
	}
	return b.Other
}

// MakeTry has a try made, and returns its helper's result.
func (b *Bench) MakeTry(t *testing.T, one *Try) string {
	h := one.Helper
	if h == nil {
		var err error
		if h, err = Begin(b.Program(one.Actor), one.Row.Name, one.Dir); err != nil {
			t.Fatal(err)
		}
	}
	said, err := h.Attempt()
	if err != nil {
		t.Fatalf("%s: %v", said, err)
	}
	return said
}
