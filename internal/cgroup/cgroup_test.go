package cgroup

import (
	"strings"
	"testing"
)

func TestIDAndPaths(t *testing.T) {
	if _, err := ID("/proc"); err == nil || !strings.Contains(err.Error(), "/proc") {
		t.Errorf("a folder that is no cgroup: %v", err)
	}
	if _, err := Level("/proc"); err == nil || !strings.Contains(err.Error(), "/proc is no folder") {
		t.Errorf("the level of a folder that is no cgroup: %v", err)
	}
	root := Root()
	if root == "" {
		t.Skip("the second hierarchy is not mounted")
	}
	id, err := ID(root)
	if err != nil {
		t.Fatal(err)
	}
	if path, ok := Paths()[id]; !ok || path != "" {
		t.Errorf("the root's number %d is of %q, %v", id, path, ok)
	}
	if level, err := Level(root); err != nil || level != 0 {
		t.Errorf("the root is at level %d, %v", level, err)
	}
}

func TestUnescape(t *testing.T) {
	if got := Unescape(`/a\040b\\x`); got != `/a b\\x` {
		t.Errorf("got %q", got)
	}
}
