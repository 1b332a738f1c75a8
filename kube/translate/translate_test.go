package translate_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/translate"
)

var here = translate.Node{Name: "n1", Zone: "east", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}}

// objects reads a Service and its EndpointSlices, with --- between them.
func objects(t *testing.T, text string) (service *corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) {
	t.Helper()
	for i, part := range strings.Split(text, "\n---\n") {
		var into any
		if i == 0 {
			service = &corev1.Service{}
			service.Namespace, service.Name = "default", "web"
			into = service
		} else {
			slice := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4}
			slice.Name = fmt.Sprintf("web-%d", i)
			endpointSlices = append(endpointSlices, slice)
			into = slice
		}
		if err := yaml.UnmarshalStrict([]byte(part), into); err != nil {
			t.Fatalf("the test's own object %d: %v\n%s", i, err, part)
		}
	}
	return service, endpointSlices
}

// dump is a line for each service, frontend, backend and fault.
func dump(services []model.Service, faults []translate.Fault) string {
	var b strings.Builder
	for _, s := range services {
		fmt.Fprintf(&b, "%s %s", s.Name, s.Forwarding)
		if s.Policy.Rejects {
			b.WriteString(" rejects")
		}
		if s.Announce == model.AnnounceL2 {
			b.WriteString(" announce=l2")
		}
		if s.Policy.Inside {
			b.WriteString(" inside")
		}
		if s.AffinityTimeout > 0 {
			fmt.Fprintf(&b, " affinity=%s", s.AffinityTimeout)
			if s.Policy.Draws && s.Tracking == model.TrackingAlways {
				b.WriteString(" drawn")
			}
		}
		if len(s.AllowFrom) > 0 {
			fmt.Fprintf(&b, " allow=%v", s.AllowFrom)
		}
		if len(s.DenyFrom) > 0 {
			fmt.Fprintf(&b, " deny=%v", s.DenyFrom)
		}
		b.WriteString("\n")
		for _, f := range s.Frontends {
			fmt.Fprintf(&b, "  %s\n", f)
		}
		for _, x := range s.Backends {
			fmt.Fprintf(&b, "  -> %s weight %d (%s)\n", x.BackendAddress, x.Weight, x.Name)
		}
	}
	for _, f := range faults {
		fmt.Fprintf(&b, "%s %s\n", f.Code, f)
	}
	return b.String()
}

const (
	onePort = "spec: {type: ClusterIP, clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}"
	onePod  = "ports: [{name: '', port: 8080, protocol: TCP}]\nendpoints: [{addresses: [10.244.0.5], nodeName: n1, targetRef: {kind: Pod, name: a}}]"
	slice   = "\n---\nports: [{name: '', port: 8080, protocol: TCP}]\nendpoints:\n"
)

// with is a Service of one port with more in its spec.
func with(more string) string { return strings.Replace(onePort, "spec: {", "spec: {"+more+", ", 1) }

