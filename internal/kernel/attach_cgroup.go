package kernel

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// AttachCgroup attaches a program to a folder of a cgroup2 file system, beside other programs: for the
// processes of the folder and of all folders below. It works for all attach types of a cgroup, of which
// sock_ops is one. A RefusedError has the reason.
func AttachCgroup(p *ebpf.Program, name, cgroup string, at ebpf.AttachType) (link.Link, error) {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: at, Program: p})
	if err != nil {
		return nil, refused(name, fmt.Sprintf("the cgroup %s at %s", cgroup, at), "it must be a folder of a cgroup2 file system (`findmnt -t cgroup2`), and no program may be attached there exclusively (`bpftool cgroup tree`)", err)
	}
	return l, nil
}

// PinCgroup does the same as AttachCgroup by a link that is pinned at path and outlives the process. A link
// that is pinned there for this cgroup gets the program, in one step; a link of another cgroup is ended.
func PinCgroup(p *ebpf.Program, name, cgroup string, at ebpf.AttachType, path string) (link.Link, error) {
	l, err := takeOverCgroup(p, cgroup, path)
	if l != nil || err != nil {
		return l, err
	}
	if l, err = AttachCgroup(p, name, cgroup, at); err != nil {
		return nil, err
	}
	if err := PinLink(l, path); err != nil {
		return nil, err
	}
	return l, nil
}

// takeOverCgroup puts the program into the link that is pinned at path, if the link is of this cgroup. nil:
// there is none, or it was of another cgroup.
func takeOverCgroup(p *ebpf.Program, cgroup, path string) (link.Link, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the link pinned at %s: %w; remove the file, which detaches it", path, err)
	}
	// A cgroup's identifier is its inode's number (cgroup_id in include/linux/cgroup.h), and 0 in a link whose
	// cgroup has gone.
	var folder unix.Stat_t
	if err := unix.Stat(cgroup, &folder); err != nil {
		return nil, errors.Join(fmt.Errorf("look at the cgroup %s: %w", cgroup, err), l.Close())
	}
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil || info.Cgroup().CgroupId != folder.Ino {
		return nil, DropLink(l)
	}
	if err := l.Update(p); err != nil {
		return nil, errors.Join(fmt.Errorf("replace the program of the link pinned at %s: %w", path, err), l.Close())
	}
	return l, nil
}
