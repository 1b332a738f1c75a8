package net

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/vishvananda/netlink"
)

// routerMAC is the address that VRRP gives a virtual router of IPv4 (RFC 9568, 7.3).
var routerMAC = net.HardwareAddr{0, 0, 0x5e, 0, 1, 51}

// addUpper gives the balancer a macvlan above eth0 that has addresses, as VRRP does; without a MAC it gets one of the
// kernel's.
func (b *bed) addUpper(t *testing.T, mode netlink.MacvlanMode, mac net.HardwareAddr, addresses ...netip.Addr) {
	t.Helper()
	parent, err := b.Balancer.Netlink().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "mv0", parent.Attrs().Index, mac
	err = b.Balancer.Netlink().LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: mode})
	if errors.Is(err, syscall.EOPNOTSUPP) {
		t.Skip("the kernel has no macvlan")
	}
	if err == nil {
		err = b.Balancer.SetUp("mv0", true)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if err := b.Balancer.AddAddress("mv0", netip.PrefixFrom(a, a.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
}

// upperFile lists interfaces with their modes, "eth0 tc".
func (b *bed) upperFile(list ...string) string {
	text := b.file(settings{announce: "none"})
	from, to := strings.Index(text, "interfaces:"), strings.Index(text, "services:")
	var lines strings.Builder
	for _, l := range list {
		name, attach, _ := strings.Cut(l, " ")
		fmt.Fprintf(&lines, "  - {name: %s, attach: %s}\n", name, attach)
	}
	return text[:from] + "interfaces:\n" + lines.String() + text[to:]
}

// TestMacvlanAtTC: with `attach: tc` for both, services whose VIPs are on a macvlan are balanced.
func TestMacvlanAtTC(t *testing.T) {
	for _, mode := range []netlink.MacvlanMode{netlink.MACVLAN_MODE_PRIVATE, netlink.MACVLAN_MODE_BRIDGE} {
		t.Run(fmt.Sprint("mode ", mode), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true})
			b.addUpper(t, mode, routerMAC, vips...)
			if err := b.Balancer.SetSysctl("net.ipv4.conf.all.arp_ignore", "1"); err != nil { // otherwise eth0 answers as well
				t.Fatal(err)
			}
			b.write(b.upperFile("eth0 tc", "mv0 tc"))
			if code, out := b.shunt("check", "--host", "--config", b.path); code != 0 || strings.Contains(out, "macvlan") {
				t.Errorf("shunt check --host: exit code %d\n%s", code, out)
			}
			b.start()
			b.goOn(t, "by a macvlan", b.open(t, 2))
			for _, vip := range vips {
				_ = b.tryUDP(at(vip, 53)) // to cause a look-up
				if got := b.resolved(t, vip); got != routerMAC.String() {
					t.Errorf("the client resolved %s to %s, want the macvlan's %s", vip, got, routerMAC)
				}
			}
		})
	}
}

// TestMacvlanIsNamed: if frames of services go past shunt, `check --host` refuses the file, and names a setup that
// works: with the VIP on a macvlan, with a virtual router's address alone, and with a macvlan listed in a mode in which
// it has no effect.
func TestMacvlanIsNamed(t *testing.T) {
	const works = "list both, eth0 and mv0, under interfaces with `attach: tc`"
	for _, c := range []struct {
		name      string
		mac       net.HardwareAddr
		addresses []netip.Addr
		list      []string
		refused   bool
		says      string
	}{
		{"a VIP", nil, vips, []string{"eth0 native"}, true, "are not balanced"},
		{"a VIP, and tc for the parent alone", nil, vips, []string{"eth0 tc"}, true, "packets to 192.0.2.10, which it has"},
		{"a virtual router", routerMAC, nil, []string{"eth0 auto"}, true, "without use_vmac"},
		{"the macvlan in generic mode", nil, nil, []string{"eth0 native", "mv0 generic"}, true, "only at tc"},
		{"another macvlan", nil, nil, []string{"eth0 native"}, false, "traffic to it is not balanced"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true})
			b.addUpper(t, netlink.MACVLAN_MODE_PRIVATE, c.mac, c.addresses...)
			b.write(b.upperFile(c.list...))
			code, out := b.shunt("check", "--host", "--config", b.path)
			if (code != 0) != c.refused || !strings.Contains(out, "mv0 is a macvlan above eth0") || !strings.Contains(out, c.says) || !strings.Contains(out, works) {
				t.Errorf("shunt check --host: exit code %d\n%s", code, out)
			}
		})
	}
}

// TestMacvlanThatFollowsItsParent: if the kernel keeps the macvlan's offloads the same as the parent's, generic mode is
// impossible, and `run` names a setup that works.
func TestMacvlanThatFollowsItsParent(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm})
	if err := b.Balancer.SetOffload("eth0", map[string]bool{"gro": true}); err != nil {
		t.Fatal(err)
	}
	b.addUpper(t, netlink.MACVLAN_MODE_PRIVATE, nil)
	b.write(b.upperFile("mv0 generic"))
	p := b.launch()
	select {
	case <-p.ended:
	case <-time.After(patience * time.Minute):
		_ = p.end(syscall.SIGKILL)
		t.Fatal("generic mode was accepted on a macvlan that follows its parent")
	}
	if said := p.log(); !strings.Contains(said, "list both, eth0 and mv0, under interfaces with `attach: tc`") {
		t.Errorf("the failure does not say what works:\n%s", said)
	}
}

// TestMacvlanThatComesLater: a macvlan that comes while shunt runs is a condition, which ends with it.
func TestMacvlanThatComesLater(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true})
	b.write(b.upperFile("eth0 native"))
	b.start()
	if c := b.status().condition("macvlan_takes_frames"); c != "" {
		t.Errorf("without a macvlan: %s", c)
	}
	b.addUpper(t, netlink.MACVLAN_MODE_PRIVATE, routerMAC, lab.VIP4)
	says := func(what string, want ...string) {
		t.Helper()
		eventually(t, 30*time.Second, what, func() error {
			c := b.status().condition("macvlan_takes_frames")
			for _, w := range want {
				if !strings.Contains(c, w) {
					return fmt.Errorf("the condition says %q", c)
				}
			}
			if len(want) == 0 && c != "" {
				return errors.New(c)
			}
			return nil
		})
	}
	says("a condition for the macvlan", "mv0", "192.0.2.10", "attach: tc")
	if err := b.Balancer.DeleteInterface("mv0"); err != nil {
		t.Fatal(err)
	}
	says("the end of the condition")
}
