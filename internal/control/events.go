package control

import (
	"sync"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
)

const (
	// behindMax is the number of events that a watcher may be behind.
	behindMax = 256
	// watchersMax is for both sockets together.
	watchersMax = 32
)

// Events passes events to watchers. The zero value is ready, and a nil *Events accepts everything. A publisher
// never waits.
type Events struct {
	mu       sync.Mutex
	watchers map[chan *shuntv1.WatchResponse]bool
}

// Publish sends an event to all watchers. A watcher that is too far behind is dropped: its channel is closed.
func (e *Events) Publish(event *shuntv1.WatchResponse) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for w := range e.watchers {
		select {
		case w <- event:
		default:
			delete(e.watchers, w)
			close(w)
		}
	}
}

// watch returns a new watcher, and the function that ends it; ok is false if there are too many.
func (e *Events) watch() (w chan *shuntv1.WatchResponse, end func(), ok bool) {
	if e == nil {
		return nil, nil, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.watchers) >= watchersMax {
		return nil, nil, false
	}
	if e.watchers == nil {
		e.watchers = map[chan *shuntv1.WatchResponse]bool{}
	}
	w = make(chan *shuntv1.WatchResponse, behindMax)
	e.watchers[w] = true
	return w, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.watchers, w)
	}, true
}
