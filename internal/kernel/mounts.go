package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/process"
	"golang.org/x/sys/unix"
)

// isBPFFS reports whether path is on a bpffs.
func isBPFFS(path string) (bool, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return false, err
	}
	return uint32(fs.Type) == unix.BPF_FS_MAGIC, nil
}

// Mount makes sure that root is a bpffs which outlives this process: the existing one, that of the host, or a
// new one.
func Mount(root string, log *slog.Logger) error {
	taken, private := SharePins()
	return ensureBPFFS(root, taken, private, log)
}

// ensureBPFFS does the work of Mount, when it is known whether root is now the host's bpffs (taken), or the
// reason why only few processes see the mount there (private).
func ensureBPFFS(root string, taken bool, private error, log *slog.Logger) error {
	is, err := isBPFFS(root)
	if err != nil {
		return fmt.Errorf("look at %s, where shunt pins maps: %w; mount it with `mount -t bpf bpf %s`", root, err, root)
	}
	switch {
	case private != nil && is:
		log.Warn("the pinned maps and programs, and the data plane with them, disappear when the last process with these mounts ends; "+
			"unmount the bpffs, or start shunt outside, with `nsenter --net=/run/netns/NAME` for a network namespace", "path", root, "why", private)
		return nil
	case taken:
		log.Info("this process has mounts of its own, as under `ip netns exec`; its maps and programs are pinned outside", "path", root)
		return nil
	case is:
		return nil
	}
	if own, err := ownMounts(root); err != nil || own || private != nil {
		return errors.Join(fmt.Errorf("mount bpffs on %s, where shunt pins maps: this process has mounts of its own, and a bpffs that it mounts would disappear with the process; mount it outside, with `mount -t bpf bpf %s`, and start again", root, root), err, private)
	}
	if err := mountOnce(root); err != nil {
		return fmt.Errorf("mount bpffs on %s, where shunt pins maps: %w; mount it with `mount -t bpf bpf %s`", root, err, root)
	}
	log.Info("mounted bpffs, which keeps the data plane when shunt stops", "path", root)
	return nil
}

