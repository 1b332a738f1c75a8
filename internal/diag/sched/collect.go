package sched

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

const uncheckedTypes = "the kernel does not check the arguments' types"

// at returns a sensor at a tracepoint.
func at(name, watches, tracepoint, program string) sensor.Sensor {
	return sensor.Sensor{Name: name, Watches: watches, Ways: []sensor.Way{
		{Kind: sensor.TPBTF, Target: tracepoint, Program: program + "_btf"},
		{Kind: sensor.RawTP, Target: tracepoint, Program: program + "_raw", Loses: uncheckedTypes},
	}}
}

// timer returns a sensor at the timer of each CPU.
func timer(watches, without string, every time.Duration) sensor.Sensor {
	return sensor.Sensor{Name: ticks, Watches: watches, Without: without,
		Ways: []sensor.Way{{Kind: sensor.Timer, Target: "cpu-clock", Program: "sh_sched_timer", Every: every}}}
}

// waitSensors are the sensors of waits. The second runs once, and only where the kernel itself notes the time at which
// it queues a task. The last two run at each wake-up, and are attached only where it does not.
func waitSensors() []sensor.Sensor {
	const watches, tracepoint = "which task gets a CPU, and from whom", "sched_switch"
	noted, older := at(switches, watches, tracepoint, "sh_queued"), at(switches, watches, tracepoint, "sh_switch")
	all := noted
	for _, w := range older.Ways {
		if w.Loses != "" {
			w.Loses += ", and "
		}
		w.Loses += withoutNotes
		all.Ways = append(all.Ways, w)
	}
	there := without(sensor.Sensor{Name: tasks, Watches: "how long each task has waited before the sensors",
		Ways: []sensor.Way{{Kind: sensor.Iter, Target: "task", Program: "sh_tasks"}}},
		"the first wait of a task that moves to another CPU meanwhile lacks the time before the move")
	woken := without(at(wakeups, "tasks that could run from now on", "sched_wakeup", "sh_wakeup"), "waits of tasks that were woken are not seen, only of those that were taken off a CPU")
	made := without(at(newTasks, "tasks that were made", "sched_wakeup_new", "sh_new"), "the first wait of a task is not seen")
	there.Unless = programs(older)
	woken.Unless, made.Unless = programs(noted), programs(noted)
	return []sensor.Sensor{all, there, woken, made}
}

// programs returns the names of the programs of a sensor's ways.
func programs(s sensor.Sensor) (names []string) {
	for _, w := range s.Ways {
		names = append(names, w.Program)
	}
	return names
}

// withoutNotes is the loss where the kernel has no CONFIG_SCHED_INFO.
const withoutNotes = "each wake-up costs time, too, because the kernel does not note when it queues a task"

// Names of the sensors; a budget may detach those after the first.
const (
	switches     = "switches"
	tasks        = "tasks"
	wakeups      = "wake-ups"
	newTasks     = "new tasks"
	softirqBegin = "softirqs begin"
	softirqEnd   = "softirqs end"
	ticks        = "timer"
)

// without sets the part of the tool that works without a sensor.
func without(s sensor.Sensor, has string) sensor.Sensor {
	s.Without = has
	return s
}

// samplePeriod is the period of the timer that reads the lengths of run queues.
const samplePeriod = 10 * time.Millisecond

// runqSensors are the sensors of `shunt diag runq`, in the order of its first lines.
func runqSensors() []sensor.Sensor {
	return append(waitSensors(), timer("how many tasks each CPU has to run, a hundred times a second", "the lengths of run queues are not known", samplePeriod))
}

// Options select the waits that are watched.
type Options struct {
	BTF       sensor.BTF
	PID       uint32        // only waits of this process; 0: of all
	Cgroup    string        // only waits of tasks in this folder of the second cgroup hierarchy; "": of all
	Threshold time.Duration // longer waits are reported one by one
	Duration  time.Duration // from the moment that the sensors are attached; 0: until the context ends
	MaxCPU    float64       // share of one CPU that the sensors may take, in percent; 0: any

	waiting uint32 // largest number of known tasks, instead of SCHED_WAITING_MAX; 0: that
}

