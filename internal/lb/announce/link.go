package announce

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// watchLinks starts over for every address on an interface that comes back: another host may have the address
// by now, and a moved cable ends at a switch that has to learn the address. If notifications were lost, every
// interface counts as come back.
func (a *Announcer) watchLinks() error {
	open := func() (*nl.NetlinkSocket, error) {
		s, err := nl.SubscribeAt(a.ns, netns.None(), unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
		if err != nil {
			return nil, fmt.Errorf("subscribe to interface changes: %w", err)
		}
		return s, nil
	}
	s, err := open()
	if err != nil {
		return err
	}
	links, err := a.handle.LinkList()
	if err != nil {
		s.Close()
		return fmt.Errorf("list interfaces: %w", err)
	}
	working := map[int]bool{}
	for _, l := range links {
		working[l.Attrs().Index] = works(l.Attrs().RawFlags)
	}
	a.running.Go(func() {
		for a.ctx.Err() == nil {
			if s == nil {
				if s, err = open(); err != nil {
					a.opts.Log.Error("cannot watch interfaces; trying again", "error", err)
					select {
					case <-a.ctx.Done():
					case <-time.After(a.opts.FailureInterval):
					}
					continue
				}
				a.cameBack(func(location) bool { return true })
			}
			err := a.readLinks(s, working)
			s.Close()
			s = nil
			if a.ctx.Err() == nil {
				a.opts.Log.Warn("interface notifications were lost; announcing everything again", "error", err)
			}
		}
		if s != nil {
			s.Close()
		}
	})
	return nil
}

// readLinks handles notifications until the socket fails or the announcer ends.
func (a *Announcer) readLinks(s *nl.NetlinkSocket, working map[int]bool) error {
	defer context.AfterFunc(a.ctx, s.Close)()
	for {
		msgs, from, err := s.Receive()
		if err != nil {
			return err
		}
		for _, m := range msgs {
			// struct ifinfomsg: family at byte 0, index at byte 4, flags at byte 8. Messages of a bridge about
			// its ports have another family.
			if from.Pid != nl.PidKernel || len(m.Data) < unix.SizeofIfInfomsg || m.Data[0] != unix.AF_UNSPEC {
				continue
			}
			index := int(binary.NativeEndian.Uint32(m.Data[4:]))
			if m.Header.Type == unix.RTM_DELLINK {
				delete(working, index)
				continue
			}
			now := works(binary.NativeEndian.Uint32(m.Data[8:]))
			if now && !working[index] {
				a.cameBack(func(p location) bool { return p.iface == index })
			}
			working[index] = now
		}
	}
}

func works(flags uint32) bool {
	return flags&(unix.IFF_UP|unix.IFF_RUNNING) == unix.IFF_UP|unix.IFF_RUNNING
}

func (a *Announcer) cameBack(which func(location) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for p, j := range a.work {
		if which(p) {
			j.waits = j.waits || j.standby && !j.state.Owned // the link of the host that is to have it may have come back, too
			j.startOver()
		}
	}
}
