package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"
)

// Layout is the place of the balancer.
type Layout string

// The layouts. With Options.Router a router stands between the client and the rest.
//
// OneArm: one segment, the balancer sends out of the interface it receives on.
//
//	client ─── switch ─┬─ lb
//	                   ├─ b1
//	                   └─ b2
//
// TwoArm: the balancer stands between the client and the backends' segment.
//
//	client ─── lb ─── switch ─┬─ b1
//	                          └─ b2
//
// Direct: as TwoArm, with a cable and a subnet for each backend.
//
//	client ─── lb ─┬─ b1
//	               └─ b2
//
// The addresses:
//
//	client          198.51.100.7/24   2001:db8:c::7/64   (OneArm without router: 10.0.0.100, 2001:db8:1::100)
//	its gateway     198.51.100.1      2001:db8:c::1
//	router to lb    10.9.0.254/24     2001:db8:9::254/64 (OneArm: 10.0.0.254, 2001:db8:1::254)
//	lb to router    10.9.0.1          2001:db8:9::1
//	lb to backends  10.0.0.1/24       2001:db8:1::1/64   (Direct: 10.0.<i>.1, 2001:db8:1:<i>::1)
//	b<i>            10.0.0.<i+1>      2001:db8:1::<i+1>  (Direct: 10.0.<i>.2, 2001:db8:1:<i>::2)
//	VIPs            192.0.2.0/24      2001:db8::/64      on no host: routed to lb, or on the client's link
const (
	OneArm Layout = "one-arm"
	TwoArm Layout = "two-arm"
	Direct Layout = "direct"
)

// The addresses and networks of services.
var (
	VIP4     = netip.MustParseAddr("192.0.2.10")
	VIP6     = netip.MustParseAddr("2001:db8::10")
	vipsNet4 = netip.MustParsePrefix("192.0.2.0/24")
	vipsNet6 = netip.MustParsePrefix("2001:db8::/64")
	all4     = netip.MustParsePrefix("0.0.0.0/0")
	all6     = netip.MustParsePrefix("::/0")
)

// maxBackends keeps the addresses of the backends apart from the others'.
const maxBackends = 90

// readyTimeout bounds the time until interfaces pass packets; they take milliseconds, and seconds on an
// emulated machine that does much else.
const readyTimeout = time.Minute

// Options of a topology; the zero value is two backends in a OneArm layout, with the kernel's defaults.
type Options struct {
	ID       string // of the lab; random if empty
	Layout   Layout // OneArm if empty
	Backends int    // 1 to 90; 0: 2
	Router   bool   // one between the client and the rest
	// VIPOnLink lets the last hop before the balancer ask for the VIP's MAC, as on the
	// balancer's own subnet. Otherwise it has a route through the balancer's address.
	VIPOnLink bool
	// NoOffload completes checksums in software at client, router, balancer and
	// backends. Without it they are left to a network card that does not exist, which
	// is the default, and a trap for XDP programs.
	NoOffload bool
	// Forwarding lets the balancer's kernel forward packets that XDP passes.
	Forwarding bool
	MTU        int // bytes, of every cable; 0: 1500
	Queues     int // of every interface; 0: as the kernel has it
}

// Topology is a lab laid out around a balancer. Interfaces of every host are eth0, eth1, … from the client's
// side on; a switch's ports are called after the hosts that are plugged into them.
type Topology struct {
	*Lab
	Options  Options
	Client   *Host
	Router   *Host // nil without Options.Router
	Balancer *Host
	Switch   *Host // nil in Direct
	Backends []*Host
}

