package watch

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/rules"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// probePeriod is the interval at which a next hop is asked whether it is there. The kernel asks three times, a second
// apart, and would not ask at all for half a minute after an answer.
const probePeriod = time.Second

// Steer sends packets of pods to some ports in a network through an interface, and brings the answers to the pods. Its
// fields are not changed.
type Steer struct {
	Name      string
	Ports     []Port
	Network   netip.Prefix
	Interface string
	NextHop   netip.Addr // of the network's family, a neighbour at the interface
}

// Port is a destination's port.
type Port struct {
	Protocol uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	Number   uint16
}

// String returns a text like "53/udp".
func (p Port) String() string {
	if p.Protocol == unix.IPPROTO_UDP {
		return fmt.Sprintf("%d/udp", p.Number)
	}
	return fmt.Sprintf("%d/tcp", p.Number)
}

// Equal reports whether two steers are equal in everything.
func (s *Steer) Equal(other *Steer) bool {
	return s.Name == other.Name && s.Network == other.Network && s.Interface == other.Interface &&
		s.NextHop == other.NextHop && slices.Equal(s.Ports, other.Ports)
}

// SteerStatus is the state of a steer.
type SteerStatus struct {
	Steer
	State  string          // "taken", or the reason why its packets go as without it
	Why    string          // the rule, program or interface
	Counts shortcut.Counts // of its packets, both directions; "pinned": of connections that began elsewhere
}

// steering is a steer with its verdict.
type steering struct {
	Steer
	state
	number int
	hop    uint32 // 0: it has none
	probed time.Time
}

// steers are the watched steers.
type steers struct {
	wanted []Steer
	all    []*steering // as the programs have them
	// ending are steers that are not wanted any more, and still have a hop: connections that began by it keep it.
	ending  []*steering
	numbers int    // numbers given so far
	hops    uint32 // IDs given so far
}

// applySteers judges the steers, and tells the programs.
func (w *Watch) applySteers(links map[string]rules.Link) error {
	var errs []error
	w.steers.all = slices.DeleteFunc(w.steers.all, func(s *steering) bool {
		if slices.ContainsFunc(w.steers.wanted, func(one Steer) bool { return one.Equal(&s.Steer) }) {
			return false
		}
		for _, p := range s.Ports {
			errs = append(errs, w.short.RemoveSteer(shortcut.Steer{Protocol: p.Protocol, Port: p.Number, Network: s.Network}))
		}
		w.steers.ending = append(w.steers.ending, s)
		return true
	})
	for _, one := range w.steers.wanted {
		if !slices.ContainsFunc(w.steers.all, func(s *steering) bool { return one.Equal(&s.Steer) }) {
			w.steers.numbers++
			s := &steering{Steer: one, number: w.steers.numbers, state: state{left: shortcut.Unjudged}}
			if err := w.short.CountSteer(s.number); err != nil {
				errs = append(errs, err)
				continue
			}
			w.steers.all = append(w.steers.all, s)
		}
	}
	for _, s := range w.steers.all {
		errs = append(errs, w.applySteer(s, w.judgeSteer(s, links)))
	}
	w.steers.ending = slices.DeleteFunc(w.steers.ending, func(s *steering) bool {
		next := w.judgeSteer(s, links)
		if s.hop != 0 && next.left == shortcut.Taken && next.ifindex == s.ifindex && next.mtu == s.mtu {
			return false
		}
		errs = append(errs, w.short.RemoveHop(s.hop), w.short.UncountSteer(s.number))
		return true
	})
	return errors.Join(errs...)
}

// applySteer tells the programs the changes of a steer. A hop is added before the steer has it. If the steer is not good any
// more, its hop is removed; when it is good again, it gets another hop.
func (w *Watch) applySteer(s *steering, next state) error {
	before := s.hop
	if next == s.state {
		return nil
	}
	s.state, s.hop = next, 0
	var errs []error
	if next.left == shortcut.Taken {
		err := w.short.AttachFar(next.ifindex)
		if err == nil {
			w.steers.hops++
			s.hop = w.steers.hops
			err = w.short.AddHop(shortcut.Hop{ID: s.hop, NextHop: s.NextHop, Ifindex: next.ifindex, MTU: next.mtu, Number: s.number})
		}
		if err != nil {
			errs = append(errs, err)
			s.left, s.why, s.hop = shortcut.TC, err.Error(), 0
		}
	}
	for _, p := range s.Ports {
		if err := w.short.PutSteer(shortcut.Steer{Number: s.number, Protocol: p.Protocol, Port: p.Number, Network: s.Network, Hop: s.hop, Left: s.left}); err != nil {
			errs = append(errs, err)
			s.left, s.why = shortcut.Unjudged, err.Error() // it is tried again
		}
	}
	if before != 0 {
		errs = append(errs, w.short.RemoveHop(before))
	}
	return errors.Join(errs...)
}

