package wire

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Wire is a packet socket on one interface, for ARP or for neighbour discovery.
type Wire struct {
	file *os.File
	to   unix.SockaddrLinklayer
	name string
}

// ndOnly lets neighbour solicitations and advertisements through, so that a probe does not
// copy all IPv6 traffic. Offsets count from the Ethernet header.
var ndOnly = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 14 + 6}, // next header
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_ICMPV6, Jt: 0, Jf: 4},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 14 + 40}, // ICMPv6 type
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 135, Jt: 1, Jf: 0},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 136, Jt: 0, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 1500},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

// Open opens a socket for ARP (v4) or for neighbour discovery, in a namespace; None is the process's own.
func Open(ns netns.NsHandle, link netlink.Link, v4 bool) (*Wire, error) {
	kind := uint16(unix.ETH_P_IPV6)
	if v4 {
		kind = unix.ETH_P_ARP
	}
	w := &Wire{name: link.Attrs().Name}
	w.to = unix.SockaddrLinklayer{Protocol: kind<<8 | kind>>8, Ifindex: link.Attrs().Index, Halen: 6}
	err := namespace.Inside(ns, func() error {
		// Protocol 0: it receives nothing until it is bound, with the filter in place.
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		if !v4 {
			program := unix.SockFprog{Len: uint16(len(ndOnly)), Filter: &ndOnly[0]}
			err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program)
		}
		if err == nil {
			err = unix.Bind(fd, &w.to)
		}
		if err != nil {
			_ = unix.Close(fd)
			return err
		}
		w.file = os.NewFile(uintptr(fd), "packet:"+w.name)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open a packet socket on %s: %w", w.name, err)
	}
	return w, nil
}

// Close also ends a Receive under way.
func (w *Wire) Close() { _ = w.file.Close() }

// Send sends a frame to the hardware address that it names.
func (w *Wire) Send(frame []byte) error {
	to := w.to
	copy(to.Addr[:], frame[:6])
	raw, err := w.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("send on %s: %w", w.name, err)
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		sent = unix.Sendto(int(fd), frame, 0, &to)
		return !errors.Is(sent, unix.EAGAIN)
	})
	if err = errors.Join(err, sent); err != nil {
		return fmt.Errorf("send on %s: %w", w.name, err)
	}
	return nil
}

// Receive calls each with the frames that arrive within d, until it returns false.
func (w *Wire) Receive(d time.Duration, each func(frame []byte) bool) error {
	if err := w.file.SetReadDeadline(time.Now().Add(d)); err != nil {
		return fmt.Errorf("listen on %s: %w", w.name, err)
	}
	buffer := make([]byte, 1500)
	for {
		n, err := w.file.Read(buffer)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listen on %s: %w", w.name, err)
		}
		if !each(buffer[:n]) {
			return nil
		}
	}
}

// Sender is a packet socket that sends on any interface, and receives nothing.
type Sender struct{ fd int }

// OpenSender opens a Sender in a namespace; None is the process's own.
func OpenSender(ns netns.NsHandle) (*Sender, error) {
	s := &Sender{}
	err := namespace.Inside(ns, func() (err error) {
		s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	return s, nil
}

// Send sends a frame through the interface with that index.
func (s *Sender) Send(iface int, frame []byte) error {
	if err := unix.Sendto(s.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: iface, Halen: 6}); err != nil {
		return fmt.Errorf("send by interface %d: %w", iface, err)
	}
	return nil
}

// Close closes the socket.
func (s *Sender) Close() { _ = unix.Close(s.fd) }
