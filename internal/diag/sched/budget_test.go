package sched

import (
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"
)

// isSampled decides about a task as is_watched of the programs does.
func isSampled(tid, one uint32) bool {
	return tid*uint32(schedSchedConstantSCHED_MULTIPLIER)>>16&(one-1) == 0
}

// TestSampleOfTasks watches one task of 4: no other task's wake-ups are counted any more.
func TestSampleOfTasks(t *testing.T) {
	for range 12 {
		begin(t, "sleep")
	}
	c, err := open(Options{Threshold: time.Second}, runqSensors(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.release()
	if err := c.member.Resample(4); err != nil {
		t.Fatal(err)
	}
	wakeups := func() map[uint32]uint64 {
		q, err := c.queues()
		if err != nil {
			t.Fatal(err)
		}
		by := map[uint32]uint64{}
		for _, task := range q.Tasks {
			by[task.TID] = task.Wakeups
		}
		return by
	}
	before, sampled := wakeups(), 0
	for deadline := time.Now().Add(time.Minute); sampled == 0; time.Sleep(10 * time.Millisecond) {
		for tid, n := range wakeups() {
			// A wait that had begun when the sample was set ends and is counted, and a program may have been in its midst.
			if more := n - before[tid]; more > 2 && !isSampled(tid, 4) {
				t.Fatalf("task %d is not in the sample, and has %d more wake-ups", tid, more)
			} else if more > 20 {
				sampled++
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("no task of the sample was woken")
		}
	}
}

// untilChanged takes the output of a tool, and stops it at the first change of its budget.
type untilChanged struct {
	bytes.Buffer
	stop func()
}

func (u *untilChanged) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("may take")) {
		u.stop()
	}
	return u.Buffer.Write(p)
}

// TestBudgetIsTold has a limit that any sensor exceeds: the tools report each change when they make it, and in the
// summary.
func TestBudgetIsTold(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	o := Options{Threshold: 10 * time.Second, MaxCPU: 1e-9}
	for name, tool := range map[string]func(context.Context, bool, io.Writer) error{
		"irqoff": func(ctx context.Context, json bool, out io.Writer) error { return Stalls(ctx, o, json, out) },
		"runq":   func(ctx context.Context, json bool, out io.Writer) error { return RunQueues(ctx, o, 1, json, out) },
	} {
		for _, json := range []bool{false, true} {
			ctx, stop := context.WithTimeout(t.Context(), time.Minute)
			out := &untilChanged{stop: stop}
			if err := tool(ctx, json, out); err != nil {
				t.Fatal(err)
			}
			stop()
			if n := strings.Count(out.String(), "from now on one task of 2 is watched"); n != 2 {
				t.Errorf("%s: the change is told %d times, want when it is made and in the summary:\n%s", name, n, out.String())
			}
		}
	}
}
