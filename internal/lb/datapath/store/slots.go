package store

import (
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// slotWindow is the number of slots that are mapped at once: a multiple of every page size in slots.
const slotWindow = 1 << 16

// slotMemory is the array of slots, of which one window is mapped at a time: mapped parts of an array count as
// the process's memory, and the slots can be most of it.
type slotMemory struct {
	of         *ebpf.Map
	protection int

	mu     sync.Mutex
	first  uint32 // of the window
	memory []byte // the window; nil: none yet
}

func (s *slotMemory) len() int { return int(s.of.MaxEntries()) }

// each calls do for the slots from first on, i from 0. The caller has checked that they exist.
func (s *slotMemory) each(first, count uint32, do func(i int, slot *uint64)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for done := uint32(0); done < count; {
		window, err := s.from(first + done)
		if err != nil {
			return err
		}
		window = window[:min(uint32(len(window)), count-done)]
		for i := range window {
			do(int(done)+i, &window[i])
		}
		done += uint32(len(window))
	}
	return nil
}

// from returns the part of the window that begins at a slot.
func (s *slotMemory) from(slot uint32) ([]uint64, error) {
	if first := slot / slotWindow * slotWindow; s.memory == nil || s.first != first {
		if err := s.unmap(); err != nil {
			return nil, err
		}
		memory, err := MapArray(s.of, abi.MapSlots, first, min(slotWindow, s.of.MaxEntries()-first), s.protection)
		if err != nil {
			return nil, err
		}
		s.first, s.memory = first, memory
	}
	return abi.Array[uint64](s.memory)[slot-s.first:], nil
}

func (s *slotMemory) unmap() error {
	if s.memory == nil {
		return nil
	}
	err := unix.Munmap(s.memory)
	s.memory = nil
	return err
}

func (s *slotMemory) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unmap()
}
