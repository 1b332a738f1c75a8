package main

import (
	"errors"
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

type report struct {
	options options
	apart   bool                // client and subject had a CPU each
	missing map[string]string   // peers, and why they had no turn
	results map[string][]result // by way, of each round
	rates   map[string][]rate   // by way, of each round
}

// of is a figure over rounds. It panics for none.
func of[T any](rounds []T, figure func(T) float64) spread.Spread {
	var values []float64
	for _, one := range rounds {
		values = append(values, figure(one))
	}
	return spread.Of(values)
}

func p50Of(x result) float64   { return x.P50 }
func perSecond(x rate) float64 { return x.Taken / 1000 }

// page writes the report.
func (r report) page(to io.Writer) error {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	line("# Ways to get a datagram, %s\n", m.Date)
	line("%s. %s\n\n    %s\n", m, m.Faults(), machine.Command("bench/udppath"))
	line("Medians of %d interleaved rounds, with the least and the most. Payloads have %d bytes.\n", r.options.rounds, payloadSize)
	if !r.apart {
		line("There was one CPU: client and subject took turns on it, and spinning means little.\n")
	}
	r.answering(line)
	r.receiving(line)
	r.aims(line)
	line("## What was not measured\n")
	for _, name := range slices.Sorted(maps.Keys(r.missing)) {
		line("- %s: %s.", name, r.missing[name])
	}
	line("- atoonk/go-afxdp, the other library in Go without cgo: Go's module proxy did not have it when this was written.")
	line("- Zero-copy and network cards, because a veth has none; preferred busy polling, because the driver of a veth works on the sender's CPU:")
	line("  a socket that polls takes that work to its own CPU, and loses most of what it is sent as fast as the link takes it. DPDK's own drivers take a card away from the kernel, so they are not compared either.")
	_, err = io.WriteString(to, out.String())
	return err
}

func (r report) answering(line func(string, ...any)) {
	line("## Answering\n")
	line("Each round has %s of one question after the other, and %s of %d open questions. The client is a spinning socket of the kernel's, so its", r.options.each, r.options.each, open)
	line("share is in each row. Rings have %d entries, those of peers %d. ×: of %s.\n", echoRing, receiveRing, ways[spinning].name)
	line("| way | p50, µs | × | p99, µs | p99.9, µs | answers, 1000/s | × | late |")
	line("|---|---|---|---|---|---|---|---|")
	answers := func(x result) float64 { return x.PerSecond / 1000 }
	base := r.results[ways[spinning].name]
	for _, w := range ways {
		all := r.results[w.name]
		if all == nil {
			continue
		}
		line("| %s | %s | %s | %s | %s | %s | %s | %s |", w.name, of(all, p50Of).Text("%.1f"), ratio(of(all, p50Of).Median, of(base, p50Of).Median),
			of(all, func(x result) float64 { return x.P99 }).Text("%.1f"), of(all, func(x result) float64 { return x.P999 }).Text("%.1f"),
			of(all, answers).Text("%.0f"), ratio(of(all, answers).Median, of(base, answers).Median), of(all, func(x result) float64 { return float64(x.Late) }).Text("%.0f"))
	}
}

func (r report) receiving(line func(string, ...any)) {
	line("\n## Receiving\n")
	line("In each round the kernel makes %d frames on the client's CPU (BPF_PROG_TEST_RUN with live frames) and sends them over the link. The", r.options.frames)
	line("softirq of the receiving end runs on that CPU too, so the ways of the kernel slow the generator down. Rings have %d entries. Lost frames are those", receiveRing)
	line("that the program has not received, of those that were made. ×: of %s, and of %s. Sockets have 8 MB of room.\n", ways[batches].name, ways[limitRow].name)
	line("| way | received, 1000/s | × | × of the limit | lost, %% |")
	line("|---|---|---|---|---|")
	for _, w := range ways {
		all := r.rates[w.name]
		if all == nil {
			continue
		}
		is := of(all, perSecond)
		line("| %s | %s | %s | %s | %s |", w.name, is.Text("%.0f"), ratio(is.Median, of(r.rates[ways[batches].name], perSecond).Median),
			ratio(is.Median, of(r.rates[ways[limitRow].name], perSecond).Median), of(all, func(x rate) float64 { return 100 * (1 - x.Taken/x.Offered) }).Text("%.1f"))
	}
	line("")
}

// aims compares the figures with the aims of the UDP path.
func (r report) aims(line func(string, ...any)) {
	line("## Aims\n\n| aim | is | reached |\n|---|---|---|")
	aim := func(text string, is float64, reached bool) {
		word := "no"
		if reached {
			word = "yes"
		}
		line("| %s | %.2f | %s |", text, is, word)
	}
	p50 := func(i int) float64 { return of(r.results[ways[i].name], p50Of).Median }
	taken := func(i int) float64 { return of(r.rates[ways[i].name], perSecond).Median }
	trip := p50(spinC) / p50(spinning)
	aim("p50 of spinning, C, at most 0.65 of "+ways[spinning].name, trip, trip <= 0.65)
	times := taken(spinC) / max(taken(batches), taken(polling))
	aim("received when spinning, C, at least 3 × recvmmsg, the faster of both", times, times >= 3)
	part := taken(spinC) / taken(limitRow)
	aim("received when spinning, C, at least 0.95 of "+ways[limitRow].name, part, part >= 0.95)
	language := p50(spinGo) / p50(spinC)
	aim("p50 of Go at most 1.03 of C", language, language <= 1.03)
	language = taken(spinGo) / taken(spinC)
	aim("received by Go at least 0.97 of C", language, language >= 0.97)
	for i := firstPeer; i < limitRow; i++ {
		if r.results[ways[i].name] == nil {
			continue
		}
		trip, times := p50(spinC)/p50(i), taken(spinC)/taken(i)
		aim("p50 of spinning, C, at most that of "+ways[i].name, trip, trip <= 1)
		aim("received when spinning, C, at least that of "+ways[i].name, times, times >= 1)
	}
	line("")
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