// rules are objects, and the dump of their translation; a rule each.
var rules = []struct{ name, objects, want string }{
	{"a cluster IP and a pod", onePort + "\n---\n" + onePod, `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (a)
`},
	{"no endpoint", onePort, `
default/web nat rejects
  tcp 10.96.0.10:80
`},
	{"only the older field has the cluster IP", "spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}", `
default/web nat rejects
  tcp 10.96.0.10:80
`},
	{"headless", "spec: {clusterIP: None, clusterIPs: [None], ports: [{port: 80}]}\n---\n" + onePod, ""},
	{"an external name", "spec: {type: ExternalName, externalName: example.org, ports: [{port: 80}]}", ""},
	{"no cluster IP yet", "spec: {ports: [{port: 80}]}", ""},
	{"another proxy's", "metadata: {labels: {service.kubernetes.io/service-proxy-name: other}}\n" + onePort, ""},
	{"another proxy's, that has no name", "metadata: {labels: {service.kubernetes.io/service-proxy-name: ''}}\n" + onePort, ""},
	{"headless by its label", "metadata: {labels: {service.kubernetes.io/headless: ''}}\n" + onePort, ""},
	{"several ports, by name, of two protocols", `
spec: {clusterIPs: [10.96.0.10], ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}, {name: metrics, port: 9153}]}
---
ports: [{name: dns, port: 5353, protocol: UDP}, {name: dns-tcp, port: 5353, protocol: TCP}]
endpoints: [{addresses: [10.244.0.5]}]`, `
default/web:dns nat rejects
  udp 10.96.0.10:53
  -> 10.244.0.5:5353 weight 1 (10.244.0.5:5353)
default/web:dns-tcp nat rejects
  tcp 10.96.0.10:53
  -> 10.244.0.5:5353 weight 1 (10.244.0.5:5353)
default/web:metrics nat rejects
  tcp 10.96.0.10:9153
`},
	{"a port's name with another protocol is another port", onePort + "\n---\nports: [{name: '', port: 8080, protocol: UDP}]\nendpoints: [{addresses: [10.244.0.5]}]", `
default/web nat rejects
  tcp 10.96.0.10:80
`},
	{"a named target port has another number in some pods", onePort + "\n---\n" + onePod + "\n---\nports: [{port: 9090}]\nendpoints: [{addresses: [10.244.1.5]}]", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (a)
  -> 10.244.1.5:9090 weight 1 (10.244.1.5:9090)
`},
	{"dual stack", "spec: {clusterIPs: [10.96.0.10, 'fd00:96::10'], ports: [{port: 80}]}\n---\n" + onePod + `
---
addressType: IPv6
ports: [{port: 8080}]
endpoints: [{addresses: ['fd00:244::5'], targetRef: {kind: Pod, name: a}}]`, `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp [fd00:96::10]:80
  -> 10.244.0.5:8080 weight 1 (a)
  -> [fd00:244::5]:8080 weight 1 (a (IPv6))
`},
	{"endpoints of a family that the Service does not have", onePort + "\n---\n" + onePod + "\n---\naddressType: IPv6\nports: [{port: 8080}]\nendpoints: [{addresses: ['fd00:244::5']}]", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (a)
`},
	{"endpoints that are names", onePort + "\n---\naddressType: FQDN\nports: [{port: 8080}]\nendpoints: [{addresses: [example.org]}]", `
default/web nat rejects
  tcp 10.96.0.10:80
`},
	{"a node port, of the Service's family", "spec: {type: NodePort, clusterIPs: [10.96.0.10], ports: [{port: 80, nodePort: 30080}]}\n---\n" + onePod, `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp 10.0.0.1:30080
  tcp 127.0.0.1:30080
  -> 10.244.0.5:8080 weight 1 (a)
`},
	{"external IPs, one of a wrong family, one that is none", with("externalIPs: [192.0.2.1, '2001:db8::1', 127.0.0.1]"), `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp 192.0.2.1:80
family_unserved Service default/web: external IP 2001:db8::1 is of a family that the Service does not have: give the Service this family in ipFamilies, or remove the address
object_invalid Service default/web: external IP "127.0.0.1" is no address that packets can be sent to: correct it
`},
	{"a load balancer's addresses, but for a proxy's and for names", strings.Replace(onePort, "ClusterIP,", "LoadBalancer, allocateLoadBalancerNodePorts: false,", 1) +
		"\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.7}, {ip: 192.0.2.8, ipMode: VIP}, {ip: 192.0.2.9, ipMode: Proxy}, {hostname: lb.example.org}]}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp 192.0.2.7:80
  tcp 192.0.2.8:80
`},
	{"a load balancer's addresses that are left from before", onePort + "\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.7}]}}", `
default/web nat rejects
  tcp 10.96.0.10:80
`},
	{"source ranges are for the load balancer's addresses alone", strings.Replace(onePort, "ClusterIP,", "LoadBalancer, externalIPs: [192.0.2.1], loadBalancerSourceRanges: [198.51.100.7/24, nobody],", 1) +
		"\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.7}]}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp 192.0.2.1:80
default/web@load-balancer nat rejects allow=[198.51.100.0/24]
  tcp 192.0.2.7:80
object_invalid Service default/web: source range "nobody" is no prefix; it lets no client in: correct it
`},
	{"source ranges that are all wrong let nobody in", strings.Replace("metadata: {annotations: {service.beta.kubernetes.io/load-balancer-source-ranges: everybody}}\n"+onePort, "ClusterIP,", "LoadBalancer,", 1) +
		"\nstatus: {loadBalancer: {ingress: [{ip: 192.0.2.7}]}}", `
default/web nat rejects
  tcp 10.96.0.10:80
default/web@load-balancer nat rejects allow=[0.0.0.0/32]
  tcp 192.0.2.7:80
object_invalid Service default/web: source range "everybody" is no prefix; it lets no client in: correct it
`},
	{"external traffic stays on the node, and clients in the cluster reach all", strings.Replace(with("externalTrafficPolicy: Local, externalIPs: [192.0.2.1]"), "ClusterIP,", "NodePort,", 1) + slice +
		"- {addresses: [10.244.0.5], nodeName: n1}\n- {addresses: [10.244.1.5], nodeName: n2}", `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp-inside 192.0.2.1:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
default/web@external nat-destination rejects inside
  tcp 192.0.2.1:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
`},
	{"internal traffic stays on the node, where there is nobody: others could, so it is not refused", with("internalTrafficPolicy: Local") + slice + "- {addresses: [10.244.1.5], nodeName: n2}", `
default/web nat-destination
  tcp 10.96.0.10:80
`},
	{"internal traffic stays on the node, and there is nobody anywhere", with("internalTrafficPolicy: Local") + slice + "- {addresses: [10.244.1.5], nodeName: n2, conditions: {ready: false}}", `
default/web nat-destination rejects
  tcp 10.96.0.10:80
`},
	{"an endpoint without conditions is ready, one that is not ready takes nothing new", onePort + slice +
		"- {addresses: [10.244.0.5]}\n- {addresses: [10.244.0.6], conditions: {ready: false}}\n- {addresses: [10.244.0.7], conditions: {ready: false, serving: true, terminating: true}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
  -> 10.244.0.6:8080 weight 0 (10.244.0.6:8080)
  -> 10.244.0.7:8080 weight 0 (10.244.0.7:8080)
`},
	{"endpoints that end serve while none is ready", onePort + slice +
		"- {addresses: [10.244.0.5], conditions: {ready: false, serving: false, terminating: true}}\n- {addresses: [10.244.0.7], conditions: {ready: false, serving: true, terminating: true}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 0 (10.244.0.5:8080)
  -> 10.244.0.7:8080 weight 1 (10.244.0.7:8080)
`},
	{"endpoints that end serve on this node while none is ready here", strings.Replace(with("externalTrafficPolicy: Local, internalTrafficPolicy: Local, externalIPs: [192.0.2.1]"), "ClusterIP,", "NodePort,", 1) + slice +
		"- {addresses: [10.244.1.5], nodeName: n2}\n- {addresses: [10.244.0.7], nodeName: n1, conditions: {ready: false, serving: true, terminating: true}}", `
default/web nat-destination rejects inside
  tcp 10.96.0.10:80
  tcp 192.0.2.1:80
  -> 10.244.0.7:8080 weight 1 (10.244.0.7:8080)
default/web@cluster nat rejects
  tcp-inside 192.0.2.1:80
  -> 10.244.0.7:8080 weight 0 (10.244.0.7:8080)
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
`},
	{"addresses of pods that are not ready are published as ready", with("publishNotReadyAddresses: true") + slice + "- {addresses: [10.244.0.5], conditions: {ready: true, serving: false, terminating: true}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
`},
	{"UDP leaves an endpoint that serves no more", "spec: {clusterIPs: [10.96.0.10], ports: [{port: 53, protocol: UDP}]}\n---\nports: [{port: 53, protocol: UDP}]\nendpoints:\n" +
		"- {addresses: [10.244.0.5]}\n- {addresses: [10.244.0.6], conditions: {ready: false}}\n- {addresses: [10.244.0.7], conditions: {ready: false, serving: true, terminating: true}}", `
default/web nat rejects
  udp 10.96.0.10:53
  -> 10.244.0.5:53 weight 1 (10.244.0.5:53)
  -> 10.244.0.7:53 weight 0 (10.244.0.7:53)
`},
	{"an endpoint in two slices counts once, as the better one", onePort + slice + "- {addresses: [10.244.0.5], conditions: {ready: false}}" + slice + "- {addresses: [10.244.0.5]}", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
`},
	{"hints name the zone", onePort + slice + "- {addresses: [10.244.0.5], hints: {forZones: [{name: east}]}}\n- {addresses: [10.244.1.5], hints: {forZones: [{name: west}]}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
  -> 10.244.1.5:8080 weight 0 (10.244.1.5:8080)
`},
	{"hints name the node, which is narrower", onePort + slice + "- {addresses: [10.244.0.5], hints: {forZones: [{name: east}], forNodes: [{name: n2}]}}\n- {addresses: [10.244.1.5], hints: {forZones: [{name: east}], forNodes: [{name: n1}]}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 0 (10.244.0.5:8080)
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
`},
	{"one endpoint has no hint: no hint counts", onePort + slice + "- {addresses: [10.244.0.5]}\n- {addresses: [10.244.1.5], hints: {forZones: [{name: east}]}}", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
  -> 10.244.1.5:8080 weight 1 (10.244.1.5:8080)
`},
	{"affinity", with("sessionAffinity: ClientIP"), `
default/web nat rejects affinity=3h0m0s drawn
  tcp 10.96.0.10:80
`},
	{"affinity of its own time", with("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}"), `
default/web nat rejects affinity=1m0s drawn
  tcp 10.96.0.10:80
`},
	{"affinity that is too long", with("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86400}}"), `
default/web nat rejects affinity=12h0m0s drawn
  tcp 10.96.0.10:80
affinity_shortened Service default/web: session affinity of 86400 s is kept for 43200 s after a client's last packet: give it at most 43200 seconds, or accept that an idle client may be placed anew
`},
	{"SCTP is refused by name, and other ports are served", "spec: {clusterIPs: [10.96.0.10], ports: [{name: s, port: 132, protocol: SCTP}, {name: t, port: 80}]}", `
default/web:t nat rejects
  tcp 10.96.0.10:80
sctp_refused Service default/web: port 132 is SCTP, which shunt does not balance: packets to it are not taken: use TCP or UDP, or clients that talk to the pods directly
`},
	{"a port for health that is none", with("healthCheckNodePort: 70000"), `
default/web nat rejects
  tcp 10.96.0.10:80
object_invalid Service default/web: healthCheckNodePort 70000 is out of range: give it a port from 1 to 65535
`},
	{"endpoints and slices that are wrong", onePort + slice + "- {addresses: [127.0.0.1]}\n- {addresses: ['fd00::5']}\n- {addresses: []}\n- {addresses: [10.244.0.5]}\n---\nports: [{port: 0}]\nendpoints: [{addresses: [10.244.0.6]}]\n---\nports: [{}]", `
default/web nat rejects
  tcp 10.96.0.10:80
  -> 10.244.0.5:8080 weight 1 (10.244.0.5:8080)
object_invalid Service default/web: EndpointSlice web-1 has the endpoint "127.0.0.1", which is no IPv4 address that packets can be sent to: correct it
object_invalid Service default/web: EndpointSlice web-1 has the endpoint "fd00::5", which is no IPv4 address that packets can be sent to: correct it
object_invalid Service default/web: EndpointSlice web-2 has no port number for "", and its endpoints are not used: give it a port from 1 to 65535
object_invalid Service default/web: EndpointSlice web-3 has no port number for "", and its endpoints are not used: give it a port from 1 to 65535
`},
	{"a Service that is wrong", "spec: {clusterIPs: ['::ffff:10.0.0.1', 10.96.0.10], sessionAffinity: Other, ports: [{port: 0}, {port: 1, protocol: IGMP}]}", `
object_invalid Service default/web: cluster IP "::ffff:10.0.0.1" is no address that packets can be sent to: make the Service anew
object_invalid Service default/web: session affinity "Other" is not known, and flows are placed one by one: use None or ClientIP
object_invalid Service default/web: port 0 is out of range: give it a port from 1 to 65535
object_invalid Service default/web: protocol "IGMP" of port 1 is not known: use TCP or UDP
`},
}

func TestService(t *testing.T) {
	for _, c := range rules {
		t.Run(c.name, func(t *testing.T) {
			service, slices := objects(t, strings.TrimPrefix(c.objects, "\n"))
			got := (&translate.Translator{Node: here}).Service(service, slices)
			if diff := cmp.Diff(strings.TrimPrefix(c.want, "\n"), dump(got.Services, got.Faults)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// TestLongNames: names that the data plane has no room for keep their beginning, and differ.
func TestLongNames(t *testing.T) {
	service, slices := objects(t, onePort+"\n---\n"+onePod)
	long := strings.Repeat("a", 63)
	service.Namespace, service.Name, service.Spec.Ports[0].Name = "default", long[:55], ""
	name := func() string {
		t.Helper()
		got := (&translate.Translator{}).Service(service, slices)
		if len(got.Services) != 1 || len(got.Services[0].Name) != 63 {
			t.Fatalf("got %+v", got.Services)
		}
		return got.Services[0].Name
	}
	if got := name(); got != "default/"+long[:55] {
		t.Errorf("a name of 63 bytes is %q", got)
	}
	service.Namespace, service.Name = long, long
	service.Spec.Ports[0].Name = "a-port-of-15-ch"
	slices[0].Ports[0].Name = &service.Spec.Ports[0].Name
	one := name()
	service.Spec.Ports[0].Name = "b-port-of-15-ch"
	if two := name(); one == two || one[:53] != two[:53] || !strings.HasPrefix(one, long[:52]+"~") {
		t.Errorf("names are %q and %q", one, two)
	}
}

func TestProxyName(t *testing.T) {
	theirs := translate.Translator{ProxyName: "other"}
	labelled, _ := objects(t, "metadata: {labels: {service.kubernetes.io/service-proxy-name: other}}\n"+onePort)
	plain, _ := objects(t, onePort)
	if len(theirs.Service(labelled, nil).Services) != 1 || len(theirs.Service(plain, nil).Services) != 0 {
		t.Error("a translator with a proxy name has others' Services, or not its own")
	}
}

func TestNode(t *testing.T) {
	node := &corev1.Node{}
	node.Name, node.Labels = "n1", map[string]string{"topology.kubernetes.io/zone": "east"}
	for _, a := range []string{"10.0.0.1", "fd00::1", "10.0.0.1", "::1"} {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: "n1"})
	got, faults := translate.NodeOf(node)
	if diff := cmp.Diff(here, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	if want := "[Node n1: InternalIP \"::1\" is no address that packets can be sent to: correct the node's status]"; fmt.Sprint(faults) != want {
		t.Errorf("faults are %v", faults)
	}
	lone := translate.Translator{Node: translate.Node{Name: "n2"}}
	service, _ := objects(t, "spec: {type: NodePort, clusterIPs: [10.96.0.10], ports: [{name: a, port: 80, nodePort: 30080}, {name: b, port: 81, nodePort: 30081}]}")
	if out := dump(nil, lone.Service(service, nil).Faults); strings.Count(out, "node_address_missing") != 1 || !strings.Contains(out, "30080") {
		t.Errorf("a node without addresses: %s", out)
	}
}

func TestSet(t *testing.T) {
	early := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	wants := func(name string, addresses ...string) translate.Translation {
		s := model.Service{Name: name}
		for _, a := range addresses {
			s.Frontends = append(s.Frontends, model.Frontend{Address: netip.MustParseAddr(a), Protocol: model.TCP})
		}
		return translate.Translation{Services: []model.Service{s}}
	}
	var set translate.Set
	check := func(when, want string) {
		t.Helper()
		if diff := cmp.Diff(strings.TrimPrefix(want, "\n"), dump(set.Services(), set.Faults())); diff != "" {
			t.Errorf("%s: -want +got\n%s", when, diff)
		}
	}
	check("empty", "")
	set.Put("x/young", early.Add(time.Hour), wants("x/young", "10.0.0.1", "10.0.0.2"))
	set.Put("x/old", early, wants("x/old", "10.0.0.1"))
	set.Put("x/as-old", early, wants("x/as-old", "10.0.0.1"))
	check("three want one frontend", `
x/as-old 
  tcp 10.0.0.1:0
x/young 
  tcp 10.0.0.2:0
frontend_taken Service x/old: tcp 10.0.0.1:0 is not served for it: Service x/as-old was there first: give one of them another address or port
frontend_taken Service x/young: tcp 10.0.0.1:0 is not served for it: Service x/as-old was there first: give one of them another address or port
`)
	if set.Put("x/old", early, wants("x/old", "10.0.0.1")) || set.Remove("x/unknown") {
		t.Error("what is as before counts as a change")
	}
	if !set.Remove("x/as-old") {
		t.Error("a removal does not count as a change")
	}
	check("the first goes", `
x/old 
  tcp 10.0.0.1:0
x/young 
  tcp 10.0.0.2:0
frontend_taken Service x/young: tcp 10.0.0.1:0 is not served for it: Service x/old was there first: give one of them another address or port
`)
	set.Refuse("x/old", "the file has it")
	check("one is refused", `
x/young 
  tcp 10.0.0.2:0
service_refused Service x/old: x/old is not served: the file has it: change one of the two
frontend_taken Service x/young: tcp 10.0.0.1:0 is not served for it: Service x/old was there first: give one of them another address or port
`)
	more := wants("x/old", "10.0.0.1")
	more.Services[0].Backends = []model.Backend{{Weight: 1}}
	if set.Put("x/old", early, more); len(set.Services()) != 1 || !set.Refused() {
		t.Error("what is refused is back because of another endpoint")
	}
	if set.Readmit(); len(set.Services()) != 2 || set.Refused() {
		t.Error("what was refused is not back")
	}
	set.Refuse("x/old", "the file has it")
	set.Put("x/old", early, wants("x/old", "10.0.0.3"))
	check("it changes", `
x/old 
  tcp 10.0.0.3:0
x/young 
  tcp 10.0.0.1:0
  tcp 10.0.0.2:0
`)
	twice := wants("x/old", "10.0.0.4")
	twice.Services = append(twice.Services, wants("x/old@external", "10.0.0.4").Services...)
	set.Put("x/old", early, twice)
	set.Remove("x/young")
	check("one wants the same twice", `
x/old 
  tcp 10.0.0.4:0
frontend_taken Service x/old: tcp 10.0.0.4:0 is not served for x/old@external: it is x/old already: give one of them another address or port
`)
}

// TestHealth: pods on this node that are ready count, each once, with any number of ports and families.
func TestHealth(t *testing.T) {
	const spec = "spec: {clusterIPs: [10.96.0.10, 'fd00:96::10'], healthCheckNodePort: 31000, ports: [{port: 80}, {name: x, port: 81}]}"
	const ports = "\n---\nports: [{name: '', port: 8080}, {name: x, port: 8081}]\nendpoints:\n"
	here4, here6 := "- {addresses: [10.244.0.5], nodeName: n1}\n", "- {addresses: ['fd00:244::5'], nodeName: n1}\n"
	for _, c := range []struct {
		name, objects string
		want          translate.Health
	}{
		{"no port", onePort + slice + here4, translate.Health{}},
		{"nobody", spec, translate.Health{Port: 31000}},
		{"one of two ports and families, and others", spec + ports + here4 + "- {addresses: [10.244.0.6], nodeName: n2}\n- {addresses: [10.244.0.7], nodeName: n1, conditions: {ready: false}}\n" +
			"- {addresses: [10.244.0.8], nodeName: n1, conditions: {ready: false, serving: true, terminating: true}}\n---\naddressType: IPv6" + strings.TrimPrefix(ports, "\n---") + here6, translate.Health{Port: 31000, Local: 1}},
		{"two", spec + ports + here4 + "- {addresses: [10.244.0.6], nodeName: n1}\n", translate.Health{Port: 31000, Local: 2}},
	} {
		service, endpointSlices := objects(t, c.objects)
		translator := translate.Translator{Node: here}
		got := translator.Service(service, endpointSlices)
		if got.Health != c.want || len(got.Faults) > 0 {
			t.Errorf("%s: %+v, want %+v; %v", c.name, got.Health, c.want, got.Faults)
		}
		var set translate.Set
		before := translate.Health{Port: 31000, Local: 7}
		set.Put("default/web", time.Time{}, translate.Translation{Services: got.Services, Health: before})
		set.HealthSettled()
		if changed := set.Put("default/web", time.Time{}, got); !changed || !set.HealthPending() {
			t.Errorf("%s: the set does not see the change from %+v", c.name, before)
		}
		set.HealthSettled()
		if set.Put("default/web", time.Time{}, got); set.HealthPending() {
			t.Errorf("%s: the set sees a change where there is none", c.name)
		}
		if h, is := set.Health()["default/web"]; h != c.want || is != (c.want.Port != 0) {
			t.Errorf("%s: the set has %+v", c.name, h)
		}
	}
}

// TestMoving: if they are told to, all services leave connections that began before to the host, and
// otherwise none does.
func TestMoving(t *testing.T) {
	service, endpointSlices := objects(t, strings.Replace(with("externalTrafficPolicy: Local, externalIPs: [192.0.2.1]"), "ClusterIP,", "NodePort,", 1)+"\n---\n"+onePod)
	for _, moving := range []bool{false, true} {
		translator := translate.Translator{Node: here, Moving: moving}
		got := translator.Service(service, endpointSlices).Services
		if len(got) != 2 {
			t.Fatalf("%+v", got)
		}
		for _, s := range got {
			if s.Policy.PassesBegun != moving {
				t.Errorf("moving %t: %s has %+v", moving, s.Name, s.Policy)
			}
		}
	}
}
