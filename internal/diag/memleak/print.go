package memleak

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// printer writes the tool's findings.
type printer interface {
	start(beginning) error
	interval(Interval) error
	summary(Interval) error
}

// beginning has the facts of the first lines.
type beginning struct {
	results []sensor.Result
	btf     string
	hidden  error           // reason why stacks of the kernel have no names
	process *watchedProcess // nil: the kernel's memory is watched
}

func newPrinter(out io.Writer, asJSON bool) printer {
	if asJSON {
		return jsonLines{json.NewEncoder(out)}
	}
	return text{out}
}

// text writes for people.
type text struct{ out io.Writer }

func (p text) start(b beginning) error {
	for _, r := range b.results {
		fmt.Fprintln(p.out, r)
	}
	if b.hidden != nil {
		fmt.Fprintln(p.out, b.hidden)
	}
	if b.process != nil {
		_, err := fmt.Fprintln(p.out, b.process)
		return err
	}
	_, err := fmt.Fprintf(p.out, "types: %s\n", b.btf)
	return err
}

func (p text) interval(i Interval) error {
	fmt.Fprintf(p.out, "\n%s  %.1f s: ", i.Time.Format("15:04:05"), i.Seconds)
	return p.rows(i)
}

func (p text) summary(i Interval) error {
	if i.Ended {
		fmt.Fprintf(p.out, "\nThe process has ended. Live allocations are those that it never freed.")
	}
	fmt.Fprintf(p.out, "\nSummary of %.1f s: ", i.Seconds)
	if err := p.rows(i); err != nil {
		return err
	}
	all := i.Counts.sum()
	fmt.Fprintf(p.out, "\nallocations: %d kept, %d not kept: %d the table was full, %d it was busy, %d the sensor was interrupted\n",
		all.Allocs, all.Full+all.AllocsBusy+all.AllocsNotRun, all.Full, all.AllocsBusy, all.AllocsNotRun)
	fmt.Fprintf(p.out, "frees: %d seen, %d missed: %d the table was busy, %d the sensor was interrupted; %d were detected when the address was used again; %d of older allocations, or of allocations that are not watched\n",
		all.Frees, all.FreesBusy+all.FreesNotRun, all.FreesBusy, all.FreesNotRun, all.Unfreed, all.FreesOlder)
	if all.Full > 0 {
		fmt.Fprintf(p.out, "the table of live allocations was full: make it larger with --table, or watch less with --sample\n")
	}
	if all.NoStack+all.NoCache > 0 {
		fmt.Fprintf(p.out, "%d allocations have no stack, and %d have no name of their cache, because there was no room\n", all.NoStack, all.NoCache)
	}
	_, err := fmt.Fprintf(p.out, "confidence: %.2f %% of frees were seen\n", i.Confidence)
	return err
}

func (p text) rows(i Interval) error {
	grow := "rows grow"
	if i.Growing == 1 {
		grow = "row grows"
	}
	fmt.Fprintf(p.out, "%d live allocations, %s; %d %s", i.Live, size(i.Bytes), i.Growing, grow)
	if i.Sample > 1 {
		fmt.Fprintf(p.out, "; a sample of 1/%d, and rows are estimates with the error of 95 %% of them", i.Sample)
	}
	fmt.Fprintln(p.out)
	if i.Spending != nil {
		if err := line.Spending(p.out, *i.Spending); err != nil {
			return err
		}
	}
	if len(i.Rows) > 0 {
		fmt.Fprintf(p.out, "%-11s %-7s %-20s %12s %16s %10s %8s %8s\n", "STATE", "KIND", "CACHE", "LIVE", "BYTES", "GROWTH/s", "OLDEST", "UNFREED")
	}
	for _, r := range i.Rows {
		if err := p.row(r); err != nil {
			return err
		}
	}
	if i.Hidden > 0 {
		fmt.Fprintf(p.out, "%d more rows are not shown\n", i.Hidden)
	}
	return nil
}

func (p text) row(r Row) error {
	live, bytes := fmt.Sprint(r.Live), size(r.Bytes)
	if e := r.Estimate; e != nil {
		live, bytes = fmt.Sprintf("%d±%d", e.Live, e.LiveError), size(e.Bytes)+"±"+size(e.BytesError)
	}
	cache := "-"
	if r.Cache != "" {
		cache = event.Printable(r.Cache)
	}
	fmt.Fprintf(p.out, "%-11s %-7s %-20s %12s %16s %+10.1f %7.1fs %8d\n", r.State, r.Kind, cache, live, bytes, r.Growth, r.Oldest, r.Unfreed)
	for _, frame := range r.Stack {
		fmt.Fprintf(p.out, "    %s\n", frame)
	}
	if len(r.Stack) == 0 {
		fmt.Fprintln(p.out, "    the stack is not known")
	}
	if len(r.Cgroups) != 1 || r.Cgroups[0].Cgroup != "/" {
		fmt.Fprintf(p.out, "    cgroups: %s\n", groups(r.Cgroups))
	}
	for _, one := range r.Addresses {
		fmt.Fprintf(p.out, "    %s %d bytes, %.1f s, process %d\n", one.Address, one.Bytes, one.Age, one.PID)
	}
	if r.Untold > 0 {
		fmt.Fprintf(p.out, "    %d more are not shown\n", r.Untold)
	}
	return nil
}

// cgroupsShown is the number of cgroups that a row names.
const cgroupsShown = 3

func groups(all []Share) string {
	var parts []string
	for i, s := range all {
		if i == cgroupsShown {
			parts = append(parts, fmt.Sprintf("and %d more", len(all)-i))
			break
		}
		parts = append(parts, fmt.Sprintf("%s %d", event.Printable(s.Cgroup), s.Live))
	}
	return strings.Join(parts, ", ")
}

// size returns a number of bytes in words.
func size(bytes uint64) string {
	switch {
	case bytes < 10_000:
		return fmt.Sprintf("%d B", bytes)
	case bytes < 10<<20:
		return fmt.Sprintf("%.1f KiB", float64(bytes)/1024)
	}
	return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
}

// jsonLines writes for programs: one object a line, each with its type.
type jsonLines struct{ out *json.Encoder }

type startLine struct {
	line.Start
	Hidden  string       `json:"symbols_hidden,omitempty"` // reason why stacks have no names
	Process *processLine `json:"process,omitempty"`        // the watched process; without it, the kernel is watched
}

type processLine struct {
	PID       int      `json:"pid"`
	Comm      string   `json:"comm"`
	Libraries []string `json:"libraries"` // files that have the allocator
}

type intervalLine struct {
	Type string `json:"type"` // interval, or summary
	Interval
}

func (p jsonLines) start(b beginning) error {
	l := startLine{Start: line.NewStart(b.results, b.btf)}
	if b.hidden != nil {
		l.Hidden = b.hidden.Error()
	}
	if b.process != nil {
		l.Process = &processLine{PID: b.process.pid, Comm: b.process.comm}
		for _, f := range b.process.libraries {
			l.Process.Libraries = append(l.Process.Libraries, f.Path)
		}
	}
	return p.out.Encode(l)
}

func (p jsonLines) interval(i Interval) error { return p.out.Encode(intervalLine{"interval", i}) }

func (p jsonLines) summary(i Interval) error { return p.out.Encode(intervalLine{"summary", i}) }
