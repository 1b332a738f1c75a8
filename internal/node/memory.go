package node

import (
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

// memoryLeast is the memory that the Go runtime may hold before it collects more often than it would by itself.
const memoryLeast = 240 << 20

// memoryLimit is a soft limit (debug.SetMemoryLimit) for a process of which so many bytes are in use.
// What a large file is read into becomes garbage at once; without a limit, the runtime lets as much
// of it pile up as there is beside it. In use includes a file that is being read, so the share above
// it is small: the collector would otherwise find out too late.
func memoryLimit(live uint64) int64 {
	return int64(max(memoryLeast, min(live, math.MaxInt64/2)/4*5))
}

// boundMemory sets memoryLimit anew. It costs microseconds. GOMEMLIMIT stands for what an operator
// says instead.
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

// boundMemoryOften bounds it all the time until stop is called: at the start, a large configuration
// comes to what it needs within seconds.
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

// returnMemory gives the kernel back what is free, once what has been read is garbage. It does not
// wait: a collection of everything takes its time.
func returnMemory() { go debug.FreeOSMemory() }
