package sched

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/lasting"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// RunQueues watches run queues until the context ends. It writes each wait above the threshold after its end, and
// a summary at the end, as text or, with asJSON, as one object a line.
func RunQueues(ctx context.Context, o Options, top int, asJSON bool, out io.Writer) (err error) {
	c, err := open(o, runqSensors(), 0)
	if err != nil {
		return err
	}
	ctx, cancel := lasting.For(ctx, o.Duration)
	defer cancel()
	defer func() { err = errors.Join(err, c.release()) }()
	var p runqPrinter = runqText{out, o.Threshold, top}
	if asJSON {
		p = runqLines{json.NewEncoder(out)}
	}
	if err := p.start(c.set.Results, o.BTF.From); err != nil {
		return err
	}
	broken := uint64(0)
	tell := func(e event.Event) error {
		w, err := decodeWait(e)
		if err != nil {
			broken++
			return nil
		}
		return p.wait(w)
	}
	ending, err := c.stream(ctx, tell, p.budget, &broken)
	if err != nil {
		return err
	}
	q, err := c.queues()
	if err != nil {
		return err
	}
	return p.summary(q, ending)
}

// patience is the longest wait of a reader of events, so that it notices the end of its context.
const patience = 100 * time.Millisecond

// read passes events to tell, and changes for the budget to changed, until the context ends.
func (c *collector) read(ctx context.Context, tell func(event.Event) error, changed func(sensor.Spending) error) error {
	for ctx.Err() == nil {
		if err := c.keep(changed); err != nil {
			return err
		}
		until := time.Now().Add(patience)
		if end, has := ctx.Deadline(); has && end.Before(until) {
			until = end
		}
		e, err := c.reader.Read(until)
		if errors.Is(err, event.ErrTimeout) {
			continue
		}
		if err != nil {
			return err
		}
		if err := tell(e); err != nil {
			return err
		}
	}
	return nil
}

// batch is the interval at which readBatches looks for events. Waking it for each of some hundred events a second took 6 % of a
// CPU (Linux 6.18, 2 CPUs with a load of 22).
const batch = 50 * time.Millisecond

// readBatches is read for a caller that needs no event at once. It also passes on the events that are there at the end.
func (c *collector) readBatches(ctx context.Context, tell func(event.Event) error) error {
	ticks := time.NewTicker(batch)
	defer ticks.Stop()
	for ended := false; ; {
		if err := c.reader.Drain(tell); err != nil || ended {
			return err
		}
		select {
		case <-ctx.Done():
			ended = true
		case <-ticks.C:
		}
	}
}

// ExamineRunQueues attaches the sensors of `shunt diag runq` and detaches them again. If the tool could not run, the error is
// sensor.ErrNoWay, and the results are complete.
func ExamineRunQueues(b sensor.BTF) ([]sensor.Result, error) { return examine(b, runqSensors()) }

func examine(b sensor.BTF, sensors []sensor.Sensor) ([]sensor.Result, error) {
	spec, err := loadSched()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag: %w", err)
	}
	set, err := sensor.Open(spec, sensors, sensor.Options{BTF: b})
	if set == nil {
		return nil, err
	}
	return set.Results, errors.Join(err, set.Close())
}
