package sched

import (
	"bytes"
	"context"
	"encoding/binary"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
)

// TestWatcherTellsOfIntervals has a task wait behind another one, and then stops it: the next interval has no wait of it.
func TestWatcherTellsOfIntervals(t *testing.T) {
	competitor, waiter := begin(t, "spin"), begin(t, "spin")
	w, err := Watch(Options{PID: waiter, Threshold: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	interval := func() Interval {
		short, done := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer done()
		i, err := w.Interval(short)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	told := uint64(0)
	isNamed := func(i Interval) bool {
		for _, one := range i.Waiters {
			for _, c := range one.Longest.Behind {
				if one.TID == waiter && c.TID == competitor {
					return true
				}
			}
		}
		return false
	}
	for found, deadline := false, time.Now().Add(30*time.Second); !found; {
		i := interval()
		told += i.Events.Received
		found = isNamed(i)
		waits, ofCPUs := uint64(0), uint64(0)
		for _, one := range i.Waiters {
			waits += one.Waits
			if one.PID != waiter || one.Longest.TID != one.TID || one.Longest.Nanos < uint64(time.Millisecond) {
				t.Errorf("want waits of process %d of more than 1 ms: %+v", waiter, one)
			}
		}
		for _, l := range i.CPUs {
			ofCPUs += l.Waits
		}
		if waits != i.Kinds[WaitKind] || waits > ofCPUs {
			t.Errorf("%d long waits by task, %d by kind, %d waits of all CPUs", waits, i.Kinds[WaitKind], ofCPUs)
		}
		if time.Now().After(deadline) {
			t.Fatalf("no wait of %d names %d", waiter, competitor)
		}
	}
	signal(t, waiter, unix.SIGSTOP)
	told += interval().Events.Received
	i := interval()
	told += i.Events.Received
	for _, one := range i.Waiters {
		t.Errorf("a wait of a task that was stopped before: %+v", one)
	}
	if all := w.c.reader.Summary(); all.Received != told || all.Lost != 0 {
		t.Errorf("%+v were read; the intervals have %d events", all, told)
	}
	// A CPU may stall once more before the end.
	ending, err := w.Close()
	if err != nil || ending.Lost != 0 || ending.Received < told {
		t.Errorf("the end: %+v, %v; the intervals have %d events", ending, err, told)
	}
}

// TestLoadsAreDifferences has a CPU that was there before, one that came, and one that never was.
func TestLoadsAreDifferences(t *testing.T) {
	var before, now schedSchedCpu
	before.Waits, before.WaitNs, before.RunCount, before.Samples, before.LengthSum, before.Buckets[3] = 10, 1000, 5, 100, 300, 10
	now = before
	now.Waits, now.WaitNs, now.RunCount, now.Samples, now.LengthSum = 110, 201_000, 6, 110, 320
	now.Buckets[0], now.Buckets[3], now.Buckets[9] = 98, 11, 1
	came := schedSchedCpu{RunCount: 1}
	got := loads([]schedSchedCpu{now, came, {}}, []schedSchedCpu{before})
	want := []Load{{CPU: 0, Waits: 100, MeanNanos: 2000, P99Nanos: 16_000, Runnable: 2}, {CPU: 1}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestEndingSince(t *testing.T) {
	before := Ending{event.Summary{Received: 1, Lost: 3, Broken: 1}, Missed{1, 2, 3, 4, map[string]uint64{"a": 1, "b": 2}}, nil}
	now := Ending{event.Summary{Received: 11, Lost: 2, Broken: 2}, Missed{11, 22, 33, 44, map[string]uint64{"a": 1, "b": 5}}, nil}
	want := Ending{event.Summary{Received: 10, Lost: 0, Broken: 1}, Missed{10, 20, 30, 40, map[string]uint64{"b": 3}}, nil}
	if got := now.since(before); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestWaitBeginsWithItsHead(t *testing.T) {
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, schedSchedWait{BeginNs: 1, EndNs: 2, Tid: 3, Tgid: 4}); err != nil {
		t.Fatal(err)
	}
	if got, err := decode[waitHead](b.Bytes()); err != nil || got != (waitHead{1, 2, 3, 4}) {
		t.Errorf("got %+v, %v", got, err)
	}
}
