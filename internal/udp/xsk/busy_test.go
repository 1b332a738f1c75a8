package xsk

import "testing"

// Where the program has the driver's work done, an empty ring asks for it, and one with packets does not.
func TestBusyPoll(t *testing.T) {
	f := newFake(t, 64, false, true, 0xfffffff0)
	comes := 0
	f.queue.work = func() { f.deliver(comes) }
	batch := make([]Descriptor, 8)
	if n := f.queue.Recv(batch); n != 0 || f.queue.Counts().Polls != 1 {
		t.Errorf("nothing comes: %d received, %+v", n, f.queue.Counts())
	}
	comes = 3
	if n := f.queue.Recv(batch[:2]); n != 2 || f.queue.Counts().Polls != 2 {
		t.Errorf("%d received, %+v", n, f.queue.Counts())
	}
	f.queue.Release(batch[:2])
	comes = 0
	if n := f.queue.Recv(batch); n != 1 || f.queue.Counts().Polls != 2 {
		t.Errorf("what is there already: %d received, %+v", n, f.queue.Counts())
	}
	comes = 1
	if w := NewWaiter([]*Queue{f.queue}, nil); !w.waiting() || f.queue.Counts().Polls != 3 {
		t.Errorf("a waiter did not ask: %+v", f.queue.Counts())
	}
}
