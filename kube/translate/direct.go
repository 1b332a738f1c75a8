package translate

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Direct return between nodes serves clients outside at ports with an external traffic policy Cluster. The node that
// gets a packet sends it, unchanged, through a tunnel to a node with endpoints. That node translates it and answers the
// client itself, so the pod sees the client's address. A port has services of two levels:
//
//	client ─► node A, NAME@direct: backends are nodes ──┬─► tunnel ─► node B, NAME@here: backends are B's endpoints ─► pod ─► client, past A
//	                                                    └─► the chosen node is A: its own NAME@here ─► pod ─► client
//
// Another part of the name stays in both levels: NAME@load-balancer and NAME@load-balancer-here, NAME@external-ips and
// NAME@external-ips-here. The first level for IPv6 has -ipv6 at its end, because it has other endpoints and so other
// weights: the frontends of one service would share backends of the other family.
//
// A change between NAT and direct return ends a port's connections, so a port changes only for reasons that last:
//
//   - A port stays with NAT if one of its endpoints, ready or not, is on a node whose agent takes no packets out of these tunnels: there is none, it is of an earlier version,
//     or it uses other tunnels. So an endpoint whose readiness changes does not change the port.
//   - It stays with NAT if an endpoint has its node's own address (hostNetwork), because XDP takes no packets for a backend on this machine.
//   - It stays with NAT while the nodes with endpoints have no addresses of one family, and while connections of kube-proxy are left to the host: packets in the
//     middle of a connection cannot be told from such packets of a flow that another node has begun.
//   - An agent that is replaced, or away for a while, changes nothing: the tunnels are opened by its node's kernel.
//   - A node whose agent is away for long, or has not been ready yet, gets no new connections while endpoints on other nodes take them, like a node that a load
//     balancer in front has found ill. Only if there is no other endpoint, the port goes back to NAT.
//
// The second level does not depend on any of these rules but the one for hostNetwork: other nodes may know more or less
// than this one, and this node opens what they send.

// level is the first level of a port.
type level struct {
	nodes map[bool][]model.Backend      // by whether the frontends are IPv4
	takes map[model.BackendAddress]bool // the endpoints for whose sake a node takes new connections
}

// firstLevel returns the nodes with endpoints of a port, or the reason why the port stays with NAT.
func (t *Translator) firstLevel(endpoints []endpoint, protocol model.Protocol) (l level, why string) {
	if t.Moving {
		return l, "connections from before are left to the host (--moving)"
	}
	for _, e := range endpoints {
		if why := t.unreached(e); why != "" {
			return l, why
		}
	}
	l = level{map[bool][]model.Backend{}, map[model.BackendAddress]bool{}}
	for _, is4 := range []bool{true, false} {
		family := slices.DeleteFunc(slices.Clone(endpoints), func(e endpoint) bool { return e.Address.Is4() != is4 })
		weights, why := t.nodeWeights(family, protocol, l.takes)
		if why == "" {
			l.nodes[is4], why = t.nodeBackends(weights, is4)
		}
		if why != "" {
			return level{}, why
		}
	}
	return l, ""
}

// tunnelAddresses returns the addresses of a node for outer headers.
func (t *Translator) tunnelAddresses(node string) []netip.Addr {
	if addresses := t.Peers[node]; len(addresses) > 0 || node != t.Node.Name {
		return addresses
	}
	return t.Node.Addresses
}

// unreached returns the reason why an endpoint cannot be reached through tunnels, now or later; empty: it can.
func (t *Translator) unreached(e endpoint) string {
	switch addresses := t.tunnelAddresses(e.node); {
	case e.node == "":
		return fmt.Sprintf("endpoint %s is on no node", e.BackendAddress)
	case t.hasNodeAddress(e):
		return fmt.Sprintf("endpoint %s has the address of its node %s", e.BackendAddress, e.node)
	case len(addresses) == 0 && !t.Away[e.node]:
		return fmt.Sprintf("endpoint %s is on node %s, whose agent takes no packets out of tunnels of this kind", e.BackendAddress, e.node)
	}
	return ""
}

// hasNodeAddress reports whether an endpoint has its node's own address.
func (t *Translator) hasNodeAddress(e endpoint) bool {
	return slices.Contains(t.Peers[e.node], e.Address) || e.local && slices.Contains(t.Node.Addresses, e.Address)
}

