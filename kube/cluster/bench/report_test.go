package main

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestPage: medians of the rounds' medians, ratios of rounds, and the names of measurements that failed or were not
// made.
func TestPage(t *testing.T) {
	r := results{Command: "make bench-kube", Programs: map[string]string{"nft": "nft 1"}, Duration: time.Second, Unmeasured: []string{"the moon"}}
	for round, x := range []struct{ theirs, ours float64 }{{10, 40}, {20, 60}, {30, 75}} {
		r.now = sample{Services: 1, Round: round, Balancer: nftables}
		r.add("Way", "per second", x.theirs)
		r.now.Balancer = ours
		r.add("Way", "per second", x.ours)
		r.add("Way", "per second", x.ours+2) // twice in a round
		r.now.Balancer = direct
		r.add("Way", "per second", 2*(x.ours+1))
	}
	r.now = sample{Services: 1000, Round: 1, Balancer: iptables}
	r.fail("Way", errors.New("connect: timed out"))
	r.add("Other", "ms", 1234)
	page := r.page()
	for _, want := range []string{
		"| Way | per second | 20.0 (10.0–30.0) | none | 61.0 (40.0–77.0) | 122 (82.0–152) | 3.05 (2.53–4.10) | none | 2.00 (2.00–2.00) |",
		"## 1 Services, rounds: 3", "## 1000 Services, rounds: 2", "| Other | ms | none | 1234 | none | none | none | none | none |",
		"- the moon", "- 1000 Services, round 2, kube-proxy iptables, Way: connect: timed out", "nft: nft 1",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %q:\n%s", want, page)
		}
	}
}

// TestPageLeavesOut: CPU beside a machine that was busy without load, and a rate that is a client's wait for a connection that hung.
func TestPageLeavesOut(t *testing.T) {
	var r results
	for _, x := range []struct {
		balancer   string
		idle, rate float64
	}{{nftables, 1.16, 5000}, {iptables, 0.1, 0.19}, {ours, 0.1, 6000}} {
		r.now = sample{Services: 1, Balancer: x.balancer}
		r.add(idleRow, "CPUs", x.idle)
		r.add("Way", perSecond, x.rate)
		r.add("Way", cpuOfEach, -380023)
	}
	page := r.page()
	for _, want := range []string{
		"| The machine without load | CPUs | 1.16 | 0.10 | 0.10 | none | 0.09 | 1.00 | none |", "| Way | per second | 5000 | none | 6000 | none | 1.20 | none | none |",
		"| Way | µs of CPU each | none | none | -380023 | none | none | none | none |",
		"kube-proxy nftables, CPU of all ways: not given, because the machine used 1.16 CPUs without load", "kube-proxy iptables, Way: hung: 0.19 per second",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %q:\n%s", want, page)
		}
	}
}

// TestFrom: results that were written become a page without a cluster, and others an error.
func TestFrom(t *testing.T) {
	r := results{Command: "make bench-kube"}
	r.now = sample{Services: 7, Balancer: ours}
	r.add("Way", "per second", 3)
	file, page := filepath.Join(t.TempDir(), "r.json"), filepath.Join(t.TempDir(), "r.md")
	if err := r.write(file); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), settings{from: file, page: page}); err != nil {
		t.Error(err)
	}
	if err := run(t.Context(), settings{from: page}); err == nil || !strings.Contains(err.Error(), page) {
		t.Errorf("a page for results: %v", err)
	}
	if err := run(t.Context(), settings{from: filepath.Join(t.TempDir(), "none")}); err == nil {
		t.Error("no file of results is no error")
	}
}
