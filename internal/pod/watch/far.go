package watch

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/pod/rules"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// farState is a verdict on a network of another machine's pods.
type farState struct {
	state
	nextHop netip.Addr
}

// judgeFar judges the ways to other machines. Packets of the shortcut pass the programs at the interface's egress, and
// its qdisc; incoming packets skip the programs at its ingress.
func (w *Watch) judgeFar(links map[string]rules.Link) map[netip.Prefix]farState {
	next := map[netip.Prefix]farState{}
	uplinks := map[string]state{}
	same := map[alike][]Far{}
	for _, f := range w.fars {
		if !f.Network.IsValid() {
			continue
		}
		if f.Left != shortcut.Taken {
			next[f.Network] = farState{state{left: f.Left, why: f.Why}, f.Network.Addr()} // the program wants an address of the family
			continue
		}
		s, known := uplinks[f.Interface]
		if !known {
			s = w.judgeUplink(f.Interface)
			uplinks[f.Interface] = s
		}
		if f.MTU != 0 {
			s.mtu = min(s.mtu, f.MTU)
		}
		next[f.Network] = farState{s, f.NextHop}
		if s.left == shortcut.Taken {
			kind := alike{rules.Link{Name: f.Interface, Index: s.ifindex}, f.Network.Addr().Is4(), f.Network.Bits()}
			same[kind] = append(same[kind], f)
		}
	}
	for kind, fars := range same {
		w.judgeAlike(kind, fars, links, next)
	}
	return next
}

func (w *Watch) judgeUplink(name string) state {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return state{left: shortcut.Down, why: err.Error()}
	}
	attrs := link.Attrs()
	s := state{ifindex: attrs.Index, mtu: attrs.MTU}
	leave := func(left shortcut.Left, format string, args ...any) state {
		s.left, s.why = left, fmt.Sprintf(format, args...)
		return s
	}
	switch {
	case attrs.EncapType != "ether":
		s.ifindex = 0 // the program expects Ethernet
		return leave(shortcut.Route, "%s is no Ethernet interface", name)
	case attrs.OperState != netlink.OperUp && (attrs.OperState != netlink.OperUnknown || attrs.RawFlags&unix.IFF_RUNNING == 0):
		return leave(shortcut.Down, "%s is %s", name, attrs.OperState)
	case attrs.MasterIndex != 0:
		return leave(shortcut.Bridged, "%s is a port of interface %d", name, attrs.MasterIndex)
	}
	return w.judgeTC(s, name)
}

// alike has the properties of networks whose rules are judged together.
type alike struct {
	uplink rules.Link
	is4    bool
	bits   int
}

// judgeAlike looks for a rule that may act on packets that a pod of this machine sends into one of the networks, or
// gets from there. One such rule is enough to leave the network alone, for all pods. It asks about all networks and pods at once
// and, if that finds a rule, about each: rules for one of them look like rules for any.
func (w *Watch) judgeAlike(kind alike, fars []Far, links map[string]rules.Link, next map[netip.Prefix]farState) {
	all := end{}
	var each []end
	for _, p := range w.pods {
		one := end{links: []rules.Link{links[p.Interface]}}
		for _, a := range p.Addresses {
			if a = a.Unmap(); a.Is4() == kind.is4 {
				one.addresses = append(one.addresses, a)
			}
		}
		if len(one.addresses) > 0 {
			each = append(each, one)
			all = end{append(all.addresses, one.addresses...), append(all.links, one.links...)}
		}
	}
	// Without pods no packet could take the shortcut.
	if w.unread == nil && (len(each) == 0 || w.findFarRule(kind, fars, all) == nil) {
		return
	}
	for i, f := range fars {
		s := next[f.Network]
		s.left, s.why = w.judgeFarRules(kind, fars[i:i+1], all, each)
		next[f.Network] = s
	}
}

// judgeFarRules does the same as judgeAlike for one network.
func (w *Watch) judgeFarRules(kind alike, one []Far, all end, each []end) (shortcut.Left, string) {
	if w.unread != nil {
		return shortcut.RulesUnread, w.unread.Error()
	}
	if w.findFarRule(kind, one, all) == nil {
		return shortcut.Taken, ""
	}
	for _, own := range each {
		if h := w.findFarRule(kind, one, own); h != nil {
			return shortcut.Rule, h.String()
		}
	}
	return shortcut.Taken, ""
}

// findFarRule looks for a rule in both directions.
func (w *Watch) findFarRule(kind alike, fars []Far, own end) *rules.Hazard {
	var networks []netip.Addr
	for _, f := range fars {
		networks = append(networks, f.Network.Masked().Addr())
	}
	out, established := []rules.Link{kind.uplink}, w.mode == shortcut.Checked
	h := w.rules.Find(rules.Packets{From: own.addresses, To: networks, ToBits: kind.bits, In: own.links, Out: out, Established: established})
	if h == nil {
		h = w.rules.Find(rules.Packets{From: networks, FromBits: kind.bits, To: own.addresses, In: out, Out: own.links, Established: established})
	}
	return h
}

// applyFar tells the programs the changes of networks. A network is added before its interface gets the
// program, and removed after. A network inside of another one is added before it, and removed after it.
func (w *Watch) applyFar(next map[netip.Prefix]farState) error {
	var errs []error
	for _, n := range byBits(next, -1) {
		s := next[n]
		if before, known := w.farStates[n]; known && before == s {
			continue
		}
		if s.ifindex != 0 {
			if err := w.short.AttachFar(s.ifindex); err != nil {
				errs = append(errs, err)
				s.left, s.why = shortcut.TC, err.Error()
			}
		}
		if err := w.short.PutFar(shortcut.Far{Network: n, NextHop: s.nextHop, Ifindex: s.ifindex, MTU: s.mtu, Left: s.left}); err != nil {
			errs = append(errs, err)
			continue
		}
		w.farStates[n] = s
	}
	for _, n := range byBits(w.farStates, 1) {
		if _, is := next[n]; !is {
			errs = append(errs, w.short.RemoveFar(n))
			delete(w.farStates, n)
		}
	}
	return errors.Join(errs...)
}

// byBits returns the networks by the number of their bits, rising or falling.
func byBits(of map[netip.Prefix]farState, order int) []netip.Prefix {
	return slices.SortedFunc(maps.Keys(of), func(a, b netip.Prefix) int { return order * (a.Bits() - b.Bits()) })
}
