package protect

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/process"
)

// Mapping is a protected file that an untrusted process has mapped since before the policy. By the mapping it can still
// do the operations that a rule forbids, because no hook sees a store to memory, or a load from it.
type Mapping struct {
	PID     int    `json:"pid"`
	Program string `json:"program"`
	Path    string `json:"path"`
	Can     string `json:"can"` // policy.Write, or policy.Read
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
		own, trusts := judge.ExecutableOf(id), l.reading.Scopes.Here(l.standings.Of(id).Trusts, id)
		seen := map[Mapping]bool{}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			at, access := mapped(lines.Text())
			o := l.reading.Files[at]
			add := func(can string, isIt bool, rules uint64) {
				m := Mapping{id, program, o.Name, can}
				if isIt && o.Rules&rules&^trusts != 0 && !seen[m] {
					seen[m] = true
					all = append(all, m)
				}
			}
			add(policy.Write, access.write || access.shared && o.Rules != 0 && isFillable(id, lines.Text(), o.Name), writes)
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
func mapped(line string) (judge.Inode, access) {
	fields := strings.Fields(line)
	if len(fields) < 5 || len(fields[1]) != 4 {
		return judge.Inode{}, access{}
	}
	major, minor, ok := strings.Cut(fields[3], ":")
	high, err1 := strconv.ParseUint(major, 16, 32)
	low, err2 := strconv.ParseUint(minor, 16, 32)
	number, err3 := strconv.ParseUint(fields[4], 10, 64)
	if !ok || errors.Join(err1, err2, err3) != nil || number == 0 {
		return judge.Inode{}, access{}
	}
	may := fields[1]
	return judge.Inode{Device: unix.Mkdev(uint32(high), uint32(low)), Number: number}, access{may[:3] != "---", may[1] == 'w' && may[3] == 's', may[3] == 's'}
}
