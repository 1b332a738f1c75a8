package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Cable describes a veth. Zero values leave the kernel's defaults.
type Cable struct {
	MTU    int // bytes, both ends
	Queues int // receive and transmit queues of each end
}

// End is one end of a cable: an interface to be made on a host.
type End struct {
	Host      *Host
	Interface string
	IPv4      netip.Prefix // none if invalid
	IPv6      netip.Prefix // none if invalid
}

// mac is 02:00:00:00:<host>:<interface>: readable in captures, and the same in every run.
func (h *Host) mac(interfaceIndex int) net.HardwareAddr {
	return net.HardwareAddr{2, 0, 0, 0, byte(h.index), byte(interfaceIndex)}
}

// Connect makes a veth between two hosts, with both ends up and addressed.
func (l *Lab) Connect(a, b End, cable Cable) error {
	macA, macB := a.Host.mac(len(a.Host.Interfaces())), b.Host.mac(len(b.Host.Interfaces()))
	if err := cable.lay(a, b, macA, macB); err != nil {
		return err
	}
	a.Host.addInterface(Interface{a.Interface, macA, a.IPv4, a.IPv6, b.Host.name + "/" + b.Interface})
	b.Host.addInterface(Interface{b.Interface, macB, b.IPv4, b.IPv6, a.Host.name + "/" + a.Interface})
	return nil
}

// ConnectPort makes a veth between an end and a new port of a bridge on another host. The port is
// called as the end's host.
func (l *Lab) ConnectPort(e End, of *Host, bridge string, cable Cable) error {
	if err := l.Connect(e, End{Host: of, Interface: e.Host.name}, cable); err != nil {
		return err
	}
	return of.Plug(e.Host.name, bridge)
}

// lay makes the veth.
func (c Cable) lay(a, b End, macA, macB net.HardwareAddr) error {
	veth := netlink.NewVeth(netlink.NewLinkAttrs())
	veth.Name, veth.PeerName = a.Interface, b.Interface
	veth.HardwareAddr, veth.PeerHardwareAddr = macA, macB
	veth.PeerNamespace = netlink.NsFd(b.Host.ns)
	veth.MTU, veth.PeerMTU = c.MTU, uint32(c.MTU)
	if c.Queues > 0 {
		veth.NumTxQueues, veth.NumRxQueues = c.Queues, c.Queues
		veth.PeerNumTxQueues, veth.PeerNumRxQueues = uint32(c.Queues), uint32(c.Queues)
	}
	if err := a.Host.Netlink().LinkAdd(veth); err != nil {
		return fmt.Errorf("connect %s/%s to %s/%s: %w", a.Host.name, a.Interface, b.Host.name, b.Interface, err)
	}
	for _, end := range []End{a, b} {
		for _, prefix := range []netip.Prefix{end.IPv4, end.IPv6} {
			if !prefix.IsValid() {
				continue
			}
			if err := end.Host.AddAddress(end.Interface, prefix); err != nil {
				return err
			}
		}
		if err := end.Host.up(end.Interface); err != nil {
			return err
		}
	}
	return nil
}

func (h *Host) addInterface(i Interface) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.interfaces = append(h.interfaces, i)
}

// AddBridge makes a learning switch: no spanning tree, no multicast snooping, no addresses
// of its own, nothing sent by itself.
func (h *Host) AddBridge(name string) error {
	if err := h.SetSysctl("net.ipv6.conf.default.disable_ipv6", "1"); err != nil {
		return err
	}
	snooping := false
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs(), MulticastSnooping: &snooping}
	bridge.Name, bridge.HardwareAddr = name, h.mac(255)
	if err := h.Netlink().LinkAdd(bridge); err != nil {
		return fmt.Errorf("host %s: add bridge %s: %w", h.name, name, err)
	}
	return h.up(name)
}

// Plug makes an interface a port of a bridge.
func (h *Host) Plug(iface, bridge string) error {
	port, err := h.link(iface)
	if err != nil {
		return err
	}
	master, err := h.link(bridge)
	if err != nil {
		return err
	}
	if err := h.Netlink().LinkSetMaster(port, master); err != nil {
		return fmt.Errorf("host %s: plug %s into %s: %w", h.name, iface, bridge, err)
	}
	return nil
}

