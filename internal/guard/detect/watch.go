package detect

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/sensor"
)

// streams are the streams of bpf/guard/detect.bpf.c. About four events fit into 16 KB of a buffer.
var streams = [...]struct {
	name, events, sequence string
	bytes                  uint32
}{
	{"exec", detectMapShD_execs, detectMapShD_execsSeq, 1 << 23},
	{"rare", event.MapEvents, event.MapSequence, 1 << 22},
	{"often", detectMapShD_often, detectMapShD_oftenSeq, 1 << 23},
}

// Options select the rules, processes and sensors.
type Options struct {
	Rules  []rule.Rule
	Cgroup string     // watch only processes in it and in cgroups below it; "": all
	All    bool       // attach all sensors, even if no rule needs them
	BTF    sensor.BTF // the zero value stands for the kernel's own
}

// gather is the time for which events are collected if they are only reported: programs that start as fast as a CPU
// allows are then read some ten at a time. The event of a process that a rule ends or stops is not delayed.
const gather = 2 * time.Millisecond

func gatherFor(rules []rule.Rule) time.Duration {
	if slices.ContainsFunc(rules, func(r rule.Rule) bool { return r.Action == rule.Kill || r.Action == rule.Stop }) {
		return 0
	}
	return gather
}

// Watch is detection at work.
type Watch struct {
	set        *sensor.Set
	reader     *event.Readers
	judge      *judge
	decoder    decoder
	programs   *programs
	containers containers

	from, until atomic.Uint64 // CLOCK_BOOTTIME of this watch's first and last events; 0: no limit
	counting    sync.Mutex
	tally       tally             // the last known one
	received    map[string]uint64 // events by type
}

// Counts are the counts of detection.
type Counts struct {
	event.Summary
	LostBy map[string]uint64 `json:"lost_by"` // by stream: exec, rare, often
	Missed uint64            `json:"missed"`  // runs of programs that the kernel left out
	Shed   uint64            `json:"shed"`    // events that were left out to save CPU; see Watch.Thin
	Told   uint64            `json:"told"`
	Again  uint64            `json:"again"` // for a chain of processes that was reported before
}

// tally has the numbers from which Counts are computed.
type tally struct {
	by                        [len(streams)]event.Summary
	missed, shed, told, again uint64
}

func (t tally) counts() Counts {
	c := Counts{LostBy: make(map[string]uint64, len(t.by)), Missed: t.missed, Shed: t.shed, Told: t.told, Again: t.again}
	for i, s := range t.by {
		c.Received, c.Lost, c.Broken = c.Received+s.Received, c.Lost+s.Lost, c.Broken+s.Broken
		c.LostBy[streams[i].name] = s.Lost
	}
	return c
}

// Open begins to watch. The error is sensor.ErrNoWay, among others, if the kernel does not allow something that detection
// needs.
func Open(o Options) (*Watch, error) {
	only, err := scopeOf(o.Cgroup)
	if err != nil {
		return nil, err
	}
	spec, err := loadDetect()
	if err != nil {
		return nil, fmt.Errorf("read the programs of detection: %w", err)
	}
	for _, one := range streams {
		spec.Maps[one.events].MaxEntries = one.bytes
	}
	var filters uint32
	filters, spec.Maps[detectMapShD_names].Contents = filtersFor(o)
	w := &Watch{judge: newJudge(o.Rules), programs: newPrograms(), containers: containers{}, received: map[string]uint64{}}
	err = withTracefs(func() (err error) {
		w.set, err = sensor.Open(spec, sensorsFor(o), sensor.Options{BTF: o.BTF,
			Constants: map[string]any{"only_cgroup": only.id, "only_level": only.level, "own_tgid": uint32(os.Getpid()), "open_filters": filters}})
		return err
	})
	if err == nil {
		var all []event.Stream
		for _, one := range streams {
			all = append(all, event.Stream{Events: w.set.Maps[one.events], Sequence: w.set.Maps[one.sequence]})
		}
		if w.reader, err = event.NewReaders(all...); err == nil {
			w.reader.Gather = gatherFor(o.Rules)
		}
	}
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// sensorsFor returns the sensors that the rules need. Those of executed programs and of connections are always needed:
// for the programs of ancestors, and to know the process that began a connection.
func sensorsFor(o Options) (all []sensor.Sensor) {
	for _, s := range sources {
		needs := func(r rule.Rule) bool { return slices.Contains(r.On, s.of) }
		if o.All || s.of == rule.Exec || s.of == rule.Connect || slices.ContainsFunc(o.Rules, needs) {
			all = append(all, s.Sensor)
		}
	}
	return all
}

// Sensors returns how the sensors are attached.
func (w *Watch) Sensors() []sensor.Result { return w.set.Results }

// Counts returns the counts as of the last event or quarter of a second. It may be called while Run is at work.
func (w *Watch) Counts() Counts {
	w.counting.Lock()
	defer w.counting.Unlock()
	return w.tally.counts()
}

func (w *Watch) publish(c *tally) {
	w.counting.Lock()
	defer w.counting.Unlock()
	w.tally = *c
}

// TakeOver makes w judge the events from this moment on, and before, which is at work, the events until then: afterwards end the Run of
// before, call Inherit, and run w. No event is judged twice, and none is left out.
func (w *Watch) TakeOver(before *Watch) error {
	// A connection that is closing now may stay known until its memory belongs to another one, which then counts as this host's own.
	var socket uint64
	var one uint32
	opened := before.set.Maps[detectMapShD_opened].Iterate()
	for opened.Next(&socket, &one) {
		if err := w.set.Maps[detectMapShD_opened].Put(socket, one); err != nil {
			return fmt.Errorf("hand on the processes that began connections: %w", err)
		}
	}
	// Connections that begin and end meanwhile can end the reading early: connections that it has not reached count as accepted.
	if err := opened.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("read the processes that began connections: %w", err)
	}
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // cannot fail with this clock
	before.until.Store(uint64(now.Nano()))
	w.from.Store(uint64(now.Nano()))
	return nil
}

