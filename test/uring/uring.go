// Package uring makes the kernel do an operation by io_uring(7), for tests: the operation then has no system call of
// its own.
package uring

import (
	"encoding/binary"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Operations of linux/io_uring.h.
const (
	Accept  = 13
	Connect = 16
)

// Polled is IORING_SETUP_SQPOLL: a thread of the kernel takes the operation, and no system call hands it over.
const Polled = 1 << 1

// Entry is an operation. linux/io_uring.h describes its fields.
type Entry struct {
	Operation uint8
	FD        int32
	Offset    uint64
	Address   unsafe.Pointer
	Length    uint32
	Flags     uint32
}

// Do does one operation, and returns its result. setup has flags of io_uring_setup(2).
func Do(setup uint32, e Entry) (result int, err error) {
	var params [120]byte
	binary.NativeEndian.PutUint32(params[8:], setup)
	ring, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params[0])), 0)
	if errno != 0 {
		return 0, errno
	}
	defer unix.Close(int(ring)) //nolint:errcheck // a test's descriptor
	u32 := func(at int) uint32 { return binary.NativeEndian.Uint32(params[at:]) }
	rings, err := unix.Mmap(int(ring), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	defer unix.Munmap(rings) //nolint:errcheck // the same
	entry, err := unix.Mmap(int(ring), 0x10000000, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	defer unix.Munmap(entry) //nolint:errcheck // the same
	entry[0] = e.Operation
	binary.NativeEndian.PutUint32(entry[4:], uint32(e.FD))
	binary.NativeEndian.PutUint64(entry[8:], e.Offset)
	binary.NativeEndian.PutUint64(entry[16:], uint64(uintptr(e.Address)))
	binary.NativeEndian.PutUint32(entry[24:], e.Length)
	binary.NativeEndian.PutUint32(entry[28:], e.Flags)
	binary.NativeEndian.PutUint32(rings[u32(40+24):], 0) // the entry's place in the array
	binary.NativeEndian.PutUint32(rings[u32(40+4):], 1)  // the tail
	tail := (*uint32)(unsafe.Pointer(&rings[u32(80+4)]))
	for submit := uintptr(1); atomic.LoadUint32(tail) == 0; submit = 0 { // a signal may end the wait
		// IORING_ENTER_GETEVENTS, and IORING_ENTER_SQ_WAKEUP for a thread that sleeps.
		if _, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, ring, submit, 1, 3, 0, 0); errno != 0 && errno != unix.EINTR {
			return 0, errno
		}
	}
	runtime.KeepAlive(e.Address)
	if result = int(int32(binary.NativeEndian.Uint32(rings[u32(80+20)+8:]))); result < 0 {
		return 0, unix.Errno(-result)
	}
	return result, nil
}
