package daemon_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
)

// on_no_socket comes and goes by a reload, with a program and without one, and disturbs no lease. The dropped datagrams
// are in the status, the commands and the metrics; when the daemon ends, the kernel's socket has the datagrams again.
func TestDropByReload(t *testing.T) {
	drop := strings.Replace(all, "tx: true", "tx: true, on_no_socket: drop, wait: adaptive", 1)
	pass := strings.Replace(drop, "drop", "pass", 1)
	b := newBed(t, pass)
	b.run()
	b.until("kernel")
	dropped := func(when string, more uint64) *shuntv1.UDPLease {
		t.Helper()
		b.Is(when, func(st *shuntv1.GetStatusResponse) bool {
			if answer := b.ask(5000, answersWithin); answer != "" {
				t.Errorf("%s: %q answers", when, answer)
			}
			return lease(st, "feed").Total.GetDroppedNoSocket() >= more && nodetest.Condition(st, "udp_dropped", "feed") != ""
		})
		st := b.Is(when+", and all is counted", func(*shuntv1.GetStatusResponse) bool { return true })
		if nodetest.Condition(st, "udp_kernel_socket", "feed") != "" || lease(st, "feed").OnNoSocket != "drop" {
			t.Errorf("%s: the status is %v", when, st)
		}
		accounted(t, when, lease(st, "feed").Total)
		return lease(st, "feed")
	}
	b.write(drop)
	if text := b.Reload(); !strings.Contains(text, "dropping without a socket") {
		t.Errorf("the difference is\n%s", text)
	}
	before := dropped("dropped, though nobody has it", 5).Total.DroppedNoSocket

	p := b.work("feed", 0)
	b.until("x")
	for _, entry := range []string{pass, drop} {
		b.write(entry)
		b.Reload()
		b.until("x")
	}
	if l := lease(b.Is("it is held", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Holder != nil }), "feed"); l.Given != 1 || len(l.Ended) > 0 || l.Wait != "adaptive" {
		t.Errorf("the reloads have disturbed the lease: %v", l)
	}
	nodetest.Kill(p)
	b.Is("its end is known", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Ended["died"] == 1 })
	l := dropped("dropped after its end", before+5)
	for args, want := range map[string]string{
		"show feed":    "No program has it: the datagrams are dropped.",
		"list -o json": `"on_no_socket": "drop"`,
	} {
		var out bytes.Buffer
		if code := cli.Main(line, strings.Fields("udp "+args+" --socket "+b.Socket()), nil, &out, &out); code != 0 || !strings.Contains(out.String(), want) {
			t.Errorf("shunt udp %s ends with %d and says\n%s", args, code, out.String())
		}
	}
	if text, line := b.Scrape(), fmt.Sprintf("shunt_udp_datagrams_dropped_total{lease=\"feed\",reason=\"no_socket\"} %d\n", l.Total.DroppedNoSocket); !strings.Contains(text, line) {
		t.Errorf("the metrics do not have %q:\n%s", line, text)
	}
	nodetest.Kill(b.Process)
	b.until("kernel")
}
