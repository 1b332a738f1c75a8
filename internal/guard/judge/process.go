package judge

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/process"
)

// Standing is a process's standing.
type Standing struct {
	Trusts uint64 // rules that trust it
	Guards uint64 // rules that protect it, or deny something only to it
}

// Process is a process as /proc has it.
type Process struct {
	Executable Inode
	Parent     int    // or the process that has adopted it
	Start      uint64 // when it began, in ticks since the machine's start
}

// Look returns a process; nil: it has ended, or is a thread of the kernel.
func Look(id int) *Process {
	p := &Process{Executable: ExecutableOf(id)}
	if p.Executable == (Inode{}) {
		return nil
	}
	var ok bool
	if p.Parent, p.Start, ok = origin(id); !ok {
		return nil
	}
	return p
}

// lookAll returns all processes by number.
func lookAll() (map[int]*Process, error) {
	ids, err := process.All()
	if err != nil {
		return nil, err
	}
	all := map[int]*Process{}
	for _, id := range ids {
		if p := Look(id); p != nil {
			all[id] = p
		}
	}
	return all, nil
}

// ancestorsMax limits the search for trust upwards.
const ancestorsMax = 64

// Standings finds the standing of processes by a policy, each once.
type Standings struct {
	reading *Reading
	find    func(id int) *Process
	keep    func(id int, trusts uint64) uint64
	known   map[int]Standing
}

// Standings returns a search for the standings of processes. find returns a process by its number, or nil. keep, if any, gets the rules that trust a
// process by /proc, and returns the rules that trust it by its past.
func (r *Reading) Standings(find func(id int) *Process, keep func(id int, trusts uint64) uint64) *Standings {
	return &Standings{r, find, keep, map[int]Standing{}}
}

// Of returns the standing of a process in any user and cgroup; zero if there is none of this number.
func (s *Standings) Of(id int) Standing { return s.of(id, 0) }

func (s *Standings) of(id, depth int) Standing {
	if known, ok := s.known[id]; ok {
		return known
	}
	p := s.find(id)
	if p == nil {
		return Standing{}
	}
	of := s.reading.Marks[p.Executable].And(s.reading.PIDs[id])
	want := Standing{of.Trusts, of.Guards}
	if s.find(p.Parent) != nil && depth < ancestorsMax && !nameless(id) {
		want.Trusts |= s.of(p.Parent, depth+1).Trusts & s.reading.Children &^ of.Interprets
	}
	if want.Trusts != 0 && (traced(id) || !plainEnvironment(id)) {
		want.Trusts = 0
	}
	if s.keep != nil {
		want.Trusts = s.keep(id, want.Trusts)
	}
	s.known[id] = want
	return want
}

// StandingNow returns the present standing of a thread in any user and cgroup, by the program of its process and, for rules that trust children, by the
// programs of the processes above it. A process whose starter has ended is below the process that adopted it. programs are the marks of executables.
func (r *Reading) StandingNow(tid int, programs map[Inode]Marks) Standing {
	only := &Reading{Marks: programs, PIDs: r.PIDs, Children: r.Children}
	for range chainTries {
		all := chainOf(tid, r.Children != 0)
		of := only.Standings(func(id int) *Process { return all[id] }, nil).Of(tid)
		if len(all) <= 1 || of.Trusts == 0 || isSame(all) {
			return of
		}
	}
	return Standing{} // the processes above it change too fast to be known
}

// chainTries limits the number of times that the processes above a process are read again because one of them ended
// meanwhile.
const chainTries = 10

// chainOf returns a thread and the processes above it.
func chainOf(tid int, isAbove bool) map[int]*Process {
	all := map[int]*Process{}
	for id := tid; id > 0 && len(all) < ancestorsMax; {
		p := Look(id)
		if p == nil {
			break
		}
		all[id] = p
		if !isAbove {
			break
		}
		id = p.Parent
	}
	return all
}

// isSame reports whether the processes still run, each below the same process: otherwise a number may have been another process's.
func isSame(all map[int]*Process) bool {
	for id, p := range all {
		if parent, start, ok := origin(id); !ok || parent != p.Parent || start != p.Start {
			return false
		}
	}
	return true
}

// origin returns the parent of a process, or the process that has adopted it, and when the process began (proc_pid_stat(5)).
func origin(id int) (parent int, start uint64, ok bool) {
	stat, err := process.ReadStat(id)
	if err != nil {
		return 0, 0, false
	}
	number, err1 := stat.Number(process.Parent)
	start, err2 := stat.Number(process.StartTicks)
	return int(number), start, errors.Join(err1, err2) == nil
}

// nameless reports whether a process runs a file without a name, such as a memfd.
func nameless(id int) bool {
	var stat unix.Stat_t
	return unix.Stat(fmt.Sprintf("/proc/%d/exe", id), &stat) != nil || stat.Nlink == 0
}

// plainEnvironment reports whether a process began without variables that load code into it: variables that
// bpf/guard/trust.h knows. If a process is just executing a file, it waits for the variables.
func plainEnvironment(id int) bool {
	for range environmentTries {
		if size, known := environmentSize(id); known {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", id))
			if err != nil {
				return false
			}
			if uint64(len(text)) == size { // the kernel returns nothing if it cannot read all of it
				return plain(string(text))
			}
		}
		if ExecutableOf(id) == (Inode{}) {
			return false
		}
		time.Sleep(time.Millisecond)
	}
	return false
}

// environmentTries limits the looks at a process while it executes a file: for a second at least.
const environmentTries = 1000

// environmentSize returns the size of a program's variables in memory, once they are there: the kernel notes the end
// of its code after that (endcode, env_start and env_end of proc_pid_stat(5)).
func environmentSize(id int) (size uint64, known bool) {
	stat, err := process.ReadStat(id)
	if err != nil {
		return 0, false
	}
	code, err1 := stat.Number(process.EndCode)
	start, err2 := stat.Number(process.EnvStart)
	end, err3 := stat.Number(process.EnvEnd)
	return end - start, errors.Join(err1, err2, err3) == nil && code != 0 && start <= end && end > 0
}

func plain(environment string) bool { return loads(environment) == "" }

// loads returns the name of the first variable that loads code; empty: there is none.
func loads(environment string) string {
	for variable := range strings.SplitSeq(environment, "\x00") {
		for _, begin := range loading {
			if strings.HasPrefix(variable, begin) {
				name, _, _ := strings.Cut(variable, "=")
				return name
			}
		}
	}
	return ""
}

// loading has the beginnings of the names of variables that load code.
var loading = []string{"LD_", "GCONV_PA", "BASH_ENV", "PYTHONPA", "PYTHONHO", "PERL5LIB", "PERL5OPT", "RUBYLIB=", "RUBYOPT=", "NODE_OPT", "JAVA_TOO"}

// ExecutableOf returns the program that a process runs; zero for a thread of the kernel and for a process that has ended.
func ExecutableOf(id int) Inode {
	var stat unix.Stat_t
	if unix.Stat(fmt.Sprintf("/proc/%d/exe", id), &stat) != nil {
		return Inode{}
	}
	return InodeOf(stat)
}

func traced(id int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", id))
	return err != nil || !strings.Contains(string(text), "\nTracerPid:\t0\n")
}