// AddPods makes a bridge on a node, with these addresses, and hosts at it whose way to everywhere leads over the bridge: pods of the
// node, as CNI's plugin bridge connects them. Theirs are the addresses after the bridge's.
func (l *Lab) AddPods(node *Host, bridge string, via4, via6 netip.Prefix, names ...string) (pods []*Host, err error) {
	if err := node.AddBridge(bridge); err != nil {
		return nil, err
	}
	for _, of := range []string{"default", bridge} { // a switch has none
		if err := node.SetSysctl("net.ipv6.conf."+of+".disable_ipv6", "0"); err != nil {
			return nil, err
		}
	}
	at4, at6 := via4, via6
	for _, a := range []netip.Prefix{via4, via6} {
		if err := node.AddAddress(bridge, a); err != nil {
			return nil, err
		}
	}
	for _, name := range names {
		at4, at6 = netip.PrefixFrom(at4.Addr().Next(), at4.Bits()), netip.PrefixFrom(at6.Addr().Next(), at6.Bits())
		pod, err := l.AddHost(name)
		if err != nil {
			return nil, err
		}
		if err := l.ConnectPort(End{Host: pod, Interface: "eth0", IPv4: at4, IPv6: at6}, node, bridge, Cable{}); err != nil {
			return nil, err
		}
		for _, route := range []Route{{To: all4, Via: via4.Addr()}, {To: all6, Via: via6.Addr()}} {
			if err := pod.AddRoute(route); err != nil {
				return nil, err
			}
		}
		pods = append(pods, pod)
	}
	return pods, nil
}

func (h *Host) link(iface string) (netlink.Link, error) {
	handle := h.Netlink()
	if handle == nil {
		return nil, fmt.Errorf("host %s: find interface %s: the lab is closed", h.name, iface)
	}
	link, err := handle.LinkByName(iface)
	if err != nil {
		return nil, fmt.Errorf("host %s: find interface %s: %w", h.name, iface, err)
	}
	return link, nil
}

// InterfaceIndex is the kernel's number of the interface in this namespace.
func (h *Host) InterfaceIndex(iface string) (int, error) {
	link, err := h.link(iface)
	if err != nil {
		return 0, err
	}
	return link.Attrs().Index, nil
}

func (h *Host) up(iface string) error {
	link, err := h.link(iface)
	if err != nil {
		return err
	}
	if err := h.handle.LinkSetUp(link); err != nil {
		return fmt.Errorf("host %s: set %s up: %w", h.name, iface, err)
	}
	return nil
}

// SetUp switches an interface on or off.
func (h *Host) SetUp(iface string, on bool) error {
	if on {
		return h.up(iface)
	}
	link, err := h.link(iface)
	if err != nil {
		return err
	}
	if err := h.Netlink().LinkSetDown(link); err != nil {
		return fmt.Errorf("host %s: set %s down: %w", h.name, iface, err)
	}
	return nil
}

// DeleteInterface removes an interface, and with it the other end of its cable and the kernel's state for both:
// addresses, routes, neighbours, programs.
func (h *Host) DeleteInterface(iface string) error {
	link, err := h.link(iface)
	if err != nil {
		return err
	}
	if err := h.Netlink().LinkDel(link); err != nil {
		return fmt.Errorf("host %s: delete interface %s: %w", h.name, iface, err)
	}
	return nil
}

