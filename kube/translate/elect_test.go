package translate_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/translate"
)

// elected is the node that announces each address of a Service, as all agents see it: they have to agree, and that node alone may announce.
func elected(t *testing.T, text string, agents ...string) map[string]string {
	t.Helper()
	service, endpointSlices := objects(t, text)
	found := map[string]string{}
	for i, own := range agents {
		node := here
		node.Name = own
		got := (&translate.Translator{Node: node, Announce: true, Agents: agents}).Service(service, endpointSlices)
		announces := false
		for _, s := range got.Services {
			announces = announces || s.Announce == model.AnnounceL2
		}
		for _, a := range got.Announced {
			if before, known := found[a.Address.String()]; i > 0 && (!known || before != a.Node) {
				t.Errorf("%s is announced by %q, says %s, and by %q, says %s", a.Address, a.Node, own, before, agents[0])
			}
			if a.Here != (a.Node == own) || a.Here && !announces {
				t.Errorf("%s is announced by %q, and by %s: %t", a.Address, a.Node, own, a.Here)
			}
			found[a.Address.String()] = a.Node
		}
		if len(got.Faults) > 0 {
			t.Errorf("the faults are %v", got.Faults)
		}
	}
	return found
}

// balanced is a Service of type LoadBalancer with more in its spec, and these addresses.
func balanced(more string, addresses ...string) string {
	return strings.Replace(onePort, "type: ClusterIP", "type: LoadBalancer"+more, 1) + "\nstatus: {loadBalancer: {ingress: [{ip: '" + strings.Join(addresses, "'}, {ip: '") + "'}]}}"
}

// TestElectionSpreads: each of three nodes announces about a third of many addresses. When one goes, its addresses alone move, and to both others.
func TestElectionSpreads(t *testing.T) {
	const addresses = 300
	before, moved := map[string]int{}, map[string]int{}
	for i := range addresses {
		address := fmt.Sprintf("198.51.%d.%d", 100+i/200, 1+i%200)
		was, is := elected(t, balanced("", address), "n1", "n2", "n3")[address], elected(t, balanced("", address), "n1", "n3")[address]
		before[was]++
		switch {
		case was == "n2":
			moved[is]++
		case was != is:
			t.Errorf("%s moves from %s to %s, and n2 has gone", address, was, is)
		}
	}
	for _, node := range []string{"n1", "n2", "n3"} { // the hash is the same everywhere, so this is no matter of luck
		if before[node] < addresses/4 {
			t.Errorf("%s announces %d of %d addresses: %v", node, before[node], addresses, before)
		}
	}
	if moved["n1"] < before["n2"]/4 || moved["n3"] < before["n2"]/4 {
		t.Errorf("those of n2 move so: %v", moved)
	}
}

// TestStandby: one node stands by for an address, and announces it when the first has gone; so nothing moves twice.
func TestStandby(t *testing.T) {
	const local = ", externalTrafficPolicy: Local"
	parts := func(text string, agents ...string) map[model.Announce]string {
		t.Helper()
		service, endpointSlices := objects(t, text)
		found := map[model.Announce]string{}
		for _, own := range agents {
			node := here
			node.Name = own
			for _, s := range (&translate.Translator{Node: node, Announce: true, Agents: agents}).Service(service, endpointSlices).Services {
				if s.Announce == model.AnnounceNone {
					continue
				}
				if before := found[s.Announce]; before != "" {
					t.Errorf("%s and %s have the part %s", before, own, s.Announce)
				}
				found[s.Announce] = own
			}
		}
		return found
	}
	on := func(nodes ...string) (text string) {
		text = balanced(local, "192.0.2.7") + slice
		for i, node := range nodes {
			text += fmt.Sprintf("- {addresses: [10.244.1.%d], nodeName: %s}\n", 5+i, node)
		}
		return text
	}
	seconds := map[string]bool{}
	for i := range 50 {
		text := balanced("", fmt.Sprintf("198.51.100.%d", 1+i))
		all := parts(text, "n1", "n2", "n3")
		first, second := all[model.AnnounceL2], all[model.AnnounceStandby]
		left := parts(text, slices.DeleteFunc([]string{"n1", "n2", "n3"}, func(node string) bool { return node == first })...)
		if first == "" || second == "" || left[model.AnnounceL2] != second {
			t.Errorf("%v, and without %s, %v", all, first, left)
		}
		seconds[first+second] = true
	}
	if len(seconds) != 6 { // the hash is the same everywhere, so this is no matter of luck
		t.Errorf("of three nodes these announce and stand by: %v", seconds)
	}
	if found := parts(balanced("", "192.0.2.7"), "n1"); found[model.AnnounceL2] != "n1" || len(found) != 1 {
		t.Errorf("a node alone: %v", found)
	}
	if found := parts(on("n2", "n3"), "n1", "n2", "n3"); len(found) != 2 || found[model.AnnounceL2] == "n1" || found[model.AnnounceStandby] == "n1" {
		t.Errorf("with endpoints at n2 and n3: %v", found)
	}
	if found := parts(on("n2"), "n1", "n2", "n3"); len(found) != 1 || found[model.AnnounceL2] != "n2" {
		t.Errorf("with an endpoint at n2: %v", found)
	}
}

