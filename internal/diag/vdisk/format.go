package vdisk

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/event"
)

// A recording is a file of frames, after the magic: the length of the content (4 bytes), its type (1), and the content.
// Numbers are little-endian. The first frame is the head, the last one the tail, and events are between them.
const (
	magic     = "shuntvd1"
	frameHead = 'h'
	frameRow  = 'e'
	frameTail = 't'

	frameBytes = 5
	eventBytes = 16 + 72 // time, thread, 0, struct vdisk_event
	// jsonMax limits heads and tails: a map of a million entries has some 100 MB.
	jsonMax = 256 << 20
)

// Event is an event of the recorder, with the time in nanoseconds of CLOCK_BOOTTIME.
type Event struct {
	TimeNs uint64
	TID    uint32
	vdiskVdiskEvent
}

// Kinds of recordings. Recordings from before the guest's half have none, and are the host's.
const (
	KindHost  = "host"
	KindGuest = "guest"
)

// Head has the facts that are known when a recording begins.
type Head struct {
	Kind       string        `json:"kind,omitempty"`
	PID        int           `json:"pid"`
	Comm       string        `json:"comm"`
	Executable string        `json:"executable"`
	Began      string        `json:"began"` // RFC 3339
	BTF        string        `json:"btf"`
	Sensors    []line.Sensor `json:"sensors"`
	Notes      []string      `json:"notes"`            // further losses, one sentence each
	Probes     []string      `json:"probes,omitempty"` // an event of a probe has its index here
}

// Tail has the facts that are known when the recording has ended.
type Tail struct {
	Seconds float64           `json:"seconds"`
	Ended   string            `json:"ended"` // the reason
	Events  event.Summary     `json:"events"`
	Skipped uint64            `json:"skipped"` // events that came when the file had reached its limit
	NotRun  map[string]uint64 `json:"not_run"` // by sensor: the number of times that the kernel did not run it
	Files   []File            `json:"files"`   // that the process read or wrote
	Disks   []Disk            `json:"disks"`
	Notes   []string          `json:"notes"`
	Tasks   map[uint32]Task   `json:"tasks,omitempty"` // of a guest, by thread
}

// Task is a thread of a guest.
type Task struct {
	PID  int    `json:"pid"`
	Comm string `json:"comm"`
}

// Recording is a file of the recorder.
type Recording struct {
	Head   Head
	Events []Event
	Tail   *Tail // nil: the recorder did not end the recording
	Cut    bool  // the file ends in the middle of a frame
}

func writeFrame(w io.Writer, kind byte, content []byte) error {
	frame := binary.LittleEndian.AppendUint32(make([]byte, 0, frameBytes+len(content)), uint32(len(content)))
	frame = append(append(frame, kind), content...)
	_, err := w.Write(frame)
	return err
}

func writeJSON(w io.Writer, kind byte, v any) (int, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return 0, err
	}
	if len(text) > jsonMax {
		return 0, fmt.Errorf("a part of the recording has %d bytes, and at most %d are possible", len(text), jsonMax)
	}
	return frameBytes + len(text), writeFrame(w, kind, text)
}

// appendEvent encodes an event of the program, whose payload is little-endian already: only amd64 is supported.
func appendEvent(b []byte, e event.Event) []byte {
	b = binary.LittleEndian.AppendUint32(b, eventBytes)
	b = append(b, frameRow)
	b = binary.LittleEndian.AppendUint64(b, e.TimeNs)
	b = binary.LittleEndian.AppendUint32(b, e.Tid)
	b = binary.LittleEndian.AppendUint32(b, 0)
	return append(b, e.Payload...)
}

func decodeEvent(content []byte) (e Event, err error) {
	if len(content) != eventBytes {
		return e, fmt.Errorf("an event has %d bytes, and shunt knows events of %d", len(content), eventBytes)
	}
	e.TimeNs = binary.LittleEndian.Uint64(content)
	e.TID = binary.LittleEndian.Uint32(content[8:])
	err = binary.Read(bytes.NewReader(content[16:]), binary.LittleEndian, &e.vdiskVdiskEvent)
	return e, err
}

// Decode reads a recording. If it was not ended, or is cut off, Decode reads as far as it goes.
func Decode(r io.Reader) (*Recording, error) {
	start := make([]byte, len(magic))
	if _, err := io.ReadFull(r, start); err != nil || string(start) != magic {
		return nil, errors.New("it is not a recording of `shunt diag vdisk record`, or another version of shunt made it")
	}
	rec := &Recording{}
	for first := true; ; first = false {
		kind, content, err := readFrame(r)
		switch {
		case errors.Is(err, io.EOF) && !first:
			return rec, nil
		case errors.Is(err, io.ErrUnexpectedEOF) && !first:
			rec.Cut = true
			return rec, nil
		case err != nil:
			return nil, err
		}
		if first != (kind == frameHead) || rec.Tail != nil {
			return nil, fmt.Errorf("a frame of the type %q is out of order", kind)
		}
		switch kind {
		case frameHead:
			err = json.Unmarshal(content, &rec.Head)
		case frameRow:
			var e Event
			if e, err = decodeEvent(content); err == nil {
				rec.Events = append(rec.Events, e)
			}
		case frameTail:
			rec.Tail = &Tail{}
			err = json.Unmarshal(content, rec.Tail)
		default:
			err = fmt.Errorf("a frame has the unknown type %q", kind)
		}
		if err != nil {
			return nil, err
		}
	}
}

func readFrame(r io.Reader) (kind byte, content []byte, err error) {
	var start [frameBytes]byte
	if _, err := io.ReadFull(r, start[:]); err != nil {
		return 0, nil, err
	}
	size := binary.LittleEndian.Uint32(start[:])
	if size > jsonMax {
		return 0, nil, fmt.Errorf("a frame announces %d bytes, and at most %d are possible", size, jsonMax)
	}
	// The announced bytes may not exist: the memory grows with the bytes that do.
	var b bytes.Buffer
	if _, err := io.CopyN(&b, r, int64(size)); err != nil {
		return 0, nil, io.ErrUnexpectedEOF
	}
	return start[4], b.Bytes(), nil
}
