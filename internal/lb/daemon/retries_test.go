package daemon

import (
	"errors"
	"testing"

	"github.com/shunt-lb/shunt/internal/condition"
)

// TestRetries: a change that fails is a condition until it has succeeded, and is tried again; several requests
// cause one try.
func TestRetries(t *testing.T) {
	conditions := &condition.Set{}
	r := newRetries("shunt.yaml", conditions)
	due := func() (n int) {
		for {
			select {
			case <-r.due:
				n++
			default:
				return n
			}
		}
	}
	r.want()
	r.want()
	if n := due(); n != 1 {
		t.Errorf("it is due %d times, want once", n)
	}
	r.failing(errors.New("the map is full"))
	holds(t, conditions, "shunt.yaml", []string{condition.ReconcileFailing})
	if r.timer == nil {
		t.Fatal("what failed is not tried again")
	}
	r.timer.Reset(0)
	<-r.due
	r.failing(errors.New("the map is full still"))
	r.succeeded()
	holds(t, conditions, "shunt.yaml", nil)
	if r.timer != nil {
		t.Error("what has succeeded is tried again")
	}
}
