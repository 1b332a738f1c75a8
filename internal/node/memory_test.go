package node

import (
	"math"
	"runtime/debug"
	"testing"
)

func TestMemoryLimit(t *testing.T) {
	for live, want := range map[uint64]int64{
		0: memoryLeast, 100 << 20: memoryLeast, 192 << 20: memoryLeast, 1 << 30: 5 << 28, math.MaxUint64: math.MaxInt64 / 8 * 5,
	} {
		if got := memoryLimit(live); got != want {
			t.Errorf("with %d bytes in use: %d, want %d", live, got, want)
		}
	}
}

// An operator's own limit stays.
func TestBoundMemory(t *testing.T) {
	before := debug.SetMemoryLimit(math.MaxInt64)
	t.Cleanup(func() { debug.SetMemoryLimit(before) })
	t.Setenv("GOMEMLIMIT", "off")
	boundMemory()
	if got := debug.SetMemoryLimit(-1); got != math.MaxInt64 {
		t.Errorf("with GOMEMLIMIT it is set to %d", got)
	}
	t.Setenv("GOMEMLIMIT", "")
	boundMemory()
	if got := debug.SetMemoryLimit(-1); got < memoryLeast || got == math.MaxInt64 {
		t.Errorf("it is set to %d", got)
	}
}
