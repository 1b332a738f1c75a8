package xsk

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// seals keep the size: otherwise a process that has the memfd could shrink the file, and each access
// behind its end would be SIGBUS for all other processes (memfd_create(2)).
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// Memory is the frames of one or more sockets, which processes can share.
type Memory struct {
	FD    int
	bytes []byte
}

// NewMemory makes memory of a size, sealed and mapped.
func NewMemory(size int64) (*Memory, error) {
	fd, err := unix.MemfdCreate("shunt-udp", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make a memfd for frames: %w", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("make a memfd of %d bytes for frames: %w", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("seal the memfd for frames: %w", err)
	}
	m, err := AdoptMemory(fd)
	if err != nil {
		_ = unix.Close(fd)
	}
	return m, err
}

// AdoptMemory maps memory that another process has made. It refuses a file whose size could change.
// fd is the memory's to close if there is no error.
func AdoptMemory(fd int) (*Memory, error) {
	have, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("read the seals of the memory for frames: %w; it must be a memfd", err)
	}
	if have&seals != seals {
		return nil, fmt.Errorf("map the memory for frames: it has the seals %#x, but needs %#x, so that its size cannot change", have, seals)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, fmt.Errorf("read the size of the memory for frames: %w", err)
	}
	bytes, err := unix.Mmap(fd, 0, int(stat.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of memory for frames: %w", stat.Size, err)
	}
	return &Memory{fd, bytes}, nil
}

// part returns the frames of one socket.
func (m *Memory) part(l Layout) ([]byte, error) {
	if l.Offset > int64(len(m.bytes))-l.Size() {
		return nil, fmt.Errorf("%d bytes of frames from byte %d on: the memory has %d", l.Size(), l.Offset, len(m.bytes))
	}
	return m.bytes[l.Offset : l.Offset+l.Size() : l.Offset+l.Size()], nil
}

// Close unmaps the memory. No queue on it may be used after that.
func (m *Memory) Close() error {
	err := unix.Munmap(m.bytes)
	m.bytes = nil
	if closeErr := unix.Close(m.FD); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("unmap the memory for frames: %w", err)
	}
	return nil
}
