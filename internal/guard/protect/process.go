package protect

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/process"
)

// standing is a process's standing: masks of rules.
type standing struct{ trusts, guards uint64 }

// passesMax limits the passes over all processes. Each pass except the last has found a change between reading and
// writing.
const passesMax = 1000

// giveRunning gives the running processes the trust and protection of the policy. The programs handle later processes:
// so it repeats until a pass finds nothing to change, and a process that forks passes its own on. If a process executes
// another program meanwhile, the next pass takes back trust that was given in error, before it counts. A program that
// executes a file removes its earlier trust before it reads the label, so if it reads the label before the label is
// written, a later pass gives the trust again.
func (l *labeler) giveRunning(maps map[string]*ebpf.Map) error {
	for range passesMax {
		changed, err := l.pass(maps)
		if err != nil || !changed {
			return err
		}
	}
	return fmt.Errorf("give processes their labels: new processes kept appearing in %d looks; try again", passesMax)
}

// running is a process and its state.
type running struct {
	key    guardGuardProcess
	exe    inode
	parent int
	kernel guardGuardTrust    // the programs' part
	given  [2]guardGuardGiven // user space's part
}

func (l *labeler) pass(maps map[string]*ebpf.Map) (changed bool, err error) {
	all, err := lookAll(maps)
	if err != nil {
		return false, err
	}
	l.standings = map[int]standing{}
	side := l.generation & 1
	for id, p := range all {
		of := l.standing(id, all, 0)
		want, have := guardGuardGiven{Trusts: of.trusts, Guards: of.guards, Generation: l.generation}, p.given[side]
		if p.kernel.Generations[side] == l.generation {
			want.Trusts &^= p.kernel.Trusts[side]
			want.Guards &^= p.kernel.Guards[side]
		}
		if have == want || have.Generation != l.generation && want.Trusts|want.Guards == 0 {
			continue
		}
		changed = true
		if err := maps[givenMaps[side]].Put(&p.key, &want); err != nil {
			return false, fmt.Errorf("give process %d its label: %w", id, err)
		}
	}
	return changed, nil
}

// givenMaps are the maps of the two sides.
var givenMaps = [2]string{guardMapShG_given0, guardMapShG_given1}

// lookAll returns all processes by number; without maps, without their state.
func lookAll(maps map[string]*ebpf.Map) (map[int]*running, error) {
	ids, err := process.All()
	if err != nil {
		return nil, err
	}
	all := map[int]*running{}
	for _, id := range ids {
		p, err := look(id, maps)
		if err != nil {
			return nil, fmt.Errorf("look at process %d: %w", id, err)
		}
		if p != nil {
			all[id] = p
		}
	}
	return all, nil
}

// look returns a process with its state; nil: it has ended, or is a thread of the kernel.
func look(id int, maps map[string]*ebpf.Map) (*running, error) {
	p := &running{exe: executable(id)}
	if p.exe == (inode{}) {
		return nil, nil
	}
	var ok bool
	if p.parent, p.key, ok = origin(id); !ok {
		return nil, nil
	}
	if maps == nil {
		return p, nil
	}
	for _, of := range []struct {
		from string
		to   any
	}{{guardMapShG_tasks, &p.kernel}, {givenMaps[0], &p.given[0]}, {givenMaps[1], &p.given[1]}} {
		if err := maps[of.from].Lookup(&p.key, of.to); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, err
		}
	}
	return p, nil
}