// Build makes a topology and waits until its interfaces pass packets. Where it fails, or
// ctx ends before, nothing is left.
func Build(ctx context.Context, o Options) (*Topology, error) {
	if o.Layout == "" {
		o.Layout = OneArm
	}
	if o.Backends == 0 {
		o.Backends = 2
	}
	if o.Layout != OneArm && o.Layout != TwoArm && o.Layout != Direct {
		return nil, fmt.Errorf("build lab: layout %q: must be %s, %s or %s", o.Layout, OneArm, TwoArm, Direct)
	}
	if o.Backends < 0 || o.Backends > maxBackends {
		return nil, fmt.Errorf("build lab: %d backends: must be 1 to %d", o.Backends, maxBackends)
	}
	l, err := New(o.ID)
	if err != nil {
		return nil, fmt.Errorf("build lab: %w", err)
	}
	t := &Topology{Lab: l, Options: o}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := t.build(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("build %s lab: %w", o.Layout, err), l.Close())
	}
	return t, nil
}

func (t *Topology) build(ctx context.Context) error {
	for _, step := range []func() error{
		t.addHosts, t.connectFront, t.connectBack, t.addRoutes, t.setOffloads,
		func() error { return t.Balancer.SetForwarding(t.Options.Forwarding) },
	} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(); err != nil {
			return err
		}
	}
	return t.Ready(ctx)
}

func (t *Topology) addHosts() (err error) {
	add := func(name string) *Host {
		if err != nil {
			return nil
		}
		var h *Host
		h, err = t.AddHost(name)
		return h
	}
	t.Client = add("client")
	if t.Options.Router {
		t.Router = add("router")
	}
	t.Balancer = add("lb")
	if t.Options.Layout != Direct {
		t.Switch = add("switch")
	}
	for i := range t.Options.Backends {
		t.Backends = append(t.Backends, add("b"+strconv.Itoa(i+1)))
	}
	if err != nil {
		return err
	}
	if t.Router != nil {
		if err := t.Router.SetForwarding(true); err != nil {
			return err
		}
	}
	if t.Switch != nil {
		return t.Switch.AddBridge("br0")
	}
	return nil
}

// end is an interface with addresses given as text.
func end(h *Host, iface, ipv4, ipv6 string) End {
	return End{Host: h, Interface: iface, IPv4: netip.MustParsePrefix(ipv4), IPv6: netip.MustParsePrefix(ipv6)}
}

// cable connects two ends with the topology's MTU and queues.
func (t *Topology) cable(a, b End) error { return t.Connect(a, b, t.cableKind()) }

// plug connects an end to a new port of the switch.
func (t *Topology) plug(e End) error { return t.ConnectPort(e, t.Switch, "br0", t.cableKind()) }

func (t *Topology) cableKind() Cable { return Cable{MTU: t.Options.MTU, Queues: t.Options.Queues} }

// connectFront makes everything from the client to the balancer.
func (t *Topology) connectFront() error {
	oneArm := t.Options.Layout == OneArm
	client := end(t.Client, "eth0", "198.51.100.7/24", "2001:db8:c::7/64")
	if t.Router == nil {
		if oneArm {
			return t.plug(end(t.Client, "eth0", "10.0.0.100/24", "2001:db8:1::100/64"))
		}
		return t.cable(client, end(t.Balancer, "eth0", "198.51.100.1/24", "2001:db8:c::1/64"))
	}
	if err := t.cable(client, end(t.Router, "eth0", "198.51.100.1/24", "2001:db8:c::1/64")); err != nil {
		return err
	}
	if oneArm {
		return t.plug(end(t.Router, "eth1", "10.0.0.254/24", "2001:db8:1::254/64"))
	}
	return t.cable(end(t.Router, "eth1", "10.9.0.254/24", "2001:db8:9::254/64"),
		end(t.Balancer, "eth0", "10.9.0.1/24", "2001:db8:9::1/64"))
}

