package kernel

import (
	"fmt"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
)

// Reason is the reason why a packet was not simply forwarded, with the numbers of core/reasons.h.
type Reason uint32

// String returns the word in metrics, output and documentation, like "no_service".
func (r Reason) String() string {
	if name, ok := reasonNames()[uint32(r)]; ok {
		return name
	}
	return fmt.Sprintf("reason_%d", uint32(r))
}

// Reasons lists every reason, by number.
func Reasons() []Reason { return slices.Clone(reasons()) }

var reasons = sync.OnceValue(func() []Reason {
	var all []Reason
	for number := range reasonNames() {
		r := Reason(number)
		if r != Reason(coreReasonREASON_NONE) {
			all = append(all, r)
		}
	}
	slices.Sort(all)
	return all
})

// reasonNames are the words of all reasons.
var reasonNames = sync.OnceValue(func() map[uint32]string { return Words(loadCore, "reason", "REASON_") })

// Count is a number of events and of their bytes.
type Count struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// ReasonCounts reads a map enum reason -> struct count, which is per CPU, by the reason's name, without zeros.
func ReasonCounts(m *ebpf.Map) (map[string]Count, error) {
	counts := map[string]Count{}
	all, cpus := reasons(), ebpf.MustPossibleCPU()
	last := all[len(all)-1]
	if uint32(last) >= m.MaxEntries() {
		return counts, fmt.Errorf("read the counter of %s in %s: the map ends before it", last, m)
	}
	size := int(last) + 1 // the map has room for more reasons than there are
	numbers, each := make([]uint32, size), make([]coreCount, size*cpus)
	var cursor ebpf.MapBatchCursor
	// The kernel reports that the key does not exist when the batch reaches the end of the map.
	if n, err := m.BatchLookup(&cursor, numbers, each, nil); n != size {
		return counts, fmt.Errorf("read %d counters of %s, got %d: %w", size, m, n, err)
	}
	for _, r := range all {
		var sum Count
		for _, one := range each[int(r)*cpus : (int(r)+1)*cpus] {
			sum.Packets += one.Packets
			sum.Bytes += one.Bytes
		}
		if sum != (Count{}) {
			counts[r.String()] = sum
		}
	}
	return counts, nil
}
