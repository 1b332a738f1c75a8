package decoy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
)

// Options say which decoys to watch.
type Options struct {
	Places []Place
	State  string   // folder in which stopped trees are noted
	Trust  []string // programs that may do anything, besides those of the policy: shunt itself
}

// Watch watches decoys.
//
//	an open of a decoy ──► perm, the opener waits ──► judge, after all earlier events ──► SIGSTOP, answer
//	writes, renames, deletions, new files ──────────► note ──► judge
//
// Both groups of fanotify watch inodes, so nothing else on the machine becomes slower, and no other name or mount bypasses them.
type Watch struct {
	options    Options
	perm, note int // groups of fanotify
	wake       int // eventfd: there is something to look at
	spared     map[int]bool
	folders    map[string]*folder // by handle
	files      map[string]*bait   // by handle
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
	Place
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
	file inode
	fd   int32 // names the open in the answer
	tid  int
	pid  int
}

// Handle types and record types of fanotify(7).
const (
	recordFile   = 1
	recordName   = 2
	recordOld    = 10
	recordNew    = 12
	infoBytes    = 4 // struct fanotify_event_info_header
	fsidBytes    = 8 // __kernel_fsid_t
	handleHeader = 8 // struct file_handle without its handle
	bufferBytes  = 1 << 16
)

