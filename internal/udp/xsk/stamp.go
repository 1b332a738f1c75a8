package xsk

import (
	"encoding/binary"
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNoTimes says that packets come without a time, so that their age is not known.
var ErrNoTimes = errors.New("the packets come without times")

const stampSize = 8

// clock reads CLOCK_MONOTONIC without a system call. Its beginning is late by what one takes, so ages are too
// large by that, less than a microsecond.
type clock struct {
	began time.Time
	at    int64
}

func newClock() (clock, error) {
	var ts unix.Timespec
	c := clock{began: time.Now()}
	err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	c.at = ts.Nano()
	return c, err
}

func (c clock) now() int64 { return c.at + int64(time.Since(c.began)) }

// DropOlder has Recv drop packets that XDP saw longer ago, and count them as stale; 0: none. The error is ErrNoTimes.
func (q *Queue) DropOlder(age time.Duration) (err error) {
	if !q.layout.Stamped {
		return ErrNoTimes
	}
	q.ageMax = int64(age)
	q.clock, err = newClock()
	return err
}

// Stamp is when XDP saw a received packet: CLOCK_MONOTONIC, nanoseconds; 0 where packets come without times. The program
// must not have given it back.
func (q *Queue) Stamp(d *Descriptor) int64 {
	if !q.layout.Stamped || d.Addr%uint64(q.layout.FrameSize) < stampSize {
		return 0
	}
	return int64(binary.NativeEndian.Uint64(q.memory[d.Addr-stampSize:]))
}
