package net

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestPodsWithoutSockets: a pod whose sockets are not the host's, as with gVisor, Kata and virtual machines, reaches
// Services by its packets, at tc on the bridge: Services of other pods, itself by a Service, and a node port.
func TestPodsWithoutSockets(t *testing.T) {
	t.Parallel()
	newNode(t, "p1", "p2").servePackets(t, bridged4.Addr())
}

// askFrom asks a Service from a pod whose sockets are not served.
func askFrom(pod *lab.Host, network, address string) (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience/10)
	defer cancel()
	if network == "udp" {
		return pod.AskUDP(ctx, address, []byte("who?"))
	}
	return lab.Get(ctx, pod.HTTPClient(false), address)
}

// servePackets starts the agent, and has the second of two pods reach Services by its packets. Endpoints see it as gateway. It returns the Service
// of both pods, with ports of TCP and UDP.
func (b *bed) servePackets(t *testing.T, gateway netip.Addr) *corev1.Service {
	t.Helper()
	front := b.Balancer.Interfaces()[0].IPv4.Addr()
	b.node("n1", front)
	for _, pod := range b.Backends {
		b.pod(pod, "n1", "web")
	}
	const ports = "ports: [{name: http, port: 80, targetPort: 8080}, {name: dns, port: 53, targetPort: 5353, protocol: UDP}]"
	all := b.service("all", "selector: {app: web}, type: NodePort, externalIPs: [192.0.2.77], "+ports)
	own := b.service("own", "selector: {pod: p2}, "+ports)
	sticky := b.service("sticky", "selector: {app: web}, sessionAffinity: ClientIP, "+ports)
	six := b.service("six", "selector: {app: web}, ipFamilies: [IPv6], ipFamilyPolicy: SingleStack, "+ports)
	none := b.service("none", "selector: {app: nobody}, "+ports)
	b.start()
	ask := func(network, address string) (lab.Answer, error) { return askFrom(b.Backends[1], network, address) }
	for _, c := range []struct {
		name, network, address string
		by                     []string
	}{
		{"a cluster IP", "tcp", at(all.Spec.ClusterIP, 80), []string{"p1", "p2"}},
		{"a cluster IP", "udp", at(all.Spec.ClusterIP, 53), []string{"p1", "p2"}},
		{"its own Service", "tcp", at(own.Spec.ClusterIP, 80), []string{"p2"}},
		{"an external IP", "tcp", "192.0.2.77:80", []string{"p1", "p2"}},
		{"a node port", "tcp", at(front.String(), all.Spec.Ports[0].NodePort), []string{"p1", "p2"}},
		{"a cluster IP of IPv6", "tcp", at(six.Spec.ClusterIP, 80), []string{"p1", "p2"}},
		{"a cluster IP of IPv6", "udp", at(six.Spec.ClusterIP, 53), []string{"p1", "p2"}},
	} {
		b.answered(t, "a packet to "+c.name+" by "+c.network, func() (string, error) {
			answer, err := ask(c.network, c.address)
			return answer.Backend, err
		}, c.by...)
	}
	first, err := ask("tcp", at(sticky.Spec.ClusterIP, 80))
	b.must(err)
	if from := netip.MustParseAddrPort(first.Remote).Addr(); from != gateway {
		t.Errorf("the endpoint sees the client %s, want the node's address towards it, %s, which its answers come back to", from, gateway)
	}
	b.answered(t, "packets with affinity", func() (string, error) {
		answer, err := ask("tcp", at(sticky.Spec.ClusterIP, 80))
		return answer.Backend, err
	}, first.Backend)
	if _, err := ask("tcp", at(none.Spec.ClusterIP, 80)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a Service without endpoints: %v; want that it refuses", err)
	}
	return all
}
