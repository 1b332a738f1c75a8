package packet_test

import (
	"errors"
	"net"
	"os"
	"testing"

	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/vishvananda/netlink"
)

// TestSilentDaemon: without a heartbeat the kernel's routes and neighbours lead to a backend,
// so that one whose MAC changes is still reached. With a heartbeat again, they are not used.
func TestSilentDaemon(t *testing.T) {
	t.Parallel()
	w := newWorld(t, withoutHeartbeat)
	moved, elsewhere := mac("02:00:00:00:00:bf"), "shunt-x"
	var err error
	w.cpu.do(func() {
		err = errors.Join(forwardingOnLoopback(), neighbour(armC, backend4.AsSlice(), moved), neighbour(armC, backend6.AsSlice(), moved),
			netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: elsewhere}, PeerName: elsewhere + "-peer"}), route(elsewhere, unresolved.AsSlice()),
			neighbour(elsewhere, unresolved.AsSlice(), moved))
	})
	must(t, err)
	for _, k := range kinds {
		in := k.fromClient(40000, portNAT, "S")
		expected := ways[0].expected(w, k, in)
		before := w.reasons()
		got := w.send(armA, in)
		if diff := packet.Diff(expected(got).With(packet.MACs(ownC, moved)), got); diff != "" {
			t.Errorf("%s: it left wrong:\n%s", k, diff)
		}
		if n := w.moved(before)["fib_fallback"]; n != 1 {
			t.Errorf("%s: the kernel was asked %d times, want 1", k, n)
		}
	}
	// A way out of an interface that is not ours.
	r := w.cpu.run(armA, packet.Must(kind{}.fromClient(40000, portUnresolved, "S")))
	must(t, r.err)
	if n := w.reasons()["egress_unlisted"]; n != 1 {
		t.Errorf("verdict %d, counted %v, want one egress_unlisted", r.verdict, w.reasons())
	}
	must(t, w.d.Heartbeat())
	before := w.reasons()
	for _, k := range kinds {
		in := k.fromClient(40000, portNAT, "S")
		got := w.send(armA, in)
		if diff := packet.Diff(ways[0].expected(w, k, in)(got), got); diff != "" {
			t.Errorf("%s, heard again: it left wrong:\n%s", k, diff)
		}
	}
	if n := w.moved(before)["fib_fallback"]; n != 0 {
		t.Errorf("the kernel was asked %d times while the daemon is there", n)
	}
}

// forwardingOnLoopback makes the kernel answer the programs' look-ups of routes.
func forwardingOnLoopback() error {
	return errors.Join(os.WriteFile("/proc/sys/net/ipv4/conf/lo/forwarding", []byte("1"), 0),
		os.WriteFile("/proc/sys/net/ipv6/conf/lo/forwarding", []byte("1"), 0))
}

func neighbour(iface string, address net.IP, mac net.HardwareAddr) error {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return err
	}
	return netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: address, HardwareAddr: mac})
}

func route(iface string, address net.IP) error {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetUp(link),
		netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: address, Mask: net.CIDRMask(32, 32)}}))
}
