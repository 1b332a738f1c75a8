package event

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// Stream is the two maps of one stream: bpf/event/event.h has one, bpf/event/ring.h has programs make others.
type Stream struct{ Events, Sequence *ebpf.Map }

// Readers reads several streams of a collection, whose events cannot take each other's room, in the order of their time. It is for
// one goroutine.
type Readers struct {
	// Gather is the time for which Read lets events come together once one has woken it up: being woken takes more CPU
	// than most events. 0: none.
	Gather time.Duration

	all   []*Reader
	heads []head // by stream
	poll  int    // an epoll of all buffers
	woken []unix.EpollEvent
}

// head is the next event of a stream.
type head struct {
	event  Event
	isRead bool
	record ringbuf.Record // that the event is a part of
}

// NewReaders begins to read. The maps stay the caller's.
func NewReaders(streams ...Stream) (*Readers, error) {
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("wait for several buffers of events: %w", err)
	}
	r := &Readers{poll: poll, heads: make([]head, len(streams)), woken: make([]unix.EpollEvent, 1)}
	for _, s := range streams {
		one, err := NewReader(s.Events, s.Sequence)
		if err == nil {
			r.all = append(r.all, one)
			err = unix.EpollCtl(poll, unix.EPOLL_CTL_ADD, s.Events.FD(), &unix.EpollEvent{Events: unix.EPOLLIN})
		}
		if err != nil {
			_, closeErr := r.Close(nil)
			return nil, errors.Join(fmt.Errorf("wait for several buffers of events: %w", err), closeErr)
		}
	}
	return r, nil
}

// Read waits for an event of any stream, as Reader.Read. The payload is overwritten by the next Read, so that reading allocates nothing.
func (r *Readers) Read(deadline time.Time) (Event, error) {
	for {
		e, err := r.present()
		if !errors.Is(err, ErrTimeout) {
			return e, err
		}
		wait := 0
		if !deadline.IsZero() {
			wait = int((time.Until(deadline) + time.Millisecond - 1) / time.Millisecond)
		}
		if wait <= 0 {
			return e, err
		}
		count, err := unix.EpollWait(r.poll, r.woken, wait)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return e, fmt.Errorf("wait for an event: %w", err)
		}
		if count > 0 && r.Gather > 0 {
			time.Sleep(min(r.Gather, time.Until(deadline)))
		}
	}
}

// present is the earliest event that is there.
func (r *Readers) present() (Event, error) {
	first := -1
	for i, one := range r.all {
		h := &r.heads[i]
		if !h.isRead && one.ring.AvailableBytes() > 0 {
			var err error
			h.event, err = one.readInto(&h.record, time.Time{})
			h.isRead = err == nil
			if err != nil && !errors.Is(err, ErrTimeout) { // that is: a program is still writing it
				return Event{}, err
			}
		}
		if h.isRead && (first < 0 || h.event.TimeNs < r.heads[first].event.TimeNs) {
			first = i
		}
	}
	if first < 0 {
		return Event{}, ErrTimeout
	}
	r.heads[first].isRead = false
	return r.heads[first].event, nil
}

// Of returns the counts of a stream so far, by its position among the streams of NewReaders.
func (r *Readers) Of(stream int) Summary { return r.all[stream].Summary() }

// By returns the counts of each stream so far.
func (r *Readers) By() (all []Summary) {
	for i := range r.all {
		all = append(all, r.Of(i))
	}
	return all
}

// Close ends all streams, as Reader.Close, and returns the counts of each.
func (r *Readers) Close(last func(Event)) (by []Summary, err error) {
	if r == nil || r.poll < 0 {
		return nil, nil
	}
	if last == nil {
		last = func(Event) {}
	}
	for {
		e, end := r.present()
		if end != nil {
			if !errors.Is(end, ErrTimeout) {
				err = end
			}
			break
		}
		last(e)
	}
	for _, one := range r.all {
		s, closeErr := one.Close(last)
		by, err = append(by, s), errors.Join(err, closeErr)
	}
	err = errors.Join(err, unix.Close(r.poll))
	r.poll = -1
	return by, err
}
