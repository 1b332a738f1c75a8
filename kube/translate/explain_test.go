package translate_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/kube/translate"
)

func explained(e translate.Explanation) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", e.Unserved)
	for _, p := range e.Ports {
		fmt.Fprintf(&b, "%d %s %s\n", p.Port, p.Protocol, p.Name)
		if p.NAT != "" {
			fmt.Fprintf(&b, "  NAT: %s\n", p.NAT)
		}
		for _, v := range p.Variants {
			fmt.Fprintf(&b, "  %s\n", v.Name)
			for _, x := range v.Endpoints {
				fmt.Fprintf(&b, "    %s %q %t %s\n", x.BackendAddress, x.Pod, x.Takes, x.Why)
			}
		}
	}
	for _, f := range e.Faults {
		fmt.Fprintf(&b, "%s\n", f.Code)
	}
	return b.String()
}

func TestExplain(t *testing.T) {
	const slice = `
---
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints:
  - {addresses: [10.1.0.1], nodeName: n1, targetRef: {kind: Pod, name: a}, conditions: {ready: true}}
  - {addresses: [10.1.0.2], nodeName: n2, targetRef: {kind: Pod, name: b}, conditions: {ready: true}}
  - {addresses: [10.1.0.3], nodeName: n1, targetRef: {kind: Pod, name: c}, conditions: {ready: false, serving: true, terminating: true}}
  - {addresses: [10.1.0.4], nodeName: n1, conditions: {ready: false}}
`
	for name, c := range map[string]struct{ spec, want string }{
		"both policies": {`spec:
  type: NodePort
  clusterIPs: [10.96.0.1]
  externalTrafficPolicy: Local
  ports: [{name: http, port: 80, protocol: TCP, nodePort: 30080}, {name: s, port: 81, protocol: SCTP}]`, `
80 TCP http
  default/web:http
    10.1.0.1:8080 "a" true ready
    10.1.0.2:8080 "b" true ready
    10.1.0.3:8080 "c" false terminating; others are ready; it keeps its connections
    10.1.0.4:8080 "" false not ready, or terminating and not serving; it keeps its connections
  default/web:http@external
    10.1.0.1:8080 "a" true ready
    10.1.0.2:8080 "b" false on another node, and the traffic policy is Local
    10.1.0.3:8080 "c" false terminating; others are ready; it keeps its connections
    10.1.0.4:8080 "" false not ready, or terminating and not serving; it keeps its connections
81 SCTP s
sctp_refused
`},
		"headless": {"spec: {clusterIPs: [None], ports: [{name: http, port: 80}]}", "it is headless: DNS answers with the pods' addresses, and no packet goes to the Service\n"},
		"by name":  {"spec: {type: ExternalName, externalName: example.org}", "it is of type ExternalName: DNS answers with example.org, and no packet goes to the Service\n"},
		"another's": {"metadata: {namespace: default, name: web, labels: {service.kubernetes.io/service-proxy-name: x}}\nspec: {clusterIPs: [10.96.0.1]}",
			"its label service.kubernetes.io/service-proxy-name gives it to \"x\"\n"},
		"another's without a name": {"metadata: {namespace: default, name: web, labels: {service.kubernetes.io/service-proxy-name: ''}}\nspec: {clusterIPs: [10.96.0.1]}",
			"its label service.kubernetes.io/service-proxy-name gives it to \"\"\n"},
		"headless by its label": {"metadata: {namespace: default, name: web, labels: {service.kubernetes.io/headless: ''}}\nspec: {clusterIPs: [10.96.0.1]}",
			"its label service.kubernetes.io/headless makes it headless: DNS answers with the pods' addresses, and no packet goes to the Service\n"},
	} {
		t.Run(name, func(t *testing.T) {
			service, slices := objects(t, c.spec+slice)
			got := explained((&translate.Translator{Node: here}).Explain(service, slices))
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestExplainDirect: endpoints are explained in both levels, in the first one of each family by way of their nodes; and the reason for NAT is named, for the ports that it is for.
func TestExplainDirect(t *testing.T) {
	const endpoints = `
---
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints:
  - {addresses: [10.1.0.1], nodeName: n1, targetRef: {kind: Pod, name: a}}
  - {addresses: [10.1.0.2], nodeName: n2, targetRef: {kind: Pod, name: b}}
  - {addresses: [10.1.0.3], nodeName: n2, targetRef: {kind: Pod, name: c}, conditions: {ready: false}}
  - {addresses: [10.1.0.4], nodeName: n3, targetRef: {kind: Pod, name: d}}
  - {addresses: [10.1.0.5], nodeName: n4, targetRef: {kind: Pod, name: e}}
---
addressType: IPv6
ports: [{name: http, port: 8080, protocol: TCP}, {name: other, port: 8081, protocol: TCP}]
endpoints:
  - {addresses: ['fd00:1::2'], nodeName: n2, targetRef: {kind: Pod, name: b}}
---
ports: [{name: other, port: 8081, protocol: TCP}]
endpoints:
  - {addresses: [10.1.0.9], nodeName: n9, targetRef: {kind: Pod, name: z}}
`
	service, slices := objects(t, `spec:
  type: LoadBalancer
  clusterIPs: [10.96.0.1, 'fd00:96::1']
  externalIPs: [192.0.2.1, '2001:db8::1']
  ports: [{name: s, port: 81, protocol: SCTP}, {name: http, port: 80, protocol: TCP}, {name: other, port: 82, protocol: TCP}, {name: t, port: 83, protocol: SCTP}]`+endpoints)
	translator := direct()
	translator.Away = map[string]bool{"n3": true, "n4": true}
	want := `
81 SCTP s
80 TCP http
  default/web:http
    10.1.0.1:8080 "a" true ready
    10.1.0.2:8080 "b" true ready
    10.1.0.3:8080 "c" false not ready, or terminating and not serving; it keeps its connections
    10.1.0.4:8080 "d" true ready
    10.1.0.5:8080 "e" true ready
    [fd00:1::2]:8080 "b (IPv6)" true ready
  default/web:http@direct
    10.1.0.1:8080 "a" true ready, on this node
    10.1.0.2:8080 "b" true ready, on node n2
    10.1.0.3:8080 "c" false not ready, or terminating and not serving; it keeps its connections, on node n2
    10.1.0.4:8080 "d" false the agent of its node is not ready; it keeps its connections, on node n3
    10.1.0.5:8080 "e" false the agent of its node is not ready, on node n4
  default/web:http@direct-ipv6
    [fd00:1::2]:8080 "b (IPv6)" true ready, on node n2
  default/web:http@here
    10.1.0.1:8080 "a" true ready
    10.1.0.2:8080 "b" false on another node, and the packets are for endpoints of this one
    10.1.0.3:8080 "c" false on another node, and the packets are for endpoints of this one
    10.1.0.4:8080 "d" false on another node, and the packets are for endpoints of this one
    10.1.0.5:8080 "e" false on another node, and the packets are for endpoints of this one
    [fd00:1::2]:8080 "b (IPv6)" false on another node, and the packets are for endpoints of this one
82 TCP other
  NAT: endpoint 10.1.0.9:8081 is on node n9, whose agent takes no packets out of tunnels of this kind
  default/web:other
    10.1.0.9:8081 "z" true ready
    [fd00:1::2]:8081 "b (IPv6)" true ready
83 SCTP t
sctp_refused
sctp_refused
`
	if diff := cmp.Diff(want, explained(translator.Explain(service, slices))); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
