package agent

import (
	"context"
	"errors"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
)

const protectionName = "protection"

// protection is a *protect.Guard whose events are read, or the reason why there is none although the policy has rules.
type protection struct {
	agent   *Agent
	guard   *protect.Guard // nil: off
	since   time.Time
	rules   int
	run     run
	refusal *protect.Refusal
	denies  bool // the kernel denies operations for rules of detection
}

// prepare only finds out whether the kernel denies, because detection has to know: the kernel switches at once or not at all.
func (f *protection) prepare(p policy.Policy) (step, error) {
	denies := len(p.Denials()) > 0
	if denies && f.guard == nil && !p.MustEnforce() {
		var refused *protect.Refusal
		err := protect.Enforces()
		if denies = err == nil; err != nil && !errors.As(err, &refused) {
			return step{}, err
		}
	}
	f.denies = denies
	return step{take: func() error { return f.take(p) }}, nil
}

func (f *protection) take(p policy.Policy) error {
	rules := len(p.Enforced())
	if rules == 0 {
		f.refusal = nil
		if f.guard == nil {
			return nil
		}
		f.leave()
		_, err := protect.Stop(f.agent.options.Root)
		return err
	}
	if f.guard != nil {
		if err := f.guard.Apply(p); err != nil {
			return err
		}
		f.rules = rules
		return nil
	}
	g, err := protect.Start(f.agent.options.Root, p, f.agent.options.Log)
	var refused *protect.Refusal
	if errors.As(err, &refused) && !p.MustEnforce() {
		f.refusal = refused
		return nil
	}
	if err != nil {
		return err
	}
	f.guard, f.since, f.rules, f.refusal = g, time.Now(), rules, nil
	f.run = begin(f.agent.failed, func(ctx context.Context) error {
		return g.Listen(ctx, func(attempt protect.Attempt) error {
			f.agent.queue.put(protectionName, Line{Attempt: &attempt})
			return nil
		})
	})
	return nil
}

// leave stops reading events. The protection stays in the kernel.
func (f *protection) leave() {
	f.run.stop()
	f.guard.Close()
	f.guard = nil
}

func (f *protection) end() error {
	if f.guard != nil {
		f.leave()
	}
	return nil
}

func (f *protection) status() Feature {
	s := Feature{Name: protectionName, Events: f.agent.queue.heardOf(protectionName).all}
	if f.guard != nil {
		denied, audited := f.guard.Lost()
		s.On, s.Since, s.Rules, s.Lost = true, f.since, f.rules, denied+audited
		s.LostBy = map[string]uint64{"denied": denied, "audited": audited}
	} else if f.refusal != nil {
		s.Why = f.refusal.Reason
	}
	return s
}
