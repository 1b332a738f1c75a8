package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/bench/spread"
	"github.com/shunt-lb/shunt/internal/lab"
)

// report is the record of a run.
type report struct {
	Machine  machine.Machine   `json:"machine"`
	Programs map[string]string `json:"programs"` // their versions
	Command  string            `json:"command"`
	Samples  []sample          `json:"samples"`
}

// line is a sample for people who wait.
func (s sample) line() string {
	text := fmt.Sprintf("round %d, %s, offload %-7s  %-8s", s.Round, s.Layout, s.Offload, s.Arm)
	if s.Error != "" {
		return text + "  " + s.Error
	}
	if s.Keepalive > 0 {
		text += fmt.Sprintf("  %8.0f keep-alive/s", s.Keepalive)
	}
	if s.Latency != nil {
		text += fmt.Sprintf("  p50 %6.0f µs  p99 %6.0f µs", s.Latency.P50us, s.Latency.P99us)
	}
	if s.Connections > 0 {
		text += fmt.Sprintf("  %7.0f connections/s", s.Connections)
	}
	if s.Bulk != nil {
		text += fmt.Sprintf("  %6.2f Gbit/s, %.0f retransmitted", s.Bulk.Gigabit, s.Bulk.Retransmissions)
		if s.Bulk.UDPLost != nil {
			text += fmt.Sprintf(", UDP lost %.3f %%", *s.Bulk.UDPLost)
		}
	}
	if n := s.KeepaliveErrors + s.ConnectionsErrors; n > 0 {
		text += fmt.Sprintf("  %d errors", n)
	}
	return text
}

// row is the medians of one arm.
type row struct {
	arm                               string
	keepalive, connections            float64
	p50, p99                          float64
	keepaliveErrors, connectionErrors int
	errors                            []string
}

// rows computes the medians for one setting, in the order of arms.
func (p report) rows(set setting) []row {
	var rows []row
	for _, a := range arms {
		r := row{arm: a.name}
		var keepalive, connections, p50, p99 []float64
		found := false
		for _, s := range p.Samples {
			if s.Arm != a.name || s.setting != set {
				continue
			}
			found = true
			if s.Error != "" {
				r.errors = append(r.errors, s.Error)
				continue
			}
			keepalive = append(keepalive, s.Keepalive)
			if s.Connections > 0 {
				connections = append(connections, s.Connections)
			}
			if s.Latency != nil {
				p50, p99 = append(p50, s.Latency.P50us), append(p99, s.Latency.P99us)
			}
			r.keepaliveErrors += s.KeepaliveErrors
			r.connectionErrors += s.ConnectionsErrors
		}
		if found {
			r.keepalive, r.connections, r.p50, r.p99 = spread.Median(keepalive), spread.Median(connections), spread.Median(p50), spread.Median(p99)
			rows = append(rows, r)
		}
	}
	return rows
}

// figure prints a number, or a dash where there is none.
func figure(format string, value float64) string {
	if value == 0 {
		return "–"
	}
	return fmt.Sprintf(format, value)
}

// ratio prints a/b, or a dash.
func ratio(a, b float64) string {
	if a == 0 || b == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f", a/b)
}

// markdown writes the report for people.
func (p report) markdown(w io.Writer, o options) {
	m := p.Machine
	fmt.Fprintf(w, "# Requests through a balancer, %s\n\n", m.Date)
	fmt.Fprint(w, m)
	for _, name := range slices.Sorted(maps.Keys(p.Programs)) {
		fmt.Fprintf(w, ", %s %s", name, p.Programs[name])
	}
	fmt.Fprintf(w, ". %s\n\n    %s\n\n", m.Faults(), p.Command)
	fmt.Fprintf(w, "Client, balancer and servers are network namespaces of one machine and share its CPUs: only ratios mean anything. "+
		"%d connections, medians of %d rounds; keep-alive and latency %s each, new connections %s (%d rounds). "+
		"GRO is on at client and servers in every arm, which a veth needs to take redirected frames; "+
		"every interface has a queue (%s), as a network card has: the 256 frames of a veth's ring alone are lost in bursts of any sender.\n\n",
		o.connections, o.rounds, o.keepalive, o.duration, o.connectionRounds, bed.Queue)
	for _, a := range arms {
		if slices.Contains(o.arms, a.name) {
			fmt.Fprintf(w, "- %s: %s\n", a.name, a.what)
		}
	}
	for _, set := range o.settings() {
		p.tables(w, set, o)
	}
}

