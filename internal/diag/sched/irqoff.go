package sched

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/lasting"
	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// ErrProcessor is in the error of Stalls on processors whose interrupted instructions it cannot read.
var ErrProcessor = errors.New("shunt distinguishes interrupts that were off from a CPU that did not run by the interrupted instruction, which it can read on amd64 only")

// Stalls watches, until the context ends, for CPUs and tasks that are late by more than the threshold, and writes each
// as text or, with asJSON, as one object a line.
func Stalls(ctx context.Context, o Options, asJSON bool, out io.Writer) (err error) {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("watch for interrupts that are off on %s: %w", runtime.GOARCH, ErrProcessor)
	}
	names, hidden := symbol.Read()
	c, err := open(o, stallSensors(o.Threshold), late(o.Threshold))
	if err != nil {
		return err
	}
	ctx, cancel := lasting.For(ctx, o.Duration)
	defer cancel()
	defer func() { err = errors.Join(err, c.release()) }()
	v := stallView{out: out, json: asJSON, threshold: o.Threshold, kinds: map[Kind]uint64{}}
	v.uncounted = uncountedSteal()
	if err := v.start(c.set.Results, o.BTF.From, hidden); err != nil {
		return err
	}
	ending, err := c.stream(ctx, func(e event.Event) error { return v.tell(e, names) }, v.budget, &v.broken)
	if err != nil {
		return err
	}
	return v.summary(time.Since(c.began), ending)
}

// ExamineStalls does the same as ExamineRunQueues for the sensors of Stalls.
func ExamineStalls(b sensor.BTF) ([]sensor.Result, error) {
	return examine(b, stallSensors(10*time.Millisecond))
}

// WaitKind is the kind of a task that waited for a CPU.
const WaitKind Kind = "wait"

// stallView writes the findings of Stalls.
type stallView struct {
	out       io.Writer
	json      bool
	threshold time.Duration
	kinds     map[Kind]uint64
	broken    uint64
	uncounted string // reason why steal may look like interrupts that are off; "": it cannot
}

type stallStart struct {
	line.Start
	Threshold uint64 `json:"threshold_ns"`
	Period    uint64 `json:"period_ns"`
	Floor     uint64 `json:"floor_ns"` // interrupts that are off for longer are found for certain
	Uncounted string `json:"steal_uncounted,omitempty"`
}

type stallLine struct {
	Type string `json:"type"` // stall
	Stall
}

type stallSummary struct {
	Type    string          `json:"type"` // summary
	Seconds float64         `json:"seconds"`
	Kinds   map[Kind]uint64 `json:"kinds"` // number of each
	Events  Ending          `json:"events"`
}

// floor returns the time for which interrupts have to be off to be found for certain: they may go off just after a tick.
func floor(threshold time.Duration) time.Duration { return late(threshold) + period(threshold) }

func (v *stallView) start(results []sensor.Result, btf string, hidden error) error {
	every, least := period(v.threshold), floor(v.threshold)
	if v.json {
		return json.NewEncoder(v.out).Encode(stallStart{line.NewStart(results, btf),
			uint64(v.threshold), uint64(every), uint64(least), v.uncounted})
	}
	printSensors(v.out, results, btf)
	if hidden != nil {
		fmt.Fprintln(v.out, hidden)
	}
	if v.uncounted != "" {
		fmt.Fprintf(v.out, "steal: %s\n", v.uncounted)
	}
	fmt.Fprintf(v.out, "floor: a timer every %v; interrupts off for more than %v are found for certain, for less than %v never, and LAT is true within %v\n\n",
		every, least, late(v.threshold)-every, every/2)
	_, err := fmt.Fprintf(v.out, "%-15s %3s  %-16s %-8s %10s  %-8s %s\n", "TIME(irqoff)", "CPU", "COMM", "TID", "LAT(us)", "KIND", "BY")
	return err
}

func (v *stallView) tell(e event.Event, names *symbol.Table) error {
	if schedSchedSensor(e.Sensor) == schedSchedSensorSCHED_WAITED {
		w, err := decodeWait(e)
		if err != nil {
			v.broken++
			return nil
		}
		return v.wait(w)
	}
	s, err := decodeStall(e, v.threshold, names)
	if err != nil {
		v.broken++
		return nil
	}
	return v.stall(s)
}

func (v *stallView) wait(w Wait) error {
	v.kinds[WaitKind]++
	if v.json {
		return json.NewEncoder(v.out).Encode(waitLine{"wait", w})
	}
	return v.row(w.Time, w.CPU, w.Comm, w.TID, w.Nanos, WaitKind, w.Reason())
}

func (v *stallView) stall(s Stall) error {
	v.kinds[s.Kind]++
	if s.Kind == Idle {
		return nil
	}
	if v.json {
		return json.NewEncoder(v.out).Encode(stallLine{"stall", s})
	}
	by := s.Softirq
	if s.Steal > 0 {
		by = "steal " + micros(s.Steal)
	}
	if err := v.row(s.Time, s.CPU, s.Comm, s.TID, s.Nanos, s.Kind, by); err != nil || s.Kind == Steal {
		return err
	}
	for _, frame := range s.Stack {
		if _, err := fmt.Fprintf(v.out, "    %s\n", frame); err != nil {
			return err
		}
	}
	return nil
}

func (v *stallView) row(at time.Time, cpu uint32, comm string, tid uint32, nanos uint64, kind Kind, by string) error {
	_, err := fmt.Fprintf(v.out, "%s %3d  %-16s %-8d %10s  %-8s %s\n", at.Format("15:04:05.000000"), cpu, event.Printable(comm), tid, micros(nanos), kind, by)
	return err
}

func (v *stallView) budget(s sensor.Spending) error { return tellBudget(v.out, v.json, s) }

func (v *stallView) summary(took time.Duration, e Ending) error {
	if v.json {
		return json.NewEncoder(v.out).Encode(stallSummary{"summary", took.Seconds(), v.kinds, e})
	}
	fmt.Fprintf(v.out, "\nSummary of %.1f s\n", took.Seconds())
	for _, kind := range []Kind{IRQOff, Softirq, Preempt, Steal, WaitKind} {
		fmt.Fprintf(v.out, "%-8s %d\n", kind, v.kinds[kind])
	}
	fmt.Fprintf(v.out, "late timers of idle CPUs: %d, of which nobody was late\n", v.kinds[Idle])
	return printEnding(v.out, e)
}
