package top

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"
)

// untilText takes the output of Run, and stops it when a text is in it.
type untilText struct {
	bytes.Buffer
	text string
	stop func()
}

func (u *untilText) Write(p []byte) (int, error) {
	n, err := u.Buffer.Write(p)
	if strings.Contains(u.String(), u.text) {
		u.stop()
	}
	return n, err
}

// TestBudgetOfTop has a limit that any sensor exceeds: the part that took most watches less, and the screen lists that
// among the unseen events, and so does the summary. The timers of the CPUs run always, so the part of the CPUs does.
func TestBudgetOfTop(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	out := &untilText{text: `"not_seen":["budget: `, stop: stop}
	if err := Run(ctx, Options{Interval: 100 * time.Millisecond, Threshold: time.Second, MaxCPU: 1e-9}, true, out); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	last := text[strings.LastIndex(text, `{"type":"summary"`):]
	if !strings.Contains(text, out.text) || !strings.Contains(last, `"budget":"the sensors took`) || !strings.Contains(last, "of 2 is watched") {
		t.Errorf("got %s", text)
	}
}
