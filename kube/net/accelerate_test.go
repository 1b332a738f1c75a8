package net

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// podsOnNode makes pods with a route of the node to each, as Calico and CNI's plugin ptp do.
func (b *bed) podsOnNode(count int) (pods []*lab.Host) {
	b.t.Helper()
	gateway := netip.MustParsePrefix("169.254.1.1/32")
	for i := range count {
		pod, err := b.AddHost(fmt.Sprintf("p%d", i+1))
		b.must(err)
		address, veth := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, 9, byte(i + 1)}), 32), fmt.Sprintf("cali%d", i+1)
		b.must(b.Connect(lab.End{Host: b.Balancer, Interface: veth, IPv4: gateway}, lab.End{Host: pod, Interface: "eth0", IPv4: address}, lab.Cable{}))
		b.must(b.Balancer.AddRoute(lab.Route{To: address, Interface: veth}))
		b.must(pod.AddRoute(lab.Route{To: gateway, Interface: "eth0"}))
		b.must(pod.AddRoute(lab.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: gateway.Addr(), Interface: "eth0"}))
		pods = append(pods, pod)
	}
	b.must(b.Ready(within(b.t)))
	return pods
}

// taken is the number of packets of the pod behind an interface that took the shortcut, and the state of its address.
func (b *bed) taken(iface string) (packets string, state string, err error) {
	code, out := b.run("shunt", "accelerate", "show", iface, "--socket", b.socket(), "-o", "json")
	var pod struct {
		Addresses []struct{ State string }
		Counts    map[string]struct{ Packets json.Number }
	}
	if err := json.Unmarshal([]byte(out), &pod); code != 0 || err != nil || len(pod.Addresses) != 1 {
		return "", "", fmt.Errorf("shunt accelerate show %s: exit code %d, %w\n%s", iface, code, err, out)
	}
	return pod.Counts["taken"].Packets.String(), pod.Addresses[0].State, nil
}

// TestAccelerate: with accelerate in its file, the agent has the node's pods take the shortcut beside the Services that it balances, and
// connections outlive it.
func TestAccelerate(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.must(b.Balancer.SetForwarding(true))
	pods := b.podsOnNode(2)
	front := b.Balancer.Interfaces()[0]
	b.node("n1", front.IPv4.Addr(), front.IPv6.Addr())
	b.pod(b.Backends[0], "n1", "web")
	web := b.service("web", "selector: {app: web}, ports: [{port: 80, targetPort: 8080}]")
	b.nft(t, "table ip accepted { chain forward { type filter hook forward priority 0; ct state established accept; }; }") // conntrack is in use
	_, err := pods[1].ServeHTTP(":8080", "p2")
	b.must(err)
	b.settings += "\naccelerate: {interfaces: \"cali*\"}"
	b.start()
	b.served(t, "tcp", at(web.Spec.ClusterIP, 80), "b1")
	for _, iface := range []string{"cali1", "cali2"} {
		eventually(t, iface+" may take the shortcut", func() error {
			_, state, err := b.taken(iface)
			if err == nil && state != "taken" {
				err = errors.New(state)
			}
			return err
		})
	}
	s, err := pods[0].OpenSession(within(t), "tcp", netip.AddrPort{}, pods[1].Addr4().String()+":8080")
	b.must(err)
	defer s.Close() //nolint:errcheck // of the test
	eventually(t, "packets take the shortcut", func() error {
		b.goesOn(t, "with the agent", s, "p2")
		packets, _, err := b.taken("cali1")
		if err == nil && packets == "" {
			err = errors.New("none has")
		}
		return err
	})
	b.must(b.agent.End(syscall.SIGTERM, patience))
	b.goesOn(t, "without an agent", s, "p2")
	b.start()
	b.goesOn(t, "with the next agent", s, "p2")
}
