package decoy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/fanotify"
)

// Options select the decoys that are watched.
type Options struct {
	Folders []Folder
	State   string   // folder in which stopped trees are noted
	Trust   []string // programs that may do anything, besides those of the policy: shunt itself
}

// Watch watches decoys.
//
//	an open of a decoy ──► perm, the opener waits ──► judge, after all earlier events ──► SIGSTOP, answer
//	writes, renames, deletions, new files ──────────► note ──► judge
//
// Both groups of fanotify watch inodes, so nothing else on the machine becomes slower, and no other name or mount bypasses them.
type Watch struct {
	options    Options
	perm, note *fanotify.Group
	wake       int // eventfd: there is something to look at
	spared     map[int]bool
	folders    map[fanotify.Handle]*folder
	files      map[fanotify.Handle]*bait
	inodes     map[inode]*bait
	held       []opened // permission events that wait for their answer
	unwatched  []string
	judge
	tell  func(detect.Found) error
	asked func(tid int) // set by tests: an open is about to be judged

	mutex  sync.Mutex // guards the fields that follow
	status Status
}

type inode struct{ device, number uint64 }

type folder struct {
	Folder
	trust map[inode]bool
	baits map[string]*bait // by name
}

// bait is a watched decoy.
type bait struct {
	Decoy
	folder *folder
	state  string
	reads  []read
}

// opened is an open that waits for its answer.
type opened struct {
	file  inode
	event fanotify.Event
	tid   int
	pid   int
}

// NewWatch begins to watch folders. Folders that cannot be watched are left out, and listed in Unwatched. The error
// names the feature that the kernel lacks.
func NewWatch(o Options) (w *Watch, err error) {
	w = &Watch{options: o, wake: -1, spared: spared(), folders: map[fanotify.Handle]*folder{}, files: map[fanotify.Handle]*bait{}, inodes: map[inode]*bait{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	if w.perm, err = fanotify.Hold(); err != nil {
		return w, fmt.Errorf("watch decoys: %w", err)
	}
	if w.note, err = fanotify.Names(0); err != nil {
		return w, fmt.Errorf("watch decoys: %w", err)
	}
	if w.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return w, fmt.Errorf("watch decoys: %w", err)
	}
	own := trusted(o.Trust)
	for _, p := range o.Folders {
		f := &folder{Folder: p, trust: trusted(p.Part.Trust), baits: map[string]*bait{}}
		for i := range own {
			f.trust[i] = true
		}
		handle, err := fanotify.HandleOf(p.Path)
		if err == nil {
			err = w.note.Mark(unix.FAN_MARK_ADD|unix.FAN_MARK_ONLYDIR, unix.FAN_CREATE|unix.FAN_RENAME|unix.FAN_DELETE, p.Path)
		}
		if errors.Is(err, unix.EINVAL) {
			return w, fmt.Errorf("watch decoys: the kernel knows no FAN_RENAME: %w. It needs Linux 5.17", err)
		}
		if err != nil {
			w.unwatched = append(w.unwatched, fmt.Sprintf("%s: its file system cannot be watched: %v", p.Path, err))
			continue
		}
		w.folders[handle] = f
	}
	return w, nil
}

// trusted returns the executables that exist.
func trusted(programs []string) map[inode]bool {
	all := map[inode]bool{}
	for _, path := range programs {
		var s unix.Stat_t
		if unix.Stat(path, &s) == nil {
			all[inode{s.Dev, s.Ino}] = true
		}
	}
	return all
}

// Folders returns the folders that are watched.
func (w *Watch) Folders() (all []string) {
	for _, p := range w.options.Folders {
		for _, f := range w.folders {
			if f.Path == p.Path {
				all = append(all, p.Path)
			}
		}
	}
	return all
}

// Unwatched returns folders that cannot be watched, each with the reason.
func (w *Watch) Unwatched() []string { return w.unwatched }

// Mark makes opens of these decoys wait, if their folders are watched. Run has to follow at once: it gives the answers.
func (w *Watch) Mark(all []Decoy) {
	byPath := map[string]*folder{}
	for _, f := range w.folders {
		byPath[f.Path] = f
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	for _, d := range all {
		f := byPath[filepath.Dir(d.Path)]
		if f == nil {
			continue
		}
		b := &bait{Decoy: d, folder: f}
		f.baits[filepath.Base(d.Path)] = b
		b.state, _ = d.state() // read before an open has to be answered
		w.mark(b)
	}
}

// mark watches the file that has a decoy's path.
func (w *Watch) mark(b *bait) {
	var s unix.Stat_t
	handle, err := fanotify.HandleOf(b.Path)
	if err == nil {
		err = unix.Lstat(b.Path, &s)
	}
	if err != nil || s.Mode&unix.S_IFMT != unix.S_IFREG {
		return
	}
	w.files[handle], w.inodes[inode{s.Dev, s.Ino}] = b, b
	err = errors.Join(
		w.note.Mark(unix.FAN_MARK_ADD, unix.FAN_MODIFY|unix.FAN_CLOSE_WRITE, b.Path),
		w.perm.Mark(unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM, b.Path))
	if err != nil {
		b.state = Unknown
		w.unwatched = append(w.unwatched, fmt.Sprintf("%s: it cannot be watched: %v", b.Path, err))
	}
}

// priority is the priority of the thread that judges (nice(2)).
const priority = -15

// Run judges until ctx ends, and passes on its findings. It can be called once.
func (w *Watch) Run(ctx context.Context, tell func(detect.Found) error) error {
	w.tell = tell
	// Threads of a program that do not wait at a decoy go on until it is stopped: the sooner the better. If the priority is refused, that is
	// later. The thread is never unlocked, so it ends with its priority.
	runtime.LockOSThread()
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), priority)
	defer context.AfterFunc(ctx, w.poke)()
	for {
		if err := w.look(); err != nil {
			return err
		}
		if ctx.Err() != nil { // checked after look, which may have consumed the wake-up
			return nil
		}
		if err := w.wait(w.perm, w.note); err != nil {
			return err
		}
	}
}

