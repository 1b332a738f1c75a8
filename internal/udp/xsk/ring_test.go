package xsk

import "testing"

// An index that wraps at 2^32 goes on being counted.
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
