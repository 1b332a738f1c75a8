package kernel

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// Reason is why a packet was not simply forwarded, as core/reasons.h numbers it.
type Reason uint32

// String is the word in metrics, output and documentation, like "no_service".
func (r Reason) String() string {
	if name, ok := reasonNames()[r]; ok {
		return name
	}
	return fmt.Sprintf("reason_%d", uint32(r))
}

// Reasons lists every reason, by number.
func Reasons() []Reason {
	var all []Reason
	for r := range reasonNames() {
		if r != Reason(coreReasonREASON_NONE) {
			all = append(all, r)
		}
	}
	slices.Sort(all)
	return all
}

// reasonNames reads enum reason from the embedded object, so that C names them alone.
var reasonNames = sync.OnceValue(func() map[Reason]string {
	spec, err := loadCore()
	if err != nil {
		panic("the embedded object of core.bpf.c cannot be read: " + err.Error())
	}
	var enum *btf.Enum
	if err := spec.Types.TypeByName("reason", &enum); err != nil {
		panic("the embedded object of core.bpf.c lacks enum reason: " + err.Error())
	}
	names := map[Reason]string{}
	for _, v := range enum.Values {
		if Reason(v.Value) != Reason(coreReasonREASON_COUNT) {
			names[Reason(v.Value)] = strings.ToLower(strings.TrimPrefix(v.Name, "REASON_"))
		}
	}
	return names
})

// Count is how often something happened, and to how many bytes.
type Count struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// ReasonCounts reads a map enum reason -> struct count, which is per CPU, by the reason's name; only
// what happened.
func ReasonCounts(m *ebpf.Map) (map[string]Count, error) {
	counts := map[string]Count{}
	for _, r := range Reasons() {
		var each []coreCount
		if err := m.Lookup(uint32(r), &each); err != nil {
			return counts, fmt.Errorf("read the counter of %s in %s: %w", r, m, err)
		}
		var sum Count
		for _, one := range each {
			sum.Packets += one.Packets
			sum.Bytes += one.Bytes
		}
		if sum != (Count{}) {
			counts[r.String()] = sum
		}
	}
	return counts, nil
}
