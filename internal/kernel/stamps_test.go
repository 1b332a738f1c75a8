package kernel

import (
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

const stampCount = uint64(coreStampConstantSTAMP_COUNT)

// memoryRing is a ring in this process's memory, with a writer's view of it.
func memoryRing() (*StampRing, stampWriter) {
	stamps, count := make([]coreStamp, stampCount), new(uint64)
	r := &StampRing{next: 1, stamps: unsafe.Slice((*byte)(unsafe.Pointer(&stamps[0])), stampCount*stampBytes), count: unsafe.Slice((*byte)(unsafe.Pointer(count)), 8)}
	return r, stampWriter{stamps, count}
}

// stampWriter writes as the programs do (bpf/lb/stamping.h).
type stampWriter struct {
	stamps []coreStamp
	count  *uint64
}

// begin writes the first half of the next stamp, whose fields all have its number.
func (w stampWriter) begin() uint64 {
	number := atomic.AddUint64(w.count, 1)
	p := &w.stamps[(number-1)%stampCount]
	atomic.StoreUint64(&p.Number, 0)
	for _, field := range []*uint64{&p.Session, &p.Sequence, &p.BeginNs, &p.Source.High, &p.Source.Low} {
		atomic.StoreUint64(field, number)
	}
	return number
}

// end writes the other half.
func (w stampWriter) end(number uint64) {
	p := &w.stamps[(number-1)%stampCount]
	atomic.StoreUint64(&p.EndNs, number)
	atomic.StoreUint64(&p.Number, number)
}

// sequences are the sequence numbers of the stamps that are read.
func sequences(read func(func(Stamp))) (all []uint64) {
	read(func(s Stamp) { all = append(all, s.Sequence) })
	return all
}

// TestAHalfWrittenStamp is waited for, with the stamps behind it; one that never ends is counted, and holds nothing up.
func TestAHalfWrittenStamp(t *testing.T) {
	for _, c := range []struct {
		what   string
		ends   bool // after it was looked at
		later  bool // stampPatience has passed
		gone   bool // the instance has ended
		want   []uint64
		missed uint64
	}{
		{"that goes on", false, false, false, nil, 0},
		{"that has ended since", true, false, false, []uint64{2, 3, 4}, 0},
		{"that never ends", false, true, false, []uint64{3}, 2},
		{"of an instance that has ended", false, false, true, []uint64{3}, 2},
	} {
		r, w := memoryRing()
		w.end(w.begin())
		half := w.begin()
		w.end(w.begin())
		last := w.begin() // the last one is half written, too
		if got := sequences(r.Read); !slices.Equal(got, []uint64{1}) || r.Missed != 0 {
			t.Errorf("before a stamp %s: read %v, %d missed", c.what, got, r.Missed)
		}
		if c.ends {
			w.end(half)
			w.end(last)
		}
		read := r.Read
		if c.gone {
			read = r.drain
		}
		var got []uint64
		for range 2 { // the half-written stamps: each is waited for
			if c.later {
				r.stopped = r.stopped.Add(-stampPatience)
			}
			got = append(got, sequences(read)...)
		}
		if !slices.Equal(got, c.want) || r.Missed != c.missed {
			t.Errorf("behind a stamp %s: read %v, %d missed; want %v, %d", c.what, got, r.Missed, c.want, c.missed)
		}
	}
}

// TestAStampOfTheRoundBefore is in the place of a stamp whose program has counted it and not begun to write.
func TestAStampOfTheRoundBefore(t *testing.T) {
	r, w := memoryRing()
	for range stampCount {
		w.end(w.begin())
	}
	if got := sequences(r.Read); uint64(len(got)) != stampCount {
		t.Fatalf("read %d stamps", len(got))
	}
	*w.count++
	if got := sequences(r.Read); got != nil || r.Missed != 0 {
		t.Errorf("read %v, %d missed", got, r.Missed)
	}
	w.end(stampCount + 1)
	if got := sequences(r.Read); len(got) != 1 || r.Missed != 0 {
		t.Errorf("after its end: read %v, %d missed", got, r.Missed)
	}
}

// TestAReaderThatLooksMeanwhile reads while stamps are written over each other: each stamp that is read is whole, and each is read or
// counted.
func TestAReaderThatLooksMeanwhile(t *testing.T) {
	r, w := memoryRing()
	const rounds = 20
	var written atomic.Bool
	go func() {
		defer written.Store(true)
		for n := range rounds * stampCount {
			w.end(w.begin())
			if n%1000 == 0 {
				runtime.Gosched()
			}
		}
	}()
	read, last := uint64(0), uint64(0)
	take := func(s Stamp) {
		if n := s.Sequence; s.Session != n || s.Begin != n || s.End != n || n <= last {
			t.Errorf("torn, or out of order: %+v after %d", s, last)
		}
		read, last = read+1, s.Sequence
	}
	for deadline := time.Now().Add(time.Minute); !written.Load() && !t.Failed(); {
		r.Read(take)
		if time.Now().After(deadline) {
			t.Fatalf("after a minute %d stamps are written, %d read", r.total(), read)
		}
	}
	r.Read(take)
	if got := read + r.Missed; got != rounds*stampCount || read == 0 {
		t.Errorf("%d read and %d missed are not the %d that were written", read, r.Missed, rounds*stampCount)
	}
}
