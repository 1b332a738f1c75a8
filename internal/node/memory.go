package node

import (
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

// memoryLeast is the amount of memory below which the limit would make the Go runtime collect more often than
// usual.
const memoryLeast = 260 << 20

// memoryLimit returns a soft limit (debug.SetMemoryLimit) for a process that uses this number of bytes. The
// data from which a large file is read become garbage at once; without a limit, the runtime lets garbage grow
// to the size of the live data. In use includes a file that is being read, so the share above it is small:
// otherwise the collector would start too late.
func memoryLimit(live uint64) int64 {
	return int64(max(memoryLeast, min(live, math.MaxInt64/2)/4*5))
}

// boundMemory sets memoryLimit anew. It costs microseconds. An operator's GOMEMLIMIT takes precedence.
func boundMemory() {
	if os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	if live[0].Value.Kind() == metrics.KindUint64 {
		debug.SetMemoryLimit(memoryLimit(live[0].Value.Uint64()))
	}
}

// boundMemoryOften calls boundMemory repeatedly until stop is called: at the start, a large configuration grows
// to its size within seconds.
func boundMemoryOften() (stop func()) {
	boundMemory()
	done := make(chan struct{})
	go func() {
		often := time.NewTicker(100 * time.Millisecond)
		defer often.Stop()
		for {
			select {
			case <-done:
				return
			case <-often.C:
				boundMemory()
			}
		}
	}()
	return sync.OnceFunc(func() { close(done) })
}

// returnMemory gives free memory back to the kernel, when the data that were read have become garbage. It does
// not wait, because a full collection takes time.
func returnMemory() { go debug.FreeOSMemory() }
