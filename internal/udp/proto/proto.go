// Package proto is the protocol by which a program gets a lease of the UDP path from shunt: messages over a unix socket of
// the type SOCK_SEQPACKET. docs/guide/udp-protocol.md describes it for other languages.
//
//	client                       broker
//	Hello        ──────────────►          its versions, and its name
//	             ◄──────────────  Welcome the version, and a nonce
//	Request      ──────────────►          the offer's name; the nonce
//	             ◄──────────────  Grant   layouts, addresses; files: memory, sockets
//	Ready        ──────────────►          the rings are mapped
//	             ◄──────────────  Serving mode; datagrams come from now on
//	Renew, Report ─────────────►          again and again, before the lease's time is over; Report has the
//	                                      program's own counters
//	             ◄──────────────  Renewed counters
//	             ◄──────────────  End     at any time, as the last message: the reason
//
// If Grant has FlagResume, a connection that is closed without End leaves the lease as it is: the broker's process has
// ended, and the next broker takes the lease over:
//
//	Hello        ──────────────►
//	             ◄──────────────  Welcome
//	Resume       ──────────────►          the nonce, the lease; files: copies of Grant's
//	             ◄──────────────  Serving and so on, as above
//
// A message is one datagram: a header, then a body of a fixed size for each type, all integers in little
// endian. A client that closes the socket gives the lease back.
package proto

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// Version is the only version so far.
const Version = 1

// Magic begins a client's first message.
var Magic = [8]byte{'s', 'h', 'u', 'n', 't', 'u', 'd', 'p'}

// Type is a message's type. Numbers are never used again.
type Type uint16

// The types, in the order of their first use.
const (
	TypeHello Type = 1 + iota
	TypeWelcome
	TypeRequest
	TypeGrant
	TypeReady
	TypeServing
	TypeRenew
	TypeRenewed
	TypeEnd
	TypeReport
	TypeResume
)

const (
	// QueuesMax and AddressesMax limit a lease.
	QueuesMax    = 64
	AddressesMax = 16
	// NameMax is the largest size of an offer's name, bytes.
	NameMax = 63
	// SizeMax is more than the size of any message.
	SizeMax = 8192

	headerSize = 8
)

// Header begins every message.
type Header struct {
	Type    Type
	Version uint16 // of the sender
	Size    uint32 // of the whole message, bytes
}

// Hello is a client's first message.
type Hello struct {
	Magic      [8]byte
	VersionMin uint16 // lowest version that the client speaks
	VersionMax uint16
	_          [4]byte
}

// Welcome answers Hello.
type Welcome struct {
	Nonce   uint64 // to be repeated in Request
	Version uint16 // version of the connection from now on
	_       [2]byte
	TermMS  uint32 // a lease ends if it is not renewed for this long, milliseconds
}

// Request asks for a lease of the offer with a name.
type Request struct {
	Nonce uint64
	Name  [NameMax + 1]byte // UTF-8, the rest zero
}

// Resume comes in place of Request if an earlier broker has granted the lease. Its files are copies of Grant's, in
// the same order.
type Resume struct {
	Nonce      uint64
	Lease      uint64
	QueueCount uint32
	_          [4]byte
}

// Address is a destination of the lease's datagrams.
type Address struct {
	IP   [16]byte // network order; IPv4 as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2)
	Port uint16
	_    [6]byte
}

// Queue describes one socket: its part of the memory, and its rings (xsk.Layout).
type Queue struct {
	Index          uint32 // of the interface's receive queue
	FrameSize      uint32 // bytes
	Offset         uint64 // of its frames in the memory, bytes
	ReceiveFrames  uint32 // their addresses begin at Offset
	TransmitFrames uint32 // behind the receive frames
	ReceiveRing    uint32 // entries; getsockopt(XDP_MMAP_OFFSETS) has the rings' positions
	TransmitRing   uint32 // 0: the socket cannot send
	FillRing       uint32
	CompletionRing uint32
	CPU            uint32 // on which the program is to work on this queue; NoCPU: any
	_              [4]byte
}

// NoCPU is a Queue's CPU if the administrator names none.
const NoCPU = ^uint32(0)

// Grant describes a lease that begins with Serving. Its files, in this order: the memory, then a socket for each
// queue.
type Grant struct {
	Lease        uint64
	Interface    uint32 // ifindex, in the broker's network namespace
	QueueCount   uint32
	AddressCount uint32
	Flags        uint32 // FlagStamped, FlagBusyPoll, FlagReport, FlagResume, and one of FlagSpin, FlagAdaptive and FlagSleep or none
	Addresses    [AddressesMax]Address
	Queues       [QueuesMax]Queue
}

