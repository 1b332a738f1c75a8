package decoy

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
)

// stand is a folder with users' files and decoys, and a watch of it.
type stand struct {
	t      testing.TB
	base   string
	files  []string // users'
	state  string
	store  string
	watch  *Watch
	found  chan detect.Found
	notes  chan detect.Found
	cancel context.CancelFunc
	asked  func(tid int)
}

const (
	standFolders = 4  // the base, two in it, and one in one of these
	standFiles   = 50 // in each
)

func newStand(t testing.TB, action string, trust ...string) *stand {
	t.Helper()
	return newStandThat(t, nil, action, trust...)
}

// newStandThat calls asked before an open is judged.
func newStandThat(t testing.TB, asked func(tid int), action string, trust ...string) *stand {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for permission events of fanotify")
	}
	root := t.TempDir()
	s := &stand{t: t, asked: asked, base: filepath.Join(root, "data"), state: filepath.Join(root, "run"), store: filepath.Join(root, "lib"), found: make(chan detect.Found, 64), notes: make(chan detect.Found, 4096)}
	for _, folder := range []string{"", "letters", "letters/old", "pictures"} {
		s.fill(filepath.Join(s.base, folder))
	}
	s.begin(action, trust...)
	return s
}

// fill makes users' files.
func (s *stand) fill(folder string) {
	s.t.Helper()
	if err := os.MkdirAll(folder, 0o755); err != nil {
		s.t.Fatal(err)
	}
	for i := range standFiles {
		path := filepath.Join(folder, fmt.Sprintf("%c file %d.txt", 'A'+i%26+32*(i%2), i))
		if err := os.WriteFile(path, append(plain, bytes.Repeat([]byte("x"), 100*i+200)...), 0o600); err != nil {
			s.t.Fatal(err)
		}
		s.files = append(s.files, path)
	}
}

func (s *stand) begin(action string, trust ...string) {
	s.t.Helper()
	part := policy.Decoys{Folders: []string{s.base}, Depth: 2, Action: action, Trust: trust}
	folders, left, err := Find([]policy.Decoys{part})
	if err != nil || len(left) > 0 || len(folders) != standFolders {
		s.t.Fatal(folders, left, err)
	}
	if s.watch, err = NewWatch(Options{Folders: folders, State: s.state}); err != nil {
		s.t.Fatal(err)
	}
	store, err := Open(s.store)
	if err != nil {
		s.t.Fatal(err)
	}
	made, err := store.Make(s.watch.Folders())
	if err != nil || len(made.Left) > 0 || len(made.Done) != standFolders*perFolder {
		s.t.Fatal(made, err)
	}
	s.watch.Mark(store.Decoys())
	if err := store.Close(); err != nil {
		s.t.Fatal(err)
	}
	s.watch.asked = s.asked
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	ended := make(chan error, 1)
	go func() {
		ended <- s.watch.Run(ctx, func(f detect.Found) error {
			if f.Rule == RuleEncryptor {
				s.found <- f
			} else {
				s.notes <- f
			}
			return nil
		})
	}()
	s.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Error(err)
		}
		if err := s.watch.Close(); err != nil {
			s.t.Error(err)
		}
	})
}

// launch begins a program in a process group of its own.
func (s *stand) launch(environment string, name string, arguments ...string) *exec.Cmd {
	s.t.Helper()
	c := exec.Command(name, arguments...)
	c.Dir = s.base
	c.Env = append(os.Environ(), environment)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Stderr = s.t.Output()
	if err := process.StartTied(c); err != nil {
		s.t.Fatal(err)
	}
	return c
}

func (s *stand) encryptor(way, order, workers string) *exec.Cmd {
	return s.launch(doing+"="+way+" "+order+" "+workers+" "+s.base, "/proc/self/exe")
}

// finish kills the remaining processes of a program.
func finish(c *exec.Cmd) {
	_ = unix.Kill(-c.Process.Pid, unix.SIGKILL)
	_ = c.Wait()
}

// stopped waits until the program is stopped at decoys, and counts the users' files that it harmed.
func (s *stand) stopped(c *exec.Cmd) (harmed int, f detect.Found) {
	s.t.Helper()
	defer finish(c)
	select {
	case f = <-s.found:
	case <-time.After(time.Minute):
		s.t.Fatalf("nothing was found: %d of %d files are harmed, %+v", harmedFiles(s.t, s.files), len(s.files), s.watch.Status())
	}
	trees, err := Stopped(s.state)
	if err != nil || len(trees) != 1 {
		s.t.Fatalf("%+v, %v", trees, err)
	}
	end := time.Now().Add(time.Minute)
	for _, m := range trees[0].Processes { // until all are
		for m.isThere() && !isStopped(m.PID) && !beginsStopped(s.t, m.PID) {
			if time.Now().After(end) {
				s.t.Fatalf("process %d of %+v is not stopped", m.PID, trees[0].Processes)
			}
			unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil) //nolint:errcheck // it is looked again
		}
	}
	return harmedFiles(s.t, s.files), f
}

