package differential_test

import (
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// isError reports whether an ICMP message is about a packet that it quotes, and is carried to the
// sender of that packet: unreachable, time exceeded, parameter problem (RFC 792, 5508); too big (RFC
// 4443).
func (r *reading) isError() bool {
	kind := r.l4()[0]
	if r.six {
		return kind >= 1 && kind <= 4
	}
	return kind == 3 || kind == 11 || kind == 12
}

// message decides about an ICMP or ICMPv6 packet.
func (o *oracle) message(r *reading, plain bool) want {
	ours, vip := o.isOurs(r.destination), o.isVIP(r.destination)
	m := r.l4()
	request := byte(8)
	if r.six {
		request = 128
	}
	switch {
	case len(m) < 8 && !ours:
		return pass(notOurs)
	case len(m) < 8:
		return drop(malformedTransport)
	case r.six && m[0] == solicitationType:
		return o.solicitation(r, plain)
	}
	if why := o.suspicious(r); vip && why != none {
		return drop(why)
	}
	if m[0] == request && m[1] == 0 && vip && !isHostOwn(r.destination) && isAnswerable(r.source) {
		return o.echo(r)
	}
	if r.isError() {
		if w, ok := o.errorMessage(r); ok {
			return w
		}
	}
	if !ours {
		return pass(notOurs)
	}
	return pass(icmp)
}

// echo answers ping to a VIP (RFC 792; RFC 4443, 4.2).
func (o *oracle) echo(r *reading) want {
	reply := byte(0)
	if r.six {
		reply = 129
	}
	b := slices.Clone(r.frame)
	copy(b, r.frame[6:12])
	copy(b[6:], r.frame[:6])
	ip, m := b[linkSize:], b[r.upper:r.end]
	setAddresses(ip, r.destination, r.source)
	if r.six {
		ip[7] = ownTTL
	} else {
		before := []byte{ip[8], ip[9]}
		ip[8] = ownTTL
		put16(ip[10:], updated(be16(ip[10:]), before, ip[8:10]))
	}
	before := []byte{m[0], m[1]}
	m[0] = reply
	put16(m[2:], updated(be16(m[2:]), before, m[0:2]))
	if !r.six && be16(m[2:]) == 0 { // a checksum over zeros is 0xffff
		put16(m[2:], 0xffff)
	}
	return r.back(echoAnswered, b)
}

// quote is the packet that an error is about, as far as the error has it.
type quote struct {
	at    int // in the frame
	upper int
	tuple
}

// readQuote reads the quote: not a later fragment, and at least the ports.
func (r *reading) readQuote() (q quote, ok bool) {
	q.at = r.upper + 8
	in := reading{six: r.six, frame: r.frame[q.at-linkSize : r.end], end: r.end - q.at + linkSize}
	b := in.frame[linkSize:]
	switch {
	case r.six:
		if len(b) < 40 || b[0]>>4 != 6 {
			return q, false
		}
		in.source, in.destination, in.protocol = address(b[8:24]), address(b[24:40]), b[6]
		in.upper = linkSize + 40
		if !in.walkQuote() {
			return q, false
		}
	default:
		if len(b) < 20 || b[0]>>4 != 4 || b[0]&15 < 5 || be16(b[6:])&0x1fff != 0 {
			return q, false
		}
		in.source, in.destination, in.protocol = address(b[12:16]), address(b[16:20]), b[9]
		in.upper = linkSize + int(b[0]&15)*4
	}
	if !in.isTransport() || in.upper+8 > in.end {
		return q, false
	}
	q.upper = in.upper - linkSize + q.at
	b = in.l4()
	q.tuple = tuple{netip.AddrPortFrom(in.source, be16(b)), netip.AddrPortFrom(in.destination, be16(b[2:])), in.protocol}
	return q, true
}

// walkQuote goes through the extension headers of a quoted packet, also of a first fragment.
func (r *reading) walkQuote() bool {
	for range extensionsMax {
		b := r.frame[min(r.upper, r.end):]
		size := 0
		switch r.protocol {
		case hopByHop, destinationOptions, routingHeader, authentication, fragmentHeader:
			if len(b) < 8 {
				return false
			}
			if size = 8 * (1 + int(b[1])); r.protocol == authentication {
				size = 4 * (2 + int(b[1]))
			}
		default:
			return true
		}
		if r.protocol == fragmentHeader {
			if size = 8; be16(b[2:])&^7 != 0 {
				return false
			}
		}
		r.protocol = b[0]
		r.upper += size
	}
	return true
}

// errorMessage carries an error to the sender of the packet that it is about. false: the packet is not
// ours.
func (o *oracle) errorMessage(r *reading) (want, bool) {
	q, ok := r.readQuote()
	if !ok || q.from.Addr() != r.destination {
		return want{}, false
	}
	// We sent the quoted packet. Its reversed tuple is that of the packets that come from its
	// destination.
	if d := o.flows[q.tuple.reversed()]; d != nil {
		if o.isLastHop(r) { // no error is answered with another (RFC 1122, 3.2.2)
			return want{}, false
		}
		return o.errorThroughNAT(r, q, d), true
	}
	s := o.serviceOf(q.from, q.protocol)
	if s == nil || !s.Forwarding.Direct() {
		return want{}, false
	}
	to := o.place(s, q.tuple.reversed())
	if to == nil {
		return want{}, false
	}
	switch {
	case o.isGone(to):
		return drop(backendGone), true
	case o.isLastHop(r) && s.Forwarding.Encapsulates():
		return want{}, false
	case to.at.Addr() == unresolved:
		return drop(notResolved), true
	case s.Forwarding.Encapsulates() && r.end-linkSize+s.overhead(to) > arms[to.arm].mtu:
		return drop(tooBig), true
	}
	w := o.wrap(r, s, to, q.tuple.reversed())
	w.add(icmpToBackend)
	return w, true
}

// errorThroughNAT rewrites an error, and restores the quoted packet to its form before the NAT.
func (o *oracle) errorThroughNAT(r *reading, q quote, d *direction) want {
	out, station := d.out()
	switch {
	case !d.fromBackend && o.isGone(d.server):
		return drop(backendGone)
	case !d.fromBackend && d.server.at.Addr() == unresolved:
		return drop(notResolved)
	}
	o.reveal(q.upper+2, d)
	original := d.other().reversed() // as it came to us
	b := slices.Clone(r.frame)
	copy(b, station)
	copy(b[6:], arms[out].mac)
	lowerTTL(b[linkSize:])
	source := r.source
	if d.fromBackend || d.service.Forwarding == model.ForwardingNAT {
		source = d.other().from.Addr()
	}
	setAddresses(b[linkSize:], source, original.from.Addr())
	setAddresses(b[q.at:], original.from.Addr(), original.to.Addr())
	end := r.end
	o.readdress(b[q.upper:end], q.tuple, original)
	m := b[r.upper:end]
	field := updated(be16(m[2:]), even(r.frame[r.upper+4:end]), even(m[4:]))
	if r.six {
		was := tuple{netip.AddrPortFrom(r.source, 0), netip.AddrPortFrom(r.destination, 0), icmp6}
		now := tuple{netip.AddrPortFrom(source, 0), netip.AddrPortFrom(original.from.Addr(), 0), icmp6}
		field = updated(field, was.endpoints(false), now.endpoints(false))
	}
	put16(m[2:], field)
	return r.on(out, b, icmpTranslated)
}

// even is b, with a zero behind it if it has an odd number of bytes.
func even(b []byte) []byte {
	if len(b)%2 == 0 {
		return b
	}
	return append(slices.Clone(b), 0)
}
