package demo_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/cli"
	guard "github.com/shunt-lb/shunt/internal/guard/command"
	"github.com/shunt-lb/shunt/internal/guard/demo"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	lb "github.com/shunt-lb/shunt/internal/lb/command"
	"github.com/shunt-lb/shunt/internal/story/storytest"
)

// This test's binary is shunt too, so that the demo can be tried where there is no Go: in test/kernel's machines.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "demo" || os.Args[1] == "guard") {
		os.Exit(cli.Main(lb.Line(nil, guard.Product), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// command is `shunt demo guard`, interrupted if it takes too long.
func command(t *testing.T, temporary string, arguments ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 6*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self, append([]string{"demo", "guard"}, arguments...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+temporary)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	return cmd
}

// enforcing are the arguments for a kernel that lets BPF programs decide: this one, or one that test/kernel has
// unpacked.
func enforcing(t *testing.T) (arguments []string) {
	t.Helper()
	if protect.Enforces() == nil {
		return nil
	}
	images, err := filepath.Glob("../../../.tools/kernels/*/boot/vmlinuz-*")
	if err != nil {
		t.Fatal(err)
	}
	if len(images) == 0 || os.Getenv("SHUNT_SOAK") == "" {
		t.Skip("this kernel lets no BPF program decide, and another one is emulated with SHUNT_SOAK=1 only, if go run ./test/kernel has fetched it")
	}
	return []string{"--kernel", images[len(images)-1]}
}

// The story, as a reader gets it: every claim is true, and nothing is left.
func TestGuardStory(t *testing.T) {
	temporary := t.TempDir()
	cmd := command(t, temporary, append(enforcing(t), "-o", "json")...)
	var out, text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &text
	if err := cmd.Run(); err != nil {
		t.Fatalf("the demo failed: %v\n%s", err, &text)
	}
	t.Logf("%s", &text)
	var facts demo.Facts
	storytest.Decode(t, out.Bytes(), &facts)
	if !facts.OK || len(facts.Claims) != 22 || facts.Claims.Untrue() != 0 || facts.Kernel == "" {
		t.Errorf("ok %v, %d claims, on %s", facts.OK, len(facts.Claims), facts.Kernel)
	}
	if len(facts.Attempts) != 6 {
		t.Errorf("%d refusals were told, want 6: %v", len(facts.Attempts), facts.Attempts)
	}
	if left, _ := os.ReadDir(temporary); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Ctrl-C: nothing is left, and nothing of the folder is protected any more.
func TestGuardInterrupted(t *testing.T) {
	arguments := enforcing(t)
	for _, at := range []string{"A virtual machine's kernel does|This kernel does", "the folder is protected"} {
		temporary := t.TempDir()
		storytest.Interrupt(t, command(t, temporary, arguments...), at)
		if left, _ := os.ReadDir(temporary); len(left) > 0 {
			t.Errorf("interrupted at %q, left behind: %v", at, left)
		}
	}
}

// A machine that ends without a story is an untrue claim, with its last words.
func TestGuardBrokenMachine(t *testing.T) {
	if os.Getenv("SHUNT_KERNEL_TEST") != "" {
		return // a machine has no emulator
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip(err)
	}
	temporary := t.TempDir()
	image := filepath.Join(t.TempDir(), "vmlinuz")
	if err := os.WriteFile(image, []byte("no kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := command(t, temporary, "--kernel", image).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "1 of 1 claims were NOT TRUE") || !strings.Contains(string(out), "it ended in the middle") ||
		!strings.Contains(string(out), "Its last output:\nqemu") {
		t.Errorf("%v\n%s", err, out)
	}
	if left, _ := os.ReadDir(temporary); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
