package ping

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Types of ICMP messages: RFC 792, and RFC 4443, section 4.
const (
	echo4Request, echo4Reply = 8, 0
	echo6Request, echo6Reply = 128, 129
)

// receiveBytes is the requested room for messages that wait for the process.
const receiveBytes = 32 << 20

// socket sends and receives echo messages, or datagrams of UDP, of one family. The filter lets only the tool's in.
type socket struct {
	fd    int
	is6   bool
	isUDP bool   // datagrams; otherwise echo messages
	box   *inbox // of the last messages received
	blank []byte // of UDP: room for an answer, of which only the head is ever written
}

// arrival is a message.
type arrival struct {
	head
	from    peer
	id      uint16 // of the echo message
	bytes   int    // of UDP: of the datagram, without its header
	local   local  // of UDP: the address that it came to
	payload []byte // after struct probe_head; until the next receive
}

func openSocket(is6 bool, filter int) (*socket, error) {
	family, protocol, name := unix.AF_INET, unix.IPPROTO_ICMP, "IPv4"
	if is6 {
		family, protocol, name = unix.AF_INET6, unix.IPPROTO_ICMPV6, "IPv6"
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, fmt.Errorf("open a raw socket for %s: %w", name, err)
	}
	s := &socket{fd: fd, is6: is6, box: newInbox()}
	level, option := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
	if is6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER
	}
	// A probe in fragments would be several packets, none of which has all stages.
	err = errors.Join(unix.SetsockoptInt(fd, level, option, unix.IP_PMTUDISC_DO), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, filter))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the raw socket for %s: %w", name, err), s.close())
	}
	s.makeRoom()
	return s, nil
}

// makeRoom requests room for messages that wait for the process.
func (s *socket) makeRoom() {
	if unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBytes) != nil {
		_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBytes) // the default may be enough
	}
}

func (s *socket) close() error { return unix.Close(s.fd) }

// send sends a message of ICMP, an echo reply whose header it makes. Of UDP it sends the bytes after the header, from an address
// of this host.
func (s *socket) send(message []byte, id, sequence uint16, from local, to peer) error {
	if s.isUDP {
		return s.sendFrom(message[icmpBytes:], from, to)
	}
	echoHead(message, s.is6, false, 0, id, sequence)
	_, _, errno := unix.Syscall6(unix.SYS_SENDTO, uintptr(s.fd), uintptr(unsafe.Pointer(&message[0])), uintptr(len(message)), 0, uintptr(unsafe.Pointer(&to)), uintptr(to.bytes()))
	if errno != 0 {
		return errno
	}
	return nil
}

// echoHead makes the header of the echo message, with the checksum of b.
func echoHead(b []byte, is6, isRequest bool, code byte, id, sequence uint16) {
	switch {
	case is6 && isRequest:
		b[0] = echo6Request
	case is6:
		b[0] = echo6Reply
	case isRequest:
		b[0] = echo4Request
	default:
		b[0] = echo4Reply
	}
	b[1], b[2], b[3] = code, 0, 0
	binary.BigEndian.PutUint16(b[4:], id)
	binary.BigEndian.PutUint16(b[6:], sequence)
	if !is6 { // for ICMPv6 the kernel computes it, because the addresses are part of it
		binary.BigEndian.PutUint16(b[2:], checksum(b))
	}
}

// checksum returns the checksum of RFC 1071.
func checksum(b []byte) uint16 {
	sum := uint64(0)
	for ; len(b) >= 4; b = b[4:] {
		sum += uint64(binary.BigEndian.Uint32(b))
	}
	if len(b) >= 2 {
		sum += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint64(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// passMax is the largest number of messages that are taken from a socket before the others are looked at: a multiple of batchMax.
const passMax = 1024

// sleep keeps this thread from the CPU for a time. time.Sleep would hand the CPU from thread to thread.
func sleep(d time.Duration) {
	rest := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&rest, nil) // a signal of Go's runtime may end it early
}

// wait waits until one of the sockets has a message.
func wait(longest time.Duration, sockets ...*socket) error {
	polled := make([]unix.PollFd, len(sockets))
	for i, s := range sockets {
		polled[i] = unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN}
	}
	_, err := unix.Poll(polled, int(longest.Milliseconds()))
	if err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("wait for echo messages: %w", err)
	}
	return nil
}
