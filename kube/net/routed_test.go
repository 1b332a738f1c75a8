package net

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// newRouted is newNode with pods that have an interface each at the node, as CNI's plugin ptp and Calico have them. The file has a
// pattern for these.
//
//	client ─── switch ─── n1 ─── veth1 ─── p1
//	                         ─── veth2 ─── p2
func newRouted(t *testing.T, names ...string) *bed {
	t.Helper()
	b := build(t, lab.Options{ID: unique("kr"), Layout: lab.OneArm, Backends: 1, Forwarding: true}, func(b *bed) []*lab.Host {
		return b.routed(names...)
	})
	b.settings = `interfaces: [{name: eth0, attach: native}, {name: "veth*", attach: tc}]`
	return b
}

// The address of all ends of pods' veths at the node: that of the plugin ptp is the first of the node's pods.
var (
	gateway4 = netip.MustParsePrefix("10.244.7.1/32")
	gateway6 = netip.MustParsePrefix("2001:db8:7::1/128")
)

// routed makes pods p1, p2, … with the node's interfaces veth1, veth2, ….
func (b *bed) routed(names ...string) (pods []*lab.Host) {
	b.t.Helper()
	for _, name := range names {
		var number byte
		_, err := fmt.Sscanf(name, "p%d", &number)
		b.must(err)
		pod, err := b.AddHost(name)
		b.must(err)
		veth := fmt.Sprintf("veth%d", number)
		four, six := gateway4.Addr().As4(), gateway6.Addr().As16()
		four[3], six[15] = 1+number, 1+number
		address4, address6 := netip.PrefixFrom(netip.AddrFrom4(four), 32), netip.PrefixFrom(netip.AddrFrom16(six), 128)
		b.must(b.Connect(lab.End{Host: b.Balancer, Interface: veth, IPv4: gateway4, IPv6: gateway6},
			lab.End{Host: pod, Interface: "eth0", IPv4: address4, IPv6: address6}, lab.Cable{}))
		for _, way := range []struct{ pod, gateway, all netip.Prefix }{
			{address4, gateway4, netip.MustParsePrefix("0.0.0.0/0")}, {address6, gateway6, netip.MustParsePrefix("::/0")},
		} {
			b.must(b.Balancer.AddRoute(lab.Route{To: way.pod, Interface: veth}))
			b.must(pod.AddRoute(lab.Route{To: way.gateway, Interface: "eth0"}))
			b.must(pod.AddRoute(lab.Route{To: way.all, Via: way.gateway.Addr(), Interface: "eth0"}))
		}
		pods = append(pods, pod)
	}
	b.must(b.Ready(within(b.t)))
	return pods
}

// TestRoutedPods: pods with an interface each at the node reach Services by their packets, as pods at a bridge do, and
// clients outside reach them. So does a pod that comes later, and one that goes leaves nothing at the node.
func TestRoutedPods(t *testing.T) {
	t.Parallel()
	b := newRouted(t, "p1", "p2")
	web := b.servePackets(t, gateway4.Addr())
	for _, c := range []struct {
		network string
		port    int
	}{{"tcp", 0}, {"udp", 1}} {
		b.served(t, c.network, at(b.Balancer.Interfaces()[0].IPv4.Addr().String(), web.Spec.Ports[c.port].NodePort), "p1", "p2")
	}

	later := b.routed("p3")[0]
	for _, c := range []struct{ network, address string }{{"tcp", at(web.Spec.ClusterIP, 80)}, {"udp", at(web.Spec.ClusterIP, 53)}} {
		b.answered(t, "a packet of a pod that came later, by "+c.network, func() (string, error) {
			answer, err := askFrom(later, c.network, c.address)
			return answer.Backend, err
		}, "p1", "p2")
	}
	_, err := later.ServeHTTP(":8080", "p3")
	b.must(err)
	_, err = later.ServeUDP(":5353", "p3")
	b.must(err)
	b.pod(later, "n1", "web")
	address := at(b.Balancer.Interfaces()[0].IPv4.Addr().String(), web.Spec.Ports[0].NodePort)
	b.served(t, "tcp", address, "p1", "p2", "p3")
	b.ready("p3", false)
	b.served(t, "tcp", address, "p1", "p2")
	if out, err := b.Balancer.Command(within(t), "ip", "link", "delete", "veth3").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b.awaits(b.agent, "msg=detached interface=veth3")
	b.served(t, "tcp", address, "p1", "p2")
}
