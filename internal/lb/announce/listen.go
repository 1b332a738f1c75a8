package announce

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/wire"
)

// An address may turn out to have two owners after it was claimed: two parts of a network that did not
// see each other are joined again, or an operator gives a host the address by hand (RFC 5227 section
// 2.4, RFC 4862 section 5.4.4). The network does not report this by itself, because each owner sends its answers
// only to the host that asks. So an owner asks from time to time (check), and listens to all answers and
// announcements (listen, heard).
//
// The rule of heard, which all instances follow without talking:
//
//   - Another shunt, known by the mark of its announcements, with a lower hardware address: yield.
//   - Another shunt with a higher hardware address: announce again, and the other shunt yields.
//   - Any other host: announce again, at most every DefendInterval, and stay. This is (c) of RFC 5227 section 2.4,
//     for addresses that others rely on.
//   - A standby leaves the address to any host that has it, and to the host that is to have it, which bids for it. A standby makes no
//     bid, so two standbys with different knowledge do not take an address from each other.

// segment is a network segment, on which one listener listens.
type segment struct {
	iface int
	v4    bool
}

func (p location) segment() segment { return segment{p.iface, p.addr.Is4()} }

// listenStep is the time between two checks whether a listener is still needed, and which hardware address
// frames of this host have.
const listenStep = time.Second

// listen starts reading other hosts' frames on an address's interface, until no address is announced there. It
// returns when reading has begun, or has failed for now.
func (a *Announcer) listen(ctx context.Context, p location) {
	select {
	case <-a.listener(p.segment()):
	case <-ctx.Done():
	}
}

// listener returns a channel that is closed when a listener has begun.
func (a *Announcer) listener(at segment) <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ready := a.listening[at]; ready != nil {
		return ready
	}
	ready := make(chan struct{})
	begun := sync.OnceFunc(func() { close(ready) })
	if a.ctx.Err() != nil {
		begun()
		return ready
	}
	a.listening[at] = ready
	a.running.Go(func() {
		defer begun()
		for a.needs(at) {
			if err := a.listenOnce(at, begun); err != nil && a.ctx.Err() == nil {
				begun()
				// The interface is down or gone: each of its addresses reports that itself, and no frame can
				// arrive.
				a.opts.Log.Debug("cannot listen for other hosts that have an address; trying again", "error", err)
				select {
				case <-a.ctx.Done():
				case <-time.After(a.opts.FailureInterval):
				}
			}
		}
	})
	return ready
}

// needs reports whether any address is announced on the segment, and removes the listener if not.
func (a *Announcer) needs(at segment) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ctx.Err() == nil {
		for p := range a.work {
			if p.segment() == at {
				return true
			}
		}
	}
	delete(a.listening, at)
	return false
}

// listenOnce listens until the socket fails, or is not needed for now.
func (a *Announcer) listenOnce(at segment, begun func()) error {
	link, err := a.link(at.iface)
	if err != nil {
		return err
	}
	w, err := wire.Open(a.ns, link, at.v4)
	if err != nil {
		return err
	}
	defer w.Close()
	begun()
	for a.stillNeeds(at) {
		if link, err = a.link(at.iface); err != nil {
			return err
		}
		mac := link.Attrs().HardwareAddr
		if err := w.Receive(listenStep, func(frame []byte) bool {
			if c, ok := claimOf(frame); ok && !c.probe && !bytes.Equal(c.mac, mac) {
				a.heard(location{c.addr, at.iface}, mac, c)
			}
			return a.ctx.Err() == nil
		}); err != nil {
			return err
		}
	}
	return nil
}

func (a *Announcer) stillNeeds(at segment) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for p := range a.work {
		if p.segment() == at {
			return a.ctx.Err() == nil
		}
	}
	return false
}

// heard applies the rule above when another host claims an address, or bids for it. mac is ours.
func (a *Announcer) heard(p location, mac net.HardwareAddr, c claim) {
	a.mu.Lock()
	j := a.work[p]
	if j == nil || !j.state.Owned {
		a.mu.Unlock()
		return
	}
	if j.standby {
		j.waits = true
		j.startOver()
	}
	if j.standby || c.bid {
		a.mu.Unlock()
		return
	}
	if c.marked && bytes.Compare(c.mac, mac) < 0 {
		j.lost, j.ours = c.mac, mac
		j.startOver()
		a.mu.Unlock()
		return
	}
	pause := a.opts.DefendInterval
	if c.marked {
		pause = a.opts.DefendInterval / 50 // it yields when it hears this announcement
	}
	defend := time.Since(j.defended) >= pause
	if defend {
		j.defended = time.Now()
	}
	j.contested = time.Now()
	a.opts.Conditions.Raise(condition.Condition{ // under the lock, so that Withdraw clears it afterwards
		Code: condition.AddressContested, Subject: j.subject(),
		Text: fmt.Sprintf("%s answers for %s, too; this host (%s) keeps the address and has announced it again", c.mac, j.subject(), mac),
	})
	a.mu.Unlock()
	if !defend {
		return
	}
	frame, err := wire.Announcement(mac, p.addr)
	if err == nil {
		err = a.sender.Send(p.iface, frame)
	}
	if err != nil {
		a.opts.Log.Warn("cannot announce an address again that another host answers for, too", "address", p.addr, "other", c.mac, "error", err)
	}
}

// yields leaves an address to another shunt, if one was heard. A later round checks whether the address is free
// again.
func (a *Announcer) yields(j *job) bool {
	a.mu.Lock()
	other, ours := j.lost, j.ours
	j.lost = nil
	a.mu.Unlock()
	if other == nil {
		return false
	}
	a.inUse(j, other, fmt.Sprintf("is in use: another shunt (%s) had it at the same time as this one (%s), and keeps it because its MAC address is lower", other, ours))
	// The frame goes to the other shunt alone: that shunt announces the address again, and reports a conflict.
	frame, err := wire.Announcement(ours, j.addr)
	if err == nil {
		copy(frame, other)
		err = a.sender.Send(j.iface, frame)
	}
	if err != nil {
		a.opts.Log.Debug("cannot tell another shunt that this one has given up an address", "address", j.addr, "other", other, "error", err)
	}
	return true
}

// check asks whether another host answers for an address that is ours; listen receives the answers. check also
// ends a conflict whose other host has not been heard for some time.
func (a *Announcer) check(j *job) {
	link, err := a.link(j.iface)
	if err != nil {
		return // when it works again, everything starts over
	}
	frame, err := wire.Probe(link.Attrs().HardwareAddr, j.addr)
	if err == nil {
		err = a.sender.Send(j.iface, frame)
	}
	if err != nil {
		a.opts.Log.Debug("cannot ask whether another host has an address; trying again", "address", j.addr, "error", err)
	}
	a.mu.Lock()
	over := !j.contested.IsZero() && time.Since(j.contested) > 3*a.paced(a.opts.CheckInterval)
	if over {
		j.contested = time.Time{}
	}
	a.mu.Unlock()
	if over {
		a.opts.Conditions.Clear(condition.AddressContested, j.subjectIn(a))
	}
}

// probesPerSecond limits the repeated questions for all addresses together.
const probesPerSecond = 50

// paced returns the interval between questions for one address, which is longer with many addresses. The caller
// holds mu.
func (a *Announcer) paced(interval time.Duration) time.Duration {
	return max(interval, time.Duration(len(a.work))*time.Second/probesPerSecond)
}
