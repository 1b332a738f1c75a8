package xsk

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ErrReceiveOnly says that a socket has no transmit ring.
var ErrReceiveOnly = errors.New("the socket can only receive")

// Queue is the frames of one socket, and the program's side of its rings. It belongs to one
// goroutine: no two methods may run at the same time. None of them allocates. Only Flush makes system
// calls, and with Layout.BusyPoll Recv on an empty ring.
type Queue struct {
	layout Layout
	memory []byte // the frames

	receive, transmit ring[Descriptor]
	fill, completion  ring[uint64]

	free    []uint64 // addresses of frames for Reserve
	sending uint32   // frames between Send and completion
	owners  owners
	err     error // ErrCorrupt, once the rings are found damaged

	kick func() error // makes the kernel look at the transmit ring
	work func()       // makes the kernel work off the driver's queue; nil: interrupts do

	ageMax int64 // nanoseconds; 0: no packet is too old
	clock  clock

	counts Counts // except those in shared
	shared struct{ stale, txShort, kicks, wakeups atomic.Uint64 }
}

// Counts are the program's counters of a queue; Socket.Statistics has the kernel's side.
type Counts struct {
	Delivered uint64 `json:"delivered"` // frames that Recv gave to the program
	Invalid   uint64 `json:"invalid"`   // frames from the receive ring that lie outside the memory
	Stale     uint64 `json:"stale"`     // packets that were too old: DropOlder
	Sent      uint64 `json:"sent"`      // frames that Send put into the ring
	TxShort   uint64 `json:"tx_short"`  // frames that Send or Reserve had no room for
	Kicks     uint64 `json:"kicks"`     // system calls that have frames sent
	Wakeups   uint64 `json:"wakeups"`   // sleeps of a Waiter that ended with packets of this queue
	Polls     uint64 `json:"polls"`     // system calls that have the driver's queue worked off: Layout.BusyPoll
	// HeldMax is the largest number of frames that the program has held at once. Near Layout.ReceiveFrames the
	// fill ring runs empty and the kernel drops packets.
	Held    uint32 `json:"held"`
	HeldMax uint32 `json:"held_max"`
}

// Err returns ErrCorrupt if another process has damaged the rings. The queue then does nothing any more.
func (q *Queue) Err() error { return q.err }

// Counts returns the counters at this moment.
func (q *Queue) Counts() Counts {
	c, s := q.counts, q.Shared()
	c.Stale, c.TxShort, c.Kicks, c.Wakeups = s.Stale, s.TxShort, s.Kicks, s.Wakeups
	return c
}

// Shared are the Counts that only the program knows. Any goroutine may read them while another one uses the queue.
// As they change at most once for a batch, or beside a system call, atomic access costs nothing.
type Shared struct{ Stale, TxShort, Kicks, Wakeups uint64 }

// Shared returns these counters at this moment.
func (q *Queue) Shared() Shared {
	return Shared{Stale: q.shared.stale.Load(), TxShort: q.shared.txShort.Load(), Kicks: q.shared.kicks.Load(), Wakeups: q.shared.wakeups.Load()}
}

// number returns the number of the frame that an address lies in.
func (q *Queue) number(address uint64) uint32 { return uint32(address / uint64(q.layout.FrameSize)) }

// valid reports whether a descriptor's packet lies within one of the first count frames.
func (q *Queue) valid(d *Descriptor, count uint32) bool {
	size := uint64(q.layout.FrameSize)
	return d.Addr < uint64(count)*size && d.Addr%size+uint64(d.Len) <= size
}