// collector watches this machine's CPUs. It is for one goroutine.
type collector struct {
	set    *sensor.Set
	reader *event.Reader
	began  time.Time
	member sensor.Member // of a budget
	budget *sensor.Budget
	kept   time.Time // time of the last look at the budget
	noRoom uint64    // waits without room, at the last clearing of the table
}

// sampleMax is the N of the smallest sample 1/N of tasks. Most of the remaining cost is then to note which task ran.
const sampleMax = 64

func open(o Options, sensors []sensor.Sensor, late time.Duration) (*collector, error) {
	spec, err := loadSched()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag: %w", err)
	}
	if o.waiting > 0 {
		spec.Maps[schedMapShWaiting].MaxEntries = o.waiting
	}
	group := uint64(0)
	if o.Cgroup != "" {
		if group, err = cgroup.ID(o.Cgroup); err != nil {
			return nil, err
		}
	}
	withTasks := uint32(0)
	if late == 0 { // the tool that reports tasks
		withTasks = 1
	}
	c := &collector{}
	c.set, err = sensor.Open(spec, sensors, sensor.Options{
		Constants: map[string]any{"only_tgid": o.PID, "only_cgroup": group, "threshold_ns": uint64(o.Threshold.Nanoseconds()),
			"late_ns": uint64(late.Nanoseconds()), "with_tasks": withTasks},
		BTF: o.BTF,
		Prepare: func(maps map[string]*ebpf.Map) (err error) {
			c.reader, err = event.NewReader(maps[event.MapEvents], maps[event.MapSequence])
			return err
		},
	})
	if err != nil {
		return nil, errors.Join(err, c.release())
	}
	c.began, c.kept = time.Now(), time.Now()
	c.member = sensor.Member{Set: c.set, Unit: "task", SampleMax: sampleMax, Rises: true, Note: ", and waits of others are not seen",
		Sheds:    []string{newTasks, wakeups},
		Resample: c.resample}
	if o.PID != 0 || o.Cgroup != "" {
		c.member.SampleMax = 0 // they may be few
	}
	if late > 0 {
		c.member.Sheds = []string{softirqBegin, softirqEnd, newTasks, wakeups}
	} else {
		c.member.Sheds = append(c.member.Sheds, ticks)
	}
	if c.budget, err = sensor.NewBudget(o.MaxCPU, c.member); err != nil {
		return nil, errors.Join(err, c.release())
	}
	return c, nil
}

// budgetStep is the interval at which a tool without intervals looks at its budget.
const budgetStep = time.Second

// keep makes room for tasks and looks at the budget, if it is time to, and passes on the changes.
func (c *collector) keep(changed func(sensor.Spending) error) error {
	if time.Since(c.kept) < budgetStep {
		return nil
	}
	c.kept = time.Now()
	if _, err := c.missed(); err != nil {
		return err
	}
	s, err := c.budget.Keep()
	if err != nil || s == nil || s.Change == "" {
		return err
	}
	return changed(*s)
}

// Ending has the counts of a stream of events.
type Ending struct {
	event.Summary
	Missed           Missed `json:"missed"`
	*sensor.Spending        // since the start; nil: there is no budget
}

// Missed counts events that the sensors could not keep or did not see.
type Missed struct {
	Waits   uint64            `json:"waits"`   // without room for the task
	Wakeups uint64            `json:"wakeups"` // of no known task, because there was no room for more tasks
	Unseen  uint64            `json:"unseen"`  // tasks got a CPU, and the beginning of their wait was not seen
	Untold  uint64            `json:"untold"`  // waits longer than the threshold that are not reported, because the command did not keep up
	NotRun  map[string]uint64 `json:"not_run"` // by sensor: runs that the kernel left out, because an interrupt came into one
}

