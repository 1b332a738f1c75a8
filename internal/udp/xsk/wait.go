package xsk

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Waiter waits for packets on several queues. For queues with Layout.BusyPoll it makes the driver work while it spins,
// and before it sleeps.
type Waiter struct {
	// Spin is the time for which Wait looks at the rings before it sleeps; 0: it sleeps at once.
	Spin   time.Duration
	queues []*Queue
	fds    []unix.PollFd
	// Wakeups counts the sleeps that ended with packets or another file; Counts has the sleeps that ended with a queue's packets.
	Wakeups uint64
}

// NewWaiter makes a Waiter of queues and their sockets, in the same order, and of other files that it waits
// to read from.
func NewWaiter(queues []*Queue, sockets []*Socket, others ...int) *Waiter {
	w := &Waiter{queues: queues}
	for _, s := range sockets {
		w.fds = append(w.fds, unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN})
	}
	for _, fd := range others {
		w.fds = append(w.fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	return w
}

// Wait returns true when a queue has packets or another file can be read, and false after the
// timeout. A signal may end it early.
func (w *Waiter) Wait(timeout time.Duration) (bool, error) {
	if w.Spin > 0 {
		if w.spin(min(w.Spin, timeout)) {
			return true, nil
		}
		timeout -= min(w.Spin, timeout)
	}
	if w.waiting() {
		return true, nil
	}
	n, err := unix.Poll(w.fds, int(timeout.Milliseconds()))
	if errors.Is(err, unix.EINTR) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("wait for packets: %w", err)
	}
	if n > 0 {
		w.woken()
	}
	return n > 0, nil
}

// lookEvery is the interval at which a spinning waiter looks whether another file can be read.
const lookEvery = 100 * time.Microsecond

// spin looks at the rings for a time, and now and then at the other files. It returns true if one of them can be read.
func (w *Waiter) spin(long time.Duration) bool {
	now := time.Now()
	end, look := now.Add(long), now.Add(lookEvery)
	for ; now.Before(end); now = time.Now() {
		if w.waiting() {
			return true
		}
		if now.Before(look) {
			continue
		}
		look = now.Add(lookEvery)
		if n, err := unix.Poll(w.fds[len(w.queues):], 0); n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return true
		}
	}
	return false
}

// woken counts the end of a sleep. Packets of several queues may have ended it together.
func (w *Waiter) woken() {
	w.Wakeups++
	for i, q := range w.queues {
		if w.fds[i].Revents&unix.POLLIN != 0 {
			q.shared.wakeups.Add(1)
		}
	}
}

func (w *Waiter) waiting() bool {
	for _, q := range w.queues {
		if n, err := q.poll(1); n > 0 || err != nil {
			return true // Recv reports the damage of a ring
		}
	}
	return false
}
