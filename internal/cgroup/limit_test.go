package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The process is in a cgroup with the limit, lifts it, has it restored, is held up by it, and leaves nothing behind.
func TestLimitCPU(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	before, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("shunt-limit-test-%d", os.Getpid())
	l, err := LimitCPU(name, 10)
	if err != nil {
		if len(cpuHierarchies()) == 0 {
			t.Skip(err)
		}
		t.Fatal(err)
	}
	holds := func(want string) {
		t.Helper()
		path, _ := l.File()
		if text, err := os.ReadFile(path); err != nil || strings.TrimSpace(string(text)) != want {
			t.Errorf("%s has %q, want %q, %v", path, text, want, err)
		}
	}
	_, limit := l.File()
	if first, _, _ := strings.Cut(limit, " "); first != "10000" {
		t.Errorf("the limit is %q, want 10 ms of 100", limit)
	}
	holds(limit)
	if now, err := os.ReadFile("/proc/self/cgroup"); err != nil || !strings.Contains(string(now), "/"+name+"\n") {
		t.Errorf("the process is in %s, %v", now, err)
	}
	if err := l.Lift(); err != nil {
		t.Fatal(err)
	}
	holds(l.free)
	if err := l.Restore(); err != nil {
		t.Fatal(err)
	}
	holds(limit)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if now, err := os.ReadFile("/proc/self/cgroup"); err != nil || string(now) != string(before) {
		t.Errorf("the process is in %s, and was in %s, %v", now, before, err)
	}
	if _, err := os.Stat(l.Folder); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", l.Folder, err)
	}
	if small, err := LimitCPU(name, 0.001); err != nil {
		t.Error(err)
	} else {
		for n := uint64(0); n == 0; { // busy until it is held up: the limit is less than the scheduler gives at once
			if n, err = small.Throttled(); err != nil {
				t.Fatal(err)
			}
		}
		if left := LeftLimits(name); len(left) != 1 || left[0] != small.Folder {
			t.Errorf("there is %v", left)
		}
		if _, limit := small.File(); !strings.HasPrefix(limit, "1000") {
			t.Errorf("the least limit is %q", limit)
		}
		if err := small.Close(); err != nil {
			t.Error(err)
		}
		if left := LeftLimits(name); left != nil {
			t.Errorf("there is %v", left)
		}
	}
}

// A limit that cannot be set leaves the process in its cgroup, and no new cgroup.
func TestLimitThatFails(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	before, _ := os.ReadFile("/proc/self/cgroup")
	if l, err := LimitCPU("no/such/folder", 10); err == nil || !strings.Contains(err.Error(), "limit the CPU of this process") {
		t.Errorf("%+v, %v", l, err)
	}
	if now, _ := os.ReadFile("/proc/self/cgroup"); string(now) != string(before) {
		t.Errorf("the process is in %s, and was in %s", now, before)
	}
	// A folder that is no cgroup, as one whose controller was not handed down.
	dir := t.TempDir()
	for _, h := range []hierarchy{{dir, true}, {dir, false}} {
		l := h.limitIn(filepath.Join(dir, "child"), period)
		l.home = dir
		if err := l.enter(h, dir); err == nil {
			t.Errorf("%+v was entered", l)
		}
	}
}
