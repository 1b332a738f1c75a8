package event

import (
	"bytes"
	"encoding/binary"
	"testing"
	"unsafe"
)

func encoded(h abiEventHeader, payload []byte) []byte {
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, h); err != nil {
		panic(err)
	}
	return append(b.Bytes(), payload...)
}

func TestDecodeReadsWhatCWrites(t *testing.T) {
	if unsafe.Sizeof(abiEventHeader{}) != HeaderSize {
		t.Fatalf("struct event_header has %d bytes, and HeaderSize is %d", unsafe.Sizeof(abiEventHeader{}), HeaderSize)
	}
	record := encoded(abiEventHeader{TimeNs: 1, Sequence: 2, CgroupId: 3, TaskStartNs: 4, Cpu: 5, Tgid: 6, Tid: 7, Netns: 8, Mntns: 9,
		Size: 3, Sensor: 10, Version: Version}, []byte("abc\x00\x00\x00\x00\x00"))
	got, err := Decode(record)
	if err != nil {
		t.Fatal(err)
	}
	want := Header{TimeNs: 1, Sequence: 2, CgroupID: 3, TaskStartNs: 4, CPU: 5, Tgid: 6, Tid: 7, Netns: 8, Mntns: 9, Sensor: 10}
	if got.Header != want || string(got.Payload) != "abc" {
		t.Errorf("got %+v %q, want %+v abc", got.Header, got.Payload, want)
	}
}

func TestDecodeRefuses(t *testing.T) {
	good := abiEventHeader{Version: Version, Size: 4}
	for name, record := range map[string][]byte{
		"nothing":         nil,
		"short header":    encoded(good, nil)[:HeaderSize-1],
		"short payload":   encoded(good, []byte("abc")),
		"huge payload":    encoded(abiEventHeader{Version: Version, Size: 1<<32 - 1}, []byte("abc")),
		"another version": encoded(abiEventHeader{Version: Version + 1}, nil),
	} {
		if e, err := Decode(record); err == nil {
			t.Errorf("%s: decoded as %+v", name, e)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(encoded(abiEventHeader{Version: Version, Size: 4}, []byte("abcd")))
	f.Add(encoded(abiEventHeader{Version: Version, Size: 1 << 31}, nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, record []byte) {
		e, err := Decode(record)
		if err == nil && len(e.Payload)+HeaderSize > len(record) {
			t.Fatalf("a payload of %d bytes from a record of %d", len(e.Payload), len(record))
		}
		// A stream of any bytes neither panics nor claims more losses than numbers it has seen.
		r := Reader{}
		r.take(record)
		if s := r.Summary(); s.Received != 1 || (s.Broken == 1) == (err == nil && e.CPU < 1<<13) {
			t.Fatalf("summary %+v, decoded with %v", s, err)
		}
	})
}

func TestSummaryCountsGaps(t *testing.T) {
	r := Reader{}
	for _, e := range []struct {
		cpu      uint32
		sequence uint64
	}{{0, 0}, {0, 2}, {0, 1}, {0, 5}, {3, 1}} { // 2 came before 1: one program interrupted the other
		r.take(encoded(abiEventHeader{Cpu: e.cpu, Sequence: e.sequence, Version: Version}, nil))
	}
	if got, want := r.Summary(), (Summary{Received: 5, Lost: 3}); got != want { // 3, 4 of CPU 0; 0 of CPU 3
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got, want := r.summary([]uint64{8, 1, 0, 2}), (Summary{Received: 5, Lost: 6}); got != want {
		t.Errorf("at the end: got %+v, want %+v", got, want)
	}
	r.take([]byte("broken"))
	if got, want := r.summary([]uint64{9, 1, 0, 2}), (Summary{Received: 6, Lost: 6, Broken: 1}); got != want {
		t.Errorf("with a broken one: got %+v, want %+v", got, want)
	}
}
