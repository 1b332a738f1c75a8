package differential_test

import (
	"net"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// datagram has the fields that the fragments of one datagram share (RFC 791, 3.2; RFC 8200, 4.5).
type datagram struct {
	source, destination netip.Addr
	id                  uint32
	protocol            byte // of IPv4 only
}

func (o *oracle) datagramOf(r *reading) datagram {
	d := datagram{r.source, r.destination, r.id, 0}
	if o.broken == identificationIgnored {
		d.id = 0
	}
	if !r.six {
		d.protocol = r.protocol
	}
	return d
}

// note is the first fragment's note for the later ones (docs/design/15).
type note struct {
	nobody  bool  // passed: the datagram is of no service
	to      tuple // of NAT
	out     int
	station net.HardwareAddr
	server  *server
	direct  *balanced // of direct return
	of      tuple
}

func (o *oracle) leaveNote(r *reading, n *note) {
	if r.part == first {
		o.pending[o.datagramOf(r)] = n
	}
}

// piece decides about a fragment, or an IPv6 packet whose fragment header is atomic (RFC 6946).
func (o *oracle) piece(r *reading) want {
	w := o.judgePiece(r)
	if w.verdict == kernel.XDPPass && w.reason != noService && !o.isOurs(r.destination) {
		w.reason = notOurs // a flow that the packet has ended is still counted
		return w
	}
	if w.verdict == kernel.XDPDrop && isFaultOfPiece(w.reason) && !o.isOurs(r.destination) {
		return pass(notOurs)
	}
	return w
}

// isFaultOfPiece reports whether a packet is dropped for its own fault, whatever its destination.
func isFaultOfPiece(why reason) bool {
	return why == fragmentTiny || why == malformedTransport || why == extensionLimit
}

func (o *oracle) judgePiece(r *reading) want {
	if r.six && !r.readFragmentHeader() {
		return pass(malformed)
	}
	if r.part == later {
		switch {
		case !r.isTransport() && !r.isExtension():
			return pass(fragment)
		case r.protocol == tcp && r.offset < 20: // RFC 3128
			return drop(fragmentTiny)
		}
		return o.laterFragment(r)
	}
	if r.six { // RFC 7112, 5: the whole chain is in the first fragment
		part := r.part
		r.part = whole
		end := r.readChain()
		r.part = part
		switch {
		case end == chainBroken && part == first:
			return drop(fragmentTiny)
		case end == chainBroken:
			return pass(malformed)
		case end == chainRouted:
			return pass(sourceRouted)
		case end == chainTooLong:
			return drop(extensionLimit)
		}
	}
	switch {
	case !r.isTransport(): // RFC 6980 demands this for neighbour discovery
		return pass(fragment)
	case r.part == first && r.cutShort():
		return drop(fragmentTiny)
	case !r.readTransport():
		return drop(malformedTransport)
	}
	return o.segment(r)
}

// cutShort reports whether a first fragment lacks a part of its transport header (RFC 1858, 3).
func (r *reading) cutShort() bool {
	b := r.l4()
	if r.protocol == udp {
		return len(b) < 8
	}
	return len(b) < 20 || int(b[12]>>4) >= 5 && int(b[12]>>4)*4 > len(b)
}

// laterFragment sends a fragment to the destination of its datagram's first.
func (o *oracle) laterFragment(r *reading) want {
	n := o.pending[o.datagramOf(r)]
	switch {
	case n == nil && isHostOwn(r.destination):
		return pass(fragment)
	case n == nil && !o.isOurs(r.destination):
		return pass(notOurs)
	case n == nil:
		return o.withoutNote(r)
	case n.nobody:
		return pass(noService)
	case o.isGone(n.server):
		return drop(backendGone)
	}
	var w want
	if n.direct != nil {
		w = o.wrap(r, n.direct, n.server, n.of)
	} else {
		w = o.moveFragment(r, n)
	}
	if w.reason == none {
		w.add(fragmentFollowed)
	}
	return w
}

// moveFragment gives a fragment of a NAT flow its new addresses. It has no ports or checksum to
// change.
func (o *oracle) moveFragment(r *reading, n *note) want {
	if o.isLastHop(r) {
		return o.expire(r)
	}
	if r.end-linkSize > arms[n.out].mtu {
		return o.tooLong(r, arms[n.out].mtu)
	}
	b := slices.Clone(r.frame)
	copy(b, n.station)
	copy(b[6:], arms[n.out].mac)
	lowerTTL(b[linkSize:])
	setAddresses(b[linkSize:], n.to.from.Addr(), n.to.to.Addr())
	return r.on(n.out, b)
}

// withoutNote decides about a fragment whose first one was not seen: it can be placed only if the
// addresses alone decide, and for one service only.
func (o *oracle) withoutNote(r *reading) want {
	var only *balanced
	for _, f := range o.frontends[destination{r.destination, r.protocol}] {
		if only != nil && only != f.service {
			return drop(fragmentEarly)
		}
		only = f.service
	}
	if only == nil || !only.Forwarding.Direct() || !only.Policy.HashAddresses {
		return drop(fragmentEarly)
	}
	if why := o.suspiciousDirect(r); why != none {
		return drop(why)
	}
	t := tuple{netip.AddrPortFrom(r.source, 0), netip.AddrPortFrom(r.destination, 0), r.protocol}
	to := o.place(only, t)
	if to == nil {
		return drop(noBackend)
	}
	w := o.wrap(r, only, to, t)
	if w.reason == none {
		w.add(fragmentFollowed)
	}
	return w
}