// The flags of Grant. The other bits are reserved: zero.
const (
	// FlagStamped says that the 8 bytes in front of each received packet hold the time at which XDP saw it:
	// CLOCK_MONOTONIC, nanoseconds.
	FlagStamped = 1
	// FlagBusyPoll says that interrupts of the queues may be off, and that the program has to make the driver work:
	// recvfrom(socket, NULL, 0, MSG_DONTWAIT, NULL, NULL) when the receive ring is empty.
	FlagBusyPoll = 2
	// FlagReport says that the broker accepts Report in place of Renew.
	FlagReport = 4
	// FlagSpin, FlagAdaptive and FlagSleep advise a program that has no preference of its own how to wait for datagrams: see Wait.
	FlagSpin     = 8
	FlagAdaptive = 16
	FlagSleep    = 32
	// FlagResume says that the lease outlives the broker's process: see Resume.
	FlagResume = 64
)

// Wait is the administrator's advice how a program waits for datagrams. "": the program decides.
type Wait string

// The values of Wait.
const (
	WaitSpin     Wait = "spin"     // look at the rings all the time
	WaitAdaptive Wait = "adaptive" // look for AdaptiveFor, then sleep
	WaitSleep    Wait = "sleep"    // sleep at once
)

// AdaptiveFor is the time that a program with the advice to be adaptive looks before it sleeps: the same as for the way
// of that name in bench/udppath.
const AdaptiveFor = 50 * time.Microsecond

var waitFlags = map[Wait]uint32{WaitSpin: FlagSpin, WaitAdaptive: FlagAdaptive, WaitSleep: FlagSleep}

// Wait returns the grant's advice. Several flags at once are no advice.
func (g *Grant) Wait() (advice Wait) {
	for wait, flag := range waitFlags {
		if g.Flags&(FlagSpin|FlagAdaptive|FlagSleep) == flag {
			advice = wait
		}
	}
	return advice
}

// Ready says that the client has mapped memory and rings. Before it no socket is bound.
type Ready struct{ Lease uint64 }

// Mode is the way of frames into the memory.
type Mode uint32

// The modes, best first.
const (
	ModeZeroCopy Mode = 1 // the driver writes into the memory
	ModeCopy     Mode = 2 // the kernel copies each frame
	ModeGeneric  Mode = 3 // before, the kernel has made an sk_buff of each frame
)

// Serving says that datagrams come from now on.
type Serving struct {
	Lease  uint64
	Mode   Mode
	TermMS uint32
	Reason [256]byte // reason for a mode other than zero-copy: UTF-8, the rest zero
}

// Renew keeps the lease for another term, and asks for its counters.
type Renew struct {
	Lease    uint64
	Sequence uint64 // repeated in Renewed
}

// Report is Renew with the program's own counts of each queue. Claims stand in the order of Grant.Queues.
type Report struct {
	Lease    uint64
	Sequence uint64 // repeated in Renewed
	Claims   [QueuesMax]Claim
}

// Claim has the counters of a queue that only the program knows, since the lease began. They cannot be checked.
type Claim struct {
	Stale   uint64 // datagrams that the program has taken and dropped because they were too old
	TxShort uint64 // frames that the program wanted to send and that had no room
	Kicks   uint64 // system calls that have frames sent
	Wakeups uint64 // sleeps that ended with datagrams of the queue
}

// Count has the broker's counters of a queue: matched = passed_no_socket + datagrams that the queue's socket was given.
type Count struct {
	Matched uint64 // datagrams to the lease's addresses
	// PassedNoSocket counts datagrams for which the queue had no socket: they were left to the kernel's stack, or dropped if the
	// administrator wants that.
	PassedNoSocket uint64
}

// Renewed answers Renew and Report. Counts stand in the order of Grant.Queues.
type Renewed struct {
	Lease    uint64
	Sequence uint64
	Counts   [QueuesMax]Count
}

// Code is the reason for the end of a connection.
type Code uint32

// The values of Code.
const (
	EndRefused   Code = 1 // no rule allows the process, or the offer does not exist
	EndBusy      Code = 2 // another process has the lease, or one of its queues
	EndFailed    Code = 3 // the kernel refused an operation
	EndProtocol  Code = 4 // the client has broken the protocol
	EndExpired   Code = 5 // the lease was not renewed in time
	EndRevoked   Code = 6 // the offer was changed or removed, or the broker ends
	EndTampered  Code = 7 // the rings were tampered with
	EndTooMany   Code = 8 // connections or messages of one user
	EndMalformed Code = 9 // a message could not be read
)

