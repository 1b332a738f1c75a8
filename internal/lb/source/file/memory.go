package file

import (
	"fmt"
	"runtime"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// EntrySizes are the costs of one entry of each map in kernel memory, in bytes.
type EntrySizes struct {
	Flow    uint64 // of the preallocated flow hash; each flow has two, one per direction
	Ring    uint64 // of the ring of source ports, one per flow
	Slot    uint64
	Backend uint64
	Service uint64
	Counter uint64 // per CPU, for each service and each backend
	// Remembered is one flow of direct return or one client of affinity; memory is allocated as they are added.
	Remembered uint64
	// Filter is one prefix of allow_from or deny_from, with the node that leads to it; memory is allocated as
	// they are added. Source is one address that max_new_flows_per_source counts.
	Filter, Source uint64
}

// sourceCount is the number of sources that max_new_flows_per_source counts (sh_source_rates).
const sourceCount = 1 << 16

// DefaultEntrySizes are estimates: key, value, and the kernel's overhead for an element of a hash. The data
// plane, which knows the real sizes, may use its own.
var DefaultEntrySizes = EntrySizes{Flow: 160, Ring: 48, Slot: 8, Backend: 40, Service: 16, Counter: 40, Remembered: 104, Filter: 144, Source: 104}

// Memory returns the cost of the limits in kernel memory on this machine, in bytes, and one line of text for
// each map.
func Memory(limits model.Limits) (bytes uint64, lines []string) {
	return DefaultEntrySizes.Memory(limits, runtime.NumCPU())
}

// Memory returns the cost of the limits in kernel memory with a number of CPUs, in bytes, and one line of text
// for each map.
func (e EntrySizes) Memory(limits model.Limits, cpuCount int) (bytes uint64, lines []string) {
	flows := uint64(limits.Flows) + uint64(limits.Flows)/4 // a quarter more for handshakes
	counted := uint64(limits.Services) + uint64(limits.Backends)
	for _, m := range []struct {
		Name        string
		count, size uint64
		note        string
	}{
		{"flows", 2 * flows, e.Flow, ""},
		{"port ring", flows, e.Ring, ""},
		{"slots", uint64(limits.Slots), e.Slot, ""},
		{"backends", uint64(limits.Backends), e.Backend, ""},
		{"services", uint64(limits.Services), e.Service, ""},
		{"counters", counted * uint64(cpuCount), e.Counter, ""},
		{"remembered", uint64(limits.Remembered), e.Remembered, " when all are in use"},
		{"filters", uint64(limits.Filters), e.Filter, " when all are in use"},
		{"sources", sourceCount, e.Source, ""},
	} {
		cost := m.count * m.size
		bytes += cost
		lines = append(lines, fmt.Sprintf("%-10s %9d x %3d B = %8.1f MiB%s", m.Name, m.count, m.size, mebibytes(cost), m.note))
	}
	return bytes, append(lines, fmt.Sprintf("%-10s %27.1f MiB", "total", mebibytes(bytes)))
}

func mebibytes(n uint64) float64 { return float64(n) / (1 << 20) }
