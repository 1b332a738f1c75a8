// Package cgroup finds folders of the second cgroup hierarchy by the numbers of programs, and the other way round.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ID is the number by which the kernel knows a folder of the second hierarchy: its inode.
func ID(folder string) (uint64, error) {
	if err := isFolder(folder); err != nil {
		return 0, err
	}
	var stat unix.Stat_t
	if err := unix.Stat(folder, &stat); err != nil {
		return 0, fmt.Errorf("find the cgroup %s: %w", folder, err)
	}
	return stat.Ino, nil
}

// Level is the depth of a folder of the second hierarchy: its root, as this process sees it, is at 0.
func Level(folder string) (level uint32, err error) {
	at, err := filepath.EvalSymlinks(folder)
	if err == nil {
		at, err = filepath.Abs(at)
	}
	if err != nil {
		return 0, fmt.Errorf("find the cgroup %s: %w", folder, err)
	}
	for ; ; at = filepath.Dir(at) {
		if err := isFolder(filepath.Dir(at)); errors.Is(err, errOther) {
			return level, isFolder(at)
		} else if err != nil {
			return 0, err
		}
		level++
	}
}

// errOther is the error for a folder that is on another file system.
var errOther = errors.New("no folder of cgroup v2")

func isFolder(folder string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(folder, &fs); err != nil {
		return fmt.Errorf("find the cgroup %s: %w", folder, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%s is %w", filepath.Clean(folder), errOther)
	}
	return nil
}

// Paths are the folders of the second hierarchy below its root, "" for the root, by their numbers. There are none
// where it is not mounted.
func Paths() map[uint64]string {
	paths := map[uint64]string{}
	root := Root()
	if root == "" {
		return paths
	}
	// Cgroups come and go meanwhile: a folder that cannot be read is left out.
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		var stat unix.Stat_t
		if unix.Stat(path, &stat) == nil {
			paths[stat.Ino] = strings.TrimPrefix(path, root)
		}
		return nil
	})
	return paths
}

// Root is the mount point of the second hierarchy, or empty.
func Root() string {
	for _, m := range mounts() {
		if m.kind == "cgroup2" {
			return m.root
		}
	}
	return ""
}

// mounted is a mount of a hierarchy.
type mounted struct {
	root, kind string
	options    string // of the file system: of the first hierarchies, their controllers
}

// mounts are those of /proc/self/mountinfo (proc_pid_mountinfo(5)) whose file system is cgroup or cgroup2.
func mounts() (all []mounted) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(line, " - ")
		fields, of := strings.Fields(before), strings.Fields(after)
		if ok && len(fields) > 4 && len(of) > 2 && (of[0] == "cgroup" || of[0] == "cgroup2") {
			all = append(all, mounted{Unescape(fields[4]), of[0], of[2]})
		}
	}
	return all
}

var escape = regexp.MustCompile(`\\[0-7]{3}`)

// Unescape reads the octal numbers that stand for blanks in lists of mounts.
func Unescape(s string) string {
	return escape.ReplaceAllStringFunc(s, func(code string) string {
		n, err := strconv.ParseUint(code[1:], 8, 8)
		if err != nil {
			return code
		}
		return string([]byte{byte(n)})
	})
}
