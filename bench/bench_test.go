package main

import (
	"strings"
	"testing"
)

var off = setting{"two-arm", "off"}

// TestReport shows that a failed round is named and does not enter the median.
func TestReport(t *testing.T) {
	p := report{Command: "bench", Samples: []sample{
		{Arm: "routed", setting: off, Round: 1, Keepalive: 100, Connections: 40},
		{Arm: "shunt", setting: off, Round: 1, Keepalive: 90},
		{Arm: "shunt", setting: off, Round: 2, Error: "no answer\nmore"},
	}}
	var page strings.Builder
	p.markdown(&page, options{arms: []string{"routed", "shunt"}, layouts: []string{"two-arm"}, offloads: []string{"off"}, rounds: 2})
	for _, want := range []string{"| shunt | 90 | – |", "| shunt | 0.90 | 1.00 |", "\nshunt: no answer\n"} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("report lacks %q:\n%s", want, page.String())
		}
	}
}

// TestAims: a ratio is of one round, and an arm that was not measured is not judged.
func TestAims(t *testing.T) {
	p := report{Samples: []sample{
		{Arm: "macswap", setting: off, Round: 1, Keepalive: 100, Bulk: &bulk{Gigabit: 10}},
		{Arm: "routed", setting: off, Round: 1, Keepalive: 100},
		{Arm: "haproxy", setting: off, Round: 1, Keepalive: 100, Error: "it fell over"},
		{Arm: "shunt", setting: off, Round: 1, Keepalive: 96, Bulk: &bulk{Gigabit: 9}},
		{Arm: "macswap", setting: off, Round: 2, Keepalive: 1000},
		{Arm: "shunt", setting: off, Round: 2, Keepalive: 960},
		{Arm: "routed", setting: off, Round: 2, Keepalive: 1200},
		{Arm: "shunt", setting: off, Round: 3, Keepalive: 1, Error: "it fell over"},
	}}
	text := p.aimsTable(off)
	for _, want := range []string{
		"| keep-alive requests | macswap | 0.95 | 0.960 | met |\n",
		"| keep-alive requests | routed | 0.90 | 0.880 | **missed** |\n",
		"| bulk TCP | macswap | 0.95 | 0.900 | **missed** |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the table lacks %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "haproxy") || strings.Contains(text, "new connections") {
		t.Errorf("judged without a figure:\n%s", text)
	}
	oneArm := setting{"one-arm", "off"}
	if text := p.aimsTable(oneArm); text != "" {
		t.Errorf("a table of nothing: %s", text)
	}
	p = report{Samples: []sample{
		{Arm: "direct", setting: oneArm, Round: 1, Connections: 100},
		{Arm: "shunt", setting: oneArm, Round: 1, Connections: 50},
	}}
	if text := p.aimsTable(oneArm); text != "" {
		t.Errorf("compared with an arm that passes no switch: %s", text)
	}
}

func TestParseIperf(t *testing.T) {
	tcp, err := parseIperf(`{"end": {"sum_sent": {"retransmits": 7}, "sum_received": {"bits_per_second": 2.5e9}}}`)
	if err != nil || tcp.End.Sent.Retransmits != 7 || tcp.End.Received.BitsPerSecond != 2.5e9 {
		t.Errorf("TCP: %+v, %v", tcp, err)
	}
	if udp, err := parseIperf(`{"end": {"sum": {"lost_percent": 0.94}}}`); err != nil || udp.End.Sum.LostPercent != 0.94 {
		t.Errorf("UDP: %+v, %v", udp, err)
	}
	for _, bad := range []string{"", `{"error": "unable to connect"}`} {
		if _, err := parseIperf(bad); err == nil {
			t.Errorf("%q was taken for a report", bad)
		}
	}
}

// TestBulkTable: the table has medians, and a round without a drop at a place counts as 0 there.
func TestBulkTable(t *testing.T) {
	lost := 0.5
	p := report{Samples: []sample{
		{Arm: "shunt", setting: off, Bulk: &bulk{Gigabit: 3, Retransmissions: 10, UDPLost: &lost, Dropped: map[string]uint64{"client up out": 10}}},
		{Arm: "shunt", setting: off, Bulk: &bulk{Gigabit: 5, Retransmissions: 20}},
		{Arm: "haproxy", setting: off, Bulk: &bulk{Gigabit: 1}},
		{Arm: "haproxy", setting: off, Bulk: &bulk{Gigabit: 9}, Error: "it fell over"},
	}}
	text := p.bulkTable(off)
	for _, want := range []string{"| shunt | 4.00 | 15 | 0.500 % | client up out 5 |\n", "| haproxy | 1.00 | 0 | – |  |\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("the table lacks %q:\n%s", want, text)
		}
	}
	if text := p.bulkTable(setting{"two-arm", "default"}); text != "" {
		t.Errorf("a table of nothing: %s", text)
	}
}
