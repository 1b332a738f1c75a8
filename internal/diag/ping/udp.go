package ping

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// local is the address of this host that a datagram came to, and that an answer has to come from: a host behind a balancer has the
// balancer's address beside its own. Of IPv4 it is the first four bytes.
type local [16]byte

// localBytes is room for struct cmsghdr with a struct in_pktinfo or in6_pktinfo (ip(7), ipv6(7)), in units of its alignment.
const localBytes = unix.SizeofCmsghdr + (unix.SizeofInet6Pktinfo+7)/8*8

// control is a message beside a datagram.
type control struct {
	header unix.Cmsghdr
	data   [localBytes - unix.SizeofCmsghdr]byte
}

// openUDP opens a socket for probes of UDP; port 0: a client's.
func openUDP(is6 bool, port uint16, filter int) (*socket, error) {
	family, name, level, option := unix.AF_INET, "IPv4", unix.IPPROTO_IP, unix.IP_PKTINFO
	if is6 {
		family, name, level, option = unix.AF_INET6, "IPv6", unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket of UDP for %s: %w", name, err)
	}
	s := &socket{fd: fd, is6: is6, isUDP: true, box: newInbox()}
	mtu := unix.IP_MTU_DISCOVER
	if is6 {
		mtu = unix.IPV6_MTU_DISCOVER
	}
	// As for the socket of echo messages: no fragments.
	errs := []error{unix.SetsockoptInt(fd, level, mtu, unix.IP_PMTUDISC_DO), unix.SetsockoptInt(fd, level, option, 1), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, filter)}
	var at unix.Sockaddr = &unix.SockaddrInet4{Port: int(port)}
	if is6 {
		errs = append(errs, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1))
		at = &unix.SockaddrInet6{Port: int(port)}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the socket of UDP for %s: %w", name, err), s.close())
	}
	if err := unix.Bind(fd, at); err != nil {
		return nil, errors.Join(fmt.Errorf("listen at port %d of UDP, %s: %w; choose another --port, on both hosts", port, name, err), s.close())
	}
	s.makeRoom()
	s.blank = make([]byte, BytesMax)
	return s, nil
}

// local returns the address that a message of the last receive came to.
func (s *socket) local(i int) (l local) {
	c := &s.box.controls[i]
	if !s.isUDP || s.box.messages[i].header.Controllen < unix.SizeofCmsghdr+unix.SizeofInet4Pktinfo {
		return l
	}
	switch {
	case !s.is6 && c.header.Level == unix.IPPROTO_IP && c.header.Type == unix.IP_PKTINFO:
		info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&c.data))
		copy(l[:], info.Addr[:])
	case s.is6 && c.header.Level == unix.IPPROTO_IPV6 && c.header.Type == unix.IPV6_PKTINFO:
		info := (*unix.Inet6Pktinfo)(unsafe.Pointer(&c.data))
		l = info.Addr
	}
	return l
}

// sendFrom sends a datagram from an address of this host.
func (s *socket) sendFrom(b []byte, from local, to peer) error {
	var c control
	if s.is6 {
		c.header = unix.Cmsghdr{Level: unix.IPPROTO_IPV6, Type: unix.IPV6_PKTINFO}
		c.header.SetLen(unix.CmsgLen(unix.SizeofInet6Pktinfo))
		(*unix.Inet6Pktinfo)(unsafe.Pointer(&c.data)).Addr = from
	} else {
		c.header = unix.Cmsghdr{Level: unix.IPPROTO_IP, Type: unix.IP_PKTINFO}
		c.header.SetLen(unix.CmsgLen(unix.SizeofInet4Pktinfo))
		copy((*unix.Inet4Pktinfo)(unsafe.Pointer(&c.data)).Spec_dst[:], from[:])
	}
	vector := unix.Iovec{Base: unsafe.SliceData(b)}
	vector.SetLen(len(b))
	m := unix.Msghdr{Name: (*byte)(unsafe.Pointer(&to)), Namelen: to.bytes(), Iov: &vector, Control: (*byte)(unsafe.Pointer(&c))}
	m.SetIovlen(1)
	m.SetControllen(int(c.header.Len))
	if _, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&m)), 0); errno != 0 {
		return errno
	}
	return nil
}

// answer sends a probe back: its head, and zeros up to its size.
func (s *socket) answer(m arrival) error {
	b := s.blank[:max(headBytes, min(m.bytes, len(s.blank)))]
	h := m.head
	h.isAnswer = true
	h.put(b)
	return s.sendFrom(b, m.local, m.from)
}
