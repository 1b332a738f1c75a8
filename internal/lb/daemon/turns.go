package daemon

import "github.com/shunt-lb/shunt/internal/control"

// turns makes changes begin one after the other, each after the end of the one before, waits included. One
// goroutine makes them all, so that no lock is held for the duration of a change.
type turns struct {
	queue    chan func()
	stopping chan struct{} // closed: no change begins any more
	ended    chan struct{} // closed: none is under way any more
}

func newTurns() turns {
	return turns{queue: make(chan func()), stopping: make(chan struct{}), ended: make(chan struct{})}
}

// run makes changes until stop. own is called when woken receives: it is the daemon's own change.
func (t turns) run(woken <-chan struct{}, own func()) {
	defer close(t.ended)
	for {
		select {
		case <-t.stopping: // also where others are ready
			return
		default:
		}
		select {
		case <-t.stopping:
			return
		case do := <-t.queue:
			do()
		case <-woken:
			own()
		}
	}
}

// take calls do when it is its turn, and returns when do has ended. The error says that do was not called,
// because the daemon stops.
func (t turns) take(do func()) error {
	done := make(chan struct{})
	select {
	case t.queue <- func() { defer close(done); do() }:
		<-done
		return nil
	case <-t.stopping:
		return control.ErrStopping
	}
}

// stop returns when the change that is under way has ended. No further change begins. run must have been
// called.
func (t turns) stop() {
	close(t.stopping)
	<-t.ended
}
