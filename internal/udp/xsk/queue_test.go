package xsk

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// Every index at which the rings may begin, and wrap: frames come, are answered or released, and none
// is lost.
func TestFramesGoRoundAtTheWrap(t *testing.T) {
	for _, start := range []uint32{0, 1, 1<<31 - 5, 1<<32 - 1, 1<<32 - 64, 1<<32 - 200} {
		f := newFake(t, 64, true, true, start)
		batch := make([]Descriptor, 64)
		got := 0
		for round := range 40 {
			f.deliver(48)
			n := f.queue.Recv(batch)
			if n != 48 {
				t.Fatalf("start %d, round %d: %d of 48 received", start, round, n)
			}
			got += n
			if sent := f.queue.Send(batch[:20]); sent != 20 {
				t.Fatalf("start %d, round %d: %d of 20 sent", start, round, sent)
			}
			f.queue.Release(batch[20:n])
			if err := f.queue.Flush(); err != nil {
				t.Fatal(err)
			}
			if inFill := f.inFill(); inFill != f.layout.ReceiveFrames {
				t.Fatalf("start %d, round %d: %d of %d frames are in the fill ring", start, round, inFill, f.layout.ReceiveFrames)
			}
		}
		counts := f.queue.Counts()
		if counts.Delivered != uint64(got) || counts.Sent != 40*20 || counts.Held != 0 || counts.HeldMax != 48 || counts.Invalid != 0 {
			t.Errorf("start %d: %+v", start, counts)
		}
	}
}

