package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/sensor"
)

// Options are where the agent works, and whom it tells.
type Options struct {
	Root   string           // a bpffs
	Folder string           // of the agent's lock and socket: RunDirectory
	Cgroup string           // detection watches its processes only; "": all
	BTF    sensor.BTF       // the zero value stands for the kernel's own
	Log    *slog.Logger     // of the kernel's folders
	Say    io.Writer        // what people read: beginnings, ends, warnings
	Tell   func(Line) error // one at a time; an error ends the agent
}

// Agent is the features at work.
type Agent struct {
	options Options
	began   time.Time
	queue   *queue
	failed  chan error // of a feature or the writer, that ended by itself
	unlock  func()
	serving io.Closer
	writing chan struct{} // closed when the writer has ended
	ending  chan struct{} // closed when no line comes any more

	mutex      sync.Mutex // of what follows, and of switching
	protection *protection
	refusal    *protect.Refusal // why nothing is protected though the policy says so
	detection  *detection
	ended      detect.Counts // of watches before this one
	reloads    uint64
}

// protection is a *protect.Guard that is listened to.
type protection struct {
	guard *protect.Guard
	since time.Time
	rules int
	feature
}

// detection is a *detect.Watch at work.
type detection struct {
	watch *detect.Watch
	since time.Time
	rules int
	feature
}

// feature is a goroutine that can be ended.
type feature struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// begin runs a feature. If it ends by itself, failed has why.
func begin(failed chan<- error, run func(context.Context) error) feature {
	ctx, cancel := context.WithCancel(context.Background())
	f := feature{cancel, make(chan struct{})}
	go func() {
		defer close(f.done)
		if err := run(ctx); err != nil {
			select {
			case failed <- err:
			default: // another one has failed already
			}
		}
	}()
	return f
}

// end ends it, and waits until it has.
func (f feature) end() {
	f.cancel()
	<-f.done
}

// Start begins with what the policy says. A *protect.Refusal is in the error if the kernel enforces nothing and the policy must
// be enforced; where it need not be, Refusal has it.
func Start(p policy.Policy, o Options) (*Agent, error) {
	a := &Agent{options: o, began: time.Now(), queue: newQueue(), failed: make(chan error, 1), writing: make(chan struct{}), ending: make(chan struct{})}
	var err error
	if a.unlock, err = lock(o.Folder); err != nil {
		return nil, err
	}
	go a.write()
	err = a.Apply(p)
	if err == nil {
		a.serving, err = a.serve()
	}
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	a.mutex.Lock()
	a.reloads = 0 // the first was none
	a.mutex.Unlock()
	return a, nil
}

// Refusal is why nothing is protected though the policy has rules; nil: all is as it says.
func (a *Agent) Refusal() *protect.Refusal {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.refusal
}

// Guard is the protection at work; nil: none.
func (a *Agent) Guard() *protect.Guard {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.protection == nil {
		return nil
	}
	return a.protection.guard
}

// Apply switches to a policy. If it fails, all goes on by the one before. Protection that the policy has no rules of is taken out of the
// kernel, and so is detection.
func (a *Agent) Apply(p policy.Policy) error {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	rules := p.Detection.Active()
	var next *detect.Watch
	if len(rules) > 0 { // first what can fail and changes nothing
		var err error
		if next, err = detect.Open(detect.Options{Rules: rules, Cgroup: a.options.Cgroup, BTF: a.options.BTF}); err != nil {
			return fmt.Errorf("detect: %w", err)
		}
		a.sayBlind(next)
	}
	if err := a.protect(p); err != nil {
		if next != nil {
			err = errors.Join(err, next.Close())
		}
		return err
	}
	if err := a.detect(next, len(rules)); err != nil { // the new one is at work nevertheless
		fmt.Fprintf(a.options.Say, "warning: %v\n", err)
	}
	a.reloads++
	return nil
}

// sayBlind says which sensors see less than all.
func (a *Agent) sayBlind(w *detect.Watch) {
	if a.detection != nil { // it was said
		return
	}
	for _, r := range w.Sensors() {
		if r.Got == nil || r.Got.Loses != "" {
			fmt.Fprintf(a.options.Say, "%v\n", r)
		}
	}
	for _, blind := range detect.Blind {
		fmt.Fprintf(a.options.Say, "not seen: %s\n", blind)
	}
}

func (a *Agent) protect(p policy.Policy) error {
	if len(p.Rules) == 0 {
		a.refusal = nil
		return a.endProtection(true)
	}
	if a.protection != nil {
		if err := a.protection.guard.Apply(p); err != nil {
			return err
		}
		a.protection.rules = len(p.Rules)
		return nil
	}
	g, err := protect.Start(a.options.Root, p, a.options.Log)
	var refused *protect.Refusal
	if errors.As(err, &refused) && !p.MustEnforce() {
		a.refusal = refused
		return nil
	}
	if err != nil {
		return err
	}
	a.refusal = nil
	a.protection = &protection{guard: g, since: time.Now(), rules: len(p.Rules)}
	a.protection.feature = begin(a.failed, func(ctx context.Context) error {
		return g.Listen(ctx, func(attempt protect.Attempt) error {
			a.queue.put(Line{Attempt: &attempt})
			return nil
		})
	})
	return nil
}

// endProtection stops listening. Where the policy has no rules any more, what is in the kernel goes, too.
func (a *Agent) endProtection(unprotect bool) error {
	if a.protection == nil {
		return nil
	}
	a.protection.end()
	a.protection.guard.Close()
	a.protection = nil
	if !unprotect {
		return nil
	}
	_, err := protect.Stop(a.options.Root)
	return err
}

// detect has a watch go on where the one before leaves off; nil: none.
func (a *Agent) detect(next *detect.Watch, rules int) error {
	before := a.detection
	var errs []error
	if before != nil {
		if next != nil {
			errs = append(errs, next.TakeOver(before.watch))
		}
		before.end()
		a.ended = sum(a.ended, before.watch.Counts())
		if next != nil {
			next.Inherit(before.watch)
		}
		errs = append(errs, before.watch.Close())
		a.detection = nil
	}
	if next != nil {
		since := time.Now()
		if before != nil {
			since = before.since
		}
		a.detection = &detection{watch: next, since: since, rules: rules}
		a.detection.feature = begin(a.failed, func(ctx context.Context) error {
			_, err := next.Run(ctx, func(f detect.Found) error {
				a.queue.put(Line{Found: &f})
				return nil
			}, nil)
			return err
		})
	}
	return errors.Join(errs...)
}

// write hands on what features tell, until all have ended and nothing waits.
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

// Wait returns when ctx ends, or a feature ends by itself, with its error.
func (a *Agent) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-a.failed:
		return err
	}
}

// Warn writes what is not protected though a rule is about it.
func (a *Agent) Warn(w io.Writer) {
	if g := a.Guard(); g != nil {
		g.Warn(w)
	}
	if r := a.Refusal(); r != nil {
		fmt.Fprintf(w, "NOT PROTECTED: nothing is enforced on this kernel: %s. What to do: %s\n", r.Reason, r.Remedy)
	}
}

// Close ends the features, and returns when all that they told is written. Files stay protected; nothing of detection stays.
func (a *Agent) Close() error {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	err := errors.Join(a.endProtection(false), a.detect(nil, 0))
	close(a.ending)
	<-a.writing
	if a.serving != nil {
		err = errors.Join(err, a.serving.Close())
	}
	a.unlock()
	return err
}
