package detect

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
)

// act ends or stops the process of an event, and reports the result. A later process with the same number
// is left alone.
func act(action string, p rule.Process) string {
	signal, done := unix.SIGKILL, "killed"
	switch action {
	case rule.Kill:
	case rule.Stop:
		signal, done = unix.SIGSTOP, "stopped"
	case rule.Deny: // if the kernel denies, this is never reached
		return "NOT denied: the kernel denies it only for `shunt guard run`, with BPF LSM and with protection on"
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

// Signal sends a signal to the process that p names, and never to a later one with its number. The error is ESRCH, among others, if it has ended.
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
		return fmt.Errorf("process %d has ended, and another process has its number: %w", p.PID, unix.ESRCH)
	}
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// startOf returns when a process began, in ticks since boot.
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

// programs remembers paths of executables, by process.
type programs struct {
	paths map[key]string
	texts map[string]string // each path once
	reads uint64            // number of processes that were looked up in /proc
}

const programsMax = 1 << 14

func newPrograms() *programs {
	return &programs{paths: map[key]string{}, texts: map[string]string{}}
}

func (p *programs) put(of key, path string) string {
	text, known := p.texts[path]
	if !known {
		text = strings.Clone(path) // a copy, because the event is overwritten
		if len(p.texts) >= programsMax {
			clear(p.texts)
		}
		p.texts[text] = text
	}
	if len(p.paths) >= programsMax {
		clear(p.paths)
	}
	p.paths[of] = text
	return text
}

// name remembers the path of an event's program, and adds the paths of the ancestors; empty: the process ended before it was seen, or has none, like
// a thread of the kernel. It looks a process up in /proc if its program is neither remembered nor equal to that of the process above it.
func (p *programs) name(e *rule.Event) {
	p.put(keyOf(e.Process), e.Process.Program)
	for i := len(e.Ancestors) - 1; i >= 0; i-- {
		a := &e.Ancestors[i]
		path, known := p.paths[keyOf(*a)]
		switch {
		case known:
			a.Program = path
		case i+1 < len(e.Ancestors) && a.Executable == e.Ancestors[i+1].Executable && e.Ancestors[i+1].Program != "":
			a.Program = p.put(keyOf(*a), e.Ancestors[i+1].Program)
		default:
			a.Program = p.put(keyOf(*a), p.read(*a))
		}
	}
}

// read returns the path of a process's executable from /proc; empty: there is none, or the process has ended.
func (p *programs) read(of rule.Process) string {
	p.reads++
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", of.PID))
	if err != nil {
		return ""
	}
	if start, err := startOf(of.PID); err != nil || start != of.StartNs/process.TickNs {
		return ""
	}
	return path
}