// Total returns the number of all events that were missed.
func (m Missed) Total() uint64 {
	sum := m.Waits + m.Wakeups + m.Unseen + m.Untold
	for _, n := range m.NotRun {
		sum += n
	}
	return sum
}

func (c *collector) missed() (Missed, error) {
	var m Missed
	for what, n := range map[schedSchedMissed]*uint64{schedSchedMissedSCHED_WAITING_FULL: &m.Waits, schedSchedMissedSCHED_TASKS_FULL: &m.Wakeups,
		schedSchedMissedSCHED_BEGIN_UNSEEN: &m.Unseen, schedSchedMissedSCHED_WAITS_UNTOLD: &m.Untold} {
		var all []uint64
		if err := c.set.Maps[schedMapShSchedMissed].Lookup(uint32(what), &all); err != nil {
			return m, fmt.Errorf("read the counters of missed events: %w", err)
		}
		for _, one := range all {
			*n += one
		}
	}
	var err error
	if m.Waits > c.noRoom {
		c.noRoom = m.Waits
		if err := c.forget(); err != nil {
			return m, err
		}
	}
	m.NotRun, err = c.set.Missed()
	for name, n := range m.NotRun {
		if n == 0 {
			delete(m.NotRun, name)
		}
	}
	return m, err
}

// resample has the programs watch one task of so many. A task that was left out for a while is forgotten before it is
// watched again: its entry is too old, and its waits meanwhile would count as not seen.
func (c *collector) resample(one uint32) error {
	if err := c.forget(); err != nil {
		return err
	}
	return c.set.SetSample("sample_mask", one)
}

// forget removes tasks that do not wait, as far as the table tells, when it is full. Most of them have ended without their last
// switch having been seen. A wait that begins meanwhile counts as not seen; where the kernel notes when it queues a task, the next wait of a
// forgotten task lacks the time before a move to another CPU.
func (c *collector) forget() error {
	table := c.set.Maps[schedMapShWaiting]
	var tid uint32
	var known schedSchedKnown
	var idle []uint32
	for entries := table.Iterate(); entries.Next(&tid, &known); {
		if known.BeginNs == 0 {
			idle = append(idle, tid)
		}
	}
	for _, tid := range idle {
		if err := table.Delete(tid); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("forget tasks that do not wait: %w", err)
		}
	}
	return nil
}

// stream passes events to tell, and changes for the budget to changed, until the context ends. Then it detaches the sensors, passes the last events on, too, and
// returns the stream's counts. broken, which tell adds to, is the number of events that could not be read.
func (c *collector) stream(ctx context.Context, tell func(event.Event) error, changed func(sensor.Spending) error, broken *uint64) (Ending, error) {
	if err := c.read(ctx, tell, changed); err != nil {
		return Ending{}, err
	}
	var failed error
	ending, err := c.end(func(e event.Event) { failed = errors.Join(failed, tell(e)) })
	ending.Broken += *broken
	ending.Spending = c.budget.Total()
	return ending, errors.Join(err, failed)
}

// end detaches the sensors, passes the last events on and returns the stream's counts. The maps stay until release.
func (c *collector) end(last func(event.Event)) (Ending, error) {
	var e Ending
	missed, err := c.missed()
	e.Missed = missed
	err = errors.Join(err, c.set.Detach())
	summary, closed := c.reader.Close(last)
	e.Summary = summary
	return e, errors.Join(err, closed)
}

func (c *collector) release() error {
	_, err := c.reader.Close(nil)
	return errors.Join(err, c.budget.Close(), c.set.Close())
}

// decode reads a payload of the programs.
func decode[T any](payload []byte) (v T, err error) {
	if err := binary.Read(bytes.NewReader(payload), binary.NativeEndian, &v); err != nil {
		return v, fmt.Errorf("decode an event: %w", err)
	}
	return v, nil
}
