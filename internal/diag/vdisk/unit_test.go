package vdisk

import (
	"bytes"
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/test/golden"
)

// happen is an event of the thread; later ones get later times.
type story struct {
	now    uint64
	events []Event
}

func (s *story) at(ns uint64, tid uint32, kind vdiskVdiskKind, e vdiskVdiskEvent) {
	e.Kind = uint8(kind)
	s.now = ns
	s.events = append(s.events, Event{TimeNs: ns, TID: tid, vdiskVdiskEvent: e})
}

// oneWrite is a write by a thread of qemu, whose bio is split over two requests to a driver. The times in the layers are
// 100, 50, 70 (10 of it at the end), 0, 40, 300 and 40.
func oneWrite(s *story, from uint64, handle, offset, stack uint64) {
	s.at(from, 1, vdiskVdiskKindVDISK_BEGIN, vdiskVdiskEvent{Id: 0xd, Offset: offset, Bytes: 8192, Other: 7, Op: write, Stack: 1 << 40})
	s.at(from+1, 1, vdiskVdiskKindVDISK_COROUTINE, vdiskVdiskEvent{Id: handle, Stack: 1<<40 - 200})
	s.at(from+2, 1, vdiskVdiskKindVDISK_BLOCK, vdiskVdiskEvent{Id: 1, Offset: offset, Bytes: 8192, Op: write, Stack: stack})
	s.at(from+50, 1, vdiskVdiskKindVDISK_BLOCK, vdiskVdiskEvent{Id: 2, Offset: offset + 1<<30, Bytes: 8192, Op: write, Stack: stack - 4096})
	s.at(from+100, 1, vdiskVdiskKindVDISK_HAND, vdiskVdiskEvent{Result: 1, Stack: stack - 4200})
	s.at(from+150, 2, vdiskVdiskKindVDISK_CALL, vdiskVdiskEvent{Id: 18, Offset: offset + 1<<30, Bytes: 8192, Op: write, Result: 9})
	sector := offset / 512
	s.at(from+210, 2, vdiskVdiskKindVDISK_BIO, vdiskVdiskEvent{Id: 0xb0 + offset, Offset: sector, Bytes: 8192, Op: write, Device: 5, Inode: 3, FileDevice: 5, Position: offset + 1<<30, Other: 0xabc})
	s.at(from+250, 2, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: 0x100 + offset, Offset: sector, Bytes: 4096, Op: write, Device: 5})
	s.at(from+260, 2, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: 0x101 + offset, Offset: sector + 8, Bytes: 4096, Op: write, Device: 5})
	s.at(from+400, 3, vdiskVdiskKindVDISK_COMPLETE, vdiskVdiskEvent{Id: 0x100 + offset, Offset: sector, Bytes: 4096, Op: write, Device: 5})
	s.at(from+550, 3, vdiskVdiskKindVDISK_COMPLETE, vdiskVdiskEvent{Id: 0x101 + offset, Offset: sector + 8, Bytes: 4096, Op: write, Device: 5})
	s.at(from+560, 2, vdiskVdiskKindVDISK_RETURN, vdiskVdiskEvent{Id: 18, Op: write, Result: 8192})
	s.at(from+600, 1, vdiskVdiskKindVDISK_FINISH, vdiskVdiskEvent{Id: handle, Other: 7})
}

var timesOfOneWrite = map[string]uint64{"qemu": 100, "hand-over": 50, "vfs": 70, "limit": 0, "queue": 40, "device": 300, "return": 40}

func aTail() *Tail {
	offset := uint64(1 << 30)
	return &Tail{Seconds: 2, Ended: "the duration is over", Events: event.Summary{Received: 30, Lost: 1}, NotRun: map[string]uint64{"bios": 2}, Notes: []string{"a note"},
		Files: []File{{Path: "/vm/a.qcow2", Descriptors: []int{9}, Device: 5, Inode: 3, Format: "qcow2", Chain: []string{"/vm/a.qcow2", "/vm/base.qcow2"},
			Map:     []Stretch{{Length: 1 << 20, Present: true, Data: true, Offset: &offset}},
			Extents: []Extent{{Logical: 1 << 30, Length: 1 << 20}}, Direct: true}},
		Disks: []Disk{{Device: 5, Whole: 5, Name: "sda"}}}
}