// TestElectionOfLocal: with a local policy the node is one with an endpoint that takes connections, of any port, and all addresses of a Service
// are announced by one node.
func TestElectionOfLocal(t *testing.T) {
	const local = ", externalTrafficPolicy: Local"
	on := func(nodes ...string) (text string) {
		text = slice
		for i, node := range nodes {
			name, condition, _ := strings.Cut(node, " ")
			text += fmt.Sprintf("- {addresses: [10.244.1.%d], nodeName: %s, conditions: {%s}}\n", 5+i, name, condition)
		}
		return text
	}
	const second = "\n---\nports: [{name: b, port: 8081, protocol: TCP}]\nendpoints: [{addresses: [10.244.1.6], nodeName: n3}]"
	ports := strings.Replace(balanced(local, "192.0.2.7"), "ports: [{port: 80}]", "ports: [{name: a, port: 80}, {name: b, port: 81}]", 1)
	many := ports + "\n---\nports: [{name: a, port: 8080, protocol: TCP}]\nendpoints: [{addresses: [10.244.1.5], nodeName: n2}]" + second
	both := strings.Replace(balanced("", "192.0.2.7", "2001:db8::7"), "clusterIPs: [10.96.0.10]", "clusterIPs: [10.96.0.10, 'fd00::10']", 1)
	for _, c := range []struct {
		name, objects string
		want          string // the nodes that may be it, by their last figures
		addresses     int
	}{
		{"on one", balanced(local, "192.0.2.7") + on("n2"), "2", 1},
		{"on two", balanced(local, "192.0.2.7") + on("n2", "n3"), "23", 1},
		{"on none", balanced(local, "192.0.2.7"), "", 1},
		{"one is not ready", balanced(local, "192.0.2.7") + on("n1 ready: false", "n3"), "3", 1},
		{"one ends, and still serves", balanced(local, "192.0.2.7") + on("n1 ready: false, serving: true, terminating: true"), "1", 1},
		{"a node without an agent", balanced(local, "192.0.2.7") + on("n4"), "", 1},
		{"every node, with the other policy", balanced("", "192.0.2.7") + on("n4"), "123", 1},
		{"the second of two ports has one", ports + second, "3", 1},
		{"two addresses", both, "123", 2},
	} {
		found := elected(t, c.objects, "n1", "n2", "n3")
		if len(found) != c.addresses {
			t.Errorf("%s: the addresses are %v", c.name, found)
		}
		one := found["192.0.2.7"]
		for address, node := range found {
			if node != one || node == "" && c.want != "" || node != "" && !strings.Contains(c.want, strings.TrimPrefix(node, "n")) {
				t.Errorf("%s: %s is announced by %q, want one of %q", c.name, address, node, c.want)
			}
		}
	}
	// Each port is on another node: one of the two has the address.
	service, endpointSlices := objects(t, many)
	nodes := map[string]bool{}
	for _, own := range []string{"n2", "n3"} {
		node := here
		node.Name = own
		got := (&translate.Translator{Node: node, Announce: true, Agents: []string{"n1", "n2", "n3"}}).Service(service, endpointSlices)
		for _, a := range got.Announced {
			nodes[a.Node] = true
		}
	}
	if len(nodes) != 1 || !nodes["n2"] && !nodes["n3"] {
		t.Errorf("the address is announced by %v", nodes)
	}
}

