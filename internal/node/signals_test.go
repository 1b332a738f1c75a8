package node

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestSignals: Ctrl-C detaches, another one exits, and two that come together are one.
func TestSignals(t *testing.T) {
	const intr, term = syscall.SIGINT, syscall.SIGTERM
	type at struct {
		signal syscall.Signal
		after  time.Duration
	}
	for want, sent := range map[string][]at{
		"stop":                               {{term, 0}},
		"stop stop":                          {{term, 0}, {term, time.Hour}},
		"interrupt stop":                     {{intr, 0}},
		"interrupt stop stop":                {{intr, 0}, {intr, interruptPause - 1}},
		"interrupt stop exit stop":           {{intr, 0}, {intr, interruptPause}},
		"interrupt stop stop exit stop":      {{intr, 0}, {intr, 0}, {intr, interruptPause}},
		"stop interrupt stop stop exit stop": {{term, 0}, {intr, time.Hour}, {term, 0}, {intr, time.Hour}},
	} {
		signals := make(chan os.Signal, len(sent))
		var times []time.Time // of SIGINTs: only then the clock is looked at
		now := time.Unix(1, 0)
		for _, s := range sent {
			if now = now.Add(s.after); s.signal == intr {
				times = append(times, now)
			}
			signals <- s.signal
		}
		close(signals)
		var did []string
		do := func(what string) func() { return func() { did = append(did, what) } }
		clock := func() (next time.Time) {
			next, times = times[0], times[1:]
			return next
		}
		obey(signals, clock, do("stop"), do("interrupt"), do("exit"))
		if got := strings.Join(did, " "); got != want {
			t.Errorf("%v: it did %q, want %q", sent, got, want)
		}
	}
}
