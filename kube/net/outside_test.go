package net

import (
	"context"
	"fmt"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestExternalIPs: external IPs are for clients outside and inside, or with --external-ips-inside=false for clients
// outside alone: neither at sockets nor by packets of pods does a client inside reach the Service there. Cluster IPs
// stay open to all.
func TestExternalIPs(t *testing.T) {
	t.Parallel()
	b := newNode(t, "p1", "p2")
	b.node("n1", b.Balancer.Interfaces()[0].IPv4.Addr())
	node, err := b.client.CoreV1().Nodes().Get(within(t), "n1", metav1.GetOptions{})
	b.must(err)
	node.Spec.PodCIDRs = []string{bridged4.Masked().String(), bridged6.Masked().String()}
	_, err = b.client.CoreV1().Nodes().Update(within(t), node, metav1.UpdateOptions{})
	b.must(err)
	b.pod(b.Backends[0], "n1", "web")
	const external = "192.0.2.77:80"
	web := b.service("web", "selector: {app: web}, externalIPs: [192.0.2.77], ports: [{port: 80, targetPort: 8080}]")
	from := func(host *lab.Host, address string) (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), patience/10)
		defer cancel()
		answer, err := lab.Get(ctx, host.HTTPClient(false), address)
		return answer.Backend, err
	}
	for _, inside := range []bool{true, false, true} {
		b.start(fmt.Sprintf("--external-ips-inside=%t", inside))
		b.served(t, "tcp", external, "p1")
		for _, client := range []struct {
			name string
			ask  func(address string) (string, error)
		}{
			{"a packet of a pod", func(address string) (string, error) { return from(b.Backends[1], address) }},
			{"a socket", b.askInside},
		} {
			b.answered(t, client.name+" to the cluster IP", func() (string, error) { return client.ask(at(web.Spec.ClusterIP, 80)) }, "p1")
			if inside {
				b.answered(t, client.name+" to the external IP", func() (string, error) { return client.ask(external) }, "p1")
			} else if backend, err := client.ask(external); err == nil {
				t.Errorf("%s to the external IP, which is for clients outside, is answered by %s", client.name, backend)
			}
		}
		b.must(b.agent.End(syscall.SIGTERM, patience))
	}
}
