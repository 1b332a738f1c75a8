package memleak

import "math"

// Count has the allocations and frees of one kind of memory that the programs saw and missed. Frees of slab are in those of kmalloc: the kernel
// frees both alike.
type Count struct {
	Allocs       uint64 `json:"allocations"`
	Frees        uint64 `json:"frees"`
	FreesOlder   uint64 `json:"frees_older"`        // frees of memory that was allocated before the start, is not watched or was not kept
	Full         uint64 `json:"table_full"`         // allocations that are not kept
	AllocsBusy   uint64 `json:"allocations_busy"`   // not kept, because an interrupt came into the same piece of the table
	AllocsNotRun uint64 `json:"allocations_unseen"` // the kernel left the sensor's run out
	FreesBusy    uint64 `json:"frees_busy"`
	FreesNotRun  uint64 `json:"frees_unseen"`
	Unfreed      uint64 `json:"unfreed"` // allocated again and never seen to be freed
	NoStack      uint64 `json:"without_stack"`
	NoCache      uint64 `json:"without_cache"`

	caught  uint64 // frees that only the second program of their tracepoint has seen
	endless uint64 // calls of a process's allocator whose end was not seen; they are in AllocsNotRun
}

// parts maps the programs' counts to the fields.
func (c *Count) parts() map[memleakLeakCount]*uint64 {
	return map[memleakLeakCount]*uint64{
		memleakLeakCountLEAK_ALLOCS: &c.Allocs, memleakLeakCountLEAK_FREES: &c.Frees, memleakLeakCountLEAK_FREES_OLDER: &c.FreesOlder,
		memleakLeakCountLEAK_FULL: &c.Full, memleakLeakCountLEAK_ALLOCS_BUSY: &c.AllocsBusy, memleakLeakCountLEAK_FREES_BUSY: &c.FreesBusy,
		memleakLeakCountLEAK_UNFREED: &c.Unfreed, memleakLeakCountLEAK_NO_STACK: &c.NoStack, memleakLeakCountLEAK_NO_CACHE: &c.NoCache,
		memleakLeakCountLEAK_CAUGHT: &c.caught, memleakLeakCountLEAK_ENDLESS: &c.endless,
	}
}

// Counts are the counts of all kinds.
type Counts map[Kind]*Count

// missed returns the missed frees of allocations in the table, by the kind that they may belong to: twice the share of
// such frees in all, because those in one interrupt may all be of one kind.
func (c Counts) missed() map[Kind]uint64 {
	missed := map[Kind]uint64{}
	for kind, n := range c {
		if n.Frees > 0 {
			missed[kind] = uint64(math.Ceil(2 * float64(n.FreesBusy+n.FreesNotRun) * float64(n.Frees) / float64(n.Frees+n.FreesOlder)))
		}
	}
	missed[Slab] = missed[Kmalloc]
	return missed
}

// sum returns the sum of all kinds.
func (c Counts) sum() (all Count) {
	for _, n := range c {
		for what, value := range n.parts() {
			*all.parts()[what] += *value
		}
		all.AllocsNotRun += n.AllocsNotRun
		all.FreesNotRun += n.FreesNotRun
	}
	return all
}

// Confidence returns the percentage of frees that were seen, of all that should have been: the others may look like leaks.
// It is the lower of two: of all frees, the share that the kernel and the table let through; and of the frees of allocations in
// the table, the share that no reused address has shown to be missed.
func (c Counts) Confidence() float64 {
	all := c.sum()
	return min(percent(all.Frees+all.FreesOlder, all.FreesBusy+all.FreesNotRun), percent(all.Frees, all.Unfreed))
}

func percent(seen, missed uint64) float64 {
	if seen+missed == 0 {
		return 100
	}
	return 100 * float64(seen) / float64(seen+missed)
}

// seen has the names of the sensors for the allocations and frees of a kind. The kernel frees slab and kmalloc alike, so frees of slab count
// as kmalloc's.
type seen map[Kind]*sensorNames

type sensorNames struct{ allocs, frees []string }

func (s seen) of(kind Kind) *sensorNames {
	if s[kind] == nil {
		s[kind] = &sensorNames{}
	}
	return s[kind]
}

func (s seen) allocs(kind Kind, name string) { s.of(kind).allocs = append(s.of(kind).allocs, name) }

func (s seen) frees(kind Kind, name string) { s.of(kind).frees = append(s.of(kind).frees, name) }
