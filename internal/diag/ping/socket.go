package ping

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Types of ICMP messages: RFC 792, and RFC 4443, section 4.
const (
	echo4Request, echo4Reply = 8, 0
	echo6Request, echo6Reply = 128, 129
)

// receiveBytes is asked for as room for messages on their way to the process.
const receiveBytes = 4 << 20

// socket sends and receives echo messages of one family. The filter lets only the tool's in.
type socket struct {
	fd     int
	is6    bool
	buffer []byte // of the last message received
}

// arrival is a message.
type arrival struct {
	head
	from    unix.Sockaddr
	id      uint16 // of the echo message
	payload []byte // after struct ping_head; until the next receive
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
	s := &socket{fd: fd, is6: is6, buffer: make([]byte, 1<<16)}
	level, option := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
	if is6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER
	}
	// A probe in fragments would be several packets, and none of them has all stages.
	err = errors.Join(unix.SetsockoptInt(fd, level, option, unix.IP_PMTUDISC_DO), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, filter))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the raw socket for %s: %w", name, err), s.close())
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBytes) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBytes) // the default may be enough
	}
	return s, nil
}

func (s *socket) close() error { return unix.Close(s.fd) }

// send sends the message of ICMP, whose header it makes.
func (s *socket) send(message []byte, isRequest bool, code byte, id, sequence uint16, to unix.Sockaddr) error {
	kind := map[bool]byte{true: echo4Request, false: echo4Reply}[isRequest]
	if s.is6 {
		kind = map[bool]byte{true: echo6Request, false: echo6Reply}[isRequest]
	}
	message[0], message[1], message[2], message[3] = kind, code, 0, 0
	binary.BigEndian.PutUint16(message[4:], id)
	binary.BigEndian.PutUint16(message[6:], sequence)
	if !s.is6 { // of ICMPv6 the kernel makes it, because the addresses are part of it
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	return unix.Sendto(s.fd, message, 0, to)
}

// checksum is that of RFC 1071.
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

// errEmpty says that no message is there.
var errEmpty = errors.New("no message")

// receive takes a message, and does not wait for it. errNotOurs: it is to be ignored.
func (s *socket) receive() (arrival, error) {
	n, from, err := unix.Recvfrom(s.fd, s.buffer, 0)
	switch {
	case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
		return arrival{}, errEmpty
	case err != nil:
		return arrival{}, fmt.Errorf("receive an echo message: %w", err)
	}
	b := s.buffer[:n]
	if !s.is6 { // raw(7): the IP header comes with it
		if len(b) < 1 || len(b) < int(b[0]&15)*4 {
			return arrival{}, errNotOurs
		}
		b = b[int(b[0]&15)*4:]
	}
	if len(b) < icmpBytes {
		return arrival{}, errNotOurs
	}
	h, err := parseHead(b[icmpBytes:])
	return arrival{h, from, binary.BigEndian.Uint16(b[4:]), b[min(len(b), icmpBytes+headBytes):]}, err
}

// passMax is how many messages of a socket are taken at once, before others are looked at.
const passMax = 1024

// receiveAll takes the messages that are there, each with the time at which it was received.
func (s *socket) receiveAll(now func() uint64, take func(m arrival, at uint64) error) error {
	for range passMax {
		m, err := s.receive()
		at := now()
		switch {
		case errors.Is(err, errEmpty):
			return nil
		case errors.Is(err, errNotOurs):
			continue
		case err == nil:
			err = take(m, at)
		}
		if err != nil {
			return err
		}
	}
	return nil
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

func sockaddr(a netip.Addr, zone uint32) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16(), ZoneId: zone}
}

func address(from unix.Sockaddr) netip.Addr {
	switch a := from.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(a.Addr)
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(a.Addr)
	}
	return netip.Addr{}
}
