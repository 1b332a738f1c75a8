package sched

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// Interval describes the delays of CPUs and tasks between two moments.
type Interval struct {
	Seconds float64         `json:"seconds"`
	CPUs    []Load          `json:"cpus"`
	Waiters []Waiter        `json:"waiters"` // the longest wait first
	Kinds   map[Kind]uint64 `json:"kinds"`   // number of stalls above the threshold, by kind
	Longest *Stall          `json:"longest"` // of the stalls that delayed a task; null: none
	Events  Ending          `json:"events"`
}

// Load describes a CPU's run queue in an interval.
type Load struct {
	CPU       int     `json:"cpu"`
	Waits     uint64  `json:"waits"`
	MeanNanos uint64  `json:"mean_ns"`
	P99Nanos  uint64  `json:"p99_below_ns"` // 99 % of the waits are shorter than this power of 2 in µs
	Runnable  float64 `json:"runnable"`     // mean of tasks, including the running one; 0: not sampled
}

// Waiter is a task with waits that were longer than the threshold.
type Waiter struct {
	Comm    string `json:"comm"`
	TID     uint32 `json:"tid"`
	PID     uint32 `json:"pid"`
	Waits   uint64 `json:"waits"` // number of such waits
	Longest Wait   `json:"longest"`
}

// Watcher reports waits for CPUs and stalls, interval by interval. It is for one goroutine.
type Watcher struct {
	c         *collector
	names     *symbol.Table
	threshold time.Duration
	notes     []string

	began  time.Time
	cpus   []schedSchedCpu // at the last reading
	ending Ending          // at the last reading
	broken uint64          // since the start
}

// Watch begins to watch for delays longer than the threshold. On processors other than amd64 it watches only waits, and
// a note says so.
func Watch(o Options) (*Watcher, error) {
	w := &Watcher{threshold: o.Threshold}
	sensors, after := runqSensors(), time.Duration(0)
	if runtime.GOARCH == "amd64" {
		sensors, after = stallSensors(o.Threshold), late(o.Threshold)
	} else {
		w.notes = append(w.notes, fmt.Sprintf("stalls are not watched on %s: %v", runtime.GOARCH, ErrProcessor))
	}
	var hidden error
	if w.names, hidden = symbol.Read(); hidden != nil {
		w.notes = append(w.notes, hidden.Error())
	}
	if why := uncountedSteal(); why != "" {
		w.notes = append(w.notes, "steal: "+why)
	}
	var err error
	if w.c, err = open(o, sensors, after); err != nil {
		return nil, err
	}
	w.began = w.c.began
	return w, nil
}

// Member returns the watcher's part in a budget.
func (w *Watcher) Member() sensor.Member { return w.c.member }

// Results returns how the sensors are attached.
func (w *Watcher) Results() []sensor.Result { return w.c.set.Results }

// Notes returns further losses, one sentence each.
func (w *Watcher) Notes() []string { return w.notes }

// Interval watches until the context ends. It covers the time since the last call, or since Watch.
func (w *Watcher) Interval(ctx context.Context) (Interval, error) {
	i := Interval{CPUs: []Load{}, Waiters: []Waiter{}, Kinds: map[Kind]uint64{}}
	waiters := map[uint32]*Waiter{}
	tell := func(e event.Event) error {
		w.tell(e, &i, waiters)
		return nil
	}
	if err := w.c.readBatches(ctx, tell); err != nil {
		return i, err
	}
	i.Waiters = sortedWaiters(waiters)
	now := time.Now()
	i.Seconds = now.Sub(w.began).Seconds()
	w.began = now
	cpus, err := w.c.cpus()
	if err != nil {
		return i, err
	}
	i.CPUs = loads(cpus, w.cpus)
	w.cpus = cpus
	missed, err := w.c.missed()
	if err != nil {
		return i, err
	}
	ending := Ending{Summary: w.c.reader.Summary(), Missed: missed}
	ending.Broken += w.broken
	i.Events = ending.since(w.ending)
	w.ending = ending
	return i, nil
}

