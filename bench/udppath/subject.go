package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/udp"
	"golang.org/x/sys/unix"
)

// subjectVariable makes this binary a subject: way, task, CPU and the broker's socket, as the subjects in C get them
// (c/subject.c).
const subjectVariable = "SHUNT_BENCH_UDPPATH"

const (
	batchSize   = 64
	adaptiveFor = 50 * time.Microsecond // ADAPTIVE_US
)

// subject echoes or receives the datagrams of a lease until SIGTERM, and prints their number.
func subject(text string) error {
	debug.SetGCPercent(-1) // nothing is allocated for a datagram
	words := strings.Fields(text)
	if len(words) != 4 {
		return fmt.Errorf("%s is %q: want four words", subjectVariable, text)
	}
	spin, known := map[string]time.Duration{"sleep": 0, "adaptive": adaptiveFor, "spin": 0}[words[0]]
	cpu, err := strconv.Atoi(words[2])
	if !known || err != nil {
		return fmt.Errorf("%s is %q: there is no such way or CPU", subjectVariable, text)
	}
	runtime.LockOSThread()
	if cpu >= 0 {
		var set unix.CPUSet
		set.Set(cpu)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("run on CPU %d: %w", cpu, err)
		}
	}
	var ended atomic.Bool
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM)
	go func() { <-signals; ended.Store(true) }()
	l, err := udp.Open(context.Background(), udp.Options{Socket: words[3], Name: "bench", Spin: spin})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	taken, err := work(l, words[0] != "spin", task(words[1]) == echoing, ended.Load)
	fmt.Printf("took %d\n", taken)
	return errors.Join(err, l.Close())
}

func work(l *udp.Lease, waits, echoes bool, ended func() bool) (taken uint64, err error) {
	batch := make([]udp.Descriptor, batchSize)
	q := l.Queues[0]
	for !ended() {
		if waits {
			if _, err := l.Wait(10 * time.Millisecond); err != nil {
				return taken, err
			}
		}
		answers := 0
		n := q.Receive(batch)
		taken += uint64(n)
		if !echoes {
			q.Release(batch[:n])
			continue
		}
		for i := range batch[:n] {
			if q.Reply(&batch[i]) != nil {
				q.Release(batch[i : i+1])
				continue
			}
			batch[answers] = batch[i]
			answers++
		}
		sent := q.Send(batch[:answers])
		q.Release(batch[sent:answers])
		if err := errors.Join(q.Flush(), q.Err()); err != nil {
			return taken, err
		}
	}
	return taken, q.Err()
}
