package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// MountCgroup2 finds the mount point of the second cgroup hierarchy (proc_pid_mountinfo(5)), or mounts it in a folder
// of its own. unmount removes that mount, and does nothing to one that was there before.
func MountCgroup2() (path string, unmount func() error, err error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", nil, fmt.Errorf("look for the cgroup2 file system: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		fields, after, _ := strings.Cut(line, " - ")
		if at := strings.Fields(fields); strings.HasPrefix(after, "cgroup2 ") && at[3] == "/" {
			return at[4], func() error { return nil }, nil
		}
	}
	if path, err = os.MkdirTemp("", "shunt-cgroup"); err != nil {
		return "", nil, fmt.Errorf("mount the cgroup2 file system: %w", err)
	}
	if err := unix.Mount("none", path, "cgroup2", 0, ""); err != nil {
		return "", nil, errors.Join(fmt.Errorf("mount the cgroup2 file system on %s: %w", path, err), os.Remove(path))
	}
	return path, func() error { return errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path)) }, nil
}

// MakeCgroup makes a cgroup below the root of the second hierarchy. remove fails while a process is in it,
// also while its last one is ending.
func MakeCgroup(name string) (path string, remove func() error, err error) {
	root, unmount, err := MountCgroup2()
	if err != nil {
		return "", nil, err
	}
	path = filepath.Join(root, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		return "", nil, errors.Join(fmt.Errorf("make a cgroup: %w", err), unmount())
	}
	return path, func() error {
		if err := os.Remove(path); err != nil {
			return err
		}
		return unmount()
	}, nil
}

// EnterCgroup makes a cgroup, as MakeCgroup, and moves this process into it: sockets are of the cgroup in which they were made.
// leave moves it back and removes the cgroup.
func EnterCgroup(name string) (path string, leave func() error, err error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", nil, fmt.Errorf("look for the cgroup of this process: %w", err)
	}
	home := "/"
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			home = path
		}
	}
	path, remove, err := MakeCgroup(name)
	if err != nil {
		return "", nil, err
	}
	move := func(to string) error {
		if err := os.WriteFile(filepath.Join(to, "cgroup.procs"), fmt.Appendf(nil, "%d", os.Getpid()), 0); err != nil {
			return fmt.Errorf("move this process into a cgroup: %w", err)
		}
		return nil
	}
	if err := move(path); err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return path, func() error { return errors.Join(move(filepath.Join(filepath.Dir(path), home)), remove()) }, nil
}