// SetMAC changes an interface's address; neighbours learn it as they would on any network.
func (h *Host) SetMAC(iface string, mac net.HardwareAddr) error {
	link, err := h.link(iface)
	if err != nil {
		return err
	}
	if err := h.Netlink().LinkSetHardwareAddr(link, mac); err != nil {
		return fmt.Errorf("host %s: set mac of %s to %s: %w", h.name, iface, mac, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.interfaces {
		if h.interfaces[i].Name == iface {
			h.interfaces[i].MAC = mac
		}
	}
	return nil
}

// SetMTU changes one end. A veth drops packets that are longer than its receiving end's MTU, so narrow a path with a
// route's MTU (AddRoute) unless these drops are wanted.
func (h *Host) SetMTU(iface string, bytes int) error {
	link, err := h.link(iface)
	if err != nil {
		return err
	}
	if err := h.Netlink().LinkSetMTU(link, bytes); err != nil {
		return fmt.Errorf("host %s: set mtu of %s to %d: %w", h.name, iface, bytes, err)
	}
	return nil
}

// AddAddress adds an address that is usable at once (no duplicate address detection).
func (h *Host) AddAddress(iface string, address netip.Prefix) error {
	link, err := h.link(iface)
	if err != nil {
		return err
	}
	a := &netlink.Addr{IPNet: ipNet(address)}
	if address.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := h.Netlink().AddrAdd(link, a); err != nil {
		return fmt.Errorf("host %s: add address %s to %s: %w", h.name, address, iface, err)
	}
	return nil
}

// DeleteAddress removes an address.
func (h *Host) DeleteAddress(iface string, address netip.Prefix) error {
	link, err := h.link(iface)
	if err != nil {
		return err
	}
	if err := h.Netlink().AddrDel(link, &netlink.Addr{IPNet: ipNet(address)}); err != nil {
		return fmt.Errorf("host %s: delete address %s from %s: %w", h.name, address, iface, err)
	}
	return nil
}

// Route is the next hop of packets to a prefix.
type Route struct {
	To        netip.Prefix
	Via       netip.Addr // the next hop; invalid: To is on the link of Interface
	Interface string     // may be empty with Via
	MTU       int        // bytes; longer packets get an ICMP error from a host that forwards
}

// AddRoute adds a route, or replaces the one to the same prefix.
func (h *Host) AddRoute(r Route) error {
	route := &netlink.Route{Dst: ipNet(r.To), MTU: r.MTU}
	if r.Via.IsValid() {
		route.Gw = r.Via.AsSlice()
	} else {
		route.Scope = netlink.SCOPE_LINK
	}
	if r.Interface != "" {
		link, err := h.link(r.Interface)
		if err != nil {
			return err
		}
		route.LinkIndex = link.Attrs().Index
	}
	if err := h.Netlink().RouteReplace(route); err != nil {
		return fmt.Errorf("host %s: add route to %s via %s %s: %w", h.name, r.To, r.Via, r.Interface, err)
	}
	return nil
}

// ready waits until every interface passes packets: after "up" a worker of the kernel that runs about once a second
// announces carrier changes.
func (h *Host) ready(ctx context.Context) error {
	return wait(ctx, "interfaces of "+h.name, func() (bool, error) {
		handle := h.Netlink()
		if handle == nil {
			return false, fmt.Errorf("the lab is closed")
		}
		links, err := handle.LinkList()
		if err != nil {
			return false, err
		}
		var waiting []string
		for _, link := range links {
			if link.Type() == "veth" && link.Attrs().OperState != netlink.OperUp {
				waiting = append(waiting, link.Attrs().Name)
			}
		}
		if len(waiting) > 0 {
			return false, h.hurry(waiting)
		}
		return h.groupsJoined()
	})
}

// groupsJoined reports whether each IPv6 address has its solicited-node group (RFC 4291, 2.7.1): the kernel joins it
// from a worker some time after the address is there, and a comparison of memberships before and after would see it
// come.
func (h *Host) groupsJoined() (joined bool, err error) {
	err = h.Run(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/igmp6")
		if err != nil {
			return err
		}
		joined = true
		addresses, err := h.Netlink().AddrList(nil, netlink.FAMILY_V6)
		for _, a := range addresses {
			if b := a.IP.To16(); !a.IP.IsLoopback() && !a.IP.IsMulticast() {
				joined = joined && strings.Contains(string(text), fmt.Sprintf("ff0200000000000000000001ff%02x%02x%02x ", b[13], b[14], b[15]))
			}
		}
		return err
	})
	return joined, err
}

// hurry asks for the state of links through ethtool, which on newer kernels does the
// worker's job for the link at once (ethtool_op_get_link calls linkwatch_sync_dev).
func (h *Host) hurry(links []string) error {
	return h.Run(func() error {
		tool, err := ethtool.NewEthtool()
		if err != nil {
			return err
		}
		defer tool.Close()
		for _, name := range links {
			if _, err := tool.LinkState(name); err != nil {
				return fmt.Errorf("link state of %s: %w", name, err)
			}
		}
		return nil
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// reuse lets a new connection take a port that one in TIME_WAIT still holds.
func reuse(_ context.Context, _, _ string, raw syscall.RawConn) error {
	var set error
	err := raw.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	if err != nil {
		return err
	}
	return set
}
