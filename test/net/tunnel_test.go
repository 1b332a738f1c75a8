package net

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// Encapsulations of linux/if_tunnel.h: enum tunnel_encap_types and its flag for UDP checksums
// over IPv6, which these devices send; the receiver also takes datagrams without them.
const (
	encapFOU, encapGUE = 1, 2
	encapChecksum6     = 1 << 1
)

// ignoreEncapLimit is IP6_TNL_F_IGN_ENCAP_LIMIT of linux/ip6_tunnel.h: no option of
// RFC 2473, section 4.1.1, in the outer header.
const ignoreEncapLimit = 1

// tunnelKind is one of the kernel's own tunnels, between the hosts left and right.
type tunnelKind struct {
	name  string
	inner []netip.Prefix // left's addresses inside; right's are the next ones
	link  func(attrs netlink.LinkAttrs, local, remote net.IP) netlink.Link
	outer int          // family of the outer header
	port  *netlink.Fou // the receiver, if it is not the device itself
}

// inside has a tunnel's own networks, so that only the tunnel leads there.
func inside(n int) (four, six netip.Prefix) {
	return netip.MustParsePrefix(fmt.Sprintf("10.8.%d.1/24", n)), netip.MustParsePrefix(fmt.Sprintf("2001:db8:8:%d::1/64", n))
}

func tunnelKinds() []tunnelKind {
	four1, _ := inside(1)
	_, six2 := inside(2)
	four3, six3 := inside(3)
	four4, _ := inside(4)
	four5, _ := inside(5)
	four6, six6 := inside(6)
	ipip := func(encap, port uint16) func(netlink.LinkAttrs, net.IP, net.IP) netlink.Link {
		return func(a netlink.LinkAttrs, local, remote net.IP) netlink.Link {
			return &netlink.Iptun{LinkAttrs: a, Local: local, Remote: remote, Proto: unix.IPPROTO_IPIP, PMtuDisc: 1, EncapType: encap, EncapDport: port}
		}
	}
	ip6tnl := func(encap, port uint16) func(netlink.LinkAttrs, net.IP, net.IP) netlink.Link {
		return func(a netlink.LinkAttrs, local, remote net.IP) netlink.Link {
			return &netlink.Ip6tnl{LinkAttrs: a, Local: local, Remote: remote, Ttl: 64, Flags: ignoreEncapLimit,
				EncapType: encap, EncapDport: port, EncapFlags: encapChecksum6}
		}
	}
	return []tunnelKind{
		{"ipip", []netip.Prefix{four1}, ipip(0, 0), unix.AF_INET, nil},
		{"sit", []netip.Prefix{six2}, func(a netlink.LinkAttrs, local, remote net.IP) netlink.Link {
			return &netlink.Sittun{LinkAttrs: a, Local: local, Remote: remote, Proto: unix.IPPROTO_IPV6, PMtuDisc: 1}
		}, unix.AF_INET, nil},
		{"ip6tnl", []netip.Prefix{four3, six3}, ip6tnl(0, 0), unix.AF_INET6, nil},
		{"fou", []netip.Prefix{four4}, ipip(encapFOU, 5555), unix.AF_INET,
			&netlink.Fou{Family: unix.AF_INET, Port: 5555, Protocol: unix.IPPROTO_IPIP, EncapType: netlink.FOU_ENCAP_DIRECT}},
		{"gue", []netip.Prefix{four5}, ipip(encapGUE, 6080), unix.AF_INET,
			&netlink.Fou{Family: unix.AF_INET, Port: 6080, EncapType: netlink.FOU_ENCAP_GUE}},
		{"gue-ip6tnl", []netip.Prefix{four6, six6}, ip6tnl(encapGUE, 6080), unix.AF_INET6,
			&netlink.Fou{Family: unix.AF_INET6, Port: 6080, EncapType: netlink.FOU_ENCAP_GUE}},
	}
}

