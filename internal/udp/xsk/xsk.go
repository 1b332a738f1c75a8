// Package xsk is AF_XDP in Go: a UMEM in a sealed memfd, the four rings of a socket, and the
// frames that move between them. It needs no C library, no cgo and no BPF library: the owner of
// the interface's XDP program puts FD into its XSKMAP.
//
//	   ┌────────── fill ◄────────── Release ──────────┐
//	   ▼                                              │
//	kernel ──────► rx ──── Recv ────► held ─── Reply ─┤
//	   ▲                                              │ Send
//	   ├────────── completion ◄──── kernel ◄── tx ◄───┘
//	   │                │                      ▲
//	   └─ received      └─ own ──► free ── Reserve
//
// A frame is at exactly one of these points. Frames below Layout.ReceiveFrames begin in the fill
// ring and return to it, also after they were sent (Reply); the others are for Reserve. A Queue
// has one owner, and no method of it may run beside another.
//
// Opening needs CAP_NET_RAW. Using an open socket needs no capability: another process gets the
// memfd, the socket and the Layout, and calls Adopt.
//
// Source: Documentation/networking/af_xdp.rst and net/xdp/xsk.c of Linux.
package xsk

import (
	"fmt"
	"math/bits"
	"time"

	"golang.org/x/sys/unix"
)

// Mode is the way of frames from the driver into the memory.
type Mode string

// The modes, best first. Auto can be asked for and is never reported.
const (
	Auto     Mode = "auto"
	ZeroCopy Mode = "zero-copy" // the driver writes into the memory
	Copy     Mode = "copy"      // the kernel copies each frame
)

const (
	// headroom is the room that the kernel keeps free in front of each received frame.
	headroom = unix.XDP_PACKET_HEADROOM

	// RingSizeMin is a batch; RingSizeMax limits the memory of a queue, which has two to
	// three times as many frames, of 2 or 4 KiB.
	RingSizeMin = 64
	RingSizeMax = 1 << 16
)

// Layout describes an open socket to the process that adopts it.
type Layout struct {
	Interface int    `json:"interface"` // ifindex, in the namespace where it was opened
	Queue     int    `json:"queue"`     // of the interface
	Mode      Mode   `json:"mode"`      // the mode that the socket got
	Reason    string `json:"reason"`    // reason for copy if auto chose it
	Offset    int64  `json:"offset"`    // of the frames in the memory, bytes
	FrameSize uint32 `json:"frame_size"`
	// ReceiveFrames stand first, TransmitFrames behind them.
	ReceiveFrames  uint32 `json:"receive_frames"`
	TransmitFrames uint32 `json:"transmit_frames"`
	// Sizes of the rings, entries; TransmitRing is 0 for a socket that only receives.
	ReceiveRing    uint32 `json:"receive_ring"`
	TransmitRing   uint32 `json:"transmit_ring"`
	FillRing       uint32 `json:"fill_ring"`
	CompletionRing uint32 `json:"completion_ring"`
	// Stamped: the 8 bytes in front of each received packet hold the time at which XDP saw it: CLOCK_MONOTONIC,
	// nanoseconds.
	Stamped bool `json:"stamped,omitempty"`
	// BusyPoll: the program makes the driver work on its queue, in place of interrupts: Recv and Wait do that when the
	// ring is empty. The socket prefers it, which needs CAP_NET_ADMIN to be set.
	BusyPoll bool `json:"busy_poll,omitempty"`
}

// Size returns the bytes of memory that the frames take.
func (l Layout) Size() int64 { return int64(l.ReceiveFrames+l.TransmitFrames) * int64(l.FrameSize) }

