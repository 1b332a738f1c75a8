package trial

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/test/uring"
)

// work is the place where an operation of the matrix is tried: a copy of this test's binary tries it there.
//
//	DIR/prot/f, g, sub/h   protected, or not in the control
//	DIR/out/               beside it, not protected, with l, which is a hard link to prot/f
type work struct {
	dir string
	fd  int    // from before the policy
	mem []byte // likewise
}

func (w *work) prot(name string) string { return filepath.Join(w.dir, "prot", name) }

func (w *work) out(name string) string { return filepath.Join(w.dir, "out", name) }

// changed is the text that an attempt writes.
const changed = "CHANGED!"

// OpenWrite writes to a path as editors do.
func OpenWrite(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	if flags&unix.O_ACCMODE != unix.O_RDONLY {
		_, err = unix.Write(fd, []byte(changed))
	}
	return errors.Join(err, unix.Close(fd))
}

// before opens the file as a program does that is there before the policy.
func (w *work) before(flags int) (err error) {
	w.fd, err = unix.Open(w.prot("f"), flags|unix.O_CLOEXEC, 0)
	return err
}

func (w *work) mapBefore(prot int) (err error) {
	if err = w.before(unix.O_RDWR); err == nil {
		w.mem, err = unix.Mmap(w.fd, 0, 4096, prot, unix.MAP_SHARED)
	}
	return err
}

func (w *work) store() error {
	copy(w.mem, changed)
	return unix.Msync(w.mem, unix.MS_SYNC)
}

// mapHole maps a file whose second page is a hole, to read it alone, by a descriptor that may write.
func mapHole(w *work) error {
	size := 2 * unix.Getpagesize()
	if err := errors.Join(w.before(unix.O_RDWR), unix.Ftruncate(w.fd, int64(size))); err != nil {
		return err
	}
	var err error
	w.mem, err = unix.Mmap(w.fd, 0, size, unix.PROT_READ, unix.MAP_SHARED)
	return err
}

// fillHole has the kernel fill the hole with a page (ioctl_userfaultfd(2); the numbers are those of
// linux/userfaultfd.h).
func fillHole(w *work) error {
	const (
		ioAPI, ioRegister, ioCopy = 0xc018aa3f, 0xc020aa00, 0xc028aa03
		api, modeMissing          = 0xaa, 1
	)
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if errno != 0 {
		return errno
	}
	page := make([]byte, unix.Getpagesize())
	copy(page, changed)
	begin, size := uint64(uintptr(unsafe.Pointer(&w.mem[len(page)]))), uint64(len(page))
	for _, call := range []struct {
		number uintptr
		data   [5]uint64
	}{
		{ioAPI, [5]uint64{api}},
		{ioRegister, [5]uint64{begin, size, modeMissing}},
		{ioCopy, [5]uint64{begin, uint64(uintptr(unsafe.Pointer(&page[0]))), size}},
	} {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, call.number, uintptr(unsafe.Pointer(&call.data))); errno != 0 {
			return fmt.Errorf("ioctl %#x: %w", call.number, errno)
		}
	}
	runtime.KeepAlive(page)
	return unix.Close(int(fd))
}

// pipe is a pipe with something to write in it.
func pipe() (read int, err error) {
	var ends [2]int
	if err := unix.Pipe(ends[:]); err != nil {
		return 0, err
	}
	_, err = unix.Write(ends[1], []byte(changed))
	return ends[0], err
}

// elsewhere makes a mount namespace of this thread's own, which ends with it.
func elsewhere() error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
}

func (w *work) bind(from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	return unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, "")
}

// target is the process that an operation is about.
func (w *work) target() (int, error) {
	text, err := os.ReadFile(w.out("pid"))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(text))
}

func traceAttach(w *work) error {
	pid, err := w.target()
	if err != nil {
		return err
	}
	return traceOne(pid)
}

func traceOne(pid int) error {
	runtime.LockOSThread()
	if err := unix.PtraceAttach(pid); err != nil {
		return err
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(pid, &status, unix.WALL, nil); err != nil {
		return err
	}
	return unix.PtraceDetach(pid)
}

func memoryFile(w *work) error {
	pid, err := w.target()
	if err != nil {
		return err
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/mem", pid), unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// vmWrite writes to the target's memory the bytes that are there already, at an address that both programs have.
func vmWrite(w *work) error {
	pid, err := w.target()
	if err != nil {
		return err
	}
	var here [1]byte
	local := []unix.Iovec{{Base: &here[0], Len: 1}}
	remote := []unix.RemoteIovec{{Base: stackOf(pid), Len: 1}}
	if _, err := unix.ProcessVMReadv(pid, local, remote, 0); err != nil {
		return err
	}
	_, err = unix.ProcessVMWritev(pid, local, remote, 0)
	return err
}

// stackOf is an address on the stack of a process's first thread (proc_pid_maps(5)).
func stackOf(pid int) uintptr {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "[stack]") {
			begin, _, _ := strings.Cut(line, "-")
			address, _ := strconv.ParseUint(begin, 16, 64)
			return uintptr(address)
		}
	}
	return 0
}

func takeDescriptor(w *work) error {
	pid, err := w.target()
	if err != nil {
		return err
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	_, err = unix.PidfdGetfd(pidfd, 0, 0)
	return err
}

// handleOpen opens a file by the handle of name_to_handle_at(2).
func (w *work) handleOpen(flags int) (int, error) {
	handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, w.prot("f"), 0)
	if err != nil {
		return 0, err
	}
	mount, err := unix.Open(w.dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return 0, err
	}
	return unix.OpenByHandleAt(mount, handle, flags)
}

func handleWrite(w *work) error {
	fd, err := w.handleOpen(unix.O_WRONLY)
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(changed))
	return err
}

// acl is the extended attribute of "owner rw, user 1 rw, group r, mask rw, others r" (acl(5), as the kernel
// has it in linux/posix_acl_xattr.h).
func acl() []byte {
	value := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range [][3]uint32{{1, 6, ^uint32(0)}, {2, 6, 1}, {4, 4, ^uint32(0)}, {16, 6, ^uint32(0)}, {32, 4, ^uint32(0)}} {
		value = binary.LittleEndian.AppendUint16(value, uint16(e[0]))
		value = binary.LittleEndian.AppendUint16(value, uint16(e[1]))
		value = binary.LittleEndian.AppendUint32(value, e[2])
	}
	return value
}

// noTimeFlag sets FS_NOATIME_FL, as chattr +A does.
func noTimeFlag(w *work) error {
	fd, err := unix.Open(w.prot("f"), unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, int(flags|0x80))
}

// ringDo has the kernel do one operation by io_uring(7).
func ringDo(setup uint32, operation uint8, fd int32, address unsafe.Pointer, length, flags uint32, offset uint64) error {
	_, err := uring.Do(setup, uring.Entry{Operation: operation, FD: fd, Offset: offset, Address: address, Length: length, Flags: flags})
	return err
}

// ringPath does an operation on a path.
func ringPath(operation uint8, path string, length, flags uint32) error {
	raw := append([]byte(path), 0)
	return ringDo(0, operation, unix.AT_FDCWD, unsafe.Pointer(&raw[0]), length, flags, 0)
}
