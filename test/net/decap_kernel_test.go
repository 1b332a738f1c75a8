package net

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestDecapFromKernelTunnels: shunt decapsulates packets of the kernel's own tunnel devices:
// with their encapsulation limit, their source ports and their checksums. The test runs on
// kernels that have such devices, as Debian's do in a virtual machine.
func TestDecapFromKernelTunnels(t *testing.T) {
	b := newBackendBed(t)
	own, its := b.sender.Interfaces()[1], b.backend.Interfaces()[0]
	from4, from6, to4, to6 := own.IPv4.Addr().AsSlice(), own.IPv6.Addr().AsSlice(), its.IPv4.Addr().AsSlice(), its.IPv6.Addr().AsSlice()
	const gue, checksum6 = 2, 2 // TUNNEL_ENCAP_GUE, TUNNEL_ENCAP_FLAG_CSUM6 of linux/if_tunnel.h
	named := func(name string) netlink.LinkAttrs {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = name, 1500
		return attrs
	}
	devices := []struct {
		link netlink.Link
		vips []netip.Addr
	}{
		{&netlink.Iptun{LinkAttrs: named("ipip"), Local: from4, Remote: to4, Proto: unix.IPPROTO_IPIP, PMtuDisc: 1}, vips[:1]},
		{&netlink.Sittun{LinkAttrs: named("sit"), Local: from4, Remote: to4, Proto: unix.IPPROTO_IPV6, PMtuDisc: 1}, vips[1:]},
		{&netlink.Ip6tnl{LinkAttrs: named("ip6tnl"), Local: from6, Remote: to6, EncapLimit: 4}, vips},
		{&netlink.Iptun{LinkAttrs: named("gue"), Local: from4, Remote: to4, Proto: unix.IPPROTO_IPIP, PMtuDisc: 1, EncapType: gue, EncapDport: tunnelPort}, vips[:1]},
		{&netlink.Ip6tnl{LinkAttrs: named("gue6"), Local: from6, Remote: to6, EncapLimit: 4, EncapType: gue, EncapFlags: checksum6, EncapDport: tunnelPort}, vips},
	}
	p := b.decap("--from", "10.0.0.1", "--from", "2001:db8:2::1")
	made := 0
	for _, d := range devices {
		name := d.link.Attrs().Name
		if err := b.sender.Netlink().LinkAdd(d.link); err != nil {
			if os.Getenv("SHUNT_KERNEL_TEST") != "" {
				t.Fatalf("%s: the virtual machine's kernel makes no such device: %v", name, err)
			}
			t.Logf("%s: this kernel makes no such device: %v", name, err)
			continue
		}
		made++
		if err := b.sender.SetUp(name, true); err != nil {
			t.Fatal(err)
		}
		for _, vip := range d.vips {
			if err := b.sendThrough(name, vip); err != nil {
				t.Fatal(err)
			}
			if err := b.get(vip); err != nil {
				t.Errorf("%s through %s: %v", vip, name, err)
				continue
			}
			if _, err := lab.Upload(within(t, time.Minute), b.client.HTTPClient(false), at(vip, 80), 1<<20); err != nil {
				t.Errorf("%s through %s: %v", vip, name, err)
			}
			t.Logf("%s arrives through %s", vip, name)
		}
		if err := b.sender.Netlink().LinkDel(d.link); err != nil {
			t.Fatal(err)
		}
	}
	b.stop(p)
	b.requireNoTraces()
	if made == 0 {
		t.Skip("this kernel has no tunnel devices; Debian's have, see `make test-kernels`")
	}
}

// sendThrough routes a VIP into a device of the sender.
func (b *backendBed) sendThrough(device string, vip netip.Addr) error {
	link, err := b.sender.Netlink().LinkByName(device)
	if err != nil {
		return err
	}
	route := blackhole(vip)
	if err := b.sender.Netlink().RouteDel(route); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	route = &netlink.Route{Dst: route.Dst, LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK}
	return b.sender.Netlink().RouteReplace(route)
}
