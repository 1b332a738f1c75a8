// Package disk has disks for tests.
package disk

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// InMemory makes a loop device of a size in bytes over a file in memory, which lasts until the test ends.
func InMemory(t testing.TB, size int) (device string) {
	t.Helper()
	folder, err := os.MkdirTemp("/dev/shm", "shunt-disk-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	file := filepath.Join(folder, "disk")
	if err := os.WriteFile(file, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--find", "--show", file).Output()
	if err != nil {
		t.Fatalf("make a loop device: %v", err)
	}
	device = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if err := exec.Command("losetup", "--detach", device).Run(); err != nil {
			t.Error(err)
		}
	})
	return device
}
