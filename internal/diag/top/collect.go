package top

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/io"
	"github.com/shunt-lb/shunt/internal/diag/memleak"
	"github.com/shunt-lb/shunt/internal/diag/sched"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// Options select the parts and limits of the screen.
type Options struct {
	BTF       sensor.BTF
	Interval  time.Duration // of a screen
	Duration  time.Duration // from the moment that the sensors are attached; 0: until the context ends
	Threshold time.Duration // tasks and CPUs that are later than this are reported
	Sample    uint32        // one address in this number of the kernel's memory is watched, a power of 2; 0: no memory
	Once      bool          // end after one screen
	MaxCPU    float64       // share of one CPU that the sensors of all parts may take, in percent; 0: any
	// Waits is called with a sentence where attaching the sensors of a part takes long, from another goroutine; nil:
	// there is no message.
	Waits func(sentence string)
}

// waitsAfter is the time that attaching the sensors of a part may take without a message.
const waitsAfter = 2 * time.Second

// opened opens a part, and sends a message if that takes long.
func (p part) opened(c *collector, o Options) error {
	if o.Waits != nil {
		told := time.AfterFunc(waitsAfter, func() {
			o.Waits(fmt.Sprintf("attaching the sensors of %s, which takes long on a busy machine", p.name))
		})
		defer told.Stop()
	}
	return p.open(c, o)
}

// Screen has the events of an interval.
type Screen struct {
	Time    time.Time `json:"time"` // its end
	Seconds float64   `json:"seconds"`
	Command float64   `json:"command_cpu_percent"` // of one CPU, without the sensors' time in the watched tasks
	// Each part is null if its sensors cannot be attached, or it is not wanted.
	IO     *io.Interval      `json:"io"`
	Sched  *sched.Interval   `json:"sched"`
	Memory *memleak.Interval `json:"memory"`
	// NotSeen has sentences about the losses of the parts in this interval, and then about those in all intervals.
	NotSeen          []string `json:"not_seen"`
	*sensor.Spending          // of this interval; nil: there is no budget
}

// Summary has the counts of the streams of events.
type Summary struct {
	Seconds float64        `json:"seconds"`
	Names   *event.Summary `json:"names,omitempty"` // of files
	Late    *sched.Ending  `json:"late,omitempty"`  // waits and stalls
	// Confidence is the percentage of frees of the kernel's memory that were seen.
	Confidence       *float64 `json:"confidence_percent,omitempty"`
	*sensor.Spending          // since the start; nil: there is no budget
}

// collector has the parts that can run. It is for one goroutine.
type collector struct {
	io     *io.Collector
	sched  *sched.Watcher
	memory *memleak.Watcher

	results []sensor.Result
	never   []string // losses in all intervals
	lesser  int      // sensors that are attached in a way that loses something
	began   time.Time
	last    time.Time
	used    time.Duration
	frees   *float64 // that were seen, in percent
	budget  *sensor.Budget
	changed []string // changes for the budget
}

// part is a tool's part of the screen.
type part struct {
	name string
	open func(*collector, Options) error
}

var parts = []part{
	{"memory", func(c *collector, o Options) (err error) {
		if o.Sample == 0 {
			c.never = append(c.never, "memory of the kernel that grows: --memory watches it")
			return nil
		}
		w, err := memleak.Watch(memleak.Options{BTF: o.BTF, Interval: o.Interval, Sample: o.Sample}, memleak.View{Top: memoryTop})
		if err == nil {
			c.memory = w
			c.add(w.Results(), nil)
			if hidden := w.Hidden(); hidden != nil {
				c.never = append(c.never, hidden.Error())
			}
		}
		return err
	}},
	{"IO", func(c *collector, o Options) error {
		w, err := io.Open(io.Options{BTF: o.BTF})
		if err == nil {
			c.io = w
			c.add(w.Results(), w.Notes())
		}
		return err
	}},
	{"CPUs", func(c *collector, o Options) error {
		w, err := sched.Watch(sched.Options{BTF: o.BTF, Threshold: o.Threshold})
		if err == nil {
			c.sched = w
			c.add(w.Results(), w.Notes())
		}
		return err
	}},
}

// open begins to watch. It leaves out a part that cannot run and reports it; if none can, or privileges are missing, that is
// the error.
func open(o Options, parts []part) (*collector, error) {
	c := &collector{}
	var errs []error
	for _, p := range parts {
		err := p.opened(c, o)
		if errors.Is(err, sensor.ErrPrivilege) {
			_, closed := c.close()
			return nil, errors.Join(err, closed)
		}
		if err != nil {
			err = fmt.Errorf("%s cannot be shown: %w", p.name, err)
			errs = append(errs, err)
			c.never = append(c.never, err.Error())
		}
	}
	err := errors.Join(errs...)
	if c.io != nil || c.sched != nil || c.memory != nil {
		err = c.begin(o.MaxCPU)
	}
	if err != nil {
		_, closed := c.close()
		return nil, errors.Join(err, closed)
	}
	return c, nil
}

