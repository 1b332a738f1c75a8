package trial

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/test/uring"
)

// errNothingRead is the error of an attempt that was allowed, and saw nothing of the file.
var errNothingRead = errors.New("the file's contents did not come")

func seen(data []byte, err error) error {
	if err == nil && !bytes.HasPrefix(data, []byte("kept\n")) {
		err = errNothingRead
	}
	return err
}

// readBy is an attempt to read from the descriptor that open returns.
func readBy(open func(*work) (int, error)) func(*work) error {
	return func(w *work) error {
		fd, err := open(w)
		if err != nil {
			return err
		}
		w.fd = fd
		return w.read()
	}
}

// readAt reads by its name a file that is put there, or is seen there, by before.
func readAt(prepare func(w *work) (string, error)) func(*work) error {
	return readBy(func(w *work) (int, error) {
		path, err := prepare(w)
		if err != nil {
			return 0, err
		}
		return unix.Open(path, unix.O_RDONLY, 0)
	})
}

func (w *work) read() error {
	data := make([]byte, 64)
	_, err := unix.Read(w.fd, data)
	return seen(data, err)
}

// drain reads from a pipe.
func drain(pipe int) error {
	data := make([]byte, 64)
	_, err := unix.Read(pipe, data)
	return seen(data, err)
}

// mountElsewhere has the files at out/m, in a mount namespace of this thread's own.
func mountElsewhere(what, file string) func(*work) (string, error) {
	return func(w *work) (string, error) {
		if err := elsewhere(); err != nil {
			return "", err
		}
		return w.out("m/" + file), w.bind(filepath.Join(w.dir, what), w.out("m"))
	}
}

// overlay has an overlay file system of the protected folder, and one above it.
func overlay(w *work) (string, error) {
	if err := elsewhere(); err != nil {
		return "", err
	}
	above, at := filepath.Join(w.dir, "above"), filepath.Join(w.dir, "overlay")
	if err := errors.Join(os.Mkdir(above, 0o755), os.Mkdir(at, 0o755)); err != nil {
		return "", err
	}
	return filepath.Join(at, "f"), unix.Mount("overlay", at, "overlay", 0, "lowerdir="+above+":"+w.prot(""))
}

// memoryOf executes a protected program, and looks at its file in its memory.
func memoryOf(w *work) error {
	cmd := exec.Command(w.prot("run"), "wait", "")
	cmd.Env = []string{operateVariable + "=1"}
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer cmd.Wait() //nolint:errcheck // its input ends
	defer in.Close() //nolint:errcheck // the same
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		return err
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", cmd.Process.Pid))
	if err != nil {
		return err
	}
	var begin uintptr
	if _, err := fmt.Sscanf(string(maps), "%x-", &begin); err != nil {
		return err
	}
	var magic [4]byte
	_, err = unix.ProcessVMReadv(cmd.Process.Pid, []unix.Iovec{{Base: &magic[0], Len: 4}}, []unix.RemoteIovec{{Base: begin, Len: 4}}, 0)
	if err == nil && string(magic[:]) != "\x7fELF" {
		err = errNothingRead
	}
	return err
}

// copyRun puts a program among the protected files.
func copyRun(dir string) error {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "prot", "run"), self, 0o755)
}

