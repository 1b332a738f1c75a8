package trial

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/test/uring"
)

func old(flags int) func(*work) error { return func(w *work) error { return w.before(flags) } }

// Matrix lists the attempts of programs that are not trusted. The page docs/reference/guard-matrix.md is made from it.
var Matrix = []Row{
	{Group: "by its name", Name: "open-write", Operation: policy.Write, attempt: func(w *work) error { return OpenWrite(w.prot("f"), unix.O_WRONLY) }},
	{Group: "by its name", Name: "open-append", Operation: policy.Write, attempt: func(w *work) error { return OpenWrite(w.prot("f"), unix.O_WRONLY|unix.O_APPEND) }},
	{Group: "by its name", Name: "open-read-write", Operation: policy.Write, attempt: func(w *work) error { return OpenWrite(w.prot("sub/h"), unix.O_RDWR) }},
	{Group: "by its name", Name: "open-read-only-truncating", Operation: policy.Write, attempt: func(w *work) error { return OpenWrite(w.prot("f"), unix.O_RDONLY|unix.O_TRUNC) }},
	{Group: "by its name", Name: "truncate", Operation: policy.Write, attempt: func(w *work) error { return unix.Truncate(w.prot("f"), 1) }},
	{Group: "by its name", Name: "io_uring-open-write", Operation: policy.Write, attempt: func(w *work) error {
		return ringPath(18, w.prot("f"), 0, unix.O_WRONLY|unix.O_TRUNC) // IORING_OP_OPENAT
	}},
	{Group: "by its name", Name: "io_uring-unlink", Operation: policy.Delete, attempt: func(w *work) error { return ringPath(36, w.prot("f"), 0, 0) }}, // IORING_OP_UNLINKAT

	{Group: "by its name", Name: "io_uring-poller-open-write", Operation: policy.Write, attempt: func(w *work) error {
		raw := append([]byte(w.prot("f")), 0)
		return ringDo(uring.Polled, 18, unix.AT_FDCWD, unsafe.Pointer(&raw[0]), 0, unix.O_WRONLY|unix.O_TRUNC, 0) // IORING_OP_OPENAT
	}},

	{Group: "by another name", Name: "symbolic-link", Operation: policy.Write, attempt: func(w *work) error {
		if err := unix.Symlink(w.prot("f"), w.out("s")); err != nil {
			return err
		}
		return OpenWrite(w.out("s"), unix.O_WRONLY)
	}},
	{Group: "by another name", Name: "hard-link-from-before", Operation: policy.Write, attempt: func(w *work) error { return OpenWrite(w.out("l"), unix.O_WRONLY) }},
	{Group: "by another name", Name: "reopen-by-proc", Operation: policy.Write, before: old(unix.O_RDONLY), attempt: func(w *work) error {
		return OpenWrite(procFD(w.fd), unix.O_WRONLY)
	}},
	{Group: "by another name", Name: "bind-mount", Operation: policy.Write, attempt: func(w *work) error {
		if err := elsewhere(); err != nil {
			return err
		}
		if err := w.bind(w.prot(""), w.out("m")); err != nil {
			return err
		}
		return OpenWrite(w.out("m/f"), unix.O_WRONLY)
	}},
	{Group: "by another name", Name: "bind-mount-of-folder-above", Operation: policy.Write, attempt: func(w *work) error {
		if err := elsewhere(); err != nil {
			return err
		}
		if err := w.bind(w.dir, w.out("m")); err != nil {
			return err
		}
		return OpenWrite(w.out("m/prot/f"), unix.O_WRONLY)
	}},
	{Group: "by another name", Name: "chroot", Operation: policy.Write, attempt: func(w *work) error {
		if err := unix.Chroot(w.dir); err != nil {
			return err
		}
		return OpenWrite("/prot/f", unix.O_WRONLY)
	}},
	{Group: "by another name", Name: "open_tree-clone", Operation: policy.Write, attempt: func(w *work) error {
		tree, err := unix.OpenTree(unix.AT_FDCWD, w.prot(""), unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		fd, err := unix.Openat(tree, "f", unix.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = unix.Write(fd, []byte(changed))
		return err
	}},
	{Group: "by another name", Name: "open_by_handle_at", Operation: policy.Write, attempt: handleWrite},

	{Group: "by a descriptor from before", Name: "old-write", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		_, err := unix.Write(w.fd, []byte(changed))
		return err
	}},
	{Group: "by a descriptor from before", Name: "old-pwrite", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		_, err := unix.Pwrite(w.fd, []byte(changed), 0)
		return err
	}},
	{Group: "by a descriptor from before", Name: "old-pwritev", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		_, err := unix.Pwritev(w.fd, [][]byte{[]byte(changed)}, 0)
		return err
	}},
	{Group: "by a descriptor from before", Name: "old-ftruncate", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error { return unix.Ftruncate(w.fd, 1) }},
	{Group: "by a descriptor from before", Name: "old-fallocate", Operation: policy.Write, setup: mountMemory, before: old(unix.O_RDWR), attempt: func(w *work) error { return unix.Fallocate(w.fd, 0, 0, 1<<16) }},
	{Group: "by a descriptor from before", Name: "old-punch-hole", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		return unix.Fallocate(w.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
	}},
	{Group: "by a descriptor from before", Name: "old-splice", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		from, err := pipe()
		if err != nil {
			return err
		}
		_, err = unix.Splice(from, nil, w.fd, nil, len(changed), 0)
		return err
	}},
	{Group: "by a descriptor from before", Name: "old-sendfile", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		from, err := unix.Open(w.out("source"), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		_, err = unix.Sendfile(w.fd, from, nil, len(changed))
		return err
	}},
	{Group: "by a descriptor from before", Name: "old-copy_file_range", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		from, err := unix.Open(w.out("source"), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		_, err = unix.CopyFileRange(from, nil, w.fd, nil, len(changed), 0)
		return err
	}},
	{Group: "by a descriptor from before", Name: "old-io_uring-write", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		data := []byte(changed)
		return ringDo(0, 23, int32(w.fd), unsafe.Pointer(&data[0]), uint32(len(data)), 0, 0) // IORING_OP_WRITE
	}},
	{Group: "by a descriptor from before", Name: "old-io_uring-poller-write", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		data := []byte(changed)
		return ringDo(uring.Polled, 23, int32(w.fd), unsafe.Pointer(&data[0]), uint32(len(data)), 0, 0) // IORING_OP_WRITE
	}},
	{Group: "by a descriptor from before", Name: "old-new-mapping", Operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) (err error) {
		if w.mem, err = unix.Mmap(w.fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return err
		}
		return w.store()
	}},
	{Group: "by a descriptor from before", Name: "old-mapping-made-writable", Operation: policy.Write,
		before: func(w *work) error { return w.mapBefore(unix.PROT_READ) },
		attempt: func(w *work) error {
			if err := unix.Mprotect(w.mem, unix.PROT_READ|unix.PROT_WRITE); err != nil {
				return err
			}
			return w.store()
		}},
	{Group: "by a descriptor from before", Name: "old-writable-mapping", before: func(w *work) error { return w.mapBefore(unix.PROT_READ | unix.PROT_WRITE) }, attempt: (*work).store,
		NotCovered: "the kernel calls no hook for a store to memory. At the load of a policy, shunt finds mappings that are writable, and reports their processes"},
	{Group: "by a descriptor from before", Name: "old-mapping-filled-by-userfaultfd", setup: mountMemory, before: mapHole, attempt: fillHole,
		NotCovered: "the kernel calls no hook when a missing page of a file on tmpfs is filled in; other file systems refuse this. At the load of a policy, shunt finds mappings that allow it, of descriptors that may write, and reports their processes"},

	{Group: "making a name", Name: "create", Operation: policy.Create, attempt: func(w *work) error { return OpenWrite(w.prot("new"), unix.O_WRONLY|unix.O_CREAT) }},
	{Group: "making a name", Name: "mkdir", Operation: policy.Create, attempt: func(w *work) error { return unix.Mkdir(w.prot("sub/new"), 0o755) }},
	{Group: "making a name", Name: "mknod", Operation: policy.Create, attempt: func(w *work) error { return unix.Mknod(w.prot("new"), unix.S_IFIFO|0o644, 0) }},
	{Group: "making a name", Name: "symlink", Operation: policy.Create, attempt: func(w *work) error { return unix.Symlink("/etc", w.prot("new")) }},
	{Group: "making a name", Name: "link-into", Operation: policy.Create, attempt: func(w *work) error { return unix.Link(w.out("source"), w.prot("new")) }},
	{Group: "making a name", Name: "rename-into", Operation: policy.Create, attempt: func(w *work) error { return unix.Rename(w.out("source"), w.prot("new")) }},
	{Group: "making a name", Name: "tmpfile-linked-into", Operation: policy.Create, attempt: func(w *work) error {
		fd, err := unix.Open(w.out(""), unix.O_TMPFILE|unix.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		return unix.Linkat(unix.AT_FDCWD, procFD(fd), unix.AT_FDCWD, w.prot("new"), unix.AT_SYMLINK_FOLLOW)
	}},

	{Group: "removing a name", Name: "unlink", Operation: policy.Delete, attempt: func(w *work) error { return unix.Unlink(w.prot("f")) }},
	{Group: "removing a name", Name: "rmdir", Operation: policy.Delete, attempt: func(w *work) error { return unix.Rmdir(w.prot("empty")) }},
	{Group: "removing a name", Name: "replaced-by-rename", Operation: policy.Delete, attempt: func(w *work) error { return unix.Rename(w.out("source"), w.prot("f")) }},

	{Group: "moving", Name: "rename-out", Operation: policy.Rename, attempt: func(w *work) error { return unix.Rename(w.prot("f"), w.out("taken")) }},
	{Group: "moving", Name: "rename-within", Operation: policy.Rename, attempt: func(w *work) error { return unix.Rename(w.prot("f"), w.prot("new")) }},
	{Group: "moving", Name: "exchange", Operation: policy.Rename, attempt: func(w *work) error {
		return unix.Renameat2(unix.AT_FDCWD, w.out("source"), unix.AT_FDCWD, w.prot("f"), unix.RENAME_EXCHANGE)
	}},
	{Group: "moving", Name: "rename-folder", Operation: policy.Rename, attempt: func(w *work) error { return unix.Rename(w.prot(""), w.out("taken")) }},
	{Group: "moving", Name: "rename-folder-above", Operation: policy.Rename, attempt: func(w *work) error {
		return unix.Rename(w.dir, w.dir+"-moved")
	}},
	{Group: "moving", Name: "io_uring-rename", Operation: policy.Rename, attempt: func(w *work) error {
		from, to := append([]byte(w.prot("f")), 0), append([]byte(w.prot("new")), 0)
		at := int32(unix.AT_FDCWD)
		return ringDo(0, 35, at, unsafe.Pointer(&from[0]), uint32(at), 0, uint64(uintptr(unsafe.Pointer(&to[0])))) // IORING_OP_RENAMEAT
	}},

	{Group: "giving another name", Name: "link-out", Operation: policy.Link, attempt: func(w *work) error { return unix.Link(w.prot("f"), w.out("new")) }},

	{Group: "attributes", Name: "chmod", Operation: policy.Chmod, attempt: func(w *work) error { return unix.Chmod(w.prot("f"), 0o666) }},
	{Group: "attributes", Name: "fchmod-by-read-only-descriptor", Operation: policy.Chmod, attempt: func(w *work) error {
		fd, err := unix.Open(w.prot("f"), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		return unix.Fchmod(fd, 0o666)
	}},
	{Group: "attributes", Name: "chown", Operation: policy.Chmod, attempt: func(w *work) error { return unix.Chown(w.prot("f"), 1, 1) }},
	{Group: "attributes", Name: "utimes", Operation: policy.Chmod, attempt: func(w *work) error {
		return unix.Utimes(w.prot("f"), []unix.Timeval{{Sec: 1}, {Sec: 1}})
	}},
	{Group: "attributes", Name: "setxattr", Operation: policy.Chmod, attempt: func(w *work) error { return unix.Setxattr(w.prot("f"), "user.new", []byte("x"), 0) }},
	{Group: "attributes", Name: "removexattr", Operation: policy.Chmod, attempt: func(w *work) error { return unix.Removexattr(w.prot("f"), "user.kept") }},
	{Group: "attributes", Name: "acl", Operation: policy.Chmod, attempt: func(w *work) error { return unix.Setxattr(w.prot("f"), "system.posix_acl_access", acl(), 0) }},
	{Group: "attributes", Name: "chattr", Operation: policy.Chmod, attempt: noTimeFlag},

	{Group: "mounts", Name: "mount-over", Operation: policy.Mount, attempt: func(w *work) error { return unix.Mount("tmpfs", w.prot(""), "tmpfs", 0, "") }},
	{Group: "mounts", Name: "mount-over-file", Operation: policy.Mount, attempt: func(w *work) error {
		return unix.Mount(w.out("source"), w.prot("f"), "", unix.MS_BIND, "")
	}},
	{Group: "mounts", Name: "mount-over-folder-above", Operation: policy.Mount, attempt: func(w *work) error { return unix.Mount("tmpfs", w.dir, "tmpfs", 0, "") }},
	{Group: "mounts", Name: "move_mount-over", Operation: policy.Mount, attempt: func(w *work) error {
		tree, err := unix.OpenTree(unix.AT_FDCWD, w.out(""), unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		return unix.MoveMount(tree, "", unix.AT_FDCWD, w.prot(""), unix.MOVE_MOUNT_F_EMPTY_PATH)
	}},
	{Group: "mounts", Name: "unmount", Operation: policy.Mount, setup: mountMemory, attempt: func(w *work) error { return unix.Unmount(w.prot(""), unix.MNT_DETACH) }},

	{Group: "trusted programs", Name: "write-the-program", Operation: "write-program", attempt: func(w *work) error { return OpenWrite(w.out("program"), unix.O_WRONLY) }},
	{Group: "trusted programs", Name: "truncate-the-program", Operation: "write-program", attempt: func(w *work) error { return unix.Truncate(w.out("program"), 1) }},
	{Group: "trusted programs", Name: "trace-a-process", Operation: "trace", isTrace: true, attempt: traceAttach},
	{Group: "trusted programs", Name: "memory-by-proc", Operation: "trace", Errno: unix.EACCES, isTrace: true, attempt: memoryFile},
	{Group: "trusted programs", Name: "process_vm_writev", Operation: "trace", isTrace: true, attempt: vmWrite},
	{Group: "trusted programs", Name: "pidfd_getfd", Operation: "trace", isTrace: true, attempt: takeDescriptor},

	{Group: "protected processes", Name: "kill", Operation: policy.Kill, IsGuarded: true, IsKill: true, attempt: onTarget(func(pid int) error { return unix.Kill(pid, unix.SIGKILL) })},
	{Group: "protected processes", Name: "tgkill", Operation: policy.Kill, IsGuarded: true, IsKill: true, attempt: onTarget(func(pid int) error { return unix.Tgkill(pid, pid, unix.SIGKILL) })},
	{Group: "protected processes", Name: "rt_sigqueueinfo", Operation: policy.Kill, IsGuarded: true, IsKill: true, attempt: onTarget(queueSignal)},
	{Group: "protected processes", Name: "pidfd_send_signal", Operation: policy.Kill, IsGuarded: true, IsKill: true, attempt: onTarget(func(pid int) error {
		pidfd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return err
		}
		return unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
	})},
	{Group: "protected processes", Name: "signal-of-a-file's-owner", Operation: policy.Kill, IsGuarded: true, IsKill: true, IsSilent: true, IsNobodys: true, attempt: onTarget(ownerSignal)},
	{Group: "protected processes", Name: "limit-of-CPU-time", Operation: policy.Kill, IsGuarded: true, attempt: onTarget(func(pid int) error {
		return unix.Prlimit(pid, unix.RLIMIT_CPU, &unix.Rlimit{Cur: 3600, Max: 3600}, nil)
	})},
	{Group: "protected processes", Name: "trace-a-protected-process", Operation: "trace", IsGuarded: true, attempt: traceAttach},
	{Group: "protected processes", Name: "memory-by-proc-of-a-protected-process", Operation: "trace", Errno: unix.EACCES, IsGuarded: true, attempt: memoryFile},
	{Group: "protected processes", Name: "process_vm_writev-to-a-protected-process", Operation: "trace", IsGuarded: true, attempt: vmWrite},
	{Group: "protected processes", Name: "pidfd_getfd-of-a-protected-process", Operation: "trace", IsGuarded: true, attempt: takeDescriptor},
}

func onTarget(attempt func(pid int) error) func(*work) error {
	return func(w *work) error {
		pid, err := w.target()
		if err != nil {
			return err
		}
		return attempt(pid)
	}
}

// queueSignal sends as sigqueue(3) does: the structure is the one of rt_sigqueueinfo(2), and SI_QUEUE is -1.
func queueSignal(pid int) error {
	var info [128]byte
	binary.NativeEndian.PutUint32(info[0:], uint32(unix.SIGKILL))
	binary.NativeEndian.PutUint32(info[8:], ^uint32(0))
	if _, _, errno := unix.Syscall(unix.SYS_RT_SIGQUEUEINFO, uintptr(pid), uintptr(unix.SIGKILL), uintptr(unsafe.Pointer(&info[0]))); errno != 0 {
		return errno
	}
	return nil
}

// ownerSignal makes the process the owner of a pipe, with a signal that ends it, and makes the kernel send the signal.
func ownerSignal(pid int) error {
	const setSignal = 10 // F_SETSIG of asm-generic/fcntl.h
	var ends [2]int
	if err := unix.Pipe(ends[:]); err != nil {
		return err
	}
	for _, set := range [][2]int{{unix.F_SETOWN, pid}, {setSignal, int(unix.SIGKILL)}, {unix.F_SETFL, unix.O_ASYNC}} {
		if _, err := unix.FcntlInt(uintptr(ends[0]), set[0], set[1]); err != nil {
			return err
		}
	}
	_, err := unix.Write(ends[1], []byte("x"))
	return err
}

// mountMemory makes a file system in memory of the protected folder.
func mountMemory(dir string) error {
	prot := filepath.Join(dir, "prot")
	if err := unix.Mount("tmpfs", prot, "tmpfs", 0, ""); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(prot, "f"), []byte("kept"), 0o644)
}

func procFD(fd int) string { return filepath.Join("/proc/self/fd", strconv.Itoa(fd)) }
