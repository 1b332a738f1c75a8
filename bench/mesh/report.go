package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/bench/spread"
)

// report is the record of a run.
type report struct {
	Machine  machine.Machine   `json:"machine"`
	Programs map[string]string `json:"programs"` // their versions
	Command  string            `json:"command"`
	Samples  []sample          `json:"samples"`
	options  options
}

// column is one of the report.
type column struct {
	name, format string
	value        func(s sample) float64
}

// columns are the columns that have a ratio.
func (o options) columns() []column {
	all := []column{{"requests/s", "%.0f", func(s sample) float64 { return s.Keepalive }}}
	for i, rate := range o.rates {
		all = append(all,
			column{fmt.Sprintf("p50 at %d/s, ms", rate), "%.2f", func(s sample) float64 { return s.Latency[i].P50us / 1e3 }},
			column{fmt.Sprintf("p99 at %d/s, ms", rate), "%.2f", func(s sample) float64 { return s.Latency[i].P99us / 1e3 }})
	}
	return all
}

// of are the values of an arm, by round.
func (r report) of(arm string, value func(sample) float64) map[int]float64 {
	values := map[int]float64{}
	for _, s := range r.Samples {
		if s.Arm == arm {
			values[s.Round] = value(s)
		}
	}
	return values
}

// markdown writes the report for people.
func (r report) markdown(w io.Writer) {
	m, o := r.Machine, r.options
	fmt.Fprintf(w, "# Balancers on the servers themselves, behind ECMP, %s\n\n%s", m.Date, m)
	for _, name := range slices.Sorted(maps.Keys(r.Programs)) {
		fmt.Fprintf(w, ", %s %s", name, r.Programs[name])
	}
	offload := "Checksum and segmentation offload are off at every interface."
	if o.offload {
		offload = "Checksum and segmentation offload are as veth has them by default."
	}
	fmt.Fprintf(w, ". %s\n\n    %s\n\n", m.Faults(), r.Command)
	fmt.Fprintf(w, "Client, router and three machines are network namespaces of one machine and share its CPUs: only ratios mean anything. "+
		"%d connections, keep-alive; %d interleaved rounds of %s for each figure; median [smallest to largest]. %s\n\n", o.connections, o.rounds, o.duration, offload)
	for _, a := range arms {
		fmt.Fprintf(w, "- %s: %s\n", a.name, a.what)
	}
	r.table(w)
	r.ratios(w)
}

func (r report) table(w io.Writer) {
	columns := r.options.columns()
	head(w, columns)
	for _, a := range arms {
		fmt.Fprintf(w, "| %s |", a.name)
		for _, c := range columns {
			fmt.Fprintf(w, " %s |", spread.Of(slices.Collect(maps.Values(r.of(a.name, c.value)))).Text(c.format))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	for _, a := range arms {
		errors, missing := 0, 0
		for _, s := range r.Samples {
			if s.Arm == a.name {
				errors += s.Errors
				for _, l := range s.Latency {
					missing += l.Missing
				}
			}
		}
		fmt.Fprintf(w, "- %s: %d requests of wrk failed", a.name, errors)
		for i, rate := range r.options.rates {
			answered := spread.Of(slices.Collect(maps.Values(r.of(a.name, func(s sample) float64 { return s.Latency[i].Achieved }))))
			fmt.Fprintf(w, "; of %d a second %s were answered", rate, answered.Text("%.0f"))
		}
		if missing > 0 {
			fmt.Fprintf(w, "; %d of these never, and they count with the time that they had waited", missing)
		}
		fmt.Fprintln(w)
	}
}

// head is a table's, whose first column has no name.
func head(w io.Writer, columns []column) {
	fmt.Fprint(w, "\n| |")
	for _, c := range columns {
		fmt.Fprintf(w, " %s |", c.name)
	}
	fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---:|", len(columns)))
}

// ratios writes the ratios of one round's measurements.
func (r report) ratios(w io.Writer) {
	columns := r.options.columns()
	fmt.Fprintln(w, "\nshunt, as a multiple of the other in the same round:")
	head(w, columns)
	for _, other := range []string{"haproxy", "ecmp"} {
		fmt.Fprintf(w, "| %s |", other)
		for _, c := range columns {
			var values []float64
			theirs := r.of(other, c.value)
			for round, ours := range r.of("shunt", c.value) {
				values = append(values, ours/theirs[round])
			}
			fmt.Fprintf(w, " %s |", spread.Of(values).Text("%.2f"))
		}
		fmt.Fprintln(w)
	}
}

// write prints the report, and stores it as mesh-<date>-<kernel>.md and .json.
func (r report) write() error {
	r.markdown(os.Stdout)
	dir := r.options.out
	if dir == "" {
		return nil
	}
	name := r.Machine.ReportName(dir, "mesh-")
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("store the report: %w", err)
	}
	page, err := os.Create(filepath.Join(dir, name+".md"))
	if err != nil {
		return fmt.Errorf("store the report: %w", err)
	}
	r.markdown(page)
	return page.Close()
}
