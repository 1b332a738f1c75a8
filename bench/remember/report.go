package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/bench/machine"
)

// lost is the reason that must not be counted (bpf/core/reasons.h).
const lost = "not_remembered"

// report is a run's results, and the machine that gave them.
type report struct {
	options
	results []*result
	took    time.Duration
	machine machine.Machine
}

func newReport(o options, results []*result, took time.Duration) (report, error) {
	r := report{options: o, results: results, took: took}
	var err error
	r.machine, err = machine.Describe()
	return r, err
}

// verdict is an error if a flow moved that must not, or was lost for want of room.
func (r report) verdict() error {
	var errs []error
	for _, one := range r.results {
		if one.moved > 0 {
			errs = append(errs, fmt.Errorf("manner %s: %d flows reached another backend though theirs was not removed; the first: %s", one.manner.name, one.moved, one.first))
		}
		if n := one.reasons[lost]; n > 0 {
			errs = append(errs, fmt.Errorf("manner %s: %d packets counted as %s: the figures are too low; raise limits.remembered in bench/remember", one.manner.name, n, lost))
		}
	}
	return errors.Join(errs...)
}

// write prints the page, and stores it with the picture's data as remembered-<date>-<kernel>, whose
// path it returns; empty where nothing is stored.
func (r report) write(dir string) (path string, err error) {
	if dir == "" {
		return "", r.page(os.Stdout, "")
	}
	name := r.machine.ReportName(dir, "remembered-")
	path = filepath.Join(dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := r.chart().Write(path); err != nil {
		return "", err
	}
	var page strings.Builder
	if err := r.page(&page, name); err != nil {
		return "", err
	}
	fmt.Print(page.String())
	return path, os.WriteFile(path+".md", []byte(page.String()), 0o644)
}

func percent(part, whole float64) string { return fmt.Sprintf("%.1f %%", 100*part/whole) }

// page writes the report as text. name is the plot's name, if there is a plot.
func (r report) page(w io.Writer, name string) error {
	p := printer{w: w}
	p.line("# Remembered flows against full tracking, %s\n", r.machine.Date)
	p.line("%s. %s\n\n    %s\n", r.machine, r.machine.Faults(), machine.Command("bench/remember"))
	if name != "" {
		p.line("![Flows remembered over time](%s.png)\n\n[The same as SVG](%s.svg)\n", name, name)
	}
	r.summary(&p)
	r.anatomy(&p)
	r.method(&p)
	return p.err
}

// summary is the figures.
func (r report) summary(p *printer) {
	p.line("A service with %d backends and direct return, of which %d are replaced, one every %s. Figures are from the first replacement to %s after the last.\n",
		backendCount, r.changes, r.interval, r.interval)
	for _, one := range r.results {
		p.line("- %s: %s", one.manner.name, one.manner.what)
	}
	p.line("\n| manner | alive flows, average | all tracked by the same rules, average | remembered, average | remembered, peak |\n|---|---:|---:|---:|---:|")
	from, to := replacing(r.options)
	for _, one := range r.results {
		f := one.figures(from, to)
		p.line("| %s | %.0f | %.0f | %.0f | %d |", one.manner.name, f.alive, f.tracked, f.remembered, f.peak.remembered)
	}
	p.line("\nThe aim is a tenth or less.\n\n| remembered, as a share | average, of the average | peak, of the average | largest at any moment |\n|---|---:|---:|---:|")
	for _, one := range r.results {
		f := one.figures(from, to)
		p.line("| %s, of the flows alive | %s | %s | %s |", one.manner.name,
			percent(f.remembered, f.alive), percent(float64(f.peak.remembered), f.alive), percent(f.ofAlive, 1))
		p.line("| %s, of all tracked by the same rules | %s | %s | %s |", one.manner.name,
			percent(f.remembered, f.tracked), percent(float64(f.peak.remembered), f.tracked), percent(f.ofTracked, 1))
	}
	p.line("\n\"All tracked by the same rules\" is what `tracking: always` holds: an entry from a flow's first packet until %s after its client's FIN, "+
		"or %s after the last packet of a flow that ended without one.\n", halfClosed, timeouts(0).TCPEstablished)
}

// anatomy lists the remembered entries by kind.
func (r report) anatomy(p *printer) {
	p.line("## Which entries they are\n")
	p.line("| manner | | in transition, with the current backend | in transition, with another | in other slots, with another | of all: of flows that have ended | of those: without the FIN noted |\n|---|---|---:|---:|---:|---:|---:|")
	from, to := replacing(r.options)
	for _, one := range r.results {
		f := one.figures(from, to)
		for _, row := range []struct {
			name string
			kinds
		}{{"average", f.average}, {fmt.Sprintf("at the peak, %s", f.peak.at), kindsOf(f.peak)}} {
			p.line("| %s | %s | %.0f | %.0f | %.0f | %.0f | %.0f |", one.manner.name, row.name,
				row.agreeing, row.differing, row.elsewhere, row.over, row.overOpen)
		}
	}
	p.line("")
	for _, one := range r.results {
		f := one.figures(from, to)
		p.line("- %s: a replacement gave %s of the slots another backend on average, and %d entries were left at the end, %s later.",
			one.manner.name, percent(one.slots, float64(r.changes)), f.last, after)
	}
	// The slots of the old backend, and the slots that the new one takes, some of which are the same.
	least := 2.0/backendCount - 1.0/(backendCount*backendCount)
	p.line("\nThe old backend's share of the slots goes to all others, and the new one takes its share from all: a table in which "+
		"each backend's slots follow from its address alone changes at least %s. A slot that changes remembers the flows of its clients for the settle time, "+
		"and afterwards those that began before the change.\n", percent(least, 1))
}

// method explains to a reader how to judge the figures, and how to repeat them.
func (r report) method(p *printer) {
	p.line("## How\n")
	p.line("The loaded XDP program and the reconciler are those of `shunt run`, in a network namespace of their own, `forwarding: dsr-ipip`, "+
		"table_size %d, timeouts.settle %s, other timeouts as unless configured, seed %d. Traffic and time are simulated; the run took %s.\n", r.tableSize, r.settle, r.seed, r.took.Round(time.Second))
	var shares []string
	for _, l := range lengths {
		shares = append(shares, fmt.Sprintf("%.0f %% with a mean of %s", 100*l.share, l.mean))
	}
	p.line("- Flows: TCP, %d alive at once, arrivals a Poisson process (%.1f a second). Lengths are exponential: %s. "+
		"It begins with flows of that mixture in their stationary state.", r.flows, float64(r.flows)/meanLength().Seconds(), strings.Join(shares, ", "))
	p.line("- Each flow sends SYN, ACK, a packet every %s to %s, FIN, ACK; %.0f %% of them pause for up to %s between packets instead.", gapMin, gapMax, 100*idleShare, idleGapMax)
	p.line("- A flow whose backend was removed ends with its next packet, because the next backend resets it; its client opens another at once.")
	p.line("- Time: the reconciler's clock is the simulation's; every %s the entries' time of the last packet is set back in the map, `sh_recall` runs as it does under the daemon, "+
		"and every %s all is counted. So a timeout may end up to %s early.", step, sampling, step)
	p.line("- The budget of new entries per second of real time is lifted, because a second of the simulation passes in some milliseconds; limits.remembered is large enough. No packet was to be counted as `%s`.", lost)
	p.line("")
	p.line("| manner | flows | packets | flows whose backend was removed | other flows that moved | idle longer than settle, moved | %s |\n|---|---:|---:|---:|---:|---:|---:|", lost)
	for _, one := range r.results {
		p.line("| %s | %d | %d | %d | %d | %d | %d |", one.manner.name, one.made, one.packets, one.reset, one.moved, one.excused, one.reasons[lost])
	}
}

// printer writes lines and keeps the first error.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(format string, values ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", values...)
	}
}
