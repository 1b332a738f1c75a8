package process

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A thread that is pinned counts for its CPU.
func TestPinned(t *testing.T) {
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		t.Fatal(err)
	}
	cpu := 0
	for !mine.IsSet(cpu) {
		cpu++
	}
	count := func() int {
		t.Helper()
		pinned, err := Pinned(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		return pinned[cpu]
	}
	before := count()
	result, end, ended := make(chan error), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and never unlocked: the thread ends with its goroutine
		var one unix.CPUSet
		one.Set(cpu)
		result <- unix.SchedSetaffinity(0, &one)
		<-end
	}()
	if err := <-result; err != nil {
		t.Fatal(err)
	}
	// With a single CPU, each thread is on it and nowhere else.
	if now := count(); now < 1 || mine.Count() > 1 && now != before+1 {
		t.Errorf("%d threads are pinned to CPU %d, and before one more was pinned %d were", now, cpu, before)
	}
	close(end)
	<-ended
	if _, err := Pinned(-1); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of process -1: %v", err)
	}
}
