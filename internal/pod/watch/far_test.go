package watch_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// newPair is two nodes that know each other's pods.
func newPair(t *testing.T, mode shortcut.Mode, more ...plain.Service) (pair [2]*world) {
	beds, all := bedtest.NewPair(t, 2, more...)
	for i, b := range beds {
		w := &world{T: t, Bed: b, rules: all[i]}
		var err error
		w.watch, err = watch.Open(watch.Options{
			Mode: mode, Find: watch.Fixed(b.Watched()...), In: b.Node.Run,
			FindFar: watch.Beyond(bed.Uplink),
		})
		w.must(err)
		t.Cleanup(func() { w.must(w.watch.Close()) })
		pair[i] = w
	}
	return pair
}

// across is a connection from a pod of one node to a pod of the other, whose packets take the shortcut of both.
func across(t *testing.T, pair [2]*world, is6 bool) (client, server *net.TCPConn) {
	t.Helper()
	client, server = bedtest.ConnectPods(t, pair[0].Pods[0], pair[1].Pods[0], pair[1].Address(0, is6))
	for i, w := range pair {
		for _, iface := range []string{w.Interface(0), "eth0"} {
			before := w.status().From[iface]["taken"].Packets
			w.T = t
			w.until("packets that come in by "+iface+" take the shortcut of node "+string(rune('1'+i)), func() bool {
				w.exchange(client, server, 4)
				return w.status().From[iface]["taken"].Packets > before
			})
		}
	}
	return client, server
}

// Both directions take the shortcut of both nodes, in both modes, and both ends of the connection can close.
func TestAcrossNodes(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			pair := newPair(t, mode)
			families(t, func(t *testing.T, is6 bool) {
				before := [2]int64{pair[0].forwarded(), pair[1].forwarded()}
				client, server := across(t, pair, is6)
				if mode == shortcut.Checked {
					before = [2]int64{pair[0].forwarded(), pair[1].forwarded()} // it has begun
				}
				pair[0].exchange(client, server, 1_000_000)
				pair[0].must(client.CloseWrite())
				_ = server.SetReadDeadline(time.Now().Add(patience))
				if n, err := server.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
					t.Fatalf("the end of the stream: %d octets, %v", n, err)
				}
				pair[0].must(server.CloseWrite())
				_ = client.SetReadDeadline(time.Now().Add(patience))
				if n, err := client.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
					t.Fatalf("the end of the answer: %d octets, %v", n, err)
				}
				for i, w := range pair {
					if now := w.forwarded(); now > before[i] {
						t.Errorf("node %d: the rules have seen %d packets; counts %v", i+1, now-before[i], w.status().Counts)
					}
				}
			})
		})
	}
}

// forwarded is the number of packets that the rules have seen, but for packets that they saw because nobody had judged
// for a second: an emulated machine is that slow.
func (w *world) forwarded() int64 {
	w.Helper()
	unwatched := w.count("unwatched")
	return int64(w.seen() - unwatched)
}

// A rule that one node gets while a connection runs stops it, and the connection goes on without the rule.
func TestRulesTakeEffectAcrossNodes(t *testing.T) {
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		t.Run(string(mode), func(t *testing.T) {
			pair := newPair(t, mode)
			families(t, func(t *testing.T, is6 bool) {
				client, server := across(t, pair, is6)
				remove := pair[1].insert(plain.Drop())
				begin := time.Now()
				pair[1].until("the rule stops the connection", func() bool { return bedtest.Carry(client, server, 1, 100*time.Millisecond) != nil })
				t.Logf("the rule took effect within %s", time.Since(begin)-100*time.Millisecond)
				remove()
				_ = server.SetDeadline(time.Now().Add(patience))
				if _, err := server.Read(make([]byte, 1)); err != nil {
					t.Errorf("the octet that was held up: %v", err)
				}
				pair[0].exchange(client, server, 100_000)
			})
		})
	}
}

// The interface towards the other machine has a smaller MTU than the pods: longer packets go through the stack,
// which tells their sender.
func TestOversizeAcrossNodes(t *testing.T) {
	pair := newPair(t, shortcut.Bypass)
	for _, w := range pair {
		w.must(w.Node.SetMTU("eth0", 1400))
	}
	families(t, func(t *testing.T, is6 bool) {
		client, server := across(t, pair, is6)
		left := pair[0].count("oversize")
		pair[0].exchange(client, server, 1_000_000)
		if now := pair[0].count("oversize"); now == left {
			t.Errorf("no packet was too long; counts %v", pair[0].status().Counts)
		}
	})
}

// Nobody watches one of the nodes any more: the connection goes on.
func TestANodeEndsItsShortcut(t *testing.T) {
	pair := newPair(t, shortcut.Checked)
	families(t, func(t *testing.T, is6 bool) {
		client, server := across(t, pair, is6)
		for _, w := range pair {
			w.must(w.watch.Suspend())
			pair[0].exchange(client, server, 100_000)
		}
		for _, w := range pair {
			w.must(w.watch.Resume())
		}
		pair[0].exchange(client, server, 100_000)
	})
}

// far is a node's knowledge of the network of the other; the zero value: none.
func (w *world) far(network netip.Prefix) watch.FarStatus {
	w.Helper()
	for _, f := range w.status().Far {
		if f.Network == network {
			return f
		}
	}
	return watch.FarStatus{}
}

// uplink does something with the interface towards the other node.
func (w *world) uplink(do func(netlink.Link) error) {
	w.Helper()
	w.must(w.Node.Run(func() error {
		l, err := netlink.LinkByName(bed.Uplink)
		if err != nil {
			return err
		}
		return do(l)
	}))
}

