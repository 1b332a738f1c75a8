package main

import (
	"strings"
	"testing"
)

func TestParseWrk(t *testing.T) {
	const clean = "Running 2s test\n  100 requests in 2.00s\nRequests/sec:  54321.50\nTransfer/sec: 1MB\n"
	const faulty = "  Socket errors: connect 1, read 2, write 3, timeout 4\n  Non-2xx or 3xx responses: 5\nRequests/sec: 10.0\n"
	for _, test := range []struct {
		name, text string
		rate       float64
		errors     int
		bad        bool
	}{
		{"clean", clean, 54321.5, 0, false},
		{"faulty", faulty, 10, 15, false},
		{"no figure", "unable to connect\n", 0, 0, true},
	} {
		rate, errors, err := parseWrk(test.text)
		if rate != test.rate || errors != test.errors || (err != nil) != test.bad {
			t.Errorf("%s: %v, %d, %v", test.name, rate, errors, err)
		}
	}
}

func TestMedian(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 2, 9}, 3}} {
		if got := median(test.values); got != test.want {
			t.Errorf("median of %v is %v, want %v", test.values, got, test.want)
		}
	}
}

// TestReport shows that a failed round is named and does not enter the median.
func TestReport(t *testing.T) {
	p := report{Command: "bench", Samples: []sample{
		{Arm: "routed", Offload: "off", Round: 1, Keepalive: 100, Connections: 40},
		{Arm: "shunt", Offload: "off", Round: 1, Keepalive: 90},
		{Arm: "shunt", Offload: "off", Round: 2, Error: "no answer\nmore"},
	}}
	var page strings.Builder
	p.markdown(&page, options{arms: []string{"routed", "shunt"}, offloads: []string{"off"}, rounds: 2})
	for _, want := range []string{"| shunt | 90 | – |", "| shunt | 0.90 | 1.00 |", "\nshunt: no answer\n"} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("report lacks %q:\n%s", want, page.String())
		}
	}
}
