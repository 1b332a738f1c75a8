package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/bench/cpus"
	"github.com/shunt-lb/shunt/internal/lab"
	"golang.org/x/sys/unix"
)

// thread is a thread of the kernel that does the packet work of one queue: threaded NAPI, the kernel's
// Documentation/networking/napi.rst. Its CPU time is that of the softirq that it replaces, and nobody else's.
type thread int

// threaded has a host's interface, which has one queue and NAPI, do its work in a thread.
func threaded(host *lab.Host, iface string) (thread, error) {
	prefix := "napi/" + iface + "-"
	before, err := named(prefix)
	if err != nil {
		return 0, err
	}
	if err := host.Run(func() error { return writeSysfs("class/net/"+iface+"/threaded", "1") }); err != nil {
		return 0, fmt.Errorf("have %s of %s do its work in a thread: %w", iface, host.Name(), err)
	}
	after, err := named(prefix)
	if err != nil {
		return 0, err
	}
	var found []thread
	for t := range after {
		if !before[t] {
			found = append(found, t)
		}
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("%d new threads %s* do the work of %s of %s, and 1 is expected", len(found), prefix, iface, host.Name())
	}
	return found[0], nil
}

// writeSysfs writes a file of the sysfs that shows the thread's own network namespace. It is mounted nowhere.
func writeSysfs(name, value string) error {
	context, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(context) //nolint:errcheck // nothing was written
	if err := unix.FsconfigCreate(context); err != nil {
		return os.NewSyscallError("fsconfig", err)
	}
	mount, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("fsmount", err)
	}
	defer unix.Close(mount) //nolint:errcheck // nothing was written
	fd, err := unix.Openat(mount, name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	_, err = unix.Write(fd, []byte(value))
	return errors.Join(os.NewSyscallError("write", err), unix.Close(fd))
}

// named are the processes whose names have a prefix.
func named(prefix string) (map[thread]bool, error) {
	files, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return nil, err
	}
	all := map[thread]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || !strings.HasPrefix(string(text), prefix) { // it may have ended
			continue
		}
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return nil, err
		}
		all[thread(id)] = true
	}
	return all, nil
}

// bind has the thread run on one CPU.
func (t thread) bind(cpu int) error {
	if cpu == cpus.Any {
		return nil
	}
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(int(t), &set); err != nil {
		return fmt.Errorf("bind the kernel's thread %d to CPU %d: %w", t, cpu, err)
	}
	return nil
}

// first has the thread run before all ordinary ones.
func (t thread) first() error {
	if err := unix.SchedSetAttr(int(t), &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0); err != nil {
		return fmt.Errorf("let the kernel's thread %d go first: %w", t, err)
	}
	return nil
}

// ran is the CPU time of the thread so far.
func (t thread) ran() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", t))
	if err != nil {
		return 0, fmt.Errorf("the kernel's thread of an interface: %w", err)
	}
	first, _, _ := strings.Cut(string(text), " ")
	ns, err := strconv.ParseInt(first, 10, 64)
	return time.Duration(ns), err
}
