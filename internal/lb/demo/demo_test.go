package demo_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/command"
	"github.com/shunt-lb/shunt/internal/lb/demo"
	"github.com/shunt-lb/shunt/internal/story/storytest"
)

// secondsMax is the longest time that the demo promises to take on an idle machine.
const secondsMax = 20

func TestMain(m *testing.M) { storytest.Main(m, command.Alone) }

var namespace = regexp.MustCompile(`shunt-([a-z0-9]+)-lb`)

// idOf returns the demo's id, which its story mentions.
func idOf(t *testing.T, story *storytest.Transcript) string {
	t.Helper()
	m := namespace.FindStringSubmatch(story.String())
	if m == nil {
		t.Fatalf("the demo named no namespace:\n%s", story)
	}
	return m[1]
}

func nothingLeft(t *testing.T, id string) {
	t.Helper()
	left, err := demo.Left(id)
	if err != nil {
		t.Fatal(err)
	}
	for _, directory := range []string{"/run/shunt", "/var/lib/shunt"} {
		found, err := filepath.Glob(directory + "/demo-" + id + "*")
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, found...)
	}
	if len(left) > 0 {
		t.Errorf("left behind: %s", strings.Join(left, ", "))
	}
}

func TestFacts(t *testing.T) {
	storytest.NeedsRoot(t)
	cmd := storytest.Command(t, "demo", "-o", "json")
	story := storytest.NewTranscript()
	cmd.Stderr = story
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("the demo failed: %v\n%s", err, story)
	}
	var f demo.Facts
	storytest.Decode(t, out, &f)
	for _, c := range f.Claims {
		if !c.True {
			t.Errorf("%s: not true: %s", c.Step, c.Text)
		}
	}
	if !f.OK || len(f.Claims) < 30 {
		t.Errorf("ok is %t, with %d claims; want at least 30, all true", f.OK, len(f.Claims))
	}
	t.Logf("it took %.1f s, and promises less than %d", f.Seconds, secondsMax)
	if f.Seconds >= 3*secondsMax {
		t.Errorf("it took %.1f s, three times what it promises, which no busy machine excuses", f.Seconds)
	}
	nothingLeft(t, f.ID)
	checkFigures(t, &f)
	for _, line := range []string{"demo --keep", "demo -o json", "schema"} {
		if !strings.Contains(story.String(), line) {
			t.Errorf("the end does not say to try %q", line)
		}
	}
}

// checkFigures checks the facts behind the claims.
func checkFigures(t *testing.T, f *demo.Facts) {
	t.Helper()
	if !strings.Contains(f.Topology, "198.51.100.7") || !strings.Contains(f.Config, "weight: 3") {
		t.Errorf("topology or configuration is missing:\n%s\n%s", f.Topology, f.Config)
	}
	if len(f.Attached) != 2 || f.Attached[0].Mode != "native" || f.Attached[1].Mode != "native" {
		t.Errorf("attached: %+v; want two interfaces in native mode", f.Attached)
	}
	if len(f.Spread) != 4 {
		t.Errorf("%d spreads; want TCP and UDP over IPv4 and IPv6", len(f.Spread))
	}
	for _, s := range f.Spread {
		total := 0
		for _, b := range s.Backends {
			total += b.Flows
		}
		if s.Failed != 0 || s.Flows < 500 || total != s.Flows || len(s.Backends) != 3 {
			t.Errorf("spread of %s over %s: %+v", s.Service, s.Family, s)
		}
	}
	if len(f.Paths) != 2 || len(f.Paths[0].Hops) != 4 || f.Paths[0].Hops[0].Destination != "192.0.2.10:80" ||
		f.Paths[0].Hops[1].Destination == "192.0.2.10:80" || f.Paths[0].Hops[1].TTL != 63 {
		t.Errorf("the packet's path: %+v", f.Paths)
	}
	c := f.Crash
	if c.Backend != "b2" || c.FlowsOnIt < 12 || c.TakenOver["b1"]+c.TakenOver["b3"] != c.FlowsOnIt || c.DetectedMillis < 100 || c.BoundMillis != 620 ||
		c.Failed == 0 || c.LastFailedMillis > c.DetectedMillis || c.NewFlows == 0 || c.BackOnIt == 0 || c.BackFailed != 0 {
		t.Errorf("the crash: %+v", c)
	}
	r := f.Reload
	if r.FlowsOnIt == 0 || r.FlowsMoved != r.FlowsOnIt || r.OthersMoved != 0 || r.OthersFailed != 0 || r.NewOnIt != 0 || r.NewFlows == 0 {
		t.Errorf("the reload: %+v", r)
	}
	k := f.Kill
	if k.SecondsDead < 2 || k.Failed != 0 || k.FlowsMoved != 0 || k.NewFailed != 0 || k.NewFlows < 50 || k.Requests < 500 ||
		k.PIDAfter == k.PIDBefore || !strings.Contains(k.Status, "without health checks since") {
		t.Errorf("the kill: %+v", k)
	}
	if len(f.Counted.Backends) != 12 || len(f.Counted.Services) != 2 {
		t.Errorf("counted: %+v; want 3 backends of 2 services over 2 families", f.Counted)
	}
	for _, s := range f.Counted.Services {
		if s.Made < 1600 || s.FlowsCreated < uint64(s.Made) {
			t.Errorf("counted for service %s: %+v", s.Service, s)
		}
	}
}

