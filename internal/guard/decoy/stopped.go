package decoy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
	"github.com/shunt-lb/shunt/internal/record"
)

// Tree is a stopped program: its processes.
type Tree struct {
	At        time.Time `json:"at"`
	Why       string    `json:"why"`
	Processes []Member  `json:"processes"` // the first one is the alert's
	Released  bool      `json:"released"`  // a person continued it: it is not stopped again
	Decided   time.Time `json:"decided,omitzero"`
}

// isThere reports whether one of its processes has not ended.
func (t Tree) isThere() bool { return slices.ContainsFunc(t.Processes, Member.isThere) }

// has reports whether one of the processes is in the tree.
func (t Tree) has(any []proc) bool {
	return slices.ContainsFunc(t.Processes, func(m Member) bool {
		return slices.ContainsFunc(any, func(p proc) bool { return p.pid == m.PID && p.start == m.Start })
	})
}

func (t *Tree) add(all []proc) {
	for _, p := range all {
		if m := (Member{p.pid, p.start, p.program}); !slices.Contains(t.Processes, m) {
			t.Processes = append(t.Processes, m)
		}
	}
}

// Member is a process of a tree.
type Member struct {
	PID     int    `json:"pid"`
	Start   uint64 `json:"start"` // ticks since boot
	Program string `json:"program"`
}

func (m Member) event() rule.Process {
	return rule.Process{PID: uint32(m.PID), StartNs: m.Start * process.TickNs, Program: m.Program}
}

// isThere reports whether the process has not ended.
func (m Member) isThere() bool {
	p, err := look(m.PID)
	return err == nil && p.start == m.Start && p.inode != 0
}

// trees are the process trees that were stopped, in a file that lasts as long as processes can: until the next boot.
type trees struct {
	Trees []Tree `json:"trees"`
}

func treesIn(folder string) string { return filepath.Join(folder, "stopped.json") }

// edit changes the file of stopped trees. It removes trees whose processes have all ended. A lock admits one edit at a time, in all processes.
func edit(folder string, change func(*trees) error) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("note the stopped processes: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(folder, "stopped.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("note the stopped processes: %w", err)
	}
	defer lock.Close() //nolint:errcheck // nothing was written
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("note the stopped processes: %w", err)
	}
	var t trees
	if err := record.Read(treesIn(folder), &t); err != nil {
		return fmt.Errorf("read the list of stopped processes: %w", err)
	}
	t.Trees = slices.DeleteFunc(t.Trees, func(t Tree) bool {
		// Events of a tree that was allowed to go on may still come after its end.
		return !t.isThere() && (!t.Released || time.Since(t.Decided) > sameFor)
	})
	if err := change(&t); err != nil {
		return err
	}
	if err := record.Write(treesIn(folder), t); err != nil {
		return fmt.Errorf("note the stopped processes: %w", err)
	}
	return nil
}

// Stopped returns the trees that are stopped, or that were allowed to go on and have not ended.
func Stopped(folder string) (all []Tree, err error) {
	if _, err := os.Stat(treesIn(folder)); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	err = edit(folder, func(t *trees) error {
		all = slices.DeleteFunc(slices.Clone(t.Trees), func(t Tree) bool { return !t.isThere() })
		return nil
	})
	return all, err
}

// ErrNotStopped means that a process belongs to no tree that was stopped.
var ErrNotStopped = errors.New("it was not stopped at a decoy, or it has ended; `shunt guard decoys list` shows the stopped processes")

// Decide lets the tree of a process go on (SIGCONT), or ends it (SIGKILL), and lists its processes. A tree that may go on is not stopped again.
func Decide(folder string, pid int, kill bool) (tree Tree, err error) {
	err = edit(folder, func(t *trees) error {
		i := slices.IndexFunc(t.Trees, func(one Tree) bool {
			return slices.ContainsFunc(one.Processes, func(m Member) bool { return m.PID == pid && m.isThere() })
		})
		if i < 0 {
			return ErrNotStopped
		}
		t.Trees[i].Released, t.Trees[i].Decided = !kill, time.Now()
		tree = t.Trees[i]
		return nil
	})
	if err != nil {
		return tree, fmt.Errorf("decide on process %d: %w", pid, err)
	}
	sig := unix.SIGCONT
	if kill {
		sig = unix.SIGKILL
	}
	for _, m := range tree.Processes {
		if bad := detect.Signal(m.event(), sig); bad != nil && !errors.Is(bad, unix.ESRCH) {
			err = errors.Join(err, bad)
		}
	}
	return tree, err
}
