package trial

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Control is a way to end, stop or limit the processes of a cgroup by files of cgroups, or to move a process among them. Its attempt gets
// DIR, the folder of a cgroup:
//
//	DIR             above the rule's
//	DIR/inner       the rule's, with the target
//	DIR/inner/most  below it
//	DIR-2           beside
type Control struct {
	Row
	File    string                            // how the path of the event ends; empty: the file of the hierarchy's root
	Changes func(dir string, target int) bool // whether the attempt had its effect; nil: it ends the target, or IsKill is false
	IsFree  bool                              // it is also tried on a cgroup that no rule names
}

func (w *work) inGroup(name string) string { return filepath.Join(w.dir, name) }

func (w *work) beside() string { return w.dir + "-2" }

// PutText writes a text to a file of a cgroup.
func PutText(path, text string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(text))
	return errors.Join(err, unix.Close(fd))
}

func puts(file, text string) func(*work) error {
	return func(w *work) error { return PutText(w.inGroup(file), text) }
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
	at, err := judge.CgroupOf(target)
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

func ownNumber(*work) (string, error) { return strconv.Itoa(os.Getpid()), nil }

func digit(*work) (string, error) { return "1", nil }

func moveOut(w *work) error {
	target, err := targetOf(w)
	if err != nil {
		return err
	}
	return PutText(filepath.Join(w.beside(), "cgroup.procs"), target)
}

// Controls lists these ways. A section of docs/reference/guard-matrix.md is made from it.
var Controls = []Control{
	{Row: Row{Name: "cgroup.kill", Group: "of the cgroup", Operation: policy.Kill, IsKill: true, attempt: puts("inner/cgroup.kill", "1")}, File: "/inner/cgroup.kill", IsFree: true},
	{Row: Row{Name: "cgroup.freeze", Group: "of the cgroup", Operation: policy.Kill, attempt: puts("inner/cgroup.freeze", "1")}, File: "/inner/cgroup.freeze", Changes: holds("inner/cgroup.freeze", "1"), IsFree: true},
	{Row: Row{Name: "memory.max", Group: "of the cgroup", Operation: policy.Kill, attempt: puts("inner/memory.max", "1073741824")}, File: "/inner/memory.max", Changes: holds("inner/memory.max", "1073741824")},
	{Row: Row{Name: "cgroup.freeze-below", Group: "of a cgroup below", Operation: policy.Kill, attempt: puts("inner/most/cgroup.freeze", "1")}, File: "/inner/most/cgroup.freeze", Changes: holds("inner/most/cgroup.freeze", "1")},
	{Row: Row{Name: "cgroup.kill-above", Group: "of a cgroup above", Operation: policy.Kill, IsKill: true, attempt: puts("cgroup.kill", "1")}, File: "/cgroup.kill"},
	{Row: Row{Name: "cgroup.freeze-above", Group: "of a cgroup above", Operation: policy.Kill, attempt: puts("cgroup.freeze", "1")}, File: "/cgroup.freeze", Changes: holds("cgroup.freeze", "1")},
	{Row: Row{Name: "memory.max-above", Group: "of a cgroup above", Operation: policy.Kill, attempt: puts("memory.max", "1073741824")}, File: "/memory.max", Changes: holds("memory.max", "1073741824")},
	{Row: Row{Name: "cgroup.kill-by-bind-mount", Group: "by another name", Operation: policy.Kill, IsKill: true, attempt: func(w *work) error {
		return elsewhereMounted(w.inGroup("inner/cgroup.kill"), "", unix.MS_BIND, true, func(at string) error { return PutText(at, "1") })
	}}, File: "/inner/cgroup.kill"},
	{Row: Row{Name: "cgroup.kill-by-another-mount", Group: "by another name", Operation: policy.Kill, IsKill: true, attempt: func(w *work) error {
		return elsewhereMounted("cgroup2", "cgroup2", 0, false, func(at string) error {
			return PutText(filepath.Join(at, filepath.Base(w.dir), "inner/cgroup.kill"), "1")
		})
	}}, File: "/inner/cgroup.kill"},
	{Row: Row{Name: "cgroup.kill-in-a-cgroup-namespace", Group: "by another name", Operation: policy.Kill, IsKill: true, attempt: func(w *work) error {
		if err := elsewhere(); err != nil {
			return err
		}
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return err
		}
		return elsewhereMounted("cgroup2", "cgroup2", 0, false, func(at string) error {
			return PutText(filepath.Join(at, filepath.Base(w.dir), "inner/cgroup.kill"), "1")
		})
	}}, File: "/inner/cgroup.kill"},
	{Row: Row{Name: "cgroup.kill-by-handle", Group: "by another name", Operation: policy.Kill, IsKill: true, attempt: func(w *work) error {
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
	}}, File: "/inner/cgroup.kill"},
	{Row: Row{Name: "cgroup.kill-opened-by-io_uring", Group: "by another name", Operation: policy.Kill, attempt: func(w *work) error {
		return ringPath(18, w.inGroup("inner/cgroup.kill"), 0, unix.O_WRONLY) // IORING_OP_OPENAT
	}}, File: "/inner/cgroup.kill"},
	{Row: Row{Name: "cgroup.kill-by-a-descriptor-from-before", Group: "by a descriptor from before", Operation: policy.Kill, IsKill: true,
		before:  opensBefore(func(w *work) string { return w.inGroup("inner/cgroup.kill") }),
		attempt: oldWrite(digit)}, File: "/inner/cgroup.kill"},
	{Row: Row{Name: "move-in", Group: "moving a process in", Operation: policy.Kill, attempt: func(w *work) error {
		return PutText(w.inGroup("inner/cgroup.procs"), strconv.Itoa(os.Getpid()))
	}}, File: "/inner/cgroup.procs"},
	{Row: Row{Name: "move-in-by-a-descriptor-from-before", Group: "moving a process in", Operation: policy.Kill,
		before:  opensBefore(func(w *work) string { return w.inGroup("inner/cgroup.procs") }),
		attempt: oldWrite(ownNumber)}, File: "/inner/cgroup.procs"},
	{Row: Row{Name: "begin-in-it", Group: "moving a process in", Operation: policy.Kill, attempt: func(w *work) error { return beginInside(w.inGroup("inner")) }}, File: "/inner/cgroup.procs"},
	{Row: Row{Name: "move-out", Group: "moving a process out", Operation: policy.Move, attempt: moveOut}, Changes: isBeside},
	{Row: Row{Name: "move-out-by-a-descriptor-from-before", Group: "moving a process out", Operation: policy.Move,
		before:  opensBefore(func(w *work) string { return filepath.Join(w.beside(), "cgroup.procs") }),
		attempt: oldWrite(targetOf)}, Changes: isBeside},
}

