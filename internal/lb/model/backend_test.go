package model

import "testing"

// TestShare: the override's weight replaces the declared one, and the observation reduces it.
func TestShare(t *testing.T) {
	for _, c := range []struct {
		name      string
		backend   Backend
		effective uint16
		share     uint32
	}{
		{"declared", Backend{Weight: 5}, 5, 500},
		{"another weight", Backend{Weight: 5, Override: BackendOverride{Weighs: true, Weight: 7}}, 7, 700},
		{"drained", Backend{Weight: 5, Override: BackendOverride{Weighs: true}}, 0, 0},
		{"declared 0, with a weight", Backend{Override: BackendOverride{Weighs: true, Weight: 2}}, 2, 200},
		{"health alone", Backend{Weight: 5, Override: BackendOverride{Health: HealthUp}}, 5, 500},
		{"ramp", Backend{Weight: 5, Observed: BackendObservation{Ramp: 10}, Override: BackendOverride{Weighs: true, Weight: 2}}, 2, 20},
		{"idle", Backend{Weight: 5, Observed: BackendObservation{Idle: true}, Override: BackendOverride{Weighs: true, Weight: 2}}, 2, 0},
		{"down", Backend{Weight: 5, Observed: BackendObservation{Down: true}}, 5, 0},
	} {
		if got := c.backend.EffectiveWeight(); got != c.effective {
			t.Errorf("%s: the weight in force is %d, want %d", c.name, got, c.effective)
		}
		if got := c.backend.Share(); got != c.share {
			t.Errorf("%s: the share is %d, want %d", c.name, got, c.share)
		}
	}
}