// nodeWeights returns the nodes with endpoints of one family, each with the number of its endpoints that take new
// connections, by the rules for endpoints (see weighed). It adds these endpoints to takes. why: there are endpoints
// that could take connections, and all are on nodes that are away.
func (t *Translator) nodeWeights(family []endpoint, protocol model.Protocol, takes map[model.BackendAddress]bool) (weights map[string]int, why string) {
	nodes := map[model.BackendAddress]string{}
	weights = map[string]int{}
	var present []endpoint
	for _, e := range family {
		switch {
		case !t.Away[e.node]:
			nodes[e.BackendAddress] = e.node
			present = append(present, e)
		case protocol != model.UDP && len(t.tunnelAddresses(e.node)) > 0:
			weights[e.node] = 0 // it keeps its connections
		}
	}
	some := false
	for _, b := range t.weighed(present, false, protocol) {
		if weights[nodes[b.BackendAddress]] += int(b.Weight); b.Weight > 0 {
			takes[b.BackendAddress], some = true, true
		}
	}
	if some {
		return weights, ""
	}
	for _, e := range family {
		if t.Away[e.node] && e.standing > gone {
			return nil, fmt.Sprintf("endpoint %s is on node %s, whose agent is not ready, and no endpoint on another node takes connections", e.BackendAddress, e.node)
		}
	}
	return weights, ""
}

// nodeBackends returns the nodes as backends. Their addresses are all of one family, because the balancer does not mix
// families in a table: of the frontends' own, if each node has such an address, or else of the other one.
func (t *Translator) nodeBackends(weights map[string]int, is4 bool) (backends []model.Backend, why string) {
	names := slices.Sorted(maps.Keys(weights))
	for _, outer4 := range []bool{is4, !is4} {
		backends = nil
		lacks := false
		for _, name := range names {
			addresses := t.tunnelAddresses(name)
			at := slices.IndexFunc(addresses, func(a netip.Addr) bool { return a.Is4() == outer4 })
			if at < 0 {
				lacks = lacks || !t.Away[name]
				continue
			}
			weight := uint16(min(weights[name], math.MaxUint16))
			if known := slices.IndexFunc(backends, func(b model.Backend) bool { return b.Address == addresses[at] }); known >= 0 {
				backends[known].Weight = max(backends[known].Weight, weight) // a node's name of before, for the same machine
				continue
			}
			backends = append(backends, model.Backend{BackendAddress: model.BackendAddress{Address: addresses[at]}, Name: name, Weight: weight})
		}
		if !lacks {
			return backends, ""
		}
	}
	return nil, "the nodes with its endpoints have no addresses of one family"
}

// halves returns a variant of the first level for each family; a variant without a level is returned as it is.
func (v variant) halves() []variant {
	if v.level == nil {
		return []variant{v}
	}
	four, six := v, v
	four.frontends, six.frontends = nil, nil
	six.suffix += "-ipv6"
	for _, f := range v.frontends {
		if f.Address.Is4() {
			four.frontends = append(four.frontends, f)
		} else {
			six.frontends = append(six.frontends, f)
		}
	}
	return []variant{four, six}
}

// nodes returns the backends of a half.
func (v variant) nodes() []model.Backend { return v.level.nodes[v.frontends[0].Address.Is4()] }

// here returns the second level of a variant: its frontends for packets out of tunnels, with this node's endpoints.
// Node ports are at any address, because other nodes have others. Without endpoints here it refuses packets that another
// node sends because it does not know that yet; a packet for an address and port that had no service of level 2 could
// meet another Service's node port at any address. It has no frontends if this node has an endpoint with its own
// address: then no node sends packets.
func (s *translation) here(v variant, suffix string, endpoints []endpoint, nodePorts []model.Frontend) variant {
	second := variant{suffix: suffix, local: true, here: true, allow: v.allow, deny: v.deny}
	if slices.ContainsFunc(endpoints, func(e endpoint) bool { return e.local && s.t.hasNodeAddress(e) }) {
		return second
	}
	for _, f := range v.frontends {
		if slices.Contains(nodePorts, f) {
			f.Address = unspecified(f.Address.Is4())
		}
		f.Protocol |= model.Tunnelled
		second.frontends = append(second.frontends, f)
	}
	return second
}

func unspecified(is4 bool) netip.Addr {
	if is4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// levels makes direct return of the variants for clients outside, if it can, and returns their second levels. Without
// tunnels, or with a policy Local, it does nothing.
func (s *translation) levels(outer, external, balancer *variant, endpoints []endpoint, nodePorts []model.Frontend, protocol model.Protocol) (second []variant) {
	if !s.t.Direct.Encapsulates() || outer.local || len(outer.frontends)+len(external.frontends)+len(balancer.frontends) == 0 {
		return nil
	}
	second = []variant{
		s.here(*outer, "@here", endpoints, nodePorts),
		s.here(*external, external.suffix+"-here", endpoints, nodePorts),
		s.here(*balancer, balancer.suffix+"-here", endpoints, nodePorts),
	}
	l, why := s.t.firstLevel(endpoints, protocol)
	if why != "" {
		s.natWhy = why
		return second
	}
	s.direct = &l
	outer.suffix, outer.level, external.level, balancer.level = "@direct", &l, &l, &l
	return second
}
