package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/bench/spread"
)

type report struct {
	options options
	apart   bool                // client and subject had a CPU each
	results map[string][]result // by way, of each round
}

// of is a figure of a way, over the rounds.
func (r report) of(w way, figure func(result) float64) spread.Spread {
	var values []float64
	for _, one := range r.results[w.name] {
		values = append(values, figure(one))
	}
	return spread.Of(values)
}

// page writes the report.
func (r report) page(to io.Writer) error {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	line("# Ways to answer a datagram, %s\n", m.Date)
	line("%s. %s\n\n    %s\n", m, m.Faults(), machine.Command("bench/udppath"))
	line("Medians of %d interleaved rounds, with the least and the most. Each round has %s of one question after the other, and %s of %d open", r.options.rounds, r.options.each, r.options.each, open)
	line("questions. Payloads have %d bytes; the client is a spinning socket of the kernel's, so its share is in each row. ×: of %s.\n", payloadSize, ways[reference].name)
	if !r.apart {
		line("There was one CPU: client and subject took turns on it, and spinning means little.\n")
	}
	p50 := func(x result) float64 { return x.P50 }
	rate := func(x result) float64 { return x.PerSecond / 1000 }
	line("| way | p50, µs | × | p99, µs | p99.9, µs | answers, 1000/s | × | late |")
	line("|---|---|---|---|---|---|---|---|")
	base, baseRate := r.of(ways[reference], p50).Median, r.of(ways[reference], rate).Median
	for _, w := range ways {
		late := r.of(w, func(x result) float64 { return float64(x.Late) })
		line("| %s | %s | %s | %s | %s | %s | %s | %s |", w.name, r.of(w, p50).Text("%.1f"), ratio(r.of(w, p50).Median, base),
			r.of(w, func(x result) float64 { return x.P99 }).Text("%.1f"), r.of(w, func(x result) float64 { return x.P999 }).Text("%.1f"),
			r.of(w, rate).Text("%.0f"), ratio(r.of(w, rate).Median, baseRate), late.Text("%.0f"))
	}
	line("\nNot measured here: zero-copy and network cards, because a veth has none; preferred busy polling of a card's driver, because that of")
	line("a veth works on the sender's CPU; receiving alone against XDP_DROP, because answers share the sender's CPU; libxdp's own loop, other Go")
	line("libraries and DPDK's testpmd, which this benchmark does not build.")
	_, err = io.WriteString(to, out.String())
	return err
}

// ratio is "-" where there is nothing to compare with.
func ratio(value, base float64) string {
	if base == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", value/base)
}

// write makes the page a file in a folder.
func (r report) write(dir string) (err error) {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	path := filepath.Join(dir, m.ReportName(dir, "udp-ways-")+".md")
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	fmt.Println(path)
	return r.page(io.MultiWriter(file, os.Stdout))
}
