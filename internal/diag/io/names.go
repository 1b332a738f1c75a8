package io

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/event"
)

// name is a file's name inside its file system.
type name struct {
	path         string // from the file system's root, with a leading slash; "": none
	deleted, cut bool   // cut: it begins in the middle
}

// namesMax is the number of files that are remembered; the programs report a file's name again every 5 s.
const namesMax = 4 * int(ioIoConstantIO_FILES_MAX)

// names has the names of files, devices and containers. Answers that can change are kept for one interval.
type names struct {
	files      map[file]name
	broken     uint64
	mounts     map[uint32][]mount // by mount namespace
	devices    map[uint32]string
	cgroups    map[uint64]string // paths below the second hierarchy
	containers map[uint32]string // by process: from its cgroup in the first hierarchy
	walked     bool              // in this interval
}

// Names finds the names of files, for other tools whose programs report them by bpf/diag/file.h.
type Names struct{ of names }

// NewNames returns Names without any name.
func NewNames() *Names { return &Names{newNames()} }

// Learn takes an event; false: the event has no file's name.
func (n *Names) Learn(e event.Event) bool {
	if e.Sensor != uint16(ioIoConstantIO_SENSOR_PATH) {
		return false
	}
	n.of.learn(e)
	return true
}

// Path returns a file's path here, or "-".
func (n *Names) Path(inode uint64, device, generation uint32) string {
	return n.of.path(file{Inode: inode, Device: device, Generation: generation}, 0, 0)
}

func newNames() names {
	n := names{files: map[file]name{}, cgroups: map[uint64]string{}}
	n.forget()
	return n
}

// forget drops the answers that can change.
func (n *names) forget() {
	n.mounts, n.devices, n.containers, n.walked = map[uint32][]mount{}, map[uint32]string{}, map[uint32]string{}, false
	if len(n.files) > namesMax {
		n.files = map[file]name{}
	}
}

func (n *names) learn(e event.Event) {
	if e.Sensor != uint16(ioIoConstantIO_SENSOR_PATH) {
		n.broken++
		return
	}
	f, called, err := decodePath(e.Payload)
	if err != nil {
		n.broken++
		return
	}
	n.files[f] = called
}

// path returns the file's path as the process sees it, or "-". A file without a name in the process's mount namespace,
// such as a file in an overlay's lower layer, has its name here.
func (n *names) path(f file, tgid, mntns uint32) string {
	if f.Device == 0 {
		return "-"
	}
	if f.Inode == 0 {
		return "/dev/" + n.device(f.Device)
	}
	called, known := n.files[f]
	if !known || called.path == "" {
		return "-"
	}
	path := called.path
	if called.cut {
		path = "/..." + path
	} else if at, ok := mountedPath(n.mountsOf(strconv.Itoa(int(tgid)), mntns), f.Device, path); ok {
		path = at
	} else if at, ok := mountedPath(n.mountsOf("self", 0), f.Device, path); ok {
		path = at
	} else {
		path = n.device(f.Device) + ":" + path
	}
	if called.deleted {
		path += " (deleted)"
	}
	return path
}

// mount is a line of mountinfo.
type mount struct {
	device      uint32
	root, point string
}

func (n *names) mountsOf(pid string, mntns uint32) []mount {
	mounts, known := n.mounts[mntns]
	if !known {
		// A process that has ended cannot be read: then the mounts of another one of its namespace count, or
		// the mounts here.
		text, err := os.ReadFile("/proc/" + pid + "/mountinfo")
		if err != nil {
			return nil
		}
		mounts = parseMounts(string(text))
		n.mounts[mntns] = mounts
	}
	return mounts
}

// parseMounts reads /proc/PID/mountinfo (proc_pid_mountinfo(5)).
func parseMounts(text string) (mounts []mount) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 6 {
			continue
		}
		major, minor, ok := strings.Cut(fields[2], ":")
		a, errA := strconv.ParseUint(major, 10, 12)
		b, errB := strconv.ParseUint(minor, 10, 20)
		if !ok || errA != nil || errB != nil {
			continue
		}
		mounts = append(mounts, mount{uint32(a<<20 | b), cgroup.Unescape(fields[3]), cgroup.Unescape(fields[4])})
	}
	return mounts
}

// mountedPath returns the path through the mount that shows the smallest part of the file system with the file in it.
func mountedPath(mounts []mount, device uint32, path string) (string, bool) {
	best := -1
	for i, m := range mounts {
		below := m.root == "/" || path == m.root || strings.HasPrefix(path, m.root+"/")
		if m.device == device && below && (best < 0 || len(m.root) < len(mounts[best].root)) {
			best = i
		}
	}
	if best < 0 {
		return "", false
	}
	return filepath.Join(mounts[best].point, strings.TrimPrefix(path, strings.TrimSuffix(mounts[best].root, "/"))), true
}

// device returns a block device's name, or its numbers.
func (n *names) device(dev uint32) string {
	if known, ok := n.devices[dev]; ok {
		return known
	}
	numbers := fmt.Sprintf("%d:%d", dev>>20, dev&(1<<20-1))
	called := numbers
	if target, err := os.Readlink("/sys/dev/block/" + numbers); err == nil {
		called = filepath.Base(target)
	}
	n.devices[dev] = called
	return called
}

var containerName = regexp.MustCompile(`[0-9a-f]{64}`)

// container returns the id in the name of the process's cgroup, 64 hexadecimal digits; "": it is in none.
func (n *names) container(cgroup uint64, tgid uint32) string {
	path, known := n.cgroups[cgroup]
	if !known && !n.walked {
		n.walked = true
		n.walkCgroups()
		path, known = n.cgroups[cgroup]
	}
	if id := containerName.FindString(path); known && id != "" {
		return id
	}
	// In the first hierarchy, as with Docker beside cgroup v1. A process has a row for each of its files.
	id, known := n.containers[tgid]
	if !known {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", tgid)) // a process that has ended is in none
		id = containerName.FindString(string(text))
		n.containers[tgid] = id
	}
	return id
}

// walkCgroups reads the folders of the second hierarchy: a cgroup's id is the inode number of its folder.
func (n *names) walkCgroups() {
	n.cgroups = cgroup.Paths()
}
