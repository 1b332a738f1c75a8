package detect

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/rule"
)

const tickNs = 10_000_000 // a second by USER_HZ, in which proc_pid_stat(5) tells when a process began

// act ends or stops the very process that an event is of, and says what became of it. A process that has its number by now
// is left alone.
func act(action string, p rule.Process) string {
	signal, done := unix.SIGKILL, "killed"
	switch action {
	case rule.Kill:
	case rule.Stop:
		signal, done = unix.SIGSTOP, "stopped"
	default:
		return ""
	}
	if p.PID <= 1 {
		return "not " + done + ": it is the machine's first process"
	}
	switch err := Signal(p, signal); {
	case err == nil:
		return done
	case errors.Is(err, unix.ESRCH):
		return "not " + done + ": it has ended already"
	default:
		return fmt.Sprintf("NOT %s: %v", done, err)
	}
}

// Signal sends a signal to the very process that p names. The error is ESRCH, among others, if it has ended.
func Signal(p rule.Process, signal unix.Signal) error {
	fd, err := unix.PidfdOpen(int(p.PID), 0)
	if err != nil {
		return fmt.Errorf("open process %d: %w", p.PID, err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	start, err := startOf(p.PID)
	if err != nil {
		return err
	}
	if start != p.StartNs/tickNs {
		return fmt.Errorf("process %d is another one by now: %w", p.PID, unix.ESRCH)
	}
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// startOf is when a process began, in ticks since boot.
func startOf(pid uint32) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("ask when process %d began: %w", pid, unix.ESRCH)
	}
	if err != nil {
		return 0, fmt.Errorf("ask when process %d began: %w", pid, err)
	}
	// The name is in brackets, and may have blanks and brackets in it.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	const field = 22 - 3 // of proc_pid_stat(5), after the first two
	if len(fields) <= field {
		return 0, fmt.Errorf("ask when process %d began: /proc says %q", pid, text)
	}
	return strconv.ParseUint(fields[field], 10, 64)
}

// programs are paths of executables, by process.
type programs map[key]string

const programsMax = 1 << 14

func (p programs) put(of rule.Process) {
	if len(p) >= programsMax {
		clear(p)
	}
	p[keyOf(of)] = of.Program
}

// of is the path of an ancestor's executable; empty: it ended before it was seen.
func (p programs) of(a rule.Process) string {
	if path, known := p[keyOf(a)]; known {
		return path
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", a.PID))
	if err != nil {
		return ""
	}
	if start, err := startOf(a.PID); err != nil || start != a.StartNs/tickNs {
		return ""
	}
	a.Program = path
	p.put(a)
	return path
}