// NewWatch begins to watch the places' folders. Folders that cannot be watched are left out, and listed in Unwatched. The error says which
// feature the kernel lacks.
func NewWatch(o Options) (w *Watch, err error) {
	w = &Watch{options: o, perm: -1, note: -1, wake: -1, spared: spared(), folders: map[string]*folder{}, files: map[string]*bait{}, inodes: map[inode]*bait{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	const common = unix.FAN_CLOEXEC | unix.FAN_NONBLOCK | unix.FAN_UNLIMITED_MARKS
	// The number of threads of the machine limits its queue, because each waits for its answer.
	if w.perm, err = unix.FanotifyInit(common|unix.FAN_CLASS_CONTENT|unix.FAN_REPORT_TID|unix.FAN_UNLIMITED_QUEUE, unix.O_RDONLY|unix.O_LARGEFILE); err != nil {
		return w, fmt.Errorf("watch decoys: the kernel refuses permission events of fanotify: %w. It needs CONFIG_FANOTIFY_ACCESS_PERMISSIONS and CAP_SYS_ADMIN", err)
	}
	if w.note, err = unix.FanotifyInit(common|unix.FAN_CLASS_NOTIF|unix.FAN_REPORT_DFID_NAME|unix.FAN_REPORT_FID, 0); err != nil {
		return w, fmt.Errorf("watch decoys: the kernel refuses fanotify with names: %w. It needs Linux 5.17", err)
	}
	if w.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return w, fmt.Errorf("watch decoys: %w", err)
	}
	own := trusted(o.Trust)
	for _, p := range o.Places {
		f := &folder{Place: p, trust: trusted(p.Part.Trust), baits: map[string]*bait{}}
		for i := range own {
			f.trust[i] = true
		}
		handle, err := handleOf(p.Folder)
		if err == nil {
			err = unix.FanotifyMark(w.note, unix.FAN_MARK_ADD|unix.FAN_MARK_ONLYDIR|unix.FAN_MARK_DONT_FOLLOW, unix.FAN_CREATE|unix.FAN_RENAME|unix.FAN_DELETE, unix.AT_FDCWD, p.Folder)
		}
		if errors.Is(err, unix.EINVAL) {
			return w, fmt.Errorf("watch decoys: the kernel knows no FAN_RENAME: %w. It needs Linux 5.17", err)
		}
		if err != nil {
			w.unwatched = append(w.unwatched, fmt.Sprintf("%s: its file system cannot be watched: %v", p.Folder, err))
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

// handleOf returns a file's handle with its file system's number, as events have it.
func handleOf(path string) (string, error) {
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, path, 0)
	if err != nil {
		return "", err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return "", err
	}
	key := make([]byte, 0, fsidBytes+handleHeader+h.Size())
	for _, n := range []uint32{uint32(fs.Fsid.Val[0]), uint32(fs.Fsid.Val[1]), uint32(h.Size()), uint32(h.Type())} {
		key = append(key, (*[4]byte)(unsafe.Pointer(&n))[:]...)
	}
	return string(append(key, h.Bytes()...)), nil
}

// Folders returns the folders that are watched.
func (w *Watch) Folders() (all []string) {
	for _, p := range w.options.Places {
		for _, f := range w.folders {
			if f.Folder == p.Folder {
				all = append(all, p.Folder)
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
		byPath[f.Folder] = f
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

// mark watches the file that is in a decoy's place.
func (w *Watch) mark(b *bait) {
	var s unix.Stat_t
	handle, err := handleOf(b.Path)
	if err == nil {
		err = unix.Lstat(b.Path, &s)
	}
	if err != nil || s.Mode&unix.S_IFMT != unix.S_IFREG {
		return
	}
	w.files[handle], w.inodes[inode{s.Dev, s.Ino}] = b, b
	err = errors.Join(
		unix.FanotifyMark(w.note, unix.FAN_MARK_ADD|unix.FAN_MARK_DONT_FOLLOW, unix.FAN_MODIFY|unix.FAN_CLOSE_WRITE, unix.AT_FDCWD, b.Path),
		unix.FanotifyMark(w.perm, unix.FAN_MARK_ADD|unix.FAN_MARK_DONT_FOLLOW, unix.FAN_OPEN_PERM, unix.AT_FDCWD, b.Path))
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
func (w *Watch) wait(groups ...int) error {
	polled := []unix.PollFd{{Fd: int32(w.wake), Events: unix.POLLIN}}
	for _, fd := range groups {
		polled = append(polled, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	if _, err := unix.Poll(polled, -1); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("wait at decoys: %w", err)
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
		if answered := w.answer(one.fd, deny); err == nil {
			err = answered
		}
		if err != nil {
			return err
		}
	}
}

// readHeld reads permission events. It answers opens by this process at once.
func (w *Watch) readHeld() error {
	return w.read(w.perm, func(m *unix.FanotifyEventMetadata, _ []byte) error {
		if m.Fd < 0 {
			return nil
		}
		o := opened{fd: m.Fd, tid: int(m.Pid)}
		o.pid = processOf(o.tid)
		var s unix.Stat_t
		err := unix.Fstat(int(m.Fd), &s)
		o.file = inode{s.Dev, s.Ino}
		if o.pid == os.Getpid() || err != nil {
			return w.answer(m.Fd, false)
		}
		w.held = append(w.held, o)
		return nil
	})
}

// answer allows an open, or refuses it.
func (w *Watch) answer(fd int32, deny bool) error {
	r := unix.FanotifyResponse{Fd: fd, Response: unix.FAN_ALLOW}
	if deny {
		r.Response = unix.FAN_DENY
	}
	_, err := unix.Write(w.perm, (*[unsafe.Sizeof(r)]byte)(unsafe.Pointer(&r))[:])
	_ = unix.Close(int(fd))                         // it was only read
	if err != nil && !errors.Is(err, unix.ENOENT) { // the opener was killed
		return fmt.Errorf("answer an open of a decoy: %w", err)
	}
	return nil
}

// read passes on the events of a group until there are none.
func (w *Watch) read(group int, each func(m *unix.FanotifyEventMetadata, info []byte) error) error {
	buffer := make([]byte, bufferBytes)
	for {
		n, err := unix.Read(group, buffer)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("read what happens to decoys: %w", err)
		}
		for left := buffer[:n]; len(left) >= unix.FAN_EVENT_METADATA_LEN; {
			m := (*unix.FanotifyEventMetadata)(unsafe.Pointer(&left[0]))
			if m.Vers != unix.FANOTIFY_METADATA_VERSION || int(m.Event_len) > len(left) || m.Event_len < unix.FAN_EVENT_METADATA_LEN {
				return fmt.Errorf("read what happens to decoys: the kernel's events have the version %d, and shunt knows %d", m.Vers, unix.FANOTIFY_METADATA_VERSION)
			}
			if err := each(m, left[m.Metadata_len:m.Event_len]); err != nil {
				return err
			}
			left = left[m.Event_len:]
		}
	}
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
	return w.read(w.note, func(m *unix.FanotifyEventMetadata, info []byte) error {
		w.count(m.Mask&unix.FAN_Q_OVERFLOW != 0)
		if int(m.Pid) == os.Getpid() {
			return nil
		}
		return w.noted(w.parse(m, info))
	})
}

func (w *Watch) parse(m *unix.FanotifyEventMetadata, info []byte) note {
	n := note{mask: m.Mask, pid: int(m.Pid)}
	for len(info) > infoBytes {
		size := int(*(*uint16)(unsafe.Pointer(&info[2])))
		if size <= infoBytes || size > len(info) {
			break
		}
		handle, name := splitRecord(info[infoBytes:size])
		switch info[0] {
		case recordFile:
			n.file = w.files[handle]
		case recordName, recordNew:
			n.to, n.name = w.folders[handle], name
		case recordOld:
			n.from, n.fromName = w.folders[handle], name
		}
		info = info[size:]
	}
	return n
}

// splitRecord returns a record's handle with the number of the file system, and its name.
func splitRecord(record []byte) (handle, name string) {
	if len(record) < fsidBytes+handleHeader {
		return "", ""
	}
	end := fsidBytes + handleHeader + int(*(*uint32)(unsafe.Pointer(&record[fsidBytes])))
	if end > len(record) {
		return "", ""
	}
	name, _, _ = strings.Cut(string(record[end:]), "\x00")
	return string(record[:end]), name
}

// Close closes everything; waiting opens go on.
func (w *Watch) Close() (err error) {
	for _, fd := range []*int{&w.perm, &w.note, &w.wake} {
		if *fd >= 0 {
			err = errors.Join(err, unix.Close(*fd))
		}
		*fd = -1
	}
	return err
}

// processOf returns the process of a thread; 0: it has ended.
func processOf(tid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(text), "\nTgid:")
	line, _, _ := strings.Cut(after, "\n")
	pid, _ := strconv.Atoi(strings.TrimSpace(line))
	return pid
}

// Numbers of system calls that golang.org/x/sys has only for one of the architectures.
const (
	amd64Open  = 2
	amd64Creat = 85
)

// sleepMax limits the wait until a thread sleeps whose open is in the queue already.
const sleepMax = 20 * time.Millisecond

// isWrite reports whether a thread that waits in an open asks to write, or to truncate. An open whose flags cannot be read (io_uring, 32-bit
// programs) counts as reading: its writes are seen when they happen.
func isWrite(tid, pid int) bool {
	var words []string
	for until := time.Now().Add(sleepMax); ; {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", tid))
		if err != nil {
			return false
		}
		if words = strings.Fields(string(text)); len(words) > 4 || time.Now().After(until) {
			break
		}
		runtime.Gosched() // "running": it does not sleep yet
	}
	if len(words) < 5 {
		return false
	}
	number, err := strconv.ParseInt(words[0], 10, 64)
	if err != nil {
		return false
	}
	argument := func(i int) uint64 {
		n, _ := strconv.ParseUint(strings.TrimPrefix(words[1+i], "0x"), 16, 64)
		return n
	}
	var flags uint64
	switch {
	case number == unix.SYS_OPENAT:
		flags = argument(2)
	case number == unix.SYS_OPENAT2: // struct open_how begins with the flags
		var raw [8]byte
		memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
		if err != nil {
			return false
		}
		_, err = io.ReadFull(io.NewSectionReader(memory, int64(argument(2)), int64(len(raw))), raw[:])
		if closed := memory.Close(); err != nil || closed != nil {
			return false
		}
		flags = *(*uint64)(unsafe.Pointer(&raw[0]))
	case runtime.GOARCH == "amd64" && number == amd64Open:
		flags = argument(1)
	case runtime.GOARCH == "amd64" && number == amd64Creat:
		return true
	}
	return flags&(unix.O_WRONLY|unix.O_RDWR|unix.O_TRUNC) != 0
}