// isStopped reports whether a process or thread is stopped, or has ended.
func isStopped(pid int) bool {
	state := stateOf(pid)
	return state == "T" || state == "Z" || state == ""
}

// beginsStopped reports whether a process begins another one that is stopped. It waits in the kernel until the other
// has another program (CLONE_VFORK, by which Go begins programs), and no signal but SIGKILL reaches it there: it does
// nothing any more.
func beginsStopped(t testing.TB, pid int) bool {
	t.Helper()
	if stateOf(pid) != "D" {
		return false
	}
	all, err := processes()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if p.parent == pid && stateOf(p.pid) == "T" {
			return true
		}
	}
	return false
}

// stateOf is a letter of proc_pid_stat(5); empty: it has ended.
func stateOf(pid int) string {
	stat, err := process.ReadStat(pid)
	if err != nil {
		return ""
	}
	return stat.State()
}

var all = flag.Bool("all", false, "try every way, order and number of workers, to measure")

// neighbours are orders in which two decoys come first, by the property that sorts them.
var neighbours = []string{"name", "name-reverse", "newest", "oldest", "smallest", "largest", "depth-first", "breadth-first"}

// A program that works through files one after the other is stopped before it has harmed any, in these orders.
func TestEncryptorsAreStoppedBeforeTheFirstFile(t *testing.T) {
	for _, order := range neighbours {
		for _, workers := range []string{"1", "fork"} {
			expectHarm(t, "in-place", order, workers, 0)
		}
		expectHarm(t, "copy-and-unlink", order, "1", 0)
	}
	for way := range ways {
		expectHarm(t, way, "name", "1", 0)
	}
}

// A program that opens a decoy waits for the judge, however late that is.
func TestAnOpenWaits(t *testing.T) {
	var waited atomic.Int32
	s := newStandThat(t, func(tid int) {
		for looks := 0; looks < 2000; { // the thread sleeps in its open all the time, or has ended, which it can only if it did not wait
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", tid))
			if err != nil || isStopped(tid) {
				return
			}
			if bytes.HasPrefix(text, fmt.Append(nil, unix.SYS_OPENAT, " ")) {
				looks++
			} else {
				looks = 0
			}
		}
		waited.Add(1)
	}, rule.Stop)
	n, _ := s.stopped(s.encryptor("in-place", "name", "1"))
	if n > 0 || waited.Load() == 0 {
		t.Errorf("%d of %d files are harmed; %d opens waited", n, len(s.files), waited.Load())
	}
}

// In other orders decoys are found only by chance, as rare as they are among the files, and threads that do not wait at
// a decoy go on until the program is stopped: they meet one of the next folder at the latest.
func TestEncryptorsAreStopped(t *testing.T) {
	if *all {
		for way := range ways {
			for order := range orders {
				for _, workers := range []string{"1", "4", "fork"} {
					expectHarm(t, way, order, workers, standFolders*standFiles-1)
				}
			}
		}
	}
	for _, way := range []string{"in-place", "copy-and-unlink", "rename-over"} {
		expectHarm(t, way, "random", "1", 2*standFiles)
		expectHarm(t, way, "readdir", "1", 3*standFiles) // by hashes of names: at random
		expectHarm(t, way, "depth-first", "4", 2*standFiles)
	}
}

// expectHarm has an encryptor stopped with at most so many files harmed.
func expectHarm(t *testing.T, way, order, workers string, most int) {
	t.Helper()
	t.Run(way+"/"+order+"/"+workers, func(t *testing.T) {
		s := newStand(t, rule.Stop)
		n, f := s.stopped(s.encryptor(way, order, workers))
		t.Logf("MEASURED %s %s %s: %d of %d", way, order, workers, n, len(s.files))
		if n > most {
			t.Errorf("%d of %d files are harmed, and %d is the most: %v", n, len(s.files), most, f)
		}
		if !f.Event.Time.IsZero() && (f.Rule != RuleEncryptor || f.Action != rule.Stop || !strings.Contains(f.Done, "`shunt guard decoys release ")) {
			t.Errorf("%v", f)
		}
	})
}