// TestOneWrite has each time in its layer, also when two requests are on the same stack one after the other, and on stacks
// beside each other at a time.
func TestOneWrite(t *testing.T) {
	s := &story{}
	oneWrite(s, 1000, 0xa0, 0, 1<<41)
	oneWrite(s, 2000, 0xa0, 8192, 1<<41)
	oneWrite(s, 2005, 0xa1, 16384, 1<<41+1<<20)
	for i := range s.events[26:] {
		if s.events[26+i].TID == 2 {
			s.events[26+i].TID = 4
		}
	}
	r := Of(&Recording{Events: s.events, Tail: aTail()})
	if r.Sum.Requests != 3 || r.Sum.Joined != 3 || r.Sum.Offsets[same] != 3 || r.Sum.Extents[same] != 3 || r.Sum.Slow() != "device" {
		t.Fatalf("%+v", r.Sum)
	}
	for i, one := range r.Requests {
		want := timesOfOneWrite
		if i == 2 { // its thread's events are between those of the other one
			want = nil
		}
		if want != nil && !maps.Equal(one.Layers, want) {
			t.Errorf("request %d: %v, want %v", i, one.Layers, want)
		}
		if one.Ns != 600 || one.Offset != uint64(i)*8192 || one.Mapped[0].Offset != 1<<30+one.Offset || one.Sectors[0].Sector != one.Offset/512 {
			t.Errorf("request %d: %+v", i, one)
		}
	}
}

// TestLayersAddUp takes events away at random: the layers of each request that has an end add up to its time, and each
// request that is not followed has a reason.
func TestLayersAddUp(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		s := &story{}
		for i := range uint64(3) {
			oneWrite(s, 1000+random.Uint64N(700), 0xa0+i, i*8192, 1<<41+i<<20)
		}
		s.events = slices.DeleteFunc(s.events, func(Event) bool { return random.IntN(12) == 0 })
		r := Of(&Recording{Events: s.events, Tail: aTail()})
		for _, one := range r.Requests {
			sum := uint64(0)
			for _, ns := range one.Layers {
				sum += ns
			}
			if sum != one.Ns || one.Ns == 0 && one.Missing == "" {
				t.Fatalf("%+v", one)
			}
		}
	}
}

// TestMoved has a read of the backing file before a write that made a copy of it, and after that.
func TestMoved(t *testing.T) {
	for _, test := range []struct {
		read, write uint64 // times
		want        string
	}{{1000, 2000, moved}, {2000, 1000, other}} {
		s := &story{}
		oneWrite(s, test.read, 0xa0, 0, 1<<41)
		for i := range s.events {
			e := &s.events[i]
			e.Op = 0
			if e.Inode != 0 {
				e.Inode = 4
			}
		}
		oneWrite(s, test.write, 0xa1, 0, 1<<41+1<<20)
		tail := aTail()
		tail.Files = append(tail.Files, File{Path: "/vm/base.qcow2", Descriptors: []int{10}, Device: 5, Inode: 4, Direct: true})
		r := Of(&Recording{Events: s.events, Tail: tail})
		if r.Sum.Joined != 2 || r.Sum.Offsets[same] != 1 || r.Sum.Offsets[test.want] != 1 {
			t.Errorf("want %s: %+v", test.want, r.Sum)
		}
	}
}

// TestHoles has IO whose first half is in a hole of the file.
func TestHoles(t *testing.T) {
	s := &story{}
	oneWrite(s, 1000, 0xa0, 0, 1<<41)
	for i := range s.events {
		if e := &s.events[i]; vdiskVdiskKind(e.Kind) == vdiskVdiskKindVDISK_BIO {
			e.Offset, e.Bytes, e.Result = 8, 4096, 1+4096
		}
	}
	one := Of(&Recording{Events: s.events, Tail: aTail()}).Requests[0]
	if one.Extents != same || len(one.Sectors) != 1 || one.Sectors[0].Offset != 1<<30+4096 {
		t.Errorf("%+v", one)
	}
}

