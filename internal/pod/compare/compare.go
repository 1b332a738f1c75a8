// Package compare measures several ways from one pod to another in turn, so that changes of the machine
// during the measurement concern all ways alike.
package compare

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/traffic"
)

// Way is one way that packets can go. Enter switches it on, Leave switches it off; either may be nil.
type Way struct {
	Name         string
	Enter, Leave func() error
	// From and To are the ends of a way between other pods; without them, those of Options.
	From traffic.Namespace
	To   netip.AddrPort
}

// Options select the ends, the kinds of traffic and the ways that are measured.
type Options struct {
	From     traffic.Namespace
	To       netip.AddrPort // of a traffic.Server
	Kinds    []traffic.Kind
	Ways     []Way // the others are compared with the first
	Rounds   int
	Duration time.Duration // of one measurement
}

// Row has the results of one kind of traffic by one way.
type Row struct {
	Kind   traffic.Kind     `json:"kind"`
	Way    string           `json:"way"`
	Rounds []traffic.Result `json:"rounds"`
	Rate   float64          `json:"rate"`            // median, per second; octets of a stream
	CPU    float64          `json:"cpu_nanoseconds"` // median, of a transaction
	// Ratio is the median of the rounds' ratios to the first way, RatioLowest and RatioHighest are the smallest and the largest.
	Ratio        float64 `json:"ratio"`
	RatioLowest  float64 `json:"ratio_lowest"`
	RatioHighest float64 `json:"ratio_highest"`
}

// Run measures. When ctx ends, it stops between two measurements, with the error of ctx.
func Run(ctx context.Context, o Options) ([]Row, error) {
	rows := make([]Row, 0, len(o.Kinds)*len(o.Ways))
	for _, kind := range o.Kinds {
		results := make([][]traffic.Result, len(o.Ways))
		for range o.Rounds {
			for i, w := range o.Ways {
				if ctx.Err() != nil {
					return rows, context.Cause(ctx)
				}
				r, err := w.measure(o, kind)
				if err != nil {
					return rows, fmt.Errorf("%s: %w", w.Name, err)
				}
				results[i] = append(results[i], r)
			}
		}
		for i, w := range o.Ways {
			rows = append(rows, row(kind, w.Name, results[i], results[0]))
		}
	}
	return rows, nil
}

func (w Way) measure(o Options, kind traffic.Kind) (r traffic.Result, err error) {
	if w.Enter != nil {
		if err := w.Enter(); err != nil {
			return r, err
		}
	}
	from, to := o.From, o.To
	if w.From != nil {
		from, to = w.From, w.To
	}
	r, err = traffic.Measure(from, kind, to, o.Duration)
	if w.Leave != nil {
		if leaveErr := w.Leave(); err == nil {
			err = leaveErr
		}
	}
	return r, err
}

func row(kind traffic.Kind, way string, results, first []traffic.Result) Row {
	r := Row{Kind: kind, Way: way, Rounds: results}
	var rates, cpus, ratios []float64
	for i, one := range results {
		rates = append(rates, one.Rate())
		cpus = append(cpus, float64(one.CPUPerTransaction().Nanoseconds()))
		ratios = append(ratios, one.Rate()/first[i].Rate())
	}
	r.Rate, _, _ = traffic.Median(rates)
	r.CPU, _, _ = traffic.Median(cpus)
	r.Ratio, r.RatioLowest, r.RatioHighest = traffic.Median(ratios)
	return r
}

// Print writes rows as a table.
func Print(out io.Writer, rows []Row) {
	fmt.Fprintf(out, "  %-11s %-14s %16s  %-22s %s\n", "", "", "per second", "beside the first", "CPU of both ends")
	for _, r := range rows {
		rate := fmt.Sprintf("%.0f", r.Rate)
		if r.Kind == traffic.Stream {
			rate = fmt.Sprintf("%.2f Gbit", r.Rate*8/1e9)
		}
		fmt.Fprintf(out, "  %-11s %-14s %16s  %4.2f [%4.2f to %4.2f]     %.1f µs\n", r.Kind, r.Way, rate, r.Ratio, r.RatioLowest, r.RatioHighest, r.CPU/1000)
	}
}
