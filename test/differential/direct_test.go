package differential_test

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Outer headers (docs/guide/backends.md and the GUE draft).
const (
	inIPv4, inIPv6 = 4, 41 // IANA: IPv4 and IPv6 encapsulation
	gueSourceFirst = 0xc000
	gueSize        = 8 + 4
)

// spread has the fields of outer headers that tell flows apart: they are always the same for one
// flow.
type spread struct {
	source netip.Addr
	port   uint16
	label  uint32
}

// direct sends a client's packet to a backend that answers the client directly.
func (o *oracle) direct(r *reading, s *balanced, t tuple) want {
	if why := o.suspiciousDirect(r); why != none {
		return drop(why)
	}
	switch {
	case !o.allows(s, r.source):
		return drop(denied)
	case r.isSYN() && s.overRate(r.source):
		return drop(sourceRate)
	case r.part == whole && o.isLastHop(r) && s.Forwarding.Encapsulates():
		return o.expire(r)
	}
	to := o.place(s, t)
	if to == nil {
		return o.turnAway(r, s)
	}
	of := t
	if r.part == first {
		of = s.datagramTuple(t)
	}
	w := o.wrap(r, s, to, of)
	if w.reason == none {
		o.leaveNote(r, &note{direct: s, server: to, of: of})
	}
	return w
}

// datagramTuple is the input of the outer headers of fragments: with `hash: addresses` a later one,
// which has no ports, must get the same headers as the first.
func (s *balanced) datagramTuple(t tuple) tuple {
	if !s.Policy.HashAddresses {
		return t
	}
	return tuple{netip.AddrPortFrom(t.from.Addr(), 0), netip.AddrPortFrom(t.to.Addr(), 0), t.protocol}
}

// overhead is the number of bytes that the outer headers to a backend add.
func (s *balanced) overhead(to *server) int {
	size := 0
	if s.Forwarding.Encapsulates() {
		size = 20
		if to.at.Addr().Is6() {
			size = 40
		}
	}
	if s.Forwarding == model.ForwardingDSRGUE {
		size += gueSize
	}
	return size
}

// wrap sends a packet on to its backend.
func (o *oracle) wrap(r *reading, s *balanced, to *server, t tuple) want {
	switch {
	case o.isGone(to):
		return drop(backendGone)
	case o.isLastHop(r) && s.Forwarding.Encapsulates():
		return o.expire(r)
	}
	var notes []reason
	if r.isTransport() && r.part == whole && !arms[r.arm].generic && r.isUnfinished() {
		finished := *r
		finished.frame = slices.Clone(r.frame)
		finish(finished.l4(), r.source, r.destination, r.protocol)
		r, notes = &finished, []reason{checksumCompleted}
	}
	var w want
	switch {
	case to.at.Addr() == unresolved:
		w = drop(notResolved)
	case s.Forwarding.Encapsulates():
		w = o.encapsulate(r, s, to, t)
	default:
		w = o.handOver(r, to)
	}
	for _, n := range notes {
		w.add(n)
	}
	return w
}

// encapsulate puts outer headers around a packet (RFC 2003, 2473, 4213, and GUE).
func (o *oracle) encapsulate(r *reading, s *balanced, to *server, t tuple) want {
	more := s.overhead(to)
	if r.end-linkSize+more > arms[to.arm].mtu && o.broken != outerHeaderFree {
		return o.tooLong(r, arms[to.arm].mtu-more)
	}
	inner := slices.Clone(r.frame[linkSize:r.end])
	lowerTTL(inner)
	h := header{destination: to.at.Addr(), tos: r.tos, ttl: ownTTL, protocol: inIPv4, df: r.df}
	if r.six {
		h.protocol = inIPv6
	}
	gue := []byte(nil)
	if s.Forwarding == model.ForwardingDSRGUE {
		gue = make([]byte, gueSize)
		put16(gue[2:], outer.GUEPort)
		put16(gue[4:], uint16(gueSize+len(inner)))
		gue[9] = h.protocol
		h.protocol = udp
	}
	o.chooseOuter(&h, gue, to, t)
	b := link(make([]byte, 0, len(r.frame)+more), to.station, arms[to.arm].mac, h.etherType())
	b = h.append(b, len(gue)+len(inner))
	b = append(append(append(b, gue...), inner...), r.frame[r.end:]...)
	return r.on(to.arm, b)
}

// handOver is direct return over L2: it is a switch's work, so the packet loses no hop.
func (o *oracle) handOver(r *reading, to *server) want {
	if !r.isMessage() && to.arm == r.arm && bytes.Equal(r.frame[6:12], to.station) {
		return drop(loop)
	}
	b := slices.Clone(r.frame)
	copy(b, to.station)
	copy(b[6:], arms[to.arm].mac)
	return r.on(to.arm, b)
}

// isMessage reports whether the packet is ICMP.
func (r *reading) isMessage() bool {
	return r.six && r.protocol == icmp6 || !r.six && r.protocol == icmp4
}

// chooseOuter takes over the program's choices in an outer header, and checks them.
func (o *oracle) chooseOuter(h *header, gue []byte, to *server, t tuple) {
	var chosen spread
	six := to.at.Addr().Is6()
	ip := o.got[min(len(o.got), linkSize):]
	size := 20
	if six {
		size = 40
	}
	if len(ip) < size+len(gue) || !o.wasSent() {
		return // another check reports it
	}
	if six {
		chosen.source, chosen.label = arms[to.arm].own(true), be32(ip)&0xfffff
	} else {
		chosen.source = address(ip[12:16])
		if !outer.Sources4.Contains(chosen.source) {
			o.refuse("the outer source %s is not of %s", chosen.source, outer.Sources4)
		}
		if !h.df { // RFC 6864, 4.1: a packet that may be fragmented has a number
			h.id = be16(ip[4:])
		}
	}
	if gue != nil {
		if chosen.port = be16(ip[size:]); chosen.port < gueSourceFirst {
			o.refuse("the outer source port %#x is less than %#x", chosen.port, gueSourceFirst)
		}
		binary.BigEndian.PutUint16(gue, chosen.port)
	}
	if before, ok := o.entropy[t]; ok && before != chosen {
		o.refuse("packets of one flow have the outer headers %v and %v", before, chosen)
	}
	o.entropy[t] = chosen
	h.source, h.label = chosen.source, chosen.label
}
