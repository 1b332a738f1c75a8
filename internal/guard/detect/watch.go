package detect

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/sensor"
)

// bufferBytes is the size of the buffer of events, of which there are about four in 16 KB.
const bufferBytes = 1 << 23

// Options are what is watched, and for what.
type Options struct {
	Rules  []rule.Rule
	Cgroup string     // only its processes and those of cgroups below it; "": all
	All    bool       // attach all sensors, also those that no rule needs
	BTF    sensor.BTF // the zero value stands for the kernel's own
}

// Watch is detection at work.
type Watch struct {
	set        *sensor.Set
	reader     *event.Reader
	judge      *judge
	programs   programs
	containers containers
}

// Counts are how detection went.
type Counts struct {
	event.Summary
	Missed uint64 `json:"missed"` // runs of programs that the kernel left out
	Told   uint64 `json:"told"`
	Again  uint64 `json:"again"` // held of a chain of processes that was told of before
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
	spec.Maps[event.MapEvents].MaxEntries = bufferBytes
	w := &Watch{judge: newJudge(o.Rules), programs: programs{}, containers: containers{}}
	err = withTracefs(func() (err error) {
		w.set, err = sensor.Open(spec, sensorsFor(o), sensor.Options{BTF: o.BTF,
			Constants: map[string]any{"only_cgroup": only.id, "only_level": only.level, "own_tgid": uint32(os.Getpid())}})
		return err
	})
	if err == nil {
		w.reader, err = event.NewReader(w.set.Maps[event.MapEvents], w.set.Maps[event.MapSequence])
	}
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// sensorsFor are those that the rules need. Who executes what and who connects is always needed: to know the programs of
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

// Run hands on what rules find, and each event if all is not nil, until ctx ends. It can be called once.
func (w *Watch) Run(ctx context.Context, tell func(Found) error, all func(*rule.Event) error) (c Counts, err error) {
	for ctx.Err() == nil && err == nil {
		err = w.step(time.Now().Add(time.Second/4), &c, tell, all)
	}
	err = errors.Join(err, w.missed(&c), w.set.Detach())
	// What is there by now, and no more comes.
	sum, last := w.reader.Close(func(e event.Event) {
		if err == nil {
			err = w.take(e, &c, tell, all)
		}
	})
	c.Again, c.Summary = w.judge.again, sum
	return c, errors.Join(err, last)
}

func (w *Watch) step(deadline time.Time, c *Counts, tell func(Found) error, all func(*rule.Event) error) error {
	e, err := w.reader.Read(deadline)
	switch {
	case errors.Is(err, event.ErrTimeout):
		return w.missed(c)
	case err != nil:
		return err
	}
	return w.take(e, c, tell, all)
}

func (w *Watch) missed(c *Counts) error {
	missed, err := w.set.Missed()
	c.Missed = 0
	for _, n := range missed {
		c.Missed += n
	}
	return err
}

func (w *Watch) take(raw event.Event, c *Counts, tell func(Found) error, all func(*rule.Event) error) error {
	e, err := decode(raw)
	if err != nil {
		return err
	}
	w.programs.put(e.Process)
	for i := range e.Ancestors {
		e.Ancestors[i].Program = w.programs.of(e.Ancestors[i])
	}
	e.Container = w.containers.of(e.CgroupID, e.Process.PID)
	if all != nil {
		if err := all(e); err != nil {
			return err
		}
	}
	for _, v := range w.judge.of(e) {
		f := found(v, e)
		f.Done = act(f.Action, e.Process)
		if !v.isNew {
			continue
		}
		c.Told++
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
