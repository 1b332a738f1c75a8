// Package namespace is for work in a network namespace that is not the process's own. A
// handle that is not open (netns.None) means the calling thread's.
package namespace

import (
	"fmt"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Keep duplicates the handle, so that the caller may close its own.
func Keep(ns *netns.NsHandle) (netns.NsHandle, error) {
	if ns == nil || !ns.IsOpen() {
		return netns.None(), nil
	}
	fd, err := unix.FcntlInt(uintptr(*ns), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return netns.None(), fmt.Errorf("keep a handle of the network namespace: %w", err)
	}
	return netns.NsHandle(fd), nil
}

// Close closes a handle that Keep has returned.
func Close(ns netns.NsHandle) {
	if ns.IsOpen() {
		_ = ns.Close()
	}
}

// Inside runs f on a thread that is in the namespace, or on the calling one.
func Inside(ns netns.NsHandle, f func() error) error {
	if !ns.IsOpen() {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			done <- fmt.Errorf("get the current network namespace: %w", err)
			return
		}
		defer home.Close()
		if err = netns.Set(ns); err != nil {
			err = fmt.Errorf("enter the network namespace: %w", err)
		} else {
			err = f()
		}
		if netns.Set(home) == nil {
			runtime.UnlockOSThread() // otherwise the thread ends with this goroutine
		}
		done <- err
	}()
	return <-done
}

// paths are the places where network namespaces can be seen: `ip netns` and Docker keep them as
// files, and every process is in one.
var paths = []string{"/run/netns/*", "/run/docker/netns/*", "/proc/[0-9]*/ns/net"}

// Find opens the first namespace for which the function is returns true, of all that can be seen
// from here. None: there is no such one, so the namespace is gone, or held by a file that only its
// owner can see.
func Find(is func(netns.NsHandle) bool) netns.NsHandle {
	type inode struct{ device, number uint64 }
	seen := map[inode]bool{}
	for _, pattern := range paths {
		found, _ := filepath.Glob(pattern) // which fails for a bad pattern alone
		for _, path := range found {
			var stat unix.Stat_t
			if unix.Stat(path, &stat) != nil || seen[inode{stat.Dev, stat.Ino}] {
				continue // gone, not ours to see, or looked at
			}
			seen[inode{stat.Dev, stat.Ino}] = true
			ns, err := netns.GetFromPath(path)
			if err != nil {
				continue
			}
			if is(ns) {
				return ns
			}
			_ = ns.Close()
		}
	}
	return netns.None()
}
