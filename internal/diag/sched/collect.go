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

// at is a sensor at a tracepoint.
func at(name, watches, tracepoint, program string) sensor.Sensor {
	return sensor.Sensor{Name: name, Watches: watches, Ways: []sensor.Way{
		{Kind: sensor.TPBTF, Target: tracepoint, Program: program + "_btf"},
		{Kind: sensor.RawTP, Target: tracepoint, Program: program + "_raw", Loses: uncheckedTypes},
	}}
}

// timer is the timer of each CPU.
func timer(watches, without string, every time.Duration) sensor.Sensor {
	return sensor.Sensor{Name: "timer", Watches: watches, Without: without,
		Ways: []sensor.Way{{Kind: sensor.Timer, Target: "cpu-clock", Program: "sh_sched_timer", Every: every}}}
}

func waitSensors() []sensor.Sensor {
	return []sensor.Sensor{
		at("switches", "which task gets a CPU, and from whom", "sched_switch", "sh_switch"),
		at("wake-ups", "tasks that could run from now on", "sched_wakeup", "sh_wakeup"),
		at("new tasks", "tasks that were made", "sched_wakeup_new", "sh_new"),
	}
}

// samplePeriod is that of the timer that reads the lengths of run queues.
const samplePeriod = 10 * time.Millisecond

// runqSensors are the sensors of `shunt diag runq`, in the order of its first lines.
func runqSensors() []sensor.Sensor {
	return append(waitSensors(), timer("how many tasks each CPU has to run, a hundred times a second", "the lengths of run queues are not known", samplePeriod))
}

// Options say what to watch.
type Options struct {
	BTF       sensor.BTF
	PID       uint32        // waits of this process only; 0: of all
	Cgroup    string        // waits of tasks in this folder of the second cgroup hierarchy only; "": of all
	Threshold time.Duration // longer waits are told one by one
	Duration  time.Duration // from the moment that the sensors are attached; 0: until the context ends

	waiting uint32 // tasks that may wait at a time, other than SCHED_WAITING_MAX; 0: that
}

// collector watches this machine's CPUs. It is for one goroutine.
type collector struct {
	set    *sensor.Set
	reader *event.Reader
	began  time.Time
}

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
	c := &collector{}
	c.set, err = sensor.Open(spec, sensors, sensor.Options{
		Constants: map[string]any{"only_tgid": o.PID, "only_cgroup": group, "threshold_ns": uint64(o.Threshold.Nanoseconds()),
			"late_ns": uint64(late.Nanoseconds())},
		BTF: o.BTF,
		Prepare: func(maps map[string]*ebpf.Map) (err error) {
			c.reader, err = event.NewReader(maps[event.MapEvents], maps[event.MapSequence])
			return err
		},
	})
	if err != nil {
		return nil, errors.Join(err, c.release())
	}
	c.began = time.Now()
	return c, nil
}

// Ending is how a stream of events went.
type Ending struct {
	event.Summary
	Missed Missed `json:"missed"`
}

// Missed counts events that the sensors could not keep or did not see.
type Missed struct {
	Waits   uint64            `json:"waits"`   // more tasks waited at a time than there is room for
	Wakeups uint64            `json:"wakeups"` // are at no task, because there is no room for more tasks
	Unseen  uint64            `json:"unseen"`  // tasks got a CPU, and the beginning of their wait was not seen
	Untold  uint64            `json:"untold"`  // waits were longer than the threshold and are not told, as the command did not keep up
	NotRun  map[string]uint64 `json:"not_run"` // by sensor: the kernel left runs out, as an interrupt came into one
}

// Total is all that was missed.
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
	m.NotRun, err = c.set.Missed()
	for name, n := range m.NotRun {
		if n == 0 {
			delete(m.NotRun, name)
		}
	}
	return m, err
}

// stream hands events to tell until the context ends, detaches the sensors, hands the last events over, too, and says
// how the stream went. broken, which tell adds to, is how many events could not be read.
func (c *collector) stream(ctx context.Context, tell func(event.Event) error, broken *uint64) (Ending, error) {
	if err := c.read(ctx, tell); err != nil {
		return Ending{}, err
	}
	var failed error
	ending, err := c.end(func(e event.Event) { failed = errors.Join(failed, tell(e)) })
	ending.Broken += *broken
	return ending, errors.Join(err, failed)
}

// end detaches the sensors, hands the last events over and says how the stream went. The maps stay until release.
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
	return errors.Join(err, c.set.Close())
}

// decode reads a payload of the programs.
func decode[T any](payload []byte) (v T, err error) {
	if err := binary.Read(bytes.NewReader(payload), binary.NativeEndian, &v); err != nil {
		return v, fmt.Errorf("decode an event: %w", err)
	}
	return v, nil
}
