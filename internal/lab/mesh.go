package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Mesh is a lab whose machines are all balancers and servers, behind a router that leads the VIPs to
// them over several paths at once (ECMP):
//
//	client ─── router ─── switch ─┬─ m1
//	                              ├─ m2
//	                              └─ m3
//
// Every machine has one interface, eth0, and its default route through the router. Nothing leads to the
// VIPs until Lead says so.
type Mesh struct {
	*Lab
	Client, Router, Switch *Host
	Machines               []*Host
}

// BuildMesh makes a mesh of so many machines, and waits until its interfaces pass packets. mtu is that
// of the cables between router and machines, in bytes; 0: 1500. Where it fails nothing is left.
func BuildMesh(ctx context.Context, id string, machines, mtu int) (*Mesh, error) {
	if machines < 1 || machines > maxBackends {
		return nil, fmt.Errorf("build mesh: %d machines: must be 1 to %d", machines, maxBackends)
	}
	l, err := New(id)
	if err != nil {
		return nil, fmt.Errorf("build mesh: %w", err)
	}
	m := &Mesh{Lab: l}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := m.build(ctx, machines, Cable{MTU: mtu}); err != nil {
		return nil, errors.Join(fmt.Errorf("build mesh: %w", err), l.Close())
	}
	return m, nil
}

func (m *Mesh) build(ctx context.Context, machines int, cable Cable) (err error) {
	for _, add := range []struct {
		name string
		to   **Host
	}{{"client", &m.Client}, {"router", &m.Router}, {"switch", &m.Switch}} {
		if *add.to, err = m.AddHost(add.name); err != nil {
			return err
		}
	}
	if err := errors.Join(m.Router.SetForwarding(true), m.Switch.AddBridge("br0"),
		m.Connect(end(m.Client, "eth0", "198.51.100.7/24", "2001:db8:c::7/64"), end(m.Router, "eth0", "198.51.100.1/24", "2001:db8:c::1/64"), Cable{}),
		m.ConnectPort(end(m.Router, "eth1", "10.0.0.254/24", "2001:db8:1::254/64"), m.Switch, "br0", cable)); err != nil {
		return err
	}
	gateway := Route{To: all4, Via: m.Router.Interfaces()[0].IPv4.Addr()}
	gateway6 := Route{To: all6, Via: m.Router.Interfaces()[0].IPv6.Addr()}
	if err := errors.Join(m.Client.AddRoute(gateway), m.Client.AddRoute(gateway6)); err != nil {
		return err
	}
	gateway.Via, gateway6.Via = m.Router.Interfaces()[1].IPv4.Addr(), m.Router.Interfaces()[1].IPv6.Addr()
	for n := 1; n <= machines; n++ {
		h, err := m.AddHost(fmt.Sprintf("m%d", n))
		if err != nil {
			return err
		}
		m.Machines = append(m.Machines, h)
		if err := errors.Join(m.ConnectPort(end(h, "eth0", fmt.Sprintf("10.0.0.%d/24", n), fmt.Sprintf("2001:db8:1::%d/64", n)), m.Switch, "br0", cable),
			h.AddRoute(gateway), h.AddRoute(gateway6)); err != nil {
			return err
		}
	}
	for _, port := range m.Switch.Interfaces() { // as Topology.setOffloads says
		if err := m.Switch.SetOffload(port.Name, map[string]bool{"gro": true}); err != nil {
			return err
		}
	}
	return m.Ready(ctx)
}

// Lead has the router lead a VIP to these machines, each with the same part of the flows, as
// `ip route replace VIP nexthop via … nexthop via …` does.
func (m *Mesh) Lead(vip netip.Addr, to ...*Host) error {
	route := &netlink.Route{Dst: ipNet(netip.PrefixFrom(vip, vip.BitLen()))}
	link, err := m.Router.link("eth1")
	if err != nil {
		return err
	}
	for _, h := range to {
		via := h.Addr4()
		if vip.Is6() {
			via = h.Addr6()
		}
		route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{LinkIndex: link.Attrs().Index, Gw: via.AsSlice()})
	}
	if err := m.Router.Netlink().RouteReplace(route); err != nil {
		return fmt.Errorf("lead %s to %d machines: %w", vip, len(to), err)
	}
	return nil
}

// SetHashPolicy sets the fields by which the router chooses a path: 0 addresses, 1 addresses and ports
// (fib_multipath_hash_policy in the kernel's ip-sysctl).
func (m *Mesh) SetHashPolicy(policy int) error {
	return errors.Join(m.Router.SetSysctl("net.ipv4.fib_multipath_hash_policy", fmt.Sprint(policy)),
		m.Router.SetSysctl("net.ipv6.fib_multipath_hash_policy", fmt.Sprint(policy)))
}