// judgeSteer looks at the interface, the rules and the next hop.
func (w *Watch) judgeSteer(s *steering, links map[string]rules.Link) state {
	next := w.judgeUplink(s.Interface)
	if next.left != shortcut.Taken {
		return next
	}
	if w.unread != nil {
		next.left, next.why = shortcut.RulesUnread, w.unread.Error()
		return next
	}
	if h := w.findSteerRule(s, rules.Link{Name: s.Interface, Index: next.ifindex}, links); h != nil {
		next.left, next.why = shortcut.Rule, h.String()
		return next
	}
	next.left, next.why = s.judgeNextHop(next.ifindex)
	return next
}

// findSteerRule looks for a rule that may act on packets that any pod sends to the network, or gets from there. The
// rules see none of these packets: a sent packet may begin a connection, in both modes, and an answer belongs to one.
func (w *Watch) findSteerRule(s *steering, out rules.Link, links map[string]rules.Link) *rules.Hazard {
	network := []netip.Addr{s.Network.Addr()}
	for _, p := range w.pods {
		if p.Interface == s.Interface {
			continue
		}
		var addresses []netip.Addr
		for _, a := range p.Addresses {
			if a = a.Unmap(); a.Is4() == network[0].Is4() {
				addresses = append(addresses, a)
			}
		}
		if len(addresses) == 0 {
			continue
		}
		in := []rules.Link{links[p.Interface]}
		h := w.rules.Find(rules.Packets{From: addresses, To: network, ToBits: s.Network.Bits(), In: in, Out: []rules.Link{out}})
		if h == nil {
			h = w.rules.Find(rules.Packets{From: network, FromBits: s.Network.Bits(), To: addresses, In: []rules.Link{out}, Out: in, Established: true})
		}
		if h != nil {
			return h
		}
	}
	return nil
}

// judgeNextHop asks the kernel's table of neighbours, and makes the kernel look again.
func (s *steering) judgeNextHop(ifindex int) (shortcut.Left, string) {
	family := unix.AF_INET
	if s.NextHop.Is6() {
		family = unix.AF_INET6
	}
	all, err := netlink.NeighList(ifindex, family)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return shortcut.NextHop, fmt.Sprintf("look for the next hop %s: %v", s.NextHop, err)
	}
	now := netlink.NUD_NONE
	for _, n := range all {
		if ip, _ := netip.AddrFromSlice(n.IP); ip.Unmap() == s.NextHop {
			now = n.State
		}
	}
	answers := now&(netlink.NUD_REACHABLE|netlink.NUD_STALE|netlink.NUD_DELAY|netlink.NUD_PROBE) != 0
	fixed := now&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0
	if !fixed && now != netlink.NUD_PROBE && time.Since(s.probed) >= probePeriod {
		s.probed = time.Now()
		if err := probe(ifindex, family, s.NextHop, answers); err != nil {
			return shortcut.NextHop, err.Error()
		}
	}
	if answers || fixed {
		return shortcut.Taken, ""
	}
	return shortcut.NextHop, fmt.Sprintf("%s does not answer at %s", s.NextHop, s.Interface)
}

// probe makes the kernel ask a neighbour for its Ethernet address: if one is known, whether it still has that.
func probe(ifindex, family int, nextHop netip.Addr, isKnown bool) error {
	message := &netlink.Ndmsg{Family: uint8(family), Index: uint32(ifindex), State: netlink.NUD_PROBE}
	flags := unix.NLM_F_ACK
	if !isKnown {
		message.State, message.Flags = netlink.NUD_NONE, netlink.NTF_USE
		flags |= unix.NLM_F_CREATE | unix.NLM_F_REPLACE
	}
	request := nl.NewNetlinkRequest(unix.RTM_NEWNEIGH, flags)
	request.AddData(message)
	request.AddData(nl.NewRtAttr(netlink.NDA_DST, nextHop.AsSlice()))
	if _, err := request.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("probe the next hop %s: %w", nextHop, err)
	}
	return nil
}

// steersStatus returns the status of the steers.
func (w *Watch) steersStatus() (all []SteerStatus, err error) {
	for _, s := range w.steers.all {
		counts, failed := w.short.SteerCounts(s.number)
		err = errors.Join(err, failed)
		all = append(all, SteerStatus{s.Steer, s.left.String(), s.why, counts})
	}
	return all, err
}

// letSteersGo removes all steers and hops.
func (w *Watch) letSteersGo() error {
	var errs []error
	for _, s := range append(w.steers.all, w.steers.ending...) {
		for _, p := range s.Ports {
			errs = append(errs, w.short.RemoveSteer(shortcut.Steer{Protocol: p.Protocol, Port: p.Number, Network: s.Network}))
		}
		errs = append(errs, w.short.RemoveHop(s.hop), w.short.UncountSteer(s.number))
	}
	w.steers.all, w.steers.ending = nil, nil
	return errors.Join(errs...)
}