// wait returns when one of the groups has an event, or after a wake-up.
func (w *Watch) wait(groups ...*fanotify.Group) error {
	polled := []unix.PollFd{{Fd: int32(w.wake), Events: unix.POLLIN}}
	for _, g := range groups {
		polled = append(polled, unix.PollFd{Fd: g.FD(), Events: unix.POLLIN})
	}
	if _, err := unix.Poll(polled, -1); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("watch decoys: %w", err)
	}
	var pokes [8]byte
	_, _ = unix.Read(w.wake, pokes[:]) // there may be none
	return nil
}

func (w *Watch) poke() {
	one := [8]byte{1}
	_, _ = unix.Write(w.wake, one[:]) // it fails only if the counter is set already
}

// look judges the present events: acts of a thread before it opened a decoy are in note when its open is in perm.
func (w *Watch) look() error {
	for {
		if err := w.readHeld(); err != nil {
			return err
		}
		if err := w.readNotes(); err != nil {
			return err
		}
		if len(w.held) == 0 {
			return nil
		}
		one := w.held[0]
		w.held = w.held[1:]
		if w.asked != nil {
			w.asked(one.tid)
		}
		deny, err := w.open(one)
		if _, answered := w.perm.Answer(one.event, deny); err == nil {
			err = answered
		}
		if err != nil {
			return err
		}
	}
}

// readHeld reads permission events. It answers opens by this process at once.
func (w *Watch) readHeld() error {
	return w.perm.Read(func(e fanotify.Event) error {
		if e.FD < 0 {
			return nil
		}
		o := opened{event: e, tid: e.PID, pid: fanotify.ProcessOf(e.PID)}
		var s unix.Stat_t
		err := unix.Fstat(int(e.FD), &s)
		o.file = inode{s.Dev, s.Ino}
		if o.pid == os.Getpid() || err != nil {
			_, err := w.perm.Answer(e, false)
			return err
		}
		w.held = append(w.held, o)
		return nil
	})
}

// note is an event of the second group.
type note struct {
	mask           uint64
	pid            int
	file           *bait   // of FAN_MODIFY and FAN_CLOSE_WRITE
	from, to       *folder // nil: the folder is not watched
	fromName, name string
}

func (w *Watch) readNotes() error {
	return w.note.Read(func(e fanotify.Event) error {
		w.count(e.Mask&unix.FAN_Q_OVERFLOW != 0)
		if e.PID == os.Getpid() {
			return nil
		}
		return w.noted(w.parse(e))
	})
}

func (w *Watch) parse(e fanotify.Event) note {
	n := note{mask: e.Mask, pid: e.PID}
	e.Records(func(kind fanotify.Kind, handle fanotify.Handle, name string) {
		switch kind {
		case fanotify.File:
			n.file = w.files[handle]
		case fanotify.Name, fanotify.New:
			n.to, n.name = w.folders[handle], name
		case fanotify.Old:
			n.from, n.fromName = w.folders[handle], name
		}
	})
	return n
}

// Close closes everything; waiting opens go on.
func (w *Watch) Close() (err error) {
	for _, g := range []**fanotify.Group{&w.perm, &w.note} {
		if *g != nil {
			err = errors.Join(err, (*g).Close())
		}
		*g = nil
	}
	if w.wake >= 0 {
		err = errors.Join(err, unix.Close(w.wake))
	}
	w.wake = -1
	return err
}