// mountOnce mounts a bpffs on root unless another process is quicker. Two on top of each other would hide the
// pins that the first process has made meanwhile.
func mountOnce(root string) error {
	below, err := os.Open(root)
	if err != nil {
		return err
	}
	defer below.Close() //nolint:errcheck // ends the lock
	for {
		if err := unix.Flock(int(below.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			if err != nil {
				return fmt.Errorf("lock it: %w", err)
			}
			break
		}
	}
	if is, err := isBPFFS(root); is || err != nil {
		return err
	}
	return unix.Mount("bpf", root, "bpf", 0, "mode=0700")
}

// SharePins mounts the host's bpffs on DefaultPinRoot if this process would otherwise see none, and reports
// whether it did: `ip netns exec` runs a program with a /sys of its own, and pins below it end with the program.
// An error is the reason why only few processes see the pins there: a bpffs that was mounted for these processes
// alone is left to them.
var SharePins = sync.OnceValues(func() (taken bool, err error) {
	outer, hidden := outermost(os.Getppid(), mountsOf, parent)
	shared, _, err := propagation(DefaultPinRoot)
	switch {
	case err == nil && shared:
		return false, nil
	case outer != 0:
		return sharePinsOf(outer, DefaultPinRoot)
	case hidden == 0 || isFirst():
		return false, nil
	}
	if is, err := isBPFFS(DefaultPinRoot); err == nil && is {
		return false, nil // as in a container, where it is most likely to stay
	}
	return false, fmt.Errorf("process %d, which this process descends from, does not let its mounts be compared with ours, so ours may end with this process, as under `ip netns exec`", hidden)
})

// sharePinsOf mounts the bpffs that another process sees on root for this process, if it sees none.
func sharePinsOf(outer int, root string) (taken bool, err error) {
	host := filepath.Join("/proc", strconv.Itoa(outer), "root", root)
	if is, err := isBPFFS(host); err != nil || !is {
		return false, errors.Join(fmt.Errorf("process %d, outside, has no bpffs on %s", outer, root), err)
	}
	if sameDevice(host, root) {
		return false, nil
	}
	if is, err := isBPFFS(root); err != nil || is {
		return false, errors.Join(fmt.Errorf("the bpffs on %s is not the bpffs that process %d, outside, has there", root, outer), err)
	}
	if err := graft(outer, root); err != nil {
		return false, fmt.Errorf("see the bpffs that process %d, outside, has on %s: %w", outer, root, err)
	}
	return true, nil
}

// outermost finds the most distant ancestor of this process that can be examined. It returns the ancestor's
// number if its mounts differ from ours, otherwise 0; and the number of the first ancestor beyond it, which
// cannot be examined, or 0. The first ancestor is pid.
func outermost(pid int, mounts func(process string) string, parent func(pid int) int) (outer, hidden int) {
	ours := mounts("self")
	for ; pid > 0; pid = parent(pid) {
		switch mounts(strconv.Itoa(pid)) {
		case "": // it has rights that we lack
			if hidden == 0 {
				hidden = pid
			}
			continue
		case ours:
			outer = 0
		default:
			outer = pid
		}
		hidden = 0
	}
	return outer, hidden
}

// mountsOf names the mount namespace of a process; "" if it cannot be read.
func mountsOf(process string) string {
	number, err := host.Namespace(process, "mnt")
	if err != nil {
		return ""
	}
	return strconv.FormatUint(number, 10)
}

// isFirst reports whether this process has the mounts of the machine's first mount namespace, which end with the
// machine.
func isFirst() bool {
	number, err := host.Namespace("self", "mnt")
	return err == nil && host.IsFirst("mnt", number)
}

// parent returns the parent of a process, or 0.
func parent(pid int) int {
	stat, err := process.ReadStat(pid)
	if err != nil {
		return 0
	}
	parent, _ := stat.Number(process.Parent)
	return int(parent)
}

func sameDevice(a, b string) bool {
	var at, bt unix.Stat_t
	return unix.Stat(a, &at) == nil && unix.Stat(b, &bt) == nil && at.Dev == bt.Dev
}

// graft mounts on path the file system that another process sees there. The mounts of a process can be copied
// only from inside its mount namespace (open_tree(2)), so a thread enters that namespace and ends afterwards.
func graft(pid int, path string) error {
	namespace, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), "ns/mnt"))
	if err != nil {
		return err
	}
	defer namespace.Close() //nolint:errcheck // nothing was written
	type copied struct {
		fd  int
		err error
	}
	done := make(chan copied)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			done <- copied{err: err}
			return
		}
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
			done <- copied{err: fmt.Errorf("enter its mounts: %w", err)}
			return
		}
		fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		done <- copied{fd, err}
	}()
	tree := <-done
	if tree.err != nil {
		return tree.err
	}
	defer unix.Close(tree.fd) //nolint:errcheck // nothing was written
	if err := unix.MoveMount(tree.fd, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount it here: %w", err)
	}
	return nil
}

// ownMounts reports whether only this process would see a mount on path: the mount of path receives mounts from
// outside, and propagates none. The sandbox of a service manager is like that (mount_namespaces(7), "master").
func ownMounts(path string) (bool, error) {
	shared, master, err := propagation(path)
	return master && !shared, err
}

// propagation reports whether the mount of path propagates new mounts to others (shared), and receives mounts
// of others (master).
func propagation(path string) (shared, master bool, err error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false, false, err
	}
	longest := 0
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 7 || len(fields[4]) < longest || fields[4] != "/" && path != fields[4] && !strings.HasPrefix(path, fields[4]+"/") {
			continue
		}
		options := fields[6:max(6, slices.Index(fields, "-"))]
		is := func(kind string) bool {
			return slices.ContainsFunc(options, func(o string) bool { return strings.HasPrefix(o, kind) })
		}
		longest, shared, master = len(fields[4]), is("shared:"), is("master:")
	}
	return shared, master, nil
}
