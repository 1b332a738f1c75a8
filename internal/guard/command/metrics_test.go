package command

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/gate"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/test/golden"
)

// The whole answer of a guard that has every kind of figure.
func TestGuardMetrics(t *testing.T) {
	s := agent.Status{
		Features: []agent.Feature{
			{Name: "protection", On: true, Rules: 2, Events: 9, Lost: 4, LostBy: map[string]uint64{"denied": 0, "audited": 4}, Alerts: 5, Why: "it is too old, and only opens wait",
				Opens: &gate.Status{Objects: 7, Waited: 40, Took: 0.25, Denied: 3, Audited: 2, Late: 1, Unsure: 6, Unread: 8}},
			{Name: "detection", Why: "it is too old", LostBy: map[string]uint64{"exec": 1, "often": 2, "rare": 3}, Missed: 6,
				Thinned: []detect.Thinned{{Type: "exec", OneOf: 1, LeftOut: 7}, {Type: "open", OneOf: 16, LeftOut: 8}, {Type: "dup", LeftOut: 9}}},
			{Name: "decoys", On: true, Rules: 1, Lost: 2, Decoys: &decoy.Status{Stand: 8, Changed: 1}},
		},
		Off: []agent.Off{{Name: "protection/data"}}, Alerts: agent.Told{Told: 3, Lost: 1}, Notes: agent.Told{Told: 4, Lost: 2},
		Budget: &agent.Budget{MaxCPU: 3, Throttled: 12},
	}
	sample := metrics.Sample{Version: "1.2.3", GoVersion: "go1", Guard: guardFigures(s, &protect.Status{Hooks: 26, Denied: 5, Audited: 4, Unheard: 3, Missed: 2, Unrecord: 1, Untrusted: 1})}
	golden.Require(t, "testdata/guard-metrics.golden", string(sample.Text(nil)))
}

func TestGuardMetricsAddress(t *testing.T) {
	for _, text := range []string{"9471", "127.0.0.1", "localhost:9471", "127.0.0.1:0"} {
		if code, _, errOut := guardMain("run", "--policy", guardFile(t, guardPolicy), "--metrics", text); code != cli.ExitUsage || !strings.Contains(errOut, "for example 127.0.0.1:9471") {
			t.Errorf("%s: exit %d: %s", text, code, errOut)
		}
	}
}

// A guard that waits at decoys answers scrapes, and an address that is taken ends it before it has done anything.
func TestGuardIsScraped(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	at, err := listenAddress(address)
	if err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	p := policy.Policy{Decoys: []policy.Decoys{{Folders: []string{data}, Action: rule.Stop}}}
	o := guardRun{output: "text", folder: filepath.Join(t.TempDir(), "run"), decoys: t.TempDir(), scraped: at}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := &cobra.Command{}
	c.SetContext(ctx)
	var out bytes.Buffer
	if err := runGuard(c, cli.Streams{Out: &out, Err: &out}, p, o); err == nil || !strings.Contains(err.Error(), "open --metrics, "+address+": address already in use") {
		t.Errorf("an address that is taken: %v", err)
	}
	if made, err := os.ReadDir(data); err != nil || len(made) != 0 {
		t.Errorf("decoys were made: %v, %v", made, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- runGuard(c, cli.Streams{Out: &out, Err: &out}, p, o) }()
	for {
		select {
		case err := <-done:
			t.Fatalf("it has ended: %v: %s", err, out.String())
		case <-time.After(20 * time.Millisecond):
		}
		r, err := http.Get("http://" + address + "/metrics")
		if err != nil {
			continue // not yet
		}
		text, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"shunt_guard_feature_on{feature=\"decoys\"} 1\n", "shunt_guard_decoys{state=\"stand\"} 8\n", "shunt_config_last_reload_successful 1\n", "process_cpu_seconds_total"} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%q is not in\n%s", want, text)
			}
		}
		break
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := http.Get("http://" + address + "/metrics"); err == nil {
		t.Errorf("%s is answered after the end", address)
	}
}
