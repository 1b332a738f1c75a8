package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/shunt-lb/shunt/bench/chart"
	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/bench/spread"
)

// inks are the arms' colours.
var inks = map[string]chart.Ink{"MAC swap": chart.Grey, "shunt, XDP": chart.Vermilion, "shunt, tc": chart.Orange, "iptables": chart.Blue, "nftables": chart.Green, "IPVS": chart.Purple}

type report struct {
	options options
	apart   bool                  // wire and node had a CPU each
	arms    []arm                 // that had turns
	missing map[string]error      // the others, and why
	results map[string][][]result // by arm, of each load, of each round
}

// of is a figure over rounds.
func of(rounds []result, figure func(result) float64) spread.Spread {
	var values []float64
	for _, one := range rounds {
		values = append(values, figure(one))
	}
	return spread.Of(values)
}

func offered(r result) float64   { return r.Offered / 1e6 }
func forwarded(r result) float64 { return r.Forwarded / 1e6 }
func percentLost(r result) float64 {
	return 100 * r.lost()
}
func percentLate(r result) float64 { return 100 * float64(r.Late) / float64(r.Sent) }
func percentNode(r result) float64 { return 100 * r.Node }

// most is the load at which an arm forwarded most, and its figures there.
func (r report) most(name string) (best []result) {
	for _, all := range r.results[name] {
		if best == nil || of(all, forwarded).Median > of(best, forwarded).Median {
			best = all
		}
	}
	return best
}

// page writes the report; picture is "" for none.
func (r report) page(to io.Writer, picture string) error {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	line("# Packets forwarded over packets offered, %s\n", m.Date)
	line("%s. %s\n\n    %s\n", m, m.Faults(), machine.Command("bench/offered"))
	if picture != "" {
		line("![Packets forwarded, and CPU, over packets offered](%s)\n", picture)
	}
	line("A node has one Service with one remote backend and full NAT, as a node port with policy Cluster. Frames of %d bytes (UDP, %d flows) come by a veth at a fixed rate,", frameSize, flows)
	line("and leave by the same one. Each cell is the median of %d rounds of %s, with the least and the most; arms take turns at each load.", r.options.rounds, r.options.each)
	line("Before that, a socket of each flow was answered by the backend through each arm, and the frames that came back had the right addresses and checksums.\n")
	if !r.apart {
		line("There was one CPU: generator and node shared it, so loss means little and CPU time means more.\n")
	}
	r.capacities(line)
	r.table(line)
	r.alike(line)
	_, err = io.WriteString(to, out.String())
	return err
}

// capacities is one row an arm.
func (r report) capacities(line func(string, ...any)) {
	line("## At most\n\nThe load at which an arm forwards most. ×: of iptables' packets a second.\n")
	line("| arm | forwarded, M/s | × | of offered, M/s | node's CPU, %% | CPU for a packet, ns |\n|---|---:|---:|---:|---:|---:|")
	base := r.most("iptables")
	for _, a := range r.arms {
		best := r.most(a.name)
		times := "-"
		if base != nil {
			times = fmt.Sprintf("%.1f", of(best, forwarded).Median/of(base, forwarded).Median)
		}
		line("| %s | %s | %s | %.3f | %.0f | %s |", a.name, of(best, forwarded).Text("%.3f"), times, of(best, offered).Median, of(best, percentNode).Median, of(best, result.each).Text("%.0f"))
	}
	line("")
	for _, a := range arms {
		if why := r.missing[a.name]; why != nil {
			line("- %s had no turn: %s.", a.name, why)
			continue
		}
		line("- %s: %s.", a.name, a.what)
	}
}

