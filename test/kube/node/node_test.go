package node_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/test/kube/node"
)

// TestFolderThatANodeHides: its containerd would not find its own files.
func TestFolderThatANodeHides(t *testing.T) {
	err := node.Run(context.Background(), node.Options{Folder: "/var/lib/nobody"})
	if err == nil || !strings.Contains(err.Error(), "/var/lib/nobody is below /var/lib") {
		t.Errorf("Run returned %v", err)
	}
}

func TestInitIsProcessOne(t *testing.T) {
	if err := node.Init("{}"); err == nil || !strings.Contains(err.Error(), "kube node") {
		t.Errorf("Init returned %v", err)
	}
}

func TestRemoveCgroup(t *testing.T) {
	root := t.TempDir() // removed in the same way as a cgroup
	path := filepath.Join(root, "n1")
	if err := os.MkdirAll(filepath.Join(path, "pods", "pod"), 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time it does not exist
		if err := node.RemoveCgroup(path); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(root); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