// tables writes figures and ratios for one setting.
func (p report) tables(w io.Writer, set setting, o options) {
	title := "off at every interface (and with it segmentation offload)"
	if set.Offload == "default" {
		title = "as veth has it by default, on"
	}
	arms := "Two arms"
	if set.Layout == string(lab.OneArm) {
		arms = "One arm, behind a switch"
	}
	fmt.Fprintf(w, "\n## %s; checksum offload %s\n\n", arms, title)
	fmt.Fprintf(w, "| arm | keep-alive requests/s | new connections/s | p50 at %d/s | p99 at %d/s | errors |\n|---|---:|---:|---:|---:|---:|\n", o.rate, o.rate)
	rows := p.rows(set)
	for _, r := range rows {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %d |\n", r.arm, figure("%.0f", r.keepalive), figure("%.0f", r.connections),
			figure("%.0f µs", r.p50), figure("%.0f µs", r.p99), r.keepaliveErrors+r.connectionErrors)
	}
	for _, r := range rows {
		for _, text := range r.errors {
			first, _, _ := strings.Cut(text, "\n")
			fmt.Fprintf(w, "\n%s: %s\n", r.arm, first)
		}
	}
	for _, kind := range []struct {
		title string
		value func(row) float64
	}{
		{"Keep-alive", func(r row) float64 { return r.keepalive }},
		{"New connections", func(r row) float64 { return r.connections }},
	} {
		fmt.Fprintf(w, "\n%s, row divided by column:\n\n| |", kind.title)
		for _, column := range rows {
			fmt.Fprintf(w, " %s |", column.arm)
		}
		fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---:|", len(rows)))
		for _, r := range rows {
			fmt.Fprintf(w, "| %s |", r.arm)
			for _, column := range rows {
				fmt.Fprintf(w, " %s |", ratio(kind.value(r), kind.value(column)))
			}
			fmt.Fprintln(w)
		}
	}
	fmt.Fprint(w, p.bulkTable(set), p.aimsTable(set))
}

// write prints the report and stores it as <date>-<kernel>.md and .json. An arm that
// failed makes the run fail after that.
func (p report) write(o options) error {
	p.markdown(os.Stdout, o)
	dir := o.out
	if dir == "" && !o.quick {
		dir = filepath.Join("bench", "results")
	}
	if dir != "" {
		if err := p.store(dir, o); err != nil {
			return fmt.Errorf("store the report: %w", err)
		}
	}
	var errs []error
	for _, set := range o.settings() {
		for _, r := range p.rows(set) {
			a := arms[slices.IndexFunc(arms, func(a arm) bool { return a.name == r.arm })]
			if len(r.errors) > 0 && !(a.incremental && set.Offload == "default") {
				errs = append(errs, fmt.Errorf("%s (%s, offload %s) failed in %d rounds: %s", r.arm, set.Layout, set.Offload, len(r.errors), r.errors[0]))
			}
		}
	}
	return errors.Join(errs...)
}

// store writes both files.
func (p report) store(dir string, o options) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	name := p.Machine.ReportName(dir, "")
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), append(text, '\n'), 0o644); err != nil {
		return err
	}
	var page strings.Builder
	p.markdown(&page, o)
	file := filepath.Join(dir, name+".md")
	if err := os.WriteFile(file, []byte(page.String()), 0o644); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "stored", file, "and", name+".json")
	return nil
}
