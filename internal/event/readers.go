package event

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Stream is the two maps of one stream: bpf/event/event.h has one, bpf/event/ring.h has programs make others.
type Stream struct{ Events, Sequence *ebpf.Map }

// Readers reads several streams of a collection, whose events cannot take each other's room, in the order of their time. It is for
// one goroutine.
type Readers struct {
	all   []*Reader
	heads []*Event // by stream: the next one; nil: none was read
	poll  int      // an epoll of all buffers
}

// NewReaders begins to read. The maps stay the caller's.
func NewReaders(streams ...Stream) (*Readers, error) {
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("wait for several buffers of events: %w", err)
	}
	r := &Readers{poll: poll, heads: make([]*Event, len(streams))}
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

// Read waits for an event of any stream, as Reader.Read.
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
		if _, err := unix.EpollWait(r.poll, make([]unix.EpollEvent, 1), wait); err != nil && !errors.Is(err, unix.EINTR) {
			return e, fmt.Errorf("wait for an event: %w", err)
		}
	}
}

// present is the earliest event that is there.
func (r *Readers) present() (Event, error) {
	first := -1
	for i, one := range r.all {
		if r.heads[i] == nil && one.ring.AvailableBytes() > 0 {
			e, err := one.Read(time.Time{})
			if err == nil {
				r.heads[i] = &e
			} else if !errors.Is(err, ErrTimeout) { // else a program is still writing it
				return e, err
			}
		}
		if r.heads[i] != nil && (first < 0 || r.heads[i].TimeNs < r.heads[first].TimeNs) {
			first = i
		}
	}
	if first < 0 {
		return Event{}, ErrTimeout
	}
	e := *r.heads[first]
	r.heads[first] = nil
	return e, nil
}

// By is how each stream went so far.
func (r *Readers) By() (all []Summary) {
	for _, one := range r.all {
		all = append(all, one.Summary())
	}
	return all
}

// Close ends all streams, as Reader.Close, and is how each went.
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
