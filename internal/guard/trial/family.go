package trial

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Family is the example of a well-known product's manual, two tables: /test trusts the programs in /test/bin,
// and /test/bin trusts nobody. Beside it is a second business, whose programs' children are not trusted.
//
//	test/data, test/bin/app      app is trusted, with the programs that it starts
//	lone/data, lone/bin/app      app is trusted alone
//	job, job2                    scripts: job executes job2, which writes to a file
//	out/sh                       an interpreter that the first business may start as itself
type Family struct {
	// IsByProc says that trust is by /proc, which has the interpreter of a script and not that it was executed as a program.
	IsByProc bool

	b *Bench
}

// Path returns the path of one of its files.
func (f *Family) Path(name string) string { return filepath.Join(f.b.Root, "family", name) }

// NewFamily makes the family's files.
func (b *Bench) NewFamily() *Family {
	b.t.Helper()
	f := &Family{b: b}
	for _, folder := range []string{"test/bin", "lone/bin", "out"} {
		if err := os.MkdirAll(f.Path(folder), 0o755); err != nil {
			b.t.Fatal(err)
		}
	}
	script := "#!/bin/sh\n"
	if err := errors.Join(
		os.WriteFile(f.Path("job"), []byte(script+"exec "+f.Path("job2")+" \"$1\"\n"), 0o755),
		os.WriteFile(f.Path("job2"), []byte(script+"echo "+changed+" > \"$1\"\n"), 0o755)); err != nil {
		b.t.Fatal(err)
	}
	for _, to := range []string{"test/bin/app", "lone/bin/app", "test/bin/copy"} {
		b.Copy(b.Trusted, f.Path(to))
	}
	shell, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil {
		b.t.Fatal(err)
	}
	b.Copy(shell, f.Path("out/sh"))
	for _, data := range []string{"test/data", "lone/data", "test/bin/settings"} {
		if err := os.WriteFile(f.Path(data), []byte("kept"), 0o644); err != nil {
			b.t.Fatal(err)
		}
	}
	return f
}

// Rules returns its rules.
func (f *Family) Rules() []policy.Rule {
	all := policy.Operations
	return []policy.Rule{
		{Name: "data", Paths: []string{f.Path("test")}, Deny: all, Mode: policy.Deny,
			Trust: policy.Trust{Programs: policy.Programs(f.Path("test/bin/app")), Children: true, Interpreters: []string{f.Path("out/sh")}}},
		{Name: "programs", Paths: []string{f.Path("test/bin")}, Deny: all, Mode: policy.Deny},
		{Name: "lone", Paths: []string{f.Path("lone")}, Deny: all, Mode: policy.Deny, Trust: policy.Trust{Programs: policy.Programs(f.Path("lone/bin/app"))}},
	}
}

// runs are the commands that programs start, by name; %T is the file that is written to, %F the family's folder.
var runs = map[string]struct {
	command     []string
	environment string
	isNameless  bool
}{
	"script":            {command: []string{"%F/job", "%T"}},
	"other shell":       {command: []string{"/bin/sh", "-c", "echo x > %T"}},
	"listed shell":      {command: []string{"%F/out/sh", "-c", "echo x > %T"}},
	"preloaded":         {command: []string{"%F/job", "%T"}, environment: "LD_PRELOAD=/tmp/evil.so"},
	"audited loader":    {command: []string{"%F/job", "%T"}, environment: "LD_AUDIT=/tmp/evil.so"},
	"library path":      {command: []string{"%F/job", "%T"}, environment: "LD_LIBRARY_PATH=/tmp"},
	"large environment": {command: []string{"%F/job", "%T"}, environment: "A=" + strings.Repeat("=LD_PRELOAD=x", 9000)},
	"nameless":          {command: []string{"%F/out/sh", "-c", "echo x > %T"}, isNameless: true},
	"nameless script":   {command: []string{"%F/job2", "%T"}, isNameless: true},
}

