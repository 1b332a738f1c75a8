package daemon

import (
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// Requests of the API become settings by their words alone: both have the same kinds, in the same order.
func TestKindsAreThoseOfTheAPI(t *testing.T) {
	var kinds []string
	for _, kind := range state.Kinds {
		kinds = append(kinds, string(kind))
	}
	if !slices.Equal(kinds, control.Kinds) {
		t.Errorf("the balancer has overrides of the kinds %v, and the API %v", kinds, control.Kinds)
	}
}
