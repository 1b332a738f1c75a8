package translate

import (
	"bytes"
	"crypto/sha256"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// elect finds the node that should announce the Service's addresses, and the node that stands by for it. Services that
// share an address have one node, because an address can be at only one.
func (s *translation) elect(endpointSlices []*discoveryv1.EndpointSlice) {
	if !s.t.Announce || !s.t.Balances(s.service) {
		return
	}
	if s.t.Agents == nil {
		s.part = model.AnnounceL2
		return
	}
	own := s.ingress()
	if len(own) == 0 {
		return
	}
	addresses := slices.Clone(own)
	takes := []map[string]bool{s.taking(endpointSlices)}
	if s.t.Beside != nil {
		for _, n := range s.t.Beside(s.service) {
			if !s.t.Balances(n.Service) {
				continue
			}
			other := &translation{t: s.t, service: n.Service}
			other.families()
			addresses = append(addresses, other.ingress()...)
			takes = append(takes, other.taking(n.Slices))
		}
	}
	order := ranked(slices.MinFunc(addresses, netip.Addr.Compare), s.t.candidates(once(addresses), takes))
	if len(order) > 0 {
		s.announcer = order[0]
	}
	for _, a := range once(own) {
		if len(order) > 0 && !s.t.reaches(order[0], a) {
			s.faults.add(NetworkUnreached, s.object, "give a node that serves the Service an interface in this network, and list it in the node's file",
				"its address %s is announced by node %s, which has no interface in the address's network: hosts there may not find it", a, order[0])
		}
	}
	switch slices.Index(order, s.t.Node.Name) {
	case 0:
		s.part = model.AnnounceL2
	case 1:
		s.part = model.AnnounceStandby
	}
}

// reaches reports whether a node has an interface in an address's network. Only hosts there hear the node's ARP and neighbour advertisements.
func (t *Translator) reaches(node string, address netip.Addr) bool {
	networks, known := t.Networks[node]
	return !known || slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(address) })
}

// candidates returns the nodes that may announce these addresses: the nodes that serve a Service and are in the
// networks of all addresses. If there is none, it returns the nodes that are in the network of at least one address. If
// there is none of these either, it returns all nodes that serve, because a route that the nodes' networks do not show
// may lead to the addresses.
func (t *Translator) candidates(addresses []netip.Addr, takes []map[string]bool) []string {
	reached := map[string]int{}
	for _, node := range t.Agents {
		for _, a := range addresses {
			if t.reaches(node, a) {
				reached[node]++
			}
		}
	}
	for _, enough := range []int{len(addresses), 1} {
		near := slices.DeleteFunc(slices.Clone(t.Agents), func(node string) bool { return reached[node] < enough })
		if nodes := serving(near, takes); len(nodes) > 0 {
			return nodes
		}
	}
	return serving(t.Agents, takes)
}

// serving returns the agents' nodes that serve all of these Services; each Service is given by the nodes that serve it. If no node serves all of them, it returns the nodes
// that serve at least one: the other Services then have no answer from the chosen node.
func serving(agents []string, takes []map[string]bool) (nodes []string) {
	served := map[string]int{}
	for _, node := range agents {
		for _, of := range takes {
			if of == nil || of[node] {
				served[node]++
			}
		}
	}
	for _, enough := range []int{len(takes), 1} {
		for _, node := range agents {
			if served[node] >= enough {
				nodes = append(nodes, node)
			}
		}
		if len(nodes) > 0 {
			break
		}
	}
	return nodes
}

// taking returns the nodes that serve the Service to clients outside: all nodes (nil), or with an external policy Local the nodes with an endpoint that takes
// connections, of any port: a Service's ports share one address.
func (s *translation) taking(endpointSlices []*discoveryv1.EndpointSlice) map[string]bool {
	if s.service.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return nil
	}
	nodes := map[string]bool{}
	for i := range s.service.Spec.Ports {
		for _, e := range s.endpoints(&s.service.Spec.Ports[i], endpointSlices) {
			if e.standing > gone {
				nodes[e.node] = true
			}
		}
	}
	return nodes
}

// ranked returns the nodes for an address, in the order of a hash of both; the first one announces the address. So all agents agree without talking, and addresses are
// spread over nodes. Only the addresses of a node that goes move, to the second node, which has stood by; and a new node gets only its own addresses. MetalLB elects
// in this way, too.
func ranked(address netip.Addr, nodes []string) []string {
	sums := map[string][sha256.Size]byte{}
	for _, node := range nodes {
		sums[node] = sha256.Sum256([]byte(node + "\x00" + address.String()))
	}
	return slices.SortedFunc(slices.Values(nodes), func(a, b string) int {
		x, y := sums[a], sums[b]
		return bytes.Compare(x[:], y[:])
	})
}

// announce records the addresses of a port that should be announced. Another port may have the same addresses.
func (s *translation) announce(service *model.Service) {
	here := service.Announce == model.AnnounceL2
	for _, f := range service.Frontends {
		at := slices.IndexFunc(s.announced, func(a Announcement) bool { return a.Address == f.Address })
		if at < 0 {
			at = len(s.announced)
			s.announced = append(s.announced, Announcement{Address: f.Address, Node: s.announcer})
		}
		s.announced[at].Here = s.announced[at].Here || here
	}
}
