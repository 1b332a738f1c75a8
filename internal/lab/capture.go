package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/packet"
)

// Frame is one frame as the host's stack saw it.
type Frame struct {
	At       time.Time
	Outgoing bool // sent by this host; otherwise received
	// ChecksumPending means that the transport checksum is left to the network card:
	// the field holds the partial one (TP_STATUS_CSUMNOTREADY, packet(7)).
	ChecksumPending bool
	Data            []byte // from the Ethernet header on, VLAN tag included
}

// captureSize is the number of frames that wait for a slow reader before the next are dropped.
const captureSize = 4096

// Capture is every frame of one interface. The frames that an XDP program took are not among those
// that the interface received: capture at the other end of the cable.
type Capture struct {
	host    *Host
	iface   string
	socket  *os.File
	frames  chan Frame
	dropped atomic.Uint64
	once    sync.Once
	ended   chan struct{}
}

// Capture starts to record; Close of it, or of the lab, ends that.
func (h *Host) Capture(iface string) (*Capture, error) {
	socket, err := h.packetSocket(iface, unix.ETH_P_ALL)
	if err != nil {
		return nil, fmt.Errorf("host %s: capture on %s: %w", h.name, iface, err)
	}
	c := &Capture{host: h, iface: iface, socket: socket, frames: make(chan Frame, captureSize), ended: make(chan struct{})}
	go c.read()
	h.lab.atClose(func() error { c.Close(); return nil })
	return c, nil
}

// packetSocket is an AF_PACKET socket bound to one interface; protocol 0 receives nothing.
func (h *Host) packetSocket(iface string, protocol uint16) (*os.File, error) {
	index, err := h.InterfaceIndex(iface)
	if err != nil {
		return nil, err
	}
	fd := -1
	err = h.Run(func() (err error) {
		// Protocol 0 until bound, so that nothing of other interfaces arrives.
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w", err)
	}
	// 8 MB of kernel buffer; a refusal only means that a burst may overrun the default.
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20)
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("ask for auxiliary data: %w", err)
	}
	address := &unix.SockaddrLinklayer{Ifindex: index, Protocol: protocol<<8 | protocol>>8}
	if err := unix.Bind(fd, address); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind packet socket: %w", err)
	}
	return os.NewFile(uintptr(fd), "packet:"+iface), nil
}

// read moves frames into the channel until the socket is closed.
func (c *Capture) read() {
	defer close(c.ended)
	defer close(c.frames)
	raw, err := c.socket.SyscallConn()
	if err != nil {
		return
	}
	buffer, control := make([]byte, 1<<17), make([]byte, 256)
	for {
		var n, controlSize int
		var from unix.Sockaddr
		var receiveErr error
		err := raw.Read(func(fd uintptr) bool {
			n, controlSize, _, from, receiveErr = unix.Recvmsg(int(fd), buffer, control, 0)
			return !errors.Is(receiveErr, unix.EAGAIN)
		})
		if err != nil { // closed
			return
		}
		if errors.Is(receiveErr, unix.EINTR) || errors.Is(receiveErr, unix.ENETDOWN) {
			continue // ENETDOWN is reported once, when the interface goes down
		}
		if receiveErr != nil {
			return
		}
		frame := Frame{At: time.Now(), Data: append([]byte(nil), buffer[:n]...)}
		if link, ok := from.(*unix.SockaddrLinklayer); ok {
			frame.Outgoing = link.Pkttype == unix.PACKET_OUTGOING
		}
		frame.auxiliary(control[:controlSize])
		select {
		case c.frames <- frame:
		default:
			c.dropped.Add(1)
		}
	}
}

// auxiliary reads the VLAN tag that the kernel took out of the frame, and whether the checksum is
// pending.
func (f *Frame) auxiliary(control []byte) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return
	}
	for _, m := range messages {
		if m.Header.Level != unix.SOL_PACKET || m.Header.Type != unix.PACKET_AUXDATA ||
			len(m.Data) < int(unsafe.Sizeof(unix.TpacketAuxdata{})) {
			continue
		}
		aux := (*unix.TpacketAuxdata)(unsafe.Pointer(&m.Data[0]))
		f.ChecksumPending = aux.Status&unix.TP_STATUS_CSUMNOTREADY != 0
		if aux.Status&unix.TP_STATUS_VLAN_VALID != 0 && len(f.Data) >= 12 {
			tag := binary.BigEndian.AppendUint16(nil, aux.Vlan_tpid)
			tag = binary.BigEndian.AppendUint16(tag, aux.Vlan_tci)
			f.Data = append(append(append([]byte(nil), f.Data[:12]...), tag...), f.Data[12:]...)
		}
	}
}

// Frames is closed after Close, when the last frame before it has been delivered.
func (c *Capture) Frames() <-chan Frame { return c.frames }

// Dropped counts frames lost because nobody read Frames.
func (c *Capture) Dropped() uint64 { return c.dropped.Load() }

// Close ends the capture. It may be called again.
func (c *Capture) Close() {
	c.once.Do(func() { c.socket.Close() })
	<-c.ended
}

// Await returns the first frame from now on that parses and that match accepts; others are
// discarded. It fails when ctx ends, and then names the last few frames it saw.
func (c *Capture) Await(ctx context.Context, match func(Frame, packet.Packet) bool) (Frame, packet.Packet, error) {
	var seen []string
	for {
		select {
		case <-ctx.Done():
			return Frame{}, packet.Packet{}, fmt.Errorf("capture on %s/%s: no such frame among %d: %w; the last: %q",
				c.host.name, c.iface, len(seen), ctx.Err(), seen[max(0, len(seen)-8):])
		case f, open := <-c.frames:
			if !open {
				return Frame{}, packet.Packet{}, fmt.Errorf("capture on %s/%s: closed", c.host.name, c.iface)
			}
			p, err := packet.Parse(f.Data)
			if err == nil && match(f, p) {
				return f, p, nil
			}
			seen = append(seen, p.String())
		}
	}
}

// Send sends frames out of an interface unchanged.
func (h *Host) Send(iface string, frames ...[]byte) error {
	socket, err := h.packetSocket(iface, 0)
	if err != nil {
		return fmt.Errorf("host %s: send on %s: %w", h.name, iface, err)
	}
	defer socket.Close()
	for i, frame := range frames {
		if _, err := socket.Write(frame); err != nil {
			return fmt.Errorf("host %s: send on %s: frame %d of %d: %w", h.name, iface, i+1, len(frames), err)
		}
	}
	return nil
}
