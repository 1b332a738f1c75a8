package protect

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// controlFile is a file by which the kernel shows a cgroup, as bpf/guard/control.h sees it.
type controlFile struct {
	cgroup string // as /proc/PID/cgroup names it
	name   string
}

// controlAt returns the cgroup of a file; false: it is no file of a cgroup in the second hierarchy.
func controlAt(path string) (c controlFile, is bool) {
	var fs unix.Statfs_t
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || unix.Statfs(path, &fs) != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return c, false
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return c, false
	}
	return controlIn(string(mounts), path)
}

// controlIn is controlAt with the text of /proc/PID/mountinfo (proc_pid_mountinfo(5)).
func controlIn(mounts, path string) (c controlFile, is bool) {
	folder, longest := filepath.Dir(path), ""
	for line := range strings.Lines(mounts) {
		fields := strings.Fields(line)
		end := slices.Index(fields, "-")
		if end < 6 || len(fields) < end+2 || fields[end+1] != "cgroup2" {
			continue
		}
		root, point := fields[3], fields[4]
		below, isBelow := strings.CutPrefix(folder+"/", strings.TrimSuffix(point, "/")+"/")
		if isBelow && len(point) >= len(longest) {
			longest, is = point, true
			c = controlFile{filepath.Join(root, below), filepath.Base(path)}
		}
	}
	return c, is
}

// ends are the files that end or stop the processes of all cgroups below theirs, too.
var ends = []string{"cgroup.kill", "cgroup.freeze", "memory.max"}

// about returns the rules that forbid operations on the file: rules with the cgroup or with one above it, and rules with one below it.
func (c controlFile) about(groups *narrows) map[guardGuardOp]uint64 {
	var inside, above uint64
	for i := range groups {
		own := groups[i].cgroup()
		switch {
		case own == "":
		case c.cgroup == own || strings.HasPrefix(c.cgroup, own+"/"):
			inside |= 1 << i
		case strings.HasPrefix(own, strings.TrimSuffix(c.cgroup, "/")+"/"):
			above |= 1 << i
		}
	}
	all := map[guardGuardOp]uint64{guardGuardOpGUARD_KILL: inside}
	if strings.HasSuffix(c.name, ".pressure") && c.name != "cgroup.pressure" {
		all[guardGuardOpGUARD_KILL] = 0
	}
	if slices.Contains(ends, c.name) {
		all[guardGuardOpGUARD_KILL] |= above
	}
	if c.name == "cgroup.procs" {
		all[guardGuardOpGUARD_MOVE] = above
	}
	return all
}

// controlAnswers returns the answers about a file of a cgroup: kill is to write to it, and move is a process that goes through its cgroup. free are
// the rules that protect the process, which forbid it nothing.
func (b *book) controlAnswers(about map[guardGuardOp]uint64, free uint64, has standing) (all []Answer) {
	for _, word := range []string{policy.Kill, policy.Move} {
		if rules, is := about[operations[word]]; is {
			all = append(all, b.answer(operations[word], rules&^free, has))
		}
	}
	return all
}