// connectBack makes everything from the balancer to the backends.
func (t *Topology) connectBack() error {
	if t.Options.Layout == Direct {
		for i, b := range t.Backends {
			n := i + 1
			err := t.cable(
				end(t.Balancer, fmt.Sprintf("eth%d", n), fmt.Sprintf("10.0.%d.1/24", n), fmt.Sprintf("2001:db8:1:%d::1/64", n)),
				end(b, "eth0", fmt.Sprintf("10.0.%d.2/24", n), fmt.Sprintf("2001:db8:1:%d::2/64", n)))
			if err != nil {
				return err
			}
		}
		return nil
	}
	iface := "eth1"
	if t.Options.Layout == OneArm {
		iface = "eth0"
	}
	if err := t.plug(end(t.Balancer, iface, "10.0.0.1/24", "2001:db8:1::1/64")); err != nil {
		return err
	}
	for i, b := range t.Backends {
		err := t.plug(end(b, "eth0", fmt.Sprintf("10.0.0.%d/24", i+2), fmt.Sprintf("2001:db8:1::%d/64", i+2)))
		if err != nil {
			return err
		}
	}
	return nil
}

// addRoutes: the client and the router towards the VIPs, the backends through the balancer
// (which destination-only NAT asks for), the balancer back through the router.
func (t *Topology) addRoutes() error {
	if err := t.frontRoutes(); err != nil {
		return err
	}
	for i, b := range t.Backends {
		gateway := t.Balancer.Interfaces()[len(t.Balancer.Interfaces())-1]
		if t.Options.Layout == Direct {
			gateway = t.Balancer.Interfaces()[i+1]
		}
		if err := t.defaultVia(b, gateway); err != nil {
			return err
		}
	}
	return nil
}

// frontRoutes are the routes between client and balancer.
func (t *Topology) frontRoutes() error {
	front := t.Balancer.Interfaces()[0]
	before, iface := t.Client, "eth0" // the last hop before the balancer
	if t.Router != nil {
		before, iface = t.Router, "eth1"
		if err := t.defaultVia(t.Client, t.Router.Interfaces()[0]); err != nil {
			return err
		}
		if err := t.defaultVia(t.Balancer, t.Router.Interfaces()[1]); err != nil {
			return err
		}
	}
	if t.Options.Layout != OneArm || t.Router == nil {
		if err := t.defaultVia(before, front); err != nil {
			return err
		}
	}
	return t.vipRoutes(before, iface, 0)
}

func (t *Topology) defaultVia(h *Host, gateway Interface) error {
	return errors.Join(
		h.AddRoute(Route{To: all4, Via: gateway.IPv4.Addr()}),
		h.AddRoute(Route{To: all6, Via: gateway.IPv6.Addr()}))
}

// vipRoutes leads from h to the VIPs, over the balancer or over the link alone.
func (t *Topology) vipRoutes(h *Host, iface string, mtu int) error {
	front := t.Balancer.Interfaces()[0]
	route4 := Route{To: vipsNet4, Interface: iface, Via: front.IPv4.Addr(), MTU: mtu}
	route6 := Route{To: vipsNet6, Interface: iface, Via: front.IPv6.Addr(), MTU: mtu}
	if t.Options.VIPOnLink {
		route4.Via, route6.Via = netip.Addr{}, netip.Addr{}
	}
	return errors.Join(h.AddRoute(route4), h.AddRoute(route6))
}

// Shortcut is a second cable of the client's in a TwoArm layout, into the backends' segment.
// By it they answer the client directly:
//
//	client ─┬─ lb ── switch ─┬─ b1
//	   eth1 └────────────────┤
//	                         └─ b2
func (t *Topology) Shortcut() error {
	client := t.Client
	err := errors.Join(
		t.cable(end(client, "eth1", "10.0.0.100/24", "2001:db8:1::100/64"), End{Host: t.Switch, Interface: client.name}),
		t.Switch.Plug(client.name, "br0"))
	for _, b := range t.Backends {
		err = errors.Join(err,
			b.AddRoute(Route{To: netip.MustParsePrefix("198.51.100.0/24"), Via: netip.MustParseAddr("10.0.0.100")}),
			b.AddRoute(Route{To: netip.MustParsePrefix("2001:db8:c::/64"), Via: netip.MustParseAddr("2001:db8:1::100")}))
	}
	return err
}

