package demo_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	lb "github.com/shunt-lb/shunt/internal/lb/command"
	"github.com/shunt-lb/shunt/internal/story/storytest"
	"github.com/shunt-lb/shunt/internal/udp/command"
	"github.com/shunt-lb/shunt/internal/udp/demo"
)

// secondsMax is the longest time that the demo promises to take.
const secondsMax = 20

func TestMain(m *testing.M) { storytest.Main(m, lb.Line(nil, command.Product)) }

// start runs `shunt demo udp`; its story is its standard error and, but for JSON, output.
func start(t *testing.T, args ...string) (cmd *exec.Cmd, out *bytes.Buffer, text *storytest.Transcript) {
	t.Helper()
	storytest.NeedsRoot(t)
	cmd = storytest.Command(t, append([]string{"demo", "udp"}, args...)...)
	text, out = storytest.NewTranscript(), &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = text, text
	if len(args) > 0 {
		cmd.Stdout = out
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out, text
}

// nothingLeft expects the demo's namespaces and its worker to be gone.
func nothingLeft(t *testing.T, text *storytest.Transcript) {
	t.Helper()
	id := text.Await(t, `shunt-([a-z0-9]+)-client`)
	if left, _ := filepath.Glob("/run/netns/shunt-" + id + "-*"); len(left) > 0 {
		t.Errorf("left behind: %s", strings.Join(left, ", "))
	}
	if m := regexp.MustCompile(`process (\d+) maps`).FindStringSubmatch(text.String()); m != nil {
		if line, err := os.ReadFile("/proc/" + m[1] + "/cmdline"); err == nil && strings.Contains(string(line), "udp-worker") {
			t.Errorf("the worker, process %s, is left", m[1])
		}
	}
}

func TestFacts(t *testing.T) {
	cmd, out, text := start(t, "-o", "json")
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the demo failed: %v\n%s", err, text)
	}
	nothingLeft(t, text)
	var facts demo.Facts
	storytest.Decode(t, out.Bytes(), &facts)
	if !facts.OK || len(facts.Claims) < 10 || facts.Claims.Untrue() != 0 || facts.Seconds > secondsMax {
		t.Errorf("ok %v, %d claims in %.1f s:\n%s", facts.OK, len(facts.Claims), facts.Seconds, text)
	}
	if w := facts.Worker; w.UID != 65534 || w.Collections != 0 || w.Delivered == 0 || w.Kicks == 0 {
		t.Errorf("the worker: %+v", w)
	}
	if len(facts.Ways) != 4 || len(facts.Queues) != 2 || facts.Mode != "copy" || facts.Reason == "" {
		t.Errorf("%d ways, %d queues, mode %s (%s)", len(facts.Ways), len(facts.Queues), facts.Mode, facts.Reason)
	}
	for _, w := range facts.Ways {
		if len(w.Rounds) == 0 || len(w.Rounds) > 5 || w.P50 <= 0 || w.P99 < w.P50 || w.P999 < w.P99 || w.PerSecond <= 0 {
			t.Errorf("%+v", w)
		}
	}
}

// Ctrl-C at any time: everything is removed, and no claim is untrue for it.
func TestInterrupted(t *testing.T) {
	storytest.NeedsRoot(t)
	for _, at := range []string{"── The program", "── A worker", "── Round trips"} {
		t.Run(at, func(t *testing.T) {
			nothingLeft(t, storytest.Interrupt(t, storytest.Command(t, "demo", "udp"), at))
		})
	}
}

// A demo whose worker dies says so, with exit code 1, and cleans up.
func TestUntrueClaim(t *testing.T) {
	cmd, _, text := start(t)
	pid, err := strconv.Atoi(text.Await(t, `process (\d+) maps`))
	if err != nil {
		t.Fatal(err)
	}
	text.Await(t, "── Round trips")
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 1 || !strings.Contains(text.String(), "✘ NOT TRUE: measure ") ||
		!strings.Contains(text.String(), "claims were NOT TRUE") {
		t.Errorf("ended with %v; want exit code 1\n%s", err, text)
	}
	nothingLeft(t, text)
}

func TestNotRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become somebody else")
	}
	cmd := exec.Command("/proc/self/fd/3", "demo", "udp")
	file, err := os.Open(storytest.Binary(t)) // its folder is closed to nobody
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close() //nolint:errcheck // only read
	cmd.ExtraFiles = []*os.File{file}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "sudo ") {
		t.Errorf("without root: %v\n%s", err, out)
	}
}
