package control

import (
	"sync"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
)

const (
	// behindMax is how many events a watcher may be behind.
	behindMax = 256
	// watchersMax is for both sockets together.
	watchersMax = 32
)

// Events hands what happens on to those who watch. The zero value is ready, and a nil
// *Events takes everything. Nobody who publishes ever waits.
type Events struct {
	mu       sync.Mutex
	watchers map[chan *shuntv1.WatchResponse]bool
}

// Publish tells all watchers. One that is too far behind is let go: its channel is closed.
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

// watch is a new watcher, and how it ends; ok is false when there are too many.
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
