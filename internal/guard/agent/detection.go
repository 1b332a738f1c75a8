package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

const detectionName = "detection"

// detection is a *detect.Watch that is at work.
type detection struct {
	agent *Agent
	watch *detect.Watch // nil: off
	since time.Time
	rules int
	run   run
	ended detect.Counts // counts of watches before this one
}

func (f *detection) prepare(p policy.Policy) (step, error) {
	rules := p.Detection.Active()
	if f.agent.protects.denies { // the kernel denies, and its event reports it
		rules = slices.DeleteFunc(rules, func(r rule.Rule) bool { return r.Action == rule.Deny })
	}
	if len(rules) == 0 {
		return step{take: func() error { f.agent.warn(f.take(nil, 0)); return nil }}, nil
	}
	o := f.agent.options
	next, err := detect.Open(detect.Options{Rules: rules, Cgroup: o.Cgroup, BTF: o.BTF})
	if err != nil {
		return step{}, fmt.Errorf("detect: %w", err)
	}
	if f.watch == nil { // otherwise it was said before
		f.sayBlind(next)
	}
	return step{take: func() error { f.agent.warn(f.take(next, len(rules))); return nil }, drop: next.Close}, nil
}

// sayBlind names the sensors that do not see all of their events.
func (f *detection) sayBlind(w *detect.Watch) {
	for _, r := range w.Sensors() {
		if r.Got == nil || r.Got.Loses != "" {
			fmt.Fprintf(f.agent.options.Say, "%v\n", r)
		}
	}
	for _, blind := range detect.Blind {
		fmt.Fprintf(f.agent.options.Say, "not seen: %s\n", blind)
	}
}

// take lets a watch go on where the last one ends; nil: none. After an error it is at work all the same.
func (f *detection) take(next *detect.Watch, rules int) error {
	before := f.watch
	var errs []error
	if before != nil {
		if next != nil {
			errs = append(errs, next.TakeOver(before))
		}
		f.run.stop()
		f.ended = sum(f.ended, before.Counts())
		if next != nil {
			next.Inherit(before)
		}
		errs = append(errs, before.Close())
		f.watch = nil
	}
	if next != nil {
		if before == nil {
			f.since = time.Now()
		}
		f.watch, f.rules = next, rules
		if b := f.agent.budget; b != nil && len(b.levels) > 0 { // events that were left out before stay left out
			errs = append(errs, next.Thin(b.levels))
		}
		f.run = begin(f.agent.failed, func(ctx context.Context) error {
			_, err := next.Run(ctx, func(found detect.Found) error {
				f.agent.queue.put(detectionName, Line{Found: &found})
				return nil
			}, nil)
			return err
		})
	}
	return errors.Join(errs...)
}

func (f *detection) end() error { return f.take(nil, 0) }

func (f *detection) status() Feature {
	s, c := Feature{Name: detectionName}, f.ended
	if f.watch != nil {
		s.On, s.Since, s.Rules = true, f.since, f.rules
		c = sum(c, f.watch.Counts())
		s.Thinned, _ = f.watch.Thinned() // the maps exist as long as the watch
	}
	s.Events, s.Lost, s.LostBy, s.Missed, s.Shed = c.Received, c.Lost, c.LostBy, c.Missed, c.Shed
	return s
}

func sum(a, b detect.Counts) detect.Counts {
	a.Received, a.Lost, a.Broken, a.Missed, a.Told, a.Again = a.Received+b.Received, a.Lost+b.Lost, a.Broken+b.Broken, a.Missed+b.Missed, a.Told+b.Told, a.Again+b.Again
	a.Shed += b.Shed
	a.LostBy = maps.Clone(a.LostBy)
	for name, n := range b.LostBy {
		if a.LostBy == nil {
			a.LostBy = map[string]uint64{}
		}
		a.LostBy[name] += n
	}
	return a
}
