package protect

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// trustRunning trusts the processes that run a trusted program already. Those that begin later are the
// programs' business: so it looks until a look finds nobody new, and a fork of one that was found is trusted.
func (l *labeler) trustRunning(tasks *ebpf.Map) error {
	found := map[int]bool{}
	for grew := true; grew; {
		grew = false
		ids, err := processes()
		if err != nil {
			return err
		}
		for _, id := range ids {
			bits := l.programs[executable(id)]
			if bits == 0 || found[id] {
				continue
			}
			if err := l.trust(tasks, id, bits); err != nil {
				return fmt.Errorf("trust process %d: %w", id, err)
			}
			found[id], grew = true, true
		}
	}
	return nil
}

func (l *labeler) trust(tasks *ebpf.Map, id int, bits uint64) error {
	fd, err := unix.PidfdOpen(id, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	// The descriptor is of the process that has the number now, and what runs another program is not trusted.
	// A debugger does what it likes with a process.
	if l.programs[executable(id)] != bits || traced(id) {
		return nil
	}
	var trust guardGuardTrust
	if err := tasks.Lookup(uint32(fd), &trust); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	trust.Trusts[l.generation&1], trust.Generations[l.generation&1] = bits, l.generation
	if err := tasks.Put(uint32(fd), &trust); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// processes are the numbers of all that run.
func processes() (ids []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list the processes: %w", err)
	}
	for _, e := range entries {
		if id, err := strconv.Atoi(e.Name()); err == nil {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// executable is what a process runs; zero for a thread of the kernel and a process that has ended.
func executable(id int) place {
	var stat unix.Stat_t
	if unix.Stat(fmt.Sprintf("/proc/%d/exe", id), &stat) != nil {
		return place{}
	}
	return place{stat.Dev, stat.Ino}
}

func traced(id int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", id))
	return err != nil || !strings.Contains(string(text), "\nTracerPid:\t0\n")
}

// Mapping is a protected file that a process which is not trusted has mapped, shared and writable, since
// before the policy. No hook sees a store to memory, so it can still change the file.
type Mapping struct {
	PID     int    `json:"pid"`
	Program string `json:"program"`
	Path    string `json:"path"`
}

// mappings finds them.
func (l *labeler) mappings() (all []Mapping, err error) {
	ids, err := processes()
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		if l.programs[executable(id)] != 0 {
			continue
		}
		f, err := os.Open(fmt.Sprintf("/proc/%d/maps", id))
		if err != nil {
			continue // it has ended
		}
		seen := map[place]bool{}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			at, ok := sharedWritable(lines.Text())
			path := l.writes[at]
			if !ok || path == "" || seen[at] {
				continue
			}
			seen[at] = true
			program, _ := os.Readlink(filepath.Join("/proc", strconv.Itoa(id), "exe"))
			all = append(all, Mapping{id, program, path})
		}
		_ = f.Close()
	}
	return all, nil
}

// sharedWritable is the file of a line of /proc/PID/maps (proc_pid_maps(5)), if it can be written through it.
func sharedWritable(line string) (place, bool) {
	fields := strings.Fields(line)
	if len(fields) < 5 || len(fields[1]) != 4 || fields[1][1] != 'w' || fields[1][3] != 's' {
		return place{}, false
	}
	major, minor, ok := strings.Cut(fields[3], ":")
	high, err1 := strconv.ParseUint(major, 16, 32)
	low, err2 := strconv.ParseUint(minor, 16, 32)
	inode, err3 := strconv.ParseUint(fields[4], 10, 64)
	if !ok || errors.Join(err1, err2, err3) != nil {
		return place{}, false
	}
	return place{unix.Mkdev(uint32(high), uint32(low)), inode}, true
}
