package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// feature is one thing that the agent does while the policy asks for it. All are called with the agent's mutex held.
type feature interface {
	// prepare makes ready for a policy, and changes nothing that is at work.
	prepare(p policy.Policy) (step, error)
	// end ends it with the agent. What is to last without the agent stays.
	end() error
	// status is how it goes; the queue adds what it told.
	status() Feature
}

// step is the switch to a policy that a feature is ready for: take or drop is called, once.
type step struct {
	// take switches over. Its error says that nothing was changed; only the first of the features may refuse. What the others
	// could not do they say as a warning.
	take func() error
	drop func() error // nil: there is nothing to drop
}

func drop(steps []step) (err error) {
	for _, s := range steps {
		if s.drop != nil {
			err = errors.Join(err, s.drop())
		}
	}
	return err
}

// warn says what a feature could not do, though it is at work.
func (a *Agent) warn(err error) {
	if err != nil {
		fmt.Fprintf(a.options.Say, "warning: %v\n", err)
	}
}

// run is a goroutine that can be ended.
type run struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// begin runs something. If it ends by itself, failed has why.
func begin(failed chan<- error, do func(context.Context) error) run {
	ctx, cancel := context.WithCancel(context.Background())
	r := run{cancel, make(chan struct{})}
	go func() {
		defer close(r.done)
		if err := do(ctx); err != nil {
			select {
			case failed <- err:
			default: // another one has failed already
			}
		}
	}()
	return r
}

// stop ends it, and waits until it has.
func (r run) stop() {
	r.cancel()
	<-r.done
}
