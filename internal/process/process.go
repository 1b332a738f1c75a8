// Package process reads the kernel's facts about a process.
package process

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Stat are the fields of /proc/PID/stat from the third one on (proc_pid_stat(5)).
type Stat []string

// Field is the number of a field, as in proc_pid_stat(5).
type Field int

// The fields that shunt reads. Ticks are TicksPerSecond.
const (
	state       Field = 3
	Parent      Field = 4
	Group       Field = 5
	Session     Field = 6
	Flags       Field = 9  // PF_… of linux/sched.h
	UserTicks   Field = 14 // CPU time
	SystemTicks Field = 15
	StartTicks  Field = 22 // when it began, since the machine's start
	EndCode     Field = 27 // addresses in its memory: the end of its code
	EnvStart    Field = 50 // and its variables
	EnvEnd      Field = 51
)

// TicksPerSecond is USER_HZ, on every architecture that shunt is built for.
const TicksPerSecond = 100

// TickNs is a tick in nanoseconds.
const TickNs = 1_000_000_000 / TicksPerSecond

// Exiting is the flag of a process that ends (PF_EXITING of linux/sched.h).
const Exiting = 0x4

// All are the numbers of all processes, threads of the kernel included.
func All() (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list the processes: %w", err)
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// ReadStat reads the fields of a process. The error is os.ErrNotExist if there is none, or ESRCH if it ends
// meanwhile.
func ReadStat(pid int) (Stat, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	return parseStat(text), nil
}

// parseStat skips the name, which is in parentheses and may have any character.
func parseStat(text []byte) Stat {
	return strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
}

// State is a letter, such as R; processes with Z and X have ended.
func (s Stat) State() string {
	if len(s) == 0 {
		return ""
	}
	return s[0]
}

// Number is a field that is a number. The error means that there is no such field.
func (s Stat) Number(f Field) (uint64, error) {
	at := int(f - state)
	if at < 0 || at >= len(s) {
		return 0, fmt.Errorf("field %d of /proc/PID/stat is not among its %d", f, len(s)+int(state)-1)
	}
	return strconv.ParseUint(s[at], 10, 64)
}