// Inherit gives w the knowledge that before had when its Run ended: programs, and the chains that rules reported.
func (w *Watch) Inherit(before *Watch) {
	w.programs, w.containers = before.programs, before.containers
	w.judge.inherit(before.judge)
}

// Run passes on the findings of rules, and each event if all is not nil, until ctx ends. It can be called once.
func (w *Watch) Run(ctx context.Context, tell func(Found) error, all func(*rule.Event) error) (_ Counts, err error) {
	var c tally
	for ctx.Err() == nil && err == nil {
		err = w.step(time.Now().Add(time.Second/4), &c, tell, all)
	}
	err = errors.Join(err, w.missed(&c), w.set.Detach())
	// The remaining events; these are the last.
	by, last := w.reader.Close(func(e event.Event) {
		if err == nil {
			err = w.take(e, &c, tell, all)
		}
	})
	copy(c.by[:], by)
	c.again = w.judge.again
	c.shed, err = w.shedNow(err)
	w.publish(&c)
	return c.counts(), errors.Join(err, last)
}

func (w *Watch) step(deadline time.Time, c *tally, tell func(Found) error, all func(*rule.Event) error) error {
	e, err := w.reader.Read(deadline)
	switch {
	case errors.Is(err, event.ErrTimeout):
		c.shed, err = w.shedNow(w.missed(c))
	case err == nil:
		err = w.take(e, c, tell, all)
	}
	c.again = w.judge.again
	for i := range c.by {
		c.by[i] = w.reader.Of(i)
	}
	w.publish(c)
	return err
}

func (w *Watch) missed(c *tally) error {
	missed, err := w.set.Missed()
	c.missed = 0
	for _, n := range missed {
		c.missed += n
	}
	return err
}

func (w *Watch) take(raw event.Event, c *tally, tell func(Found) error, all func(*rule.Event) error) error {
	if until := w.until.Load(); raw.TimeNs < w.from.Load() || until != 0 && raw.TimeNs >= until {
		return nil // an event of another watch
	}
	e, err := w.decoder.decode(raw)
	if err != nil {
		return err
	}
	w.countType(e)
	w.programs.name(e)
	e.Container = w.containers.of(e.CgroupID, e.Process.PID)
	if all != nil {
		if err := all(e.Clone()); err != nil {
			return err
		}
	}
	verdicts := w.judge.of(e)
	if len(verdicts) > 0 {
		e = e.Clone()
	}
	for _, v := range verdicts {
		f := found(v, e)
		f.Done = act(f.Action, e.Process)
		if !v.isNew {
			continue
		}
		c.told++
		if err := tell(f); err != nil {
			return err
		}
	}
	return nil
}

// Close removes all programs from the kernel.
func (w *Watch) Close() error {
	_, err := w.reader.Close(nil)
	return errors.Join(err, w.set.Close())
}
