package cluster

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestImageNeedsStaticPrograms: other programs would fail with "no such file" in a pod.
func TestImageNeedsStaticPrograms(t *testing.T) {
	folder := t.TempDir()
	text := filepath.Join(folder, "text")
	ok(t, os.WriteFile(text, []byte(strings.Repeat("no program", 20)), 0o755))
	for program, says := range map[string]string{"/bin/sh": "linked dynamically", text: "bad magic", filepath.Join(folder, "none"): "no such file"} {
		if _, err := inRoot(program); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", program, err, says)
		}
	}
}

// TestImageWithLibraries: with nothing but the image as its root, a program runs.
func TestImageWithLibraries(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("another root needs root: run the tests with sudo")
	}
	files := map[string]string{}
	ok(t, addWithLibraries(files, "bash", "seq"))
	layer := must(newLayer(files))(t)
	root := t.TempDir()
	unpack := exec.Command("tar", "-x", "-C", root)
	unpack.Stdin = bytes.NewReader(layer)
	ok(t, unpack.Run())
	inside := exec.Command("/bin/bash", "-c", "seq 1 3")
	inside.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	inside.Dir = "/"
	inside.Env = []string{"PATH=/bin"}
	if text, err := inside.CombinedOutput(); err != nil || string(text) != "1\n2\n3\n" {
		t.Errorf("%s, %v", text, err)
	}
	if err := addWithLibraries(files, "no-such-program"); err == nil || !strings.Contains(err.Error(), "no-such-program") {
		t.Errorf("a program that there is not: %v", err)
	}
}
