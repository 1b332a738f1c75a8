package detect

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
)

// act ends or stops the very process that an event is of, and says what became of it. A process that has its number by now
// is left alone.
func act(action string, p rule.Process) string {
	signal, done := unix.SIGKILL, "killed"
	switch action {
	case rule.Kill:
	case rule.Stop:
		signal, done = unix.SIGSTOP, "stopped"
	case rule.Deny: // where the kernel denies, this does not happen
		return "NOT denied: only `shunt guard run` has the kernel deny it, where that has BPF LSM and protection is on"
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
	if start != p.StartNs/process.TickNs {
		return fmt.Errorf("process %d is another one by now: %w", p.PID, unix.ESRCH)
	}
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// startOf is when a process began, in ticks since boot.
func startOf(pid uint32) (uint64, error) {
	stat, err := process.ReadStat(int(pid))
	if errors.Is(err, os.ErrNotExist) {
		err = unix.ESRCH
	}
	if err != nil {
		return 0, fmt.Errorf("ask when process %d began: %w", pid, err)
	}
	start, err := stat.Number(process.StartTicks)
	if err != nil {
		return 0, fmt.Errorf("ask when process %d began: %w", pid, err)
	}
	return start, nil
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
	if start, err := startOf(a.PID); err != nil || start != a.StartNs/process.TickNs {
		return ""
	}
	a.Program = path
	p.put(a)
	return path
}
