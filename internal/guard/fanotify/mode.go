package fanotify

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Mode is the access for which a thread waits in an open. The event does not have it: the flags of its descriptor are the group's own.
type Mode struct {
	Reads, Writes bool // to write is also to truncate; neither: to execute
	// IsSure is false if the call does not show it (io_uring, the kernel's own threads, programs of 32 bits), or if the flags are in memory that the program can have
	// changed since (openat2). In the last case they are read all the same.
	IsSure bool
}

// Numbers of system calls that golang.org/x/sys has for one of the architectures only.
const (
	amd64Open  = 2
	amd64Creat = 85
)

// ModeOf returns the access for which a thread waits in an open: it sleeps, so nobody can change the arguments of its call
// (proc_pid_syscall(5)). sleepMax bounds the wait for it to sleep: its open is in the queue before that.
func ModeOf(tid int, sleepMax time.Duration) Mode {
	var words []string
	for until := time.Now().Add(sleepMax); ; {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", tid))
		if err != nil {
			return Mode{}
		}
		if words = strings.Fields(string(text)); len(words) > 4 || time.Now().After(until) {
			break
		}
		runtime.Gosched() // "running": it has not gone to sleep yet
	}
	if len(words) < 5 {
		return Mode{}
	}
	number, err := strconv.ParseInt(words[0], 10, 64)
	if err != nil {
		return Mode{}
	}
	argument := func(i int) uint64 {
		n, _ := strconv.ParseUint(strings.TrimPrefix(words[1+i], "0x"), 16, 64)
		return n
	}
	switch {
	case number == unix.SYS_OPENAT, number == unix.SYS_OPEN_BY_HANDLE_AT:
		return modeOf(argument(2), true)
	case number == unix.SYS_OPENAT2: // struct open_how begins with the flags
		flags, err := remember(tid, argument(2))
		if err != nil {
			return Mode{}
		}
		return modeOf(flags, false)
	case number == unix.SYS_EXECVE, number == unix.SYS_EXECVEAT:
		return Mode{IsSure: true}
	case runtime.GOARCH == "amd64" && number == amd64Open:
		return modeOf(argument(1), true)
	case runtime.GOARCH == "amd64" && number == amd64Creat:
		return Mode{Writes: true, IsSure: true}
	}
	return Mode{}
}

func modeOf(flags uint64, isSure bool) Mode {
	way := flags & unix.O_ACCMODE
	return Mode{Reads: way != unix.O_WRONLY, Writes: way != unix.O_RDONLY || flags&unix.O_TRUNC != 0, IsSure: isSure}
}

// remember reads a word of a thread's memory.
func remember(tid int, address uint64) (uint64, error) {
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", tid))
	if err != nil {
		return 0, err
	}
	defer memory.Close() //nolint:errcheck // nothing was written
	var raw [8]byte
	_, err = io.ReadFull(io.NewSectionReader(memory, int64(address), int64(len(raw))), raw[:])
	return binary.NativeEndian.Uint64(raw[:]), err
}

// ProcessOf returns the process of a thread; 0: it has ended.
func ProcessOf(tid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(text), "\nTgid:")
	line, _, _ := strings.Cut(after, "\n")
	pid, _ := strconv.Atoi(strings.TrimSpace(line))
	return pid
}
