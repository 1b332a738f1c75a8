package host

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Namespace is the number of a namespace: the inode number of /proc/PID/ns/KIND, which programs see too. The kernel
// may give it to another one when the namespace is gone. process is a number, "self", or "thread-self" for the
// calling thread; kind is "net", "mnt", "pid" or another file there.
func Namespace(process, kind string) (uint64, error) {
	return NamespaceIn(filepath.Join("/proc", process, "ns"), kind)
}

// NamespaceIn is Namespace by the folder of the process's namespaces. os.ErrNotExist is in the error where the
// kernel has none of the kind.
func NamespaceIn(folder, kind string) (uint64, error) {
	var stat unix.Stat_t
	if err := unix.Stat(filepath.Join(folder, kind), &stat); err != nil {
		return 0, fmt.Errorf("identify the %s namespace: %w", kind, err)
	}
	return stat.Ino, nil
}

// Netns is the number of the calling thread's network namespace.
func Netns() (uint64, error) { return Namespace("thread-self", "net") }

// firsts are the numbers of the machine's first namespaces, which end with the machine. They are fixed
// (linux/proc_ns.h). The mount namespace's is fixed since 6.18 (MNT_NS_INIT_INO of linux/nsfs.h); before, it was the
// first or the second number that fs/proc/generic.c hands out (PROC_DYNAMIC_FIRST).
var firsts = map[string][]uint64{"pid": {0xEFFFFFFC}, "time": {0xEFFFFFFA}, "mnt": {0xEFFFFFF8, 0xF0000000, 0xF0000001}}

// IsFirst reports whether the number is that of the machine's first namespace of a kind: "pid", "time" or "mnt".
func IsFirst(kind string, number uint64) bool { return slices.Contains(firsts[kind], number) }

// NetnsCookie is the number that the kernel has given to the calling thread's network namespace, which is not
// used again before the machine restarts (SO_NETNS_COOKIE, Linux 5.14).
func NetnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("identify the network namespace: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("identify the network namespace: %w; this needs Linux 5.14 or later", err)
	}
	return cookie, nil
}

// Space names the calling thread's network namespace by its cookie, "ns-1" for example.
func Space() (string, error) {
	cookie, err := NetnsCookie()
	if err != nil {
		return "", err
	}
	return "ns-" + strconv.FormatUint(cookie, 10), nil
}
