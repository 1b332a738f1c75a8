package daemon_test

import (
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/vishvananda/netlink"
)

// newPair is two hosts with a pod each, on which `shunt run` runs with a file.
func newPair(t *testing.T, text string) (pair [2]*world) {
	t.Helper()
	beds, rules := bedtest.NewPair(t, 1)
	for i, b := range beds {
		pair[i] = &world{Daemon: nodetest.New(t, b.Node), Bed: b, rules: rules[i]}
		pair[i].Write(text)
		pair[i].run()
	}
	for i := range pair {
		pair[i].network(pair[1-i].Network(false), "taken", "")
		pair[i].network(pair[1-i].Network(true), "taken", "")
	}
	return pair
}

// network waits until a network has a state, with a reason that has some words.
func (w *world) network(of netip.Prefix, state, why string) {
	w.Helper()
	w.Is(of.String()+" is "+state, func(st *shuntv1.GetStatusResponse) bool {
		for _, n := range st.Acceleration.GetNetworks() {
			if n.Network == of.String() {
				return n.State == state && strings.Contains(n.Why, why) &&
					(n.Interface == "" || (nodetest.Condition(st, "network_left_alone", n.Network) == "") == (state == "taken"))
			}
		}
		return state == ""
	})
}

// connectPair is a connection from the pod of one host to that of the other.
func connectPair(t *testing.T, pair [2]*world, is6 bool) (client, server *net.TCPConn) {
	t.Helper()
	return bedtest.ConnectPods(t, pair[0].Pods[0], pair[1].Pods[0], pair[1].Address(0, is6))
}

// settlePair exchanges octets until they take the shortcut of both hosts, out and in.
func settlePair(t *testing.T, pair [2]*world, c, s net.Conn) {
	t.Helper()
	for _, w := range pair {
		first, err := w.Ask()
		w.Must(err)
		w.Is("the connection takes the shortcut out and in", func(st *shuntv1.GetStatusResponse) bool {
			w.Must(bedtest.Exchange(c, s, 10))
			return find(st, "veth1").Counts["taken"].GetPackets() > find(first, "veth1").Counts["taken"].GetPackets() &&
				uplink(st).GetCounts()["taken"].GetPackets() > uplink(first).GetCounts()["taken"].GetPackets()
		})
	}
}

func uplink(st *shuntv1.GetStatusResponse) *shuntv1.AcceleratedUplink {
	i := slices.IndexFunc(st.Acceleration.GetUplinks(), func(u *shuntv1.AcceleratedUplink) bool { return u.Interface == bed.Uplink })
	if i < 0 {
		return nil
	}
	return st.Acceleration.Uplinks[i]
}