// A claim that is not true must be noticed: one backend dies while its answers are counted.
func TestUntrueClaimsAreTold(t *testing.T) {
	storytest.NeedsRoot(t)
	cmd := storytest.Command(t, "demo", "-o", "json")
	story, facts := storytest.NewTranscript(), storytest.NewTranscript()
	cmd.Stderr, cmd.Stdout = story, facts
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	story.Await(t, "── Which backend answers")
	id := idOf(t, story)
	if err := demo.KillBackend(id, "b2"); err != nil {
		t.Error(err)
	}
	err := cmd.Wait()
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(story.String(), "NOT TRUE") {
		t.Errorf("ended with %v; want exit code 1 and an untrue claim\n%s", err, story)
	}
	var f demo.Facts
	if err := json.Unmarshal([]byte(facts.String()), &f); err != nil || f.OK {
		t.Errorf("facts: ok is %t, %v", f.OK, err)
	}
	nothingLeft(t, id)
}

func TestInterrupted(t *testing.T) {
	storytest.NeedsRoot(t)
	for _, at := range []string{
		"── shunt run",              // the daemon is starting
		"── A backend is taken out", // flows are open
		"kill -9",                   // there is no daemon
	} {
		t.Run(at, func(t *testing.T) {
			patterns := []string{at}
			if at == "── shunt run" {
				patterns = append(patterns, "--instance")
			}
			story := storytest.Interrupt(t, storytest.Command(t, "demo", "--keep"), patterns...) // an interrupted demo is not kept
			nothingLeft(t, idOf(t, story))
		})
	}
}

func TestCleanOfNothing(t *testing.T) {
	storytest.NeedsRoot(t)
	out, err := storytest.Command(t, "demo", "--clean", "nope").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "there is nothing of demo nope") {
		t.Errorf("clean of a demo that is not there: %v\n%s", err, out)
	}
}

// TestCleanOfRecords: a daemon that was killed, and whose namespace is gone, has left no more than files.
func TestCleanOfRecords(t *testing.T) {
	storytest.NeedsRoot(t)
	id := fmt.Sprintf("records%d", os.Getpid())
	var paths []string
	for directory, endings := range map[string][]string{
		"/run/shunt":     {"lock", "loopback", "aggregation"},
		"/var/lib/shunt": {"overrides.json", "overrides.json.damaged"},
	} {
		if os.Mkdir(directory, 0o755) == nil {
			t.Cleanup(func() { _ = os.Remove(directory) }) // unless another program has begun to use it
		}
		for _, ending := range endings {
			paths = append(paths, fmt.Sprintf("%s/demo-%s.%s", directory, id, ending))
		}
	}
	another := fmt.Sprintf("/run/shunt/demo-%sx.lock", id)
	for _, path := range append(paths, another) {
		if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(path) })
	}
	if out, err := storytest.Command(t, "demo", "--clean", id).CombinedOutput(); err != nil {
		t.Errorf("clean: %v\n%s", err, out)
	}
	for _, path := range paths {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
	if _, err := os.Lstat(another); err != nil {
		t.Errorf("what is another demo's has been removed: %v", err)
	}
}

func TestKeepAndClean(t *testing.T) {
	storytest.NeedsRoot(t)
	cmd := storytest.Command(t, "demo", "--keep")
	story := storytest.NewTranscript()
	cmd.Stdout, cmd.Stderr = story, story
	if err := cmd.Run(); err != nil {
		t.Fatalf("the demo failed: %v\n%s", err, story)
	}
	id := idOf(t, story)
	t.Cleanup(func() {
		if out, err := storytest.Command(t, "demo", "--clean", id).CombinedOutput(); err != nil {
			t.Errorf("clean: %v\n%s", err, out)
		}
		nothingLeft(t, id)
	})
	for label, want := range map[string]string{
		"what it counts":   "Forwarding. The daemon is process",
		"ask without curl": `"backend":"b`,
		"the daemon's log": "", // a path, for the reader
	} {
		_, rest, ok := strings.Cut(story.String(), label)
		command, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
		if !ok || command == "" {
			t.Errorf("the end does not say %q:\n%s", label, story)
			continue
		}
		if want == "" {
			continue
		}
		if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
	}
	// A drain is kept on disk, so that it outlives the daemon; but not the demo.
	if out, err := storytest.Command(t, "backend", "drain", "10.0.0.2", "--socket", "/tmp/shunt-demo-"+id+"/shunt.sock").CombinedOutput(); err != nil {
		t.Errorf("drain a backend: %v\n%s", err, out)
	}
}

func TestNotRoot(t *testing.T) {
	storytest.NeedsRoot(t) // to become another user, who must be able to run the binary
	if err := os.Chmod(filepath.Dir(storytest.Binary(t)), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := storytest.Command(t, "demo")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "sudo ") {
		t.Errorf("without root: %v\n%s", err, out)
	}
}
