package demo_test

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/pod/demo"
	"github.com/shunt-lb/shunt/internal/story/storytest"
)

func TestMain(m *testing.M) { storytest.Main(m) }

// nothingLeft expects the demo's namespaces to be gone.
func nothingLeft(t *testing.T, text *storytest.Transcript) {
	t.Helper()
	id := text.Await(t, `namespaces shunt-([a-z0-9]+)-`)
	if left, _ := filepath.Glob("/run/netns/shunt-" + id + "-*"); len(left) > 0 {
		t.Errorf("left behind: %s", strings.Join(left, ", "))
	}
}

func TestFacts(t *testing.T) {
	storytest.NeedsRoot(t)
	cmd := storytest.Command(t, "demo", "accelerate", "-o", "json")
	text, out := storytest.NewTranscript(), &bytes.Buffer{}
	cmd.Stderr, cmd.Stdout = text, out
	if err := cmd.Run(); err != nil {
		t.Fatalf("the demo failed: %v\n%s", err, text)
	}
	nothingLeft(t, text)
	var facts demo.Facts
	decoder := json.NewDecoder(out)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&facts); err != nil {
		t.Fatal(err)
	}
	if !facts.OK || len(facts.Claims) < 12 || facts.Claims.Untrue() != 0 {
		t.Errorf("ok %v, %d claims:\n%s", facts.OK, len(facts.Claims), text)
	}
	if len(facts.Rows) != 12 { // 4 kinds by 3 ways
		t.Errorf("%d rows", len(facts.Rows))
	}
	for _, r := range facts.Rows {
		if r.Rate <= 0 || r.CPU <= 0 || len(r.Rounds) == 0 || r.RatioLowest > r.Ratio || r.Ratio > r.RatioHighest {
			t.Errorf("%+v", r)
		}
	}
}

// Ctrl-C at any time: everything is removed, and no claim is untrue for it.
func TestInterrupted(t *testing.T) {
	storytest.NeedsRoot(t)
	for _, at := range []string{"── The plain path", "── Nothing of yours", "── Side by side"} {
		t.Run(at, func(t *testing.T) {
			cmd, text := storytest.Command(t, "demo", "accelerate"), storytest.NewTranscript()
			cmd.Stdout, cmd.Stderr = text, text
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			text.Await(t, at)
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Error(err)
			}
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 130 {
				t.Errorf("ended with %v; want exit code 130\n%s", err, text)
			}
			if strings.Contains(text.String(), "NOT TRUE") {
				t.Errorf("an interruption made claims untrue:\n%s", text)
			}
			nothingLeft(t, text)
		})
	}
}
