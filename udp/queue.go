package udp

import (
	"fmt"
	"net/netip"
	"runtime"

	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"golang.org/x/sys/unix"
)

// Descriptor is a frame that the program holds: where it is, and the packet's length in bytes. Use Bytes or
// Packet to look into it.
type Descriptor = unix.XDPDesc

// Errors of queues.
var (
	// ErrReceiveOnly means that a lease cannot send.
	ErrReceiveOnly = xsk.ErrReceiveOnly
	// ErrNotUDP means that a frame is no plain UDP packet.
	ErrNotUDP = xsk.ErrNotUDP
	// ErrCorrupt means that the rings were damaged: by a stray write of this program, or of another one that
	// has them.
	ErrCorrupt = xsk.ErrCorrupt
)

// Packet is a received UDP packet. Payload lies in the frame, and is valid as long as that is held.
type Packet struct {
	Source, Destination netip.AddrPort
	Payload             []byte
}

// Counts are this program's counters of a queue. The lease reports Stale, TxShort, Kicks and Wakeups to the broker,
// with each renewal and at its end: `shunt udp show` has them.
type Counts struct {
	Delivered uint64 // frames that Receive gave to the program
	Invalid   uint64 // frames from the receive ring that lie outside the memory
	Stale     uint64 // datagrams that were older than Options.MaxAge
	Sent      uint64 // frames that Send put into the ring
	TxShort   uint64 // frames that Send or Reserve had no room for
	Kicks     uint64 // system calls to have frames sent
	Wakeups   uint64 // sleeps of Lease.Wait that datagrams of this queue have ended
	Polls     uint64 // system calls to have the driver's queue worked off: Lease.BusyPoll
	Held      uint32 // frames that the program has
	HeldMax   uint32 // the most at once; near the number of frames the kernel drops packets
}

// Statistics are the kernel's counters of a queue, since the lease began.
type Statistics struct {
	Taken     uint64 // packets that were received, stale or not, if it is asked for before each 2^32 of them
	Waiting   uint32 // packets in the ring
	Free      uint32 // frames that the kernel can still receive into
	Dropped   uint64 // packets without a free frame, or larger than one
	FillEmpty uint64 // of them, without a free frame
	RingFull  uint64 // packets that met a full ring: the program is too slow
	Invalid   uint64 // frames given back that are none
	TxInvalid uint64 // frames sent that are none
}

// Queue is the frames of one receive queue of the interface. Its methods allocate nothing, and must not run
// at the same time; only Flush, Statistics and Pin, and with Lease.BusyPoll
// Receive of an empty ring, make system calls.
type Queue struct {
	queue  *xsk.Queue
	socket *xsk.Socket
	cpu    int
}

// Index is the queue's number at the interface.
func (q *Queue) Index() int { return q.socket.Layout.Queue }

// CPU is the CPU on which the administrator wants the queue worked off; -1: any.
func (q *Queue) CPU() int { return q.cpu }

// Pin wires the calling goroutine to its thread, and the thread to the queue's CPU. Where the administrator names none it
// does nothing. A goroutine that works off several queues is pinned to the CPU of one of them.
func (q *Queue) Pin() error {
	if q.cpu < 0 {
		return nil
	}
	runtime.LockOSThread()
	var one unix.CPUSet
	one.Set(q.cpu)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("pin the thread of queue %d to CPU %d: %w; this program may use only the CPUs of Cpus_allowed_list in /proc/self/status (its cpuset): change the cpuset, or cpu in the administrator's entry", q.Index(), q.cpu, err)
	}
	return nil
}

// Receive lends received frames: it fills batch from its start and returns their number, 0 if nothing has come. Each
// has to be given back with Release, or sent with Send.
func (q *Queue) Receive(batch []Descriptor) int { return q.queue.Recv(batch) }

// Stamp is the time at which shunt's program saw a received frame: CLOCK_MONOTONIC, nanoseconds. It is 0 where the
// administrator has not set timestamps, and in a time namespace of its own the program's clock is another one.
func (q *Queue) Stamp(d *Descriptor) int64 { return q.queue.Stamp(d) }

// Bytes is a frame from its Ethernet header on, valid until it is released or sent.
func (q *Queue) Bytes(d *Descriptor) []byte { return q.queue.Bytes(d) }

// Packet is the UDP packet in a received frame. Its checksums have not been verified. The error is ErrNotUDP.
func (q *Queue) Packet(d *Descriptor) (Packet, error) {
	p, err := q.queue.Packet(d)
	return Packet(p), err
}

// Release gives frames back.
func (q *Queue) Release(batch []Descriptor) { q.queue.Release(batch) }

// Reply makes a received frame the answer to itself, in place: addresses and ports change sides, the payload
// stays as the program has left it. Send sends it. The error is ErrReceiveOnly or ErrNotUDP.
func (q *Queue) Reply(d *Descriptor) error { return q.queue.Reply(d) }

// Reserve lends free frames to write packets into, and returns their number. Each descriptor covers its whole frame:
// write to Bytes from the Ethernet header on, then set Len. It never waits.
func (q *Queue) Reserve(batch []Descriptor) int { return q.queue.Reserve(batch) }

// Send gives frames to the kernel to be sent, and returns the number for which there was room; the program keeps the
// others. They leave with the next Flush at the latest.
func (q *Queue) Send(batch []Descriptor) int { return q.queue.Send(batch) }

// Flush has the kernel send. Frames that it has no room for go with the next Flush.
func (q *Queue) Flush() error { return q.queue.Flush() }

// Err is ErrCorrupt if the rings were damaged. The queue does nothing any more then.
func (q *Queue) Err() error { return q.queue.Err() }

// Counts are the queue's counters at this moment.
func (q *Queue) Counts() Counts { return Counts(q.queue.Counts()) }

// Statistics are the socket's statistics at this moment.
func (q *Queue) Statistics() (Statistics, error) {
	s, err := q.socket.Statistics()
	return Statistics(s), err
}
