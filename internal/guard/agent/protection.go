package agent

import (
	"context"
	"errors"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/gate"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
)

const protectionName = "protection"

// protection runs a *protect.Guard and reads its events, or has the reason why no guard runs although the policy has rules.
type protection struct {
	agent   *Agent
	guard   *protect.Guard // nil: off
	since   time.Time
	rules   int
	run     run
	refusal *protect.Refusal
	gate    *gate.Gate // in place of guard, if the policy allows that
	denies  bool       // the kernel denies operations for rules of detection
}

// prepare only finds out whether the kernel denies, which detection has to know. take does the rest: the kernel switches in one step or not at all.
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
		if f.gate != nil {
			return f.open()
		}
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
		return f.degrade(p, refused)
	}
	if err != nil {
		return err
	}
	f.guard, f.since, f.rules, f.refusal = g, time.Now(), rules, nil
	f.run = begin(f.agent.failed, func(ctx context.Context) error {
		return g.Listen(ctx, func(attempt judge.Attempt) error {
			f.agent.queue.put(protectionName, Line{Attempt: &attempt})
			return nil
		})
	})
	return nil
}

// degrade makes opens of protected files wait, on a kernel that can enforce nothing else, if the policy allows that.
func (f *protection) degrade(p policy.Policy, refused *protect.Refusal) error {
	switch {
	case !p.IsDegraded && f.gate != nil:
		f.refusal = refused
		return f.open()
	case !p.IsDegraded:
		f.refusal = refused
		return nil
	case f.gate != nil:
		if err := f.gate.Apply(p); err != nil {
			return err
		}
		f.rules, f.refusal = len(p.Enforced()), refused
		return nil
	}
	g, err := gate.Start(p, gate.Options{Folder: f.agent.options.Folder, Tell: func(attempt judge.Attempt) error {
		f.agent.queue.put(protectionName, Line{Attempt: &attempt})
		return nil
	}})
	var also *gate.Refusal
	if errors.As(err, &also) {
		f.refusal = &protect.Refusal{Reason: refused.Reason + "; " + also.Reason, Remedy: refused.Remedy}
		return nil
	}
	if err != nil {
		return err
	}
	f.gate, f.since, f.rules, f.refusal = g, time.Now(), len(p.Enforced()), refused
	f.run = begin(f.agent.failed, g.Wait)
	return nil
}

// open ends the gate.
func (f *protection) open() error {
	f.run.stop()
	err := f.gate.End()
	f.gate = nil
	return err
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
	if f.gate != nil {
		return f.open()
	}
	return nil
}

func (f *protection) status() Feature {
	s := Feature{Name: protectionName, Events: f.agent.queue.heardOf(protectionName).all}
	if f.guard != nil {
		denied, audited := f.guard.Lost()
		s.On, s.Since, s.Rules, s.Lost = true, f.since, f.rules, denied+audited
		s.LostBy = map[string]uint64{"denied": denied, "audited": audited}
	} else if f.gate != nil {
		opens := f.gate.Status()
		s.On, s.Since, s.Rules, s.Gaps, s.Opens, s.Why = true, f.since, f.rules, opens.Gaps, &opens, f.refusal.Reason
	} else if f.refusal != nil {
		s.Why = f.refusal.Reason
	}
	return s
}
