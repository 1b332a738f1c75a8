package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/bench/chart"
	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// inks are the receivers' colours, in their order.
var inks = []chart.Ink{chart.Dark, chart.Vermilion, chart.Blue, chart.Green}

type report struct {
	rounds  int
	each    time.Duration
	results map[string][][]result // by receiver, of each load, of each round
}

// spread is median, least and most.
func spread(all []result, of func(result) float64) (median, least, most float64) {
	var values []float64
	for _, r := range all {
		values = append(values, of(r))
	}
	slices.Sort(values)
	return values[len(values)/2], values[0], values[len(values)-1]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// page writes the report; plot is the name of its picture, "" for none.
func (r report) page(to io.Writer, picture string) error {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	out := &printer{to: to}
	out.line("# Delay over offered load, %s\n", m.Date)
	out.line("%s. %s\n\n    %s\n", m, m.Faults(), machine.Command("bench/overload"))
	if picture != "" {
		out.line("![Delay over offered load](%s)\n", picture)
	}
	out.line("A program works %s on each datagram, so 1.0 is %.0f datagrams a second. The delay is from sending to the begin of the work. Each cell is the median of %d rounds of %s, with the least and the most in brackets; receivers take turns. veth, copy mode, one queue, batches of %d; the kernel's socket has its default buffer.\n",
		workFor, capacity, r.rounds, r.each, batchSize)
	for _, d := range bounds {
		out.line("- %s: `max_queue_delay: %s, expected_rate: %.0f`, which makes a ring of %d", bounded(d), d, capacity, xsk.RingSize(d, capacity))
	}
	out.line("\n| receiver | load | offered/s | delivered/s | p50, ms | p99, ms | datagrams that no counter knows |\n|---|---:|---:|---:|---:|---:|---:|")
	for _, name := range receivers() {
		for i, load := range loads {
			all := r.results[name][i]
			offered, _, _ := spread(all, func(x result) float64 { return x.Offered })
			delivered, _, _ := spread(all, func(x result) float64 { return x.Delivered })
			p50, p50Least, p50Most := spread(all, func(x result) float64 { return milliseconds(x.P50) })
			p99, p99Least, p99Most := spread(all, func(x result) float64 { return milliseconds(x.P99) })
			_, least, most := spread(all, func(x result) float64 { return float64(x.Lost) })
			lost := fmt.Sprintf("%.0f", max(most, -least))
			if name == kernel {
				lost = "-"
			}
			out.line("| %s | %g | %.0f | %.0f | %.3f (%.3f–%.3f) | %.2f (%.2f–%.2f) | %s |", name, load, offered, delivered, p50, p50Least, p50Most, p99, p99Least, p99Most, lost)
		}
	}
	return out.err
}

// write makes the page and its picture in a folder.
func (r report) write(dir string) error {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	name := m.ReportName(dir, "udp-overload-")
	if err := r.chart().Write(filepath.Join(dir, name)); err != nil {
		return err
	}
	page, err := os.Create(filepath.Join(dir, name+".md"))
	if err != nil {
		return err
	}
	if err := r.page(page, name+".png"); err != nil {
		_ = page.Close()
		return err
	}
	fmt.Println(page.Name())
	if err := page.Close(); err != nil {
		return err
	}
	return chart.Draw(filepath.Join(dir, name))
}

// chart shows the median delay of each receiver.
func (r report) chart() chart.Chart {
	delay := chart.Panel{
		Title: "Delay of delivered datagrams, median",
		X:     "offered load, of the load that the program can work off", Y: "milliseconds", LogY: true, Legend: chart.TopLeft,
	}
	for n, name := range receivers() {
		line := chart.Line{Name: name, Ink: inks[n], Dots: true}
		for i, load := range loads {
			p50, _, _ := spread(r.results[name][i], func(x result) float64 { return milliseconds(x.P50) })
			line.Points = append(line.Points, [2]float64{load, max(p50, 0.001)})
		}
		delay.Lines = append(delay.Lines, line)
	}
	return chart.Chart{Width: 8, Height: 5, Panels: []chart.Panel{delay}}
}

// printer keeps the first error.
type printer struct {
	to  io.Writer
	err error
}

func (p *printer) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.to, format+"\n", args...)
	}
}
