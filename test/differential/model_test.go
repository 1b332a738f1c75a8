package differential_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// server is a backend.
type server struct {
	at      netip.AddrPort // port 0 keeps the packet's
	station net.HardwareAddr
	arm     int
}

// balanced is a service in one family: its own seed, table and backends.
type balanced struct {
	model.Service
	seed  uint32
	slots []*server // of the Maglev table; nil: no backend
	six   bool
	// Of the present episode:
	flows int // of a service with a bound
	begun map[netip.Addr]bool
}

// frontend is one range of ports of a VIP.
type frontend struct {
	ports   value.PortRange
	service *balanced
}

type destination struct {
	address  netip.Addr
	protocol byte
}

// oracle is the model: it derives the outcome of a packet from the documents. It reads no map and shares
// no code with the programs.
type oracle struct {
	frontends map[destination][]frontend // the narrowest first
	services  []*balanced
	pool      value.PortRange
	removed   netip.Addr // a backend removed in the middle of the episode
	broken    breakage

	flows   map[tuple]*direction
	pending map[datagram]*note
	entropy map[tuple]spread

	gotVerdict uint32 // the program's verdict, for its own choices
	got        []byte
	fault      string // the reason why the program's choice is forbidden
	undecided  bool   // the program's choice cannot be known: no later packet can be judged
}

// want is the outcome that a packet must have.
type want struct {
	verdict uint32
	reason  reason
	notes   [3]reason
	frame   []byte // as it leaves
}

func newOracle(services []model.Service) *oracle {
	o := &oracle{frontends: map[destination][]frontend{}}
	for _, s := range services {
		for _, six := range []bool{false, true} {
			o.add(s, six)
		}
	}
	for _, list := range o.frontends {
		slices.SortFunc(list, func(a, b frontend) int {
			return int(a.ports.Last) - int(a.ports.First) - int(b.ports.Last) + int(b.ports.First)
		})
	}
	o.renew(pools[0])
	return o
}

// add makes the half of a service for one family (docs/design/05). With direct return backends of one
// family alone serve both.
func (o *oracle) add(s model.Service, six bool) {
	b := &balanced{Service: s, seed: maglev.Seed(s.Name), six: six}
	if six {
		b.seed = maglev.Seed(s.Name + "/6")
	}
	here := slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return b.Address.Is6() == six })
	var members []maglev.Member
	var servers []*server
	for _, backend := range s.Backends {
		if backend.Address.Is6() == six || s.Forwarding.Direct() && !here {
			members = append(members, maglev.Member{Key: maglev.Key(backend), Weight: backend.Share()})
			servers = append(servers, &server{netip.AddrPortFrom(backend.Address, backend.Port), stationOf(backend.Address), behind(backend.Address)})
		}
	}
	for _, i := range maglev.Table(s.TableSize, b.seed, members) {
		var chosen *server
		if i >= 0 {
			chosen = servers[i]
		}
		b.slots = append(b.slots, chosen)
	}
	for _, f := range s.Frontends {
		if f.Address.Is6() == six {
			at := destination{f.Address, byte(f.Protocol)}
			o.frontends[at] = append(o.frontends[at], frontend{f.Ports, b})
		}
	}
	o.services = append(o.services, b)
}

// renew forgets all packets.
func (o *oracle) renew(pool value.PortRange) {
	o.removed = netip.Addr{}
	o.pool, o.flows, o.pending, o.entropy = pool, map[tuple]*direction{}, map[datagram]*note{}, map[tuple]spread{}
	for _, s := range o.services {
		s.flows, s.begun = 0, map[netip.Addr]bool{}
	}
}

// serviceOf returns the service of a VIP's port: an exact port before a range before any port.
func (o *oracle) serviceOf(to netip.AddrPort, protocol byte) *balanced {
	for _, f := range o.frontends[destination{to.Addr(), protocol}] {
		if f.ports.First <= to.Port() && to.Port() <= f.ports.Last {
			return f.service
		}
	}
	return nil
}

