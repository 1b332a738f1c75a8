package net

import (
	"fmt"
	"strings"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestSilentEndpoint: an endpoint whose next hop has gone silently gets no new connections, from outside and from the
// node, although the control plane has not noticed. It gets some again when it answers.
func TestSilentEndpoint(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	front := b.Balancer.Interfaces()[0]
	b.node("n1", front.IPv4.Addr(), front.IPv6.Addr())
	b.node("n2")
	for i, node := range []string{"n1", "n1", "n2"} {
		b.pod(b.Backends[i], node, "web")
	}
	b.start()
	web := b.service("web", "type: NodePort, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]")
	outside, inside := at(front.IPv4.Addr().String(), web.Spec.Ports[0].NodePort), at(web.Spec.ClusterIP, 80)
	answered := func(by ...string) {
		t.Helper()
		b.served(t, "tcp", outside, by...)
		b.servedInside(t, inside, by...)
	}
	answered("b1", "b2", "b3")
	b.must(b.Switch.SetUp("b3", false))
	begin := time.Now()
	answered("b1", "b2")
	t.Logf("no new connection leads to the silent endpoint after %s", time.Since(begin).Round(time.Millisecond))
	list, err := b.client.DiscoveryV1().EndpointSlices("default").List(within(t), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=web"})
	b.must(err)
	ready := 0
	for _, slice := range list.Items {
		for _, e := range slice.Endpoints {
			if *e.Conditions.Ready {
				ready++
			}
		}
	}
	if ready != 3 {
		t.Errorf("the control plane has %d endpoints that are ready, want all three: this shows nothing", ready)
	}
	eventually(t, "the condition", func() error {
		_, out := b.run("shunt-kube", "status", "--socket", b.socket())
		if address := b.Backends[2].Addr4().String(); !strings.Contains(out, "neighbour_unresolved") || !strings.Contains(out, address) {
			return fmt.Errorf("it is not said of %s: %s", address, out)
		}
		return nil
	})
	b.must(b.Switch.SetUp("b3", true))
	answered("b1", "b2", "b3")
}
