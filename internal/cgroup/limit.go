package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// period is the time of which a limit is a share. The kernel's own default (Documentation/admin-guide/cgroup-v2.rst,
// cpu.max).
const period = 100 * time.Millisecond

// quotaMin is the least quota that the kernel accepts (min_cfs_quota_period of kernel/sched/core.c): 1 % of the period.
const quotaMin = time.Millisecond

// CPULimit is a cgroup of this process's own, which bounds the CPU time of all its threads together.
type CPULimit struct {
	Folder string
	home   string // the cgroup that the process came from
	file   string // that has the limit
	limit  string // the text of file while the limit holds
	free   string // the text of file that lifts the limit
	stat   string
}

// LimitCPU moves this process into a cgroup of a name, of the hierarchy that has the controller cpu, with a limit in
// percent of one CPU, at least 1. In the second hierarchy it is below the process's own cgroup; where other processes
// are in that one too, it is below the root. The error says why no limit is possible; the process is then in its old
// cgroup.
func LimitCPU(name string, percent float64) (*CPULimit, error) {
	quota := max(time.Duration(percent/100*float64(period)), quotaMin)
	var errs []error
	for _, h := range cpuHierarchies() {
		home, err := homeIn(h)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, parent := range h.parents(home) {
			l := h.limitIn(filepath.Join(parent, name), quota)
			l.home = home
			if err := l.enter(h, parent); err != nil {
				errs = append(errs, err)
				continue
			}
			return l, nil
		}
	}
	if len(errs) == 0 {
		errs = append(errs, errors.New("no cgroup hierarchy with the controller cpu is mounted"))
	}
	return nil, fmt.Errorf("limit the CPU of this process: %w", errors.Join(errs...))
}

// hierarchy is one that has the controller cpu.
type hierarchy struct {
	root     string
	isSecond bool
}

// cpuHierarchies are the mounted hierarchies. A controller is in one hierarchy at most.
func cpuHierarchies() (all []hierarchy) {
	for _, m := range mounts() {
		if m.kind == "cgroup" {
			if hasWord(m.options, "cpu", ",") {
				all = append(all, hierarchy{m.root, false})
			}
			continue
		}
		if controllers, err := os.ReadFile(filepath.Join(m.root, "cgroup.controllers")); err == nil && hasWord(string(controllers), "cpu", " ") {
			all = append(all, hierarchy{m.root, true})
		}
	}
	return all
}

func hasWord(text, word, between string) bool {
	return slices.Contains(strings.Split(strings.TrimSpace(text), between), word)
}

// homeIn is the folder of this process (cgroups(7), /proc/PID/cgroup).
func homeIn(h hierarchy) (string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("look for the cgroup of this process: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || h.isSecond != (parts[0] == "0" && parts[1] == "") || !h.isSecond && !hasWord(parts[1], "cpu", ",") {
			continue
		}
		home := filepath.Join(h.root, parts[2])
		if _, err := os.Stat(filepath.Join(home, "cgroup.procs")); err != nil {
			return "", fmt.Errorf("look for the cgroup of this process: %w; it is not below %s as that is mounted here", err, h.root)
		}
		return home, nil
	}
	return "", fmt.Errorf("look for the cgroup of this process: it has none in %s", h.root)
}

// parents are the possible folders of the new cgroup, the best first.
func (h hierarchy) parents(home string) []string {
	if home == h.root {
		return []string{home}
	}
	return []string{home, h.root}
}

func (h hierarchy) limitIn(folder string, quota time.Duration) *CPULimit {
	l := &CPULimit{Folder: folder, stat: filepath.Join(folder, "cpu.stat")}
	micros := strconv.FormatInt(quota.Microseconds(), 10)
	if h.isSecond {
		l.file, l.limit, l.free = filepath.Join(folder, "cpu.max"), fmt.Sprintf("%s %d", micros, period.Microseconds()), fmt.Sprintf("max %d", period.Microseconds())
	} else {
		l.file, l.limit, l.free = filepath.Join(folder, "cpu.cfs_quota_us"), micros, "-1"
	}
	return l
}

// enter makes the cgroup and moves the process into it. In the second hierarchy the process has to have left the parent before that hands
// the controller down.
func (l *CPULimit) enter(h hierarchy, parent string) (err error) {
	if err := os.Mkdir(l.Folder, 0o755); err != nil && !errors.Is(err, fs.ErrExist) { // one that a process left which was killed
		return fmt.Errorf("make a cgroup: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.leave())
		}
	}()
	if !h.isSecond {
		if err := write(filepath.Join(l.Folder, "cpu.cfs_period_us"), strconv.FormatInt(period.Microseconds(), 10)); err != nil {
			return err
		}
		if err := l.Restore(); err != nil {
			return err
		}
		return move(l.Folder)
	}
	if err := move(l.Folder); err != nil {
		return err
	}
	control := filepath.Join(parent, "cgroup.subtree_control")
	have, err := os.ReadFile(control)
	if err == nil && !hasWord(string(have), "cpu", " ") {
		err = write(control, "+cpu")
	}
	if err != nil {
		return fmt.Errorf("enable the controller cpu in the cgroup: %w", err)
	}
	return l.Restore()
}

// File is the path of the file with the limit, and its text while the limit holds.
func (l *CPULimit) File() (path, limit string) { return l.file, l.limit }

// Lift removes the limit until Restore.
func (l *CPULimit) Lift() error { return write(l.file, l.free) }

// Restore sets the limit again.
func (l *CPULimit) Restore() error { return write(l.file, l.limit) }

// Throttled is the number of periods in which the process had to wait (nr_throttled of cpu.stat).
func (l *CPULimit) Throttled() (uint64, error) {
	text, err := os.ReadFile(l.stat)
	if err != nil {
		return 0, fmt.Errorf("read how often the limit of CPU took effect: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		if number, is := strings.CutPrefix(line, "nr_throttled "); is {
			return strconv.ParseUint(strings.TrimSpace(number), 10, 64)
		}
	}
	return 0, fmt.Errorf("read how often the limit of CPU took effect: %s has no nr_throttled", l.stat)
}

// Close moves the process back to its old cgroup, and removes the new one.
func (l *CPULimit) Close() error { return l.leave() }

func (l *CPULimit) leave() error {
	if err := move(l.home); err != nil {
		return err
	}
	if err := os.Remove(l.Folder); err != nil {
		return fmt.Errorf("remove the cgroup: %w", err)
	}
	return nil
}

// move moves this process with all its threads.
func move(folder string) error {
	if err := write(filepath.Join(folder, "cgroup.procs"), strconv.Itoa(os.Getpid())); err != nil {
		return fmt.Errorf("move this process into a cgroup: %w", err)
	}
	return nil
}

// write writes to a file of the kernel's, which is there.
func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// LeftLimits are the cgroups of a name that LimitCPU makes and a killed process left; one that still has a process is
// among them. Cgroups below another process's own cgroup went with that one.
func LeftLimits(name string) (all []string) {
	for _, h := range cpuHierarchies() {
		parents := []string{h.root}
		if home, err := homeIn(h); err == nil {
			parents = h.parents(home)
		}
		for _, parent := range parents {
			if info, err := os.Stat(filepath.Join(parent, name)); err == nil && info.IsDir() {
				all = append(all, filepath.Join(parent, name))
			}
		}
	}
	return all
}
