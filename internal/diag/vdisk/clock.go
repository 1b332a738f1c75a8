package vdisk

import (
	"cmp"
	"math"
	"slices"
)

// driftMax is the largest rate at which the clocks of a guest and its host drift apart, in ns per ns: NTP slews a clock by at most 500
// ppm (adjtimex(2)), and a guest's frequency is measured when it boots.
const driftMax = 1000e-6

// bound: the host's clock is ahead of the guest's by at least lower and at most upper ns, at a time of the guest's. The
// device model has a request after the guest's driver, and answers before the guest's driver is notified.
type bound struct {
	at           uint64
	lower, upper float64
	guest        *inside
	host         *request
}

// Clock is the distance by which the host's clock is ahead of the guest's: Offset + Drift × (time − At), in ns.
type Clock struct {
	At     uint64  `json:"at_ns"` // CLOCK_BOOTTIME of the guest
	Offset float64 `json:"offset_ns"`
	Error  float64 `json:"error_ns"` // half of the interval that the tightest requests allow
	Drift  float64 `json:"drift"`    // ns per ns; 0: a constant offset contradicts no request
	From   int     `json:"from"`     // number of requests that bound it
}

func (c Clock) offset(at uint64) float64 {
	return c.Offset + c.Drift*(float64(at)-float64(c.At))
}

// host converts a time of the guest to the host's clock.
func (c Clock) host(at uint64) uint64 { return uint64(max(0, float64(at)+c.offset(at))) }

// combinationsMax limits the pairs of requests of one address.
const combinationsMax = 256

// boundsOf returns the bounds of all pairs that could be the same request, by operation, address and length. Some are not.
func boundsOf(guest []*inside, host []*request) (all []bound) {
	type key struct {
		op            uint8
		offset, bytes uint64
	}
	by := map[key][]*request{}
	for _, h := range host {
		if h.end != 0 && !h.isBare && h.bytes != 0 {
			k := key{h.op, h.offset, h.bytes}
			by[k] = append(by[k], h)
		}
	}
	counts := map[key]int{}
	for _, g := range guest {
		counts[g.key()]++
	}
	for _, g := range guest {
		k := g.key()
		if g.completed == 0 || counts[k]*len(by[k]) > combinationsMax {
			continue
		}
		for _, h := range by[k] {
			b := bound{g.issued, float64(h.end) - float64(g.completed), float64(h.begin) - float64(g.issued), g, h}
			if b.lower <= b.upper { // otherwise the host took longer than the guest waited
				all = append(all, b)
			}
		}
	}
	return all
}

func (r *inside) key() (k struct {
	op            uint8
	offset, bytes uint64
}) {
	k.op, k.offset, k.bytes = r.op, r.sector*512, r.bytes
	return k
}

// vote returns the offset that most bounds allow, each widened by the clocks' possible drift over the recording, and the bounds that
// allow it; false: as many allow another one, or there are none.
func vote(all []bound) (offset float64, those []bound, ok bool) {
	if len(all) == 0 {
		return 0, nil, false
	}
	first, last := all[0].at, all[0].at
	for _, b := range all {
		first, last = min(first, b.at), max(last, b.at)
	}
	wider := driftMax * float64(last-first) / 2
	offset, votes := peak(all, wider)
	var rest []bound
	for _, b := range all {
		if b.lower-wider <= offset && offset <= b.upper+wider {
			those = append(those, b)
		} else {
			rest = append(rest, b)
		}
	}
	_, rival := peak(rest, wider)
	return offset, those, rival < votes
}

// peak returns the middle of the interval in which most bounds overlap, and their number.
func peak(all []bound, wider float64) (offset float64, votes int) {
	type edge struct {
		at   float64
		open int
	}
	edges := []edge{}
	for _, b := range all {
		edges = append(edges, edge{b.lower - wider, 1}, edge{b.upper + wider, -1})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(cmp.Compare(a.at, b.at), b.open-a.open) })
	open := 0
	for i, e := range edges {
		if open += e.open; open > votes {
			votes, offset = open, (e.at+edges[i+1].at)/2
		}
	}
	return offset, votes
}

// certain returns the bounds whose two requests are in no other bound: if an address comes again within the clocks'
// possible drift, the requests cannot be told apart.
func certain(all []bound) (those []bound) {
	guests, hosts := map[*inside]int{}, map[*request]int{}
	for _, b := range all {
		guests[b.guest]++
		hosts[b.host]++
	}
	for _, b := range all {
		if guests[b.guest] == 1 && hosts[b.host] == 1 {
			those = append(those, b)
		}
	}
	return those
}

// fit returns the clock within all bounds, if there is one: constant, or otherwise with the drift that leaves most room.
func fit(all []bound) (c Clock, ok bool) {
	if len(all) == 0 {
		return c, false
	}
	c.At, c.From = all[0].at, len(all)
	room := func(drift float64) (lower, upper float64) {
		lower, upper = math.Inf(-1), math.Inf(1)
		for _, b := range all {
			moved := drift * (float64(b.at) - float64(c.At))
			lower, upper = max(lower, b.lower-moved), min(upper, b.upper-moved)
		}
		return lower, upper
	}
	lower, upper := room(0)
	if lower > upper {
		// The room is concave in the drift.
		from, to := -driftMax, driftMax
		for range 200 {
			a, b := from+(to-from)/3, to-(to-from)/3
			la, ua := room(a)
			lb, ub := room(b)
			if ua-la < ub-lb {
				from = a
			} else {
				to = b
			}
		}
		c.Drift = (from + to) / 2
		lower, upper = room(c.Drift)
	}
	c.Offset, c.Error = (lower+upper)/2, (upper-lower)/2
	return c, lower <= upper
}
