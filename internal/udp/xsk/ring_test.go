package xsk

import (
	"math"
	"testing"
)

// An index that wraps at 2^32 continues to be counted.
func TestIndexIsLengthened(t *testing.T) {
	var l lengthened
	for _, c := range []struct {
		index uint32
		want  uint64
	}{{0, 0}, {5, 5}, {5, 5}, {1<<32 - 1, 1<<32 - 1}, {0, 1 << 32}, {7, 1<<32 + 7}, {1 << 31, 1<<32 + 1<<31}, {3, 2<<32 + 3}} {
		if got := l.at(c.index); got != c.want {
			t.Errorf("at the index %d: %d, want %d", c.index, got, c.want)
		}
	}
}

// A process that takes a ring over counts on, also where the index has wrapped.
func TestNear(t *testing.T) {
	for _, c := range []struct {
		about uint64
		index uint32
		want  uint64
	}{
		{0, 0, 0},
		{7, 5, 5},
		{5, 7, 7},
		{1<<32 + 5, 7, 1<<32 + 7},
		{1<<32 + 5, 1<<32 - 2, 1<<32 - 2},
		{3<<32 - 2, 1, 3<<32 + 1},
		{math.MaxUint64 - 2, 4, 4}, // matched was read before the ring
		{2, 1<<32 - 3, 1<<32 - 3},
	} {
		var l lengthened
		l.near(c.about, c.index)
		if got := l.at(c.index); got != c.want {
			t.Errorf("about %d, and the index is %d: %d, want %d", c.about, c.index, got, c.want)
		}
	}
}
