package event_test

import (
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/event/storm"
)

// stormRing is the size of the buffer in bytes: a page, the smallest there is.
var stormRing = uint32(os.Getpagesize())

// loadStorm loads the program that writes events; it is attached to nothing.
func loadStorm(t *testing.T) (*ebpf.Program, *event.Reader) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	spec, err := storm.LoadStorm()
	if err != nil {
		t.Fatal(err)
	}
	for name := range spec.Programs {
		if name != "sh_storm" {
			delete(spec.Programs, name)
		}
	}
	spec.Maps[event.MapEvents].MaxEntries = stormRing
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(coll.Close)
	reader, err := event.NewReader(coll.Maps[event.MapEvents], coll.Maps[event.MapSequence])
	if err != nil {
		t.Fatal(err)
	}
	return coll.Programs["sh_storm"], reader
}

// send runs the program, which writes so many events. It may be run on any number of CPUs at once.
func send(t *testing.T, program *ebpf.Program, events uint64) {
	t.Helper()
	arguments := make([]byte, 8)
	binary.NativeEndian.PutUint64(arguments, events)
	if _, err := program.Run(&ebpf.RunOptions{Context: arguments}); err != nil {
		t.Error(err)
	}
}

// TestLossIsExact writes far more than the buffer holds, from all CPUs, while the reader reads and
// after it: lost = sent − received.
func TestLossIsExact(t *testing.T) {
	program, reader := loadStorm(t)
	const runs, each = 40, 1000
	senders := runtime.NumCPU() + 1
	var group sync.WaitGroup
	for range senders {
		group.Go(func() {
			for range runs {
				send(t, program, each)
			}
		})
	}
	done := make(chan struct{})
	go func() { group.Wait(); close(done) }()
	received := uint64(0)
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		switch e, err := reader.Read(time.Now().Add(time.Millisecond)); {
		case err == nil:
			received++
			if int(e.Tgid) != os.Getpid() || e.TaskStartNs == 0 || e.Mntns == 0 || len(e.Payload) != 8 || e.Sensor != 7 {
				t.Fatalf("an event of another process, or a header with gaps: %+v", e)
			}
		case !errors.Is(err, event.ErrTimeout):
			t.Fatal(err)
		}
	}
	send(t, program, 10*uint64(stormRing)/event.HeaderSize) // ten times the buffer, and nothing after it shows the gap
	summary, err := reader.Close(func(event.Event) { received++ })
	if err != nil {
		t.Fatal(err)
	}
	sent := uint64(senders)*runs*each + 10*uint64(stormRing)/event.HeaderSize
	t.Logf("%d sent, %+v", sent, summary)
	if summary.Received != received || summary.Lost != sent-received || summary.Broken != 0 {
		t.Errorf("%d sent and %d received, but %+v", sent, received, summary)
	}
	if received == 0 || summary.Lost == 0 {
		t.Errorf("the test wants both received and lost events: %+v", summary)
	}
}

func TestNothingIsLostWhereThereIsRoom(t *testing.T) {
	program, reader := loadStorm(t)
	send(t, program, 10)
	enough, told := errors.New("enough"), 0
	if err := reader.Drain(func(event.Event) error { told++; return enough }); !errors.Is(err, enough) || told != 1 {
		t.Errorf("%v, and %d events were told", err, told)
	}
	if summary, err := reader.Close(nil); err != nil || summary != (event.Summary{Received: 10}) {
		t.Errorf("got %+v, %v, want 10 received", summary, err)
	}
	var none *event.Reader
	for _, r := range []*event.Reader{reader, none} {
		if summary, err := r.Close(func(event.Event) { t.Error("an event of a closed stream") }); err != nil || summary != (event.Summary{}) {
			t.Errorf("closed again: %+v, %v", summary, err)
		}
	}
}
