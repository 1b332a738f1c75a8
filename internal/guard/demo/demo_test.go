package demo_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/demo"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/story/storytest"
)

func TestMain(m *testing.M) { storytest.Main(m) }

// needsKernel skips where neither this kernel nor one that test/kernel has unpacked lets BPF programs decide.
func needsKernel(t *testing.T) (arguments []string) {
	t.Helper()
	if protect.Enforces() == nil {
		return nil
	}
	images, err := filepath.Glob("../../../.tools/kernels/*/boot/vmlinuz-*")
	if err != nil || len(images) == 0 {
		t.Skip("no kernel that lets BPF programs decide; make test-kernels fetches one")
	}
	return []string{"--kernel", images[len(images)-1]}
}

// The story, as a reader gets it: every claim is true, and nothing is left.
func TestFacts(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a machine")
	}
	cmd := storytest.Command(t, append([]string{"demo", "guard", "-o", "json"}, needsKernel(t)...)...)
	temporary := t.TempDir()
	cmd.Env = append(os.Environ(), "TMPDIR="+temporary)
	var out, text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &text
	if err := cmd.Run(); err != nil {
		t.Fatalf("the demo failed: %v\n%s", err, &text)
	}
	var facts demo.Facts
	storytest.Decode(t, out.Bytes(), &facts)
	if !facts.OK || len(facts.Claims) < 13 || facts.Claims.Untrue() != 0 || facts.Kernel == "" {
		t.Errorf("ok %v, %d claims on %s:\n%s", facts.OK, len(facts.Claims), facts.Kernel, &text)
	}
	if len(facts.Attempts) != 5 {
		t.Errorf("%d refusals were told, want 5: %v", len(facts.Attempts), facts.Attempts)
	}
	if left, _ := os.ReadDir(temporary); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A machine that ends without a story is an untrue claim, with its last words.
func TestBrokenMachine(t *testing.T) {
	if protect.Enforces() != nil {
		needsKernel(t) // and with it the emulator
	}
	image := filepath.Join(t.TempDir(), "vmlinuz")
	if err := os.WriteFile(image, []byte("no kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := storytest.Command(t, "demo", "guard", "--kernel", image).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "1 of 1 claims were NOT TRUE") || !strings.Contains(string(out), "it ended in the middle") {
		t.Errorf("%v\n%s", err, out)
	}
}
