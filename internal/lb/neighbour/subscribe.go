package neighbour

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// event is one notification of the kernel, reduced to the fields that matter here.
type event struct {
	neighbour bool // key, entry and deleted are meant; otherwise routes may differ now
	lost      bool // notifications were lost: read everything again
	key       key
	entry     entry
	deleted   bool
}

// receiveBufferBytes holds the notifications of some thousand routes while the loop is
// busy; more than fit are noticed as ENOBUFS and answered with a full reading.
const receiveBufferBytes = 1 << 20

// subscribe delivers the kernel's notifications until ctx ends. One socket takes all
// groups, so they keep the order in which things happened. When the socket overflows or
// fails it is opened again and an event with lost set is sent.
func subscribe(ctx context.Context, ns netns.NsHandle, opts Options, stopped *sync.WaitGroup) (<-chan event, error) {
	// The caller may close its handle of the namespace while we might still have to
	// open a socket in it.
	ns, err := namespace.Keep(&ns)
	if err != nil {
		return nil, err
	}
	open := func() (*nl.NetlinkSocket, error) {
		s, err := nl.SubscribeAt(ns, netns.None(), unix.NETLINK_ROUTE,
			unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH,
			unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
			unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
			unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
		if err != nil {
			return nil, fmt.Errorf("subscribe to neighbour, route, link and address changes: %w", err)
		}
		if s.SetReceiveBufferSize(opts.receiveBuffer, true) != nil {
			// Beyond the limit only with CAP_NET_ADMIN in the first user namespace.
			_ = s.SetReceiveBufferSize(opts.receiveBuffer, false)
		}
		return s, nil
	}
	s, err := open()
	if err != nil {
		namespace.Close(ns)
		return nil, err
	}
	events := make(chan event)
	stopped.Go(func() {
		defer namespace.Close(ns)
		for ctx.Err() == nil {
			if s == nil {
				if s, err = open(); err != nil {
					opts.Log.Error("cannot watch the network; trying again", "error", err)
					pause(ctx, time.Second)
					continue
				}
				send(ctx, events, event{lost: true})
			}
			err := receive(ctx, s, events)
			s.Close()
			s = nil
			if ctx.Err() == nil {
				opts.Log.Warn("network notifications were lost; reading everything again", "error", err)
			}
		}
	})
	return events, nil
}

// receive forwards the socket's messages until it fails or ctx ends.
func receive(ctx context.Context, s *nl.NetlinkSocket, events chan<- event) error {
	release := context.AfterFunc(ctx, s.Close) // ends a Receive under way
	defer release()
	for {
		msgs, from, err := s.Receive()
		if err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return err
		}
		if from.Pid != nl.PidKernel {
			continue
		}
		for _, m := range msgs {
			e := event{}
			switch m.Header.Type {
			case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
				var ok bool
				if e.key, e.entry, ok = parseEntry(m.Data); !ok {
					continue
				}
				e.neighbour = true
				e.deleted = m.Header.Type == unix.RTM_DELNEIGH
			}
			if !send(ctx, events, e) {
				return ctx.Err()
			}
		}
	}
}

func send(ctx context.Context, events chan<- event, e event) bool {
	select {
	case events <- e:
		return true
	case <-ctx.Done():
		return false
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
