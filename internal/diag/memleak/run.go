package memleak

import (
	"context"
	"errors"
	stdio "io"
	"time"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/diag/lasting"
	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/sensor"
)

// View selects the rows that are shown.
type View struct {
	Top       int  // number of rows; 0: all
	Addresses bool // list each allocation of these rows
}

// Interval has the allocations that are live at its end.
type Interval struct {
	Time             time.Time `json:"time"`
	Seconds          float64   `json:"seconds"` // since the sensors were attached
	Sample           uint32    `json:"sample"`  // one address in this number is watched
	Live             uint64    `json:"live"`    // allocations; with sampling the sample's
	Bytes            uint64    `json:"bytes"`
	Backing          uint64    `json:"backing_bytes"` // of memory that holds slabs, vmalloc and percpu, and notes on them: the allocations in it are counted themselves
	Growing          int       `json:"growing"`       // rows
	Rows             []Row     `json:"rows"`
	Hidden           int       `json:"hidden_rows"`
	Counts           Counts    `json:"counts"` // since the start
	Confidence       float64   `json:"confidence_percent"`
	*sensor.Spending           // of this interval; nil: there is no budget
	Ended            bool      `json:"process_ended,omitempty"` // the watched process has ended, and never freed the live allocations
}

// Watcher reports live allocations, interval by interval. It is for one goroutine.
type Watcher struct {
	c      *collector
	a      *account
	v      View
	hidden error // reason why stacks have no names
	budget *sensor.Budget
	began  time.Time
}

// Watch begins to watch.
func Watch(o Options, v View) (_ *Watcher, err error) {
	w := &Watcher{v: v}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	if w.c, err = open(o); err != nil {
		return nil, err
	}
	name := w.name
	if o.PID == 0 {
		functions, hidden := symbol.Read()
		name, w.hidden = functions.Name, hidden
	}
	w.a = newAccount(o.Interval, w.c.sample, w.c, name, v.Addresses)
	w.began = time.Now()
	if w.budget, err = sensor.NewBudget(o.MaxCPU, w.Member()); err != nil {
		return nil, err
	}
	return w, nil
}

// Member returns the tool's part in a budget. It detaches no sensors: without some frees, all their allocations would look live.
func (w *Watcher) Member() sensor.Member {
	return sensor.Member{Set: w.c.set, Unit: "address", SampleMax: SampleMax, Sample: w.c.sample, Resample: w.resample,
		Note: ", and growth is judged anew"}
}

func (w *Watcher) resample(one uint32) error {
	if err := w.c.sampleLess(one); err != nil {
		return err
	}
	w.a.sample = w.c.sample
	w.a.restart()
	return nil
}

// name returns the name of a function of the process.
func (w *Watcher) name(address uint64) string { return w.c.process.symbols.Name(address) }

// Results returns how the sensors are attached.
func (w *Watcher) Results() []sensor.Result { return w.c.set.Results }

// Hidden returns the reason why stacks have no names; nil: they have names.
func (w *Watcher) Hidden() error { return w.hidden }

// Close ends the watching.
func (w *Watcher) Close() (err error) {
	if w.c != nil {
		err = w.c.release()
	}
	return errors.Join(err, w.budget.Close())
}

// Run watches until the context ends, and writes the live allocations each interval and then a summary, as text or, with
// asJSON, as one object a line.
func Run(ctx context.Context, o Options, v View, asJSON bool, out stdio.Writer) (err error) {
	w, err := Watch(o, v)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	ctx, cancel := lasting.For(ctx, o.Duration)
	defer cancel()
	p := newPrinter(out, asJSON)
	if err := p.start(w.beginning(o.BTF.From)); err != nil {
		return err
	}
	ctx, release := w.untilEnd(ctx)
	defer release()
	ticks := time.NewTicker(o.Interval)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			i, err := w.Interval()
			if err != nil {
				return err
			}
			return p.summary(i)
		case <-ticks.C:
		}
		i, err := w.Interval()
		if err != nil {
			return err
		}
		if err := p.interval(i); err != nil {
			return err
		}
	}
}

// beginning returns the facts that are shown before the first interval.
func (w *Watcher) beginning(btf string) beginning {
	b := beginning{results: w.Results(), btf: btf, hidden: w.hidden}
	if p := w.c.process; p != nil {
		b.process = p
	}
	return b
}

// untilEnd ends the context with the watched process.
func (w *Watcher) untilEnd(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(parent)
	if w.c.process == nil {
		return ctx, cancel
	}
	const milliseconds = 100 // interval at which it looks whether the context has ended
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if w.c.process.hasEnded(milliseconds) {
				cancel()
			}
		}
	}()
	return ctx, func() {
		cancel()
		<-done
	}
}

// Interval reads the live allocations, and keeps the budget.
func (w *Watcher) Interval() (Interval, error) {
	i := Interval{Time: time.Now(), Sample: w.c.sample}
	i.Seconds = i.Time.Sub(w.began).Seconds()
	if p := w.c.process; p != nil {
		if err := p.refresh(); err != nil {
			return i, err
		}
		i.Ended = p.hasEnded(0)
	}
	live, err := w.c.live()
	if err != nil {
		return i, err
	}
	if i.Counts, err = w.c.counts(); err != nil {
		return i, err
	}
	s := w.a.take(live, now(), i.Seconds, i.Counts.missed(), cgroup.Paths())
	i.Live, i.Bytes, i.Backing, i.Rows, i.Confidence = s.Live, s.Bytes, s.Backing, s.Rows, i.Counts.Confidence()
	for _, r := range i.Rows {
		if r.State == Growing {
			i.Growing++
		}
	}
	if w.v.Top > 0 && len(i.Rows) > w.v.Top {
		i.Hidden, i.Rows = len(i.Rows)-w.v.Top, i.Rows[:w.v.Top]
	}
	i.Spending, err = w.budget.Keep()
	return i, err
}