// Relay makes the cable of a deleted interface again, with its names, MACs and addresses, and other indices.
// A port of the switch is plugged in again, and routes between client and balancer are restored. The caller
// has to restore the rest.
func (t *Topology) Relay(ctx context.Context, h *Host, iface string) error {
	far, farIface, err := t.FarEnd(h, iface)
	if err != nil {
		return err
	}
	endOf := func(h *Host, name string) (End, net.HardwareAddr) {
		for _, i := range h.Interfaces() {
			if i.Name == name {
				return End{h, name, i.IPv4, i.IPv6}, i.MAC
			}
		}
		return End{}, nil // FarEnd has found both
	}
	a, macA := endOf(h, iface)
	b, macB := endOf(far, farIface)
	if err := (Cable{MTU: t.Options.MTU, Queues: t.Options.Queues}).lay(a, b, macA, macB); err != nil {
		return err
	}
	if far == t.Switch {
		if err := far.Plug(farIface, "br0"); err != nil {
			return err
		}
	}
	if h == t.Balancer && iface == h.Interfaces()[0].Name {
		err = t.frontRoutes()
	}
	return errors.Join(err, t.setOffloads(), h.ready(ctx), far.ready(ctx))
}

// setOffloads switches checksum offload off where asked, and GRO on at the far ends of the balancer's
// cables: a veth takes frames that XDP redirects to it only where its receiver runs NAPI, which GRO (or an
// XDP program) brings. XDP_TX needs more: frames of it reach the receiver's ring, but nothing wakes the
// receiver unless it has an XDP program of its own (veth_xdp_flush; of 2000 frames none arrived on 6.18 with
// GRO alone, all with a program, and all when redirected to the interface they came in on).
func (t *Topology) setOffloads() error {
	for _, h := range t.Hosts() {
		for _, i := range h.Interfaces() {
			if t.Options.NoOffload && h != t.Switch {
				if err := h.SetOffload(i.Name, map[string]bool{"tx": false}); err != nil {
					return err
				}
			}
			if far := t.far(i); h != t.Balancer && far == t.Balancer {
				if err := h.SetOffload(i.Name, map[string]bool{"gro": true}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// far is the host at the other end of an interface's cable.
func (t *Topology) far(i Interface) *Host {
	for _, h := range t.Hosts() {
		if len(i.Peer) > len(h.name) && i.Peer[:len(h.name)] == h.name && i.Peer[len(h.name)] == '/' {
			return h
		}
	}
	return nil
}

// FarEnd is the host and interface at the other end of one of h's cables: the place to capture the frames of
// h's XDP program, and the interface whose GRO decides whether they arrive.
func (t *Topology) FarEnd(h *Host, iface string) (*Host, string, error) {
	for _, i := range h.Interfaces() {
		if i.Name == iface {
			if far := t.far(i); far != nil {
				return far, i.Peer[len(far.name)+1:], nil
			}
		}
	}
	return nil, "", fmt.Errorf("host %s has no interface %s", h.name, iface)
}

// NarrowToService makes the router answer "too big" to the client's packets of more than mtu bytes to a VIP
// (at least 1280 for IPv6).
func (t *Topology) NarrowToService(mtu int) error {
	if t.Router == nil {
		return errors.New("narrow the path: the topology has no router: set Options.Router")
	}
	return t.vipRoutes(t.Router, "eth1", mtu)
}

// NarrowToClient makes the router answer "too big" to packets of more than mtu bytes to the client (at least
// 1280 for IPv6).
func (t *Topology) NarrowToClient(mtu int) error {
	if t.Router == nil {
		return errors.New("narrow the path: the topology has no router: set Options.Router")
	}
	for _, address := range []netip.Addr{t.Client.Addr4(), t.Client.Addr6()} {
		to := netip.PrefixFrom(address, address.BitLen())
		if err := t.Router.AddRoute(Route{To: to, Interface: "eth0", MTU: mtu}); err != nil {
			return err
		}
	}
	return nil
}