// TestElectionOfSharedAddresses: Services that share an address have one node, which serves all of them if there is
// one, and otherwise one of them; so do Services that share none with each other, but each one with a third.
func TestElectionOfSharedAddresses(t *testing.T) {
	const local = ", externalTrafficPolicy: Local"
	on := func(more string, addresses []string, nodes ...string) (n translate.Neighbour) {
		text := balanced(more, addresses...) + slice
		for i, node := range nodes {
			text += fmt.Sprintf("- {addresses: [10.244.1.%d], nodeName: %s}\n", 5+i, node)
		}
		n.Service, n.Slices = objects(t, text)
		return n
	}
	one, two, three := []string{"192.0.2.7"}, []string{"192.0.2.7", "192.0.2.8"}, []string{"192.0.2.8"}
	other := "other.example/class"
	stranger := on(local, one, "n3")
	stranger.Service.Spec.LoadBalancerClass = &other
	for _, c := range []struct {
		name     string
		services []translate.Neighbour
		want     string // the nodes that may be it, by their last figures
	}{
		{"one node serves both", []translate.Neighbour{on(local, one, "n1", "n2"), on(local, one, "n2", "n3")}, "2"},
		{"no node serves both", []translate.Neighbour{on(local, one, "n1"), on(local, one, "n3")}, "13"},
		{"one is served nowhere", []translate.Neighbour{on(local, one, "n1"), on(local, one)}, "1"},
		{"none is served", []translate.Neighbour{on(local, one), on(local, one)}, ""},
		{"one is served by all", []translate.Neighbour{on(local, one, "n3"), on("", one)}, "3"},
		{"by another's address", []translate.Neighbour{on(local, one, "n1", "n2", "n3"), on(local, two, "n2", "n3"), on(local, three, "n1", "n2")}, "2"},
		{"another load balancer's", []translate.Neighbour{on(local, one, "n1"), stranger}, "1"},
	} {
		nodes := map[string]bool{}
		for i, s := range c.services {
			if s.Service == stranger.Service {
				continue
			}
			beside := func(*corev1.Service) []translate.Neighbour { return slices.Concat(c.services[:i], c.services[i+1:]) }
			got := (&translate.Translator{Node: here, Announce: true, Agents: []string{"n1", "n2", "n3"}, Beside: beside}).Service(s.Service, s.Slices)
			for _, a := range got.Announced {
				nodes[a.Node] = true
			}
		}
		if len(nodes) != 1 {
			t.Errorf("%s: the addresses are announced by %v", c.name, nodes)
		}
		for node := range nodes {
			if (node == "") != (c.want == "") || node != "" && !strings.Contains(c.want, strings.TrimPrefix(node, "n")) {
				t.Errorf("%s: it is announced by %q, want one of %q", c.name, node, c.want)
			}
		}
	}
}

// TestElectionByNetwork: an address is announced by a node that is in its network and serves it, even if the hash has
// another one first; if there is none, by a node that serves it, with a fault that says so. A node whose networks
// nobody knows counts as a node in all.
func TestElectionByNetwork(t *testing.T) {
	const local = ", externalTrafficPolicy: Local"
	on := func(more string, nodes ...string) (text string) {
		text = balanced(more, "192.0.2.7") + slice
		for i, node := range nodes {
			text += fmt.Sprintf("- {addresses: [10.244.1.%d], nodeName: %s}\n", 5+i, node)
		}
		return text
	}
	in := func(text string) map[string][]netip.Prefix {
		all := map[string][]netip.Prefix{}
		for part := range strings.SplitSeq(text, "; ") {
			node, networks, _ := strings.Cut(part, " ")
			all[node] = nil
			for _, n := range strings.Fields(networks) {
				all[node] = append(all[node], netip.MustParsePrefix(n))
			}
		}
		return all
	}
	both := strings.Replace(balanced("", "192.0.2.7", "2001:db8::7"), "clusterIPs: [10.96.0.10]", "clusterIPs: [10.96.0.10, 'fd00::10']", 1)
	for _, c := range []struct {
		name, objects, networks string
		want                    string // the nodes that may be it, by their last figures
		faults                  string // addresses
	}{
		{"one is in it", on(""), "n1 198.51.100.0/24; n2 192.0.2.0/24; n3 2001:db8::/64", "2", ""},
		{"another is in it", on(""), "n1 198.51.100.0/24; n3 198.51.100.0/24 192.0.2.0/25; n2", "3", ""},
		{"two are not", on(""), "n1 198.51.100.0/24; n2 198.51.100.0/24", "3", ""},
		{"none is", on(""), "n1 198.51.100.0/24; n2 192.0.3.0/24; n3", "123", "192.0.2.7"},
		{"one that serves", on(local, "n1", "n2"), "n1 198.51.100.0/24; n3 192.0.2.0/24", "2", ""},
		{"none of those that serve", on(local, "n1"), "n1 198.51.100.0/24; n3 192.0.2.0/24", "1", "192.0.2.7"},
		{"none serves", on(local), "n1 198.51.100.0/24; n3 192.0.2.0/24", "", ""},
		{"both addresses", both, "n1 192.0.2.0/24; n2 192.0.2.0/24 2001:db8::/64; n3 2001:db8::/64", "2", ""},
		{"one of two", both, "n1 192.0.2.0/24; n2; n3 192.0.3.0/24", "1", "2001:db8::7"},
	} {
		service, endpointSlices := objects(t, c.objects)
		one, standby := "", ""
		for i, own := range []string{"n1", "n2", "n3"} {
			node := here
			node.Name = own
			got := (&translate.Translator{Node: node, Announce: true, Agents: []string{"n1", "n2", "n3"}, Networks: in(c.networks)}).Service(service, endpointSlices)
			var faults []string
			for _, f := range got.Faults {
				faults = append(faults, strings.Fields(f.Text)[2])
				if f.Code != translate.NetworkUnreached || !strings.Contains(f.Text, "node "+got.Announced[0].Node) {
					t.Errorf("%s: %v", c.name, f)
				}
			}
			if strings.Join(faults, " ") != c.faults {
				t.Errorf("%s: faults of the addresses %q, want %q", c.name, faults, c.faults)
			}
			for _, a := range got.Announced {
				if i == 0 {
					one = a.Node
				}
				if a.Node != one || one == "" && c.want != "" || one != "" && !strings.Contains(c.want, strings.TrimPrefix(one, "n")) {
					t.Errorf("%s: %s is announced by %q, want one of %q", c.name, a.Address, a.Node, c.want)
				}
			}
			if slices.ContainsFunc(got.Services, func(s model.Service) bool { return s.Announce == model.AnnounceStandby }) {
				standby = own
			}
		}
		if len(c.want) == 1 && standby != "" {
			t.Errorf("%s: %s stands by, and only %s may announce it", c.name, standby, one)
		}
	}
}