// A bridge, a foreign program or filter, or a lost carrier at the uplink keeps its networks off the shortcut. A connection
// goes on through the stack meanwhile, and takes the shortcut again afterwards.
func TestUplinksAreLookedAt(t *testing.T) {
	pair := newPair(t, shortcut.Checked)
	w, network := pair[0], pair[1].Network(false)
	client, server := across(t, pair, false)
	var foreign link.Link
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	for _, c := range []struct {
		state, names string
		begin, end   func(netlink.Link) error
		passes       bool // the host's stack still sends by the uplink
	}{
		{"bridged", "port of interface", func(l netlink.Link) error {
			if err := netlink.LinkAdd(bridge); err != nil {
				return err
			}
			return netlink.LinkSetMaster(l, bridge)
		}, func(netlink.Link) error { return netlink.LinkDel(bridge) }, false},
		{"tc", "program", func(l netlink.Link) error {
			p, err := passes()
			if err != nil {
				return err
			}
			defer p.Close()
			foreign, err = link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: p, Attach: ebpf.AttachTCXIngress})
			return err
		}, func(netlink.Link) error { return foreign.Close() }, true},
		{"tc", "filter of kind bpf", func(l netlink.Link) error {
			if err := netlink.QdiscAdd(clsact(l)); err != nil && !errors.Is(err, unix.EEXIST) { // without tcx the shortcut's own filter has it
				return err
			}
			p, err := passes()
			if err != nil {
				return err
			}
			defer p.Close()
			return netlink.FilterAdd(foreignFilter(l, p.FD()))
		}, func(l netlink.Link) error { return netlink.FilterDel(foreignFilter(l, -1)) }, true},
		{"down", "no carrier", func(netlink.Link) error { return pair[1].Node.SetUp(bed.Uplink, false) },
			func(netlink.Link) error { return pair[1].Node.SetUp(bed.Uplink, true) }, false},
	} {
		if c.names == "program" && !hasTCX(t) {
			continue
		}
		w.until("the network takes the shortcut", func() bool { return w.far(network).State == "taken" })
		w.uplink(c.begin)
		w.until("the network is left alone: "+c.state, func() bool { f := w.far(network); return f.State == c.state && strings.Contains(f.Why, c.names) })
		if c.passes {
			taken, left := w.count("taken"), w.count(c.state)
			w.exchange(client, server, 100_000)
			if now := w.count("taken"); now != taken || w.count(c.state) == left {
				t.Errorf("%s: %d packets took the shortcut; counts %v", c.state, now-taken, w.status().Counts)
			}
		}
		w.uplink(c.end)
	}
	w.until("the network takes the shortcut", func() bool { return w.far(network).State == "taken" })
}

// A route that is changed or withdrawn, and a next hop with a new address of its Ethernet, while connections run.
func TestRoutesChange(t *testing.T) {
	pair := newPair(t, shortcut.Checked)
	w, other := pair[0], pair[1]
	// It tells its neighbours at once. Otherwise they find out by themselves, in up to a minute.
	w.must(other.Node.SetSysctl("net.ipv4.conf.eth0.arp_notify", "1"))
	w.must(other.Node.SetSysctl("net.ipv6.conf.eth0.ndisc_notify", "1"))
	families(t, func(t *testing.T, is6 bool) {
		client, server := across(t, pair, is6)
		network := other.Network(is6)
		second := netip.MustParsePrefix("192.168.7.9/24")
		if is6 {
			second = netip.MustParsePrefix("2001:db8:7::9/64")
		}
		w.must(other.Node.AddAddress(bed.Uplink, second))
		route := func(l netlink.Link) *netlink.Route {
			return &netlink.Route{LinkIndex: l.Attrs().Index, Gw: second.Addr().AsSlice(),
				Dst: &net.IPNet{IP: network.Addr().AsSlice(), Mask: net.CIDRMask(network.Bits(), network.Addr().BitLen())}}
		}
		w.uplink(func(l netlink.Link) error { return netlink.RouteReplace(route(l)) })
		w.until("the other next hop is used", func() bool { return w.far(network).NextHop == second.Addr() })
		goesOn := func(what string) {
			for i, one := range pair {
				taken := one.count("taken")
				one.T = t
				one.until(what+": the shortcut is taken again", func() bool {
					one.exchange(client, server, 1000)
					return one.count("taken") > taken
				})
				t.Logf("%s: node %d goes on", what, i+1)
			}
			w.exchange(client, server, 300_000)
		}
		goesOn("another next hop")

		octet := byte(4)
		if is6 {
			octet = 6
		}
		w.must(other.Node.SetMAC(bed.Uplink, net.HardwareAddr{2, 0, 0, 7, 0, octet}))
		goesOn("another Ethernet address")

		w.uplink(func(l netlink.Link) error { return netlink.RouteDel(route(l)) })
		begin := time.Now()
		w.until("the network is forgotten", func() bool { return !w.far(network).Network.IsValid() })
		t.Logf("a route that was withdrawn was followed for %s at most", time.Since(begin).Round(time.Millisecond))
		taken := w.status().From[w.Interface(0)]["taken"].Packets
		if bedtest.Carry(client, server, 1, 300*time.Millisecond) == nil {
			t.Error("an octet has arrived though no route leads there")
		}
		if now := w.status().From[w.Interface(0)]["taken"].Packets; now != taken {
			t.Errorf("%d packets have taken the shortcut though no route leads there", now-taken)
		}
		w.uplink(func(l netlink.Link) error { return netlink.RouteAdd(route(l)) })
		_ = server.SetDeadline(time.Now().Add(patience))
		if _, err := server.Read(make([]byte, 1)); err != nil {
			t.Errorf("the octet that was held up: %v", err)
		}
		goesOn("the route is back")
	})
}
