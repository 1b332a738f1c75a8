package store

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// Slots lie where the programs look for them, however windows divide them for writing and reading.
func TestSlotWindows(t *testing.T) {
	opts := testOptions(t)
	opts.Limits.Slots = 2*slotWindow + 100
	d := mustOpen(t, opts)
	reader, err := OpenView(opts)
	must(t, err)
	t.Cleanup(func() { must(t, reader.Close()) })
	at := func(slot int) reconcile.Slot {
		return reconcile.Slot{Current: reconcile.BackendRef{Index: uint32(slot), Generation: uint8(slot % 251)}}
	}
	written := map[uint32]bool{}
	for _, run := range []struct{ first, count int }{
		{0, 3}, {slotWindow - 2, 5}, {5, 1}, {2*slotWindow - 1, 101}, {slotWindow - 1, slotWindow + 2}, {100, 0}, {2 * slotWindow, 1},
	} {
		name := fmt.Sprintf("%d slots from %d on", run.count, run.first)
		var slots []reconcile.Slot
		for i := range run.count {
			slots = append(slots, at(run.first+i))
			written[uint32(run.first+i)] = true
		}
		want := reconcile.NewTable(slots)
		must(t, d.WriteSlots(uint32(run.first), want))
		got, err := reader.readSlots(name, uint32(run.first), uint32(run.count))
		if err != nil || !cmp.Equal(got, want) {
			t.Errorf("%s: read otherwise than written: %v", name, err)
		}
	}
	for slot := range opts.Limits.Slots { // by the map itself
		var held uint64
		must(t, d.maps[abi.MapSlots].Lookup(slot, &held))
		want := reconcile.Slot{}
		if written[slot] {
			want = at(int(slot))
		}
		if got := abi.FromSlot(held); got != want {
			t.Fatalf("slot %d is %+v, want %+v", slot, got, want)
		}
	}
	if err := d.WriteSlots(opts.Limits.Slots-1, make(reconcile.Table, 2)); err == nil {
		t.Error("slots behind the last were written")
	}
	if _, err := reader.readSlots("web", opts.Limits.Slots, 1); err == nil {
		t.Error("slots behind the last were read")
	}
}
