package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/bench/spread"
	"github.com/shunt-lb/shunt/test/deed"
)

// page writes the report.
func (r *report) page(to io.Writer) error {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# What the guard costs programs, %s\n\n%s. %s\n\n    %s\n\n", m.Date, m, m.Faults(), machine.Command("bench/guard"))
	if !r.onlyWaits {
		r.tables(&b)
	}
	r.tableOfWaits(&b)
	_, err = io.WriteString(to, b.String())
	return err
}

// tables has the CPU times.
func (r *report) tables(b *strings.Builder) {
	fmt.Fprintf(b, "CPU time of one, in the process that does it and its children: medians of %d rounds, with the least and the most; of each round the least of its %d pieces. Under a feature it is the ratio to the same round without the guard.\n\n", r.rounds, r.pieces)
	r.table(b)
	fmt.Fprintf(b, "\nCPU time of the guard's own process for one, in microseconds:\n\n")
	r.tableOfAgents(b)
	b.WriteString("\n")
	for _, d := range deed.All {
		fmt.Fprintf(b, "- %s: %s\n", d.Name, d.Doc)
	}
	b.WriteString("\n")
	for _, a := range r.arms() {
		fmt.Fprintf(b, "- %s: %s\n", a.name, a.doc)
	}
	for _, text := range r.without {
		fmt.Fprintf(b, "- not measured: %s\n", text)
	}
	b.WriteString("\n")
}

// arms are the measured ones.
func (r *report) arms() (all []arm) {
	for _, a := range arms {
		if r.results[a.name] != nil {
			all = append(all, a)
		}
	}
	return all
}

func (r *report) head(b *strings.Builder, first string, measured []arm) {
	fmt.Fprintf(b, "| | %s |", first)
	for _, a := range measured {
		fmt.Fprintf(b, " %s |", a.name)
	}
	fmt.Fprintf(b, "\n|---|---:|%s\n", strings.Repeat("---:|", len(measured)))
}

// table has nanoseconds without the guard, and ratios to that.
func (r *report) table(b *strings.Builder) {
	measured := r.arms()
	r.head(b, "nothing, ns", measured[1:])
	for _, d := range deed.All {
		without := r.results[arms[0].name][d.Name]
		fmt.Fprintf(b, "| %s | %s |", d.Name, spread.Of(without).Text("%.0f"))
		for _, a := range measured[1:] {
			fmt.Fprintf(b, " %s |", spread.Of(ratios(r.results[a.name][d.Name], without)).Text("%.2f"))
		}
		b.WriteString("\n")
	}
}

// ratios are the rounds' ratios.
func ratios(with, without []float64) (all []float64) {
	for i := range with {
		all = append(all, with[i]/without[i])
	}
	return all
}

func (r *report) tableOfAgents(b *strings.Builder) {
	measured := r.arms()
	r.head(b, "nothing", measured[1:])
	for _, d := range deed.All {
		fmt.Fprintf(b, "| %s |", d.Name)
		for _, a := range measured {
			fmt.Fprintf(b, " %.2f |", spread.Median(r.agents[a.name][d.Name])/1000)
		}
		b.WriteString("\n")
	}
}