// forgetEnded removes the state of processes that have ended. The programs do that, too, but not while they write
// to the same map on the same CPU, and not for state that was given to a process while it ended.
func forgetEnded(maps map[string]*ebpf.Map) error {
	var errs []error
	for _, name := range []string{guardMapShG_tasks, givenMaps[0], givenMaps[1]} {
		var process guardGuardProcess
		var value []byte
		var ended []guardGuardProcess
		entries := maps[name].Iterate()
		for entries.Next(&process, &value) {
			if _, now, ok := origin(int(process.Id)); !ok || now != process {
				ended = append(ended, process)
			}
		}
		errs = append(errs, entries.Err())
		for _, process := range ended {
			if err := maps[name].Delete(&process); !errors.Is(err, ebpf.ErrKeyNotExist) {
				errs = append(errs, err)
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("forget processes that have ended: %w", err)
	}
	return nil
}

// ancestorsMax limits the search for trust upwards.
const ancestorsMax = 64

// standing returns a process's standing by the policy. For a rule that trusts the same programs as one in force, the programs
// know which processes are trusted, and which lost the trust. For other rules /proc has to do.
func (l *labeler) standing(id int, all map[int]*running, depth int) standing {
	if known, ok := l.standings[id]; ok {
		return known
	}
	p := all[id]
	of := l.marks[p.exe].and(l.pids[id])
	want := standing{of.trusts, of.guards}
	if up := all[p.parent]; up != nil && depth < ancestorsMax && !nameless(id) {
		want.trusts |= l.standing(p.parent, all, depth+1).trusts & l.children &^ of.interprets
	}
	if want.trusts != 0 && (traced(id) || !plainEnvironment(id)) {
		want.trusts = 0
	}
	for now, before := range l.keeps {
		want.trusts &^= 1 << now
		if p.has(l.present).trusts>>before&1 == 1 {
			want.trusts |= 1 << now
		}
	}
	l.standings[id] = want
	return want
}

// has returns a process's standing in a generation.
func (p *running) has(generation uint64) (s standing) {
	side := generation & 1
	if p.kernel.Generations[side] == generation {
		s = standing{p.kernel.Trusts[side], p.kernel.Guards[side]}
	}
	if p.given[side].Generation == generation {
		s.trusts |= p.given[side].Trusts
		s.guards |= p.given[side].Guards
	}
	return s
}

// origin returns the parent of a process, or the process that has adopted it, and when the process began (proc_pid_stat(5)).
func origin(id int) (parent int, process guardGuardProcess, ok bool) {
	fields := stat(id)
	if len(fields) < 21 {
		return 0, process, false
	}
	parent, err1 := strconv.Atoi(fields[2])
	start, err2 := strconv.ParseUint(fields[20], 10, 64)
	return parent, guardGuardProcess{Id: uint64(id), Start: start}, errors.Join(err1, err2) == nil
}

// stat returns the fields of proc_pid_stat(5), from the end of the second one on.
func stat(id int) []string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", id))
	return strings.Fields(string(text[max(0, bytes.LastIndexByte(text, ')')):]))
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
		if executable(id) == (inode{}) {
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
	fields := stat(id)
	if len(fields) < 50 || fields[25] == "0" {
		return 0, false
	}
	start, err1 := strconv.ParseUint(fields[48], 10, 64)
	end, err2 := strconv.ParseUint(fields[49], 10, 64)
	return end - start, errors.Join(err1, err2) == nil && start <= end && end > 0
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

// executable returns the program that a process runs; zero for a thread of the kernel and for a process that has ended.
func executable(id int) inode {
	var stat unix.Stat_t
	if unix.Stat(fmt.Sprintf("/proc/%d/exe", id), &stat) != nil {
		return inode{}
	}
	return inode{stat.Dev, stat.Ino}
}

func traced(id int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", id))
	return err != nil || !strings.Contains(string(text), "\nTracerPid:\t0\n")
}

// Mapping is a protected file that an untrusted process has mapped since before the policy. By the mapping it can still
// do the operations that a rule forbids, because no hook sees a store to memory, or a load from it.
type Mapping struct {
	PID     int    `json:"pid"`
	Program string `json:"program"`
	Path    string `json:"path"`
	Can     string `json:"can"` // policy.Write, or policy.Read
}

// protected is a file with the rules that protect it.
type protected struct {
	name  string // one of its names
	rules uint64
}

// mappings finds these mappings, for the rules that forbid writing and the rules that forbid reading.
func (l *labeler) mappings(writes, reads uint64) (all []Mapping, err error) {
	ids, err := process.All()
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		f, err := os.Open(fmt.Sprintf("/proc/%d/maps", id))
		if err != nil {
			continue // the process has ended
		}
		program, _ := os.Readlink(filepath.Join("/proc", strconv.Itoa(id), "exe"))
		own, trusts := executable(id), l.narrows.here(l.standings[id].trusts, id)
		seen := map[Mapping]bool{}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			at, access := mapped(lines.Text())
			o := l.objects[at]
			add := func(can string, isIt bool, rules uint64) {
				m := Mapping{id, program, o.name, can}
				if isIt && o.rules&rules&^trusts != 0 && !seen[m] {
					seen[m] = true
					all = append(all, m)
				}
			}
			add(policy.Write, access.write || access.shared && o.rules != 0 && isFillable(id, lines.Text(), o.name), writes)
			add(policy.Read, access.read && at != own, reads) // a process that may execute a file reads it
		}
		_ = f.Close()
	}
	return all, nil
}

// isFillable reports whether a process can fill holes of a file by a mapping that it may only read: userfaultfd(2) does that on tmpfs, without a hook,
// if the file was opened to be written. The mapping is a line of /proc/PID/maps; its link in map_files has the modes of that opening.
func isFillable(id int, line, path string) bool {
	var fs unix.Statfs_t
	if unix.Statfs(path, &fs) != nil || fs.Type != unix.TMPFS_MAGIC {
		return false
	}
	span, _, _ := strings.Cut(line, " ")
	info, err := os.Lstat(filepath.Join("/proc", strconv.Itoa(id), "map_files", span))
	return err == nil && info.Mode().Perm()&0o200 != 0
}

// access is the use of a file by a mapping.
type access struct{ read, write, shared bool }

// mapped returns the file of a line of /proc/PID/maps (proc_pid_maps(5)); zero: there is none.
func mapped(line string) (inode, access) {
	fields := strings.Fields(line)
	if len(fields) < 5 || len(fields[1]) != 4 {
		return inode{}, access{}
	}
	major, minor, ok := strings.Cut(fields[3], ":")
	high, err1 := strconv.ParseUint(major, 16, 32)
	low, err2 := strconv.ParseUint(minor, 16, 32)
	number, err3 := strconv.ParseUint(fields[4], 10, 64)
	if !ok || errors.Join(err1, err2, err3) != nil || number == 0 {
		return inode{}, access{}
	}
	may := fields[1]
	return inode{unix.Mkdev(uint32(high), uint32(low)), number}, access{may[:3] != "---", may[1] == 'w' && may[3] == 's', may[3] == 's'}
}