// tell takes an event.
func (w *Watcher) tell(e event.Event, i *Interval, waiters map[uint32]*Waiter) {
	if schedSchedSensor(e.Sensor) != schedSchedSensorSCHED_WAITED {
		s, err := decodeStall(e, w.threshold, w.names)
		if err != nil {
			w.broken++
			return
		}
		i.Kinds[s.Kind]++
		if s.Kind != Idle && (i.Longest == nil || s.Nanos > i.Longest.Nanos) {
			i.Longest = &s
		}
		return
	}
	// Decoding the runs of the CPU is most of the work, and most waits are not the task's longest one.
	head, err := decode[waitHead](e.Payload)
	if err != nil {
		w.broken++
		return
	}
	i.Kinds[WaitKind]++
	task := waiters[head.Tid]
	if task == nil {
		task = &Waiter{TID: head.Tid, PID: head.Tgid}
		waiters[head.Tid] = task
	}
	task.Waits++
	if task.Longest.TID != 0 && head.EndNs-min(head.EndNs, head.BeginNs) <= task.Longest.Nanos {
		return
	}
	one, err := decodeWait(e)
	if err != nil {
		w.broken++
		return
	}
	task.Comm, task.PID, task.Longest = one.Comm, one.PID, one
}

// waitHead is the beginning of schedSchedWait.
type waitHead struct {
	BeginNs, EndNs uint64
	Tid, Tgid      uint32
}

func sortedWaiters(by map[uint32]*Waiter) []Waiter {
	all := []Waiter{}
	for _, w := range by {
		all = append(all, *w)
	}
	slices.SortFunc(all, func(a, b Waiter) int {
		return cmp.Or(cmp.Compare(b.Longest.Nanos, a.Longest.Nanos), cmp.Compare(a.TID, b.TID))
	})
	return all
}

// loads returns the loads of the CPUs between two readings.
func loads(now, before []schedSchedCpu) []Load {
	all := []Load{}
	for n, c := range now {
		var b schedSchedCpu
		if n < len(before) {
			b = before[n]
		}
		l := Load{CPU: n, Waits: c.Waits - b.Waits}
		samples := c.Samples - b.Samples
		// A possible CPU that does not exist does nothing.
		if c.RunCount == b.RunCount && samples == 0 {
			continue
		}
		if l.Waits > 0 {
			l.MeanNanos = (c.WaitNs - b.WaitNs) / l.Waits
		}
		for at := range c.Buckets {
			c.Buckets[at] -= b.Buckets[at]
		}
		l.P99Nanos = p99Below(c.Buckets[:])
		if samples > 0 {
			l.Runnable = float64(c.LengthSum-b.LengthSum) / float64(samples)
		}
		all = append(all, l)
	}
	return all
}

// p99Below returns the upper end of the bucket with the wait that 99 % of the waits do not exceed; 0: no waits.
func p99Below(buckets []uint64) uint64 {
	all, below := uint64(0), uint64(0)
	for _, n := range buckets {
		all += n
	}
	for at, n := range buckets {
		if below += n; n > 0 && below*100 >= all*99 {
			return uint64(2000) << at
		}
	}
	return 0
}

// since is the difference to an earlier moment.
func (e Ending) since(before Ending) Ending {
	e.Received -= before.Received
	e.Lost -= min(e.Lost, before.Lost)
	e.Broken -= before.Broken
	e.Missed.Waits -= before.Missed.Waits
	e.Missed.Wakeups -= before.Missed.Wakeups
	e.Missed.Unseen -= before.Missed.Unseen
	e.Missed.Untold -= before.Missed.Untold
	e.Missed.NotRun = maps.Clone(e.Missed.NotRun)
	for name, n := range e.Missed.NotRun {
		if e.Missed.NotRun[name] = n - min(n, before.Missed.NotRun[name]); e.Missed.NotRun[name] == 0 {
			delete(e.Missed.NotRun, name)
		}
	}
	return e
}

// Close ends the watching and returns the stream's counts since Watch.
func (w *Watcher) Close() (Ending, error) {
	ending, err := w.c.end(nil)
	ending.Broken += w.broken
	return ending, errors.Join(err, w.c.release())
}
