package xsk

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrCorrupt means that a ring's indices contradict each other: some process that has the socket has written to them.
// Nothing in the rings can be trusted any more.
var ErrCorrupt = errors.New("a ring's indices contradict each other")

// Descriptor is a frame as the receive and transmit rings have it (struct xdp_desc): address and
// length of the packet in it.
type Descriptor = unix.XDPDesc

// ring is one of a socket's rings. Indices run freely and wrap at 2^32; the entry of index i is at i modulo size. One
// side writes producer, the other consumer, each publishing with a store that orders all its earlier accesses (kernel:
// smp_store_release in net/xdp/xsk_queue.h).
type ring[T any] struct {
	producer, consumer, flags *uint32 // shared with the kernel
	entries                   []T     // shared with the kernel
	mask                      uint32

	own   uint32 // this side's index, including entries that are not published yet
	other uint32 // the other side's index, as last read
}

// newRing takes a ring over as it is: the indices go on.
func newRing[T any](memory []byte, offset unix.XDPRingOffset, size uint32, producing bool) (ring[T], error) {
	var entry T
	end := offset.Desc + uint64(size)*uint64(unsafe.Sizeof(entry))
	for _, at := range []uint64{offset.Producer + 4, offset.Consumer + 4, offset.Flags + 4, end} {
		if at > uint64(len(memory)) {
			return ring[T]{}, fmt.Errorf("a ring of %d entries ends at byte %d of %d", size, at, len(memory))
		}
	}
	word := func(at uint64) *uint32 { return (*uint32)(unsafe.Pointer(&memory[at])) }
	r := ring[T]{
		producer: word(offset.Producer), consumer: word(offset.Consumer), flags: word(offset.Flags),
		entries: unsafe.Slice((*T)(unsafe.Pointer(&memory[offset.Desc])), size),
		mask:    size - 1,
	}
	if r.own, r.other = r.indices(); r.other-r.own > size {
		return ring[T]{}, ErrCorrupt
	}
	if producing {
		r.own, r.other = r.other, r.own
	}
	return r, nil
}

// indices returns consumer and producer at one moment, while others move them: the producer was read between two equal
// readings of the consumer. The consumer of a correct ring rests at times; for a ring whose consumer never does, indices
// returns the last pair.
func (r *ring[T]) indices() (consumer, producer uint32) {
	const triesMax = 1000
	for range triesMax {
		consumer, producer = atomic.LoadUint32(r.consumer), atomic.LoadUint32(r.producer)
		if atomic.LoadUint32(r.consumer) == consumer {
			break
		}
	}
	return consumer, producer
}

func (r *ring[T]) size() uint32 { return r.mask + 1 }

// at returns the entry of an index.
func (r *ring[T]) at(index uint32) *T { return &r.entries[index&r.mask] }

// room returns the number of entries, of want, that the producer may write now, from index own on.
func (r *ring[T]) room(want uint32) (uint32, error) {
	free := r.size() - (r.own - r.other)
	if free < want {
		r.other = atomic.LoadUint32(r.consumer)
		if r.own-r.other > r.size() {
			return 0, ErrCorrupt
		}
		free = r.size() - (r.own - r.other)
	}
	return min(free, want), nil
}

// push publishes n written entries to the consumer.
func (r *ring[T]) push(n uint32) {
	r.own += n
	atomic.StoreUint32(r.producer, r.own)
}

// filled returns the number of entries, of want, that the consumer may read now, from index own on.
func (r *ring[T]) filled(want uint32) (uint32, error) {
	n := r.other - r.own
	if n < want {
		r.other = atomic.LoadUint32(r.producer)
		if n = r.other - r.own; n > r.size() {
			return 0, ErrCorrupt
		}
	}
	return min(n, want), nil
}

// pop gives n read entries back to the producer.
func (r *ring[T]) pop(n uint32) {
	r.own += n
	atomic.StoreUint32(r.consumer, r.own)
}

// needsWakeup reports whether the kernel waits for a system call before it looks at the ring.
func (r *ring[T]) needsWakeup() bool {
	return atomic.LoadUint32(r.flags)&unix.XDP_RING_NEED_WAKEUP != 0
}

// lengthened extends an index that wraps to 64 bits. The zero value is for an index that began at 0. It must see
// the index at least once in 2^32 steps.
type lengthened struct {
	mu    sync.Mutex
	total uint64
}

// near sets the count of the present index to the value next to about.
func (l *lengthened) near(about uint64, index uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	apart := int64(int32(index - uint32(about)))
	if l.total = about + uint64(apart); apart < 0 && about < uint64(-apart) {
		l.total = uint64(index)
	}
}

// at returns the count of the present index.
func (l *lengthened) at(index uint32) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total += uint64(index - uint32(l.total))
	return l.total
}
