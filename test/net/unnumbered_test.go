package net

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/vishvananda/netlink"
)

// hostsOwn are the addresses of a balancer whose interfaces have none: on lo, as on routers whose links
// are unnumbered (RFC 5549).
var hostsOwn = []netip.Prefix{netip.MustParsePrefix("10.255.0.1/32"), netip.MustParsePrefix("2001:db8:255::1/128")}

// linkLocal is a host's link-local address at an interface.
func linkLocal(t *testing.T, h *lab.Host, iface string) (address net.IP, index int) {
	t.Helper()
	link, err := h.Netlink().LinkByName(iface)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "a link-local address of "+iface, func() error {
		all, err := h.Netlink().AddrList(link, netlink.FAMILY_V6)
		for _, a := range all {
			if a.IP.IsLinkLocalUnicast() {
				address = a.IP
				return nil
			}
		}
		return fmt.Errorf("none: %v", err)
	})
	return address, link.Attrs().Index
}

// leads gives a host a route to an address through another host's link-local address, IPv4 too, and with a source of
// its own if there is one.
func leads(t *testing.T, from *lab.Host, iface string, to netip.Prefix, router *lab.Host, at string, source netip.Addr) {
	t.Helper()
	via, _ := linkLocal(t, router, at)
	_, index := linkLocal(t, from, iface)
	r := &netlink.Route{Dst: ipNet(to), LinkIndex: index}
	if source.IsValid() {
		r.Src = source.AsSlice()
	}
	if to.Addr().Is4() {
		r.Via = &netlink.Via{AddrFamily: netlink.FAMILY_V6, Addr: via}
	} else {
		r.Gw = via
	}
	if err := from.Netlink().RouteReplace(r); err != nil {
		t.Fatal(err)
	}
}

// unnumber removes the balancer's addresses towards the backends: it has addresses on lo alone, and reaches backends
// through their link-local addresses, as they reach it.
func (b *bed) unnumber(t *testing.T, own ...netip.Prefix) {
	t.Helper()
	link := b.towards(t).Attrs().Name
	for _, address := range own {
		if err := b.Balancer.AddAddress("lo", address); err != nil {
			t.Fatal(err)
		}
	}
	for _, address := range firstSources {
		if err := b.Balancer.DeleteAddress(link, address); err != nil {
			t.Fatal(err)
		}
	}
	for _, backend := range b.Backends {
		for _, address := range both(backend) {
			leads(t, b.Balancer, link, netip.PrefixFrom(address, address.BitLen()), backend, "eth0", sourceFor(address, own))
		}
		for _, address := range own {
			leads(t, backend, "eth0", address, b.Balancer, link, netip.Addr{})
		}
	}
}

// sourceFor returns the address of the family of to; otherwise none.
func sourceFor(to netip.Addr, own []netip.Prefix) netip.Addr {
	for _, p := range own {
		if p.Addr().Is4() == to.Is4() {
			return p.Addr()
		}
	}
	return netip.Addr{}
}

// TestUnnumbered: a balancer with addresses on lo alone and IPv4 through IPv6 routers sends from these, with NAT, in
// tunnels' headers and for checks, and `check --host` agrees with `run`.
func TestUnnumbered(t *testing.T) {
	for _, attach := range []string{"native", "generic", "tc"} {
		t.Run(attach, func(t *testing.T) {
			b := newDirectBed(t, lab.Options{Layout: lab.TwoArm, MTU: roomy}, len(directServices))
			var all []netip.Addr
			for n := range directServices {
				all = append(all, directVIPs(n)...)
			}
			b.unnumber(t, hostsOwn...)
			b.ownByHand(directVIPs(0), b.Backends...)
			b.decapFrom(all[2:], hostsOwn, b.Backends...)
			nat := directVIPs(len(directServices))
			b.write(b.directFile(attach, len(directServices)) +
				fmt.Sprintf("  - {name: nat, address: [%s, %q], port: 80, protocol: tcp, forwarding: nat, health: {http: {path: /}}, backends: [%s]}\n",
					nat[0], nat[1], strings.Join(b.inFlow(8080), ", ")))
			if code, out := b.shunt("check", "--host", "--config", b.path); code != 0 || strings.Contains(out, "send from") {
				t.Errorf("shunt check --host: exit code %d\n%s", code, out)
			}
			b.start()
			for _, vip := range all {
				b.answersDirectly(t, vip)
			}
			for i, vip := range nat {
				answer, err := b.get(b.Client.HTTPClient(false), at(vip, 80))
				if err != nil || netip.MustParseAddrPort(answer.Remote).Addr() != hostsOwn[i].Addr() {
					t.Errorf("NAT over %s: %+v, %v", family(vip), answer, err)
				}
			}
			if n := b.status().Reasons["no_source"].Packets; n != 0 {
				t.Errorf("%d packets had no source", n)
			}
		})
	}
}

// inFlow are the backends as YAML in one line.
func (b *bed) inFlow(port uint16) (list []string) {
	for _, backend := range b.Backends {
		for _, address := range both(backend) {
			list = append(list, fmt.Sprintf("{address: %q, port: %d}", address, port))
		}
	}
	return list
}

// TestNoAddressToSendFrom: `check --host` reports a backend whose packets would be counted as no_source.
func TestNoAddressToSendFrom(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.unnumber(t, hostsOwn[1])
	front := b.Balancer.Interfaces()[0]
	if err := b.Balancer.DeleteAddress(front.Name, front.IPv4); err != nil {
		t.Fatal(err)
	}
	for _, forwarding := range []string{"dsr-ipip", "dsr-gue", "nat"} {
		b.write(b.file(settings{forwarding: forwarding}))
		code, out := b.shunt("check", "--host", "--config", b.path)
		if code == 0 || !strings.Contains(out, "no IPv4 address to send from") || strings.Contains(out, "no IPv6 address") {
			t.Errorf("shunt check --host with %s: exit code %d\n%s", forwarding, code, out)
		}
	}
}

// TestOnLinkWithoutANetwork: `check --host` knows that a backend is on the link by its route as well as by an address
// of the host in the same network.
func TestOnLinkWithoutANetwork(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.unnumber(t, hostsOwn...)
	b.write(b.directFile("native", 1)) // dsr-l2
	const warns = "dsr-l2 reaches only backends on the same link"
	if _, out := b.shunt("check", "--host", "--config", b.path); !strings.Contains(out, warns) {
		t.Errorf("shunt check --host with gateways:\n%s", out)
	}
	_, index := linkLocal(t, b.Balancer, b.towards(t).Attrs().Name)
	for _, backend := range b.Backends {
		for _, a := range both(backend) {
			r := &netlink.Route{Dst: ipNet(netip.PrefixFrom(a, a.BitLen())), LinkIndex: index}
			if a.Is4() {
				r.Scope = netlink.SCOPE_LINK
			}
			if err := b.Balancer.Netlink().RouteReplace(r); err != nil {
				t.Fatal(err)
			}
		}
	}
	if code, out := b.shunt("check", "--host", "--config", b.path); code != 0 || strings.Contains(out, warns) {
		t.Errorf("shunt check --host without gateways: exit code %d\n%s", code, out)
	}
}
