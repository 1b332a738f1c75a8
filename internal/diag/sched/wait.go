package sched

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/event"
)

// Wait is a task's wait for a CPU.
type Wait struct {
	Time  time.Time `json:"time"` // its end
	CPU   uint32    `json:"cpu"`  // where it ended
	Comm  string    `json:"comm"`
	TID   uint32    `json:"tid"`
	PID   uint32    `json:"pid"`
	Nanos uint64    `json:"wait_ns"`
	Woken bool      `json:"woken"` // false: the task was taken off the CPU
	Moved bool      `json:"moved"` // it began on another CPU, whose work is not in Behind
	// Behind lists the CPU's work meanwhile, the longest first.
	Behind []Competitor `json:"behind"`
	// UnknownNanos is the part of the wait in which the CPU's work is not known.
	UnknownNanos uint64 `json:"unknown_ns"`
}

// Competitor is a task that ran while another one waited. TID 0 is the idle CPU.
type Competitor struct {
	Comm  string `json:"comm"`
	TID   uint32 `json:"tid"`
	Nanos uint64 `json:"ran_ns"`
}

func decodeWait(e event.Event) (Wait, error) {
	raw, err := decode[schedSchedWait](e.Payload)
	if err != nil {
		return Wait{}, err
	}
	w := Wait{Time: event.Time(e.TimeNs), CPU: e.CPU, Comm: event.Text(raw.Comm[:]), TID: raw.Tid, PID: raw.Tgid,
		Nanos: raw.EndNs - min(raw.EndNs, raw.BeginNs), Woken: raw.IsWakeup != 0, Moved: raw.IsMoved != 0}
	w.Behind, w.UnknownNanos = behind(raw)
	return w, nil
}

// behind adds up the runs of the CPU by task, as far as they overlap the wait.
func behind(raw schedSchedWait) ([]Competitor, uint64) {
	byTask := map[uint32]*Competitor{}
	unknown := raw.EndNs - min(raw.EndNs, raw.BeginNs)
	for _, run := range raw.Runs {
		// If the beginning of a run was not seen, the time for which that task had had the CPU is not
		// known.
		if run.BeginNs == 0 {
			continue
		}
		from, to := max(run.BeginNs, raw.BeginNs), min(run.EndNs, raw.EndNs)
		if to <= from {
			continue
		}
		c := byTask[run.Tid]
		if c == nil {
			c = &Competitor{Comm: event.Text(run.Comm[:]), TID: run.Tid}
			byTask[run.Tid] = c
		}
		c.Nanos += to - from
		unknown -= min(unknown, to-from)
	}
	all := []Competitor{}
	for _, c := range byTask {
		all = append(all, *c)
	}
	slices.SortFunc(all, func(a, b Competitor) int {
		return cmp.Or(cmp.Compare(b.Nanos, a.Nanos), cmp.Compare(a.TID, b.TID))
	})
	return all, unknown
}

// CPU describes a CPU's run queue.
type CPU struct {
	CPU        int      `json:"cpu"`
	Waits      uint64   `json:"waits"`
	WaitNanos  uint64   `json:"wait_ns"` // sum of all waits
	Buckets    []uint64 `json:"buckets"` // waits by length: element n is of 2^n to 2^(n+1) µs, the first also of less
	Samples    uint64   `json:"samples"`
	LengthMean float64  `json:"length_mean"` // runnable tasks, including the running one
	LengthMax  uint64   `json:"length_max"`
}

// Task describes the wake-ups of a task.
type Task struct {
	Comm      string `json:"comm"`
	TID       uint32 `json:"tid"`
	PID       uint32 `json:"pid"`
	Wakeups   uint64 `json:"wakeups"`
	MeanNanos uint64 `json:"mean_ns"`
	MaxNanos  uint64 `json:"max_ns"`
}

// Queues describe the run queues since the start.
type Queues struct {
	Seconds float64 `json:"seconds"`
	CPUs    []CPU   `json:"cpus"`
	Tasks   []Task  `json:"tasks"` // the longest wake-up first
}

// cpus returns all possible CPUs of the machine, since the start.
func (c *collector) cpus() (all []schedSchedCpu, err error) {
	if err := c.set.Maps[schedMapShSchedCpus].Lookup(uint32(0), &all); err != nil {
		return nil, fmt.Errorf("read the CPUs: %w", err)
	}
	return all, nil
}

func (c *collector) queues() (Queues, error) {
	q := Queues{Seconds: time.Since(c.began).Seconds(), CPUs: []CPU{}, Tasks: []Task{}}
	all, err := c.cpus()
	if err != nil {
		return q, err
	}
	for n, raw := range all {
		one := CPU{CPU: n, Waits: raw.Waits, WaitNanos: raw.WaitNs, Samples: raw.Samples, LengthMax: raw.LengthMax}
		one.Buckets = trimmed(raw.Buckets[:])
		if raw.Samples > 0 {
			one.LengthMean = float64(raw.LengthSum) / float64(raw.Samples)
		}
		// A possible CPU that does not exist does nothing.
		if raw.RunCount > 0 || raw.Samples > 0 {
			q.CPUs = append(q.CPUs, one)
		}
	}
	var tid uint32
	var raw schedSchedTask
	entries := c.set.Maps[schedMapShSchedTasks].Iterate()
	for entries.Next(&tid, &raw) {
		q.Tasks = append(q.Tasks, Task{event.Text(raw.Comm[:]), tid, raw.Tgid, raw.Wakeups, raw.WaitNs / max(1, raw.Wakeups), raw.WaitMaxNs})
	}
	// Programs that add tasks meanwhile can make the kernel give up; then only a part was read.
	if err := entries.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return q, fmt.Errorf("read the tasks: %w", err)
	}
	slices.SortFunc(q.Tasks, func(a, b Task) int {
		return cmp.Or(cmp.Compare(b.MaxNanos, a.MaxNanos), cmp.Compare(a.TID, b.TID))
	})
	return q, nil
}

// trimmed returns the buckets up to the last one with a wait.
func trimmed(buckets []uint64) []uint64 {
	last := len(buckets)
	for last > 0 && buckets[last-1] == 0 {
		last--
	}
	return slices.Clone(buckets[:last:last])
}