// A user enables it on two hosts, and sees the packets that it took and the packets that it left.
func TestAcrossHosts(t *testing.T) {
	pair := newPair(t, "accelerate: {uplinks: eth0}")
	for _, is6 := range []bool{false, true} {
		c, s := connectPair(t, pair, is6)
		settlePair(t, pair, c, s)
		before := [2]int64{pair[0].forwarded(), pair[1].forwarded()}
		if err := bedtest.Exchange(c, s, 1_000_000); err != nil {
			t.Error(err)
		}
		for i, w := range pair {
			if now := w.forwarded(); now > before[i] {
				t.Errorf("IPv6 %v: the rules of host %d have seen %d packets", is6, i+1, now-before[i])
			}
		}
	}
	w := pair[0]
	for words, want := range map[string]string{
		"accelerate list":              "UPLINK NETWORKS STATE TAKEN IN",
		"accelerate show eth0":         "10.244.2.0/24 192.168.7.2 taken",
		"accelerate show eth0 -o json": `"handshake"`,
		"status":                       "UPLINK",
		"status -o json":               `"network": "10.244.2.0/24"`,
	} {
		out := w.command(words)
		if !strings.Contains(strings.Join(strings.Fields(out), " "), want) {
			t.Errorf("shunt %s says\n%s\nwithout %q", words, out, want)
		}
		t.Logf("shunt %s\n%s", words, out[:min(len(out), 1200)])
	}
	for _, want := range []string{`shunt_accelerate_networks{state="taken"} 2`, `shunt_accelerate_pod_packets_total{interface="eth0",reason="taken"} `} {
		if text := w.Scrape(); !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s:\n%s", want, text)
		}
	}
	st, err := w.Ask()
	w.Must(err)
	if p := st.Daemon.Products; len(p) != 1 || p[0].Does != "accelerating 1 of 1 pod, checked, and the ways to 2 of 2 networks" {
		t.Errorf("the products are %v", p)
	}

	c, s := connectPair(t, pair, false)
	settlePair(t, pair, c, s)
	w.Write("accelerate: {}")
	if text := w.Reload(); text != "~ accelerate uplinks: eth0 -> none" {
		t.Errorf("the difference is %q", text)
	}
	st = w.Is("the uplink is not used any more", func(st *shuntv1.GetStatusResponse) bool { return len(st.Acceleration.Uplinks) == 0 })
	if len(st.Acceleration.Networks) > 0 {
		t.Errorf("there are still networks: %v", st.Acceleration.Networks)
	}
	w.Must(bedtest.Exchange(c, s, 300_000))
	w.Write("accelerate: {uplinks: [eth0, eth7]}")
	w.Reload()
	w.Is("an uplink that is not there is told", func(st *shuntv1.GetStatusResponse) bool {
		return strings.Contains(nodetest.Condition(st, "network_left_alone", "eth7"), "uplink eth7 is not used: down: there is no such interface")
	})
	settlePair(t, pair, c, s)
}

// The daemons of both hosts are killed and come back while connections run: these go on.
func TestConnectionsOutliveTheDaemonsOfTwoHosts(t *testing.T) {
	for _, mode := range []string{"checked", "bypass"} {
		t.Run(mode, func(t *testing.T) {
			pair := newPair(t, "accelerate: {uplinks: eth0, mode: "+mode+"}")
			c4, s4 := connectPair(t, pair, false)
			c6, s6 := connectPair(t, pair, true)
			for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
				settlePair(t, pair, c4, s4)
				settlePair(t, pair, c6, s6)

				streamed := make(chan error, 1)
				go func() { streamed <- bedtest.Exchange(c6, s6, stream()) }() // it is under way when the daemons end
				for i, w := range pair {
					w.Must(w.Process.Process.Signal(signal))
					<-w.Process.Ended
					if err := bedtest.Exchange(c4, s4, 300_000); err != nil {
						t.Errorf("after %s of daemon %d the connection stops: %v", signal, i+1, err)
					}
				}
				if err := <-streamed; err != nil {
					t.Errorf("after %s the stream stops: %v", signal, err)
				}
				for _, w := range pair {
					w.leave(c4, s4)
				}
				pair[0].Must(bedtest.Exchange(c4, s4, 300_000))
				for i, w := range pair {
					w.run()
					w.network(pair[1-i].Network(false), "taken", "")
				}
			}
		})
	}
}

// The uplink may be the balancer's, whose program runs before tc. At tc it stands before the shortcut, which is named.
func TestUplinkOfTheBalancer(t *testing.T) {
	pair := newPair(t, "accelerate: {uplinks: eth0}")
	w, other := pair[0], pair[1]
	file := func(attach string) string {
		return `interfaces: [{name: eth0, attach: ` + attach + `}]
services: [{name: web, address: 192.0.2.10, port: 80, backends: [{address: 192.168.7.2}]}]
udp: [{name: feed, interface: eth0, address: 192.0.2.11, port: 5000, allow: {user: root}}]
udp_socket: ` + filepath.Join(w.Folder, "udp.sock") + `
accelerate: {uplinks: eth0}`
	}
	restart := func(text string) {
		w.Must(w.Process.End(syscall.SIGINT, nodetest.Patience))
		w.Write(text)
		w.run()
	}
	restart(file("native"))
	w.network(other.Network(false), "taken", "")
	for _, is6 := range []bool{false, true} {
		c, s := connectPair(t, pair, is6)
		settlePair(t, pair, c, s)
		w.Must(bedtest.Exchange(c, s, 1_000_000))
	}
	if st, err := w.Ask(); err != nil || len(st.Daemon.Products) != 3 || len(st.Services) != 1 || len(st.Udp) != 1 {
		t.Errorf("%v, %v", st, err)
	}
	restart(strings.ReplaceAll(file("tc"), "udp", "x-udp"))
	w.network(other.Network(false), "tc", "program") // of tcx or, before Linux 6.6, of a filter
	c, s := connectPair(t, pair, false)
	w.Must(bedtest.Exchange(c, s, 1_000_000))
}

