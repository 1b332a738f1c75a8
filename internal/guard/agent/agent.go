package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/gate"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/sensor"
)

// Options configure an agent.
type Options struct {
	Root   string           // a bpffs
	Folder string           // of the agent's lock and socket: RunDirectory
	Decoys string           // folder of the journal of decoys: decoy.Directory
	Cgroup string           // detection watches, and rules of connections bind, only its processes; "": all
	BTF    sensor.BTF       // the zero value stands for the kernel's own
	MaxCPU float64          // percent of one CPU that the process may use; 0: no limit
	Limit  string           // name of the cgroup with the limit
	Log    *slog.Logger     // for the programs that are attached
	Say    io.Writer        // for people: beginnings, ends, warnings
	Tell   func(Line) error // called for one line at a time; an error ends the agent
}

// Agent runs the features.
type Agent struct {
	options Options
	began   time.Time
	queue   *queue
	failed  chan error // error of a feature, or of the writer, that ended by itself
	unlock  func()
	serving []io.Closer
	writing chan struct{} // closed when the writer has ended
	ending  chan struct{} // closed when no further line comes

	mutex    sync.Mutex // guards the fields that follow, and switches
	protects *protection
	detects  *detection
	budget   *budget   // nil: no limit
	features []feature // in the order in which they switch, and in which the status has them
	reloads  uint64
	policy   policy.Policy // unchanged
	off      []Off         // features and rules that are switched off by hand
	ended    bool
}

// Start brings a policy into force. If the kernel enforces nothing and the policy must be enforced, the error has a
// *protect.Refusal; if the policy need not be, Refusal returns it.
func Start(p policy.Policy, o Options) (*Agent, error) {
	a := &Agent{options: o, began: time.Now(), queue: newQueue(), failed: make(chan error, 1), writing: make(chan struct{}), ending: make(chan struct{})}
	a.protects = &protection{agent: a}
	a.detects = &detection{agent: a}
	a.features = []feature{a.protects, a.detects, &decoys{agent: a}, &connections{agent: a}}
	var err error
	if a.unlock, err = lock(o.Folder); err != nil {
		return nil, err
	}
	go a.write()
	err = a.Apply(p)
	if err == nil {
		err = a.serve()
	}
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	a.mutex.Lock()
	a.reloads = 0 // the first Apply was no reload
	a.mutex.Unlock()
	if o.MaxCPU > 0 { // after the start, which takes more CPU
		a.startBudget()
	}
	return a, nil
}

// Gate returns the protection of a kernel without BPF LSM, where the policy allows it; nil: there is none.
func (a *Agent) Gate() *gate.Gate {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.protects.gate
}

// Refusal returns the reason why nothing is protected although the policy has rules, or only opens by a Gate; nil: everything is as the policy says.
func (a *Agent) Refusal() *protect.Refusal {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.protects.refusal
}

// Guard returns the protection that is at work; nil: none.
func (a *Agent) Guard() *protect.Guard {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.protects.guard
}

// Apply switches all features to a policy. If it fails, all features go on with the policy before. It switches off a feature that
// the policy does not ask for; features and rules that were switched off by hand stay off.
func (a *Agent) Apply(p policy.Policy) error {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if err := a.lifted(func() error { return a.apply(without(p, a.off)) }); err != nil {
		return err
	}
	a.policy = p
	a.reloads++
	for _, o := range a.off {
		a.tellSwitched(Switched{time.Now(), o.Name, false, true, o.By})
	}
	return nil
}

func (a *Agent) apply(p policy.Policy) error {
	steps := make([]step, 0, len(a.features))
	for _, f := range a.features { // first the steps that can fail and change nothing
		s, err := f.prepare(p)
		if err != nil {
			return errors.Join(err, drop(steps))
		}
		steps = append(steps, s)
	}
	for i, s := range steps {
		if err := s.take(); err != nil { // the error of the first one: nothing was switched yet
			return errors.Join(err, drop(steps[i+1:]))
		}
	}
	return nil
}

// write writes the features' lines, until all features have ended and no line waits.
func (a *Agent) write() {
	defer close(a.writing)
	for {
		l, is := a.queue.take()
		if is {
			if err := a.options.Tell(l); err != nil {
				select {
				case a.failed <- err:
				default:
				}
				return
			}
			continue
		}
		select {
		case <-a.queue.filled:
		case <-a.ending:
			if len(a.queue.filled) == 0 {
				return
			}
		}
	}
}

// Wait returns when ctx ends, or when a feature ends by itself, with its error.
func (a *Agent) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-a.failed:
		return err
	}
}

// Warn writes warnings of protection that is missing although a rule asks for it.
func (a *Agent) Warn(w io.Writer) {
	if g := a.Guard(); g != nil {
		g.Warn(w)
	}
	for _, o := range a.Status().Off {
		fmt.Fprintf(w, "warning: %s is still switched off by hand, by %v: `shunt guard feature enable %s`\n", o.Name, o.By, o.Name)
	}
	if g := a.Gate(); g != nil {
		fmt.Fprintln(w, gate.NotEnforced(g.Status().Gaps))
	} else if r := a.Refusal(); r != nil {
		fmt.Fprintf(w, "NOT PROTECTED: this kernel enforces no rule: %s. What to do: %s\n", r.Reason, r.Remedy)
	}
}

// Close ends the features, and returns when all their lines are written. Files stay protected; detection ends.
func (a *Agent) Close() error {
	err := a.endBudget()
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.ended = true
	for _, f := range a.features {
		err = errors.Join(err, f.end())
	}
	close(a.ending)
	<-a.writing
	for _, s := range a.serving {
		err = errors.Join(err, s.Close())
	}
	a.unlock()
	return err
}