// check refuses values that no socket can have been opened with: a layout may come from another process.
func (l Layout) check() error {
	for _, r := range []struct {
		name    string
		entries uint32
	}{{"receive", l.ReceiveRing}, {"fill", l.FillRing}, {"completion", l.CompletionRing}} {
		if !isRingSize(r.entries) {
			return fmt.Errorf("the %s ring has %d entries: it must be a power of two from 1 to %d", r.name, r.entries, 4*RingSizeMax)
		}
	}
	switch {
	case l.TransmitRing != 0 && !isRingSize(l.TransmitRing):
		return fmt.Errorf("the transmit ring has %d entries: it must be 0 or a power of two up to %d", l.TransmitRing, 4*RingSizeMax)
	case l.FrameSize != 2048 && l.FrameSize != 4096:
		return fmt.Errorf("a frame has %d bytes: it must have 2048 or 4096", l.FrameSize)
	case l.ReceiveFrames == 0 || l.ReceiveFrames > l.FillRing/2:
		return fmt.Errorf("%d receive frames do not fit: a fill ring of %d entries has room for 1 to %d", l.ReceiveFrames, l.FillRing, l.FillRing/2)
	case l.TransmitFrames > 2*RingSizeMax:
		return fmt.Errorf("%d frames to send from: at most %d are possible", l.TransmitFrames, 2*RingSizeMax)
	case l.Offset < 0 || l.Offset%int64(l.FrameSize) != 0:
		return fmt.Errorf("the frames begin at byte %d: it must be a multiple of %d", l.Offset, l.FrameSize)
	}
	return nil
}

func isRingSize(n uint32) bool { return bits.OnesCount32(n) == 1 && n <= 4*RingSizeMax }

// Plan returns the layout for rings of a size, without the socket's part. With transmit false the socket
// can only receive.
func Plan(ringSize, frameSize uint32, transmit bool) (Layout, error) {
	if !isRingSize(ringSize) || ringSize < RingSizeMin || ringSize > RingSizeMax {
		return Layout{}, fmt.Errorf("a ring of %d entries: it must be a power of two from %d to %d", ringSize, RingSizeMin, RingSizeMax)
	}
	l := Layout{
		FrameSize: frameSize, ReceiveRing: ringSize,
		// Twice: the program may hold as many frames as wait in the ring.
		ReceiveFrames: 2 * ringSize,
		// Each frame has two entries, so that giving it back cannot fail: the kernel publishes that
		// packets are in the receive ring before it publishes that it has taken their frames from the
		// fill ring (xsk_flush in net/xdp/xsk.c). A program gave a frame back 32 µs
		// before the second (Linux 6.18, veth, 20 runnable tasks on 2 CPUs).
		FillRing:       4 * ringSize,
		CompletionRing: RingSizeMin,
	}
	if transmit {
		l.TransmitRing, l.CompletionRing, l.TransmitFrames = ringSize, ringSize, ringSize
	}
	return l, l.check()
}

// RingSize returns the largest power of two of packets that arrive within delay at a rate, from
// RingSizeMin to RingSizeMax. A program that keeps up with the rate works a full ring of that size off
// within delay, so the ring limits the age of a packet (Little's law).
func RingSize(delay time.Duration, packetsPerSecond float64) uint32 {
	packets := delay.Seconds() * packetsPerSecond
	switch {
	case !(packets > RingSizeMin): // NaN too
		return RingSizeMin
	case packets >= RingSizeMax:
		return RingSizeMax
	}
	return 1 << (bits.Len32(uint32(packets)) - 1)
}

// FrameSize returns the size of a frame for an interface's MTU, bytes: an Ethernet header, two VLAN tags and the
// kernel's headroom have to fit as well. Longer packets would need several frames each.
func FrameSize(mtu int) (uint32, error) {
	const ethernet = 14 + 2*4
	for _, size := range []uint32{2048, 4096} {
		if mtu+ethernet+headroom <= int(size) {
			return size, nil
		}
	}
	return 0, fmt.Errorf("the MTU is %d bytes, but a packet must fit into one frame, so at most %d are possible; lower it with `ip link set dev … mtu %d`",
		mtu, 4096-headroom-ethernet, 4096-headroom-ethernet)
}