// Recv lends received frames to the program: it fills batch from its start and returns the number of
// frames, 0 if none has come. Each has to be given back with Release, or sent with Send.
func (q *Queue) Recv(batch []Descriptor) int {
	if q.sending > 0 {
		q.reap()
	}
	n, err := q.poll(uint32(len(batch)))
	if err != nil || q.err != nil {
		q.err = errors.Join(q.err, err)
		return 0
	}
	if n == 0 {
		return 0
	}
	got, oldest, dropped := 0, int64(0), uint32(0)
	if q.ageMax > 0 {
		oldest = q.clock.now() - q.ageMax
	}
	for i := range n {
		d := *q.receive.at(q.receive.own + i)
		if !q.valid(&d, q.layout.ReceiveFrames) {
			q.counts.Invalid++
			continue
		}
		if q.ageMax > 0 && q.Stamp(&d) < oldest {
			q.refill(q.number(d.Addr), dropped)
			dropped++
			continue
		}
		q.owners.move("receive", q.number(d.Addr), ownerKernel, ownerProgram)
		batch[got] = d
		got++
	}
	q.receive.pop(n)
	if dropped > 0 {
		q.fill.push(dropped)
		q.shared.stale.Add(uint64(dropped))
	}
	q.counts.Delivered += uint64(got)
	q.counts.Held += uint32(got)
	q.counts.HeldMax = max(q.counts.HeldMax, q.counts.Held)
	return got
}

// Bytes returns the frame of a descriptor, from its first byte (Ethernet header) on. It is valid until
// the frame is released or sent.
func (q *Queue) Bytes(d *Descriptor) []byte {
	return q.memory[d.Addr : d.Addr+uint64(d.Len) : d.Addr+uint64(d.Len)]
}

// Release gives frames back that Recv or Reserve has lent. A checked queue panics with an OwnershipError
// on a frame that the program does not have.
func (q *Queue) Release(batch []Descriptor) {
	filled := uint32(0)
	for i := range batch {
		number := q.number(batch[i].Addr)
		if number < q.layout.ReceiveFrames {
			q.owners.move("release", number, ownerProgram, ownerKernel)
			q.refill(number, filled)
			filled++
			continue
		}
		q.owners.move("release", number, ownerProgram, ownerFree)
		q.free = append(q.free, uint64(number)*uint64(q.layout.FrameSize))
	}
	q.counts.Held -= uint32(len(batch))
	if filled > 0 {
		q.fill.push(filled)
	}
}

// refill writes the ahead-th entry behind the fill ring's end. The ring has room for every frame
// twice (Plan), so it is full only if some were given back twice.
func (q *Queue) refill(number, ahead uint32) {
	room, err := q.fill.room(ahead + 1)
	if err != nil {
		q.err = errors.Join(q.err, err)
		return
	}
	if room <= ahead {
		panic(&OwnershipError{"release", number, "not known, and the fill ring is full: frames were given back twice", ownerProgram.String()})
	}
	*q.fill.at(q.fill.own + ahead) = uint64(number) * uint64(q.layout.FrameSize)
}

// Reserve lends free frames to write packets into, and returns their number. Each descriptor
// covers its whole frame: write to Bytes, then set Len. Reserve never waits.
func (q *Queue) Reserve(batch []Descriptor) int {
	if len(q.free) < len(batch) {
		q.reap()
	}
	n := min(len(batch), len(q.free))
	for i := range n {
		last := len(q.free) - 1
		address := q.free[last]
		q.free = q.free[:last]
		q.owners.move("reserve", q.number(address), ownerFree, ownerProgram)
		batch[i] = Descriptor{Addr: address, Len: q.layout.FrameSize}
	}
	q.counts.Held += uint32(n)
	q.counts.HeldMax = max(q.counts.HeldMax, q.counts.Held)
	q.short(len(batch) - n)
	return n
}

// Send gives frames to the kernel to be sent, and returns the number of frames that had room; the program
// keeps the others. They leave with the next Flush at the latest.
func (q *Queue) Send(batch []Descriptor) int {
	if q.layout.TransmitRing == 0 || q.err != nil {
		return 0
	}
	room, err := q.transmit.room(uint32(len(batch)))
	if err != nil {
		q.err = err
		return 0
	}
	for i := range room {
		d := batch[i]
		if !q.valid(&d, q.layout.ReceiveFrames+q.layout.TransmitFrames) {
			panic(&OwnershipError{"send", q.number(d.Addr), "nobody: it lies outside of the queue's frames", ownerProgram.String()})
		}
		q.owners.move("send", q.number(d.Addr), ownerProgram, ownerSending)
		d.Options = 0
		*q.transmit.at(q.transmit.own + i) = d
	}
	q.transmit.push(room)
	q.sending += room
	q.counts.Held -= room
	q.counts.Sent += uint64(room)
	q.short(len(batch) - int(room))
	return int(room)
}

