package reconcile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// CapacityError says that the desired state does not fit. Nothing has been changed.
type CapacityError struct {
	What  string // the limit's name in the configuration: "services", "backends", "slots"
	Need  uint64 // at the worst moment of the change
	Limit uint64
	Why   string // how the need comes about
}

// Error gives the need, the limit and the remedy.
func (e *CapacityError) Error() string {
	return fmt.Sprintf("%d %s are needed (%s), but limits.%s is %d: raise it (needs a restart), or make the change in smaller steps",
		e.Need, e.What, e.Why, e.What, e.Limit)
}

// positions assigns indices of one kind, each with the generation of its next tenant.
type positions struct {
	first       uint32           // the lowest index that may be used
	generations map[uint32]uint8 // of the present or the last tenant
	freed       []uint32         // without a tenant now, the longest first
	used        uint32           // all from first to here have had a tenant
}

// newPositions starts with the generations of present and past tenants.
func newPositions(first uint32, present, past map[uint32]uint8) positions {
	p := positions{first: first, used: first, generations: map[uint32]uint8{}}
	maps.Copy(p.generations, past)
	maps.Copy(p.generations, present)
	for _, index := range slices.Sorted(maps.Keys(p.generations)) {
		if _, ok := present[index]; !ok {
			p.freed = append(p.freed, index)
		}
	}
	return p
}

// claim records a tenant.
func (p *positions) claim(index uint32, generation uint8) {
	_, used := p.generations[index]
	p.generations[index] = generation
	if !used {
		return // so it is not among the freed, which may be many
	}
	if i := slices.Index(p.freed, index); i >= 0 {
		p.freed = slices.Delete(p.freed, i, i+1)
	}
}

// release records that the tenant is gone.
func (p *positions) release(index uint32) { p.freed = append(p.freed, index) }

// free lists up to count positions below first+limit that may be claimed, as if the tenants of leaving were
// gone: positions that were never used come first, then the positions that have been free the longest, so
// that a generation repeats as late as possible.
func (p *positions) free(count int, limit uint32, leaving []uint32) []BackendRef {
	found := make([]BackendRef, 0, count)
	for ; p.used-p.first < limit; p.used++ {
		if _, used := p.generations[p.used]; !used {
			break
		}
	}
	for index := p.used; len(found) < count && index-p.first < limit; index++ {
		if _, used := p.generations[index]; !used {
			found = append(found, BackendRef{index, 1})
		}
	}
	for _, freed := range [][]uint32{p.freed, leaving} {
		for _, index := range freed {
			if len(found) < count && index-p.first < limit {
				found = append(found, BackendRef{index, p.generations[index]%255 + 1})
			}
		}
	}
	return found
}

// region is a part of the slot array.
type region struct{ offset, size uint32 }

// gaps is the free part of the slot array, ascending.
type gaps []region

// newGaps returns the gaps that the used regions leave in limit slots.
func newGaps(used []region, limit uint32) gaps {
	slices.SortFunc(used, func(a, b region) int { return cmp.Compare(a.offset, b.offset) })
	var free gaps
	next := uint32(0)
	for _, u := range used {
		if u.offset > next {
			free = append(free, region{next, min(u.offset, limit) - min(next, limit)})
		}
		next = max(next, u.offset+u.size)
	}
	if next < limit {
		free = append(free, region{next, limit - next})
	}
	return free
}

// take finds the first gap that is large enough, and shortens it.
func (g gaps) take(size uint32) (region, bool) {
	for i := range g {
		if g[i].size >= size {
			taken := region{g[i].offset, size}
			g[i].offset += size
			g[i].size -= size
			return taken, true
		}
	}
	return region{}, false
}
