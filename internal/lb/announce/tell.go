package announce

import (
	"context"
	"net"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/wire"
	"github.com/vishvananda/netlink"
)

// probe asks ProbeCount times whether another host has the address and returns the hardware address of the
// first host that answers, or nil.
func (a *Announcer) probe(ctx context.Context, link netlink.Link, j *job) (net.HardwareAddr, error) {
	w, err := wire.Open(a.ns, link, j.addr.Is4())
	if err != nil {
		return nil, err
	}
	defer w.Close()
	defer context.AfterFunc(ctx, w.Close)() // ends a receive under way
	mac := link.Attrs().HardwareAddr
	frame, err := wire.Probe(mac, j.addr)
	if err != nil {
		return nil, err
	}
	var owner net.HardwareAddr
	for i := range a.opts.ProbeCount {
		if err := w.Send(frame); err != nil {
			return nil, err
		}
		listen := a.opts.ProbeInterval
		if i == a.opts.ProbeCount-1 {
			listen = a.opts.ProbeWait
		}
		err := w.Receive(listen, func(frame []byte) bool {
			owner = conflict(frame, mac, j.addr)
			return owner == nil
		})
		if err != nil || owner != nil {
			return owner, err
		}
	}
	return nil, nil
}

// tell sends the announcements. It stops early when told to start over.
func (a *Announcer) tell(ctx context.Context, j *job) error {
	for i := range a.opts.AnnounceCount {
		if i > 0 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-j.again:
				j.startOver() // for run to see
				return nil
			case <-time.After(a.opts.AnnounceInterval):
			}
		}
		link, err := a.link(j.iface)
		if err != nil {
			return err
		}
		frame, err := wire.Announcement(link.Attrs().HardwareAddr, j.addr)
		if err != nil {
			return err
		}
		w, err := wire.Open(a.ns, link, j.addr.Is4())
		if err != nil {
			return err
		}
		err = w.Send(frame)
		w.Close()
		if err != nil {
			return err
		}
	}
	return nil
}