// TestHeldBackInQemu has two writes that wait before qemu's block layer, coroutines of no request that wake them, as of
// qemu's throttle, and a flush that waits while the first one goes on.
func TestHeldBackInQemu(t *testing.T) {
	s := &story{}
	oneWrite(s, 1000, 0xa0, 0, 1<<41)
	first := len(s.events)
	oneWrite(s, 1010, 0xa1, 8192, 1<<41+1<<20)
	for i := range s.events {
		e := &s.events[i]
		switch kind := vdiskVdiskKind(e.Kind); {
		case kind == vdiskVdiskKindVDISK_BEGIN || kind == vdiskVdiskKindVDISK_COROUTINE:
		case i < first:
			e.TimeNs += 1000
		default:
			e.TimeNs += 3000
		}
	}
	for _, at := range []uint64{1900, 3900} {
		s.at(at, 1, vdiskVdiskKindVDISK_COROUTINE, vdiskVdiskEvent{Id: 0xeee, Stack: 1<<40 - 400})
	}
	s.at(2060, 1, vdiskVdiskKindVDISK_BEGIN, vdiskVdiskEvent{Id: 0xd, Op: uint8(vdiskVdiskOpVDISK_FLUSH), Stack: 1 << 40})
	s.at(2061, 1, vdiskVdiskKindVDISK_COROUTINE, vdiskVdiskEvent{Id: 0xa2, Stack: 1<<40 - 200})
	s.at(2700, 1, vdiskVdiskKindVDISK_FINISH, vdiskVdiskEvent{Id: 0xa2})
	r := Of(&Recording{Events: s.events, Tail: aTail()})
	if r.Sum.Requests != 3 || r.Sum.Joined != 3 || r.Sum.Offsets[same] != 2 || r.Sum.Extents[same] != 2 || r.Sum.Slow() != "qemu" || r.Sum.Stray["block"] != 0 {
		t.Fatalf("%+v", r.Sum)
	}
	for i, held := range []uint64{1000, 3000} {
		want := maps.Clone(timesOfOneWrite)
		want["qemu"] += held
		if one := r.Requests[i]; !maps.Equal(one.Layers, want) {
			t.Errorf("request %d: %v, want %v", i, one.Layers, want)
		}
	}
}

// TestHeldBack has a bio that a task of the kernel queues late.
func TestHeldBack(t *testing.T) {
	s := &story{}
	oneWrite(s, 1000, 0xa0, 0, 1<<41)
	for i, e := range s.events {
		if vdiskVdiskKind(e.Kind) == vdiskVdiskKindVDISK_BIO {
			s.events[i].IsForeign, s.events[i].TID = 1, 77
		}
	}
	one := Of(&Recording{Events: s.events, Tail: aTail()}).Requests[0]
	want := maps.Clone(timesOfOneWrite)
	want["vfs"], want["limit"] = 10, 60
	if !maps.Equal(one.Layers, want) || !one.Sectors[0].Held {
		t.Errorf("%+v, want %v", one, want)
	}
}

// TestEndIsForgotten has the kernel refuse to follow a request, which the report names.
func TestEndIsForgotten(t *testing.T) {
	s := &story{}
	oneWrite(s, 1000, 0xa0, 0, 1<<41)
	for _, failed := range []int32{0, -110} {
		for i, e := range s.events {
			if vdiskVdiskKind(e.Kind) == vdiskVdiskKindVDISK_ISSUE {
				s.events[i].Result = failed
			}
		}
		events := slices.DeleteFunc(slices.Clone(s.events), func(e Event) bool { return vdiskVdiskKind(e.Kind) == vdiskVdiskKindVDISK_COMPLETE })
		want := endUnseen
		if failed != 0 {
			want = endForgotten
		}
		if got := Of(&Recording{Events: events, Tail: aTail()}).Requests[0].Missing; got != want {
			t.Errorf("%d: %q, want %q", failed, got, want)
		}
	}
}

func TestMapped(t *testing.T) {
	at := func(n uint64) *uint64 { return &n }
	f := File{Path: "a", Chain: []string{"a", "b"}, Map: []Stretch{
		{Start: 0, Length: 100, Depth: 1, Data: true, Offset: at(1000)}, {Start: 100, Length: 100, Data: true, Offset: at(500)},
		{Start: 200, Length: 100, Data: true, Offset: at(600)}, {Start: 300, Length: 100, Depth: 1, Zero: true}, {Start: 400, Length: 100, Data: true, Compressed: true, Offset: at(1)}}}
	for _, test := range []struct {
		offset, bytes uint64
		want          []FileRange
		complete      bool
	}{
		{50, 100, []FileRange{{"b", 1050, 50}, {"a", 500, 50}}, true},
		{150, 100, []FileRange{{"a", 550, 100}}, true}, // two stretches that follow each other
		{300, 100, []FileRange{}, true},
		{350, 100, []FileRange{}, false},
		{450, 200, []FileRange{}, false},
		{600, 1, []FileRange{}, false},
	} {
		got, complete := mapped(f, test.offset, test.bytes)
		if !reflect.DeepEqual(got, test.want) || complete != test.complete {
			t.Errorf("%d, %d bytes: %v, %v; want %v, %v", test.offset, test.bytes, got, complete, test.want, test.complete)
		}
	}
}

