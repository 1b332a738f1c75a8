package event

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
)

// ErrTimeout is returned by Read when its deadline has come.
var ErrTimeout = errors.New("no event until the deadline")

// Summary has the counts of a stream.
type Summary struct {
	Received uint64 `json:"received"`
	Lost     uint64 `json:"lost"`   // written when the buffer had no room
	Broken   uint64 `json:"broken"` // received, and not decodable
}

// Reader reads the stream of a collection whose programs include bpf/event/event.h. It is for one goroutine.
type Reader struct {
	ring     *ringbuf.Reader
	sequence *ebpf.Map
	received []uint64 // by CPU
	next     []uint64 // by CPU: one more than the highest number seen
	broken   uint64
	closed   bool
}

// NewReader begins to read. The maps are the collection's MapEvents and MapSequence, and stay the caller's.
func NewReader(events, sequence *ebpf.Map) (*Reader, error) {
	ring, err := ringbuf.NewReader(events)
	if err != nil {
		return nil, fmt.Errorf("read the buffer of events: %w", err)
	}
	return &Reader{ring: ring, sequence: sequence}, nil
}

// Read waits for an event until the deadline, and then returns ErrTimeout. With the zero deadline it does not wait.
// Broken events are counted and left out. Any other error ends the stream.
func (r *Reader) Read(deadline time.Time) (Event, error) {
	var own ringbuf.Record
	return r.readInto(&own, deadline)
}

// readInto is Read; the event's payload is a part of the record.
func (r *Reader) readInto(record *ringbuf.Record, deadline time.Time) (Event, error) {
	if deadline.IsZero() {
		deadline = time.Unix(0, 1) // in the past
	}
	r.ring.SetDeadline(deadline)
	for {
		err := r.ring.ReadInto(record)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return Event{}, ErrTimeout
		case err != nil:
			return Event{}, fmt.Errorf("read an event: %w", err)
		}
		if e, ok := r.take(record.RawSample); ok {
			return e, nil
		}
	}
}

// Drain hands the buffered events to tell, until tell fails.
func (r *Reader) Drain(tell func(Event) error) error {
	for {
		e, err := r.Read(time.Time{})
		if errors.Is(err, ErrTimeout) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := tell(e); err != nil {
			return err
		}
	}
}

func (r *Reader) take(record []byte) (Event, bool) {
	e, err := Decode(record)
	// A number beyond all CPUs that a kernel can have (CONFIG_NR_CPUS is at most 8192) is broken too.
	if err != nil || e.CPU >= 1<<13 {
		r.broken++
		return Event{}, false
	}
	for int(e.CPU) >= len(r.received) {
		r.received, r.next = append(r.received, 0), append(r.next, 0)
	}
	r.received[e.CPU]++
	r.next[e.CPU] = max(r.next[e.CPU], e.Sequence+1)
	return e, true
}

// Summary counts the events so far: a loss shows when a later event of the same CPU arrives.
func (r *Reader) Summary() Summary { return r.summary(r.next) }

func (r *Reader) summary(written []uint64) Summary {
	s := Summary{Broken: r.broken}
	missing := uint64(0)
	for cpu, n := range written {
		received := uint64(0)
		if cpu < len(r.received) {
			received = r.received[cpu]
		}
		s.Received += received
		missing += n - min(n, received)
	}
	// A broken record has been written and received, but not counted for its CPU.
	s.Lost = missing - min(missing, r.broken)
	s.Received += r.broken
	return s
}

// Close ends the stream and returns its exact counts, if the programs have been detached and have ended before. It
// hands the events that are still in the buffer to last, in order; nil: nobody wants them. Closing again, and closing
// no Reader, does nothing.
func (r *Reader) Close(last func(Event)) (Summary, error) {
	if r == nil || r.closed {
		return Summary{}, nil
	}
	r.closed = true
	err := r.Drain(func(e Event) error {
		if last != nil {
			last(e)
		}
		return nil
	})
	if err != nil {
		return r.Summary(), errors.Join(err, r.ring.Close())
	}
	var written []uint64
	if err := r.sequence.Lookup(uint32(0), &written); err != nil {
		return r.Summary(), errors.Join(fmt.Errorf("read the number of written events: %w", err), r.ring.Close())
	}
	// A CPU that was seen is there, also if it has gone away since.
	if len(written) < len(r.next) {
		written = append(written, slices.Clone(r.next[len(written):])...)
	}
	return r.summary(written), r.ring.Close()
}
