package judge

import (
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

func TestControlIn(t *testing.T) {
	const mounts = "24 30 0:22 / /sys rw - sysfs sysfs rw\n" +
		"31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n" +
		"55 30 0:27 /system.slice/app.service /mnt/own rw - cgroup2 cgroup2 rw\n" +
		"56 30 0:28 / /mnt/first rw - cgroup cgroup rw,freezer\n"
	for path, want := range map[string]controlFile{
		"/sys/fs/cgroup/cgroup.procs":                {"/", "cgroup.procs"},
		"/sys/fs/cgroup/system.slice/a/cgroup.kill":  {"/system.slice/a", "cgroup.kill"},
		"/mnt/own/cgroup.freeze":                     {"/system.slice/app.service", "cgroup.freeze"},
		"/mnt/own/below/cgroup.freeze":               {"/system.slice/app.service/below", "cgroup.freeze"},
		"/mnt/first/a/freezer.state":                 {},
		"/sys/fs/cgroup-of-another-kind/cgroup.kill": {},
	} {
		if c, is := controlIn(mounts, path); c != want || is != (want != controlFile{}) {
			t.Errorf("%s: %+v %v, want %+v", path, c, is, want)
		}
	}
	if _, is := controlAt("/proc/self/status"); is {
		t.Error("a file of /proc is one of a cgroup")
	}
}

func TestRulesAboutAControlFile(t *testing.T) {
	group := func(path string) Scope {
		n, err := scopeOfProcesses(policy.Rule{Cgroup: path})
		if err != nil {
			t.Skip(err)
		}
		return n
	}
	groups := Scopes{0: group("/a/b"), 1: group("/a"), 2: group("/ab")}
	for _, c := range []struct {
		file       controlFile
		kill, move uint64
	}{
		{controlFile{"/a/b", "cgroup.kill"}, 1 | 2, 0}, {controlFile{"/a/b/c", "cgroup.procs"}, 1 | 2, 0}, {controlFile{"/a", "cgroup.kill"}, 1 | 2, 0}, {controlFile{"/a", "cpu.max"}, 2, 0},
		{controlFile{"/a", "cgroup.procs"}, 2, 1}, {controlFile{"/", "cgroup.procs"}, 0, 1 | 2 | 4}, {controlFile{"/", "memory.max"}, 1 | 2 | 4, 0}, {controlFile{"/a/b", "memory.pressure"}, 0, 0},
		{controlFile{"/a/b", "cgroup.pressure"}, 1 | 2, 0}, {controlFile{"/abc", "cgroup.kill"}, 0, 0},
	} {
		if got := c.file.about(&groups); got[policy.Kill] != c.kill || got[policy.Move] != c.move {
			t.Errorf("%+v: %v", c.file, got)
		}
	}
}
