package xsk

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Set is one memory and the sockets on it: those of several queues of an interface.
type Set struct {
	Memory  *Memory
	Sockets []*Socket
}

// AdoptSet takes over what another process has prepared: the memory's file, then one for each layout. It
// closes them all if it fails. It needs no capability.
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

// Files are the memory's, then the sockets', in the order of AdoptSet. They stay the set's.
func (s *Set) Files() []int {
	files := []int{s.Memory.FD}
	for _, socket := range s.Sockets {
		files = append(files, socket.FD())
	}
	return files
}

// Queues are the program's sides of all sockets: see Socket.Queue.
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

// Close lets go of memory and sockets. A set that is closed already is left as it is.
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
