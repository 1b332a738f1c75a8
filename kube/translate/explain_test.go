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