// Reads lists the attempts to read, by a rule that denies nothing else: names may be made and moved.
var Reads = []Row{
	{Group: "by its name", Name: "read", attempt: readAt(func(w *work) (string, error) { return w.prot("f"), nil })},
	{Group: "by its name", Name: "read-below", attempt: readAt(func(w *work) (string, error) { return w.prot("sub/h"), nil })},
	{Group: "by its name", Name: "read-to-write", attempt: readBy(func(w *work) (int, error) { return unix.Open(w.prot("f"), unix.O_RDWR, 0) })},
	{Group: "by its name", Name: "list-folder", attempt: func(w *work) error {
		_, err := os.ReadDir(w.prot(""))
		return err
	}},
	{Group: "by its name", Name: "io_uring-open-read", attempt: func(w *work) error { return ringPath(18, w.prot("f"), 0, unix.O_RDONLY) }}, // IORING_OP_OPENAT
	{Group: "by its name", Name: "map-to-read", attempt: func(w *work) error {
		fd, err := unix.Open(w.prot("f"), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		data, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
		return seen(data, err)
	}},

	{Group: "by another name", Name: "read-symbolic-link", attempt: readAt(func(w *work) (string, error) { return w.out("s"), unix.Symlink(w.prot("f"), w.out("s")) })},
	{Group: "by another name", Name: "read-hard-link-from-before", attempt: readAt(func(w *work) (string, error) { return w.out("l"), nil })},
	{Group: "by another name", Name: "read-new-hard-link", attempt: readAt(func(w *work) (string, error) { return w.out("new"), unix.Link(w.prot("f"), w.out("new")) })},
	{Group: "by another name", Name: "read-after-rename", attempt: readAt(func(w *work) (string, error) { return w.out("taken"), unix.Rename(w.prot("f"), w.out("taken")) })},
	{Group: "by another name", Name: "read-after-rename-of-folder", attempt: readAt(func(w *work) (string, error) { return w.out("taken/f"), unix.Rename(w.prot(""), w.out("taken")) })},
	{Group: "by another name", Name: "read-bind-mount-in-another-namespace", attempt: readAt(mountElsewhere("prot", "f"))},
	{Group: "by another name", Name: "read-bind-mount-of-folder-above", attempt: readAt(mountElsewhere("", "prot/f"))},
	{Group: "by another name", Name: "read-chroot", attempt: readAt(func(w *work) (string, error) { return "/prot/f", unix.Chroot(w.dir) })},
	{Group: "by another name", Name: "read-open_tree-clone", attempt: readBy(func(w *work) (int, error) {
		tree, err := unix.OpenTree(unix.AT_FDCWD, w.prot(""), unix.OPEN_TREE_CLONE)
		if err != nil {
			return 0, err
		}
		return unix.Openat(tree, "f", unix.O_RDONLY, 0)
	})},
	{Group: "by another name", Name: "read-open_by_handle_at", attempt: readBy(func(w *work) (int, error) { return w.handleOpen(unix.O_RDONLY) })},
	{Group: "by another name", Name: "read-by-root-of-a-process", attempt: readAt(func(w *work) (string, error) { return fmt.Sprintf("/proc/%d/root%s", os.Getppid(), w.prot("f")), nil })},
	{Group: "by another name", Name: "read-reopened-by-proc", before: old(unix.O_WRONLY), attempt: readAt(func(w *work) (string, error) { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.fd), nil })},
	{Group: "by another name", Name: LowerRow, attempt: readAt(overlay)},

	{Group: "by a descriptor from before", Name: "old-read", before: old(unix.O_RDONLY), attempt: (*work).read},
	{Group: "by a descriptor from before", Name: "old-preadv", before: old(unix.O_RDONLY), attempt: func(w *work) error {
		data := make([]byte, 64)
		_, err := unix.Preadv(w.fd, [][]byte{data}, 0)
		return seen(data, err)
	}},
	{Group: "by a descriptor from before", Name: "old-list-folder", before: func(w *work) (err error) {
		w.fd, err = unix.Open(w.prot(""), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	}, attempt: func(w *work) error {
		n, err := unix.Getdents(w.fd, make([]byte, 4096))
		if err == nil && n == 0 {
			err = errNothingRead
		}
		return err
	}},
	{Group: "by a descriptor from before", Name: "old-splice-from", before: old(unix.O_RDONLY), attempt: func(w *work) error {
		var ends [2]int
		if err := unix.Pipe(ends[:]); err != nil {
			return err
		}
		if _, err := unix.Splice(w.fd, nil, ends[1], nil, 64, 0); err != nil {
			return err
		}
		return drain(ends[0])
	}},
	{Group: "by a descriptor from before", Name: "old-sendfile-from", before: old(unix.O_RDONLY), attempt: func(w *work) error {
		var ends [2]int
		if err := unix.Pipe(ends[:]); err != nil {
			return err
		}
		if _, err := unix.Sendfile(ends[1], w.fd, nil, 64); err != nil {
			return err
		}
		return drain(ends[0])
	}},
	{Group: "by a descriptor from before", Name: "old-copy_file_range-from", before: old(unix.O_RDONLY), attempt: func(w *work) error {
		to, err := unix.Open(w.out("copy"), unix.O_RDWR|unix.O_CREAT, 0o600)
		if err != nil {
			return err
		}
		if _, err := unix.CopyFileRange(w.fd, nil, to, nil, 64, 0); err != nil {
			return err
		}
		data := make([]byte, 64)
		_, err = unix.Pread(to, data, 0)
		return seen(data, err)
	}},
	{Group: "by a descriptor from before", Name: "old-io_uring-read", before: old(unix.O_RDONLY), attempt: func(w *work) error {
		data := make([]byte, 64)
		err := ringDo(0, 22, int32(w.fd), unsafe.Pointer(&data[0]), uint32(len(data)), 0, 0) // IORING_OP_READ
		return seen(data, err)
	}},
	{Group: "by a descriptor from before", Name: "old-io_uring-poller-read", before: old(unix.O_RDONLY), attempt: func(w *work) error {
		data := make([]byte, 64)
		err := ringDo(uring.Polled, 22, int32(w.fd), unsafe.Pointer(&data[0]), uint32(len(data)), 0, 0) // IORING_OP_READ
		return seen(data, err)
	}},
	{Group: "by a descriptor from before", Name: "old-new-mapping-to-read", before: old(unix.O_RDONLY), attempt: func(w *work) error {
		data, err := unix.Mmap(w.fd, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
		return seen(data, err)
	}},
	{Group: "by a descriptor from before", Name: "old-mapping-made-readable", before: func(w *work) error { return w.mapBefore(unix.PROT_NONE) }, attempt: func(w *work) error {
		err := unix.Mprotect(w.mem, unix.PROT_READ)
		if err == nil {
			err = seen(w.mem, nil)
		}
		return err
	}},
	{Group: "by a descriptor from before", Name: "old-readable-mapping", before: func(w *work) error { return w.mapBefore(unix.PROT_READ) }, attempt: func(w *work) error { return seen(w.mem, nil) },
		NotCovered: "the kernel calls no hook for a load from memory. At the load of a policy, shunt finds existing mappings, and reports their processes"},

	{Group: "by executing it", Name: "memory-of-its-process", setup: copyRun, attempt: memoryOf,
		NotCovered: "a process that may execute a file has the file in its memory: deny `exec`, too. The interpreter opens a script, and this open is denied"},
}
