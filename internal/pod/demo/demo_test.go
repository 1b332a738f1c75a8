package demo_test

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	lb "github.com/shunt-lb/shunt/internal/lb/command"
	"github.com/shunt-lb/shunt/internal/pod/command"
	"github.com/shunt-lb/shunt/internal/pod/demo"
	"github.com/shunt-lb/shunt/internal/story/storytest"
)

func TestMain(m *testing.M) { storytest.Main(m, lb.Line(nil, command.Product)) }

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
	storytest.Decode(t, out.Bytes(), &facts)
	if !facts.OK || len(facts.Claims) < 15 || facts.Claims.Untrue() != 0 {
		t.Errorf("ok %v, %d claims:\n%s", facts.OK, len(facts.Claims), text)
	}
	if len(facts.Rows) != 12 || len(facts.AcrossRows) != 12 { // 4 kinds by 3 ways
		t.Errorf("%d rows, and %d to the other host", len(facts.Rows), len(facts.AcrossRows))
	}
	if len(facts.SteerRows) != 8 { // 4 kinds by 2 ways
		t.Errorf("%d rows of a port that is steered", len(facts.SteerRows))
	}
	for _, r := range slices.Concat(facts.Rows, facts.AcrossRows, facts.SteerRows) {
		if r.Rate <= 0 || r.CPU <= 0 || len(r.Rounds) == 0 || r.RatioLowest > r.Ratio || r.Ratio > r.RatioHighest {
			t.Errorf("%+v", r)
		}
	}
}

// Ctrl-C at any time: everything is removed, and no claim is untrue for it.
func TestInterrupted(t *testing.T) {
	storytest.NeedsRoot(t)
	for _, at := range []string{"── The plain path", "── Nothing of yours", "── Side by side", "── A pod of another", "── A port through"} {
		t.Run(at, func(t *testing.T) {
			nothingLeft(t, storytest.Interrupt(t, storytest.Command(t, "demo", "accelerate"), at))
		})
	}
}
