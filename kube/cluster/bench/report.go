package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
)

// results are the results of a run.
type results struct {
	Machine    machine.Machine   `json:"machine"`
	Command    string            `json:"command"`
	Programs   map[string]string `json:"programs"` // versions of the programs
	Duration   time.Duration     `json:"duration_nanoseconds"`
	Unmeasured []string          `json:"unmeasured"`
	Samples    []sample          `json:"samples"`

	now sample // common values of the samples that add and fail make
}

// sample is one figure.
type sample struct {
	Services int     `json:"services"`
	Round    int     `json:"round"` // from 0
	Balancer string  `json:"balancer"`
	Row      string  `json:"row"`
	Unit     string  `json:"unit"`
	Value    float64 `json:"value"`
	Error    string  `json:"error,omitempty"` // why there is no value
}

func (r *results) add(row, unit string, value float64) {
	s := r.now
	s.Row, s.Unit, s.Value = row, unit, value
	r.Samples = append(r.Samples, s)
}

func (r *results) fail(row string, err error) {
	s := r.now
	s.Row, s.Error = row, err.Error()
	r.Samples = append(r.Samples, s)
}

// write replaces the file.
func (r *results) write(path string) error {
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// columns are the balancers, in the order of the page.
var columns = []string{nftables, iptables, ours, direct}

// ratios are the comparisons on the page: the first balancer beside the second one.
var ratios = []struct{ title, of, to string }{
	{"beside nftables", ours, nftables}, {"beside iptables", ours, iptables}, {"direct return beside NAT", direct, ours},
}

// figure is a row's unit with one number of Services.
type figure struct {
	services  int
	row, unit string
}

// page returns the results in Markdown.
func (r *results) page() string {
	var text strings.Builder
	rounds := map[int]int{} // by the number of Services
	for _, s := range r.Samples {
		rounds[s.Services] = max(rounds[s.Services], s.Round+1)
	}
	fmt.Fprintf(&text, `# Kubernetes Services: shunt-kube beside kube-proxy

Written by `+"`%s`"+` on %s: %s. %s

One cluster of three nodes on one machine (%s). In each round each balancer is started on the node n1, measured, stopped, and its
rules and programs are taken away; they take turns at being the first. A cell has the median of the rounds, with the smallest and the
largest value. A ratio is the median of the rounds' ratios.

- Client and server are kept on one CPU, and the client waits for each answer, for %s a measurement. So a rate is a measure of what a way costs.
- CPU is that of the whole machine, less what it uses without load: client, server, the cluster's network and the balancer.
- "No Service" is the same way by the pod's own address, with the balancer running: the floor.
- The Services that are counted have one port and three endpoints. Beside them there are three for the measurements, and the cluster's own.
- A node port for an endpoint on another node is translated in source and destination, but with direct return: then n1 sends the client's packets to the other node by GUE, and
  that node, which also runs shunt-kube, answers the client. Only ways from outside are measured with it.
- A change of endpoints is one EndpointSlice with another endpoint: from the request to the apiserver to the first new connection that goes there.

`, r.Command, r.Machine.Date, r.Machine, r.Machine.Faults(), r.programs(), r.Duration)
	var figures []figure
	values := map[figure]map[string]map[int][]float64{} // by balancer and round
	var failures []string
	for _, s := range r.sound() {
		if s.Error != "" {
			failures = append(failures, fmt.Sprintf("- %d Services, round %d, %s, %s: %s", s.Services, s.Round+1, s.Balancer, s.Row, s.Error))
			continue
		}
		f := figure{s.Services, s.Row, s.Unit}
		if values[f] == nil {
			figures = append(figures, f)
			values[f] = map[string]map[int][]float64{}
		}
		if values[f][s.Balancer] == nil {
			values[f][s.Balancer] = map[int][]float64{}
		}
		values[f][s.Balancer][s.Round] = append(values[f][s.Balancer][s.Round], s.Value)
	}
	services := 0
	for _, f := range figures {
		if f.services != services {
			services = f.services
			titles := slices.Clone(columns)
			for _, r := range ratios {
				titles = append(titles, r.title)
			}
			fmt.Fprintf(&text, "## %d Services, rounds: %d\n\n| | | %s |\n|---|---|%s\n", services, rounds[services], strings.Join(titles, " | "), strings.Repeat("---|", len(titles)))
		}
		fmt.Fprintf(&text, "| %s | %s |", f.row, f.unit)
		for _, name := range columns {
			fmt.Fprintf(&text, " %s |", cell(values[f][name]))
		}
		for _, r := range ratios {
			fmt.Fprintf(&text, " %s |", ratio(values[f][r.of], values[f][r.to]))
		}
		text.WriteString("\n")
		if next := slices.Index(figures, f) + 1; next == len(figures) || figures[next].services != services {
			text.WriteString("\n")
		}
	}
	fmt.Fprintf(&text, "## Not measured\n\n- %s\n", strings.Join(r.Unmeasured, "\n- "))
	if len(failures) > 0 {
		fmt.Fprintf(&text, "\n## Failed\n\n%s\n", strings.Join(failures, "\n"))
	}
	return text.String()
}

// Limits of the values on the page.
const (
	// busiest is the number of CPUs that a machine without load may use; with more, the CPU time of a load cannot be
	// separated.
	busiest = 0.5
	// slowest is the rate, per second, below which a client has waited for a connection that hung.
	slowest = 1
)

// Units of the rows that each way has.
const (
	perSecond = "per second"
	cpuOfEach = "µs of CPU each"
)

const idleRow = "The machine without load"

// sound returns the samples, with an error in place of each that is no measurement of the load.
func (r *results) sound() (all []sample) {
	type part struct {
		services, round int
		balancer        string
	}
	type load struct {
		part
		row string
	}
	idle, hung := map[part]float64{}, map[load]bool{}
	for _, s := range r.Samples {
		p := part{s.Services, s.Round, s.Balancer}
		switch {
		case s.Row == idleRow:
			if idle[p] = s.Value; s.Value > busiest {
				all = append(all, s)
				s.Row, s.Error = "CPU of all ways", fmt.Sprintf("not given, because the machine used %s CPUs without load", number(s.Value))
			}
		case s.Unit == cpuOfEach && (idle[p] > busiest || hung[load{p, s.Row}]):
			continue // reported already
		case s.Unit == perSecond && s.Value < slowest:
			hung[load{p, s.Row}] = true
			s.Error = fmt.Sprintf("hung: %s %s", number(s.Value), s.Unit)
		}
		all = append(all, s)
	}
	return all
}

func (r *results) programs() string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(r.Programs)) {
		all = append(all, name+": "+r.Programs[name])
	}
	return strings.Join(all, "; ")
}

