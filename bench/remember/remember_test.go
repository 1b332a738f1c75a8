package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/bench/chart"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
)

// tiny is a run of a second or two.
func tiny(t *testing.T, more ...string) options {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	o, err := parseOptions(append([]string{"--flows", "60", "--changes", "2"}, more...))
	if err != nil {
		t.Fatal(err)
	}
	o.progress, o.out = false, ""
	return o
}

func simulated(t *testing.T, o options) report {
	t.Helper()
	results, err := simulate(t.Context(), o, manners)
	if err != nil {
		t.Fatal(err)
	}
	r, err := newReport(o, results, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestReplacingMovesNoFlow runs the whole program with few flows.
func TestReplacingMovesNoFlow(t *testing.T) {
	r := simulated(t, tiny(t))
	if err := r.verdict(); err != nil {
		t.Error(err)
	}
	from, to := replacing(r.options)
	for _, one := range r.results {
		f := one.figures(from, to)
		// A backend that takes over both name and slots at once leaves nothing to remember.
		none := one.manner.named && !one.manner.drains
		if (f.peak.remembered == 0) != none || f.remembered > f.tracked || one.reset == 0 {
			t.Errorf("%s: at most %d remembered, %.1f on average of %.1f, %d flows reset", one.manner.name,
				f.peak.remembered, f.remembered, f.tracked, one.reset)
		}
		for _, s := range one.samples {
			if s.at <= from && s.remembered > 0 {
				t.Errorf("%s: %d flows are remembered before the first change", one.manner.name, s.remembered)
			}
			if s.agreeing+s.differing+s.elsewhere != s.remembered {
				t.Errorf("%s, %s: of %d entries, %d, %d and %d have their place", one.manner.name, s.at,
					s.remembered, s.agreeing, s.differing, s.elsewhere)
			}
		}
	}
	dir := t.TempDir()
	if _, err := r.write(dir); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"*.md", "*" + chart.Suffix} {
		names, _ := filepath.Glob(filepath.Join(dir, "remembered-"+pattern))
		if len(names) != 1 {
			t.Fatalf("%s: %v were written", pattern, names)
		}
		data, err := os.ReadFile(names[0])
		if err != nil {
			t.Fatal(err)
		}
		if pattern == "*.md" && (!strings.Contains(string(data), "| swap, of the flows alive |") || strings.Contains(string(data), "NaN")) {
			t.Errorf("the page:\n%s", data)
		}
	}
}

// TestWithoutTrackingFlowsMove shows that a flow that moves is seen.
func TestWithoutTrackingFlowsMove(t *testing.T) {
	o := tiny(t, "--changes", "1")
	o.tracking = model.TrackingNone
	r := simulated(t, o)
	if err := r.verdict(); err == nil || !strings.Contains(err.Error(), "reached another backend") {
		t.Errorf("the verdict of a run that remembers nothing is %v", err)
	}
}

// TestTrackedIsWhatAlwaysHolds compares the number that full tracking would need with the table of
// a service that tracks all flows. Timeouts, and with them the ageing of entries, are right only if
// both agree.
func TestTrackedIsWhatAlwaysHolds(t *testing.T) {
	o := tiny(t, "--changes", "1")
	o.tracking = model.TrackingAlways
	r := simulated(t, o)
	if err := r.verdict(); err != nil {
		t.Error(err)
	}
	for _, one := range r.results {
		for _, s := range one.samples {
			// Flows of two steps, which may be counted early or late.
			slack := 4 + 2*int(step*time.Duration(o.flows)/meanLength())
			if s.remembered < s.tracked-slack || s.remembered > s.tracked+slack {
				t.Fatalf("%s, after %s: the table holds %d entries, not %d, give or take %d", one.manner.name, s.at, s.remembered, s.tracked, slack)
			}
		}
	}
}

func TestFramesAreTheClients(t *testing.T) {
	seen := map[clientID]bool{}
	for _, n := range []uint64{0, 1, 254, 1<<17 - 1, 1 << 17, 5_000_000} {
		client := clientNumber(n)
		if seen[client] {
			t.Errorf("client %d had been there before", n)
		}
		seen[client] = true
		from := netip.MustParseAddrPort(client.String())
		if !netip.MustParsePrefix("198.18.0.0/15").Contains(from.Addr()) {
			t.Errorf("client %d is %s", n, from)
		}
		edits := []packet.Edit{packet.Sequence(1, 2), packet.Data("odd")}
		got := newFrame("PA", edits...).from(client, make([]byte, 256))
		want := packet.NewTCP(from, service, "PA", append(edits, packet.MACs(otherMAC, ownMAC))...)
		if diff := packet.DiffBytes(want, got); diff != "" {
			t.Errorf("client %d: %s", n, diff)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for _, bad := range []string{"--flows=0", "--changes=201", "--interval=15s", "--interval=0s"} {
		if _, err := parseOptions([]string{bad}); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
}
