package daemon

import (
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// ignoring are maps that accept all writes, and store none.
type ignoring struct{ reconcile.Maps }

func (ignoring) PutBackend(reconcile.BackendRecord) error { return nil }
func (ignoring) DeleteBackend(reconcile.BackendRef) error { return nil }
func (ignoring) EndStrays([]reconcile.Member) error       { return nil }

// TestLeavingTells: a backend that goes, is down, or leaves a service is reported; one that comes or drains is not.
func TestLeavingTells(t *testing.T) {
	told := 0
	maps := leaving{ignoring{}, func() { told++ }, func([]reconcile.Member, func() error) error { told++; return nil }}
	for _, c := range []struct {
		what string
		do   func() error
		want int
	}{
		{"a new one", func() error { return maps.PutBackend(reconcile.BackendRecord{}) }, 0},
		{"one that drains", func() error { return maps.PutBackend(reconcile.BackendRecord{Draining: true}) }, 0},
		{"one that is down", func() error { return maps.PutBackend(reconcile.BackendRecord{Down: true}) }, 1},
		{"one that leaves a service", func() error { return maps.EndStrays(nil) }, 1},
		{"one that goes", func() error { return maps.DeleteBackend(reconcile.BackendRef{Index: 1}) }, 1},
	} {
		told = 0
		if err := c.do(); err != nil || told != c.want {
			t.Errorf("%s: told %d times, want %d; %v", c.what, told, c.want, err)
		}
	}
}
