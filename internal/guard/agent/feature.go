package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// feature is a task of the agent, if the policy asks for it. The methods are called with the agent's mutex held.
type feature interface {
	// prepare prepares the feature for a policy, and changes nothing that is at work.
	prepare(p policy.Policy) (step, error)
	// end ends the feature with the agent. State that lasts without the agent stays.
	end() error
	// status returns the feature's state; the queue adds the number of its lines.
	status() Feature
}

// step is a feature's prepared switch to a policy: one of take and drop is called, once.
type step struct {
	// take switches over. Its error says that nothing was changed; only the first of the features may return one. The others
	// warn of parts that failed.
	take func() error
	drop func() error // nil: nothing has to be undone
}

func drop(steps []step) (err error) {
	for _, s := range steps {
		if s.drop != nil {
			err = errors.Join(err, s.drop())
		}
	}
	return err
}

// warn reports that a part of a feature failed although the feature is at work.
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

// begin runs a function. If it ends by itself, failed gets its error.
func begin(failed chan<- error, do func(context.Context) error) run {
	ctx, cancel := context.WithCancel(context.Background())
	r := run{cancel, make(chan struct{})}
	go func() {
		defer close(r.done)
		if err := do(ctx); err != nil {
			select {
			case failed <- err:
			default: // another feature has failed already
			}
		}
	}()
	return r
}

// stop ends the goroutine, and waits for its end.
func (r run) stop() {
	r.cancel()
	<-r.done
}