// A random program and a random kernel lose no frame, and none is in two places (the queue is checked).
func TestNoFrameIsLost(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	f := newFake(t, 64, true, true, random.Uint32())
	f.drain = func() { f.complete(uint32(random.IntN(64))) }
	var held []Descriptor
	batch := make([]Descriptor, 64)
	for range 20_000 {
		size := random.IntN(len(batch) + 1)
		switch random.IntN(5) {
		case 0:
			f.deliver(size)
		case 1:
			held = append(held, batch[:f.queue.Recv(batch[:size])]...)
		case 2:
			held = append(held, batch[:f.queue.Reserve(batch[:size])]...)
		case 3:
			n := min(size, len(held))
			f.queue.Release(held[len(held)-n:])
			held = held[:len(held)-n]
		case 4:
			n := f.queue.Send(held[:min(size, len(held))])
			held = held[n:]
			if err := f.queue.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.drain = func() { f.complete(64) }
	f.queue.Release(held)
	for f.queue.sending > 0 {
		if err := f.queue.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	for {
		n := f.queue.Recv(batch)
		if n == 0 {
			break
		}
		f.queue.Release(batch[:n])
	}
	if inFill, free := f.inFill(), len(f.queue.free); inFill != f.layout.ReceiveFrames || free != int(f.layout.TransmitFrames) {
		t.Errorf("at the end %d of %d frames are in the fill ring, and %d of %d are free", inFill, f.layout.ReceiveFrames, free, f.layout.TransmitFrames)
	}
}

func panics(t *testing.T, do func()) (err *OwnershipError) {
	t.Helper()
	defer func() {
		t.Helper()
		var ok bool
		if err, ok = recover().(*OwnershipError); !ok {
			t.Fatal("it did not panic with an OwnershipError")
		}
	}()
	do()
	return nil
}

func TestDoubleReleaseIsFound(t *testing.T) {
	f := newFake(t, 64, true, true, 0)
	batch := make([]Descriptor, 4)
	f.deliver(4)
	f.queue.Recv(batch)
	f.queue.Release(batch[:1])
	err := panics(t, func() { f.queue.Release(batch[:1]) })
	if want := "xsk: release frame 0: its owner is the kernel, which receives into it, not the program"; err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
	if f.queue.Send(batch[1:2]); f.queue.sending != 1 {
		t.Fatal("nothing was sent")
	}
	if err := panics(t, func() { f.queue.Release(batch[1:2]) }); !strings.Contains(err.Error(), "the kernel, which sends it") {
		t.Error(err)
	}
	if err := panics(t, func() { f.queue.Send(batch[1:2]) }); err.Operation != "send" {
		t.Error(err)
	}
	one := make([]Descriptor, 1)
	f.queue.Reserve(one)
	f.queue.Release(one)
	if err := panics(t, func() { f.queue.Release(one) }); !strings.Contains(err.Error(), "nobody: it is free") {
		t.Error(err)
	}
}

// A queue that is not checked finds it when the fill ring has no place left.
func TestDoubleReleaseFillsTheRing(t *testing.T) {
	f := newFake(t, 64, false, false, 0)
	batch := make([]Descriptor, 1)
	f.deliver(1)
	f.queue.Recv(batch)
	for range f.layout.FillRing - f.layout.ReceiveFrames + 1 {
		f.queue.Release(batch)
	}
	if err := panics(t, func() { f.queue.Release(batch) }); !strings.Contains(err.Error(), "given back twice") {
		t.Error(err)
	}
}

// The kernel publishes packets before it publishes that it has taken their frames from the fill ring.
func TestFramesComeBackEarly(t *testing.T) {
	for _, start := range []uint32{0, 1<<32 - 70} {
		f := newFake(t, 64, true, true, start)
		batch := make([]Descriptor, 64)
		for range 20 {
			fill := f.consumer(f.rings.fill)
			for range f.layout.ReceiveFrames / 64 { // all frames, before the kernel says that it took one
				f.deliver(64)
				n := f.queue.Recv(batch)
				if n != 64 || f.queue.Send(batch[:32]) != 32 {
					t.Fatalf("%d received", n)
				}
			}
			taken := f.consumer(f.rings.fill)
			f.setConsumer(f.rings.fill, fill)
			if err := f.queue.Flush(); err != nil {
				t.Fatal(err)
			}
			f.setConsumer(f.rings.fill, taken)
			for i := range f.queue.owners[:f.layout.ReceiveFrames] {
				if f.queue.owners[i] == ownerProgram {
					f.queue.Release([]Descriptor{{Addr: uint64(i) * 2048}})
				}
			}
			if inFill := f.inFill(); inFill != f.layout.ReceiveFrames {
				t.Fatalf("%d of %d frames are in the fill ring", inFill, f.layout.ReceiveFrames)
			}
		}
	}
}

// A program that holds all frames leaves the kernel none; frames that it gives back are used again.
func TestFillStarvation(t *testing.T) {
	f := newFake(t, 64, false, true, 1<<32-100)
	held := make([]Descriptor, 0, f.layout.ReceiveFrames)
	batch := make([]Descriptor, 64)
	for len(held) < int(f.layout.ReceiveFrames) {
		f.deliver(64)
		n := f.queue.Recv(batch)
		if n == 0 {
			t.Fatalf("nothing came after %d frames", len(held))
		}
		held = append(held, batch[:n]...)
	}
	if n := f.deliver(1); n != 0 {
		t.Error("the kernel found a frame, though the program holds all")
	}
	f.queue.Release(held[:3])
	if n := f.deliver(10); n != 3 {
		t.Errorf("the kernel found %d frames after 3 were released", n)
	}
	if c := f.queue.Counts(); c.HeldMax != f.layout.ReceiveFrames {
		t.Errorf("held_max is %d", c.HeldMax)
	}
}

func TestTransmitBackpressure(t *testing.T) {
	f := newFake(t, 64, true, true, 0)
	f.drain = func() {} // the device takes nothing
	batch := make([]Descriptor, 80)
	if n := f.queue.Reserve(batch); n != 64 {
		t.Fatalf("%d frames reserved, there are 64", n)
	}
	if n := f.queue.Send(batch[:64]); n != 64 {
		t.Fatalf("%d sent", n)
	}
	if err := f.queue.Flush(); err != nil || f.kicks != 1 {
		t.Errorf("flush: %v after %d kicks: one that brings nothing forward is enough", err, f.kicks)
	}
	if n := f.queue.Reserve(batch); n != 0 {
		t.Errorf("%d frames reserved while all are being sent", n)
	}
	f.deliver(1)
	if n := f.queue.Recv(batch[:1]); n != 1 || f.queue.Send(batch[:1]) != 0 {
		t.Error("a full ring took another frame")
	}
	if c := f.queue.Counts(); c.TxShort != 16+80+1 {
		t.Errorf("tx_short is %d", c.TxShort)
	}
	f.drain = func() { f.complete(32) } // the kernel's budget for one call
	if err := f.queue.Flush(); err != nil || f.queue.sending != 0 {
		t.Errorf("flush left %d frames behind: %v", f.queue.sending, err)
	}
	if n := f.queue.Reserve(batch[1:65]); n != 64 {
		t.Errorf("%d frames are free again", n)
	}
}

func TestReceiveOnly(t *testing.T) {
	f := newFake(t, 64, false, true, 0)
	batch := make([]Descriptor, 1)
	f.deliver(1)
	f.queue.Recv(batch)
	if err := f.queue.Reply(&batch[0]); !errors.Is(err, ErrReceiveOnly) {
		t.Errorf("reply: %v", err)
	}
	if n := f.queue.Send(batch); n != 0 || f.queue.Flush() != nil || f.kicks != 0 {
		t.Error("a socket without a transmit ring sent")
	}
	if n := f.queue.Reserve(batch); n != 0 {
		t.Error("it had frames to send from")
	}
}

// Damage to the rings, which another process with the socket can do, is found and has no effect.
func TestDamagedRings(t *testing.T) {
	t.Run("descriptor", func(t *testing.T) {
		f := newFake(t, 64, false, true, 0)
		r := kernelSide[Descriptor](f, f.rings.receive, 64, true)
		for i, d := range []Descriptor{
			{Addr: uint64(f.layout.ReceiveFrames) * 2048, Len: 1}, {Addr: 1 << 63, Len: 60}, {Addr: 2000, Len: 49}, {Addr: 0, Len: 1 << 31},
			{Addr: 256, Len: 60},
		} {
			*r.at(uint32(i)) = d
		}
		r.push(5)
		batch := make([]Descriptor, 8)
		if n := f.queue.Recv(batch); n != 1 || batch[0].Addr != 256 {
			t.Errorf("%d frames received, %+v", n, batch[0])
		}
		if c := f.queue.Counts(); c.Invalid != 4 || c.Delivered != 1 {
			t.Errorf("%+v", c)
		}
	})
	t.Run("producer", func(t *testing.T) {
		f := newFake(t, 64, true, true, 7)
		f.setProducer(f.rings.receive, 7+65)
		if n := f.queue.Recv(make([]Descriptor, 8)); n != 0 || !errors.Is(f.queue.Err(), ErrCorrupt) {
			t.Errorf("%d frames received: %v", n, f.queue.Err())
		}
		if err := f.queue.Flush(); !errors.Is(err, ErrCorrupt) {
			t.Errorf("flush: %v", err)
		}
	})
	t.Run("consumer", func(t *testing.T) {
		f := newFake(t, 64, true, true, 7)
		f.drain = func() {}
		batch := make([]Descriptor, 64)
		f.queue.Reserve(batch)
		if n := f.queue.Send(batch); n != 64 {
			t.Fatalf("%d sent", n)
		}
		f.setConsumer(f.rings.transmit, 7+65) // beyond the frames that were sent
		f.deliver(1)
		f.queue.Recv(batch[:1])
		if n := f.queue.Send(batch[:1]); n != 0 || !errors.Is(f.queue.Err(), ErrCorrupt) {
			t.Errorf("%d frames sent: %v", n, f.queue.Err())
		}
	})
	t.Run("completion", func(t *testing.T) {
		f := newFake(t, 64, true, true, 0)
		batch := make([]Descriptor, 1)
		f.queue.Reserve(batch)
		f.queue.Send(batch)
		f.drain = func() {}
		f.setProducer(f.rings.completion, 1<<31)
		if err := f.queue.Flush(); !errors.Is(err, ErrCorrupt) {
			t.Errorf("flush: %v", err)
		}
	})
	t.Run("adopt", func(t *testing.T) {
		f := newFake(t, 64, false, true, 0)
		f.setProducer(f.rings.receive, 65)
		if _, err := newQueue(f.layout, f.memory, f.rings, nil, false); !errors.Is(err, ErrCorrupt) {
			t.Errorf("new queue: %v", err)
		}
	})
}

// A queue goes on where another process left it.
func TestQueueGoesOn(t *testing.T) {
	f := newFake(t, 64, true, true, 1<<32-3)
	batch := make([]Descriptor, 10)
	f.deliver(10)
	f.queue.Recv(batch[:5])
	f.queue.Release(batch[:5])
	q, err := newQueue(f.layout, f.memory, f.rings, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	if n := q.Recv(batch); n != 5 {
		t.Errorf("%d of the 5 waiting packets received", n)
	}
}

func TestNothingAllocates(t *testing.T) {
	f := newFake(t, 64, true, false, 0)
	batch := make([]Descriptor, 32)
	frame := udp4(t, "hello")
	allocations := testing.AllocsPerRun(100, func() {
		f.deliverBatch()
		n := f.queue.Recv(batch)
		for i := range batch[:n] {
			copy(f.queue.Bytes(&batch[i]), frame)
			if _, err := f.queue.Packet(&batch[i]); err != nil {
				panic(err)
			}
			if err := f.queue.Reply(&batch[i]); err != nil {
				panic(err)
			}
		}
		f.queue.Send(batch[:n])
		n = f.queue.Reserve(batch)
		f.queue.Release(batch[:n])
		if err := f.queue.Flush(); err != nil {
			panic(err)
		}
	})
	if c := f.queue.Counts(); c.Sent != c.Delivered || c.Delivered < 3200 {
		t.Errorf("%+v", c)
	}
	if allocations != 0 {
		t.Errorf("%v allocations for a batch", allocations)
	}
}

func TestRingSize(t *testing.T) {
	for _, c := range []struct {
		delay time.Duration
		rate  float64
		want  uint32
	}{
		{100 * time.Microsecond, 1e6, 64}, {128 * time.Microsecond, 1e6, 128}, {1 * time.Millisecond, 1e6, 512},
		{2048 * time.Microsecond, 1e6, 2048}, {0, 1e6, 64}, {time.Second, 0, 64}, {time.Hour, 1e9, 65536}, {-time.Second, 1e6, 64},
		{time.Second, 65535, 32768}, {time.Second, 65536, 65536},
	} {
		if got := RingSize(c.delay, c.rate); got != c.want {
			t.Errorf("%s at %g packets a second: %d entries, want %d", c.delay, c.rate, got, c.want)
		}
	}
}

func TestFrameSize(t *testing.T) {
	for mtu, want := range map[int]uint32{1500: 2048, 1770: 2048, 1771: 4096, 3818: 4096} {
		if got, err := FrameSize(mtu); err != nil || got != want {
			t.Errorf("MTU %d: %d, %v; want %d", mtu, got, err, want)
		}
	}
	if _, err := FrameSize(9000); err == nil || !strings.Contains(err.Error(), "ip link set dev") {
		t.Errorf("MTU 9000: %v", err)
	}
}

func TestLayoutsAreChecked(t *testing.T) {
	for _, size := range []uint32{0, 32, 63, 100, 131072} {
		if _, err := Plan(size, 2048, true); err == nil {
			t.Errorf("a ring of %d entries was accepted", size)
		}
	}
	good, err := Plan(64, 2048, true)
	if err != nil {
		t.Fatal(err)
	}
	for name, damage := range map[string]func(*Layout){
		"receive ring":    func(l *Layout) { l.ReceiveRing = 65 },
		"fill ring":       func(l *Layout) { l.FillRing = 0 },
		"completion ring": func(l *Layout) { l.CompletionRing = 1 << 31 },
		"transmit ring":   func(l *Layout) { l.TransmitRing = 3 },
		"frame size":      func(l *Layout) { l.FrameSize = 1000 },
		"receive frames":  func(l *Layout) { l.ReceiveFrames = l.FillRing + 1 },
		"no frames":       func(l *Layout) { l.ReceiveFrames = 0 },
		"transmit frames": func(l *Layout) { l.TransmitFrames = 1 << 31 },
		"offset":          func(l *Layout) { l.Offset = 17 },
		"negative":        func(l *Layout) { l.Offset = -2048 },
	} {
		l := good
		damage(&l)
		if l.check() == nil {
			t.Errorf("%s: %+v was accepted", name, l)
		}
	}
	memory, err := NewMemory(good.Size())
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	if _, err := memory.part(good); err != nil {
		t.Error(err)
	}
	good.Offset = 2048
	if _, err := memory.part(good); err == nil {
		t.Error("frames behind the memory's end were accepted")
	}
}
