package daemon

import (
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
)

// retryInterval is when what failed is tried again.
const retryInterval = 5 * time.Second

// retries has the configuration carried out once more: because that failed, or because something
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

// want has it carried out soon.
func (r *retries) want() {
	select {
	case r.due <- struct{}{}:
	default: // it is to be already
	}
}

// failing says that the maps are not as they should be, and has it tried again.
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

// succeeded says that the maps are as they should be.
func (r *retries) succeeded() {
	r.conditions.Clear(condition.ReconcileFailing, r.subject)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil {
		r.timer.Stop()
		r.timer = nil
	}
}