func aRecording(t testing.TB) []byte {
	t.Helper()
	s := &story{}
	oneWrite(s, 1_000_000, 0xa0, 0, 1<<41)
	oneWrite(s, 2_000_000, 0xa1, 8192, 1<<41)
	s.events = s.events[:len(s.events)-1]
	head := Head{PID: 4711, Comm: "qemu\x1b[2J", Executable: "/usr/bin/qemu-system-x86_64", Began: "2026-01-02T03:04:05Z", BTF: "a file", Notes: []string{},
		Sensors: []line.Sensor{{Sensor: "reads", Watches: "reads that the guest asks for", Way: "uprobe blk_aio_preadv", Refused: []line.Refused{}}, {Sensor: "to io_uring", Loses: withoutHand, Refused: []line.Refused{{Way: "uprobe luring_co_submit", Reason: "no such symbol"}}}}}
	return encode(t, &Recording{Head: head, Events: s.events, Tail: aTail()})
}

// encode writes a recording as the recorder does.
func encode(t testing.TB, rec *Recording) []byte {
	t.Helper()
	var b bytes.Buffer
	b.WriteString(magic)
	if _, err := writeJSON(&b, frameHead, rec.Head); err != nil {
		t.Fatal(err)
	}
	for _, e := range rec.Events {
		var payload bytes.Buffer
		if err := binary.Write(&payload, binary.LittleEndian, e.vdiskVdiskEvent); err != nil {
			t.Fatal(err)
		}
		b.Write(appendEvent(nil, event.Event{Header: event.Header{TimeNs: e.TimeNs, Tid: e.TID}, Payload: payload.Bytes()}))
	}
	if _, err := writeJSON(&b, frameTail, rec.Tail); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestOutput(t *testing.T) {
	rec, err := Decode(bytes.NewReader(aRecording(t)))
	if err != nil {
		t.Fatal(err)
	}
	r := Of(rec)
	var people, programs bytes.Buffer
	if err := r.Print(&people, 10); err != nil {
		t.Fatal(err)
	}
	if err := r.PrintJSON(&programs); err != nil {
		t.Fatal(err)
	}
	var plot bytes.Buffer
	if err := r.Plot(&plot, 10); err != nil {
		t.Fatal(err)
	}
	// A recording of today is read by later versions too.
	golden.Require(t, "testdata/two-writes.rec", string(aRecording(t)))
	golden.Require(t, "testdata/plot.svg", plot.String())
	golden.Require(t, "testdata/report.txt", people.String())
	golden.Require(t, "testdata/report.json", programs.String())
}

// TestRecordingsThatAreBroken are refused, or read as far as they go.
func TestRecordingsThatAreBroken(t *testing.T) {
	whole := aRecording(t)
	for n := range whole {
		rec, err := Decode(bytes.NewReader(whole[:n]))
		if (err == nil) != (rec != nil) || err == nil && rec.Tail != nil {
			t.Fatalf("%d bytes: %v, %v", n, rec, err)
		}
		if err == nil {
			var out strings.Builder
			if err := Of(rec).Print(&out, -1); err != nil || !strings.Contains(out.String(), "before it ended the recording") {
				t.Fatalf("%d bytes: %v %s", n, err, out.String())
			}
		}
	}
	for _, wrong := range []string{"", "text", magic + "\x00\x00\x00\x00e", magic + "\xff\xff\xff\xffh", string(whole) + "\x00\x00\x00\x00t"} {
		if _, err := Decode(strings.NewReader(wrong)); err == nil {
			t.Errorf("%q is read", wrong[:min(20, len(wrong))])
		}
	}
}

func FuzzDecode(f *testing.F) {
	whole := aRecording(f)
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	host, guest := halves(rand.New(rand.NewPCG(4, 0)), 3, 5_000_000_000, 0)
	f.Add(encode(f, guest))
	s := &story{}
	oneWrite(s, 1000, 0xa0, 0, 1<<41)
	atProbes(s)
	f.Add(encode(f, &Recording{Head: Head{Probes: []string{"qemu:a", "qemu:b"}}, Events: s.events, Tail: aTail()}))
	f.Fuzz(func(t *testing.T, data []byte) {
		rec, err := Decode(bytes.NewReader(data))
		if err != nil {
			return
		}
		var out bytes.Buffer
		r := Of(rec)
		if err := r.Print(&out, 5); err != nil {
			t.Fatal(err)
		}
		if err := r.PrintJSON(&out); err != nil {
			t.Fatal(err)
		}
		// As either half, regardless of the head.
		inside := OfGuest(rec)
		for _, err := range []error{inside.Print(&out, 5), inside.Chain(&out, -1), r.Chain(&out, -1)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		for _, half := range []*Recording{host, guest} {
			if both, err := Join(half, rec); err == nil {
				if err := both.Print(&out, 5); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}
