package vdisk

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/io"
	"github.com/shunt-lb/shunt/internal/event"
)

// guestRecorder belongs to a recorder inside the virtual machine: it learns the names of files and tasks.
type guestRecorder struct {
	names *io.Names
	tasks map[uint32]Task // by thread; nil: a host's recorder
}

// tasksMax limits the tasks of a recording.
const tasksMax = 1 << 16

// beginGuest prepares the recorder to record the machine that it runs in.
func (r *recorder) beginGuest() error {
	if r.o.sensors == nil {
		r.o.sensors = guestSensors()
	}
	r.head.Kind = KindGuest
	r.guest = guestRecorder{io.NewNames(), map[uint32]Task{}}
	name, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("ask for this machine's name: %w", err)
	}
	r.head.Comm = name
	return nil
}

// meet learns the name of a bio's task while the task exists.
func (g *guestRecorder) meet(e event.Event) {
	if g.tasks == nil || vdiskVdiskKind(e.Payload[kindAt]) != vdiskVdiskKindVDISK_BIO || len(g.tasks) >= tasksMax {
		return
	}
	if _, is := g.tasks[e.Tid]; is {
		return
	}
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/comm", e.Tgid, e.Tid))
	if err != nil {
		name = nil // the task has ended
	}
	g.tasks[e.Tid] = Task{int(e.Tgid), strings.TrimSuffix(string(name), "\n")}
}

// fileKey identifies a file of the guest.
type fileKey struct {
	inode              uint64
	device, generation uint32
}

func keyOf(e *vdiskVdiskEvent) fileKey { return fileKey{e.Inode, e.FileDevice, uint32(e.Result)} }

// files returns the files of the bios, with their present places in the file system.
func (g *guestRecorder) files(events []Event) (files []File, notes []string) {
	files, notes = []File{}, []string{}
	seen := map[fileKey]bool{}
	unnamed, unplaced := 0, 0
	var last error
	for i := range events {
		e := &events[i]
		at := keyOf(&e.vdiskVdiskEvent)
		if vdiskVdiskKind(e.Kind) != vdiskVdiskKindVDISK_BIO || e.Inode == 0 || seen[at] {
			continue
		}
		seen[at] = true
		f := File{Path: g.names.Path(at.inode, at.device, at.generation), Device: at.device, Inode: at.inode, Generation: at.generation, Descriptors: []int{}}
		if !strings.HasPrefix(f.Path, "/") {
			unnamed++
		} else if err := f.find(); err != nil {
			unplaced, last = unplaced+1, err
		}
		files = append(files, f)
	}
	if unnamed > 0 {
		notes = append(notes, fmt.Sprintf("%d files have no name here", unnamed))
	}
	if unplaced > 0 {
		notes = append(notes, fmt.Sprintf("for %d files their position on the disk is unknown, the last error: %v", unplaced, last))
	}
	return files, notes
}

// find asks the file system where the file is, if it is still the same file.
func (f *File) find() error {
	var stat unix.Stat_t
	if err := unix.Lstat(f.Path, &stat); err != nil {
		return fmt.Errorf("look for %s: %w", f.Path, err)
	}
	if stat.Ino != f.Inode || stat.Mode&unix.S_IFMT != unix.S_IFREG && stat.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("%s is another file now", f.Path)
	}
	f.Size = uint64(stat.Size)
	var err error
	f.Extents, err = readExtents(f.Path)
	return err
}
