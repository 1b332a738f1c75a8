package reconcile

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// Dump returns the contents as text; equal contents have equal texts. Each record has a line. Below
// a service there is a line for each backend with its share of the table, and one line for the order of
// the slots. Unusual facts are added: a backend that drains, tracking and affinity, slots that are not
// settled, and the backends that had their flows before.
//
//	backend 1 generation 1: 10.0.0.2:8080
//	service 0 generation 1: web, nat, seed 0x0fd9bc91, slots 0 to 250
//	  backend 1 generation 1: 251 slots
//	  placement 0x1f7d04a5b19c2e63
//	service 1 generation 1: dns, dsr-ipip, seed 0xda6ae8bc, slots 251 to 501, tracking always
//	  backend 1 generation 1: 251 slots
//	  placement 0x66cec4b3c5126e75
//	  slots: 240 settled, 11 in transition
//	  previous backend 3 generation 1: 11 slots
//	frontend tcp 192.0.2.10:80: service 0
//	address 192.0.2.10: vip, announce
//	filter 198.51.100.0/24: service 0 generation 1, allow
//	filter 0.0.0.0/0: service 0 generation 1, deny
//	free backend 2: last generation 1
func Dump(contents Contents) string {
	var out strings.Builder
	for _, index := range slices.Sorted(maps.Keys(contents.Backends)) {
		backend := contents.Backends[index]
		fmt.Fprintf(&out, "backend %d generation %d: %s%s\n", index, backend.Generation, backend.BackendAddress,
			when(backend.Draining && !backend.Down, ", draining")+when(backend.Down, ", down"))
	}
	for _, index := range slices.Sorted(maps.Keys(contents.Services)) {
		service := contents.Services[index]
		text := "no slots"
		if service.Size > 0 {
			text = fmt.Sprintf("slots %d to %d", service.Offset, service.Offset+service.Size-1)
		}
		if service.BeforeSize > 0 {
			text += fmt.Sprintf(", before %d to %d", service.BeforeOffset, service.BeforeOffset+service.BeforeSize-1)
		}
		if service.Tracking != model.TrackingAuto && service.Tracking != "" {
			text += ", tracking " + string(service.Tracking)
		}
		if service.AffinityTimeout > 0 {
			text += ", affinity_timeout " + service.AffinityTimeout.String()
		}
		text += when(service.Remnant(), ", a remnant")
		for _, a := range compareAttributes(policyAttributes(model.Policy{}), policyAttributes(service.Policy)) {
			text += fmt.Sprintf(", %s %s", a.Name, a.After)
		}
		fmt.Fprintf(&out, "service %d generation %d: %s, %s, seed 0x%08x, %s\n",
			index, service.Generation, service.Name, service.Forwarding, service.Seed, text)
		dumpSlots(&out, contents.Slots[index], contents.Backends)
	}
	for _, f := range slices.SortedFunc(maps.Keys(contents.Frontends), compareFrontends) {
		fmt.Fprintf(&out, "frontend %s: service %d\n", f, contents.Frontends[f])
	}
	for _, address := range slices.SortedFunc(maps.Keys(contents.Addresses), netip.Addr.Compare) {
		fmt.Fprintf(&out, "address %s: %s\n", address, strings.Join(roles(contents.Addresses[address]), ", "))
	}
	dumpFilters(&out, contents.Filters)
	for _, free := range []struct {
		what        string
		generations map[uint32]uint8
	}{{"backend", contents.BackendGenerations}, {"service", contents.ServiceGenerations}} {
		for _, index := range slices.Sorted(maps.Keys(free.generations)) {
			fmt.Fprintf(&out, "free %s %d: last generation %d\n", free.what, index, free.generations[index])
		}
	}
	return out.String()
}

// dumpSlots writes a line for each named backend, and one for the order of the slots: a fingerprint of the
// backends' addresses, which is the same on every node with the same configuration, even if the backends have
// other positions there.
func dumpSlots(out *strings.Builder, slots Table, backends map[uint32]BackendRecord) {
	if len(slots) == 0 {
		return
	}
	counts := map[BackendRef]int{}
	placement := fnv.New64a()
	for _, slot := range slots.All() {
		ref := slot.Current
		counts[ref]++
		if backend := backends[ref.Index]; backend.BackendRef == ref && backend.Address.IsValid() {
			io.WriteString(placement, maglev.Key(model.Backend{BackendAddress: backend.BackendAddress}))
		}
	}
	for _, ref := range slices.SortedFunc(maps.Keys(counts), compareRefs) {
		fmt.Fprintf(out, "  %s: %s\n", refText(ref), value.Counted(counts[ref], "slot"))
	}
	fmt.Fprintf(out, "  placement 0x%016x\n", placement.Sum64())
	dumpTransitions(out, slots)
}

// dumpTransitions writes the number of slots in each state, and a line for each backend to which flows without
// an entry go. It writes nothing if all slots are settled.
func dumpTransitions(out *strings.Builder, slots Table) {
	var states [Marked + 1]int
	previous := map[Slot]int{} // by the fields about the previous backend
	for _, slot := range slots.All() {
		states[slot.State]++
		if slot.State == Transition {
			slot.State, slot.Current = 0, nobody
			previous[slot]++
		}
	}
	if states[Settled] == len(slots) {
		return
	}
	var parts []string
	for state, word := range []string{"settled", "in transition", "closing", "marked"} {
		if states[state] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", states[state], word))
		}
	}
	fmt.Fprintf(out, "  slots: %s\n", strings.Join(parts, ", "))
	order := func(a, b Slot) int {
		return cmp.Or(compareRefs(a.Previous, b.Previous), cmp.Compare(when(a.PreviousBefore, "x"), when(b.PreviousBefore, "x")),
			cmp.Compare(when(a.PreviousDrains, "x"), when(b.PreviousDrains, "x")))
	}
	for _, slot := range slices.SortedFunc(maps.Keys(previous), order) {
		who := refText(slot.Previous) + when(slot.PreviousDrains, ", draining")
		if slot.PreviousBefore {
			who = "in the table before"
		}
		fmt.Fprintf(out, "  previous %s: %s\n", who, value.Counted(previous[slot], "slot"))
	}
}

// refText is "backend 1 generation 1", or "nobody".
func refText(ref BackendRef) string {
	if ref == nobody {
		return "nobody"
	}
	return fmt.Sprintf("backend %d generation %d", ref.Index, ref.Generation)
}

func compareRefs(a, b BackendRef) int {
	return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Generation, b.Generation))
}

// when returns the text if the condition is true.
func when(condition bool, text string) string {
	if condition {
		return text
	}
	return ""
}
