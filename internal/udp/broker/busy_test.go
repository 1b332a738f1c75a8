package broker

import (
	"context"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/udp"
	"golang.org/x/sys/unix"
)

// A holder learns the CPU of each queue, and that it has the driver's work done. It gets its datagrams by that.
func TestBusyPollAndCPU(t *testing.T) {
	b := newBed(t, Options{})
	var mine unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &mine))
	cpu := 0
	for !mine.IsSet(cpu) {
		cpu++
	}
	o := b.offer()
	o.CPUs, o.BusyPoll = []int{cpu, 8000}, 100*time.Microsecond
	must(t, b.broker.Apply([]Offer{o}))
	l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo", Spin: time.Millisecond, Checked: true})
	must(t, err)
	defer func() { must(t, l.Close()) }()
	if !l.BusyPoll || len(l.Queues) != 2 || l.Queues[0].CPU() != cpu || l.Queues[1].CPU() != 8000 {
		t.Fatalf("busy polling %v, CPUs %d and %d", l.BusyPoll, l.Queues[0].CPU(), l.Queues[1].CPU())
	}
	if st := b.broker.Status().Offers[0]; st.BusyPoll != o.BusyPoll || len(st.Lease.CPUs) != 2 || st.Lease.Pinned == nil {
		t.Errorf("before a thread is pinned: %+v", st.Lease)
	}
	pinned, ended := make(chan error, 2), make(chan error, 1)
	go func() { // the thread ends with it, because it stays wired
		pinned <- l.Queues[1].Pin()
		pinned <- l.Queues[0].Pin()
		var now unix.CPUSet
		if err := unix.SchedGetaffinity(0, &now); err != nil || now.Count() != 1 || !now.IsSet(cpu) {
			t.Errorf("a pinned thread may run on %v: %v", now, err)
		}
		ended <- udptest.Echo(l, 0)
	}()
	if err := <-pinned; err == nil {
		t.Error("a thread was pinned to CPU 8000")
	}
	must(t, <-pinned)
	b.until("xsk", nil)
	if st := b.broker.Status().Offers[0].Lease; st.Pinned[cpu] < 1 || st.Pinned[8000] != 0 {
		t.Errorf("after a thread was pinned: %+v", st)
	}
	must(t, b.broker.Apply(nil))
	<-ended
	polls := uint64(0)
	for _, q := range l.Queues {
		polls += q.Counts().Polls
	}
	if polls == 0 {
		t.Error("the driver was never polled")
	}
}

// Without them the holder may be anywhere, and asks for nothing.
func TestWithoutBusyPoll(t *testing.T) {
	b := newBed(t, Options{})
	l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo"})
	must(t, err)
	defer func() { must(t, l.Close()) }()
	batch := make([]udp.Descriptor, 1)
	if q := l.Queues[0]; l.BusyPoll || q.CPU() != -1 || q.Pin() != nil || q.Receive(batch) != 0 || q.Counts().Polls != 0 {
		t.Errorf("busy polling %v, CPU %d, %+v", l.BusyPoll, q.CPU(), q.Counts())
	}
}