// cell returns the median of the rounds' medians, and the smallest and the largest value.
func cell(rounds map[int][]float64) string {
	if len(rounds) == 0 {
		return "none"
	}
	var medians, all []float64
	for _, values := range rounds {
		middle, _, _ := traffic.Median(values)
		medians, all = append(medians, middle), append(all, values...)
	}
	middle, _, _ := traffic.Median(medians)
	_, lowest, highest := traffic.Median(all)
	if len(all) == 1 {
		return number(middle)
	}
	return fmt.Sprintf("%s (%s–%s)", number(middle), number(lowest), number(highest))
}

// number returns three digits, or all digits before the point.
func number(x float64) string {
	switch {
	case x >= 100 || x <= -100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10 || x <= -10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}

// ratio returns the median of the ratios, over the rounds that both have.
func ratio(of, to map[int][]float64) string {
	var ratios []float64
	for round, values := range of {
		above, _, _ := traffic.Median(values)
		below, _, _ := traffic.Median(to[round])
		if below > 0 {
			ratios = append(ratios, above/below)
		}
	}
	if len(ratios) == 0 {
		return "none"
	}
	middle, lowest, highest := traffic.Median(ratios)
	if len(ratios) == 1 {
		return fmt.Sprintf("%.2f", middle)
	}
	return fmt.Sprintf("%.2f (%.2f–%.2f)", middle, lowest, highest)
}
