package decoy

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
)

// key identifies a process: no later one has the same values.
type key struct {
	pid   int
	start uint64 // ticks
}

// proc is a process as /proc has it.
type proc struct {
	key
	parent, group, session int
	device, inode          uint64 // of the executable; 0: a thread of the kernel, or a process that has ended
	program, comm          string
}

func look(pid int) (p proc, err error) {
	p.pid = pid
	stat, err := process.ReadStat(pid)
	if err != nil {
		return p, err
	}
	number := func(f process.Field) int {
		n, bad := stat.Number(f)
		err = errors.Join(err, bad)
		return int(n)
	}
	p.parent, p.group, p.session, p.start = number(process.Parent), number(process.Group), number(process.Session), uint64(number(process.StartTicks))
	if err != nil {
		return p, err
	}
	exe := fmt.Sprintf("/proc/%d/exe", pid)
	var s unix.Stat_t
	if unix.Stat(exe, &s) == nil {
		p.device, p.inode = s.Dev, s.Ino
		p.program, _ = os.Readlink(exe)
	}
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	p.comm = strings.TrimSpace(string(comm))
	return p, nil
}

// event returns a process as alerts have it.
func (p proc) event() rule.Process {
	return rule.Process{PID: uint32(p.pid), StartNs: p.start * process.TickNs, Program: p.program, Comm: p.comm,
		Executable: rule.File{Inode: p.inode, Device: unix.Major(p.device)<<20 | unix.Minor(p.device)}}
}

// chain returns a process and the processes above it in its session, the process itself first: the processes that may belong to one program.
// spared processes, and processes above them, are left out.
func chain(pid int, spared map[int]bool) (all []proc) {
	for pid > 1 && !spared[pid] && len(all) < chainMax {
		p, err := look(pid)
		if err != nil || p.inode == 0 || len(all) > 0 && p.session != all[0].session {
			break
		}
		all = append(all, p)
		pid = p.parent
	}
	return all
}

const chainMax = 32

// common returns the nearest process that two chains have in common; nil: none.
func common(a, b []proc) *proc {
	for i := range a {
		if slices.ContainsFunc(b, func(p proc) bool { return p.key == a[i].key }) {
			return &a[i]
		}
	}
	return nil
}

// top returns the highest process of a chain in the process group of the first one: the script that runs a tool for each file,
// but not the shell in which a person typed its name.
func top(c []proc) proc {
	highest := c[0]
	for _, p := range c {
		if p.group != c[0].group {
			break
		}
		highest = p
	}
	return highest
}

// spared returns process 1, this one, and the processes above this one.
func spared() map[int]bool {
	all := map[int]bool{1: true}
	for pid := os.Getpid(); pid > 1 && !all[pid]; {
		all[pid] = true
		p, err := look(pid)
		if err != nil {
			break
		}
		pid = p.parent
	}
	return all
}

// signal sends a signal to the roots, to all processes below them and to the others of the roots' process groups, and repeats that until
// it finds no new process. It returns the processes that it reached.
func signal(roots []proc, sig unix.Signal, spared map[int]bool) (reached []proc, err error) {
	own, _ := unix.Getpgid(0)
	seen := map[key]bool{}
	send := func(p proc) {
		if spared[p.pid] || seen[p.key] || p.inode == 0 {
			return
		}
		seen[p.key] = true
		if now, bad := look(p.pid); bad != nil || now.start != p.start || now.inode == 0 {
			return // it has ended, and its parent has not waited for it yet
		}
		switch bad := detect.Signal(p.event(), sig); {
		case bad == nil:
			reached = append(reached, p)
		case !errors.Is(bad, unix.ESRCH):
			err = errors.Join(err, bad)
		}
	}
	for _, p := range roots {
		send(p)
	}
	for round := 0; round < roundsMax; round++ {
		all, bad := processes()
		if bad != nil {
			return reached, errors.Join(err, bad)
		}
		before := len(seen)
		for _, p := range all {
			for _, r := range roots {
				if r.group == p.group && r.group != own || isBelow(p, r, all) {
					send(p)
				}
			}
		}
		if len(seen) == before {
			break
		}
	}
	return reached, err
}

// roundsMax limits the search for processes that were started meanwhile.
const roundsMax = 16

// isBelow reports whether a process descends from another one.
func isBelow(p proc, root proc, all map[int]proc) bool {
	for up, steps := p.parent, 0; up > 1 && steps < chainMax; steps++ {
		if up == root.pid {
			return true
		}
		next, known := all[up]
		if !known {
			return false
		}
		up = next.parent
	}
	return false
}

// processes returns all processes of the machine by number, without threads of the kernel.
func processes() (map[int]proc, error) {
	pids, err := process.All()
	if err != nil {
		return nil, err
	}
	all := map[int]proc{}
	for _, pid := range pids {
		p, err := look(pid)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
			return nil, fmt.Errorf("look at process %d: %w", pid, err)
		}
		if err == nil && p.inode != 0 {
			all[pid] = p
		}
	}
	return all, nil
}