// TestTunnelDevices: the kernel's own tunnels can be made and carry datagrams, so that later
// tests against them can rely on that. Kernels without them skip by name; the kernels of
// test/kernel have all.
func TestTunnelDevices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run the tests with sudo")
	}
	l, err := lab.New(fmt.Sprintf("t%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	left, leftErr := l.AddHost("left")
	right, rightErr := l.AddHost("right")
	if err := errors.Join(leftErr, rightErr); err != nil {
		t.Fatal(err)
	}
	prefix := netip.MustParsePrefix
	if err := l.Connect(lab.End{Host: left, Interface: "eth0", IPv4: prefix("10.9.0.1/24"), IPv6: prefix("2001:db8:9::1/64")},
		lab.End{Host: right, Interface: "eth0", IPv4: prefix("10.9.0.2/24"), IPv6: prefix("2001:db8:9::2/64")}, lab.Cable{}); err != nil {
		t.Fatal(err)
	}
	if _, err := right.ServeUDP(":5353", "right"); err != nil {
		t.Fatal(err)
	}
	for i, kind := range tunnelKinds() {
		t.Run(kind.name, func(t *testing.T) {
			device := fmt.Sprintf("tun%d", i)
			kind.dig(t, left, right, device, false)
			kind.dig(t, right, left, device, true)
			for _, p := range kind.inner {
				eventually(t, answerTimeout, "a datagram through the tunnel", func() error {
					_, err := left.AskUDP(within(t, answerTimeout/4), at(p.Addr().Next(), 5353), []byte("who?"))
					return err
				})
			}
		})
	}
}

// dig makes one end of the tunnel; the second end has the second addresses.
func (k tunnelKind) dig(t *testing.T, h, peer *lab.Host, device string, second bool) {
	t.Helper()
	local, remote := h.Addr4(), peer.Addr4()
	if k.outer == unix.AF_INET6 {
		local, remote = h.Addr6(), peer.Addr6()
	}
	if k.port != nil {
		if err := h.Run(func() error { return receiveUDP(*k.port) }); err != nil {
			lacks(t, err, unix.ENOENT, "fou")
			t.Fatalf("receiving on UDP port %d: %v", k.port.Port, err)
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = device
	link := k.link(attrs, local.AsSlice(), remote.AsSlice())
	if err := h.Netlink().LinkAdd(link); err != nil {
		lacks(t, err, unix.EOPNOTSUPP, link.Type())
		t.Fatalf("making a device of type %s: %v", link.Type(), err)
	}
	t.Cleanup(func() { // a second device with the same addresses is refused
		if err := h.Netlink().LinkDel(link); err != nil {
			t.Errorf("deleting %s: %v", device, err)
		}
	})
	for _, p := range k.inner {
		if second {
			p = netip.PrefixFrom(p.Addr().Next(), p.Bits())
		}
		if err := h.AddAddress(device, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.SetUp(device, true); err != nil {
		t.Fatal(err)
	}
}

// receiveUDP makes the kernel remove the encapsulation of packets to a port in the thread's
// namespace. netlink.FouAdd does not work for GUE: it sends the attribute for the protocol
// with 0, which 6.12.117 refuses with ERANGE.
func receiveUDP(f netlink.Fou) error {
	family, err := netlink.GenlFamilyGet(netlink.FOU_GENL_NAME)
	if err != nil {
		return err
	}
	request := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
	request.AddData(&nl.Genlmsg{Command: netlink.FOU_CMD_ADD, Version: 1})
	request.AddData(nl.NewRtAttr(netlink.FOU_ATTR_PORT, binary.BigEndian.AppendUint16(nil, uint16(f.Port))))
	request.AddData(nl.NewRtAttr(netlink.FOU_ATTR_TYPE, []byte{byte(f.EncapType)}))
	request.AddData(nl.NewRtAttr(netlink.FOU_ATTR_AF, []byte{byte(f.Family)}))
	if f.Protocol != 0 {
		request.AddData(nl.NewRtAttr(netlink.FOU_ATTR_IPPROTO, []byte{byte(f.Protocol)}))
	}
	_, err = request.Execute(unix.NETLINK_GENERIC, 0)
	return err
}

// lacks skips a test if the kernel was built without a feature, but not in the machines of
// test/kernel, which load it.
func lacks(t *testing.T, err, sign error, what string) {
	t.Helper()
	if errors.Is(err, sign) && os.Getenv("SHUNT_KERNEL_TEST") == "" {
		t.Skipf("the kernel has no %s", what)
	}
}