// short counts frames that had no room.
func (q *Queue) short(frames int) {
	if frames > 0 {
		q.shared.txShort.Add(uint64(frames))
	}
}

// Flush makes the kernel send the frames in the transmit ring, and takes back sent ones. Frames
// that exceed the kernel's budget for one call go with the next Flush.
func (q *Queue) Flush() error {
	if q.err != nil || q.layout.TransmitRing == 0 {
		return q.err
	}
	// In copy mode a call sends 32 frames at most (XDP_MAX_TX_SKB_BUDGET), so a full ring needs
	// size/32 calls; the loop ends with a call that sends none.
	for range q.transmit.size()/32 + 1 {
		left, err := q.transmit.room(q.transmit.size())
		if err != nil {
			q.err = err
			return err
		}
		if left == q.transmit.size() || !q.transmit.needsWakeup() {
			break
		}
		q.shared.kicks.Add(1)
		if err := q.kick(); err != nil {
			return fmt.Errorf("send frames on queue %d: %w", q.layout.Queue, err)
		}
		if now, _ := q.transmit.room(q.transmit.size()); now == left {
			break // the device's own queue is full
		}
	}
	q.reap()
	return q.err
}

// reap takes sent frames back: received ones into the fill ring, others into free.
func (q *Queue) reap() {
	n, err := q.completion.filled(q.completion.size())
	if err != nil {
		q.err = errors.Join(q.err, err)
		return
	}
	if n == 0 {
		return
	}
	filled := uint32(0)
	for i := range n {
		number := q.number(*q.completion.at(q.completion.own + i))
		switch {
		case number >= q.layout.ReceiveFrames+q.layout.TransmitFrames:
			q.counts.Invalid++
		case number < q.layout.ReceiveFrames:
			q.owners.move("complete", number, ownerSending, ownerKernel)
			q.refill(number, filled)
			filled++
		default:
			q.owners.move("complete", number, ownerSending, ownerFree)
			q.free = append(q.free, uint64(number)*uint64(q.layout.FrameSize))
		}
	}
	q.completion.pop(n)
	q.sending -= n
	if filled > 0 {
		q.fill.push(filled)
	}
}

// retried are the errors of sendto(2) on an AF_XDP socket after which a later call sends the rest
// (xsk_generic_xmit: EAGAIN is the budget, EBUSY a full device queue, ENOBUFS the send buffer).
func retried(errno unix.Errno) bool {
	return errno == unix.EAGAIN || errno == unix.EBUSY || errno == unix.ENOBUFS
}

// kickSocket makes the kernel send. It does not wait, so that the runtime need not know about it.
func kickSocket(fd int) func() error {
	return func() error {
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), 0, 0, unix.MSG_DONTWAIT, 0, 0)
		if errno != 0 && !retried(errno) {
			return errno
		}
		return nil
	}
}

// newQueue returns the program's side of existing rings. Frames that an earlier queue on them held are lost.
func newQueue(l Layout, memory []byte, r rings, kick func() error, checked bool) (*Queue, error) {
	q := &Queue{layout: l, memory: memory, kick: kick, free: make([]uint64, 0, l.TransmitFrames)}
	for i := range l.TransmitFrames {
		q.free = append(q.free, uint64(l.ReceiveFrames+i)*uint64(l.FrameSize))
	}
	if checked {
		q.owners = newOwners(l)
	}
	var errs [4]error
	q.receive, errs[0] = newRing[Descriptor](r.receive, r.offsets.Rx, l.ReceiveRing, false)
	q.fill, errs[1] = newRing[uint64](r.fill, r.offsets.Fr, l.FillRing, true)
	q.completion, errs[2] = newRing[uint64](r.completion, r.offsets.Cr, l.CompletionRing, false)
	if l.TransmitRing > 0 {
		q.transmit, errs[3] = newRing[Descriptor](r.transmit, r.offsets.Tx, l.TransmitRing, true)
	}
	return q, errors.Join(errs[:]...)
}
