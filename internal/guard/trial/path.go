package trial

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// onPath are operations of other tests, on any path.
var onPath = []Row{
	{Name: "write-path", attempt: func(w *work) error { return OpenWrite(w.dir, unix.O_WRONLY) }},
	{Name: "make-path", attempt: func(w *work) error { return OpenWrite(w.dir, unix.O_WRONLY|unix.O_CREAT) }},
	{Name: "unlink-path", attempt: func(w *work) error { return unix.Unlink(w.dir) }},
	{Name: "signal-parent", attempt: func(*work) error { return unix.Kill(os.Getppid(), unix.SIGURG) }}, // which Go ignores
	{Name: "write-after-traceme", attempt: func(w *work) error {
		runtime.LockOSThread()
		if _, _, errno := unix.Syscall(unix.SYS_PTRACE, unix.PTRACE_TRACEME, 0, 0); errno != 0 {
			return errno
		}
		return OpenWrite(w.dir, unix.O_WRONLY)
	}},
	{Name: "write-after-failed-fork", attempt: func(w *work) error {
		if err := failFork(); err != nil {
			return err
		}
		return OpenWrite(w.dir, unix.O_WRONLY)
	}},
	{Name: "start-other", attempt: func(w *work) error { return startNext(w, "other") }},
	{Name: "start-trusted", attempt: func(w *work) error { return startNext(w, "trusted") }},
}

// failFork asks for a child with a number that is in use (clone3(2)): it fails when most of the child exists.
func failFork() error {
	taken := int32(1)
	arguments := struct {
		flags, pidfd, childID, parentID, signal, stack, stackSize, tls uint64
		numbers                                                        unsafe.Pointer
		size, cgroup                                                   uint64
	}{signal: uint64(unix.SIGCHLD), numbers: unsafe.Pointer(&taken), size: 1}
	_, _, errno := unix.Syscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&arguments)), unsafe.Sizeof(arguments), 0)
	if errno != unix.EEXIST {
		return fmt.Errorf("a fork with the number of process 1: %w", errno)
	}
	return nil
}

// startNext has another program, beside this one, write to the path.
func startNext(w *work, program string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	h, err := Begin(filepath.Join(filepath.Dir(self), program), "write-path", w.dir)
	if err != nil {
		return err
	}
	said, err := h.Attempt()
	if err == nil && said != "done" {
		err = unix.EPERM
	}
	return err
}

// Stranger is a user that no other test has.
const Stranger = 4242

// asUser has the other operation done by a real and an effective user, of all threads.
func asUser(real, effective int, then func(*work) error) func(*work) error {
	return func(w *work) error {
		if err := syscall.Setresuid(real, effective, 0); err != nil {
			return err
		}
		return then(w)
	}
}

func writePath(w *work) error { return OpenWrite(w.dir, unix.O_WRONLY) }

// asUsers are operations on any path, as other users.
var asUsers = []Row{
	{Name: "write-as-stranger", attempt: asUser(Stranger, Stranger, writePath)},
	{Name: "write-as-set-user-ID-of-root", attempt: asUser(Stranger, 0, writePath)},
	{Name: "write-as-root-that-lends-itself", attempt: asUser(0, Stranger, writePath)},
	{Name: "start-other-as-stranger", attempt: asUser(Stranger, Stranger, func(w *work) error { return startNext(w, "other") })},
}
