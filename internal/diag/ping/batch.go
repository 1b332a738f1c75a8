package ping

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// batchMax is the largest number of messages that one system call sends or receives.
const batchMax = 64

// inboxBytes is the kept part of a message: a whole report with the IP header. The rest of a probe is zeros.
const inboxBytes = 2048

// mmsghdr is struct mmsghdr of sendmmsg(2).
type mmsghdr struct {
	header unix.Msghdr
	bytes  uint32 // number that were sent or received
}

// peer is an address of either family in the kernel's form: for IPv4 it is a struct sockaddr_in.
type peer unix.RawSockaddrInet6

// newPeer returns an address with a port of UDP; 0: of ICMP.
func newPeer(a netip.Addr, zone uint32, port uint16) peer {
	p := peer{Family: unix.AF_INET6, Addr: a.As16(), Scope_id: zone}
	if a.Is4() {
		*p.as4() = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: a.As4()}
	}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&p.Port))[:], port) // both families have it at this offset
	return p
}

func (p *peer) as4() *unix.RawSockaddrInet4 { return (*unix.RawSockaddrInet4)(unsafe.Pointer(p)) }

// address returns the address without the zone.
func (p *peer) address() netip.Addr {
	if p.Family == unix.AF_INET {
		return netip.AddrFrom4(p.as4().Addr)
	}
	return netip.AddrFrom16(p.Addr)
}

// bytes returns the size of the kernel's struct.
func (p *peer) bytes() uint32 {
	if p.Family == unix.AF_INET {
		return unix.SizeofSockaddrInet4
	}
	return unix.SizeofSockaddrInet6
}

// outbox has messages to one address that are sent together. It points into itself, so it is never copied.
type outbox struct {
	to       peer
	heads    [batchMax][icmpBytes + headBytes]byte
	zeros    []byte // follow each head
	vectors  [batchMax][2]unix.Iovec
	messages [batchMax]mmsghdr
}

// newOutbox makes room for messages of a size that includes their ICMP or UDP header; the kernel makes the UDP header.
func newOutbox(to peer, bytes int, isUDP bool) *outbox {
	o := &outbox{to: to, zeros: make([]byte, bytes-icmpBytes-headBytes)}
	for i := range o.messages {
		v := &o.vectors[i]
		ours := o.heads[i][:]
		if isUDP {
			ours = ours[icmpBytes:]
		}
		v[0].Base = &ours[0]
		v[0].SetLen(len(ours))
		v[1].Base = unsafe.SliceData(o.zeros)
		v[1].SetLen(len(o.zeros))
		h := &o.messages[i].header
		h.Name, h.Namelen = (*byte)(unsafe.Pointer(&o.to)), o.to.bytes()
		h.Iov = &v[0]
		h.SetIovlen(len(v))
	}
	return o
}

// put turns a message into a probe. Its checksum is the head's, because zeros add nothing.
func (o *outbox) put(i int, is6 bool, code byte, id uint16, h head) {
	b := o.heads[i][:]
	h.put(b[icmpBytes:])
	echoHead(b, is6, true, code, id, uint16(h.sequence))
}

// sendBatch sends the messages from one index up to another. It returns the number that the kernel took and, if it did
// not take all, its error for the next one.
func (s *socket) sendBatch(o *outbox, from, to int) (int, error) {
	sent := 0
	for from+sent < to {
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&o.messages[from+sent])), uintptr(to-from-sent), 0, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return sent, errno
		}
		sent += int(n)
	}
	return sent, nil
}

// inbox has room for messages that are received together. It points into itself, so it is never copied.
type inbox struct {
	from     [batchMax]peer
	controls [batchMax]control
	buffers  [batchMax][inboxBytes]byte
	vectors  [batchMax]unix.Iovec
	messages [batchMax]mmsghdr
}

func newInbox() *inbox {
	b := &inbox{}
	for i := range b.messages {
		b.vectors[i].Base = &b.buffers[i][0]
		b.vectors[i].SetLen(inboxBytes)
		h := &b.messages[i].header
		h.Name = (*byte)(unsafe.Pointer(&b.from[i]))
		h.Iov = &b.vectors[i]
		h.SetIovlen(1)
	}
	return b
}

// receive reads the present messages, and does not wait for any.
func (s *socket) receive() (int, error) {
	for i := range s.box.messages {
		h := &s.box.messages[i].header
		h.Namelen = unix.SizeofSockaddrInet6
		if s.isUDP {
			h.Control = (*byte)(unsafe.Pointer(&s.box.controls[i]))
			h.SetControllen(localBytes)
		}
	}
	flags := unix.MSG_DONTWAIT
	if s.isUDP {
		flags |= unix.MSG_TRUNC // reports the size of the whole message, even if only a part is kept
	}
	n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.box.messages[0])), batchMax, uintptr(flags), 0, 0)
	switch {
	case errno == unix.EAGAIN || errno == unix.EINTR:
		return 0, nil
	case errno != 0:
		return 0, fmt.Errorf("receive echo messages: %w", errno)
	}
	return int(n), nil
}

// arrival returns a message of the last receive; errNotOurs: it must be ignored.
func (s *socket) arrival(i int) (arrival, error) {
	b := s.box.buffers[i][:min(inboxBytes, s.box.messages[i].bytes)]
	if s.isUDP {
		h, err := parseHead(b)
		return arrival{head: h, from: s.box.from[i], bytes: int(s.box.messages[i].bytes), local: s.local(i), payload: b[min(len(b), headBytes):]}, err
	}
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
	return arrival{head: h, from: s.box.from[i], id: binary.BigEndian.Uint16(b[4:]), payload: b[min(len(b), icmpBytes+headBytes):]}, err
}

// receiveAll reads the present messages, each with the time at which the process got it. more: there may be more.
func (s *socket) receiveAll(now func() uint64, take func(m arrival, at uint64) error) (more bool, err error) {
	for range passMax / batchMax {
		n, err := s.receive()
		at := now()
		for i := 0; i < n && err == nil; i++ {
			var m arrival
			if m, err = s.arrival(i); err == nil {
				err = take(m, at)
			} else if errors.Is(err, errNotOurs) {
				err = nil
			}
		}
		if err != nil || n < batchMax {
			return false, err
		}
	}
	return true, nil
}
