package cost

import "fmt"

// Some blocks have no two registers free anywhere. Their counts follow from the counts around
// them: as many runs enter a block as leave it (Kirchhoff, 1845). Where that is not enough, a
// block with one free register notes that it was run; it ran once if the code does not come back
// to it and its function was called once.

// unknown is a count that is not found yet.
const unknown = -1

// flows has the runs of blocks, and of the ways between them.
type flows struct {
	*graph
	times []int
	ways  map[[2]int]int
	more  bool // a count was found
}

// solve returns how often each block was run, from the counters.
func (g *graph) solve(counters []uint64) ([]int, error) {
	f := &flows{graph: g, times: make([]int, len(g.blocks)), ways: map[[2]int]int{}, more: true}
	entered := map[string]uint64{}
	for i, b := range g.blocks {
		if b.isEntry && b.free == 2 {
			entered[b.function] = counters[i]
		}
	}
	for i, b := range g.blocks {
		switch {
		case b.free == 2 || b.free == 1 && counters[i] == 0:
			f.times[i] = int(counters[i])
		case b.free == 1 && entered[b.function] == 1 && !g.isRepeated(i):
			f.times[i] = 1
		default:
			f.times[i] = unknown
		}
		for _, next := range b.next {
			f.ways[[2]int{i, next}] = unknown
		}
	}
	for f.more {
		f.more = false
		for i := range g.blocks {
			f.follow(i)
		}
	}
	for i, n := range f.times {
		b := g.blocks[i]
		if n == unknown {
			return nil, fmt.Errorf("block %d of %s, instructions %d to %d, has no room for a counter, and what is around it does not say how often it was run",
				i, b.function, b.first, b.end)
		}
		for _, side := range f.sides(i) {
			if sum, open := f.sum(side); len(open) == 0 && sum != n {
				return nil, fmt.Errorf("block %d of %s, instructions %d to %d, was run %d times, and %d ways lead there or away: the counters contradict each other",
					i, b.function, b.first, b.end, n, sum)
			}
		}
	}
	return f.times, nil
}

// sides are the ways into a block and out of it, except ways that are out of sight: where a
// function is entered and left.
func (f *flows) sides(i int) (sides [][][2]int) {
	b := &f.blocks[i]
	var in, out [][2]int
	for _, prev := range b.prev {
		in = append(in, [2]int{prev, i})
	}
	for _, next := range b.next {
		out = append(out, [2]int{i, next})
	}
	if !b.isEntry {
		sides = append(sides, in)
	}
	if len(out) > 0 && !f.code[b.end-1].IsBuiltinCall() { // a tail call may leave
		sides = append(sides, out)
	}
	return sides
}

// sum adds up the known ways of a side.
func (f *flows) sum(side [][2]int) (sum int, open [][2]int) {
	for _, w := range side {
		if f.ways[w] == unknown {
			open = append(open, w)
		} else {
			sum += f.ways[w]
		}
	}
	return sum, open
}

// follow finds counts from a block's count, and the block's count from others.
func (f *flows) follow(i int) {
	for _, side := range f.sides(i) {
		sum, open := f.sum(side)
		switch {
		case f.times[i] == unknown && len(open) == 0:
			f.times[i], f.more = sum, true
		case f.times[i] != unknown && (len(open) == 1 || f.times[i] == sum):
			for _, w := range open { // the only one has the rest; several share a rest of zero, so each has none
				f.ways[w], f.more = f.times[i]-sum, true
			}
		}
	}
}
