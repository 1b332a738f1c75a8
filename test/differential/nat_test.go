package differential_test

import (
	"net"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// searchMax is the number of ports that a search tries. In a pool that is not larger it finds a free one.
const searchMax = 64

// connection is a flow through the NAT: the client's tuple, and the one towards the backend.
type connection struct {
	client, backend tuple
	service         *balanced
	server          *server
	towards         hop // to the client
	// State that decides about later packets.
	reset   bool
	closed  [2]bool // by the client, by the backend
	counted bool    // among the flows of a service with a bound
	hidden  bool    // no packet has left yet, so the source port has not been seen
}

// hop is the station that the client's packets come from.
type hop struct {
	arm     int
	station net.HardwareAddr
}

// direction is one of a flow's two.
type direction struct {
	*connection
	fromBackend bool
}

// other is the tuple that packets of this direction leave with.
func (d *direction) other() tuple {
	if d.fromBackend {
		return d.client.reversed()
	}
	return d.backend
}

func (d *direction) out() (arm int, station net.HardwareAddr) {
	if d.fromBackend {
		return d.towards.arm, d.towards.station
	}
	return d.server.arm, d.server.station
}

// isOver reports whether a SYN begins another connection, and another flow may take the port.
func (c *connection) isOver() bool { return c.reset || c.closed[0] && c.closed[1] }

// open begins a flow.
func (o *oracle) open(r *reading, s *balanced, t tuple) want {
	if t.protocol == tcp && r.flags&flagRST != 0 { // the end of a connection that does not exist
		return pass(notOurs)
	}
	if why := o.suspicious(r); why != none {
		return drop(why)
	}
	switch {
	case o.isLoop(r.source):
		return drop(loop)
	case o.isLastHop(r):
		return o.expire(r)
	case !o.allows(s, r.source):
		return drop(denied)
	case s.overRate(r.source):
		return drop(sourceRate)
	case s.Policy.FlowsMax > 0 && s.flows >= int(s.Policy.FlowsMax):
		return drop(serviceFull)
	}
	to := o.place(s, t)
	switch {
	case to == nil:
		return o.turnAway(r, s)
	case o.isGone(to):
		return drop(backendGone)
	case to.at.Addr() == unsourced:
		return drop(noSource)
	}
	c := &connection{client: t, service: s, server: to, towards: hop{r.arm, slices.Clone(r.frame[6:12])}}
	displaced, ok := o.claim(r, c)
	if !ok {
		return drop(portsExhausted)
	}
	if c.counted = s.Policy.FlowsMax > 0; c.counted {
		s.flows++
	}
	o.flows[t] = &direction{c, false}
	if !c.hidden {
		o.flows[c.backend.reversed()] = &direction{c, true}
	}
	w := o.send(r, o.flows[t])
	if displaced {
		w.add(portTaken)
	}
	return w
}

func (w *want) add(r reason) {
	i := slices.Index(w.notes[:], none)
	w.notes[i] = r
}

// claim learns the source port that the program has claimed for a new flow, if the packet shows it, and checks it.
// false: there is none.
func (o *oracle) claim(r *reading, c *connection) (displaced, ok bool) {
	port := c.server.at.Port()
	if port == 0 {
		port = c.client.to.Port()
	}
	c.backend = tuple{netip.AddrPortFrom(c.client.from.Addr(), c.client.from.Port()), netip.AddrPortFrom(c.server.at.Addr(), port), c.client.protocol}
	own := uint16(0) // the client's, which nat-destination tries first
	if c.service.Forwarding == model.ForwardingNATDestination {
		if own = c.client.from.Port(); own != 0 && o.flows[c.backend.reversed()] == nil {
			return false, true
		}
	} else {
		c.backend.from = netip.AddrPortFrom(natSourceFor(c.server.at.Addr()), 0)
	}
	free, closed, uncertain := o.countPorts(c)
	o.undecided = o.undecided || uncertain
	switch narrow := size(o.pool) <= searchMax; {
	case narrow && free == 0 && closed == 0:
		return false, false
	case !o.leaves(r, c):
		o.undecided = o.undecided || narrow && closed > 0
		c.hidden = true
		return false, true
	case o.gotVerdict == kernel.XDPDrop:
		// A search after a vain one gives up early.
		if !narrow || closed == 0 {
			o.refuse("it was not sent, though %d source ports are free", free)
		}
		return false, false
	}
	return o.takePort(r.upper, c, own), true
}

// leaves reports whether the first packet of a flow is sent on.
func (o *oracle) leaves(r *reading, c *connection) bool {
	return c.server.at.Addr() != unresolved && r.end-linkSize <= arms[c.server.arm].mtu
}

func size(pool value.PortRange) int { return int(pool.Last) - int(pool.First) + 1 }

// countPorts counts the free ports of a narrow pool, and the ports of closed connections. uncertain: one of these has a
// port that the model has not seen, and another flow may take it over.
func (o *oracle) countPorts(c *connection) (free, closed int, uncertain bool) {
	if free = size(o.pool); free > searchMax {
		return free, 0, false
	}
	for _, d := range o.flows {
		if !d.fromBackend && !d.hidden || d.backend.to != c.backend.to || d.client.protocol != c.client.protocol || d.backend.from.Addr() != c.backend.from.Addr() {
			continue
		}
		if at := d.backend.from.Port(); !d.hidden && (at < o.pool.First || at > o.pool.Last) {
			continue // a client's own port, with nat-destination
		}
		free--
		if d.isOver() {
			closed++
			uncertain = uncertain || d.hidden
		}
	}
	return free, closed, uncertain
}

// takePort reads the port from the packet that left, at this offset. true: it was another flow's, which is closed.
func (o *oracle) takePort(at int, c *connection, own uint16) (displaced bool) {
	if len(o.got) < at+2 || !o.wasSent() {
		return false // another check reports it
	}
	port := be16(o.got[at:])
	if (port < o.pool.First || port > o.pool.Last) && (port != own || own == 0) {
		o.refuse("the source port %d is not one of %s", port, o.pool)
	}
	c.hidden = false
	c.backend.from = netip.AddrPortFrom(c.backend.from.Addr(), port)
	d := o.flows[c.backend.reversed()]
	if d == nil {
		return false
	}
	if size(o.pool) > searchMax || !d.isOver() {
		o.refuse("the source port %d is that of %v", port, d.client)
	}
	o.end(d.connection)
	return true
}

// reveal learns the source port of a flow from the first packet that shows it.
func (o *oracle) reveal(at int, d *direction) {
	if d.hidden {
		o.takePort(at, d.connection, 0)
		o.flows[d.backend.reversed()] = &direction{d.connection, true}
	}
}

// end forgets a flow.
func (o *oracle) end(c *connection) {
	o.leave(c)
	if !c.hidden {
		delete(o.flows, c.backend.reversed())
	}
}

// leave forgets the client's direction of a flow. The port of the other one rests.
func (o *oracle) leave(c *connection) {
	if d := o.flows[c.client]; d == nil || d.connection != c {
		return // it was left before
	}
	delete(o.flows, c.client)
	if c.counted {
		c.service.flows--
	}
}

// follow decides about a packet of an existing flow.
func (o *oracle) follow(r *reading, d *direction) want {
	if r.isSYN() && !d.fromBackend && d.isOver() { // another connection on a closed one's tuple
		switch {
		case o.place(d.service, d.client) != d.server:
			o.leave(d.connection)
			o.undecided = o.undecided || d.hidden // the model has not seen the port that rests
			return o.open(r, d.service, d.client)
		case !o.allows(d.service, r.source):
			return drop(denied)
		case d.service.overRate(r.source):
			return drop(sourceRate)
		}
	}
	o.advance(r, d)
	return o.send(r, d)
}

// isSYN reports whether the packet asks for a connection.
func (r *reading) isSYN() bool { return r.protocol == tcp && r.flags&(flagSYN|flagACK) == flagSYN }

// answersPast reports whether the packet answers a connection that the client has begun to the backend itself, from a
// closed flow's port.
func (r *reading) answersPast(d *direction) bool {
	return d.fromBackend && d.isOver() && r.protocol == tcp && r.flags&(flagSYN|flagACK|flagRST) == flagSYN|flagACK && d.client.from.Addr() == d.backend.from.Addr()
}

// advance updates the flow's state: packets that close it, and packets that reopen it (the flow table in
// ARCHITECTURE.md, and docs/design/09).
func (o *oracle) advance(r *reading, d *direction) {
	side := 0
	if d.fromBackend {
		side = 1
	}
	if r.protocol != tcp {
		return
	}
	if r.isSYN() && !d.fromBackend {
		if d.isOver() {
			d.reset, d.closed = false, [2]bool{}
		}
		return
	}
	if r.flags&flagRST != 0 {
		d.reset = o.broken != resetStaysOpen
		return
	}
	d.reset = false
	if r.flags&flagFIN != 0 {
		d.closed[side] = true
	} else if r.data {
		d.closed[side] = false
	}
}

// send sends a packet of a flow on.
func (o *oracle) send(r *reading, d *direction) want {
	if o.isLastHop(r) {
		return o.expire(r)
	}
	out, station := d.out()
	if !d.fromBackend && d.server.at.Addr() == unresolved {
		return drop(notResolved)
	}
	if r.end-linkSize > arms[out].mtu {
		return o.tooLong(r, arms[out].mtu)
	}
	o.reveal(r.upper, d)
	w := o.translate(r, d.other(), out, station)
	o.leaveNote(r, &note{to: d.other(), out: out, station: station, server: d.server})
	return w
}

// translate rewrites a TCP or UDP packet.
func (o *oracle) translate(r *reading, to tuple, out int, station net.HardwareAddr) want {
	b := slices.Clone(r.frame)
	copy(b, station)
	copy(b[6:], arms[out].mac)
	lowerTTL(b[linkSize:])
	setAddresses(b[linkSize:], to.from.Addr(), to.to.Addr())
	l4 := b[r.upper:r.end]
	w := r.on(out, b)
	if !r.isUnfinished() {
		o.readdress(l4, r.tuple(), to)
		return w
	}
	w.add(checksumCompleted)
	put16(l4, to.from.Port())
	put16(l4[2:], to.to.Port())
	if arms[r.arm].generic {
		put16(l4[checksumOffset(r.protocol):], pseudo(to.from.Addr(), to.to.Addr(), r.protocol, len(l4)))
	} else {
		finish(l4, to.from.Addr(), to.to.Addr(), r.protocol)
	}
	return w
}
