package xsk

import (
	"os"
	"testing"
	"time"
)

// A waiter that spins for as long as it may sees the ring, and another file that can be read, long before its time is over.
func TestSpinningSeesOtherFiles(t *testing.T) {
	f := newFake(t, 64, false, true, 0)
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close() //nolint:errcheck // only the other end is written to
	waiter := NewWaiter([]*Queue{f.queue}, []*Socket{{fd: -1}}, int(r.Fd()))
	waiter.Spin = 1<<63 - 1
	if ready, err := waiter.Wait(5 * time.Millisecond); ready || err != nil {
		t.Errorf("nothing is there: %v, %v", ready, err)
	}
	const long = time.Minute
	for what, bring := range map[string]func(){
		"a file that can be read": func() { _, err := w.Write([]byte{1}); must(t, err) },
		"a packet":                func() { f.deliver(1) },
	} {
		began := time.Now()
		time.AfterFunc(5*time.Millisecond, bring) // after many looks, mostly
		if ready, err := waiter.Wait(long); !ready || err != nil || time.Since(began) >= long {
			t.Errorf("%s: %v, %v after %s", what, ready, err, time.Since(began))
		}
	}
	if waiter.Wakeups != 0 {
		t.Errorf("it did not sleep, and woke %d times", waiter.Wakeups)
	}
	must(t, w.Close())
}
