package main

import (
	"fmt"
	"strings"

	"github.com/shunt-lb/shunt/bench/spread"
	"github.com/shunt-lb/shunt/internal/lab"
)

// aim is a promise of shunt for one figure beside another arm: at least a multiple of it.
type aim struct {
	what   string
	beside string
	least  float64
	figure func(sample) float64 // 0: not measured
	layout lab.Layout           // the only layout in which both arms pass the same cables; empty: they do in each
}

func keepalive(s sample) float64   { return s.Keepalive }
func connections(s sample) float64 { return s.Connections }

func bulkGigabit(s sample) float64 {
	if s.Bulk == nil {
		return 0
	}
	return s.Bulk.Gigabit
}

// aims are all promises that this benchmark judges.
var aims = []aim{
	{"keep-alive requests", "macswap", 0.95, keepalive, ""},
	{"keep-alive requests", "routed", 0.9, keepalive, ""},
	{"keep-alive requests", "haproxy", 1.5, keepalive, ""},
	{"new connections", "direct", 0.8, connections, lab.TwoArm},
	{"new connections", "haproxy", 1.5, connections, ""},
	{"bulk TCP", "macswap", 0.95, bulkGigabit, ""},
}

// ratio is the median over the rounds in which both arms were measured: a machine that is slow for
// a while slows both arms of a round.
func (a aim) ratio(samples []sample, set setting) float64 {
	theirs := map[int]float64{} // by round
	for _, s := range samples {
		if s.Arm == a.beside && s.setting == set && s.Error == "" {
			theirs[s.Round] = a.figure(s)
		}
	}
	var ratios []float64
	for _, s := range samples {
		if s.Arm != "shunt" || s.setting != set || s.Error != "" {
			continue
		}
		if ours := a.figure(s); ours > 0 && theirs[s.Round] > 0 {
			ratios = append(ratios, ours/theirs[s.Round])
		}
	}
	return spread.Median(ratios)
}

// aimsTable lists the aims that were measured in one setting, and whether each is met.
func (p report) aimsTable(set setting) string {
	var text strings.Builder
	for _, a := range aims {
		if a.layout != "" && string(a.layout) != set.Layout {
			continue
		}
		measured := a.ratio(p.Samples, set)
		if measured == 0 {
			continue
		}
		verdict := "met"
		if measured < a.least {
			verdict = "**missed**"
		}
		fmt.Fprintf(&text, "| %s | %s | %.2f | %.3f | %s |\n", a.what, a.beside, a.least, measured, verdict)
	}
	if text.Len() == 0 {
		return ""
	}
	return "\nWhat shunt promises, as a multiple of another arm (median of the rounds' ratios):\n\n" +
		"| figure | beside | at least | measured | |\n|---|---|---:|---:|---|\n" + text.String()
}
