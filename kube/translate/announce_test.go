package translate_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/kube/translate"
)

// TestAnnounce: a load balancer's addresses that are announced are a service of their own, because nothing else of the Service is announced; with a
// local policy, by nodes with an endpoint. Clients in the cluster have all endpoints there as before.
func TestAnnounce(t *testing.T) {
	const ingress = "\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.7}]}}"
	const there = slice + "- {addresses: [10.244.1.5], nodeName: n2}"
	const both = there + "\n- {addresses: [10.244.0.5], nodeName: n1}"
	for _, c := range []struct{ name, spec, endpoints, want string }{
		{"all endpoints", "", there, `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
default/web@load-balancer nat rejects announce=l2
  tcp 192.0.2.7:80
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
`},
		{"no endpoint: it is refused here as anywhere", "", "", `
default/web nat rejects
  tcp 10.96.0.10:80
default/web@load-balancer nat rejects announce=l2
  tcp 192.0.2.7:80
`},
		{"own class", "loadBalancerClass: " + translate.OwnClass + ", ", "", `
default/web nat rejects
  tcp 10.96.0.10:80
default/web@load-balancer nat rejects announce=l2
  tcp 192.0.2.7:80
`},
		{"another load balancer's", "loadBalancerClass: example.org/other, ", "", `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp 192.0.2.7:80
`},
		{"local endpoints", "externalTrafficPolicy: Local, ", both, `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp-inside 192.0.2.7:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
default/web@load-balancer nat-destination rejects announce=l2 inside
  tcp 192.0.2.7:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
`},
		{"local endpoints, and none is here", "externalTrafficPolicy: Local, ", there, `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp-inside 192.0.2.7:80
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
default/web@load-balancer nat-destination inside
  tcp 192.0.2.7:80
`},
		{"local endpoints that are not ready", "externalTrafficPolicy: Local, ", there + "\n- {addresses: [10.244.0.5], nodeName: n1, conditions: {ready: false}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp-inside 192.0.2.7:80
  -> 10.244.0.5:8080 weight 0 (10.244.0.5:8080)
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
default/web@load-balancer nat-destination inside
  tcp 192.0.2.7:80
  -> 10.244.0.5:8080 weight 0 (10.244.0.5:8080)
`},
		{"both policies", "externalTrafficPolicy: Local, internalTrafficPolicy: Local, externalIPs: [192.0.2.1], ", both, `
default/web nat-destination rejects inside
  tcp 10.96.0.10:80
  tcp 192.0.2.1:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
default/web@cluster nat rejects
  tcp-inside 192.0.2.1:80
  tcp-inside 192.0.2.7:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
default/web@load-balancer nat-destination rejects announce=l2 inside
  tcp 192.0.2.7:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
`},
		{"source ranges", "loadBalancerSourceRanges: [198.51.100.0/24], ", "", `
default/web nat rejects
  tcp 10.96.0.10:80
default/web@load-balancer nat rejects announce=l2 allow=[198.51.100.0/24]
  tcp 192.0.2.7:80
`},
	} {
		service, endpointSlices := objects(t, strings.Replace(onePort, "type: ClusterIP, ", "type: LoadBalancer, "+c.spec, 1)+ingress+c.endpoints)
		got := (&translate.Translator{Node: here, Announce: true}).Service(service, endpointSlices)
		if diff := cmp.Diff(strings.TrimPrefix(c.want, "\n"), dump(got.Services, got.Faults)); diff != "" {
			t.Errorf("%s: -want +got\n%s", c.name, diff)
		}
	}
}