// Programs that read, and people who make one mistake, are not stopped; each that opened a decoy is noted.
func TestOthersAreNotStopped(t *testing.T) {
	to := t.TempDir()
	for name, c := range map[string]struct {
		tool    string // "": the test's binary
		words   []string
		touches bool
	}{
		"back-up": {touches: true},
		"edit":    {touches: true},
		"stat":    {},
		"tar":     {"tar", []string{"-cf", to + "/all.tar", "."}, true},
		"tar-in":  {"tar", []string{"-cf", "all.tar", "--exclude=all.tar", "."}, true},
		"cp":      {"cp", []string{"-a", ".", to + "/copy"}, true},
		"rsync":   {"rsync", []string{"-a", "./", to + "/mirror/"}, true},
		"find":    {"find", []string{".", "-type", "f", "-exec", "grep", "-l", "letter", "{}", ";"}, true},
		"sed":     {"sh", []string{"-c", "sed -i s/letter/note/ *.txt */*.txt"}, false},
		"rm":      {"sh", []string{"-c", "rm -r ./*"}, true},
		"mv":      {"sh", []string{"-c", "mv zzz0* letters/"}, true},
		"git":     {"sh", []string{"-c", "git init -q . && git add -A && git -c user.name=a -c user.email=a@b.c commit -qm all && git status -s"}, true},
		"gzip":    {"sh", []string{"-c", "gzip -9 *.txt"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if c.tool != "" {
				needTool(t, c.tool)
			}
			if name == "git" {
				needTool(t, "git")
			}
			s := newStand(t, rule.Stop)
			var p *exec.Cmd
			if c.tool == "" {
				p = s.launch(doing+"="+name+" - - "+s.base, "/proc/self/exe")
			} else {
				p = s.launch("LC_ALL=C", c.tool, c.words...)
			}
			defer finish(p)
			s.expectEnd(p)
			status := s.watch.Status()
			// The kernel reports a move after it.
			for end := time.Now().Add(10 * time.Second); c.touches && len(status.Touched) == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
				status = s.watch.Status()
			}
			if (len(status.Touched) > 0) != c.touches {
				t.Errorf("%+v", status)
			}
		})
	}
}

// needTool skips where a program is missing. Another tar than GNU's has other words.
func needTool(t *testing.T, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skip("needs " + name)
	}
	if text, _ := exec.Command(name, "--version").CombinedOutput(); name == "tar" && !strings.Contains(string(text), "GNU tar") {
		t.Skip("needs GNU tar")
	}
}

// expectEnd waits until a program has ended well without being stopped.
func (s *stand) expectEnd(c *exec.Cmd) {
	s.t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			s.t.Error(err)
		}
	case f := <-s.found:
		s.t.Error(f)
	}
	select {
	case f := <-s.found:
		s.t.Error(f)
	default:
	}
}

// A person lets a program go on, and it is not stopped again; or ends it.
func TestDecide(t *testing.T) {
	s := newStand(t, rule.Stop)
	c := s.launch(doing+"=in-place name fork "+s.base, "/proc/self/exe")
	defer finish(c)
	f := <-s.found
	if _, err := Decide(s.state, 1, false); !errors.Is(err, ErrNotStopped) {
		t.Error(err)
	}
	if harmedFiles(t, s.files) != 0 {
		t.Error("files were harmed")
	}
	tree, err := Decide(s.state, c.Process.Pid, false)
	if err != nil || !tree.Released || !strings.Contains(f.Done, fmt.Sprintf("release %d`", tree.Processes[0].PID)) {
		t.Fatalf("%+v, %v: %v", tree, err, f)
	}
	s.expectEnd(c)
	if n := harmedFiles(t, s.files); n != len(s.files) {
		t.Errorf("%d of %d files: it was not let go on", n, len(s.files))
	}
	if trees, err := Stopped(s.state); err != nil || len(trees) != 0 {
		t.Errorf("after its end: %+v, %v", trees, err)
	}
}

func TestKillEndsTheTree(t *testing.T) {
	s := newStand(t, rule.Stop)
	c := s.launch(doing+"=in-place name fork "+s.base, "/proc/self/exe")
	defer finish(c)
	<-s.found
	if _, err := Decide(s.state, c.Process.Pid, true); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err == nil || c.ProcessState.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
		t.Errorf("%v, %v", err, c.ProcessState)
	}
	if n := harmedFiles(t, s.files); n != 0 {
		t.Errorf("%d files are harmed", n)
	}
}

// The action kill ends the program, and alert only reports it, once.
func TestActions(t *testing.T) {
	t.Run("kill", func(t *testing.T) {
		s := newStand(t, rule.Kill)
		c := s.encryptor("in-place", "name", "1")
		defer finish(c)
		f := <-s.found
		if err := c.Wait(); err == nil || harmedFiles(t, s.files) != 0 || !strings.HasPrefix(f.Done, "ended") {
			t.Errorf("%v: %v", err, f)
		}
	})
	t.Run("alert", func(t *testing.T) {
		s := newStand(t, rule.Alert)
		c := s.encryptor("in-place", "name", "1")
		defer finish(c)
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
		f := <-s.found
		if f.Done != "" || f.Action != rule.Alert || len(s.found) != 0 || harmedFiles(t, s.files) != len(s.files) {
			t.Errorf("%v, and %d more", f, len(s.found))
		}
	})
}

// Programs that the policy trusts may do as they like: the same program under another inode may not.
func TestTrust(t *testing.T) {
	copied := filepath.Join(t.TempDir(), "restorer")
	text, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(copied, text, 0o700) //nolint:gosec // it is to be run
	}
	if err != nil {
		t.Fatal(err)
	}
	s := newStand(t, rule.Stop, copied)
	c := s.launch(doing+"=encrypt-then-end - - "+s.base, copied)
	defer finish(c)
	s.expectEnd(c)
	if len(s.watch.Status().Touched) != 0 {
		t.Errorf("%+v", s.watch.Status())
	}
}