// startRun is the task of a helper that has to start a program.
func startRun(name, target string) error {
	one := runs[name]
	folder := target[:strings.Index(target, "/family/")] + "/family"
	var command []string
	for _, word := range one.command {
		command = append(command, strings.NewReplacer("%T", target, "%F", folder).Replace(word))
	}
	cmd := exec.Command(command[0], command[1:]...)
	if one.isNameless {
		fd, err := unix.MemfdCreate("program", 0) // not closed at exec: the interpreter of a script opens it
		if err != nil {
			return err
		}
		text, err := os.ReadFile(command[0])
		if err != nil {
			return err
		}
		file := os.NewFile(uintptr(fd), "program")
		if _, err := file.Write(text); err != nil {
			return err
		}
		// Descriptor 3 of the child is the same file, opened anew: a file that is open for writing is not
		// executed.
		open, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err == nil {
			err = file.Close()
		}
		if err != nil {
			return err
		}
		cmd.ExtraFiles = []*os.File{open}
		cmd.Path = "/proc/self/fd/3"
	}
	cmd.Env = []string{"PATH=/bin"}
	if one.environment != "" {
		cmd.Env = append(cmd.Env, one.environment)
	}
	if text, err := cmd.CombinedOutput(); err != nil {
		if !strings.Contains(string(text), "Operation not permitted") {
			return fmt.Errorf("%w: %s", err, text)
		}
		return unix.EPERM
	}
	return nil
}

// try has a program start another one that writes to a file, and compares the result.
func (f *Family) try(t *testing.T, isDenied bool, program, run, target string) {
	t.Helper()
	t.Run(program+" starts "+run, func(t *testing.T) {
		h, err := Begin(f.Path(program), "start "+run, f.Path(target))
		if err != nil {
			t.Fatal(err)
		}
		said, err := h.Attempt()
		if err != nil {
			t.Fatal(err)
		}
		if want := map[bool]string{true: "refused 1 operation not permitted", false: "done"}[isDenied]; said != want {
			t.Errorf("%s: %s, want %s", target, said, want)
		}
	})
}

// Test tries programs that are trusted, and programs that are not.
func (f *Family) Test(t *testing.T) {
	sub := f.b.With(t)
	sub.Expect(false, f.Path("test/bin/app"), "write-path", f.Path("test/data"), "the business program")
	sub.Expect(true, f.Path("test/bin/copy"), "write-path", f.Path("test/data"), "a copy of it")
	sub.Expect(true, f.Path("test/bin/app"), "write-path", f.Path("test/bin/settings"), "what trusts nobody")
	sub.Expect(true, f.Path("lone/bin/app"), "write-path", f.Path("test/data"), "another business's program")
	f.try(t, f.IsByProc, "test/bin/app", "script", "test/data")
	f.try(t, true, "lone/bin/app", "script", "lone/data")
	f.try(t, true, "test/bin/copy", "script", "test/data")
	f.try(t, true, "test/bin/app", "other shell", "test/data")
	f.try(t, false, "test/bin/app", "listed shell", "test/data")
	f.try(t, true, "test/bin/app", "preloaded", "test/data")
	f.try(t, true, "test/bin/app", "audited loader", "test/data")
	f.try(t, true, "test/bin/app", "library path", "test/data")
	f.try(t, f.IsByProc, "test/bin/app", "large environment", "test/data")
	f.try(t, true, "test/bin/app", "nameless", "test/data")
	f.try(t, true, "test/bin/app", "nameless script", "test/data")
	sub.Expect(true, f.Path("test/bin/app"), "write-after-traceme", f.Path("test/data"), "under its parent's control")
	sub.Expect(false, f.Path("test/bin/app"), "write-after-failed-fork", f.Path("test/data"), "whose fork failed")
	h, err := Begin(f.Path("test/bin/app"), "write-path", f.Path("test/data"), "LD_PRELOAD=/tmp/evil.so")
	if err != nil {
		t.Fatal(err)
	}
	if said, err := h.Attempt(); err != nil || !strings.HasPrefix(said, "refused 1 ") {
		t.Errorf("the business program, with LD_PRELOAD: %s %v", said, err)
	}
}
