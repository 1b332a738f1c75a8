package vdisk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/process"
	"golang.org/x/sys/unix"
)

// clusterFiles are file systems that several hosts mount: their extents and requests do not belong to this host alone.
// The numbers are from the file systems' own sources.
var clusterFiles = map[int64]string{
	0x7461636f: "OCFS2", // OCFS2_SUPER_MAGIC of linux/magic.h
	0x01161970: "GFS2",  // GFS2_MAGIC of linux/gfs2_ondisk.h
	0x0bd00bd0: "Lustre",
	0x00c36400: "Ceph", // CEPH_SUPER_MAGIC of linux/ceph/ceph_fs.h
	0x47504653: "GPFS",
}

// opened is an open file of the process.
type opened struct {
	descriptor int
	path       string // on this host: for reading and for qemu-img
	device     uint32 // the file system's, as the kernel has it: major << 20 | minor
	inode      uint64
	size       uint64
	block      uint32 // of a block device: its own number; 0: a file
	direct     bool   // past the page cache
}

// kernelDevice returns a device's number in the kernel's form.
func kernelDevice(d uint64) uint32 { return unix.Major(d)<<20 | unix.Minor(d) }

// openFiles returns the files and block devices that the process has open now. It refuses a cluster's file system.
func openFiles(pid int, statfs func(string, *unix.Statfs_t) error) ([]opened, error) {
	folder := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("list the open files of process %d: %w", pid, err)
	}
	var all []opened
	for _, entry := range entries {
		link := filepath.Join(folder, entry.Name())
		var stat unix.Stat_t
		if err := unix.Stat(link, &stat); err != nil {
			continue // the file was closed meanwhile
		}
		kind := stat.Mode & unix.S_IFMT
		if kind != unix.S_IFREG && kind != unix.S_IFBLK {
			continue
		}
		path, err := os.Readlink(link)
		if err != nil || strings.HasPrefix(path, "/memfd:") || strings.HasPrefix(path, "/dev/shm/") {
			continue
		}
		f := opened{path: pathHere(pid, path, stat), device: kernelDevice(stat.Dev), inode: stat.Ino, size: uint64(stat.Size)}
		f.descriptor, _ = strconv.Atoi(entry.Name()) // the kernel's names are numbers
		if kind == unix.S_IFBLK {
			f.block = kernelDevice(stat.Rdev)
		}
		f.direct = isDirect(pid, entry.Name())
		var of unix.Statfs_t
		err = statfs(link, &of)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the file was closed meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("ask for the file system of %s: %w", path, err)
		}
		if name, is := clusterFiles[int64(of.Type)]; is && kind == unix.S_IFREG {
			return nil, fmt.Errorf("%s is on the cluster file system %s, whose places on a disk other hosts change, too: shunt follows requests only to file systems of this host", path, name)
		}
		all = append(all, f)
	}
	return all, nil
}

// pathHere returns the path by which this process finds a file of another one, which may have another root.
func pathHere(pid int, path string, want unix.Stat_t) string {
	for _, candidate := range []string{path, fmt.Sprintf("/proc/%d/root%s", pid, path)} {
		var stat unix.Stat_t
		if err := unix.Stat(candidate, &stat); err == nil && stat.Dev == want.Dev && stat.Ino == want.Ino {
			return candidate
		}
	}
	return path
}

func isDirect(pid int, descriptor string) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, descriptor))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		if value, is := strings.CutPrefix(line, "flags:"); is {
			flags, err := strconv.ParseUint(strings.TrimSpace(value), 8, 64)
			return err == nil && flags&unix.O_DIRECT != 0
		}
	}
	return false
}

// Disk is a device of the block layer.
type Disk struct {
	Device uint32 `json:"device"` // major << 20 | minor
	Whole  uint32 `json:"whole"`  // the disk of a partition; otherwise the same
	Start  uint64 `json:"start"`  // of a partition: its first sector
	Name   string `json:"name"`
}

// findDisk reads a device's properties from sysfs. A device that is not there, such as that of a file system without a disk, has no name.
func findDisk(device uint32) Disk {
	d := Disk{Device: device, Whole: device}
	link, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", device>>20, device&(1<<20-1)))
	if err != nil {
		return d
	}
	d.Name = filepath.Base(link)
	text, err := os.ReadFile(filepath.Join(link, "start"))
	if err != nil {
		return d // no partition
	}
	d.Start, _ = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64) // the kernel's are numbers
	whole, err := os.ReadFile(filepath.Join(filepath.Dir(link), "dev"))
	if err != nil {
		return d
	}
	var major, minor uint32
	if n, _ := fmt.Sscanf(string(whole), "%d:%d", &major, &minor); n == 2 {
		d.Whole = major<<20 | minor
	}
	return d
}

// identity returns values that tell whether a number still belongs to the same process: the time of its start, in ticks.
func identity(pid int) (comm string, start uint64, err error) {
	stat, err := process.ReadStat(pid)
	if errors.Is(err, os.ErrNotExist) {
		return "", 0, fmt.Errorf("there is no process %d", pid)
	}
	if err != nil {
		return "", 0, fmt.Errorf("read of process %d: %w", pid, err)
	}
	start, err = stat.Number(process.StartTicks)
	if err != nil || slices.Contains([]string{"Z", "X"}, stat.State()) {
		return "", 0, fmt.Errorf("process %d has ended", pid)
	}
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return "", 0, fmt.Errorf("read of process %d: %w", pid, err)
	}
	return strings.TrimSuffix(string(name), "\n"), start, nil
}
