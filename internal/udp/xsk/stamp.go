package xsk

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNoTimes says that packets come without times, so their age is not known.
var ErrNoTimes = errors.New("the packets come without times")

const stampSize = 8

// clock reads CLOCK_MONOTONIC without a system call. Its start is late by the time of one system call, so ages are too
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

// DropOlder makes Recv drop packets that XDP saw longer ago than age, and count them as stale; 0: none. The error is ErrNoTimes.
func (q *Queue) DropOlder(age time.Duration) (err error) {
	if !q.layout.Stamped {
		return ErrNoTimes
	}
	q.ageMax = int64(age)
	q.clock, err = newClock()
	return err
}

// Stamp returns when XDP saw a received packet: CLOCK_MONOTONIC, nanoseconds; 0 if packets come without times. The program
// must not have given the packet back.
func (q *Queue) Stamp(d *Descriptor) int64 { return q.layout.stamp(q.memory, d.Addr) }

// stamp returns the time in front of a packet at an address, which may be any: a process that has the rings can write any
// address there.
func (l *Layout) stamp(memory []byte, address uint64) int64 {
	if !l.Stamped || address%uint64(l.FrameSize) < stampSize || address > uint64(len(memory)) {
		return 0
	}
	return int64(binary.NativeEndian.Uint64(memory[address-stampSize:]))
}

// Oldest returns the age, since XDP saw it, of the packet that the program will read next. It is 0 if none waits, if
// packets come without times, or if the program has read it meanwhile. Any process that has the socket may ask.
func (s *Socket) Oldest() time.Duration {
	if !s.Layout.Stamped {
		return 0
	}
	r, err := newRing[Descriptor](s.rings.receive, s.rings.offsets.Rx, s.Layout.ReceiveRing, false)
	if err != nil || r.own == r.other {
		return 0
	}
	at := s.Layout.stamp(s.memory, atomic.LoadUint64(&r.at(r.own).Addr))
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil || at <= 0 || at > now.Nano() || atomic.LoadUint32(r.consumer) != r.own {
		return 0
	}
	return time.Duration(now.Nano() - at)
}
