package translate_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/translate"
)

func addresses(texts ...string) (all []netip.Addr) {
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

// direct is a translator of node n1 that sends packets to n2, which has addresses of both families, and n3, which has one.
func direct() translate.Translator {
	return translate.Translator{Node: here, Direct: model.ForwardingDSRGUE, Peers: map[string][]netip.Addr{"n2": addresses("10.0.0.2", "fd00::2"), "n3": addresses("10.0.0.3")}}
}

// short is a line for each service, without the part of its name that is default/web.
func short(services []model.Service) string {
	var b strings.Builder
	for _, s := range services {
		fmt.Fprintf(&b, "%s %s", strings.Replace(s.Name, "default/web", "web", 1), s.Forwarding)
		for _, is := range []struct {
			word string
			is   bool
		}{{"rejects", s.Policy.Rejects}, {"inside", s.Policy.Inside}, {"tunnelled", s.Policy.Tunnelled}, {"begun", s.Policy.PassesBegun}, {"announced", s.Announce == model.AnnounceL2},
			{"drawn", s.Policy.Draws && s.Tracking == model.TrackingAlways}} {
			if is.is {
				b.WriteString(" " + is.word)
			}
		}
		if len(s.AllowFrom)+len(s.DenyFrom) > 0 {
			fmt.Fprintf(&b, " allow=%v deny=%v", s.AllowFrom, s.DenyFrom)
		}
		if s.AffinityTimeout > 0 {
			fmt.Fprintf(&b, " affinity=%s", s.AffinityTimeout)
		}
		b.WriteString(" at")
		for _, f := range s.Frontends {
			fmt.Fprintf(&b, " %s", strings.Replace(f.String(), " ", "/", 1))
		}
		b.WriteString(" ->")
		for _, x := range s.Backends {
			if x.Name != x.BackendAddress.String() {
				fmt.Fprintf(&b, " %s=", x.Name)
			} else {
				b.WriteString(" ")
			}
			fmt.Fprintf(&b, "%s*%d", x.BackendAddress, x.Weight)
		}
		b.WriteString("\n")
	}
	return b.String()
}

const (
	aNodePort  = "spec: {type: NodePort, clusterIPs: [10.96.0.10], ports: [{port: 80, nodePort: 30080}]}"
	inExternal = "spec: {type: ClusterIP, clusterIPs: [10.96.0.10], externalIPs: [192.0.2.1], ports: [{port: 80}]}"
	aBalancer  = "spec: {type: LoadBalancer, clusterIPs: [10.96.0.10], ports: [{port: 80, nodePort: 30080}]}\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.7}]}}"
	on1        = "- {addresses: [10.244.1.5], nodeName: n1}\n"
	on1b       = "- {addresses: [10.244.1.6], nodeName: n1}\n"
	on2        = "- {addresses: [10.244.2.5], nodeName: n2}\n"
	on3        = "- {addresses: [10.244.3.5], nodeName: n3}\n"
	on9        = "- {addresses: [10.244.9.5], nodeName: n9}\n"
	isGone     = ", conditions: {ready: false}}\n"
	isParting  = ", conditions: {ready: false, serving: true, terminating: true}}\n"
	bothIPs    = "spec: {type: ClusterIP, clusterIPs: [10.96.0.10, 'fd00:96::10'], externalIPs: [192.0.2.1, '2001:db8::1'], ports: [{port: 80}]}"
	slice6     = "---\naddressType: IPv6\nports: [{port: 8080}]\nendpoints:\n"
)

// but is an endpoint in another standing.
func but(endpoint, standing string) string { return strings.TrimSuffix(endpoint, "}\n") + standing }

// in is a Service with more in its spec.
func in(service, more string) string {
	return strings.Replace(service, "spec: {", "spec: {"+more+", ", 1)
}

// directRules are rules of direct return, one each.
var directRules = []struct {
	name, objects string
	with          func(*translate.Translator)
	want, nat     string
}{
	{name: "a node port: nodes by their ready endpoints, then this node's", objects: aNodePort + slice + on1 + on1b + on2, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/10.0.0.1:30080 tcp-inside/127.0.0.1:30080 -> 10.244.1.5:8080*1 10.244.1.6:8080*1 10.244.2.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/10.0.0.1:30080 tcp/127.0.0.1:30080 -> n1=10.0.0.1*2 n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/0.0.0.0:30080 -> 10.244.1.5:8080*1 10.244.1.6:8080*1
`},
	{name: "addresses are exact in the second level, which a node without endpoints has not", objects: aBalancer + slice + on2, with: func(t *translate.Translator) { t.Direct = model.ForwardingDSRIPIP }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/10.0.0.1:30080 tcp-inside/127.0.0.1:30080 tcp-inside/192.0.2.7:80 -> 10.244.2.5:8080*1
web@direct dsr-ipip rejects inside tunnelled at tcp/10.0.0.1:30080 tcp/127.0.0.1:30080 tcp/192.0.2.7:80 -> n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/0.0.0.0:30080 tcp-tunnelled/192.0.2.7:80 ->
`},
	{name: "without tunnels, nothing of it", objects: aBalancer + slice + on1 + on2, with: func(t *translate.Translator) { t.Direct = model.ForwardingNAT }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp/10.0.0.1:30080 tcp/127.0.0.1:30080 tcp/192.0.2.7:80 -> 10.244.1.5:8080*1 10.244.2.5:8080*1
`},
	{name: "without clients outside, neither", objects: onePort + slice + on1 + on9, want: `
web nat rejects at tcp/10.96.0.10:80 -> 10.244.1.5:8080*1 10.244.9.5:8080*1
`},
	{name: "no endpoint anywhere", objects: inExternal, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 ->
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 ->
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`},
	{name: "an endpoint on a node without tunnels: NAT, and the second level is there for nodes that know better", objects: inExternal + slice + on1 + on9, want: `
web nat rejects at tcp/10.96.0.10:80 tcp/192.0.2.1:80 -> 10.244.1.5:8080*1 10.244.9.5:8080*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`, nat: "endpoint 10.244.9.5:8080 is on node n9, whose agent takes no packets out of tunnels of this kind"},
	{name: "an endpoint there that is not ready changes nothing", objects: inExternal + slice + on1 + but(on9, isGone), want: `
web nat rejects at tcp/10.96.0.10:80 tcp/192.0.2.1:80 -> 10.244.1.5:8080*1 10.244.9.5:8080*0
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`, nat: "endpoint 10.244.9.5:8080 is on node n9, whose agent takes no packets out of tunnels of this kind"},
	{name: "an endpoint on no node", objects: inExternal + slice + "- {addresses: [198.51.100.1]}\n", want: `
web nat rejects at tcp/10.96.0.10:80 tcp/192.0.2.1:80 -> 198.51.100.1:8080*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`, nat: "endpoint 198.51.100.1:8080 is on no node"},
	{name: "an endpoint with another node's own address", objects: inExternal + slice + on1 + "- {addresses: [10.0.0.2], nodeName: n2}\n", want: `
web nat rejects at tcp/10.96.0.10:80 tcp/192.0.2.1:80 -> 10.0.0.2:8080*1 10.244.1.5:8080*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`, nat: "endpoint 10.0.0.2:8080 has the address of its node n2"},
	{name: "an endpoint with this node's own address: no node sends packets here", objects: inExternal + slice + on1 + "- {addresses: [10.0.0.1], nodeName: n1}\n", want: `
web nat rejects at tcp/10.96.0.10:80 tcp/192.0.2.1:80 -> 10.0.0.1:8080*1 10.244.1.5:8080*1
`, nat: "endpoint 10.0.0.1:8080 has the address of its node n1"},
	{name: "endpoints that are not ready keep their connections", objects: inExternal + slice + on1 + but(on1b, isGone) + but(on2, isGone) + but(on3, isParting), want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.1.5:8080*1 10.244.1.6:8080*0 10.244.2.5:8080*0 10.244.3.5:8080*0
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n1=10.0.0.1*1 n2=10.0.0.2*0 n3=10.0.0.3*0
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1 10.244.1.6:8080*0
`},
	{name: "endpoints that end take connections if none is ready; the other nodes' could, so this node refuses none", objects: inExternal + slice + but(on1, isGone) + but(on2, isParting) + but(on3, isGone), want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.1.5:8080*0 10.244.2.5:8080*1 10.244.3.5:8080*0
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n1=10.0.0.1*0 n2=10.0.0.2*1 n3=10.0.0.3*0
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*0
`},
	{name: "UDP leaves endpoints that serve no more, and so nodes that have no other", objects: strings.Replace(inExternal, "port: 80", "port: 80, protocol: UDP", 1) + strings.Replace(slice, "TCP", "UDP", 1) + on1 + but(on2, isGone) + but(on3, isParting), want: `
web nat rejects at udp/10.96.0.10:80 udp-inside/192.0.2.1:80 -> 10.244.1.5:8080*1 10.244.3.5:8080*0
web@direct dsr-gue rejects inside tunnelled at udp/192.0.2.1:80 -> n1=10.0.0.1*1 n3=10.0.0.3*0
web@here nat-destination rejects at udp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`},
	{name: "hints choose nodes, and the chosen node its own endpoints", objects: inExternal + slice + "- {addresses: [10.244.1.5], nodeName: n1, hints: {forZones: [{name: west}]}}\n- {addresses: [10.244.2.5], nodeName: n2, hints: {forZones: [{name: east}]}}\n", want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.1.5:8080*0 10.244.2.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n1=10.0.0.1*0 n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`},
	{name: "pods that are not ready are published as ready", objects: in(inExternal, "publishNotReadyAddresses: true") + slice + but(on2, ", conditions: {ready: true, serving: false, terminating: true}}\n"), want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.2.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`},
	{name: "internal traffic stays on the node, and clients in the cluster reach all endpoints at external addresses", objects: in(inExternal, "internalTrafficPolicy: Local") + slice + on1 + on2, want: `
web nat-destination rejects at tcp/10.96.0.10:80 -> 10.244.1.5:8080*1
web@cluster nat rejects at tcp-inside/192.0.2.1:80 -> 10.244.1.5:8080*1 10.244.2.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n1=10.0.0.1*1 n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`},
	{name: "internal traffic stays on the node, and external traffic has NAT as before", objects: in(inExternal, "internalTrafficPolicy: Local") + slice + on9, want: `
web nat-destination at tcp/10.96.0.10:80 ->
web@external nat rejects at tcp/192.0.2.1:80 -> 10.244.9.5:8080*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`, nat: "endpoint 10.244.9.5:8080 is on node n9, whose agent takes no packets out of tunnels of this kind"},
	{name: "external traffic that stays on the node needs no tunnel", objects: in(inExternal, "externalTrafficPolicy: Local") + slice + on1 + on2, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.1.5:8080*1 10.244.2.5:8080*1
web@external nat-destination rejects inside at tcp/192.0.2.1:80 -> 10.244.1.5:8080*1
`},
	{name: "connections of kube-proxy are left to the host: NAT, and packets of other nodes are not for the host", objects: inExternal + slice + on1, with: func(t *translate.Translator) { t.Moving = true }, want: `
web nat rejects begun at tcp/10.96.0.10:80 tcp/192.0.2.1:80 -> 10.244.1.5:8080*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`, nat: "connections from before are left to the host (--moving)"},
	{name: "source ranges are in both levels, and keep clients in the cluster out as before", objects: in(aBalancer, "loadBalancerSourceRanges: [198.51.100.0/24]") + slice + on1 + on2, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/10.0.0.1:30080 tcp-inside/127.0.0.1:30080 -> 10.244.1.5:8080*1 10.244.2.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/10.0.0.1:30080 tcp/127.0.0.1:30080 -> n1=10.0.0.1*1 n2=10.0.0.2*1
web@load-balancer dsr-gue rejects tunnelled allow=[198.51.100.0/24] deny=[] at tcp/192.0.2.7:80 -> n1=10.0.0.1*1 n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/0.0.0.0:30080 -> 10.244.1.5:8080*1
web@load-balancer-here nat-destination rejects allow=[198.51.100.0/24] deny=[] at tcp-tunnelled/192.0.2.7:80 -> 10.244.1.5:8080*1
`},
	{name: "the first level is announced", objects: in(aBalancer, "allocateLoadBalancerNodePorts: false") + slice + on1 + on2, with: func(t *translate.Translator) { t.Announce = true }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/10.0.0.1:30080 tcp-inside/127.0.0.1:30080 tcp-inside/192.0.2.7:80 -> 10.244.1.5:8080*1 10.244.2.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/10.0.0.1:30080 tcp/127.0.0.1:30080 -> n1=10.0.0.1*1 n2=10.0.0.2*1
web@load-balancer dsr-gue rejects inside tunnelled announced at tcp/192.0.2.7:80 -> n1=10.0.0.1*1 n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/0.0.0.0:30080 -> 10.244.1.5:8080*1
web@load-balancer-here nat-destination rejects at tcp-tunnelled/192.0.2.7:80 -> 10.244.1.5:8080*1
`},
	{name: "external IPs for clients outside alone", objects: inExternal + slice + on1 + on2, with: func(t *translate.Translator) {
		t.Outside, t.Node.Pods = true, []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
	}, want: `
web nat rejects at tcp/10.96.0.10:80 -> 10.244.1.5:8080*1 10.244.2.5:8080*1
web@external-ips dsr-gue rejects tunnelled allow=[] deny=[0.0.0.0/32 ::/128 10.244.1.0/24] at tcp/192.0.2.1:80 -> n1=10.0.0.1*1 n2=10.0.0.2*1
web@external-ips-here nat-destination rejects allow=[] deny=[0.0.0.0/32 ::/128 10.244.1.0/24] at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`},
	{name: "affinity is kept in both levels", objects: in(inExternal, "sessionAffinity: ClientIP") + slice + on1 + on2, want: `
web nat rejects drawn affinity=3h0m0s at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.1.5:8080*1 10.244.2.5:8080*1
web@direct dsr-gue rejects inside tunnelled drawn affinity=3h0m0s at tcp/192.0.2.1:80 -> n1=10.0.0.1*1 n2=10.0.0.2*1
web@here nat-destination rejects drawn affinity=3h0m0s at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`},
	{name: "two families: each has its own weights and outer addresses", objects: bothIPs + slice + on1 + on2 + slice6 + "- {addresses: ['fd00:244:2::5'], nodeName: n2}\n- {addresses: ['fd00:244:2::6'], nodeName: n2}\n", want: `
web nat rejects at tcp/10.96.0.10:80 tcp/[fd00:96::10]:80 tcp-inside/192.0.2.1:80 tcp-inside/[2001:db8::1]:80 -> 10.244.1.5:8080*1 10.244.2.5:8080*1 [fd00:244:2::5]:8080*1 [fd00:244:2::6]:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n1=10.0.0.1*1 n2=10.0.0.2*1
web@direct-ipv6 dsr-gue rejects inside tunnelled at tcp/[2001:db8::1]:80 -> n2=fd00::2*2
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 tcp-tunnelled/[2001:db8::1]:80 -> 10.244.1.5:8080*1
`},
	{name: "IPv6 in IPv4, if a node has no IPv6 address", objects: bothIPs + slice + on2 + slice6 + "- {addresses: ['fd00:244:2::5'], nodeName: n2}\n- {addresses: ['fd00:244:3::5'], nodeName: n3}\n", want: `
web nat rejects at tcp/10.96.0.10:80 tcp/[fd00:96::10]:80 tcp-inside/192.0.2.1:80 tcp-inside/[2001:db8::1]:80 -> 10.244.2.5:8080*1 [fd00:244:2::5]:8080*1 [fd00:244:3::5]:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n2=10.0.0.2*1
web@direct-ipv6 dsr-gue rejects inside tunnelled at tcp/[2001:db8::1]:80 -> n2=10.0.0.2*1 n3=10.0.0.3*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 tcp-tunnelled/[2001:db8::1]:80 ->
`},
	{name: "no family that all nodes have", objects: inExternal + slice + on3 + on9, with: func(t *translate.Translator) { t.Peers["n9"] = addresses("fd00::9") }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp/192.0.2.1:80 -> 10.244.3.5:8080*1 10.244.9.5:8080*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`, nat: "the nodes with its endpoints have no addresses of one family"},
	{name: "node ports of two families", objects: "spec: {type: NodePort, clusterIPs: [10.96.0.10, 'fd00:96::10'], ports: [{port: 80, nodePort: 30080}]}" + slice + on1, want: `
web nat rejects at tcp/10.96.0.10:80 tcp/[fd00:96::10]:80 tcp-inside/10.0.0.1:30080 tcp-inside/[fd00::1]:30080 tcp-inside/127.0.0.1:30080 tcp-inside/[::1]:30080 -> 10.244.1.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/10.0.0.1:30080 tcp/127.0.0.1:30080 -> n1=10.0.0.1*1
web@direct-ipv6 dsr-gue rejects inside tunnelled at tcp/[fd00::1]:30080 tcp/[::1]:30080 ->
web@here nat-destination rejects at tcp-tunnelled/0.0.0.0:30080 tcp-tunnelled/[::]:30080 -> 10.244.1.5:8080*1
`},
	{name: "a node that has been away for long keeps its connections", objects: inExternal + slice + on2 + on3, with: func(t *translate.Translator) { t.Away = map[string]bool{"n3": true} }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.2.5:8080*1 10.244.3.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n2=10.0.0.2*1 n3=10.0.0.3*0
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`},
	{name: "it keeps none of UDP", objects: strings.Replace(inExternal, "port: 80", "port: 80, protocol: UDP", 1) + strings.Replace(slice, "TCP", "UDP", 1) + on2 + on3, with: func(t *translate.Translator) { t.Away = map[string]bool{"n3": true} }, want: `
web nat rejects at udp/10.96.0.10:80 udp-inside/192.0.2.1:80 -> 10.244.2.5:8080*1 10.244.3.5:8080*1
web@direct dsr-gue rejects inside tunnelled at udp/192.0.2.1:80 -> n2=10.0.0.2*1
web@here nat-destination rejects at udp-tunnelled/192.0.2.1:80 ->
`},
	{name: "its addresses do not decide the family of the others", objects: inExternal + slice + on2 + on3, with: func(t *translate.Translator) {
		t.Away, t.Peers["n3"] = map[string]bool{"n3": true}, addresses("fd00::3")
	}, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.2.5:8080*1 10.244.3.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`},
	{name: "a node that has never been ready gets none", objects: inExternal + slice + on2 + on9, with: func(t *translate.Translator) { t.Away = map[string]bool{"n9": true} }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.2.5:8080*1 10.244.9.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`},
	{name: "all endpoints that take connections are on nodes that are away", objects: inExternal + slice + but(on2, isGone) + but(on3, isParting), with: func(t *translate.Translator) { t.Away = map[string]bool{"n3": true} }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp/192.0.2.1:80 -> 10.244.2.5:8080*0 10.244.3.5:8080*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`, nat: "endpoint 10.244.3.5:8080 is on node n3, whose agent is not ready, and no endpoint on another node takes connections"},
	{name: "the endpoints of a node that is away have ended", objects: inExternal + slice + but(on3, isGone), with: func(t *translate.Translator) { t.Away = map[string]bool{"n3": true} }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.3.5:8080*0
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n3=10.0.0.3*0
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`},
	{name: "two names of one machine", objects: inExternal + slice + but(on2, isGone) + on9, with: func(t *translate.Translator) { t.Peers["n9"] = addresses("10.0.0.2") }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.2.5:8080*0 10.244.9.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n2=10.0.0.2*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 ->
`},
	{name: "this node has the address by which others know it", objects: inExternal + slice + on1, with: func(t *translate.Translator) { t.Peers["n1"] = addresses("10.0.5.1") }, want: `
web nat rejects at tcp/10.96.0.10:80 tcp-inside/192.0.2.1:80 -> 10.244.1.5:8080*1
web@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n1=10.0.5.1*1
web@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
`},
}

func TestDirect(t *testing.T) {
	for _, c := range directRules {
		t.Run(c.name, func(t *testing.T) {
			translator := direct()
			if c.with != nil {
				c.with(&translator)
			}
			service, slices := objects(t, strings.TrimSuffix(c.objects, "\n"))
			got := translator.Service(service, slices)
			if diff := cmp.Diff(strings.TrimPrefix(c.want, "\n"), short(got.Services)+dump(nil, got.Faults)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			var nat string
			for _, p := range translator.Explain(service, slices).Ports {
				nat += p.NAT
				for _, v := range p.Variants {
					if strings.HasSuffix(v.Name, "here") && len(v.Backends) == 0 {
						t.Errorf("it explains %s, which only refuses packets", v.Name)
					}
				}
			}
			if nat != c.nat {
				t.Errorf("the reason for NAT is %q, want %q", nat, c.nat)
			}
		})
	}
}

// TestDirectElection: with direct return, the same node announces an address, and health is counted in the same way.
func TestDirectElection(t *testing.T) {
	service, slices := objects(t, in(aBalancer, "healthCheckNodePort: 31000")+slice+on1+on2)
	of := func(forwarding model.Forwarding) string {
		translator := direct()
		translator.Direct, translator.Announce, translator.Agents = forwarding, true, []string{"n1", "n2", "n3"}
		got := translator.Service(service, slices)
		return fmt.Sprint(got.Announced, got.Health)
	}
	if nat, tunnels := of(model.ForwardingNAT), of(model.ForwardingDSRGUE); nat != tunnels || !strings.Contains(nat, "192.0.2.7") {
		t.Errorf("with NAT, it is %s, and with tunnels %s", nat, tunnels)
	}
}

// TestDirectShared: of two Services with one address, the older one has both levels, and the other one has one fault
// for it; within a Service, the second level goes the way of the first.
func TestDirectShared(t *testing.T) {
	translator := direct()
	var set translate.Set
	for i, name := range []string{"old", "young"} {
		service, slices := objects(t, inExternal+slice+on1)
		service.Name, service.Spec.ClusterIPs = name, []string{fmt.Sprintf("10.96.0.%d", i+1)}
		set.Put("default/"+name, service.CreationTimestamp.Time, translator.Service(service, slices))
	}
	twice, slices := objects(t, in(strings.Replace(aBalancer, "10.96.0.10", "10.96.0.3", 1), "externalIPs: [192.0.2.7], loadBalancerSourceRanges: [198.51.100.0/24]")+slice+on1)
	twice.Name = "twice"
	set.Put("default/twice", twice.CreationTimestamp.Time, translator.Service(twice, slices))
	want := `default/old nat rejects at tcp/10.96.0.1:80 tcp-inside/192.0.2.1:80 -> 10.244.1.5:8080*1
default/old@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.1:80 -> n1=10.0.0.1*1
default/old@here nat-destination rejects at tcp-tunnelled/192.0.2.1:80 -> 10.244.1.5:8080*1
default/twice nat rejects at tcp/10.96.0.3:80 tcp-inside/192.0.2.7:80 tcp-inside/10.0.0.1:30080 tcp-inside/127.0.0.1:30080 -> 10.244.1.5:8080*1
default/twice@direct dsr-gue rejects inside tunnelled at tcp/192.0.2.7:80 tcp/10.0.0.1:30080 tcp/127.0.0.1:30080 -> n1=10.0.0.1*1
default/twice@here nat-destination rejects at tcp-tunnelled/192.0.2.7:80 tcp-tunnelled/0.0.0.0:30080 -> 10.244.1.5:8080*1
default/young nat rejects at tcp/10.96.0.2:80 -> 10.244.1.5:8080*1
frontend_taken Service default/twice: tcp 192.0.2.7:80 is not served for default/twice@load-balancer: it is default/twice@direct already: give one of them another address or port
frontend_taken Service default/young: tcp 192.0.2.1:80 is not served for it: Service default/old was there first: give one of them another address or port
`
	if diff := cmp.Diff(want, short(set.Services())+dump(nil, set.Faults())); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// TestDirectLacking: a port without endpoints is reported once for each way to it, not for its second level.
func TestDirectLacking(t *testing.T) {
	translator := direct()
	service, slices := objects(t, inExternal+slice+but(on1, isGone))
	var set translate.Set
	set.Put("default/web", service.CreationTimestamp.Time, translator.Service(service, slices))
	if got := fmt.Sprint(set.Lacking("default/web")); got != "[default/web default/web@direct]" {
		t.Errorf("services without endpoints are %s", got)
	}
}
