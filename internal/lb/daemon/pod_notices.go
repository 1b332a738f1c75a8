package daemon

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// podNotices receives notices about interfaces and their addresses. Its methods are for one caller at a time, except for wake.
type podNotices struct {
	wake chan struct{} // receives when something has changed; capacity 1

	socket  *nl.NetlinkSocket // nil: no notices are received
	closing chan struct{}
	ended   chan struct{}

	mu      sync.Mutex
	touched map[int]bool // indices of interfaces whose addresses have changed
	all     bool         // notices were lost: all addresses may have changed
}

func newPodNotices() *podNotices { return &podNotices{wake: make(chan struct{}, 1)} }

// start begins to listen. If that fails, the next look without a notice finds the changes.
func (n *podNotices) start(log *slog.Logger) {
	if n.socket != nil {
		return
	}
	s, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		log.Warn("cannot subscribe to changes of interfaces: shunt looks for new interfaces of pods only every ten seconds", "error", err)
		return
	}
	n.socket, n.closing, n.ended = s, make(chan struct{}), make(chan struct{})
	go n.listen(log)
}

func (n *podNotices) stop() {
	if n.socket == nil {
		return
	}
	close(n.closing)
	n.socket.Close()
	<-n.ended
	n.socket = nil
}

func (n *podNotices) listen(log *slog.Logger) {
	defer close(n.ended)
	for {
		messages, from, err := n.socket.Receive()
		select {
		case <-n.closing:
			return
		default:
		}
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) {
			log.Warn("the subscription to changes of interfaces has ended: shunt looks for new interfaces of pods only every ten seconds", "error", err)
			return
		}
		if err == nil && from.Pid != nl.PidKernel {
			continue
		}
		n.hear(messages, err != nil)
	}
}

// hear receives notices.
func (n *podNotices) hear(messages []syscall.NetlinkMessage, lost bool) {
	n.mu.Lock()
	n.all = n.all || lost
	for _, m := range messages {
		// struct ifaddrmsg: index at byte 4.
		if (m.Header.Type == unix.RTM_NEWADDR || m.Header.Type == unix.RTM_DELADDR) && len(m.Data) >= unix.SizeofIfAddrmsg {
			if n.touched == nil {
				n.touched = map[int]bool{}
			}
			n.touched[int(binary.NativeEndian.Uint32(m.Data[4:]))] = true
		}
	}
	n.mu.Unlock()
	n.again()
}

// again wakes without a notice.
func (n *podNotices) again() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// take returns the changes of addresses that were heard since it was last called.
func (n *podNotices) take() (touched map[int]bool, all bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	touched, all = n.touched, n.all
	n.touched, n.all = nil, false
	return touched, all
}
