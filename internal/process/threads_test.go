package process

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A thread that is pinned counts for its CPU, until it has ended.
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
	// With a single CPU, each thread is on it and nowhere else.
	alone := mine.Count() == 1
	until := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !alone && count() != want; {
			if time.Now().After(deadline) {
				t.Fatalf("%d threads are pinned to CPU %d, want %d", count(), cpu, want)
			}
		}
	}
	until(0)
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
	if now := count(); now < 1 || !alone && now != 1 {
		t.Errorf("%d threads are pinned to CPU %d, and one has pinned itself", now, cpu)
	}
	close(end)
	<-ended
	until(0)
	if _, err := Pinned(-1); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of process -1: %v", err)
	}
}
