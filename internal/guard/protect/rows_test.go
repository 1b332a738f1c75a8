package protect

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/test/uring"
)

// row is an operation of the matrix.
type row struct {
	group      string
	name       string
	before     func(*work) error // in the same process, before the policy
	attempt    func(*work) error
	operation  string     // that events name; empty: no event comes
	notCovered string     // why it is not denied
	errno      unix.Errno // the error with which it fails; 0: EPERM
	isTrace    bool       // its target is a process, and no file changes
	isGuarded  bool       // the target is protected by a rule of processes, and not because it runs a trusted program
	isKill     bool       // it ends the process
	isSilent   bool       // it fails without an error
	isNobodys  bool       // no program is trusted with it
	setup      func(dir string) error
}

func old(flags int) func(*work) error { return func(w *work) error { return w.before(flags) } }

// matrix lists the attempts of programs that are not trusted. The page docs/reference/guard-matrix.md is made from it.
var matrix = []row{
	{group: "by its name", name: "open-write", operation: policy.Write, attempt: func(w *work) error { return openWrite(w.prot("f"), unix.O_WRONLY) }},
	{group: "by its name", name: "open-append", operation: policy.Write, attempt: func(w *work) error { return openWrite(w.prot("f"), unix.O_WRONLY|unix.O_APPEND) }},
	{group: "by its name", name: "open-read-write", operation: policy.Write, attempt: func(w *work) error { return openWrite(w.prot("sub/h"), unix.O_RDWR) }},
	{group: "by its name", name: "open-read-only-truncating", operation: policy.Write, attempt: func(w *work) error { return openWrite(w.prot("f"), unix.O_RDONLY|unix.O_TRUNC) }},
	{group: "by its name", name: "truncate", operation: policy.Write, attempt: func(w *work) error { return unix.Truncate(w.prot("f"), 1) }},
	{group: "by its name", name: "io_uring-open-write", operation: policy.Write, attempt: func(w *work) error {
		return ringPath(18, w.prot("f"), 0, unix.O_WRONLY|unix.O_TRUNC) // IORING_OP_OPENAT
	}},
	{group: "by its name", name: "io_uring-unlink", operation: policy.Delete, attempt: func(w *work) error { return ringPath(36, w.prot("f"), 0, 0) }}, // IORING_OP_UNLINKAT

	{group: "by its name", name: "io_uring-poller-open-write", operation: policy.Write, attempt: func(w *work) error {
		raw := append([]byte(w.prot("f")), 0)
		return ringDo(uring.Polled, 18, unix.AT_FDCWD, unsafe.Pointer(&raw[0]), 0, unix.O_WRONLY|unix.O_TRUNC, 0) // IORING_OP_OPENAT
	}},

	{group: "by another name", name: "symbolic-link", operation: policy.Write, attempt: func(w *work) error {
		if err := unix.Symlink(w.prot("f"), w.out("s")); err != nil {
			return err
		}
		return openWrite(w.out("s"), unix.O_WRONLY)
	}},
	{group: "by another name", name: "hard-link-from-before", operation: policy.Write, attempt: func(w *work) error { return openWrite(w.out("l"), unix.O_WRONLY) }},
	{group: "by another name", name: "reopen-by-proc", operation: policy.Write, before: old(unix.O_RDONLY), attempt: func(w *work) error {
		return openWrite(procFD(w.fd), unix.O_WRONLY)
	}},
	{group: "by another name", name: "bind-mount", operation: policy.Write, attempt: func(w *work) error {
		if err := elsewhere(); err != nil {
			return err
		}
		if err := w.bind(w.prot(""), w.out("m")); err != nil {
			return err
		}
		return openWrite(w.out("m/f"), unix.O_WRONLY)
	}},
	{group: "by another name", name: "bind-mount-of-folder-above", operation: policy.Write, attempt: func(w *work) error {
		if err := elsewhere(); err != nil {
			return err
		}
		if err := w.bind(w.dir, w.out("m")); err != nil {
			return err
		}
		return openWrite(w.out("m/prot/f"), unix.O_WRONLY)
	}},
	{group: "by another name", name: "chroot", operation: policy.Write, attempt: func(w *work) error {
		if err := unix.Chroot(w.dir); err != nil {
			return err
		}
		return openWrite("/prot/f", unix.O_WRONLY)
	}},
	{group: "by another name", name: "open_tree-clone", operation: policy.Write, attempt: func(w *work) error {
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
	{group: "by another name", name: "open_by_handle_at", operation: policy.Write, attempt: handleWrite},

	{group: "by a descriptor from before", name: "old-write", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		_, err := unix.Write(w.fd, []byte(changed))
		return err
	}},
	{group: "by a descriptor from before", name: "old-pwrite", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		_, err := unix.Pwrite(w.fd, []byte(changed), 0)
		return err
	}},
	{group: "by a descriptor from before", name: "old-pwritev", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		_, err := unix.Pwritev(w.fd, [][]byte{[]byte(changed)}, 0)
		return err
	}},
	{group: "by a descriptor from before", name: "old-ftruncate", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error { return unix.Ftruncate(w.fd, 1) }},
	{group: "by a descriptor from before", name: "old-fallocate", operation: policy.Write, setup: mountMemory, before: old(unix.O_RDWR), attempt: func(w *work) error { return unix.Fallocate(w.fd, 0, 0, 1<<16) }},
	{group: "by a descriptor from before", name: "old-punch-hole", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		return unix.Fallocate(w.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
	}},
	{group: "by a descriptor from before", name: "old-splice", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		from, err := pipe()
		if err != nil {
			return err
		}
		_, err = unix.Splice(from, nil, w.fd, nil, len(changed), 0)
		return err
	}},
	{group: "by a descriptor from before", name: "old-sendfile", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		from, err := unix.Open(w.out("source"), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		_, err = unix.Sendfile(w.fd, from, nil, len(changed))
		return err
	}},
	{group: "by a descriptor from before", name: "old-copy_file_range", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		from, err := unix.Open(w.out("source"), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		_, err = unix.CopyFileRange(from, nil, w.fd, nil, len(changed), 0)
		return err
	}},
	{group: "by a descriptor from before", name: "old-io_uring-write", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		data := []byte(changed)
		return ringDo(0, 23, int32(w.fd), unsafe.Pointer(&data[0]), uint32(len(data)), 0, 0) // IORING_OP_WRITE
	}},
	{group: "by a descriptor from before", name: "old-io_uring-poller-write", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) error {
		data := []byte(changed)
		return ringDo(uring.Polled, 23, int32(w.fd), unsafe.Pointer(&data[0]), uint32(len(data)), 0, 0) // IORING_OP_WRITE
	}},
	{group: "by a descriptor from before", name: "old-new-mapping", operation: policy.Write, before: old(unix.O_RDWR), attempt: func(w *work) (err error) {
		if w.mem, err = unix.Mmap(w.fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return err
		}
		return w.store()
	}},
	{group: "by a descriptor from before", name: "old-mapping-made-writable", operation: policy.Write,
		before: func(w *work) error { return w.mapBefore(unix.PROT_READ) },
		attempt: func(w *work) error {
			if err := unix.Mprotect(w.mem, unix.PROT_READ|unix.PROT_WRITE); err != nil {
				return err
			}
			return w.store()
		}},
	{group: "by a descriptor from before", name: "old-writable-mapping", before: func(w *work) error { return w.mapBefore(unix.PROT_READ | unix.PROT_WRITE) }, attempt: (*work).store,
		notCovered: "the kernel calls no hook for a store to memory. At the load of a policy, shunt finds mappings that are writable, and reports their processes"},
	{group: "by a descriptor from before", name: "old-mapping-filled-by-userfaultfd", setup: mountMemory, before: mapHole, attempt: fillHole,
		notCovered: "the kernel calls no hook when a missing page of a file on tmpfs is filled in; other file systems refuse this. At the load of a policy, shunt finds mappings that allow it, of descriptors that may write, and reports their processes"},

	{group: "making a name", name: "create", operation: policy.Create, attempt: func(w *work) error { return openWrite(w.prot("new"), unix.O_WRONLY|unix.O_CREAT) }},
	{group: "making a name", name: "mkdir", operation: policy.Create, attempt: func(w *work) error { return unix.Mkdir(w.prot("sub/new"), 0o755) }},
	{group: "making a name", name: "mknod", operation: policy.Create, attempt: func(w *work) error { return unix.Mknod(w.prot("new"), unix.S_IFIFO|0o644, 0) }},
	{group: "making a name", name: "symlink", operation: policy.Create, attempt: func(w *work) error { return unix.Symlink("/etc", w.prot("new")) }},
	{group: "making a name", name: "link-into", operation: policy.Create, attempt: func(w *work) error { return unix.Link(w.out("source"), w.prot("new")) }},
	{group: "making a name", name: "rename-into", operation: policy.Create, attempt: func(w *work) error { return unix.Rename(w.out("source"), w.prot("new")) }},
	{group: "making a name", name: "tmpfile-linked-into", operation: policy.Create, attempt: func(w *work) error {
		fd, err := unix.Open(w.out(""), unix.O_TMPFILE|unix.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		return unix.Linkat(unix.AT_FDCWD, procFD(fd), unix.AT_FDCWD, w.prot("new"), unix.AT_SYMLINK_FOLLOW)
	}},

	{group: "removing a name", name: "unlink", operation: policy.Delete, attempt: func(w *work) error { return unix.Unlink(w.prot("f")) }},
	{group: "removing a name", name: "rmdir", operation: policy.Delete, attempt: func(w *work) error { return unix.Rmdir(w.prot("empty")) }},
	{group: "removing a name", name: "replaced-by-rename", operation: policy.Delete, attempt: func(w *work) error { return unix.Rename(w.out("source"), w.prot("f")) }},

	{group: "moving", name: "rename-out", operation: policy.Rename, attempt: func(w *work) error { return unix.Rename(w.prot("f"), w.out("taken")) }},
	{group: "moving", name: "rename-within", operation: policy.Rename, attempt: func(w *work) error { return unix.Rename(w.prot("f"), w.prot("new")) }},
	{group: "moving", name: "exchange", operation: policy.Rename, attempt: func(w *work) error {
		return unix.Renameat2(unix.AT_FDCWD, w.out("source"), unix.AT_FDCWD, w.prot("f"), unix.RENAME_EXCHANGE)
	}},
	{group: "moving", name: "rename-folder", operation: policy.Rename, attempt: func(w *work) error { return unix.Rename(w.prot(""), w.out("taken")) }},
	{group: "moving", name: "rename-folder-above", operation: policy.Rename, attempt: func(w *work) error {
		return unix.Rename(w.dir, w.dir+"-moved")
	}},
	{group: "moving", name: "io_uring-rename", operation: policy.Rename, attempt: func(w *work) error {
		from, to := append([]byte(w.prot("f")), 0), append([]byte(w.prot("new")), 0)
		at := int32(unix.AT_FDCWD)
		return ringDo(0, 35, at, unsafe.Pointer(&from[0]), uint32(at), 0, uint64(uintptr(unsafe.Pointer(&to[0])))) // IORING_OP_RENAMEAT
	}},

	{group: "giving another name", name: "link-out", operation: policy.Link, attempt: func(w *work) error { return unix.Link(w.prot("f"), w.out("new")) }},

	{group: "attributes", name: "chmod", operation: policy.Chmod, attempt: func(w *work) error { return unix.Chmod(w.prot("f"), 0o666) }},
	{group: "attributes", name: "fchmod-by-read-only-descriptor", operation: policy.Chmod, attempt: func(w *work) error {
		fd, err := unix.Open(w.prot("f"), unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		return unix.Fchmod(fd, 0o666)
	}},
	{group: "attributes", name: "chown", operation: policy.Chmod, attempt: func(w *work) error { return unix.Chown(w.prot("f"), 1, 1) }},
	{group: "attributes", name: "utimes", operation: policy.Chmod, attempt: func(w *work) error {
		return unix.Utimes(w.prot("f"), []unix.Timeval{{Sec: 1}, {Sec: 1}})
	}},
	{group: "attributes", name: "setxattr", operation: policy.Chmod, attempt: func(w *work) error { return unix.Setxattr(w.prot("f"), "user.new", []byte("x"), 0) }},
	{group: "attributes", name: "removexattr", operation: policy.Chmod, attempt: func(w *work) error { return unix.Removexattr(w.prot("f"), "user.kept") }},
	{group: "attributes", name: "acl", operation: policy.Chmod, attempt: func(w *work) error { return unix.Setxattr(w.prot("f"), "system.posix_acl_access", acl(), 0) }},
	{group: "attributes", name: "chattr", operation: policy.Chmod, attempt: noTimeFlag},

	{group: "mounts", name: "mount-over", operation: policy.Mount, attempt: func(w *work) error { return unix.Mount("tmpfs", w.prot(""), "tmpfs", 0, "") }},
	{group: "mounts", name: "mount-over-file", operation: policy.Mount, attempt: func(w *work) error {
		return unix.Mount(w.out("source"), w.prot("f"), "", unix.MS_BIND, "")
	}},
	{group: "mounts", name: "mount-over-folder-above", operation: policy.Mount, attempt: func(w *work) error { return unix.Mount("tmpfs", w.dir, "tmpfs", 0, "") }},
	{group: "mounts", name: "move_mount-over", operation: policy.Mount, attempt: func(w *work) error {
		tree, err := unix.OpenTree(unix.AT_FDCWD, w.out(""), unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		return unix.MoveMount(tree, "", unix.AT_FDCWD, w.prot(""), unix.MOVE_MOUNT_F_EMPTY_PATH)
	}},
	{group: "mounts", name: "unmount", operation: policy.Mount, setup: mountMemory, attempt: func(w *work) error { return unix.Unmount(w.prot(""), unix.MNT_DETACH) }},

	{group: "trusted programs", name: "write-the-program", operation: "write-program", attempt: func(w *work) error { return openWrite(w.out("program"), unix.O_WRONLY) }},
	{group: "trusted programs", name: "truncate-the-program", operation: "write-program", attempt: func(w *work) error { return unix.Truncate(w.out("program"), 1) }},
	{group: "trusted programs", name: "trace-a-process", operation: "trace", isTrace: true, attempt: traceAttach},
	{group: "trusted programs", name: "memory-by-proc", operation: "trace", errno: unix.EACCES, isTrace: true, attempt: memoryFile},
	{group: "trusted programs", name: "process_vm_writev", operation: "trace", isTrace: true, attempt: vmWrite},
	{group: "trusted programs", name: "pidfd_getfd", operation: "trace", isTrace: true, attempt: takeDescriptor},

	{group: "protected processes", name: "kill", operation: policy.Kill, isGuarded: true, isKill: true, attempt: onTarget(func(pid int) error { return unix.Kill(pid, unix.SIGKILL) })},
	{group: "protected processes", name: "tgkill", operation: policy.Kill, isGuarded: true, isKill: true, attempt: onTarget(func(pid int) error { return unix.Tgkill(pid, pid, unix.SIGKILL) })},
	{group: "protected processes", name: "rt_sigqueueinfo", operation: policy.Kill, isGuarded: true, isKill: true, attempt: onTarget(queueSignal)},
	{group: "protected processes", name: "pidfd_send_signal", operation: policy.Kill, isGuarded: true, isKill: true, attempt: onTarget(func(pid int) error {
		pidfd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return err
		}
		return unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
	})},
	{group: "protected processes", name: "signal-of-a-file's-owner", operation: policy.Kill, isGuarded: true, isKill: true, isSilent: true, isNobodys: true, attempt: onTarget(ownerSignal)},
	{group: "protected processes", name: "limit-of-CPU-time", operation: policy.Kill, isGuarded: true, attempt: onTarget(func(pid int) error {
		return unix.Prlimit(pid, unix.RLIMIT_CPU, &unix.Rlimit{Cur: 3600, Max: 3600}, nil)
	})},
	{group: "protected processes", name: "trace-a-protected-process", operation: "trace", isGuarded: true, attempt: traceAttach},
	{group: "protected processes", name: "memory-by-proc-of-a-protected-process", operation: "trace", errno: unix.EACCES, isGuarded: true, attempt: memoryFile},
	{group: "protected processes", name: "process_vm_writev-to-a-protected-process", operation: "trace", isGuarded: true, attempt: vmWrite},
	{group: "protected processes", name: "pidfd_getfd-of-a-protected-process", operation: "trace", isGuarded: true, attempt: takeDescriptor},
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

// untried lists known ways around the protection that are not denied. No test tries them.
var untried = []struct{ name, why string }{
	{"/etc/ld.so.preload, and libraries that a trusted program loads or a script that it starts", "a program that can write these files decides what the trusted program does. Protect them, too"},
	{"a copy of an interpreter, or an interpreter under a name that shunt does not know", "with children: true it is a program like any other. Protect the folders from which trusted programs start programs"},
	{"prctl(PR_SET_MM_EXE_FILE) before a policy is loaded", "shunt recognises running processes by /proc/PID/exe, which root can have changed"},
	{"cgroup.kill, cgroup.freeze and memory.max, for processes that a rule names by `program` or `pid-file`", "a file belongs to a cgroup, and no hook says which processes are in it. Name their `cgroup` in another rule that denies `kill` and `move`"},
	{"moving a process out of the rule's cgroup, and then ending it, under a rule without `move`", "no hook says which process moves. `move` denies it, and with it the moves of other processes through a cgroup above the rule's"},
	{"moving a process among those of a rule with `cgroup` that does not deny `kill`", "the processes of a rule may do everything to each other. Deny `kill`, too"},
	{"freezer and memory in a cgroup v1 hierarchy", "the kernel calls no hook when a process moves there. Mount no such hierarchy, and deny mounts by a rule of `detect` with `action: deny`"},
	{"other limits of a cgroup above the rule's (cpu.max, memory.high, memory.swap.max, pids.max, hugetlb.*.max)", "the processes become slow, cannot start others, or end when they need more. Programs that make containers write to these files"},
	{"/proc/sysrq-trigger, the kernel's want of memory, reboot", "no hook says which process asks for it. Only mode and owner protect these files"},
	{"sched_setaffinity, ionice on a protected process", "the process becomes slow, and does not end"},
	{"a rename between folders of two rules in the moment when a policy is loaded", "the file may lack the second rule until the next load. Only trusted programs can do this"},
	{"the block device below the file system, written or read raw", "the kernel does not ask the file system. Protect the device's node, and take CAP_SYS_RAWIO and CAP_MKNOD away"},
	{"the layers of an overlay file system", "a file has one inode in the overlay and another inode in the layer. Protect the layer's folders, too"},
	{"a file's length, times, owner, extended attributes, names (stat, getxattr, readlink)", "`read` covers contents, and the names in a folder when the folder is listed"},
	{"a core dump of a trusted process, which any program may cause by a signal", "the dump holds the data that the process has read. Protect the process from `kill`, or set its limit of core dumps to 0"},
	{"FICLONE and FIDEDUPERANGE by a descriptor from before", "the kernel checks them as it checks `old-read`, on file systems that share blocks (btrfs, XFS), and no test has such a file system. With a new descriptor, the open is denied"},
	{"a file server (NFS, a FUSE program) or another machine with the same disk", "another kernel or another program does the writing"},
	{"kexec, modules, another BPF program, /dev/mem", "root changes the kernel itself. Switch on lockdown, or deny modules and BPF programs by a rule of `detect` with `action: deny`"},
	{"`shunt guard stop`, or removing the pins", "self: true protects the process, and does not protect the pins yet"},
}

func procFD(fd int) string { return filepath.Join("/proc/self/fd", itoa(fd)) }
