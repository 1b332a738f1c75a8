// Package cpus gives the parts of a measurement CPUs of their own.
package cpus

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

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

// Process binds all threads of this process to a CPU, so that its children and the threads that it will make run there,
// too. restore lets them run on the CPUs of the calling thread again.
func Process(cpu int) (restore func() error, err error) {
	if cpu == Any {
		return func() error { return nil }, nil
	}
	var before, set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("read which CPUs a thread may use: %w", err)
	}
	set.Set(cpu)
	restore = func() error { return bindAll(&before) }
	if err := bindAll(&set); err != nil {
		return nil, errors.Join(err, restore())
	}
	return restore, nil
}

// bindAll binds this process's threads. A thread that a bound one makes is bound, so it ends when all that it finds are.
func bindAll(set *unix.CPUSet) error {
	for again := true; again; {
		again = false
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("list this process's threads: %w", err)
		}
		for _, t := range threads {
			id, err := strconv.Atoi(t.Name())
			if err != nil {
				return err
			}
			var now unix.CPUSet
			if err := unix.SchedGetaffinity(id, &now); errors.Is(err, unix.ESRCH) || err == nil && now == *set {
				continue
			}
			if err := unix.SchedSetaffinity(id, set); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("bind thread %d: %w", id, err)
			}
			again = true
		}
	}
	return nil
}

// ahead is the nice value that gives a thread most of a CPU that it shares with others (sched(7)).
const ahead = -20

// Ahead runs a function on a thread that goes before ordinary ones. Nice values of threads are their own on Linux
// (setpriority(2)).
func Ahead(do func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	raw, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return fmt.Errorf("read a thread's nice value: %w", err)
	}
	before := 20 - raw // the system call adds, so that no value is negative
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, ahead); err != nil {
		return fmt.Errorf("let a thread go ahead: %w", err)
	}
	return errors.Join(do(), unix.Setpriority(unix.PRIO_PROCESS, 0, before))
}
