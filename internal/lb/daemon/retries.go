package daemon

import (
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
)

// retryInterval is the time after which a failed change is tried again.
const retryInterval = 5 * time.Second

// retries asks for the configuration to be applied once more: because applying it failed, or because something
// that it depends on has changed.
type retries struct {
	subject    string // of the condition
	conditions *condition.Set
	due        chan struct{} // capacity 1

	mu    sync.Mutex
	timer *time.Timer
}

func newRetries(subject string, conditions *condition.Set) *retries {
	return &retries{subject: subject, conditions: conditions, due: make(chan struct{}, 1)}
}

// want asks for it soon.
func (r *retries) want() {
	select {
	case r.due <- struct{}{}:
	default: // it is to be already
	}
}

// failing reports that the maps are not in the desired state, and asks for another attempt.
func (r *retries) failing(err error) {
	r.conditions.Raise(condition.Condition{Code: condition.ReconcileFailing, Severity: condition.Error,
		Subject: r.subject, Text: err.Error()})
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil {
		r.timer.Stop()
	}
	r.timer = time.AfterFunc(retryInterval, r.want)
}

// succeeded reports that the maps are in the desired state.
func (r *retries) succeeded() {
	r.conditions.Clear(condition.ReconcileFailing, r.subject)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil {
		r.timer.Stop()
		r.timer = nil
	}
}
