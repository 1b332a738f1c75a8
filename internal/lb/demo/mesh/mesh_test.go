package mesh_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/command"
	"github.com/shunt-lb/shunt/internal/lb/demo/mesh"
	"github.com/shunt-lb/shunt/internal/story/storytest"
)

func TestMain(m *testing.M) { storytest.Main(m, command.Alone) }

// nothingLeft expects a demo's namespaces, pins, processes and files to be gone.
func nothingLeft(t *testing.T, text *storytest.Transcript) {
	t.Helper()
	id := text.Await(t, `shunt-([a-z0-9]+)-client`)
	for _, pattern := range []string{"/run/netns/shunt-" + id + "-*", "/sys/fs/bpf/shunt/mesh-" + id + "-*", "/run/shunt/mesh-" + id + "-*", os.TempDir() + "/shunt-" + id + "-*"} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left behind: %s", strings.Join(left, ", "))
		}
	}
	processes, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range processes {
		if line, err := os.ReadFile(path); err == nil && strings.Contains(string(line), "mesh-"+id+"-") {
			t.Errorf("left behind: %s, %s", path, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
}

func TestFacts(t *testing.T) {
	storytest.NeedsRoot(t)
	cmd := storytest.Command(t, "demo", "mesh", "-o", "json")
	text := storytest.NewTranscript()
	cmd.Stderr = text
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("the demo failed: %v\n%s", err, text)
	}
	nothingLeft(t, text)
	var f mesh.Facts
	storytest.Decode(t, out, &f)
	if !f.OK || len(f.Claims) < 20 || len(f.Rounds) != 9 {
		t.Fatalf("ok is %t, with %d claims and %d rounds:\n%s", f.OK, len(f.Claims), len(f.Rounds), text)
	}
	t.Logf("it took %.1f s", f.Seconds)
	for i, r := range f.Rounds[:8] {
		if r.Moved != 0 || len(r.Broken) != 0 {
			t.Errorf("round %d: %+v", i, r)
		}
	}
	first, dead := f.Rounds[7], f.Rounds[8]
	if dead.Moved != 0 || len(dead.Broken) != 1 || dead.Broken["m2"] != first.Served["m2"] || dead.Served["m1"] != first.Served["m1"] || dead.Entered["m2"] != 0 {
		t.Errorf("before m2 died: %+v; after: %+v", first, dead)
	}
}

// Ctrl-C at any time: everything is removed, and no claim becomes untrue because of it.
func TestInterrupted(t *testing.T) {
	storytest.NeedsRoot(t)
	for _, at := range []string{"── One configuration", "── More connections", "── m2 dies"} {
		t.Run(at, func(t *testing.T) {
			nothingLeft(t, storytest.Interrupt(t, storytest.Command(t, "demo", "mesh"), at))
		})
	}
}

// A demo whose machine dies too early says so, with exit code 1, and cleans up.
func TestUntrueClaim(t *testing.T) {
	storytest.NeedsRoot(t)
	cmd, text := storytest.Command(t, "demo", "mesh"), storytest.NewTranscript()
	cmd.Stdout, cmd.Stderr = text, text
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	id := text.Await(t, `shunt-([a-z0-9]+)-client`)
	text.Await(t, "── More connections")
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, path := range processes {
		line, _ := os.ReadFile(path + "/cmdline")
		if !strings.Contains(string(line), "run\x00") || !strings.Contains(string(line), "mesh-"+id+"-m3\x00") {
			continue
		}
		p, err := strconv.Atoi(filepath.Base(path))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(p, syscall.SIGTERM); err != nil { // it detaches: m3 balances no more
			t.Fatal(err)
		}
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 1 || !strings.Contains(text.String(), "✘ NOT TRUE") {
		t.Errorf("ended with %v; want exit code 1\n%s", err, text)
	}
	nothingLeft(t, text)
}
