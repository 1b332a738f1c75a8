package cluster

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shunt-lb/shunt/internal/lab"
)

// lay makes hosts, cables, addresses and routes.
func (c *Cluster) lay(ctx context.Context) (err error) {
	for name, host := range map[string]**lab.Host{"outside": &c.Outside, "router": &c.Router, "switch": &c.network, "plane": &c.Plane} {
		if *host, err = c.AddHost(name); err != nil {
			return err
		}
	}
	for i := range NodeCount {
		host, err := c.AddHost(fmt.Sprintf("n%d", i+1))
		if err != nil {
			return err
		}
		c.Nodes = append(c.Nodes, &Node{Host: host,
			Pods4: netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", i+1)), Pods6: netip.MustParsePrefix(fmt.Sprintf("fd00:244:0:%d::/64", i+1))})
	}
	if err := c.cable(); err != nil {
		return err
	}
	if err := c.route(); err != nil {
		return err
	}
	return c.Ready(ctx)
}

// at returns an end in the network of the nodes.
func at(host *lab.Host, number int) lab.End {
	return lab.End{Host: host, Interface: "eth0",
		IPv4: netip.MustParsePrefix(fmt.Sprintf("10.90.0.%d/24", number)), IPv6: netip.MustParsePrefix(fmt.Sprintf("fd00:90::%d/64", number))}
}

func (c *Cluster) cable() error {
	if err := c.network.AddBridge("br0"); err != nil {
		return err
	}
	ends := []lab.End{at(c.Router, 254), at(c.Plane, 1)}
	for i, n := range c.Nodes {
		ends = append(ends, at(n.Host, 11+i))
	}
	for _, e := range ends {
		if err := c.ConnectPort(e, c.network, "br0", lab.Cable{}); err != nil {
			return err
		}
		// A veth accepts frames from XDP only if its receiver runs NAPI.
		if err := c.network.SetOffload(e.Host.Name(), map[string]bool{"gro": true}); err != nil {
			return err
		}
	}
	return c.Connect(
		lab.End{Host: c.Outside, Interface: "eth0", IPv4: netip.MustParsePrefix("198.51.100.7/24"), IPv6: netip.MustParsePrefix("2001:db8:c::7/64")},
		lab.End{Host: c.Router, Interface: "eth1", IPv4: netip.MustParsePrefix("198.51.100.1/24"), IPv6: netip.MustParsePrefix("2001:db8:c::1/64")}, lab.Cable{})
}

var defaults = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

// route adds routes so that all hosts reach each other, pods included, as in a cluster's network, and the router sends
// packets for load balancers to the first node.
func (c *Cluster) route() error {
	outward := c.Router.Interfaces()[1]
	hops := map[*lab.Host][]netip.Addr{c.Outside: {outward.IPv4.Addr(), outward.IPv6.Addr()}}
	inward := []*lab.Host{c.Router, c.Plane}
	for _, n := range c.Nodes {
		inward = append(inward, n.Host)
	}
	for _, host := range inward {
		if host != c.Router {
			hops[host] = []netip.Addr{c.Router.Addr4(), c.Router.Addr6()}
		}
		for _, n := range c.Nodes {
			if n.Host == host {
				continue
			}
			for _, r := range []lab.Route{{To: n.Pods4, Via: n.Addr4()}, {To: n.Pods6, Via: n.Addr6()}} {
				if err := host.AddRoute(r); err != nil {
					return err
				}
			}
		}
	}
	for host, via := range hops {
		for i, all := range defaults {
			if err := host.AddRoute(lab.Route{To: all, Via: via[i]}); err != nil {
				return err
			}
		}
	}
	first := []netip.Addr{c.Nodes[0].Addr4(), c.Nodes[0].Addr6()}
	for i, prefix := range Balancers {
		if err := c.Router.AddRoute(lab.Route{To: prefix, Via: first[i]}); err != nil {
			return err
		}
	}
	for _, n := range c.Nodes {
		if err := n.SetForwarding(true); err != nil {
			return err
		}
	}
	return c.Router.SetForwarding(true)
}

// awaitNodes waits until all nodes are ready.
func (c *Cluster) awaitNodes(ctx context.Context) error {
	return Eventually(ctx, func() error {
		for _, n := range c.Nodes {
			if err := n.part.hasEnded(); err != nil {
				return fmt.Errorf("node %s: %w", n.Name(), err)
			}
			object, err := c.Client.CoreV1().Nodes().Get(ctx, n.Name(), metav1.GetOptions{})
			if err != nil {
				return fmt.Errorf("node %s: %w", n.Name(), err)
			}
			if !isReady(object) {
				return fmt.Errorf("node %s is not ready: %+v", n.Name(), object.Status.Conditions)
			}
		}
		return nil
	})
}

func isReady(node *corev1.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}
