package sched

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// runqPrinter writes the findings of `shunt diag runq`.
type runqPrinter interface {
	start(results []sensor.Result, btf string) error
	wait(Wait) error
	budget(sensor.Spending) error
	summary(Queues, Ending) error
}

// runqText writes for people.
type runqText struct {
	out       io.Writer
	threshold time.Duration
	top       int // number of tasks; 0: all
}

func (p runqText) start(results []sensor.Result, btf string) error {
	printSensors(p.out, results, btf)
	_, err := fmt.Fprintf(p.out, "\nwaits for a CPU of more than %v:\n%-15s %3s  %-16s %-8s %10s  %s\n", p.threshold, "TIME", "CPU", "COMM", "TID", "WAIT(us)", "BEHIND")
	return err
}

func printSensors(out io.Writer, results []sensor.Result, btf string) {
	for _, r := range results {
		fmt.Fprintln(out, r)
	}
	fmt.Fprintf(out, "types: %s\n", btf)
}

func (p runqText) wait(w Wait) error {
	_, err := fmt.Fprintf(p.out, "%s %3d  %-16s %-8d %10s  %s\n", w.Time.Format("15:04:05.000000"), w.CPU, event.Printable(w.Comm), w.TID, micros(w.Nanos), w.Reason())
	return err
}

func (p runqText) budget(s sensor.Spending) error { return tellBudget(p.out, false, s) }

// tellBudget writes the changes for the budget.
func tellBudget(out io.Writer, asJSON bool, s sensor.Spending) error {
	if asJSON {
		return json.NewEncoder(out).Encode(line.Budget{Type: "budget", Spending: s})
	}
	_, err := fmt.Fprintf(out, "budget: %s\n", s.Change)
	return err
}

// competitorsShown is the number of competitors that a line names.
const competitorsShown = 3

// Reason describes in one line the CPU's work during the wait.
func (w Wait) Reason() string {
	var parts []string
	for i, c := range w.Behind {
		if i == competitorsShown {
			parts = append(parts, fmt.Sprintf("%d more tasks", len(w.Behind)-i))
			break
		}
		name := fmt.Sprintf("%s/%d", event.Printable(c.Comm), c.TID)
		if c.TID == 0 {
			name = "idle"
		}
		parts = append(parts, name+" "+micros(c.Nanos))
	}
	if w.UnknownNanos*100 > w.Nanos || len(parts) == 0 {
		parts = append(parts, "not known "+micros(w.UnknownNanos))
	}
	if w.Moved {
		parts = append(parts, "and on another CPU before")
	}
	return strings.Join(parts, ", ")
}

func (p runqText) summary(q Queues, e Ending) error {
	fmt.Fprintf(p.out, "\nSummary of %.1f s\n", q.Seconds)
	w := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CPU\tWAITS\tMEAN us\tRUNNABLE mean\tmax")
	for _, c := range q.CPUs {
		mean, most := "-", "-"
		if c.Samples > 0 {
			mean, most = fmt.Sprintf("%.2f", c.LengthMean), fmt.Sprint(c.LengthMax)
		}
		fmt.Fprintf(w, "%d\t%d\t%s\t%s\t%s\n", c.CPU, c.Waits, micros(c.WaitNanos/max(1, c.Waits)), mean, most)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, c := range q.CPUs {
		if c.Waits > 0 {
			fmt.Fprintf(p.out, "\nCPU %d, waits by length\n", c.CPU)
			printHistogram(p.out, c.Buckets)
		}
	}
	if err := p.tasks(q.Tasks); err != nil {
		return err
	}
	return printEnding(p.out, e)
}

func (p runqText) tasks(tasks []Task) error {
	if len(tasks) == 0 {
		return nil
	}
	hidden := 0
	if p.top > 0 && len(tasks) > p.top {
		hidden, tasks = len(tasks)-p.top, tasks[:p.top]
	}
	fmt.Fprintln(p.out, "\nfrom a wake-up until on a CPU")
	w := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "COMM\tTID\tPID\tWAKEUPS\tMEAN us\tMAX us")
	for _, t := range tasks {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%s\t%s\n", event.Printable(t.Comm), t.TID, t.PID, t.Wakeups, micros(t.MeanNanos), micros(t.MaxNanos))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if hidden > 0 {
		fmt.Fprintf(p.out, "%d more tasks are not shown\n", hidden)
	}
	return nil
}

// barWidth is the longest bar of a histogram.
const barWidth = 40

func printHistogram(out io.Writer, buckets []uint64) {
	most := slices.Max(buckets)
	for n, count := range buckets {
		from := uint64(1) << n
		if n == 0 {
			from = 0
		}
		fmt.Fprintf(out, "%10d to %-10d us %8d  %s\n", from, uint64(2)<<n, count, strings.Repeat("#", int(count*barWidth/most)))
	}
}

// printEnding writes the numbers of seen and unseen events.
func printEnding(out io.Writer, e Ending) error {
	broken := ""
	if e.Broken > 0 {
		broken = fmt.Sprintf(", %d of the received broken", e.Broken)
	}
	fmt.Fprintf(out, "\nevents: %d received, %d lost, %d missed%s\n", e.Received, e.Lost, e.Missed.Total(), broken)
	if e.Missed.Waits > 0 {
		fmt.Fprintf(out, "%d waits were not measured, because there was no room for more tasks\n", e.Missed.Waits)
	}
	if e.Missed.Wakeups > 0 {
		fmt.Fprintf(out, "%d wake-ups are not in the table, because there were too many tasks\n", e.Missed.Wakeups)
	}
	if e.Missed.Unseen > 0 {
		fmt.Fprintf(out, "%d waits were not measured, because their beginning was not seen: before the command began, or the kernel did not run the sensor\n", e.Missed.Unseen)
	}
	if e.Missed.Untold > 0 {
		fmt.Fprintf(out, "%d waits are not shown, because there were too many to print; all other rows are shown\n", e.Missed.Untold)
	}
	for _, name := range slices.Sorted(maps.Keys(e.Missed.NotRun)) {
		fmt.Fprintf(out, "%s: %d were not seen, because the sensor was interrupted on its CPU\n", name, e.Missed.NotRun[name])
	}
	if e.Spending != nil {
		return line.Spending(out, *e.Spending)
	}
	return nil
}

func micros(nanos uint64) string { return fmt.Sprintf("%.1f", float64(nanos)/1000) }

// runqLines writes for programs: one object a line, each with its type.
type runqLines struct{ out *json.Encoder }

type waitLine struct {
	Type string `json:"type"` // wait
	Wait
}

type runqSummary struct {
	Type string `json:"type"` // summary
	Queues
	Events Ending `json:"events"`
}

func (p runqLines) start(results []sensor.Result, btf string) error {
	return p.out.Encode(line.NewStart(results, btf))
}

func (p runqLines) budget(s sensor.Spending) error {
	return p.out.Encode(line.Budget{Type: "budget", Spending: s})
}

func (p runqLines) wait(w Wait) error { return p.out.Encode(waitLine{"wait", w}) }

func (p runqLines) summary(q Queues, e Ending) error {
	return p.out.Encode(runqSummary{"summary", q, e})
}
