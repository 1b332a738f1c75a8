package cpus_test

import (
	"testing"

	"github.com/shunt-lb/shunt/bench/cpus"
	"golang.org/x/sys/unix"
)

// bound is the number of CPUs that a new thread may use.
func bound(t *testing.T) int {
	t.Helper()
	count := make(chan int)
	go func() {
		var set unix.CPUSet
		if unix.SchedGetaffinity(0, &set) != nil {
			count <- 0
			return
		}
		count <- set.Count()
	}()
	return <-count
}

func TestBinding(t *testing.T) {
	two := cpus.Two()
	if two[0] == cpus.Any {
		t.Skip("needs two CPUs")
	}
	before := bound(t)
	err := cpus.On(two[1], func() error {
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(0, &set); err != nil {
			return err
		}
		if set.Count() != 1 || !set.IsSet(two[1]) {
			t.Errorf("bound to %d CPUs, of CPU %d: %v", set.Count(), two[1], set.IsSet(two[1]))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	restore, err := cpus.Process(two[0])
	if err != nil {
		t.Fatal(err)
	}
	if n := bound(t); n != 1 {
		t.Errorf("another thread of a bound process may use %d CPUs", n)
	}
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	if n := bound(t); n != before {
		t.Errorf("a thread may use %d CPUs afterwards, and %d before", n, before)
	}
	if err := cpus.On(cpus.Any, func() error { return unix.EINTR }); err != unix.EINTR { //nolint:errorlint // it is passed on
		t.Errorf("on any CPU: %v", err)
	}
	if err := cpus.On(1<<9, func() error { return nil }); err == nil {
		t.Error("bound to a CPU that there is not")
	}
}

// A thread goes ahead, and then no longer.
func TestAhead(t *testing.T) {
	nice := func() int {
		raw, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
		if err != nil {
			t.Error(err)
		}
		return 20 - raw
	}
	if unix.Geteuid() != 0 {
		t.Skip("needs root: lowers a nice value")
	}
	err := cpus.On(cpus.Two()[0], func() error {
		before := nice()
		err := cpus.Ahead(func() error {
			if now := nice(); now != -20 {
				t.Errorf("ahead: nice %d", now)
			}
			return nil
		})
		if now := nice(); now != before {
			t.Errorf("afterwards: nice %d, before: %d", now, before)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