// A network that is not reached by one plain next hop is in the status with the reason, and its packets go through the
// host's stack.
func TestWaysAreLeftAlone(t *testing.T) {
	pair := newPair(t, "accelerate: {uplinks: eth0}")
	w, far := pair[0], pair[1].Network(false)
	route := func(change func(*netlink.Route)) *netlink.Route {
		r := &netlink.Route{Dst: &net.IPNet{IP: far.Addr().AsSlice(), Mask: net.CIDRMask(far.Bits(), 32)}, LinkIndex: w.link("eth0").Attrs().Index, Gw: net.IPv4(192, 168, 7, 2)}
		change(r)
		return r
	}
	pair[1].Must(pair[1].Node.AddAddress("eth0", netip.MustParsePrefix("192.168.7.3/24")))
	plain := func() { w.onNode(func() error { return netlink.RouteReplace(route(func(*netlink.Route) {})) }) }
	for _, test := range []struct {
		name       string
		do, undo   func() error
		state, why string
	}{
		{"several next hops", func() error {
			return netlink.RouteReplace(route(func(r *netlink.Route) {
				r.MultiPath = []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw}, {LinkIndex: r.LinkIndex, Gw: net.IPv4(192, 168, 7, 3)}}
				r.LinkIndex, r.Gw = 0, nil
			}))
		}, nil, "route", "several routes or next hops"},
		{"a policy rule", func() error {
			r := netlink.NewRule()
			r.Priority, r.Table, r.Family, r.Mark = 100, 77, netlink.FAMILY_V4, 7
			return netlink.RuleAdd(r)
		}, func() error {
			r := netlink.NewRule()
			r.Priority, r.Table, r.Family, r.Mark = 100, 77, netlink.FAMILY_V4, 7
			return netlink.RuleDel(r)
		}, "route", "the policy rule of priority 100"},
		{"a bridge's port", func() error {
			if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br7"}}); err != nil {
				return err
			}
			return netlink.LinkSetMaster(w.link("eth0"), w.link("br7"))
		}, func() error { return netlink.LinkDel(w.link("br7")) }, "bridged", "eth0 is a port"},
		{"no route", func() error { return netlink.RouteDel(route(func(*netlink.Route) {})) }, nil, "", ""},
	} {
		w.onNode(test.do)
		w.network(far, test.state, test.why)
		if test.state == "route" {
			c, s := connectPair(t, pair, false)
			before, err := w.Ask()
			w.Must(err)
			if err := bedtest.Exchange(c, s, 10_000); err != nil {
				t.Errorf("%s: %v", test.name, err)
			}
			if after, err := w.Ask(); err != nil || count(after, "taken") != count(before, "taken") || count(after, test.state) == count(before, test.state) {
				t.Errorf("%s: before %v, after %v, %v", test.name, before.Acceleration.Counts, after.GetAcceleration().GetCounts(), err)
			}
		}
		if test.undo != nil {
			w.onNode(test.undo)
		} else {
			plain()
		}
		w.network(far, "taken", "")
	}

	// One of the pods beyond has a way of its own, so it is left alone, and the others are not.
	one := netip.PrefixFrom(pair[1].Address(0, false), 32)
	w.Must(w.Node.AddRoute(lab.Route{To: one, Via: netip.MustParseAddr("10.244.1.1"), Interface: "veth1"}))
	w.network(one, "route", "another route leads there by veth1")
	w.network(far, "taken", "")
	if out := w.command("accelerate show eth0"); !strings.Contains(out, "10.244.2.1/32") {
		t.Errorf("shunt accelerate show eth0 says\n%s", out)
	}
}