// begin makes the first screen cover the same time in all parts, which were opened one after the other, and the budget all parts.
func (c *collector) begin(maxCPU float64) error {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	var errs []error
	if c.io != nil {
		_, err := c.io.Interval()
		errs = append(errs, err)
	}
	if c.sched != nil {
		_, err := c.sched.Interval(ended)
		errs = append(errs, err)
	}
	if c.lesser > 0 {
		c.never = append(c.never, fmt.Sprintf("sensors in a lesser way: %d; `shunt diag doctor` shows which data are lost", c.lesser))
	}
	var members []sensor.Member
	if c.io != nil {
		members = append(members, c.io.Member())
	}
	if c.sched != nil {
		members = append(members, c.sched.Member())
	}
	if c.memory != nil {
		members = append(members, c.memory.Member())
	}
	var err error
	c.budget, err = sensor.NewBudget(maxCPU, members...)
	c.began, c.last, c.used = time.Now(), time.Now(), used()
	return errors.Join(append(errs, err)...)
}

// add takes a part's results and notes.
func (c *collector) add(results []sensor.Result, notes []string) {
	c.results = append(c.results, results...)
	for _, r := range results {
		switch {
		case r.Got == nil:
			c.never = append(c.never, fmt.Sprintf("%s: not attached: %s", r.Sensor.Name, r.Sensor.Without))
		case r.Got.Loses != "":
			c.lesser++
		}
	}
	for _, note := range notes {
		if !slices.Contains(c.never, note) {
			c.never = append(c.never, note)
		}
	}
}

// screen watches until the context ends, and returns the events since the last screen.
func (c *collector) screen(ctx context.Context) (Screen, error) {
	s := Screen{NotSeen: []string{}}
	if c.sched != nil {
		i, err := c.sched.Interval(ctx)
		if err != nil {
			return s, err
		}
		s.Sched = &i
		s.NotSeen = append(s.NotSeen, lateNotSeen(i.Events)...)
	} else {
		<-ctx.Done()
	}
	if c.io != nil {
		i, err := c.io.Interval()
		if err != nil {
			return s, err
		}
		s.IO = &i
		s.NotSeen = append(s.NotSeen, ioNotSeen(i)...)
	}
	if c.memory != nil {
		i, err := c.memory.Interval()
		if err != nil {
			return s, err
		}
		s.Memory = &i
		c.frees = &i.Confidence
		if i.Confidence < confidenceLeast {
			s.NotSeen = append(s.NotSeen, fmt.Sprintf("memory: %.1f %% of frees were seen since the start; the others may look like growth", i.Confidence))
		}
	}
	var err error
	if s.Spending, err = c.budget.Keep(); err != nil {
		return s, err
	}
	if s.Spending != nil && s.Change != "" {
		c.changed = append(c.changed, "budget: "+s.Change)
	}
	// The last change describes best which events are not seen.
	for _, change := range slices.Backward(c.changed) {
		s.NotSeen = append(s.NotSeen, change)
	}
	s.NotSeen = append(s.NotSeen, c.never...)
	s.Time = time.Now()
	took, user := s.Time.Sub(c.last), used()
	s.Seconds, s.Command = took.Seconds(), 100*float64(user-c.used)/float64(took)
	c.last, c.used = s.Time, user
	return s, nil
}

// memoryTop is the number of rows of memory that a screen has for programs.
const memoryTop = 10

// confidenceLeast is the percentage of seen frees above which the others are too few to look like growth.
const confidenceLeast = 99

func lateNotSeen(e sched.Ending) (lines []string) {
	if e.Lost+e.Broken > 0 {
		lines = append(lines, fmt.Sprintf("CPUs: events lost: %d, broken: %d", e.Lost, e.Broken))
	}
	if n := e.Missed.Total(); n > 0 {
		lines = append(lines, fmt.Sprintf("CPUs: waits, wake-ups and runs of a sensor that were missed: %d", n))
	}
	return lines
}

func ioNotSeen(i io.Interval) (lines []string) {
	if i.MissedBytes > 0 {
		lines = append(lines, fmt.Sprintf("IO: %s are in no row, because there were too many", io.Size(float64(i.MissedBytes))))
	}
	for _, name := range slices.Sorted(maps.Keys(i.NotRun)) {
		lines = append(lines, fmt.Sprintf("%s: %d were not seen, because the sensor was interrupted on its CPU", name, i.NotRun[name]))
	}
	if unseen := i.EndsUnseen(); unseen != "" {
		lines = append(lines, fmt.Sprintf("disks: %s, by the kernel's account of the disks", unseen))
	}
	return lines
}

// close ends the watching and returns the counts of the streams.
func (c *collector) close() (Summary, error) {
	s := Summary{Seconds: time.Since(c.began).Seconds(), Confidence: c.frees, Spending: c.budget.Total()}
	errs := []error{c.budget.Close()}
	if c.io != nil {
		names, err := c.io.Close()
		s.Names, errs = &names, append(errs, err)
	}
	if c.sched != nil {
		late, err := c.sched.Close()
		s.Late, errs = &late, append(errs, err)
	}
	if c.memory != nil {
		errs = append(errs, c.memory.Close())
	}
	return s, errors.Join(errs...)
}

// used returns the CPU time of this process.
func used() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail with this argument
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