func (c Code) String() string {
	names := []string{"", "refused", "busy", "failed", "protocol", "expired", "revoked", "tampered", "too many", "malformed"}
	if int(c) < len(names) && c > 0 {
		return names[c]
	}
	return fmt.Sprintf("code %d", uint32(c))
}

// End is a broker's last message.
type End struct {
	Code Code
	_    [4]byte
	Text [512]byte // the attempt, the fault and the remedy: UTF-8, the rest zero
}

// Body is a pointer to one of the messages.
type Body interface {
	kind() Type
	files(n int) bool // whether the message comes with this number of files
}

func (*Hello) kind() Type   { return TypeHello }
func (*Welcome) kind() Type { return TypeWelcome }
func (*Request) kind() Type { return TypeRequest }
func (*Grant) kind() Type   { return TypeGrant }
func (*Ready) kind() Type   { return TypeReady }
func (*Serving) kind() Type { return TypeServing }
func (*Renew) kind() Type   { return TypeRenew }
func (*Renewed) kind() Type { return TypeRenewed }
func (*End) kind() Type     { return TypeEnd }
func (*Report) kind() Type  { return TypeReport }
func (*Resume) kind() Type  { return TypeResume }

func (*Hello) files(n int) bool    { return n == 0 }
func (*Welcome) files(n int) bool  { return n == 0 }
func (*Request) files(n int) bool  { return n == 0 }
func (g *Grant) files(n int) bool  { return n == 1+int(g.QueueCount) }
func (*Ready) files(n int) bool    { return n == 0 }
func (*Serving) files(n int) bool  { return n == 0 }
func (*Renew) files(n int) bool    { return n == 0 }
func (*Renewed) files(n int) bool  { return n == 0 }
func (*End) files(n int) bool      { return n == 0 }
func (*Report) files(n int) bool   { return n == 0 }
func (r *Resume) files(n int) bool { return n == 1+int(r.QueueCount) }

// bodies has a function for each type that makes an empty message.
var bodies = map[Type]func() Body{
	TypeHello: func() Body { return &Hello{} }, TypeWelcome: func() Body { return &Welcome{} },
	TypeRequest: func() Body { return &Request{} }, TypeGrant: func() Body { return &Grant{} },
	TypeReady: func() Body { return &Ready{} }, TypeServing: func() Body { return &Serving{} },
	TypeRenew: func() Body { return &Renew{} }, TypeRenewed: func() Body { return &Renewed{} },
	TypeEnd: func() Body { return &End{} }, TypeReport: func() Body { return &Report{} },
	TypeResume: func() Body { return &Resume{} },
}

// ErrMalformed is the error of every message that cannot be read.
var ErrMalformed = errors.New("the message is malformed")

// Encode returns the bytes of a message.
func Encode(b Body) []byte {
	size := headerSize + binary.Size(b)
	out := make([]byte, 0, size)
	var err error
	for _, part := range []any{Header{b.kind(), Version, uint32(size)}, b} {
		if out, err = binary.Append(out, binary.LittleEndian, part); err != nil {
			panic(err) // a message has only fields of fixed sizes
		}
	}
	return out
}

// Decode reads a message that came with a number of files. It reads Hello in every version, so that a broker can answer
// with the versions that it speaks.
func Decode(message []byte, files int) (Body, error) {
	var h Header
	if _, err := binary.Decode(message, binary.LittleEndian, &h); err != nil {
		return nil, fmt.Errorf("%w: it has %d bytes, and a header alone has %d", ErrMalformed, len(message), headerSize)
	}
	if h.Version != Version && h.Type != TypeHello && h.Type != TypeEnd {
		return nil, fmt.Errorf("%w: its version is %d, and this program speaks version %d", ErrMalformed, h.Version, Version)
	}
	make, known := bodies[h.Type]
	if !known {
		return nil, fmt.Errorf("%w: there is no type %d", ErrMalformed, h.Type)
	}
	b := make()
	if want := headerSize + binary.Size(b); len(message) != want || h.Size != uint32(want) {
		return nil, fmt.Errorf("%w: a message of type %d has %d bytes; this message has %d, and its header says %d", ErrMalformed, h.Type, want, len(message), h.Size)
	}
	if _, err := binary.Decode(message[headerSize:], binary.LittleEndian, b); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if g, ok := b.(*Grant); ok && (g.QueueCount == 0 || g.QueueCount > QueuesMax || g.AddressCount > AddressesMax) {
		return nil, fmt.Errorf("%w: it grants %d queues and %d addresses", ErrMalformed, g.QueueCount, g.AddressCount)
	}
	if r, ok := b.(*Resume); ok && (r.QueueCount == 0 || r.QueueCount > QueuesMax) {
		return nil, fmt.Errorf("%w: it resumes %d queues", ErrMalformed, r.QueueCount)
	}
	if !b.files(files) {
		return nil, fmt.Errorf("%w: a message of type %d does not come with %d files", ErrMalformed, h.Type, files)
	}
	return b, nil
}