// table is one row for each arm and load.
func (r report) table(line func(string, ...any)) {
	unknown := 0.0
	for _, a := range r.arms {
		for _, all := range r.results[a.name] {
			unknown = max(unknown, of(all, result.unknown).Max)
		}
	}
	line("\n## Each load\n\nOffered is the number of packets that were really sent. The node's CPU is the time of its NAPI thread. Lost at the wire are, of the packets offered, those that the node has forwarded")
	line("and the counting end had no room for: a limit of the bed, not of the arm. All others were lost in the ring before the node; frames of a turn that no counter knows: at most %.0f.\n", unknown)
	line("| arm | offered, M/s | forwarded, M/s | lost, %% | lost at the wire, %% | node's CPU, %% | CPU for a packet, ns |\n|---|---:|---:|---:|---:|---:|---:|")
	for _, a := range r.arms {
		for _, all := range r.results[a.name] {
			line("| %s | %.3f | %s | %s | %.1f | %s | %s |", a.name, of(all, offered).Median, of(all, forwarded).Text("%.3f"), of(all, percentLost).Text("%.1f"),
				of(all, percentLate).Median, of(all, percentNode).Text("%.0f"), of(all, result.each).Text("%.0f"))
		}
	}
}

// alike says how far the bed is like a network card.
func (r report) alike(line func(string, ...any)) {
	line("\n## Like a network card, and unlike it\n")
	line("- Alike: the arms run the code that they run on a card, in the same order: NAPI, XDP, the building of the kernel's packet, GRO, tc, routing, netfilter, the transmit queue's driver.")
	line("- Alike: the work is done by one CPU, as for one queue of a card, and packets that it cannot take are lost in the ring before it: here 256 frames, on a card usually more.")
	line("- Unlike: a veth has no DMA, no descriptors and no interrupts, so the driver's part is smaller, for all arms. The frames were just written by another CPU. A difference between two arms, in nanoseconds")
	line("  of a packet, says more about a card than a ratio does.")
	line("- Unlike: a frame that leaves costs the node the wake-up of the wire's thread, if that sleeps: at small loads often, under load seldom. So CPU for a packet falls with the load.")
	line("- The generator and the counting end share a CPU. If that is not enough for a load, less is offered than was asked for, and the figures are those of the offer.")
	line("- The work of the wire's end (counting, dropping, freeing) is done by a thread on the generator's CPU and is in no figure of the node. The floor has all costs of the bed: its packets are received and sent, and nothing else.")
}

// write makes the page and its picture in a folder.
func (r report) write(dir string) error {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	name := m.ReportName(dir, "offered-")
	if err := r.chart().Write(filepath.Join(dir, name)); err != nil {
		return err
	}
	var text strings.Builder
	if err := r.page(&text, name+".png"); err != nil {
		return err
	}
	file := filepath.Join(dir, name+".md")
	if err := os.WriteFile(file, []byte(text.String()), 0o644); err != nil {
		return err
	}
	fmt.Println(file)
	return chart.Draw(filepath.Join(dir, name))
}

// chart shows the medians.
func (r report) chart() chart.Chart {
	const x = "offered, million packets a second"
	rate := chart.Panel{Title: "Packets forwarded to a remote backend, one CPU", X: x, Y: "forwarded, million a second", Legend: chart.TopLeft}
	busy := chart.Panel{Title: "CPU of the node's packet work", X: x, Y: "% of one CPU", Head: 0.6, Legend: chart.TopLeft}
	for _, a := range r.arms {
		one, two := chart.Line{Name: a.name, Ink: inks[a.name], Dots: true, Dashed: a.floor}, chart.Line{Name: a.name, Ink: inks[a.name], Dots: true, Dashed: a.floor}
		for _, all := range r.results[a.name] {
			at := of(all, offered).Median
			one.Points = append(one.Points, [2]float64{at, of(all, forwarded).Median})
			two.Points = append(two.Points, [2]float64{at, of(all, percentNode).Median})
		}
		rate.Lines, busy.Lines = append(rate.Lines, one), append(busy.Lines, two)
	}
	return chart.Chart{Width: 8, Height: 9, Panels: []chart.Panel{rate, busy}}
}
