package process

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A thread that is pinned counts for its CPU, until it may run elsewhere.
func TestPinned(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var mine, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		t.Fatal(err)
	}
	cpu := 0
	for !mine.IsSet(cpu) {
		cpu++
	}
	one.Set(cpu)
	count := func() int {
		t.Helper()
		pinned, err := Pinned(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		return pinned[cpu]
	}
	before := count() // all of them, with a single CPU
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	now := count()
	if err := unix.SchedSetaffinity(0, &mine); err != nil {
		t.Fatal(err)
	}
	if now < 1 || mine.Count() > 1 && (before != 0 || now != 1 || count() != 0) {
		t.Errorf("%d threads are pinned to CPU %d, then %d, then %d", before, cpu, now, count())
	}
	if _, err := Pinned(-1); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of process -1: %v", err)
	}
}
