package health

import (
	"cmp"
	"container/heap"
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// queue holds the checks that are not being probed, the next one first.
type queue []*check

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	c := x.(*check)
	c.index = len(*q)
	*q = append(*q, c)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	last := len(*q) - 1
	c := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	c.index = -1
	return c
}

// run starts probes when they are due, until the monitor is closed.
func (m *Monitor) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-timer.C:
		case <-m.wake:
		}
		if next := m.startDue(); !next.IsZero() {
			timer.Reset(time.Until(next))
		}
	}
}

// startDue starts the due probes, and returns when it has to be called again; zero: when woken.
func (m *Monitor) startDue() (next time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for len(m.queue) > 0 && !m.queue[0].due.After(now) {
		c := heap.Pop(&m.queue).(*check)
		m.running.Go(func() { m.runCheck(c, c.target, c.prober) })
	}
	if len(m.queue) > 0 {
		next = m.queue[0].due
	}
	if !m.ramps.IsZero() {
		if !m.ramps.After(now) {
			m.ramps = time.Time{} // Serve, which is to be called now, sets it again
			notify(m.changed)
		} else if next.IsZero() || m.ramps.Before(next) {
			next = m.ramps
		}
	}
	return next
}

// runCheck runs one probe, from the wait for its turn to the time of the next probe. t and p are the
// check's at the moment it was due: Update may replace them meanwhile.
func (m *Monitor) runCheck(c *check, t target, p prober) {
	permits := m.sockets
	if t.health.Check == model.CheckExec {
		permits = m.execs
	}
	select {
	case permits <- struct{}{}:
	case <-m.ctx.Done():
		return
	}
	started := time.Now()
	ctx, cancel := context.WithTimeout(m.ctx, t.health.Timeout)
	err := m.options.Uplinks.judge(c, t, p.probe(ctx), started)
	cancel()
	<-permits
	if m.ctx.Err() != nil {
		return // it was cut off: that says nothing about the backend
	}
	m.finish(c, err, started)
}

// finish takes a result and puts the check back into the queue.
func (m *Monitor) finish(c *check, err error, started time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	late := started.Sub(c.due)
	m.probes++
	m.lateMax = max(m.lateMax, late)
	if late >= lateFrom {
		m.lateAll++
		m.totals.Late++
	}
	switch {
	case isHere(err):
		m.totals.NotMade++
	case err != nil:
		m.totals.Failed++
	default:
		m.totals.Passed++
	}
	c.probed = true
	if m.awaited[c] {
		delete(m.awaited, c)
		if len(m.awaited) == 0 {
			defer m.allProbed() // once its result is in the state
		}
	}
	if c.gone {
		return
	}
	now := time.Now()
	c.notJudged = ""
	if isHere(err) {
		c.notJudged = err.Error()
		m.hereCount, m.hereError = m.hereCount+1, err
	} else {
		m.observe(c, err, now)
	}
	// The next time counts from the time at which the check was due, so that checks keep their distance from
	// each other; times in the past are skipped.
	c.due = c.due.Add(interval(c.target.health))
	if c.due.Before(now) {
		c.due = now
	}
	heap.Push(&m.queue, c)
	if c.index == 0 {
		notify(m.wake)
	}
}

// observe passes a result to the check's machine, and reports a change.
func (m *Monitor) observe(c *check, err error, now time.Time) {
	cause := ""
	if err != nil {
		cause = err.Error()
	}
	before := c.machine.state
	v := c.machine.observe(now, cause, c.target.health.Rise, c.target.health.Fall, func() bool { return m.spares(c) })
	if v.changed {
		c.changes++
		m.serving.doubt(c.members)
	}
	if v.changed || v.resting {
		t := Transition{Service: c.service, Pool: c.pool, Backend: c.backend, Name: c.target.name, At: now, From: before, To: c.machine.state,
			Cause: c.machine.lastError, Results: v.results, Lasted: v.lasted}
		if v.resting {
			t.RestsUntil = c.machine.restsUntil()
		}
		if m.options.OnTransition != nil {
			m.options.OnTransition(t)
		}
		notify(m.changed)
	}
}

// spares reports whether every service of a check has another backend of the same family that takes flows, or
// would as a backup.
func (m *Monitor) spares(c *check) bool {
	names := map[string]bool{}
	for _, name := range c.members {
		names[name] = true
	}
	for _, s := range m.list {
		if names[s.Name] && !slices.ContainsFunc(s.Backends, func(b model.Backend) bool {
			if b.BackendAddress == c.backend || b.Address.Is4() != c.backend.Address.Is4() || b.EffectiveWeight() == 0 {
				return false
			}
			state := b.Override.Health
			if other := m.members[member{s.Name, b.BackendAddress}]; state == "" && other != nil {
				state = other.machine.state
			}
			return state == model.HealthUp
		}) {
			return false
		}
	}
	return true
}

// interval returns the time to the next probe, with jitter.
func interval(h model.Health) time.Duration {
	spread := h.Interval * time.Duration(h.Jitter) / 100
	return max(h.Interval-spread+rand.N(2*spread+1), time.Millisecond)
}

// probed returns the endpoint of a backend's check: the configured address, or else its own. The port may also
// be the check's, or else the backend's, or else the only port of the service. With direct return a backend
// without a configured address is checked at the VIP, in that mode; a program finds its own endpoint.
func probed(s *model.Service, b model.Backend) endpoint {
	address, direct := b.Address, model.Forwarding("")
	switch {
	case b.CheckAt.Address.IsValid():
		address = b.CheckAt.Address
	case s.Forwarding.Direct() && s.Health.Check != model.CheckExec:
		address, direct = vipFor(s, b), s.Forwarding
	}
	return endpoint{netip.AddrPortFrom(address, cmp.Or(b.CheckAt.Port, s.Health.Port, b.Port, onlyPort(s))), direct}
}

// vipFor returns the first of the service's VIPs that the backend serves: one of its family, or any, since all
// backends may be of the other family.
func vipFor(s *model.Service, b model.Backend) (vip netip.Addr) {
	for _, f := range s.Frontends {
		switch {
		case f.Address.Is4() == b.Address.Is4():
			return f.Address
		case !vip.IsValid():
			vip = f.Address
		}
	}
	return vip
}

// onlyPort returns the single port of all the service's frontends, or 0.
func onlyPort(s *model.Service) (port uint16) {
	for _, f := range s.Frontends {
		if !f.Ports.Exact() || port != 0 && port != f.Ports.First {
			return 0
		}
		port = f.Ports.First
	}
	return port
}
