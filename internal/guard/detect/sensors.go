package detect

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/sensor"
)

// source is a hook, and the type of its events.
type source struct {
	of string
	sensor.Sensor
}

// raw returns a sensor at a tracepoint that needs no tracefs.
func raw(of, watches, target, program, without string) source {
	return source{of, sensor.Sensor{Name: target, Watches: watches, Without: without,
		Ways: []sensor.Way{{Kind: sensor.RawTP, Target: target, Program: program}}}}
}

// call returns a sensor at a system call: at its beginning ("enter") or its end ("exit").
func call(of, watches, name, end, program string) source {
	return source{of, sensor.Sensor{Name: name + " " + end, Watches: watches, Without: watches + " by " + name + " is not seen",
		Ways: []sensor.Way{{Kind: sensor.Tracepoint, Target: "syscalls/sys_" + end + "_" + name, Program: program}}}}
}

// sources has all hooks. If an architecture does not have a system call (open and dup2 on arm64), it has no
// tracepoint for it, and no event is lost.
var sources = []source{
	raw(rule.Exec, "programs that are executed", "sched_process_exec", "sh_d_exec", ""),
	raw(rule.Connect, "connections of TCP", "inet_sock_set_state", "sh_d_connect", ""),
	call(rule.Accept, "connections that are accepted", "accept", "exit", "sh_d_accept"),
	call(rule.Accept, "connections that are accepted", "accept4", "exit", "sh_d_accept"),
	call(rule.Dup, "sockets that become descriptors 0 to 2", "dup", "exit", "sh_d_dup"),
	call(rule.Dup, "sockets that become descriptors 0 to 2", "dup2", "exit", "sh_d_dup"),
	call(rule.Dup, "sockets that become descriptors 0 to 2", "dup3", "exit", "sh_d_dup"),
	call(rule.Open, "files that are opened", "open", "exit", "sh_d_open"),
	call(rule.Open, "files that are opened", "creat", "exit", "sh_d_open"),
	call(rule.Open, "files that are opened", "openat", "exit", "sh_d_open"),
	call(rule.Open, "files that are opened", "openat2", "exit", "sh_d_open"),
	call(rule.SetUID, "users that change", "setuid", "enter", "sh_d_cred_from"),
	call(rule.SetUID, "users that change", "setuid", "exit", "sh_d_cred_to"),
	call(rule.SetUID, "users that change", "setreuid", "enter", "sh_d_cred_from"),
	call(rule.SetUID, "users that change", "setreuid", "exit", "sh_d_cred_to"),
	call(rule.SetUID, "users that change", "setresuid", "enter", "sh_d_cred_from"),
	call(rule.SetUID, "users that change", "setresuid", "exit", "sh_d_cred_to"),
	raw(rule.Module, "kernel modules", "module_load", "sh_d_module", "modules are not seen; a kernel that can load none has no such tracepoint"),
	call(rule.BPF, "programs of BPF", "bpf", "enter", "sh_d_bpf"),
	call(rule.Ptrace, "debuggers", "ptrace", "enter", "sh_d_ptrace"),
	call(rule.Ptrace, "writes to other processes' memory", "process_vm_writev", "enter", "sh_d_poke"),
	call(rule.Mount, "mounts", "mount", "enter", "sh_d_mount"),
	call(rule.MemFD, "files without a name", "memfd_create", "exit", "sh_d_memfd"),
}

// Blind lists, for people, the events that no sensor sees on any kernel.
var Blind = []string{
	"connect: sockets of UDP; a shell over one is seen when it is executed",
	"dup: sockets that fcntl(2) copies, and what is no socket; a shell over one is seen when it is executed",
	"open: files that everybody may read and that are only read, and files that io_uring opens",
	"mount: move_mount(2) and mounts by file descriptor",
	"setuid: credentials that the kernel changes in another way than by setuid(2), setreuid(2), setresuid(2) and exec",
}

const tracefs = "/sys/kernel/tracing"

// withTracefs runs do where tracefs is mounted. If it is mounted nowhere, that is a mount namespace that ends with the thread.
func withTracefs(do func() error) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(tracefs, &fs); err == nil && fs.Type == unix.TRACEFS_MAGIC {
		return do()
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // it is never unlocked: the thread ends with its namespace
		result <- func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
				return fmt.Errorf("make a mount namespace for tracefs: %w", err)
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return fmt.Errorf("make the mount namespace for tracefs private: %w", err)
			}
			// On a kernel without tracefs each sensor that needs it is refused, with the reason.
			if err := unix.Mount("tracefs", tracefs, "tracefs", 0, ""); err != nil && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("mount tracefs at %s: %w", tracefs, err)
			}
			return do()
		}()
	}()
	return <-result
}

// scope is a cgroup and its depth.
type scope struct {
	id    uint64
	level uint32
}

// scopeOf returns the scope of a folder of the second hierarchy; "": all processes.
func scopeOf(folder string) (s scope, err error) {
	if folder == "" {
		return s, nil
	}
	if s.id, err = cgroup.ID(folder); err != nil {
		return s, err
	}
	s.level, err = cgroup.Level(folder)
	return s, err
}

// containers has IDs by the number of the cgroup; each is looked up at most once.
type containers map[uint64]string

const containersMax = 1 << 14

// of returns the ID of the container that a process is in, from the name of its cgroup: 64 hexadecimal digits, as all
// engines write it; empty: none, or the process has ended.
func (c containers) of(cgroup uint64, pid uint32) string {
	if id, known := c[cgroup]; known {
		return id
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	id := ""
	for line := range strings.Lines(string(text)) {
		if path, is := strings.CutPrefix(strings.TrimSpace(line), "0::"); is {
			id = containerOf(path)
		}
	}
	if len(c) >= containersMax {
		clear(c)
	}
	c[cgroup] = id
	return id
}

func containerOf(path string) string {
	const digits = 64
	for part := range strings.SplitSeq(path, "/") {
		part = strings.TrimSuffix(part, ".scope")
		if len(part) > digits {
			part = part[len(part)-digits:]
		}
		if len(part) == digits && strings.Trim(part, "0123456789abcdef") == "" {
			return part
		}
	}
	return ""
}
