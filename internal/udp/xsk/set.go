package xsk

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Set is a memory and the sockets on it, for several queues of an interface.
type Set struct {
	Memory  *Memory
	Sockets []*Socket
}

// AdoptSet takes over the files of another process: the memory's, then one for each layout. If it fails, it
// closes them all. It needs no capability.
func AdoptSet(layouts []Layout, files []int) (*Set, error) {
	if len(files) != 1+len(layouts) {
		closeFiles(files)
		return nil, fmt.Errorf("adopt the sockets of %d queues: there are %d files, and %d are needed", len(layouts), len(files), 1+len(layouts))
	}
	memory, err := AdoptMemory(files[0])
	if err != nil {
		closeFiles(files)
		return nil, err
	}
	s := &Set{Memory: memory}
	for i, layout := range layouts {
		socket, err := Adopt(files[1+i], layout, memory)
		if err != nil {
			closeFiles(files[1+i:])
			return nil, errors.Join(err, s.Close())
		}
		s.Sockets = append(s.Sockets, socket)
	}
	return s, nil
}

// Files returns the memory's file, then the sockets', in the order of AdoptSet. They stay the set's.
func (s *Set) Files() []int {
	files := []int{s.Memory.FD}
	for _, socket := range s.Sockets {
		files = append(files, socket.FD())
	}
	return files
}

// Queues returns the program's sides of all sockets: see Socket.Queue.
func (s *Set) Queues(checked bool) (all []*Queue, err error) {
	for _, socket := range s.Sockets {
		q, err := socket.Queue(checked)
		if err != nil {
			return nil, err
		}
		all = append(all, q)
	}
	return all, nil
}

// Close closes memory and sockets. A set that is closed already stays as it is.
func (s *Set) Close() error {
	var errs []error
	for _, socket := range s.Sockets {
		errs = append(errs, socket.Close())
	}
	s.Sockets = nil
	if s.Memory != nil {
		errs = append(errs, s.Memory.Close())
		s.Memory = nil
	}
	return errors.Join(errs...)
}

func closeFiles(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd)
	}
}
