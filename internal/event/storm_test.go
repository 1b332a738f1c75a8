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

// loadStorm loads the program that writes events, and begins to read them.
func loadStorm(t *testing.T) (*ebpf.Program, *event.Reader) {
	t.Helper()
	program, maps := loadStormMaps(t)
	reader, err := event.NewReader(maps[event.MapEvents], maps[event.MapSequence])
	if err != nil {
		t.Fatal(err)
	}
	return program, reader
}

// loadStormMaps loads the program that writes events, with its maps; it is attached to nothing.
func loadStormMaps(t *testing.T) (*ebpf.Program, map[string]*ebpf.Map) {
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
	return coll.Programs["sh_storm"], coll.Maps
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

// storms are programs that send, each into a stream of its own, and the reader of all streams.
func storms(t *testing.T, number int) (programs []*ebpf.Program, readers *event.Readers) {
	t.Helper()
	var streams []event.Stream
	for range number {
		program, maps := loadStormMaps(t)
		programs, streams = append(programs, program), append(streams, event.Stream{Events: maps[event.MapEvents], Sequence: maps[event.MapSequence]})
	}
	readers, err := event.NewReaders(streams...)
	if err != nil {
		t.Fatal(err)
	}
	return programs, readers
}

// Ten times as many events as one stream has room for take no room of another, and each stream counts its own loss.
func TestAStormTakesNoRoomOfAnotherStream(t *testing.T) {
	programs, readers := storms(t, 2)
	const few = 5
	many := 10 * uint64(stormRing) / event.HeaderSize
	for storm := range 2 { // of the first stream, and of the second
		send(t, programs[storm], many)
		send(t, programs[1-storm], few)
		before := readers.By()
		for {
			if _, err := readers.Read(time.Time{}); errors.Is(err, event.ErrTimeout) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		if got := readers.By()[1-storm].Received - before[1-storm].Received; got != few {
			t.Errorf("%d events of the quiet stream were read, want %d", got, few)
		}
		if got := readers.By()[storm].Received - before[storm].Received; got == 0 || got >= many {
			t.Errorf("%d of %d events of the storm were read", got, many)
		}
	}
	// An event that comes while Read waits is read, of either stream, and the last events are read by Close.
	go send(t, programs[1], 1)
	if _, err := readers.Read(time.Now().Add(time.Minute)); err != nil {
		t.Error(err)
	}
	send(t, programs[0], 3)
	last := 0
	by, err := readers.Close(func(event.Event) { last++ })
	if err != nil || last != 3 || len(by) != 2 {
		t.Errorf("%d events at the end, %+v, %v", last, by, err)
	}
	for i, sent := range []uint64{many + few + 3, many + few + 1} {
		if by[i].Received+by[i].Lost != sent || by[i].Lost == 0 {
			t.Errorf("stream %d: %d were sent, %+v", i, sent, by[i])
		}
	}
	var none *event.Readers
	for _, r := range []*event.Readers{readers, none} {
		if by, err := r.Close(nil); by != nil || err != nil {
			t.Errorf("closed again: %+v, %v", by, err)
		}
	}
}

// Events of several streams are read in the order of their time, also at the end.
func TestStreamsAreReadInOrder(t *testing.T) {
	programs, readers := storms(t, 3)
	order := []int{2, 0, 0, 1, 2, 1, 0, 2}
	for range 2 {
		for i := range order {
			send(t, programs[order[i]], 1)
		}
	}
	last, n := uint64(0), 0
	take := func(e event.Event) {
		if e.TimeNs < last {
			t.Errorf("event %d is older than the one before", n)
		}
		last, n = e.TimeNs, n+1
	}
	for range order {
		e, err := readers.Read(time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		take(e)
	}
	if _, err := readers.Close(take); err != nil || n != 2*len(order) {
		t.Errorf("%d events, want %d, %v", n, 2*len(order), err)
	}
}
