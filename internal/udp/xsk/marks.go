package xsk

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Marks tell a set from every other one that this machine has had since it started: the kernel gives them, and no process can
// forge them. By them a process that has lent a set recognises copies of the set's files.
type Marks struct {
	Memory  MemoryMark `json:"memory"`
	Sockets []uint64   `json:"sockets"` // SO_COOKIE: a number that no other socket ever has
}

// MemoryMark is the mark of a memfd.
type MemoryMark struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	Size   int64  `json:"size"` // bytes
}

// MarksOf returns the marks of any files, in the order of Set.Files.
func MarksOf(files []int) (m Marks, err error) {
	if len(files) == 0 {
		return m, fmt.Errorf("there are no files")
	}
	var stat unix.Stat_t
	if err := unix.Fstat(files[0], &stat); err != nil {
		return m, fmt.Errorf("look at the memory for frames: %w", err)
	}
	m.Memory = MemoryMark{Device: stat.Dev, Inode: stat.Ino, Size: stat.Size}
	for i, fd := range files[1:] {
		cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err != nil {
			return m, fmt.Errorf("ask for the cookie of socket %d: %w", i, err)
		}
		m.Sockets = append(m.Sockets, cookie)
	}
	return m, nil
}

// Continue makes Statistics count Taken on from an earlier process, because the ring remembers it only modulo 2^32. received is
// about the number of packets that the program has taken since the socket was opened, less than 2^31 too many or too few.
func (s *Socket) Continue(received uint64) error {
	r, err := newRing[Descriptor](s.rings.receive, s.rings.offsets.Rx, s.Layout.ReceiveRing, false)
	if err != nil {
		return fmt.Errorf("read the receive ring of queue %d: %w", s.Layout.Queue, err)
	}
	s.taken.near(received, r.own)
	return nil
}