func (o *oracle) isVIP(a netip.Addr) bool {
	return len(o.frontends[destination{a, tcp}])+len(o.frontends[destination{a, udp}]) > 0
}

func isSource(a netip.Addr) bool  { return slices.Contains(natSources, a) }
func isHostOwn(a netip.Addr) bool { return slices.Contains(hostVIPs[:], a) }

// isOwned reports whether the balancer answers ARP and ND for an address.
func isOwned(a netip.Addr) bool { return slices.Contains(ownedAddresses, a) && !isHostOwn(a) }

// hash is the flow hash, which is a promise to the other balancers of a fleet: multiply-add with odd
// constants, then MurmurHash3's finalizer (test/place has it too).
func (s *balanced) hash(t tuple) uint32 {
	mix := [...]uint64{0x6a09e667f3bcc909, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1, 0x510e527fade682d1}
	words := func(a netip.Addr) (high, low uint64) {
		b := a.As16()
		return binary.NativeEndian.Uint64(b[:8]), binary.NativeEndian.Uint64(b[8:])
	}
	high, low := words(t.from.Addr())
	h := high*mix[0] + low*mix[1]
	if s.AffinityTimeout == 0 {
		high, low = words(t.to.Addr())
		h += high*mix[2] + low*mix[3]
		if !s.Policy.HashAddresses {
			wire := func(port uint16) uint64 { return uint64(bits.ReverseBytes16(port)) } // on a little-endian machine
			h += (uint64(t.protocol)<<32 | wire(t.from.Port())<<16 | wire(t.to.Port())) * mix[4]
		}
	}
	h ^= uint64(s.seed)<<32 | uint64(s.seed)
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return uint32(h >> 32)
}

// place returns the backend of a flow's slot, which is settled; nil: no backend takes new flows.
func (o *oracle) place(s *balanced, t tuple) *server {
	if o.broken == portsIgnored {
		t = tuple{netip.AddrPortFrom(t.from.Addr(), 0), netip.AddrPortFrom(t.to.Addr(), 0), t.protocol}
	}
	return s.slots[uint64(s.hash(t))*uint64(len(s.slots))>>32]
}

// step returns the outcome that a frame must have, given the program's verdict and frame.
func (o *oracle) step(arm int, frame []byte, verdict uint32, got []byte) (w want, fault string) {
	o.got, o.gotVerdict, o.fault, o.undecided = got, verdict, "", false
	w = o.frame(arm, frame)
	return w, o.fault
}

func pass(r reason) want { return want{verdict: kernel.XDPPass, reason: r} }
func drop(r reason) want { return want{verdict: kernel.XDPDrop, reason: r} }

// back is an answer in the packet's place.
func (r *reading) back(why reason, frame []byte) want {
	if frame == nil { // no correct answer exists
		return drop(internal)
	}
	return want{verdict: verdictOf(r.arm, r.arm), reason: why, frame: frame}
}

// on forwards a packet.
func (r *reading) on(out int, frame []byte, notes ...reason) want {
	w := want{verdict: verdictOf(r.arm, out), frame: frame}
	copy(w.notes[:], notes)
	return w
}

// verdictOf is the verdict of a frame that leaves: sending back on veth is a redirect in native mode.
func verdictOf(in, out int) uint32 {
	if in == out && arms[in].generic {
		return kernel.XDPTx
	}
	return kernel.XDPRedirect
}

// wasSent reports whether the program has sent the packet, or an answer.
func (o *oracle) wasSent() bool {
	return o.gotVerdict == kernel.XDPTx || o.gotVerdict == kernel.XDPRedirect
}

// refuse records a forbidden choice of the program.
func (o *oracle) refuse(format string, values ...any) {
	if o.fault == "" {
		o.fault = fmt.Sprintf(format, values...)
	}
}

