// Package cpus gives the parts of a measurement CPUs of their own.
package cpus

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// Any is no CPU in particular.
const Any = -1

// On runs a function on a thread that is bound to a CPU, or to Any.
func On(cpu int, do func() error) error {
	if cpu == Any {
		return do()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return fmt.Errorf("read which CPUs a thread may use: %w", err)
	}
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("bind a thread to CPU %d: %w", cpu, err)
	}
	return errors.Join(do(), unix.SchedSetaffinity(0, &before))
}

// Two are the first and the last CPU that this process may use, and Any twice if there is only one.
func Two() (two [2]int) {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil || set.Count() < 2 {
		return [2]int{Any, Any}
	}
	found := false
	for cpu := range len(set) * 64 {
		if !set.IsSet(cpu) {
			continue
		}
		if !found {
			two[0], found = cpu, true
		}
		two[1] = cpu
	}
	return two
}
