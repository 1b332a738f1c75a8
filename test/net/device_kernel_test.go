package net

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// devices are the devices besides a card that have addresses in practice: the devices on top of eth0, the hosts
// of a one-arm lab that have them, and the program's mode then. They need the kernel's own devices, as Debian's
// kernels have them in a virtual machine.
var devices = []struct {
	kind       string
	everywhere bool // on every host, not only on the balancer
	parent     bool // eth0 is among the interfaces, too
	attach     string
	mode       string // the program's mode
	stack      []func() netlink.Link
}{
	{"vlan", true, false, "auto", "generic", []func() netlink.Link{customer}},
	{"vlan", true, true, "native", "native", []func() netlink.Link{customer}},
	{"qinq", true, true, "native", "native", []func() netlink.Link{provider, inner}},
	{"bond", false, false, "auto", "native", []func() netlink.Link{bond}},
	{"bond", false, false, "generic", "generic", []func() netlink.Link{bond}},
}

func vlan(name string, id int, protocol netlink.VlanProtocol) *netlink.Vlan {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return &netlink.Vlan{LinkAttrs: attrs, VlanId: id, VlanProtocol: protocol}
}

func customer() netlink.Link { return vlan("eth0.100", 100, netlink.VLAN_PROTOCOL_8021Q) }
func provider() netlink.Link { return vlan("eth0.100", 100, netlink.VLAN_PROTOCOL_8021AD) }

// inner leaves room for its own tag: an interface takes one tag beyond its MTU.
func inner() netlink.Link {
	link := vlan("eth0.100.7", 7, netlink.VLAN_PROTOCOL_8021Q)
	link.MTU = 1496
	return link
}

func bond() netlink.Link {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "bond0"
	link := netlink.NewLinkBond(attrs)
	link.Mode = netlink.BOND_MODE_ACTIVE_BACKUP
	link.Miimon = 100
	return link
}

// TestForwardOverDevices: a VIP behind a VLAN's interface or a bond is served, TCP and UDP, over both families.
func TestForwardOverDevices(t *testing.T) {
	for _, d := range devices {
		t.Run(d.kind+"/"+d.attach, func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: lab.OneArm})
			hosts := []*lab.Host{b.Balancer}
			if d.everywhere {
				hosts = append(append(hosts, b.Client), b.Backends...)
			}
			top := ""
			for _, host := range hosts {
				below := "eth0"
				for _, make := range d.stack {
					link := make()
					top = link.Attrs().Name
					moveTo(t, host, below, link)
					below = top
				}
			}
			lists := fmt.Sprintf("  - {name: %s, attach: %s}\n", top, d.attach)
			attached := []string{top + " " + d.mode}
			eth0 := fmt.Sprintf("  - {name: eth0, attach: %s}\n", d.attach)
			if d.parent {
				lists += eth0 // behind the interface that needs it: the order does not matter
				attached = []string{"eth0 " + d.mode, attached[0]}
			}
			b.write(strings.ReplaceAll(b.file(settings{attach: d.attach, more: b.wide()}), eth0, lists))
			b.start()
			var have []string
			for _, a := range b.status().Attached {
				have = append(have, a.Interface+" "+a.Mode)
			}
			if !slices.Equal(have, attached) {
				t.Errorf("attached are %q, want %q", have, attached)
			}
			for _, vip := range vips {
				t.Run(family(vip), func(t *testing.T) {
					b.everyBackendAnswers(t, vip, "nat")
					b.portsArrive(t, vip.Next(), 8050)
					b.portsArrive(t, vip.Next().Next(), 8050)
					b.datagramsOfEverySize(t, at(vip, 53))
					b.transfer(t, at(vip, 80))
				})
			}
			b.nothingWentWrong(t, d.attach)
		})
	}
}

