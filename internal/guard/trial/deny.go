package trial

import (
	"errors"
	"os"
	"os/exec"
	"runtime"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// allowed removes the error with which an operation fails that the guard has let pass.
func allowed(err error, fails unix.Errno) error {
	if errors.Is(err, fails) {
		return nil
	}
	return err
}

// ownMounts is elsewhere without a mount(2), which would be denied: the mounts end with the thread, or with the bench's
// disk.
func ownMounts() error {
	runtime.LockOSThread()
	return unix.Unshare(unix.CLONE_NEWNS)
}

// deniable are the operations that rules of detection can have the kernel refuse. The modules in these attempts are not
// valid, which the kernel reports only after the hook.
var deniable = []Row{
	{Name: "exec-path", attempt: func(w *work) error {
		cmd := exec.Command(w.dir, "wait", "") // which ends with its input
		cmd.Env = []string{operateVariable + "=1"}
		return cmd.Run()
	}},
	{Name: "map-code", attempt: func(w *work) error { // as the loader does with the program that is its argument
		fd, err := unix.Open(w.dir, unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		_, err = unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE)
		return err
	}},
	{Name: "map-then-code", attempt: func(w *work) error {
		fd, err := unix.Open(w.dir, unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		at, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
		if err != nil {
			return err
		}
		return unix.Mprotect(at, unix.PROT_READ|unix.PROT_EXEC)
	}},
	{Name: "read-path", attempt: func(w *work) error { return OpenWrite(w.dir, unix.O_RDONLY) }},
	{Name: "replace-path", attempt: func(w *work) error {
		return errors.Join(os.WriteFile(w.dir+"-new", []byte("new\n"), 0o755), os.Rename(w.dir+"-new", w.dir))
	}},
	{Name: "mount-anywhere", attempt: func(w *work) error {
		if err := ownMounts(); err != nil {
			return err
		}
		return unix.Mount("tmpfs", w.dir, "tmpfs", 0, "")
	}},
	{Name: "change-propagation", attempt: func(*work) error { return elsewhere() }},
	{Name: "mount-by-descriptor", attempt: func(w *work) error {
		if err := ownMounts(); err != nil {
			return err
		}
		tree, err := unix.OpenTree(unix.AT_FDCWD, w.dir, unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		return unix.MoveMount(tree, "", unix.AT_FDCWD, w.dir, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}},
	{Name: "load-module", attempt: func(w *work) error {
		self, err := os.Open("/proc/self/exe")
		if err != nil {
			return err
		}
		return allowed(unix.FinitModule(int(self.Fd()), "", 0), unix.ENOEXEC)
	}},
	{Name: "load-module-from-memory", attempt: func(*work) error { return allowed(unix.InitModule(make([]byte, 4096), ""), unix.ENOEXEC) }},
	{Name: "load-bpf", attempt: func(*work) error {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
		if err != nil {
			return err
		}
		return p.Close()
	}},
	{Name: "trace-child", attempt: func(w *work) error {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		child, err := Begin(self, "wait", "")
		if err != nil {
			return err
		}
		err = traceOne(child.Cmd.Process.Pid)
		return errors.Join(err, child.End())
	}},
}
