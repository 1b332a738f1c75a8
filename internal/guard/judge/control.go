package judge

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// controlFile is a file of a cgroup, as bpf/guard/control.h sees it.
type controlFile struct {
	cgroup string // as /proc/PID/cgroup names it
	name   string
}

// controlAt returns the cgroup and the name of the file at a path; false: it is no file of a cgroup in the second hierarchy.
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

// ends are the files that also end or stop the processes of all cgroups below theirs.
var ends = []string{"cgroup.kill", "cgroup.freeze", "memory.max"}

// about returns, by operation, the rules that can forbid it: kill has the rules whose cgroup is the file's or above it, and for some files also the
// rules whose cgroup is below it; move has only the latter.
func (c controlFile) about(groups *Scopes) map[string]uint64 {
	var inside, above uint64
	for i := range groups {
		own := groups[i].Cgroup
		switch {
		case own == "":
		case c.cgroup == own || strings.HasPrefix(c.cgroup, own+"/"):
			inside |= 1 << i
		case strings.HasPrefix(own, strings.TrimSuffix(c.cgroup, "/")+"/"):
			above |= 1 << i
		}
	}
	all := map[string]uint64{policy.Kill: inside}
	if strings.HasSuffix(c.name, ".pressure") && c.name != "cgroup.pressure" {
		all[policy.Kill] = 0
	}
	if slices.Contains(ends, c.name) {
		all[policy.Kill] |= above
	}
	if c.name == "cgroup.procs" {
		all[policy.Move] = above
	}
	return all
}

// controlAnswers returns the answers about a file of a cgroup: kill means writing to it, and move means a move of a
// process through its cgroup. free are the rules that protect the process: they do not forbid it these operations.
func (b *Book) controlAnswers(about map[string]uint64, free uint64, has Standing) (all []Answer) {
	for _, word := range []string{policy.Kill, policy.Move} {
		if rules, is := about[word]; is {
			all = append(all, b.Answer(word, rules&^free, has))
		}
	}
	return all
}
