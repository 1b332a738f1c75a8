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

	"github.com/shunt-lb/shunt/internal/maglev"
)

// Dump is the contents as text, the same for the same contents: a line for each record,
// and under each service a line for each backend with its share of the table, and one
// for where the slots lie.
//
//	backend 1 generation 1: 10.0.0.2:8080
//	service 0 generation 1: web, nat, seed 0x0fd9bc91, slots 0 to 250
//	  backend 1 generation 1: 251 slots
//	  placement 0x1f7d04a5b19c2e63
//	frontend tcp 192.0.2.10:80: service 0
//	address 192.0.2.10: vip, announce
//	free backend 2: last generation 1
func Dump(contents Contents) string {
	var out strings.Builder
	for _, index := range slices.Sorted(maps.Keys(contents.Backends)) {
		backend := contents.Backends[index]
		fmt.Fprintf(&out, "backend %d generation %d: %s\n", index, backend.Generation, backend.BackendAddress)
	}
	for _, index := range slices.Sorted(maps.Keys(contents.Services)) {
		service := contents.Services[index]
		place := "no slots"
		if service.Size > 0 {
			place = fmt.Sprintf("slots %d to %d", service.Offset, service.Offset+service.Size-1)
		}
		fmt.Fprintf(&out, "service %d generation %d: %s, %s, seed 0x%08x, %s\n",
			index, service.Generation, service.Name, service.Forwarding, service.Seed, place)
		dumpSlots(&out, contents.Slots[index], contents.Backends)
	}
	for _, f := range slices.SortedFunc(maps.Keys(contents.Frontends), compareFrontends) {
		fmt.Fprintf(&out, "frontend %s: service %d\n", f, contents.Frontends[f])
	}
	for _, address := range slices.SortedFunc(maps.Keys(contents.Addresses), netip.Addr.Compare) {
		fmt.Fprintf(&out, "address %s: %s\n", address, strings.Join(roles(contents.Addresses[address]), ", "))
	}
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

// dumpSlots is a line for each backend named, and one for the order of the slots: a
// fingerprint of the backends' addresses, which is the same on every node that has the
// same configuration, whatever positions the backends have there.
func dumpSlots(out *strings.Builder, slots []BackendRef, backends map[uint32]BackendRecord) {
	if len(slots) == 0 {
		return
	}
	counts := map[BackendRef]int{}
	placement := fnv.New64a()
	for _, ref := range slots {
		counts[ref]++
		if backend := backends[ref.Index]; backend.BackendRef == ref && backend.Address.IsValid() {
			io.WriteString(placement, maglev.Key(backend.BackendAddress))
		}
	}
	refs := slices.SortedFunc(maps.Keys(counts), func(a, b BackendRef) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Generation, b.Generation))
	})
	for _, ref := range refs {
		fmt.Fprintf(out, "  backend %d generation %d: %s\n", ref.Index, ref.Generation, count(counts[ref], "slot"))
	}
	fmt.Fprintf(out, "  placement 0x%016x\n", placement.Sum64())
}
