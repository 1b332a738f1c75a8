package watch

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/pod/rules"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/vishvananda/netlink"
)

// farState is a verdict about a network of another machine's pods.
type farState struct {
	state
	nextHop netip.Addr
}

// judgeFar looks at the ways to other machines, whose packets come in past what stands at the ingress of the interface.
// What stands at its egress, and its qdisc, sees the packets of the shortcut too, and is no reason.
func (w *Watch) judgeFar(links map[string]rules.Link) map[netip.Prefix]farState {
	next := map[netip.Prefix]farState{}
	for _, f := range w.fars {
		s := farState{w.judgeUplink(f), f.NextHop}
		if s.left == shortcut.Taken {
			s.left, s.why = w.judgeFarRules(f, rules.Link{Name: f.Interface, Index: s.ifindex}, links)
		}
		next[f.Network] = s
	}
	return next
}

func (w *Watch) judgeUplink(f Far) state {
	link, err := netlink.LinkByName(f.Interface)
	if err != nil {
		return state{left: shortcut.Down, why: err.Error()}
	}
	attrs := link.Attrs()
	s := state{ifindex: attrs.Index, mtu: attrs.MTU}
	if attrs.OperState != netlink.OperUp {
		s.left, s.why = shortcut.Down, fmt.Sprintf("%s is %s", f.Interface, attrs.OperState)
		return s
	}
	if attrs.MasterIndex != 0 {
		s.left, s.why = shortcut.Bridged, fmt.Sprintf("%s is a port of interface %d", f.Interface, attrs.MasterIndex)
		return s
	}
	foreign, err := w.short.ForeignTC(attrs.Index)
	if err != nil {
		s.left, s.why = shortcut.TC, err.Error()
	} else if len(foreign) > 0 {
		s.left, s.why = shortcut.TC, fmt.Sprintf("%s has %s", f.Interface, foreign[0])
	}
	return s
}

// judgeFarRules looks for a rule that may do something with what a pod of this machine sends into the network, or
// gets from there. One is enough to leave the network alone, for all pods.
func (w *Watch) judgeFarRules(f Far, uplink rules.Link, links map[string]rules.Link) (shortcut.Left, string) {
	if w.unread != nil {
		return shortcut.RulesUnread, w.unread.Error()
	}
	all := end{}
	var each []end
	for _, p := range w.pods {
		one := end{links: []rules.Link{links[p.Interface]}}
		for _, a := range p.Addresses {
			if a = a.Unmap(); a.Is4() == f.Network.Addr().Is4() {
				one.addresses = append(one.addresses, a)
			}
		}
		if len(one.addresses) > 0 {
			each = append(each, one)
			all = end{append(all.addresses, one.addresses...), append(all.links, one.links...)}
		}
	}
	// All pods at once first: rules for one of them look like rules for any.
	if len(each) == 0 || w.findFarRule(f, uplink, all) == nil {
		return shortcut.Taken, ""
	}
	for _, one := range each {
		if h := w.findFarRule(f, uplink, one); h != nil {
			return shortcut.Rule, h.String()
		}
	}
	return shortcut.Taken, ""
}

// findFarRule looks for a rule in both directions.
func (w *Watch) findFarRule(f Far, uplink rules.Link, own end) *rules.Hazard {
	network, out := []netip.Addr{f.Network.Masked().Addr()}, []rules.Link{uplink}
	established, bits := w.mode == shortcut.Checked, f.Network.Bits()
	h := w.rules.Find(rules.Packets{From: own.addresses, To: network, ToBits: bits, In: own.links, Out: out, Established: established})
	if h == nil {
		h = w.rules.Find(rules.Packets{From: network, FromBits: bits, To: own.addresses, In: out, Out: own.links, Established: established})
	}
	return h
}

// applyFar gives the programs what has changed of the networks. A network is known before its interface has the
// program, and forgotten before it is taken off.
func (w *Watch) applyFar(next map[netip.Prefix]farState) error {
	var errs []error
	for n, s := range next {
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
	for n := range w.farStates {
		if _, is := next[n]; !is {
			errs = append(errs, w.short.RemoveFar(n))
			delete(w.farStates, n)
		}
	}
	return errors.Join(errs...)
}
