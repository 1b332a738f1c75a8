package xsk

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Busy polling: the program's thread makes the driver work on its queue, and interrupts stay off as long as it
// comes back in time. This file has the socket's part; package tuning has the interface's.
//
// Source: Documentation/networking/napi.rst and af_xdp.rst (XDP_BUSY_POLL) of Linux.
const (
	// busyTime allows the socket to poll at all; calls that do not wait make one round, however long.
	busyTime = 20 * time.Microsecond
	// busyBudget is the largest number of packets in one round: more than the kernel's default of 8, so that a batch comes at once.
	busyBudget = 64
)

// preferBusyPoll needs CAP_NET_ADMIN. A process that gets the socket later needs nothing.
func preferBusyPoll(fd int) error {
	for _, o := range []struct {
		name          string
		option, value int
	}{
		{"SO_PREFER_BUSY_POLL", unix.SO_PREFER_BUSY_POLL, 1},
		{"SO_BUSY_POLL", unix.SO_BUSY_POLL, int(busyTime.Microseconds())},
		{"SO_BUSY_POLL_BUDGET", unix.SO_BUSY_POLL_BUDGET, busyBudget},
	} {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.option, o.value); err != nil {
			return fmt.Errorf("set %s to %d: %w", o.name, o.value, err)
		}
	}
	return nil
}

// pollSocket makes the kernel run one round of the driver's work for the socket's queue. It does not wait, so that the
// runtime need not know about it. An error means that the interface is down, and then no packet comes anyway.
func pollSocket(fd int) func() {
	return func() {
		_, _, _ = unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), 0, 0, unix.MSG_DONTWAIT, 0, 0)
	}
}

// poll makes the driver work if the layout asks for it and the ring is empty. It returns the number of packets
// that are in the ring then, up to most.
func (q *Queue) poll(most uint32) (uint32, error) {
	n, err := q.receive.filled(most)
	if n > 0 || err != nil || q.work == nil {
		return n, err
	}
	q.counts.Polls++
	q.work()
	return q.receive.filled(most)
}
