package demo

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// slowFile is a file that holds each write back for a time and forgets it: a file system in user space (FUSE) that has
// only a root, which is a file. The protocol is that of the kernel's linux/fuse.h.
//
// A separate process serves it, which has neither the file nor the disk open: a process that is killed closes its
// files one by one, and would wait for itself without end.
type slowFile struct {
	device int // /dev/fuse
	size   uint64
	delay  time.Duration
}

// The requests of enum fuse_opcode that a file without a name has to answer, and the sizes of the messages in bytes.
const (
	fuseForget, fuseGetattr, fuseOpen, fuseRead, fuseWrite, fuseStatfs, fuseRelease = 2, 3, 14, 15, 16, 17, 18
	fuseFsync, fuseFlush, fuseInit, fuseInterrupt, fuseDestroy, fuseBatchForget     = 20, 25, 26, 36, 38, 42

	fuseInHeader, fuseOutHeader = 40, 16
	fuseMajor, fuseMinor        = 7, 31
	fuseWriteMax                = 128 << 10
	fuseInitOut, fuseAttrOut    = 64, 104
	fuseStatfsOut               = 80
	fuseIOIn                    = 40 // struct fuse_read_in and fuse_write_in
	blockSize                   = 4096
)

// makeSlowFile makes the file, in a mount namespace that ends with its last user.
func (d *demo) makeSlowFile(ctx context.Context, size uint64, delay time.Duration) (*os.File, error) {
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("make a slow disk: %w; `modprobe fuse` may help", err)
	}
	defer device.Close() //nolint:errcheck // mostly for the second time
	w, err := d.hire(ctx, Order{Name: "demo-disk", Size: size, Delay: delay.Nanoseconds()}, func(c *exec.Cmd) { c.ExtraFiles = []*os.File{device} })
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "shunt-"+d.id+"-")
	if err != nil {
		return nil, fmt.Errorf("make a slow disk: %w", err)
	}
	d.atEnd(func() error { return os.RemoveAll(folder) })
	// Before the mount the kernel has no requests, and returns an error. After it only the serving process has the
	// device: if that process dies, nothing waits for its answers.
	serve := func() error { return errors.Join(device.Close(), w.work()) }
	var file *os.File
	mounted := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends, and with it its namespace
		var err error
		file, err = mountSlowFile(int(device.Fd()), filepath.Join(folder, "disk"), serve)
		mounted <- err
	}()
	if err := <-mounted; err != nil {
		return nil, fmt.Errorf("make a slow disk: %w", err)
	}
	d.atEnd(file.Close)
	return file, nil
}

// mountSlowFile mounts the file, starts to serve it, and opens it.
func mountSlowFile(device int, path string, serve func() error) (*os.File, error) {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return nil, err
	}
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("keep mounts from other namespaces: %w", err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=100000,user_id=0,group_id=0", device)
	if err := unix.Mount("shunt", path, "fuse", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return nil, fmt.Errorf("mount a file system in user space (fuse): %w", err)
	}
	if err := serve(); err != nil {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the slow file: %w", err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// serve answers one request after the other, until the file system is unmounted.
func (f slowFile) serve() error {
	request := make([]byte, fuseInHeader+fuseWriteMax+4096)
	for {
		n, err := unix.Read(f.device, request)
		switch {
		case errors.Is(err, unix.ENODEV), errors.Is(err, unix.ECONNABORTED):
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOENT): // a request that was withdrawn
			continue
		case err != nil:
			return fmt.Errorf("read a request of the kernel: %w", err)
		case n < fuseInHeader:
			return fmt.Errorf("read a request of the kernel: it has %d bytes", n)
		}
		body, errno, silent := f.answer(binary.NativeEndian.Uint32(request[4:]), request[fuseInHeader:n])
		if silent {
			continue
		}
		answer := binary.NativeEndian.AppendUint32(nil, uint32(fuseOutHeader+len(body)))
		answer = binary.NativeEndian.AppendUint32(answer, uint32(-int32(errno)))
		answer = append(append(answer, request[8:16]...), body...)
		if _, err := unix.Write(f.device, answer); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("answer the kernel: %w", err)
		}
	}
}

// answer returns the answer's body, or its error; silent: the kernel waits for none.
func (f slowFile) answer(opcode uint32, body []byte) (out []byte, errno unix.Errno, silent bool) {
	e := binary.NativeEndian
	if (opcode == fuseRead || opcode == fuseWrite) && len(body) < fuseIOIn {
		return nil, unix.EINVAL, false
	}
	switch opcode {
	case fuseForget, fuseBatchForget, fuseInterrupt:
		return nil, 0, true
	case fuseInit: // struct fuse_init_out
		out = make([]byte, fuseInitOut)
		e.PutUint32(out, fuseMajor)
		e.PutUint32(out[4:], fuseMinor)
		e.PutUint32(out[20:], fuseWriteMax)
	case fuseGetattr: // struct fuse_attr_out
		out = make([]byte, fuseAttrOut)
		e.PutUint64(out, 60) // seconds for which the kernel may remember it
		e.PutUint64(out[16:], 1)
		e.PutUint64(out[24:], f.size)
		e.PutUint64(out[32:], f.size/512)
		e.PutUint32(out[76:], unix.S_IFREG|0o600)
		e.PutUint32(out[80:], 1)
		e.PutUint32(out[96:], blockSize)
	case fuseOpen:
		out = make([]byte, 16)
	case fuseRead: // of struct fuse_read_in, the size is at 16
		out = make([]byte, min(e.Uint32(body[16:]), fuseWriteMax))
	case fuseWrite: // of struct fuse_write_in, too
		time.Sleep(f.delay)
		out = e.AppendUint32(nil, e.Uint32(body[16:]))
		out = append(out, 0, 0, 0, 0)
	case fuseStatfs:
		out = make([]byte, fuseStatfsOut)
	case fuseRelease, fuseFsync, fuseFlush, fuseDestroy:
	default:
		return nil, unix.ENOSYS, false
	}
	return out, 0, false
}
