package ping

import "math/bits"

// histogram counts times in ns. Times below 64 are exact, and larger ones are exact to one part in 32.
type histogram struct {
	counts [64 * 32]uint64
	count  uint64
	max    int64
}

func (h *histogram) add(ns int64) {
	h.count++
	h.max = max(h.max, ns)
	h.counts[bucket(uint64(max(ns, 0)))]++
}

// bucket returns the bucket of a value: there are 32 for each power of two.
func bucket(v uint64) int {
	if v < 64 {
		return int(v)
	}
	exponent := bits.Len64(v) - 6 // v>>exponent is 32 to 63
	return exponent*32 + int(v>>exponent)
}

// middle returns the value in the middle of a bucket.
func middle(bucket int) int64 {
	if bucket < 64 {
		return int64(bucket)
	}
	exponent := bucket/32 - 1
	return int64(bucket%32+32)<<exponent + int64(1)<<exponent/2
}

// spread returns 0 if nothing was counted.
func (h *histogram) spread() Spread {
	return Spread{h.quantile(0.5), h.quantile(0.99), h.max}
}

func (h *histogram) quantile(q float64) int64 {
	left := uint64(q * float64(h.count))
	for i, n := range h.counts {
		if n > left {
			return min(middle(i), h.max)
		}
		left -= n
	}
	return h.max
}
