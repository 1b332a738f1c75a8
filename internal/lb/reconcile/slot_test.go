package reconcile

import (
	"testing"

	"pgregory.net/rapid"
)

func TestPackedSlots(t *testing.T) {
	refs := rapid.Custom(func(t *rapid.T) BackendRef {
		return BackendRef{Index: rapid.Uint32Range(0, maxBackendIndex).Draw(t, "index"), Generation: rapid.Uint8().Draw(t, "generation")}
	})
	rapid.Check(t, func(t *rapid.T) {
		s := Slot{
			State: SlotState(rapid.IntRange(0, 15).Draw(t, "state")), Current: refs.Draw(t, "current"), Previous: refs.Draw(t, "previous"),
			PreviousDrains: rapid.Bool().Draw(t, "drains"), PreviousBefore: rapid.Bool().Draw(t, "before"),
		}
		p := pack(s)
		if p.slot() != s || p.state() != s.State || p.current() != s.Current || p&packedBefore != 0 != s.PreviousBefore {
			t.Errorf("%+v is packed as %x, which is %+v", s, p, p.slot())
		}
	})
	all := []Slot{{}, {State: Marked, Current: BackendRef{maxBackendIndex, 255}}, {State: Transition, Previous: BackendRef{maxBackendIndex, 255}, PreviousDrains: true}}
	for i, s := range NewTable(all).All() {
		if s != all[i] {
			t.Errorf("slot %d is %+v, was %+v", i, s, all[i])
		}
	}
}
