package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
)

// OnExit decides the fate of the programs in the kernel when the node is told to stop.
type OnExit string

// The ways to stop.
const (
	ExitDetach OnExit = "detach" // nothing is left behind; connections end
	ExitKeep   OnExit = "keep"   // the programs in the kernel continue, for the next node to take over
	ExitDrain  OnExit = "drain"  // no new flows; detach when the existing ones have ended
)

// OnExits lists all ways, the default first.
var OnExits = []OnExit{ExitDetach, ExitKeep, ExitDrain}

// stopTime is more than stopping takes on a busy machine: seconds for a change under way, and a grace period or
// two.
const stopTime = time.Minute

// ending is a request to a node to stop, and the means by which the requester learns that it has stopped.
type ending struct {
	interrupted context.Context //nolint:containedctx // ends when the node has to detach, against OnExit
	interrupt   func()          // makes the node stop and detach
	done        chan struct{}   // closed when the node holds nothing of its instance any more
	kept        bool            // the programs are still in the kernel; set at the end
	err         error           // once done
}

// arrange returns the context that stops the node; interrupted may be nil.
func (e *ending) arrange(stop, interrupted context.Context) context.Context {
	if interrupted == nil {
		interrupted = context.WithoutCancel(stop)
	}
	stop, stopping := context.WithCancel(stop)
	interrupted, interrupting := context.WithCancel(interrupted)
	*e = ending{interrupted: interrupted, done: make(chan struct{}), interrupt: func() { interrupting(); stopping() }}
	return stop
}

// over wakes the callers that wait for the end.
func (e *ending) over(err error) {
	e.err = err
	close(e.done)
}

// finish ends a node that was told to stop. Interrupted takes precedence over OnExit.
func (n *node) finish() error {
	way := cmp.Or(n.opts.OnExit, ExitDetach)
	if way == ExitDrain && n.ending.interrupted.Err() == nil {
		n.drain()
	}
	n.supervisor.stopping("stopping", stopTime)
	n.reading.Lock() // a reload under way ends first, and a later one is refused
	n.phase.Store(stopping)
	n.reading.Unlock()
	n.metrics.Close()
	n.server.Stop()
	n.ending.kept = way == ExitKeep && n.ending.interrupted.Err() == nil
	if !n.ending.kept {
		n.log.Info("stopping: detaching", "instance", n.opts.Instance)
		if n.opts.Detaching != nil {
			n.opts.Detaching()
		}
	}
	err := n.products.close(n.ending.kept)
	if !n.ending.kept && n.opts.Detached != nil {
		err = errors.Join(err, n.opts.Detached())
	}
	return err
}

// refuses returns the reason why no change is allowed any more, or nil.
func (n *node) refuses() error {
	switch n.phase.Load() {
	case draining:
		return control.ErrDraining
	case stopping:
		return control.ErrStopping
	}
	return nil
}

// drain makes the products finish their work in use, within the time that the command line allows.
func (n *node) drain() {
	ctx, cancel := context.WithTimeout(context.Background(), n.opts.DrainTimeout)
	defer cancel()
	defer context.AfterFunc(n.ending.interrupted, cancel)()
	n.reading.Lock()
	n.phase.Store(draining)
	n.reading.Unlock()
	n.conditions.Raise(condition.Condition{Code: condition.NodeDraining, Severity: condition.Info, Subject: n.opts.Instance,
		Text: "told to stop with --on-exit drain: no service takes new flows", Remedy: "wait; Ctrl-C or SIGINT detaches at once"})
	await := n.products.drain()
	n.supervisor.stopping("waiting for flows to end", n.opts.DrainTimeout+stopTime)
	n.log.Info("draining: no new flows from now on; detaching when the open flows have ended", "instance", n.opts.Instance, "timeout", n.opts.DrainTimeout)
	n.beside(ctx, func(ctx context.Context) {
		await(ctx)
		cancel()
	})
}

// Detach ends the node, removes everything of it, and waits until another may start.
func (n *node) Detach(_ context.Context, instance string, by control.Author) error {
	if instance != n.opts.Instance {
		return fmt.Errorf("%w: this is %q, but the request is for %q", control.ErrOtherInstance, n.opts.Instance, instance)
	}
	n.log.Info("asked to detach", "instance", instance, "by", by.By, "uid", by.UID, "client", by.Client)
	n.ending.interrupt()
	<-n.ending.done
	switch {
	case n.ending.kept:
		return fmt.Errorf("%w, and has already kept the data plane; ask again to detach it", control.ErrStopping)
	case n.ending.err != nil:
		return fmt.Errorf("the daemon has ended, but could not remove everything; ask again: %w", n.ending.err)
	}
	return nil
}

// Detach removes the remains of a killed node, of every product. It refuses while a node runs the instance. The
// log names the removed objects; it succeeds if there are none.
func Detach(instance string, products []Product, log *slog.Logger) error {
	unlock, err := Lock(instance)
	if err != nil {
		return err
	}
	defer unlock()
	var errs []error
	for _, p := range slices.Backward(products) {
		if p.Remove != nil {
			errs = append(errs, p.Remove(instance, log))
		}
	}
	return errors.Join(errs...)
}

// Left names the instances of which any of the products has objects on this machine.
func Left(products []Product) (instances []string, err error) {
	for _, p := range products {
		if p.Left == nil {
			continue
		}
		left, err := p.Left()
		if err != nil {
			return nil, err
		}
		instances = append(instances, left...)
	}
	slices.Sort(instances)
	return slices.Compact(instances), nil
}

// DetachCommand returns the command that ends an instance.
func DetachCommand(instance string) string {
	if instance == DefaultInstance {
		return "shunt detach"
	}
	return "shunt detach --instance " + instance
}