// frame reads the link header.
func (o *oracle) frame(arm int, frame []byte) want {
	r := &reading{arm: arm, frame: frame}
	r.group = frame[0]&1 != 0
	kind := be16(frame[12:])
	if kind == typeVLAN || kind == typeQinQ {
		return pass(vlan)
	}
	if !r.group && !bytes.Equal(frame[:6], arms[arm].mac) {
		return pass(otherMAC)
	}
	switch kind {
	case typeARP:
		return o.arp(r)
	case typeIPv4:
		if r.group {
			return pass(multicast)
		}
	case typeIPv6:
		r.six = true
	default:
		return pass(notIP)
	}
	return o.packet(r)
}

// packet reads the IP headers.
func (o *oracle) packet(r *reading) want {
	if !r.readIP() {
		return pass(malformed)
	}
	if r.source.Is4In6() || r.destination.Is4In6() {
		return drop(mappedAddress)
	}
	plain := r.upper
	end := r.readChain()
	if end == chainBroken {
		return pass(malformed)
	}
	if r.group {
		if end != chainRead || r.protocol != icmp6 {
			return pass(multicast)
		}
		return o.solicitation(r, r.upper == plain)
	}
	if !o.isOurs(r.destination) && end != chainRead && end != chainFragment {
		return pass(notOurs)
	}
	switch end {
	case chainTooLong:
		return drop(extensionLimit)
	case chainRouted:
		return pass(sourceRouted)
	case chainFragment:
		return o.piece(r)
	}
	return o.destination(r, r.upper == plain)
}

func (o *oracle) isOurs(a netip.Addr) bool { return o.isVIP(a) || isSource(a) }

// destination finds the service of a packet that is no fragment. plain: the payload follows directly
// behind the IP header.
func (o *oracle) destination(r *reading, plain bool) want {
	switch {
	case r.protocol == icmp4 && !r.six, r.protocol == icmp6 && r.six:
		return o.message(r, plain)
	case !o.isOurs(r.destination) && !(r.isTransport() && r.readTransport()):
		return pass(notOurs)
	case !r.isTransport():
		return pass(protocol)
	case !r.readTransport():
		return drop(malformedTransport)
	}
	return o.segment(r)
}

func (r *reading) isTransport() bool { return r.protocol == tcp || r.protocol == udp }

// segment decides about a TCP or UDP packet, whole or the first fragment of one.
func (o *oracle) segment(r *reading) want {
	t := r.tuple()
	s := o.serviceOf(t.to, t.protocol)
	if s != nil && s.Forwarding.Direct() {
		return o.direct(r, s, t)
	}
	d := o.flows[t]
	isGone := d != nil && o.isGone(d.server)
	if d != nil && !isGone && !r.answersPast(d) {
		return o.follow(r, d)
	}
	w := o.begin(r, s, t)
	if isGone { // its backend was removed, so this packet is placed anew
		w.add(flowMoved)
	}
	return w
}

// begin decides about a packet without a flow, or with a flow that it ends.
func (o *oracle) begin(r *reading, s *balanced, t tuple) want {
	if d := o.flows[t]; d != nil {
		o.end(d.connection)
	}
	switch {
	case !o.isVIP(r.destination):
		return pass(notOurs)
	case s == nil:
		o.leaveNote(r, &note{nobody: true})
		return pass(noService)
	}
	return o.open(r, s, t)
}

// isGone reports whether a backend has been removed.
func (o *oracle) isGone(s *server) bool { return s.at.Addr() == gone || s.at.Addr() == o.removed }

// suspicious returns the reason to drop a source that no packet to a service may have.
func (o *oracle) suspicious(r *reading) reason {
	switch {
	case isMartian(r.source) && o.broken != anyoneMayAsk:
		return martian
	case r.source == r.destination:
		return loop
	}
	return none
}

// suspiciousDirect returns the reason to drop a source of a packet to a service with direct return. With
// TCP, whose resets end a loop, our addresses are allowed.
func (o *oracle) suspiciousDirect(r *reading) reason {
	if why := o.suspicious(r); why != none || r.protocol != udp || !o.isLoop(r.source) {
		return why
	}
	return loop
}

