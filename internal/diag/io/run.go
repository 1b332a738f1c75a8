package io

import (
	"context"
	"encoding/json"
	"errors"
	stdio "io"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/lasting"
)

// Run watches until the context ends, and writes an interval each cycle and then a summary, as text or, with
// asJSON, as one object a line.
func Run(ctx context.Context, o Options, v View, cycle time.Duration, asJSON bool, out stdio.Writer) (err error) {
	if err := v.Check(); err != nil {
		return err
	}
	c, err := Open(o)
	if err != nil {
		return err
	}
	ctx, cancel := lasting.For(ctx, o.Duration)
	defer cancel()
	closed := false
	defer func() {
		if !closed {
			_, failed := c.Close()
			err = errors.Join(err, failed)
		}
	}()
	var p printer = text{out}
	if asJSON {
		p = jsonLines{json.NewEncoder(out)}
	}
	if err := p.start(c.Results(), o.BTF.From, c.Notes()); err != nil {
		return err
	}
	all := whole{}
	ticks := time.NewTicker(cycle)
	defer ticks.Stop()
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case <-ticks.C:
		}
		i, err := c.Interval()
		if err != nil {
			return err
		}
		all.add(i)
		if err := p.interval(v.of(i)); err != nil {
			return err
		}
	}
	sum, hidden := v.of(all.sum())
	sum.Spending = c.Spending()
	closed = true
	names, err := c.Close()
	if err != nil {
		return err
	}
	return p.summary(sum, hidden, names)
}
