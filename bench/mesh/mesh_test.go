package main

import (
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/bench/load"
)

func TestOptions(t *testing.T) {
	o, err := parseOptions([]string{"--rate", "10,20", "--rounds", "3"})
	if err != nil || o.rounds != 3 || len(o.rates) != 2 || o.rates[1] != 20 {
		t.Errorf("%+v, %v", o, err)
	}
	if o, err := parseOptions([]string{"--quick"}); err != nil || o.rounds != 1 || o.duration != time.Second || len(o.rates) != 1 {
		t.Errorf("--quick: %+v, %v", o, err)
	}
	for _, bad := range []string{"more", "--rounds=0", "--duration=1500ms", "--duration=0s", "--rate=", "--rate=10,x", "--rate=0", "--connections=1", "--none"} {
		if o, err := parseOptions([]string{bad}); err == nil {
			t.Errorf("%s: took %+v", bad, o)
		}
	}
}

// TestReport shows that a ratio is of one round: the ratio of the medians would be 1.
func TestReport(t *testing.T) {
	r := report{Command: "mesh", options: options{rounds: 2, rates: []int{7}}}
	add := func(arm string, round int, keepalive float64) {
		r.Samples = append(r.Samples, sample{Arm: arm, Round: round, Keepalive: keepalive, Errors: round,
			Latency: []load.Result{{Rate: 7, P50us: 1000, P99us: keepalive * 1e3, Achieved: 6.9}}})
	}
	add("shunt", 1, 300)
	add("shunt", 2, 100)
	add("haproxy", 1, 100)
	add("haproxy", 2, 300)
	add("ecmp", 1, 300)
	add("ecmp", 2, 200)
	var page strings.Builder
	r.markdown(&page)
	for _, want := range []string{
		"| | requests/s | p50 at 7/s, ms | p99 at 7/s, ms |\n|---|---:|---:|---:|\n",
		"| shunt | 200 [100 to 300] | 1.00 [1.00 to 1.00] | 200.00 [100.00 to 300.00] |\n",
		"| haproxy | 1.67 [0.33 to 3.00] | 1.00 [1.00 to 1.00] | 1.67 [0.33 to 3.00] |\n",
		"| ecmp | 0.75 [0.50 to 1.00] |",
		"- shunt: 3 requests of wrk failed; of 7 a second 7 [7 to 7] were answered\n",
		"segmentation offload are off",
	} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("report lacks %q:\n%s", want, page.String())
		}
	}
}
