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

// streams are those of bpf/guard/detect.bpf.c. There are about four events in 16 KB of a buffer.
var streams = [...]struct {
	name, events, sequence string
	bytes                  uint32
}{
	{"exec", detectMapShD_execs, detectMapShD_execsSeq, 1 << 23},
	{"rare", event.MapEvents, event.MapSequence, 1 << 22},
	{"often", detectMapShD_often, detectMapShD_oftenSeq, 1 << 23},
}

// Options say what is watched, and for what.
type Options struct {
	Rules  []rule.Rule
	Cgroup string     // only its processes and those of cgroups below it; "": all
	All    bool       // attach all sensors, also the ones that no rule needs
	BTF    sensor.BTF // the zero value stands for the kernel's own
}

// gather is how long events come together while they are only told of: programs that are started as fast as a CPU can are then read some ten at a
// time. A process that a rule ends or stops does not wait.
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

	from, until atomic.Uint64 // CLOCK_BOOTTIME of events that are this watch's; 0: no bound
	counting    sync.Mutex
	tally       tally             // the last that was known
	received    map[string]uint64 // events by type
}

// Counts are how detection went.
type Counts struct {
	event.Summary
	LostBy map[string]uint64 `json:"lost_by"` // by stream: exec, rare, often
	Missed uint64            `json:"missed"`  // runs of programs that the kernel left out
	Shed   uint64            `json:"shed"`    // events that were left out to save CPU; see Watch.Thin
	Told   uint64            `json:"told"`
	Again  uint64            `json:"again"` // held of a chain of processes that was told of before
}

// tally has the numbers of which Counts are made.
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

// Open begins to watch. The error is sensor.ErrNoWay, among others, if the kernel does not allow what detection cannot do
// without.
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

// sensorsFor are the sensors that the rules need. Who executes what and who connects is always needed: to know the programs of
// ancestors, and who began a connection.
func sensorsFor(o Options) (all []sensor.Sensor) {
	for _, s := range sources {
		needs := func(r rule.Rule) bool { return slices.Contains(r.On, s.of) }
		if o.All || s.of == rule.Exec || s.of == rule.Connect || slices.ContainsFunc(o.Rules, needs) {
			all = append(all, s.Sensor)
		}
	}
	return all
}

// Sensors are how they are attached.
func (w *Watch) Sensors() []sensor.Result { return w.set.Results }

// Counts are how it goes, as of the last event or quarter of a second. It can be called while Run is at work.
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

// TakeOver has w judge what happens from this moment on, and before, which is at work, what happened until then: end the Run of
// before afterwards, call Inherit, and run w. No event is judged twice, and none is left out.
func (w *Watch) TakeOver(before *Watch) error {
	// A connection that closes just now may stay known until its memory is another one's: it then counts as this host's own.
	var socket uint64
	var one uint32
	opened := before.set.Maps[detectMapShD_opened].Iterate()
	for opened.Next(&socket, &one) {
		if err := w.set.Maps[detectMapShD_opened].Put(socket, one); err != nil {
			return fmt.Errorf("hand on who began the connections: %w", err)
		}
	}
	// Connections that begin and end meanwhile can end the reading early: the ones that it has not reached count as accepted.
	if err := opened.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("read who began the connections: %w", err)
	}
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // cannot fail with this clock
	before.until.Store(uint64(now.Nano()))
	w.from.Store(uint64(now.Nano()))
	return nil
}

// Inherit has w remember what before knew when its Run had ended: programs, and the chains that rules were told of.
func (w *Watch) Inherit(before *Watch) {
	w.programs, w.containers = before.programs, before.containers
	w.judge.inherit(before.judge)
}

// Run hands on what rules find, and each event if all is not nil, until ctx ends. It can be called once.
func (w *Watch) Run(ctx context.Context, tell func(Found) error, all func(*rule.Event) error) (_ Counts, err error) {
	var c tally
	for ctx.Err() == nil && err == nil {
		err = w.step(time.Now().Add(time.Second/4), &c, tell, all)
	}
	err = errors.Join(err, w.missed(&c), w.set.Detach())
	// What is there by now, and no more comes.
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
		return nil // another watch's
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

// Close takes everything out of the kernel.
func (w *Watch) Close() error {
	_, err := w.reader.Close(nil)
	return errors.Join(err, w.set.Close())
}
