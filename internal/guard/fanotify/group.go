package fanotify

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Group is a queue of events of the files that are marked in it.
type Group struct{ fd int }

const common = unix.FAN_CLOEXEC | unix.FAN_NONBLOCK | unix.FAN_UNLIMITED_MARKS

// Hold makes a group for permission events: a thread that opens a marked file waits for the answer. Each event has the
// thread's number, not a pidfd: the kernel gives one of the two (EINVAL for both), and the thread's call is needed. A
// number is as good here, because the thread cannot go on, and so cannot end, before the answer; if it is killed, the
// answer goes to nobody. The queue is bounded by the number of threads of the machine.
func Hold() (*Group, error) {
	fd, err := unix.FanotifyInit(common|unix.FAN_CLASS_CONTENT|unix.FAN_REPORT_TID|unix.FAN_UNLIMITED_QUEUE, unix.O_RDONLY|unix.O_LARGEFILE)
	if err != nil {
		return nil, fmt.Errorf("the kernel refuses permission events of fanotify: %w. It needs CONFIG_FANOTIFY_ACCESS_PERMISSIONS and CAP_SYS_ADMIN", err)
	}
	return &Group{fd}, nil
}

// Names makes a group for events in the past, with the names of files and the handles of their folders. The flags are
// added to the group's own.
func Names(flags uint) (*Group, error) {
	fd, err := unix.FanotifyInit(common|unix.FAN_CLASS_NOTIF|unix.FAN_REPORT_DFID_NAME|unix.FAN_REPORT_FID|flags, 0)
	if err != nil {
		return nil, fmt.Errorf("the kernel refuses fanotify with names: %w. It needs Linux 5.17", err)
	}
	return &Group{fd}, nil
}

// FD is the group's descriptor, for poll(2).
func (g *Group) FD() int32 { return int32(g.fd) }

// Mark adds a mark to the object at a path, or removes it; flags are FAN_MARK_ADD or FAN_MARK_REMOVE, with others. A
// last symbolic link is not followed.
func (g *Group) Mark(flags uint, mask uint64, path string) error {
	return unix.FanotifyMark(g.fd, flags|unix.FAN_MARK_DONT_FOLLOW, mask, unix.AT_FDCWD, path)
}

// Close ends the group. Opens that wait go on.
func (g *Group) Close() error { return unix.Close(g.fd) }

// Event is one event. Its reader closes FD, if that is not negative: Answer does.
type Event struct {
	Mask uint64
	FD   int32 // of the file, of groups that hold; it also names the event in the answer
	PID  int   // the process; of groups that hold, the thread
	info []byte
}

const bufferBytes = 1 << 16

// Read hands on the group's events, until there are none.
func (g *Group) Read(each func(Event) error) error {
	buffer := make([]byte, bufferBytes)
	for {
		n, err := unix.Read(g.fd, buffer)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("read events of files: %w", err)
		}
		for left := buffer[:n]; len(left) >= unix.FAN_EVENT_METADATA_LEN; {
			m := (*unix.FanotifyEventMetadata)(unsafe.Pointer(&left[0]))
			if m.Vers != unix.FANOTIFY_METADATA_VERSION || int(m.Event_len) > len(left) || m.Event_len < unix.FAN_EVENT_METADATA_LEN || uint32(m.Metadata_len) > m.Event_len {
				return fmt.Errorf("read events of files: the kernel's events have the version %d, and shunt knows %d", m.Vers, unix.FANOTIFY_METADATA_VERSION)
			}
			if err := each(Event{m.Mask, m.Fd, int(m.Pid), left[m.Metadata_len:m.Event_len]}); err != nil {
				return err
			}
			left = left[m.Event_len:]
		}
	}
}

// Answer lets an open go on, or refuses it with EPERM, and closes the event's descriptor. waited is false if the opener was killed meanwhile.
func (g *Group) Answer(e Event, deny bool) (waited bool, err error) {
	r := unix.FanotifyResponse{Fd: e.FD, Response: unix.FAN_ALLOW}
	if deny {
		r.Response = unix.FAN_DENY
	}
	_, err = unix.Write(g.fd, (*[unsafe.Sizeof(r)]byte)(unsafe.Pointer(&r))[:])
	_ = unix.Close(int(e.FD)) // it was only read
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("answer an open: %w", err)
	}
	return true, nil
}

// Kind is a record's kind.
type Kind uint8

// The kinds of records (fanotify(7)).
const (
	File Kind = 1  // the file's handle
	Name Kind = 2  // the folder's, with the name in it
	Old  Kind = 10 // the same, of the old place of a renamed file
	New  Kind = 12 // of its new place
)

const (
	infoBytes    = 4 // struct fanotify_event_info_header
	fsidBytes    = 8 // __kernel_fsid_t
	handleHeader = 8 // struct file_handle without its handle
)

// Handle names a file or folder: the number of its file system, then struct file_handle.
type Handle string

// Records hands on the records of an event.
func (e Event) Records(each func(kind Kind, handle Handle, name string)) {
	for info := e.info; len(info) > infoBytes; {
		size := int(*(*uint16)(unsafe.Pointer(&info[2])))
		if size <= infoBytes || size > len(info) {
			return
		}
		handle, name := splitRecord(info[infoBytes:size])
		each(Kind(info[0]), handle, name)
		info = info[size:]
	}
}

// splitRecord is a record's handle with the number of the file system, and its name.
func splitRecord(record []byte) (handle Handle, name string) {
	if len(record) < fsidBytes+handleHeader {
		return "", ""
	}
	end := fsidBytes + handleHeader + int(*(*uint32)(unsafe.Pointer(&record[fsidBytes])))
	if end > len(record) || end < fsidBytes+handleHeader {
		return "", ""
	}
	name, _, _ = strings.Cut(string(record[end:]), "\x00")
	return Handle(record[:end]), name
}

// HandleOf is a file's handle, as events have it.
func HandleOf(path string) (Handle, error) {
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
	return Handle(append(key, h.Bytes()...)), nil
}

// FileSystem is the part of a handle that is the same for all files of a file system.
func (h Handle) FileSystem() string {
	return string(h[:min(fsidBytes, len(h))])
}

// Open opens the object of a handle, without reading it (O_PATH), by a descriptor of its file system.
func (h Handle) Open(mount int) (fd int, err error) {
	if len(h) < fsidBytes+handleHeader {
		return -1, unix.ESTALE
	}
	raw := []byte(h)
	kind := *(*int32)(unsafe.Pointer(&raw[fsidBytes+4]))
	return unix.OpenByHandleAt(mount, unix.NewFileHandle(kind, raw[fsidBytes+handleHeader:]), unix.O_PATH|unix.O_CLOEXEC)
}
