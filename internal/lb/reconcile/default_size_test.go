package reconcile_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// TestAChangeMovesItsShare: with the default table size, any of up to 40 backends that leaves moves its
// own slots and at most a twentieth of the table beside them. A backend that comes moves as many: the two
// tables are the same.
func TestAChangeMovesItsShare(t *testing.T) {
	const most = 40
	limits := model.Limits{Services: 2, Backends: 2 * most, Slots: 4 * 4093}
	var pairs [][]model.Backend // one of each family
	for i := range most {
		pairs = append(pairs, []model.Backend{backend(fmt.Sprintf("10.0.0.%d:80", i+2), 1), backend(fmt.Sprintf("[2001:db8:1::%x]:80", i+2), 1)})
	}
	for _, forwarding := range []model.Forwarding{model.ForwardingNAT, model.ForwardingDSRIPIP} {
		t.Run(string(forwarding), func(t *testing.T) {
			worst := 0.0
			for count := 2; count <= most; count++ {
				web := sized(0, service("web", "192.0.2.10:80 [2001:db8::10]:80", ""))
				web.Forwarding, web.Backends = forwarding, slices.Concat(pairs[:count]...)
				d := desired(web)
				d.Limits = limits
				b := newBench(t, limits)
				b.apply(d)
				contents, _ := b.maps.Contents()
				own := map[model.BackendAddress]uint32{}
				for _, slots := range contents.Slots {
					for _, slot := range slots.All() {
						own[contents.Backends[slot.Current.Index].BackendAddress]++
					}
				}
				for gone := range count {
					web.Backends = slices.Concat(slices.Concat(pairs[:gone]...), slices.Concat(pairs[gone+1:count]...))
					d.Services = model.Shared([]model.Service{web})
					difference, err := b.r.Plan(d)
					if err != nil || len(difference.Services) != 1 || len(difference.Services[0].Tables) != 2 {
						t.Fatalf("backend %d of %d: %s, %v", gone, count, difference, err)
					}
					for family, table := range difference.Services[0].Tables {
						extra := (float64(table.SlotsMoved) - float64(own[pairs[gone][family].BackendAddress])) / float64(table.Slots)
						worst = max(worst, extra)
						if extra > 0.05 {
							t.Errorf("backend %d of %d, %s: %.1f %% of the slots move beside its own", gone, count, table.Family, 100*extra)
						}
					}
				}
			}
			t.Logf("at worst, %.2f %% of the slots move beside the backend's own", 100*worst)
		})
	}
}
