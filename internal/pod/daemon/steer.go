package daemon

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/vishvananda/netlink"
)

// steerPortsMax is the largest number of ports of an entry.
const steerPortsMax = 64

// buildSteers reads the steers.
func (p *parsed) buildSteers(d *document) {
	for i := range d.Steer.Items {
		e := &d.Steer.Items[i]
		s := watch.Steer{Name: e.Name.Value, Network: e.To.Value, Interface: e.Interface.Value, NextHop: e.Via.Value}
		for _, one := range e.Ports.Items {
			if !one.Bad && slices.Contains(s.Ports, one.Port) {
				p.faults.Errorf(one.Mark, "remove one of them", "port %s is in the list twice", one.Port)
			}
			s.Ports = append(s.Ports, one.Port)
		}
		if e.Name.Bad || e.To.Bad || e.Interface.Bad || e.Via.Bad || !s.Network.IsValid() {
			continue
		}
		if !s.NextHop.IsValid() && s.Network.IsSingleIP() {
			s.NextHop = s.Network.Addr()
		}
		if p.judgeSteer(e, &s) {
			p.steers, p.steered = append(p.steers, s), append(p.steered, e.Interface.Mark)
		}
	}
}

// judgeSteer reports the faults of an entry.
func (p *parsed) judgeSteer(e *steerEntry, s *watch.Steer) bool {
	bad := func(at config.Mark, suggestion, format string, args ...any) bool {
		p.faults.Errorf(at, suggestion, format, args...)
		return false
	}
	switch {
	case !p.sameNode:
		return bad(e.Mark, "leave same_node out, or steer", "same_node: false switches the whole pod shortcut off, also steer")
	case isPattern(s.Interface) || strings.ContainsAny(s.Interface, "/:[]\\"):
		return bad(e.Interface.Mark, "name one interface, as `ip link` shows it", "%q cannot be an interface's name", s.Interface)
	case len(s.Ports) > steerPortsMax:
		return bad(e.Ports.Mark, "move some of them to another entry", "an entry has up to %d ports, and this one has %d", steerPortsMax, len(s.Ports))
	case s.Network.Bits() == 0:
		return bad(e.To.Mark, "name the networks to which the interface leads, an entry for each", "steering to every address is not supported")
	case !s.NextHop.IsValid():
		return bad(e.To.Mark, "write via: and the next hop, a neighbour at "+s.Interface, "%s is a network, so the destination cannot be the next hop", s.Network)
	case s.NextHop.Is4() != s.Network.Addr().Is4():
		return bad(e.Via.Mark, "write an entry for each family", "the next hop %s is not of the family of %s", s.NextHop, s.Network)
	}
	for _, other := range p.steers {
		if other.Name == s.Name {
			return bad(e.Name.Mark, "give each entry its own name", "two entries have the name %s", s.Name)
		}
		if other.Network != s.Network {
			continue
		}
		for _, one := range s.Ports {
			if slices.Contains(other.Ports, one) {
				return bad(e.Ports.Mark, "remove it from one of them", "port %s of %s is also in the entry %s", one, s.Network, other.Name)
			}
		}
	}
	return true
}

// checkSteers reports interfaces and addresses that do not fit this machine.
func (p *parsed) checkSteers(severity config.Severity) {
	own := ownAddresses()
	for i, s := range p.steers {
		link, err := netlink.LinkByName(s.Interface)
		switch {
		case s.Network.IsSingleIP() && own[s.Network.Addr()]:
			p.faults.Add(severity, p.steered[i], fmt.Sprintf("%s is this machine's own address, so no interface leads to it", s.Network.Addr()),
				"translate at the pods' sockets instead, as for a cache in the host's network: write a service with the address that the pods ask and this address as its backend, and `sockets: {cgroup: …}` beside `services`; see docs/guide/pods.md")
		case err != nil:
			p.faults.Add(severity, p.steered[i], fmt.Sprintf("shunt cannot use this machine's interface %s: %v", s.Interface, err), "`ip link` lists the interfaces; shunt uses an interface as soon as it exists")
		case link.Attrs().EncapType != "ether":
			p.faults.Add(severity, p.steered[i], fmt.Sprintf("this machine's interface %s is no Ethernet interface", s.Interface), "name an interface with Ethernet addresses, as `ip link` shows them; a tunnel of IP in IP cannot be one")
		}
	}
}

// ownAddresses returns this machine's addresses; none if they cannot be listed.
func ownAddresses() map[netip.Addr]bool {
	list, _ := netlink.AddrList(nil, netlink.FAMILY_ALL)
	own := map[netip.Addr]bool{}
	for _, one := range list {
		if a, ok := netip.AddrFromSlice(one.IP); ok {
			own[a.Unmap()] = true
		}
	}
	return own
}

// portTexts returns the ports of a steer.
func portTexts(s *watch.Steer) (ports []string) {
	for _, p := range s.Ports {
		ports = append(ports, p.String())
	}
	return ports
}

// steerSettings returns a setting for each steer.
func (s *settings) steerSettings() (all []value.Setting) {
	for _, one := range s.steers {
		all = append(all, value.Setting{Key: "accelerate steer " + one.Name, Value: steerText(&one)})
	}
	return all
}

// steerText returns a text such as "53/udp 53/tcp to 10.50.0.53/32 by eth1 via 10.50.0.53".
func steerText(s *watch.Steer) string {
	return fmt.Sprintf("%s to %s by %s via %s", strings.Join(portTexts(s), " "), s.Network, s.Interface, s.NextHop)
}

// steersOf returns the steers for the status.
func steersOf(st *watch.Status) (all []*shuntv1.AcceleratedSteer) {
	for _, s := range st.Steers {
		all = append(all, &shuntv1.AcceleratedSteer{Name: s.Name, Ports: portTexts(&s.Steer), Network: s.Network.String(), Interface: s.Interface,
			NextHop: s.NextHop.String(), State: s.State, Why: s.Why, Counts: countsMessage(s.Counts)})
	}
	return all
}

// steerConditions returns a condition for each steer whose packets go as without it.
func steerConditions(st *watch.Status) (all []condition.Condition) {
	for _, s := range st.Steers {
		if s.State != shortcut.Taken.String() {
			all = append(all, condition.Condition{Subject: s.Name, Text: fmt.Sprintf("packets to %s follow the host's routes: %s: %s", steerText(&s.Steer), s.State, s.Why)})
		}
	}
	return all
}
