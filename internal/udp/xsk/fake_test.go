package xsk

import (
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fake is rings in ordinary memory, and the kernel's side of them.
type fake struct {
	t      *testing.T
	layout Layout
	rings  rings
	memory []byte
	queue  *Queue
	kicks  int

	transmit   *ring[Descriptor] // the kernel's side
	completion *ring[uint64]

	// drain is run by a kick; the default sends all.
	drain func()
}

// start is the index at which all rings begin.
func newFake(t *testing.T, ringSize uint32, transmit, checked bool, start uint32) *fake {
	t.Helper()
	layout, err := Plan(ringSize, 2048, transmit)
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{t: t, layout: layout, memory: make([]byte, layout.Size())}
	at := unix.XDPRingOffset{Producer: 0, Consumer: 64, Flags: 128, Desc: 192}
	f.rings.offsets = unix.XDPMmapOffsets{Rx: at, Tx: at, Fr: at, Cr: at}
	room := func(entries, size uint32) []byte {
		words := make([]uint64, (192+entries*size)/8) // aligned
		bytes := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*8)
		*(*uint32)(unsafe.Pointer(&bytes[0])) = start
		*(*uint32)(unsafe.Pointer(&bytes[64])) = start
		*(*uint32)(unsafe.Pointer(&bytes[128])) = unix.XDP_RING_NEED_WAKEUP
		return bytes
	}
	f.rings.receive, f.rings.fill = room(layout.ReceiveRing, 16), room(layout.FillRing, 8)
	f.rings.completion = room(layout.CompletionRing, 8)
	if transmit {
		f.rings.transmit = room(layout.TransmitRing, 16)
		f.transmit = kernelSide[Descriptor](f, f.rings.transmit, layout.TransmitRing, false)
		f.completion = kernelSide[uint64](f, f.rings.completion, layout.CompletionRing, true)
	}
	s := &Socket{Layout: layout, rings: f.rings}
	if err := s.fill(); err != nil {
		t.Fatal(err)
	}
	f.drain = func() { f.complete(layout.TransmitRing) }
	f.queue, err = newQueue(layout, f.memory, f.rings, func() error { f.kicks++; f.drain(); return nil }, checked)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// kernelSide is a ring with the roles changed.
func kernelSide[T any](f *fake, bytes []byte, size uint32, producing bool) *ring[T] {
	r, err := newRing[T](bytes, f.rings.offsets.Rx, size, producing)
	if err != nil {
		f.t.Fatal(err)
	}
	return &r
}

// deliver plays the kernel that receives n packets: it returns the number that found a frame and
// room.
func (f *fake) deliver(n int) (delivered int) {
	fill := kernelSide[uint64](f, f.rings.fill, f.layout.FillRing, false)
	receive := kernelSide[Descriptor](f, f.rings.receive, f.layout.ReceiveRing, true)
	for range n {
		filled, err := fill.filled(1)
		room, roomErr := receive.room(1)
		if err != nil || roomErr != nil || filled == 0 || room == 0 {
			return delivered
		}
		*receive.at(receive.own) = Descriptor{Addr: *fill.at(fill.own) + headroom, Len: 60}
		fill.pop(1)
		receive.push(1)
		delivered++
	}
	return delivered
}

// complete is the kernel sending up to n frames.
func (f *fake) complete(n uint32) {
	transmit, completion := f.transmit, f.completion
	filled, _ := transmit.filled(n)
	room, _ := completion.room(filled)
	for range room {
		*completion.at(completion.own) = transmit.at(transmit.own).Addr
		transmit.pop(1)
		completion.push(1)
	}
}

// inFill is the number of frames into which the kernel could receive.
func (f *fake) inFill() uint32 {
	n, err := kernelSide[uint64](f, f.rings.fill, f.layout.FillRing, false).filled(f.layout.FillRing)
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

func (f *fake) setProducer(bytes []byte, to uint32) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&bytes[0])), to)
}

// deliverBatch is deliver(32) without an allocation.
func (f *fake) deliverBatch() {
	receive, fill := &f.queue.receive, &f.queue.fill
	from := atomic.LoadUint32(fill.consumer)
	for i := range uint32(32) {
		*receive.at(receive.own + i) = Descriptor{Addr: *fill.at(from + i) + headroom, Len: 60}
	}
	atomic.StoreUint32(fill.consumer, from+32)
	atomic.StoreUint32(receive.producer, receive.own+32)
}

func (f *fake) setConsumer(bytes []byte, to uint32) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&bytes[64])), to)
}

func (f *fake) consumer(bytes []byte) uint32 {
	return atomic.LoadUint32((*uint32)(unsafe.Pointer(&bytes[64])))
}