// isLoop reports whether a packet's source is an address that only the balancer has.
func (o *oracle) isLoop(source netip.Addr) bool { return o.isOurs(source) && !isHostOwn(source) }

// isAnswerable reports whether an answer may be sent to an address (RFC 1122, 3.2.2; RFC 4443, 2.4 e).
func isAnswerable(a netip.Addr) bool {
	if a.Is4() {
		first := a.As4()[0]
		return first != 0 && first != 127 && first < 224
	}
	return !a.IsUnspecified() && !a.IsMulticast()
}

// isMartian reports whether no host sends from an address (RFC 1122, 3.2.1.3; RFC 4291, 2.5 and 2.7).
func isMartian(a netip.Addr) bool {
	if a.Is4() {
		b := a.As4()
		return b[0] == 0 || b[0] == 127 || b[0]>>4 == 14 || b == [4]byte{255, 255, 255, 255}
	}
	return a.IsUnspecified() || a.IsLoopback() || a.IsMulticast()
}

// allows decides by allow_from and deny_from: the longest prefix wins.
func (o *oracle) allows(s *balanced, source netip.Addr) bool {
	longest, allows := -1, len(s.AllowFrom) == 0
	for i, list := range [][]netip.Prefix{s.DenyFrom, s.AllowFrom} {
		for _, p := range list {
			if p.Contains(source) && p.Bits() > longest {
				longest, allows = p.Bits(), i == 1
				if i == 0 && o.broken == denyBeatsLonger {
					return false
				}
			}
		}
	}
	return allows
}

// overRate reports whether a source has begun its flow of this second already. IPv6 counts by /64.
func (s *balanced) overRate(source netip.Addr) bool {
	if s.Policy.SourceRate == 0 {
		return false
	}
	if source.Is6() {
		p, _ := source.Prefix(64)
		source = p.Addr()
	}
	before := s.begun[source]
	s.begun[source] = true
	return before
}

// turnAway is the outcome of a packet that no backend takes.
func (o *oracle) turnAway(r *reading, s *balanced) want {
	if !s.Policy.Rejects || r.protocol == tcp && r.flags&flagRST != 0 || !isAnswerable(r.source) {
		return drop(noBackend)
	}
	if r.protocol == tcp {
		return r.back(rejectedReset, r.reset(arms[r.arm].generic && r.isUnfinished() && !r.longer()))
	}
	kind, code := byte(3), byte(3)
	if r.six {
		kind, code = 1, 4
	}
	return r.back(rejectedUnreachable, o.errorAbout(r, r.destination, kind, code, 0))
}

// longer reports whether the header is longer than a plain IP header.
func (r *reading) longer() bool {
	if r.six {
		return r.upper > linkSize+40
	}
	return r.upper > linkSize+20
}

// isLastHop reports whether the packet's TTL, or hop limit, ends here.
func (o *oracle) isLastHop(r *reading) bool {
	return r.ttl == 0 || r.ttl == 1 && o.broken != lastHopForwards
}

// expire is the outcome of a packet whose TTL ends here.
func (o *oracle) expire(r *reading) want {
	if r.part == later && !r.six { // RFC 1812, 4.3.2.7
		return drop(icmpLimited)
	}
	if !isAnswerable(r.source) {
		return drop(icmpLimited)
	}
	kind := byte(11)
	if r.six {
		kind = 3
	}
	return r.back(ttlExceeded, o.errorAbout(r, arms[r.arm].own(r.six), kind, 0, 0))
}

// tooLong is the outcome of a packet that does not fit: its sender is told the size that does.
func (o *oracle) tooLong(r *reading, fits int) want {
	if !r.df || r.part == later && !r.six {
		return drop(tooBig)
	}
	if !isAnswerable(r.source) {
		return drop(icmpLimited)
	}
	if r.six {
		return r.back(tooBigAnswered, o.errorAbout(r, r.destination, 2, 0, uint32(fits)))
	}
	return r.back(tooBigAnswered, o.errorAbout(r, r.destination, 3, 4, uint32(fits)))
}
