package net

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// withInterface is a configuration with one more interface.
func withInterface(config, name, attach string) string {
	return strings.Replace(config, "services:", "  - {name: "+name+", attach: "+attach+"}\nservices:", 1)
}

// addVeth gives the balancer an interface, and its other end, name-peer.
func (b *bed) addVeth(name string) {
	b.t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	veth := netlink.NewVeth(attrs)
	veth.PeerName = name + "-peer"
	if err := b.Balancer.Netlink().LinkAdd(veth); err != nil {
		b.t.Fatal(err)
	}
}

// addMacvlan gives the balancer an interface above eth0 whose driver has no native XDP.
func (b *bed) addMacvlan(name string) {
	b.t.Helper()
	parent, err := b.Balancer.Netlink().LinkByName("eth0")
	if err != nil {
		b.t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = name, parent.Attrs().Index
	upper := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}
	if err := b.Balancer.Netlink().LinkAdd(upper); errors.Is(err, syscall.EOPNOTSUPP) {
		b.t.Skip("the kernel has no macvlan")
	} else if err != nil {
		b.t.Fatal(err)
	}
}

// TestInterfaceMadeAnewOfAnotherKind: an interface that exists but cannot be attached to is
// another condition than a missing one. Both end by themselves.
func TestInterfaceMadeAnewOfAnotherKind(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.addVeth("eth2")
	b.write(withInterface(b.file(settings{}), "eth2", "native"))
	b.start()
	remove := func() {
		t.Helper()
		link, err := b.Balancer.Netlink().LinkByName("eth2")
		if err == nil {
			err = b.Balancer.Netlink().LinkDel(link)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	has := func(failed, missing string) {
		t.Helper()
		eventually(t, 30*time.Second, fmt.Sprintf("attach_failed with %q and interface_missing with %q", failed, missing), func() error {
			s := b.status()
			a, m := s.condition("attach_failed"), s.condition("interface_missing")
			if !strings.Contains(a, failed) || !strings.Contains(m, missing) || (a == "") != (failed == "") || (m == "") != (missing == "") {
				return fmt.Errorf("attach_failed says %q, interface_missing says %q", a, m)
			}
			return nil
		})
	}
	has("", "")
	remove()
	has("", "eth2")
	b.addMacvlan("eth2")
	has("native", "")
	b.goOn(t, "beside an interface that cannot be attached to", nil)
	remove()
	has("", "eth2")
	b.addVeth("eth2")
	has("", "")
	b.goOn(t, "with the interface as it was", nil)
}

// TestOtherEndThatAggregates: if shunt cannot reach the other end of a veth, to switch off the
// offloads there that generic mode does not allow, it tells the operator the command.
func TestOtherEndThatAggregates(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	away := nstest.New(t) // without a name, and no process in it
	b.addVeth("eth2")
	peer, err := b.Balancer.Netlink().LinkByName("eth2-peer")
	if err == nil {
		err = b.Balancer.Netlink().LinkSetNsFd(peer, int(away.Handle))
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Balancer.SetOffload("eth2", map[string]bool{"gro": true}); err != nil {
		t.Fatal(err)
	}
	b.write(withInterface(b.file(settings{}), "eth2", "generic"))
	b.start()
	said := map[string]string{"peer_aggregates": "ethtool", "aggregation_switched_off": "eth2: switched off until shunt detaches"}
	for code, text := range said {
		if c := b.status().condition(code); !strings.Contains(c, "eth2") || !strings.Contains(c, text) {
			t.Errorf("the condition %s says %q", code, c)
		}
	}
	b.reload(b.file(settings{}))
	for code := range said {
		if c := b.status().condition(code); c != "" {
			t.Errorf("after detaching, %s says %q", code, c)
		}
	}
}