// Put writes text into a field. Text that is too long ends after a whole character.
func Put(field []byte, text string) {
	for len(text) >= len(field) || !utf8.ValidString(text) {
		text = strings.ToValidUTF8(text[:min(len(text), len(field)-1)], "")
	}
	clear(field[copy(field, text):])
}

// Text returns the text of a field.
func Text(field []byte) string {
	text, _, _ := bytes.Cut(field, []byte{0})
	return strings.ToValidUTF8(string(text), "\uFFFD")
}

// NewGrant puts layouts and addresses into a message. CPUOf chooses the CPU of a queue.
func NewGrant(lease uint64, layouts []xsk.Layout, addresses []netip.AddrPort, cpus []int, wait Wait) (*Grant, error) {
	if len(layouts) == 0 || len(layouts) > QueuesMax || len(addresses) > AddressesMax {
		return nil, fmt.Errorf("a lease cannot have %d queues and %d addresses: it has 1 to %d queues and up to %d addresses",
			len(layouts), len(addresses), QueuesMax, AddressesMax)
	}
	g := &Grant{Lease: lease, Interface: uint32(layouts[0].Interface), QueueCount: uint32(len(layouts)), AddressCount: uint32(len(addresses)), Flags: FlagReport | waitFlags[wait]}
	if layouts[0].Stamped {
		g.Flags |= FlagStamped
	}
	if layouts[0].BusyPoll {
		g.Flags |= FlagBusyPoll
	}
	for i, a := range addresses {
		g.Addresses[i] = Address{IP: a.Addr().As16(), Port: a.Port()}
	}
	for i, l := range layouts {
		g.Queues[i] = Queue{
			Index: uint32(l.Queue), FrameSize: l.FrameSize, Offset: uint64(l.Offset),
			ReceiveFrames: l.ReceiveFrames, TransmitFrames: l.TransmitFrames,
			ReceiveRing: l.ReceiveRing, TransmitRing: l.TransmitRing, FillRing: l.FillRing, CompletionRing: l.CompletionRing,
			CPU: NoCPU,
		}
		if cpu, named := CPUOf(cpus, i); named {
			g.Queues[i].CPU = uint32(cpu)
		}
	}
	return g, nil
}

// CPUOf returns the CPU of a lease's n-th queue: the queues get the administrator's CPUs in turn. named is false if there are none.
func CPUOf(cpus []int, n int) (cpu int, named bool) {
	if len(cpus) == 0 {
		return 0, false
	}
	return cpus[n%len(cpus)], true
}

// Layouts returns the layouts of the queues.
func (g *Grant) Layouts() (all []xsk.Layout) {
	for _, q := range g.Queues[:g.QueueCount] {
		all = append(all, xsk.Layout{
			Interface: int(g.Interface), Queue: int(q.Index), FrameSize: q.FrameSize, Offset: int64(q.Offset),
			ReceiveFrames: q.ReceiveFrames, TransmitFrames: q.TransmitFrames,
			ReceiveRing: q.ReceiveRing, TransmitRing: q.TransmitRing, FillRing: q.FillRing, CompletionRing: q.CompletionRing,
			Stamped: g.Flags&FlagStamped != 0, BusyPoll: g.Flags&FlagBusyPoll != 0,
		})
	}
	return all
}

// Serves returns the lease's addresses.
func (g *Grant) Serves() (all []netip.AddrPort) {
	for _, a := range g.Addresses[:g.AddressCount] {
		all = append(all, netip.AddrPortFrom(netip.AddrFrom16(a.IP).Unmap(), a.Port))
	}
	return all
}

var modes = []string{ModeZeroCopy: "zero-copy", ModeCopy: "copy", ModeGeneric: "generic"}

// ModeOf returns the number of a mode's name; 0 if it has none.
func ModeOf(name string) Mode { return Mode(max(0, slices.Index(modes, name))) }

func (m Mode) String() string {
	if m > 0 && int(m) < len(modes) {
		return modes[m]
	}
	return fmt.Sprintf("mode %d", uint32(m))
}
