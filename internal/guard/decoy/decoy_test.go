package decoy

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// stand is a folder with users' files and decoys, and a watch of it.
type stand struct {
	t      *testing.T
	base   string
	files  []string // users'
	state  string
	store  string
	watch  *Watch
	found  chan detect.Found
	notes  chan detect.Found
	cancel context.CancelFunc
}

const (
	standFolders = 4  // the base, two in it, and one in one of these
	standFiles   = 50 // in each
)

func newStand(t *testing.T, action string, trust ...string) *stand {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for permission events of fanotify")
	}
	root := t.TempDir()
	s := &stand{t: t, base: filepath.Join(root, "data"), state: filepath.Join(root, "run"), store: filepath.Join(root, "lib"), found: make(chan detect.Found, 64), notes: make(chan detect.Found, 4096)}
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
	places, left, err := Find([]policy.Decoys{part})
	if err != nil || len(left) > 0 || len(places) != standFolders {
		s.t.Fatal(places, left, err)
	}
	if s.watch, err = NewWatch(Options{Places: places, State: s.state}); err != nil {
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
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	c.Stderr = s.t.Output()
	if err := c.Start(); err != nil {
		s.t.Fatal(err)
	}
	return c
}

func (s *stand) encryptor(way, order, workers string) *exec.Cmd {
	return s.launch(doing+"="+way+" "+order+" "+workers+" "+s.base, "/proc/self/exe")
}

// finish ends what is left of a program.
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
	for _, m := range trees[0].Processes { // until all are
		for m.isThere() && !isStopped(m.PID) {
			unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil) //nolint:errcheck // it is looked again
		}
	}
	return harmedFiles(s.t, s.files), f
}

func isStopped(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true // ended
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	return string(fields[0]) == "T" || string(fields[0]) == "Z"
}

func TestEncryptorsAreStopped(t *testing.T) {
	for way := range ways {
		for order := range orders {
			for _, workers := range []string{"1", "4", "fork"} {
				t.Run(way+"/"+order+"/"+workers, func(t *testing.T) {
					s := newStand(t, rule.Stop)
					n, f := s.stopped(s.encryptor(way, order, workers))
					t.Logf("MEASURED %s %s %s: %d of %d", way, order, workers, n, len(s.files))
					_ = f
				})
			}
		}
	}
}
