// Package storytest runs demos in tests, in a process of their own as a reader does, and reads the story meanwhile.
// Only tests import it.
package storytest

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
)

// name is the name of the test's binary where it runs as shunt.
const name = "shunt"

// folder has the copy; empty: no test has asked for it.
var folder string

// copied is the test's binary under that name, once for all tests of a package; its folder is closed to others.
var copied = sync.OnceValues(func() (path string, err error) {
	if folder, err = os.MkdirTemp("", "shunt-demo-test"); err != nil {
		return "", err
	}
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return "", err
	}
	path = filepath.Join(folder, name)
	return path, os.WriteFile(path, text, 0o755)
})

// Main is for TestMain: it runs the tests, and removes the copy of the binary if a test has used one. That copy is shunt with this command
// line, which has the products that the demo needs: so the tests need no compiler, and can rest while the code of
// other products changes.
func Main(m *testing.M, line func(cli.Streams) *cobra.Command) {
	if self, err := os.Executable(); err == nil && filepath.Base(self) == name {
		os.Exit(cli.Main(line, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	code := m.Run()
	if folder != "" {
		_ = os.RemoveAll(folder)
	}
	os.Exit(code)
}

// Binary is the path of shunt.
func Binary(t *testing.T) string {
	t.Helper()
	path, err := copied()
	if err != nil {
		t.Fatalf("copy the test's binary: %v", err)
	}
	return path
}

// Command runs shunt, and interrupts it when it takes too long.
func Command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, Binary(t), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	return cmd
}

// Decode reads a demo's output with -o json; facts must know each name.
func Decode(t *testing.T, out []byte, facts any) {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(out))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(facts); err != nil {
		t.Fatalf("standard output is not one JSON document of facts: %v\n%s", err, out)
	}
}

// Interrupt starts a demo, and interrupts it as Ctrl-C does once its output has matched the patterns, one after the
// other. The demo has to end with 130, and no claim may be untrue for it.
func Interrupt(t *testing.T, cmd *exec.Cmd, at ...string) *Transcript {
	t.Helper()
	text := NewTranscript()
	cmd.Stdout, cmd.Stderr = text, text
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range at {
		text.Await(t, pattern)
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 130 {
		t.Errorf("ended with %v; want exit code 130\n%s", err, text)
	}
	if strings.Contains(text.String(), "NOT TRUE") {
		t.Errorf("an interruption made claims untrue:\n%s", text)
	}
	return text
}

// NeedsRoot skips for others.
func NeedsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads programs")
	}
}

// Transcript keeps a demo's output, and wakes the test that waits for a line.
type Transcript struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{}
}

// NewTranscript is empty.
func NewTranscript() *Transcript { return &Transcript{more: make(chan struct{}, 1)} }

func (w *Transcript) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case w.more <- struct{}{}:
	default:
	}
	return w.text.Write(p)
}

func (w *Transcript) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// Await waits until the demo's output matches the pattern, and returns the last group, or the whole match.
func (w *Transcript) Await(t *testing.T, pattern string) string {
	t.Helper()
	find := regexp.MustCompile(pattern)
	deadline := time.After(5 * time.Minute) // an emulated machine takes more than one
	for {
		if m := find.FindStringSubmatch(w.String()); m != nil {
			return m[len(m)-1]
		}
		select {
		case <-w.more:
		case <-deadline:
			t.Fatalf("the demo did not write %q:\n%s", pattern, w)
		}
	}
}
