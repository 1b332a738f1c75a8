package announce

import (
	"fmt"
	"net"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/wire"
)

// standbyWait is the number of retry intervals that a standby waits before it asks. The host that is to have the address asks at least
// every 1.25 intervals, and needs the time of its probes.
const standbyWait = 2

// standsBack makes a standby leave the address, if it has to. It returns the time to wait before the next round; 0: none.
func (a *Announcer) standsBack(j *job) time.Duration {
	a.mu.Lock()
	waits, had := j.waits, j.state.Owned
	j.waits = false
	pause := standbyWait * a.paced(a.opts.RetryInterval)
	a.mu.Unlock()
	if !waits {
		return 0
	}
	if had {
		if err := a.opts.Disown(j.addr, j.iface); err != nil {
			a.opts.Log.Error("cannot make the data plane stop answering for an address that another host should have", "address", j.addr, "error", err)
		}
		a.set(j, func(s *State) { s.Owned, s.Owner, s.Err = false, nil, "" })
		for _, code := range []string{condition.AddressTakenOver, condition.AddressContested, condition.AnnounceFailed} {
			a.opts.Conditions.Clear(code, j.subjectIn(a))
		}
		a.opts.Log.Info("leaving an address to the host that should have it", "address", j.addr)
	}
	return pause
}

// sayTakenOver raises the condition of a standby that has the address.
func (a *Announcer) sayTakenOver(j *job) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !j.standby {
		return
	}
	a.opts.Conditions.Raise(condition.Condition{ // under the lock, so that its end comes afterwards
		Code: condition.AddressTakenOver, Subject: j.subject(),
		Text: fmt.Sprintf("no host answered for %s, so this host announces it, as the standby", j.subject()),
	})
}

// bid tells a host that has an address that this host is to have it. It reports whether this is the first bid since the address was here.
func (a *Announcer) bid(j *job, owner net.HardwareAddr) (first bool) {
	a.mu.Lock()
	standby, before := j.standby, j.bid
	j.bid = j.bid || !standby
	a.mu.Unlock()
	if standby {
		return false
	}
	link, err := a.link(j.iface)
	var frame []byte
	if err == nil {
		frame, err = wire.Bid(link.Attrs().HardwareAddr, owner, j.addr)
	}
	if err == nil {
		err = a.sender.Send(j.iface, frame)
	}
	if err != nil {
		a.opts.Log.Debug("cannot send the bid for an address to the host that has it", "address", j.addr, "owner", owner, "error", err)
	}
	return !before
}
