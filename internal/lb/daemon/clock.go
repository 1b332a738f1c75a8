package daemon

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

const (
	// clockStepMin is the smallest difference that counts as a step: an adjustment of the clock's rate
	// (adjtimex(2)) moves wall and monotonic clock alike, and time passes between two readings.
	clockStepMin = 2 * time.Second
	// clockStepHold is how long a step stays a condition.
	clockStepHold = 10 * time.Minute
)

// steadyClock returns the wall clock's time, but ignores steps of the wall clock until follow is called.
type steadyClock struct {
	wall    func() time.Time     // without a monotonic reading
	elapsed func() time.Duration // monotonic, since any moment

	mu     sync.Mutex
	anchor time.Time     // of the wall clock
	at     time.Duration // elapsed then
}

func newSteadyClock(wall func() time.Time, elapsed func() time.Duration) *steadyClock {
	return &steadyClock{wall: wall, elapsed: elapsed, anchor: wall(), at: elapsed()}
}

// machineClock returns a steadyClock on the machine's clocks.
func machineClock() *steadyClock {
	begun := time.Now()
	return newSteadyClock(func() time.Time { return time.Now().Round(0) }, func() time.Duration { return time.Since(begun) })
}

// now returns the time of a wall clock without the steps since the anchor.
func (c *steadyClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.anchor.Add(c.elapsed() - c.at)
}

// stepped returns the size of the wall clock's steps since the anchor; 0 if there was none.
func (c *steadyClock) stepped() time.Duration {
	step := c.wall().Sub(c.now())
	if step.Abs() < clockStepMin {
		return 0
	}
	return step.Round(time.Second)
}

// follow makes the clock follow a step of the wall clock.
func (c *steadyClock) follow(step time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.anchor = c.anchor.Add(step)
}

// deadlines moves the deadlines of drains together with the wall clock when it is set: a drain of ten minutes
// takes ten minutes all the same. One caller at a time may use it.
type deadlines struct {
	clock  *steadyClock
	writer *state.Writer
	steps  condition.Lasting
	log    *slog.Logger
}

func newDeadlines(clock *steadyClock, writer *state.Writer, conditions *condition.Set, log *slog.Logger) *deadlines {
	return &deadlines{clock, writer, condition.Lasting{Set: conditions, Hold: clockStepHold}, log}
}

// follow checks whether the clock was set since the last call.
func (d *deadlines) follow() {
	step := d.clock.stepped()
	defer func() { d.steps.Pass(d.clock.now()) }()
	if step == 0 {
		return
	}
	// This order makes sure that no deadline passes in between.
	var err error
	if step > 0 {
		err = d.writer.ShiftDeadlines(step)
		d.clock.follow(step)
	} else {
		d.clock.follow(step)
		err = d.writer.ShiftDeadlines(step)
	}
	direction := "forward"
	if step < 0 {
		direction = "back"
	}
	d.steps.See(condition.Condition{Code: condition.ClockStepped, Subject: "wall clock",
		Text: "the wall clock was set " + direction + " by " + step.Abs().String() + "; the deadlines of drains were moved by the same time, and nothing else depends on the wall clock"}, d.clock.now())
	if err != nil { // the condition overrides_unsaved follows, and goes when it has succeeded
		d.log.Warn("deadlines that were moved with the wall clock are not on disk yet", "error", errors.Unwrap(err))
	}
}
