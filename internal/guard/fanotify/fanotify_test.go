package fanotify

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/test/uring"
)

// await polls a group until it has something.
func await(t *testing.T, g *Group) {
	t.Helper()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: g.FD(), Events: unix.POLLIN}}, 60_000)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 || err != nil {
			t.Fatal("no event came: ", err)
		}
		return
	}
}

// execute has another process execute this test's program, which then tests nothing: in this process no other goroutine
// may run from the fork to the exec, and so none answers.
func execute(program string) error {
	err := exec.Command("/bin/sh", "-c", `exec "$0" -test.run=^$`, program).Run()
	var code *exec.ExitError
	if errors.As(err, &code) && code.ExitCode() == 126 { // it was found, and could not be executed: POSIX, exit status for commands
		return unix.EPERM
	}
	return err
}

// openByRing opens a file to write, by io_uring. It closes it: a file that is open to write cannot be executed.
func openByRing(setup uint32, file string) error {
	name, err := unix.BytePtrFromString(file)
	if err != nil {
		return err
	}
	fd, err := uring.Do(setup, uring.Entry{Operation: 18, FD: unix.AT_FDCWD, Address: unsafe.Pointer(name), Flags: unix.O_WRONLY}) // IORING_OP_OPENAT
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

// Each way to open a file has its own mode, and an answer reaches the opener.
func TestModes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("text"), 0o755); err != nil {
		t.Fatal(err)
	}
	g, err := Hold()
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close() //nolint:errcheck // of a test
	if err := g.Mark(unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM, file); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "program")
	text, err := os.ReadFile("/proc/self/exe") // which needs no libraries
	if err == nil {
		err = errors.Join(os.WriteFile(program, text, 0o755), g.Mark(unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM, program))
	}
	if err != nil {
		t.Fatal(err)
	}
	open := func(flags int) func() error {
		return func() error {
			fd, err := unix.Open(file, flags, 0)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}
	}
	for what, one := range map[string]struct {
		open func() error
		want Mode
	}{
		"read":            {open(unix.O_RDONLY), Mode{Reads: true, IsSure: true}},
		"write":           {open(unix.O_WRONLY), Mode{Writes: true, IsSure: true}},
		"both":            {open(unix.O_RDWR), Mode{Reads: true, Writes: true, IsSure: true}},
		"read, truncated": {open(unix.O_RDONLY | unix.O_TRUNC), Mode{Reads: true, Writes: true, IsSure: true}},
		"openat2": {func() error {
			fd, err := unix.Openat2(unix.AT_FDCWD, file, &unix.OpenHow{Flags: unix.O_RDONLY})
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}, Mode{Reads: true}},
		"by handle": {func() error {
			handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, file, 0)
			if err != nil {
				return err
			}
			folder, err := unix.Open(filepath.Dir(file), unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			fd, err := unix.OpenByHandleAt(folder, handle, unix.O_WRONLY)
			if err == nil {
				err = unix.Close(fd)
			}
			return errors.Join(err, unix.Close(folder))
		}, Mode{Writes: true, IsSure: true}},
		"execute":     {func() error { return execute(program) }, Mode{IsSure: true}},
		"ring":        {func() error { return openByRing(0, file) }, Mode{}},
		"polled ring": {func() error { return openByRing(uring.Polled, file) }, Mode{}},
	} {
		for _, deny := range []bool{false, true} {
			done := make(chan error, 1)
			go func() {
				runtime.LockOSThread()
				done <- one.open()
			}()
			await(t, g)
			n := 0
			err := g.Read(func(e Event) error {
				if n++; ModeOf(e.PID, time.Minute) != one.want || ProcessOf(e.PID) == 0 {
					t.Errorf("%s: %+v, want %+v", what, ModeOf(e.PID, time.Minute), one.want)
				}
				if flags, err := unix.FcntlInt(uintptr(e.FD), unix.F_GETFL, 0); err != nil || flags&unix.O_ACCMODE != unix.O_RDONLY {
					t.Errorf("%s: the event's own flags are %#o, and would say the mode: %v", what, flags, err)
				}
				waited, err := g.Answer(e, deny)
				if !waited {
					t.Errorf("%s: nobody waited", what)
				}
				return err
			})
			if got := <-done; err != nil || n != 1 || errors.Is(got, unix.EPERM) != deny || !deny && got != nil {
				t.Errorf("%s: %d events, %v; answered with deny %v: %v", what, n, err, deny, got)
			}
		}
	}
}

// A folder's new file comes with the folder's handle, which leads to the folder.
func TestNames(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	folder := t.TempDir()
	g, err := Names(0)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close() //nolint:errcheck // of a test
	if err := g.Mark(unix.FAN_MARK_ADD, unix.FAN_CREATE, folder); err != nil {
		t.Fatal(err)
	}
	want, err := HandleOf(folder)
	if err != nil {
		t.Fatal(err)
	}
	mount, err := unix.Open(folder, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "new"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	await(t, g)
	seen := false
	err = g.Read(func(e Event) error {
		e.Records(func(kind Kind, handle Handle, name string) {
			if kind != Name {
				return
			}
			seen = true
			fd, err := handle.Open(mount)
			if err != nil || handle != want || name != "new" || e.PID != os.Getpid() {
				t.Errorf("%q in %x by %d: %v", name, handle, e.PID, err)
				return
			}
			var have, is unix.Stat_t
			if err := errors.Join(unix.Fstat(fd, &have), unix.Stat(folder, &is), unix.Close(fd)); err != nil || have.Ino != is.Ino {
				t.Errorf("the handle leads to inode %d, want %d: %v", have.Ino, is.Ino, err)
			}
		})
		return nil
	})
	if err != nil || !seen {
		t.Errorf("the new file was not told: %v", err)
	}
}

func FuzzRecords(f *testing.F) {
	f.Add([]byte{2, 0, 24, 0, 1, 2, 3, 4, 5, 6, 7, 8, 4, 0, 0, 0, 1, 0, 0, 0, 9, 9, 9, 9})
	f.Add([]byte{1, 0, 12, 0, 255, 255, 255, 255, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, info []byte) {
		Event{info: info}.Records(func(_ Kind, handle Handle, name string) {
			if len(handle)+len(name) > len(info) {
				t.Errorf("%d bytes of handle and %d of name, of %d", len(handle), len(name), len(info))
			}
			_ = handle.FileSystem()
		})
	})
}