// TestVLANsWithHiddenTags: an interface has a VLAN that shunt does not know, and the card removes its tags, as
// the other end of a veth does.
func TestVLANsWithHiddenTags(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm})
	b.write(b.file(settings{attach: "native"}))
	b.start()
	if c := b.status().condition("tags_hidden"); c != "" {
		t.Errorf("without a VLAN: %s", c)
	}
	handle, link := b.Balancer.Netlink(), vlan("eth0.50", 50, netlink.VLAN_PROTOCOL_8021Q)
	below, err := handle.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	link.ParentIndex = below.Attrs().Index
	if err := handle.LinkAdd(link); err != nil {
		lacks(t, err, unix.EOPNOTSUPP, link.Type())
		t.Fatal(err)
	}
	nstest.Eventually(t, "the condition tags_hidden", func() bool {
		c := b.status().condition("tags_hidden")
		return strings.Contains(c, "eth0.50") && strings.Contains(c, "rx-vlan-hw-parse")
	})
	if err := handle.LinkDel(link); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, "no condition tags_hidden", func() bool { return b.status().condition("tags_hidden") == "" })
}

// moveTo puts a device on top of another one of a host, and moves addresses and routes there.
func moveTo(t *testing.T, host *lab.Host, from string, link netlink.Link) {
	t.Helper()
	handle := host.Netlink()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	below, err := handle.LinkByName(from)
	must(err)
	addresses, err := handle.AddrList(below, netlink.FAMILY_ALL)
	must(err)
	routes, err := handle.RouteList(below, netlink.FAMILY_ALL)
	must(err)
	link.Attrs().ParentIndex, link.Attrs().HardwareAddr = below.Attrs().Index, below.Attrs().HardwareAddr
	_, isBond := link.(*netlink.Bond)
	if isBond {
		link.Attrs().ParentIndex = 0
	}
	if err := handle.LinkAdd(link); err != nil {
		lacks(t, err, unix.EOPNOTSUPP, link.Type())
		t.Fatalf("making a device of type %s: %v", link.Type(), err)
	}
	link, err = handle.LinkByName(link.Attrs().Name)
	must(err)
	for _, a := range addresses {
		must(handle.AddrDel(below, &a))
	}
	if isBond {
		must(errors.Join(handle.LinkSetDown(below), handle.LinkSetMaster(below, link)))
	}
	must(errors.Join(handle.LinkSetUp(below), handle.LinkSetUp(link)))
	for _, a := range addresses {
		if !a.IP.IsLinkLocalUnicast() {
			must(handle.AddrAdd(link, &netlink.Addr{IPNet: a.IPNet, Flags: unix.IFA_F_NODAD}))
		}
	}
	for _, r := range routes {
		if r.Gw != nil {
			must(handle.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: r.Dst, Gw: r.Gw}))
		}
	}
}

// TestPodsBehindXDPOfAVLAN: frames of a VLAN that native XDP takes at its parent reach pods at interfaces at
// tc, without their tags.
func TestPodsBehindXDPOfAVLAN(t *testing.T) {
	for _, stack := range [][]func() netlink.Link{{customer}, {provider, inner}} {
		t.Run(fmt.Sprint(len(stack)), func(t *testing.T) {
			b, _ := newNode(t)
			top := ""
			for _, host := range []*lab.Host{b.Balancer, b.Client, b.Backends[0]} {
				below := "eth0"
				for _, make := range stack {
					link := make()
					top = link.Attrs().Name
					moveTo(t, host, below, link)
					below = top
				}
			}
			b.write(strings.ReplaceAll(b.nodeFile("nat", "native"), "{name: eth0, attach: native}", "{name: eth0, attach: native}, {name: "+top+", attach: native}"))
			b.start()
			for _, vip := range vips {
				b.podsAnswer(t, vip, "nat")
				b.datagramsOfEverySize(t, at(vip, 53))
				b.transfer(t, at(vip, 80))
			}
			b.nothingIsLost(t)
		})
	}
}
