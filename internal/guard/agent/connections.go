package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// ConnectionsName is the feature's name in the status.
const ConnectionsName = "connections"

// connections is a *connect.Denial whose events are read. Its rules stay in force without it.
type connections struct {
	agent  *Agent
	denial *connect.Denial // nil: off
	since  time.Time
	rules  int
	run    run
	ended  struct{ denied, audited uint64 } // events that denials before this one lost
}

// prepare attaches the next policy's programs, which do not deny anything yet.
func (f *connections) prepare(p policy.Policy) (step, error) {
	if len(p.Connections) == 0 {
		return step{take: func() error { f.agent.warn(f.stop()); return nil }}, nil
	}
	o := f.agent.options
	next, err := connect.Open(p, connect.Options{Root: o.Root, Cgroup: o.Cgroup, Log: o.Log})
	if err != nil {
		return step{}, fmt.Errorf("connections: %w", err)
	}
	return step{take: func() error { f.take(next, len(p.Connections)); return nil }, drop: next.Drop}, nil
}

func (f *connections) take(next *connect.Denial, rules int) {
	f.agent.warn(next.Take())
	if f.denial == nil {
		f.since = time.Now()
	}
	f.leave()
	f.denial, f.rules = next, rules
	f.run = begin(f.agent.failed, func(ctx context.Context) error {
		return next.Listen(ctx, func(attempt connect.Attempt) error {
			f.agent.queue.put(ConnectionsName, Line{Connection: &attempt})
			return nil
		})
	})
	for _, gap := range next.Missing() {
		f.agent.warn(fmt.Errorf("NOT ENFORCED: %s of rule %q of connections: %s", gap.Operation, gap.Rule, gap.Why))
	}
}

// leave stops reading events. The rules stay in the kernel.
func (f *connections) leave() {
	if f.denial == nil {
		return
	}
	f.run.stop()
	denied, audited := f.denial.Lost()
	f.ended.denied, f.ended.audited = f.ended.denied+denied, f.ended.audited+audited
	f.denial.Close()
	f.denial = nil
}

// stop removes the rules from the kernel.
func (f *connections) stop() error {
	if f.denial == nil {
		return nil
	}
	_, err := connect.Stop(f.agent.options.Root)
	f.leave()
	if err != nil {
		return errors.Join(errors.New("connections are still denied"), err)
	}
	return nil
}

func (f *connections) end() error {
	f.leave()
	return nil
}

func (f *connections) status() Feature {
	s := Feature{Name: ConnectionsName, Events: f.agent.queue.heardOf(ConnectionsName).all}
	denied, audited := f.ended.denied, f.ended.audited
	if f.denial != nil {
		d, a := f.denial.Lost()
		denied, audited = denied+d, audited+a
		s.On, s.Since, s.Rules = true, f.since, f.rules
		s.Gaps = f.denial.Missing()
	}
	s.Lost, s.LostBy = denied+audited, map[string]uint64{"denied": denied, "audited": audited}
	return s
}
