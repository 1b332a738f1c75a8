package event

import (
	"encoding/binary"
	"fmt"
)

// Names of the maps that bpf/event/event.h defines, in each collection that includes it.
const (
	MapEvents   = abiMapShEvents
	MapSequence = abiMapShEventSeq
)

// HeaderSize is the length of an encoded Header in bytes.
const HeaderSize = 64

// Version is the only version of the header that Decode accepts.
const Version = uint8(abiEventConstantEVENT_VERSION)

// Header has the time, the place and the process of an event. Fields are 0 where the program did not
// know them.
type Header struct {
	TimeNs      uint64 // CLOCK_BOOTTIME
	Sequence    uint64 // number of the event on its CPU, from 0
	CgroupID    uint64 // in the second hierarchy: inode number of the cgroup's folder
	TaskStartNs uint64 // CLOCK_BOOTTIME: the beginning of the process; with Tgid it names a process uniquely
	CPU         uint32
	Tgid, Tid   uint32
	Netns       uint32 // inode number of /proc/PID/ns/net
	Mntns       uint32 // inode number of /proc/PID/ns/mnt
	Sensor      uint16 // numbered by the product
}

// Event is a header and the sensor's payload, which is the receiver's own.
type Event struct {
	Header
	Payload []byte
}

// Decode reads a record as event_reserve of bpf/event/event.h writes it, in the host's byte order. The
// payload is a part of the record. The kernel rounds records up to 8 bytes, so the bytes after the
// payload are left out.
func Decode(record []byte) (Event, error) {
	if len(record) < HeaderSize {
		return Event{}, fmt.Errorf("decode an event: %d bytes, and the header alone has %d", len(record), HeaderSize)
	}
	order := binary.NativeEndian
	if version := record[58]; version != Version {
		return Event{}, fmt.Errorf("decode an event: its version is %d, and only %d is known; the programs are of another version of shunt", version, Version)
	}
	size := order.Uint32(record[52:])
	if rest := len(record) - HeaderSize; uint64(size) > uint64(rest) {
		return Event{}, fmt.Errorf("decode an event: its header announces a payload of %d bytes, and %d follow", size, rest)
	}
	return Event{
		Header: Header{
			TimeNs:      order.Uint64(record[0:]),
			Sequence:    order.Uint64(record[8:]),
			CgroupID:    order.Uint64(record[16:]),
			TaskStartNs: order.Uint64(record[24:]),
			CPU:         order.Uint32(record[32:]),
			Tgid:        order.Uint32(record[36:]),
			Tid:         order.Uint32(record[40:]),
			Netns:       order.Uint32(record[44:]),
			Mntns:       order.Uint32(record[48:]),
			Sensor:      order.Uint16(record[56:]),
		},
		Payload: record[HeaderSize : HeaderSize+size],
	}, nil
}