// Frees lists operations that a rule with a cgroup does not forbid.
var Frees = []Row{
	{Name: "ask-whether-it-may", attempt: func(w *work) error { return unix.Access(w.inGroup("inner/cgroup.kill"), unix.W_OK) }},
	{Name: "read-a-state", attempt: func(w *work) error { _, err := os.ReadFile(w.inGroup("inner/cgroup.freeze")); return err }},
	{Name: "ask-to-be-told-of-pressure", attempt: func(w *work) error {
		fd, err := unix.Open(w.inGroup("inner/memory.pressure"), unix.O_RDWR, 0)
		if err != nil {
			return err
		}
		return unix.Close(fd)
	}},
	{Name: "switch-a-controller-above", attempt: func(w *work) error { return PutText(w.inGroup("cgroup.subtree_control"), "+memory") }},
	{Name: "make-and-remove-a-cgroup-below", attempt: func(w *work) error {
		return errors.Join(os.Mkdir(w.inGroup("inner/new"), 0o755), os.Remove(w.inGroup("inner/new")))
	}},
	{Name: "move-between-others", attempt: func(w *work) error {
		one, two := filepath.Join(w.beside(), "one"), filepath.Join(w.beside(), "two")
		if err := errors.Join(os.Mkdir(one, 0o755), os.Mkdir(two, 0o755)); err != nil {
			return err
		}
		return PutText(filepath.Join(two, "cgroup.procs"), strconv.Itoa(os.Getpid()))
	}},
}