// TestExplainedElection: an explanation has the node that the agents elect, for each of a Service's ports, even if the
// endpoints of one port are on other nodes than the endpoints of another, and if another Service has the address, too.
func TestExplainedElection(t *testing.T) {
	const local = ", externalTrafficPolicy: Local"
	two := strings.Replace(balanced(local, "192.0.2.7"), "ports: [", "ports: [{name: dns, port: 53, protocol: UDP, targetPort: 5353}, ", 1)
	service, endpointSlices := objects(t, two+slice+"- {addresses: [10.244.1.5], nodeName: n1}\n"+
		strings.Replace(slice, "{name: '', port: 8080, protocol: TCP}", "{name: dns, port: 5353, protocol: UDP}", 1)+"- {addresses: [10.244.1.6], nodeName: n2}\n")
	other := translate.Neighbour{}
	other.Service, other.Slices = objects(t, balanced(local, "192.0.2.7")+slice+"- {addresses: [10.244.1.7], nodeName: n2}\n")
	beside := func(*corev1.Service) []translate.Neighbour { return []translate.Neighbour{other} }
	for _, c := range []struct {
		name   string
		beside func(*corev1.Service) []translate.Neighbour
		want   string // the nodes that may be it
	}{{"alone", nil, "n1 n2"}, {"beside another", beside, "n2"}} {
		nodes := map[string]bool{}
		for _, own := range []string{"n1", "n2", "n3"} {
			node := here
			node.Name = own
			translator := &translate.Translator{Node: node, Announce: true, Agents: []string{"n1", "n2", "n3"}, Beside: c.beside}
			got := translator.Explain(service, endpointSlices)
			if len(got.Ports) != 2 || len(got.Announced) != 1 || len(got.Faults) != 0 {
				t.Fatalf("%s: explained are %d ports, %v, and %v", c.name, len(got.Ports), got.Announced, got.Faults)
			}
			nodes[got.Announced[0].Node] = true
			announces := false // a port announces only where it has an endpoint, too
			for _, p := range got.Ports {
				announces = announces || slices.ContainsFunc(p.Variants, func(v translate.VariantExplanation) bool { return v.Announce == model.AnnounceL2 })
			}
			if announces != (own == got.Announced[0].Node) {
				t.Errorf("%s: a port announces on %s: %v, and the node that is elected is %s", c.name, own, announces, got.Announced[0].Node)
			}
		}
		for node := range nodes {
			if len(nodes) != 1 || !strings.Contains(c.want, node) || node == "" {
				t.Errorf("%s: elected are %v, want one of %s", c.name, nodes, c.want)
			}
		}
	}
}
