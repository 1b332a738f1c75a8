package gate

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/fanotify"
	"github.com/shunt-lb/shunt/internal/guard/judge"
)

// fresh is a new name in a folder, or the end of a file.
type fresh struct {
	folder fanotify.Handle
	name   string

	gone fanotify.Handle // the file that has ended; empty: a new name
	was  judge.Inode     // of the file that has ended
}

// goneMask are the events of a file's end: its last name is gone, and no process has it open.
const goneMask = unix.FAN_DELETE_SELF | unix.FAN_ONDIR

// follow makes the Gate forget a file when it ends. If the file system does not report the end, the Gate remembers the file until the policy is loaded again.
func (g *Gate) follow(at judge.Inode, path string) {
	handle, err := fanotify.HandleOf(path)
	if err == nil {
		err = g.names.Mark(unix.FAN_MARK_ADD, goneMask, path)
	}
	if err != nil {
		return
	}
	if other, is := g.byHandle[handle]; is && other != at {
		return // the path now leads to another file
	}
	if before, is := g.handles[at]; is && before != handle { // the inode number is used again
		delete(g.byHandle, before)
	}
	g.handles[at], g.byHandle[handle] = handle, at
}

// end notes that a file has ended. The caller holds the mutex.
func (g *Gate) end(handle fanotify.Handle) (n fresh, is bool) {
	at, is := g.byHandle[handle]
	if !is {
		return n, false
	}
	delete(g.byHandle, handle)
	if g.handles[at] == handle {
		delete(g.handles, at)
		delete(g.marked, at)
	}
	return fresh{gone: handle, was: at}, true
}

// forget removes a file that has ended from a ruling, unless another file now has its inode number. The caller holds the mutex.
func (g *Gate) forget(r *ruling, n fresh) {
	if _, is := g.handles[n.was]; is {
		return
	}
	delete(r.reading.Files, n.was)
	delete(r.reading.Marks, n.was)
	if programs := *r.programs.Load(); programs[n.was] != (judge.Marks{}) { // other goroutines read the map, without the mutex, for the standing of openers
		programs = maps.Clone(programs)
		delete(programs, n.was)
		r.programs.Store(&programs)
	}
}

// take adds a new name to a ruling, or removes a file that has ended. The caller holds the mutex.
func (g *Gate) take(r *ruling, n fresh) {
	if n.gone != "" {
		g.forget(r, n)
		return
	}
	g.add(r, n)
}

// learn reads the new names that have come and the files that have ended. The caller holds the mutex.
func (g *Gate) learn() error {
	r := g.ruling.Load()
	return g.names.Read(func(e fanotify.Event) error {
		e.Records(func(kind fanotify.Kind, handle fanotify.Handle, name string) {
			isItself := kind == fanotify.File || kind == fanotify.Name && name == "."
			n, is := fresh{folder: handle, name: name}, kind == fanotify.Name && !isItself
			if isItself && e.Mask&unix.FAN_DELETE_SELF != 0 {
				n, is = g.end(handle)
			}
			if !is {
				return
			}
			if g.recording {
				g.recorded = append(g.recorded, n)
			}
			if r != nil {
				g.take(r, n)
			}
		})
		return nil
	})
}

// learnAlways calls learn once a second, so that events do not pile up while no file is opened.
func (g *Gate) learnAlways() {
	defer close(g.learned)
	each := time.NewTicker(pollTime)
	defer each.Stop()
	for {
		select {
		case <-g.ending:
			return
		case <-each.C:
			g.mutex.Lock()
			err := g.learn()
			g.mutex.Unlock()
			g.fail(err)
		}
	}
}

// add puts a new name under the rules of its folder. If the file has moved on meanwhile, a later event has its present name.
func (g *Gate) add(r *ruling, n fresh) {
	mount, is := g.mounts[n.folder.FileSystem()]
	if !is {
		return
	}
	fd, err := n.folder.Open(mount)
	if err != nil {
		return // the folder was deleted
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var folder unix.Stat_t
	if unix.Fstat(fd, &folder) != nil {
		return
	}
	in := r.reading.Files[judge.InodeOf(folder)]
	if r.mask(judge.Marks{Rules: in.Rules}) == 0 {
		return // opens of new files in it do not wait
	}
	begin := fmt.Sprintf("/proc/self/fd/%d", fd)
	err = filepath.WalkDir(filepath.Join(begin, n.name), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		}
		return g.addOne(r, in.Rules, path, in.Name+strings.TrimPrefix(path, begin))
	})
	if err != nil {
		g.counts[countUnread].Add(1)
	}
}

// errFull is the error for a file for which there is no room.
var errFull = errors.New("there are too many files")

// addOne puts a file under rules, if its opens wait; name is the path for reports.
func (g *Gate) addOne(r *ruling, rules uint64, path, name string) error {
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		return nil //nolint:nilerr // it was deleted meanwhile
	}
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR: // before the folder is read
		if err := g.names.Mark(unix.FAN_MARK_ADD|unix.FAN_MARK_ONLYDIR, newNamesMask, path); err != nil {
			return err
		}
	default:
		return nil
	}
	at := judge.InodeOf(stat)
	if _, is := r.reading.Files[at]; !is && len(r.reading.Files) >= g.options.ObjectsMax {
		return errFull
	}
	object, wasObject := r.reading.Files[at]
	had, wasMarked := r.reading.Marks[at]
	r.reading.Files[at] = judge.File{Name: name, Rules: object.Rules | rules}
	r.reading.Marks[at] = had.And(judge.Marks{Rules: rules})
	is, err := g.mark(r, at, path)
	switch {
	case err != nil:
		return err
	case is:
		g.marked[at] = name
		return nil
	}
	// This name is gone, or leads to another file, which has an event of its own.
	if delete(r.reading.Files, at); wasObject {
		r.reading.Files[at] = object
	}
	if delete(r.reading.Marks, at); wasMarked {
		r.reading.Marks[at] = had
	}
	return nil
}
