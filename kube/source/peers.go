package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/place"
	"github.com/shunt-lb/shunt/kube/translate"
)

// awayAfter is how long an agent may be away, or not ready, until new connections avoid its node. Its node's kernel
// goes on without it, and the next agent of a DaemonSet is there in seconds, or with an image to fetch in a minute or
// two; but pods that come and go meanwhile are not known there. It is the time after which a cluster gives up the pods
// of a node that it does not reach (DefaultTolerationSeconds of the apiserver).
const awayAfter = 5 * time.Minute

// peersPatience is how long an agent that starts waits for the addresses of other nodes' agents.
const peersPatience = 10 * time.Second

// Direct sets up direct return between nodes: see translate.Translator.Direct.
type Direct struct {
	// Tunnel is the kind of tunnels that this node uses and opens. The zero value: none, and the other fields have no meaning. Its port
	// is used until Encapsulates has been called, and while this node has no entry in the ConfigMap.
	Tunnel place.Tunnel
	// Entries is the NAMESPACE/NAME of the ConfigMap in which agents say which tunnels their nodes open; see package place.
	Entries string
	// Seen is called with this node's entry in the ConfigMap whenever the ConfigMap may have changed; the entry is nil
	// if there is none. It must not wait. nil: it is not called.
	Seen func(entry *string)
	// Opens is called with the tunnels that this node opens: when it has taken over the cluster's services for the first time, and
	// when these tunnels change later. It must not wait. nil: it is not called.
	Opens func(place.Tunnel)
	// Away is how long an agent may be away until new connections avoid its node; 0: awayAfter.
	Away time.Duration
	// Patience is how long Open waits for the addresses of other nodes' agents; 0: peersPatience.
	Patience time.Duration
}

// peers has the agents of all nodes, with their tunnels.
//
// Addresses come from the EndpointSlices, which the control plane keeps. An agent's entry in the ConfigMap only says
// that its node opens tunnels: with a false entry a node loses packets, but nobody gets packets or may send any who
// could not before.
type peers struct {
	own    string // this node
	tunnel place.Tunnel
	away   time.Duration

	agents     map[string]*peer // of nodes with an agent in the EndpointSlices, or with one there a short time ago
	entries    map[string]place.Tunnel
	senders    []netip.Addr // the addresses from which this node accepts tunnels, sorted
	nodes      []netip.Addr // the senders, and this node's own addresses, sorted
	undeclared bool         // these addresses have changed since they were declared
	opened     place.Tunnel // by Opens
}

// peer is the agent of a node.
type peer struct {
	addresses []netip.Addr
	listed    bool
	ready     bool
	since     time.Time // since when it is not ready; zero: it is
	unlisted  time.Time // since when it is not listed; zero: it is
	partial   time.Time // since when the addresses of a family are not listed that were listed before; zero: they are
	other     bool      // it was ready without an entry: it opens no tunnels, and neither does an agent that replaces it before that says so
}

// listing is an agent in the EndpointSlices.
type listing struct {
	addresses []netip.Addr
	ready     bool
}

func newPeers(node string, d Direct) peers {
	away := d.Away
	if away == 0 {
		away = awayAfter
	}
	return peers{own: node, tunnel: d.Tunnel, away: away, agents: map[string]*peer{}}
}

// interval returns the interval at which the ages of agents are looked at.
func (p *peers) interval() time.Duration { return max(time.Millisecond, min(p.away/2, lookInterval)) }

// note takes the present agents and entries.
func (p *peers) note(listed map[string]listing, entries map[string]place.Tunnel, now time.Time) {
	p.entries = entries
	for node, l := range listed {
		agent := p.agents[node]
		if agent == nil {
			agent = &peer{}
			p.agents[node] = agent
		}
		agent.addresses, agent.listed, agent.ready, agent.unlisted = agent.complete(l.addresses, listed, p.away, now), true, l.ready, time.Time{}
	}
	for node, agent := range p.agents {
		if _, is := listed[node]; !is {
			if agent.listed, agent.ready = false, false; agent.unlisted.IsZero() {
				agent.unlisted = now
			}
			if now.Sub(agent.unlisted) >= p.away {
				delete(p.agents, node)
				continue
			}
			agent.addresses = slices.DeleteFunc(slices.Clone(agent.addresses), func(a netip.Addr) bool { return taken(listed, a) })
		}
		switch {
		case agent.ready:
			agent.since = time.Time{}
		case agent.since.IsZero():
			agent.since = now
		}
		_, has := entries[node]
		agent.other = !has && (agent.other || agent.ready)
	}
}

// complete returns the listed addresses, and those from before of a family that the listing lacks: each family has EndpointSlices of its own, so a
// pod that is replaced goes from them and comes into them one after the other. Without this, services would change the family of their outer
// headers twice, and with it all backends.
func (agent *peer) complete(addresses []netip.Addr, listed map[string]listing, away time.Duration, now time.Time) []netip.Addr {
	kept := slices.DeleteFunc(slices.Clone(agent.addresses), func(a netip.Addr) bool {
		return taken(listed, a) || slices.ContainsFunc(addresses, func(b netip.Addr) bool { return a.Is4() == b.Is4() })
	})
	switch {
	case len(kept) == 0:
		agent.partial = time.Time{}
		return addresses
	case agent.partial.IsZero():
		agent.partial = now
	case now.Sub(agent.partial) >= away:
		return addresses
	}
	kept = append(kept, addresses...)
	slices.SortFunc(kept, netip.Addr.Compare)
	return kept
}

// taken reports whether a listed agent has an address: a machine may get the address of one that has just gone.
func taken(listed map[string]listing, a netip.Addr) bool {
	for _, l := range listed {
		if slices.Contains(l.addresses, a) {
			return true
		}
	}
	return false
}

// known returns translate.Translator's Peers and Away.
func (p *peers) known(now time.Time) (peers map[string][]netip.Addr, away map[string]bool) {
	peers, away = map[string][]netip.Addr{}, map[string]bool{}
	for node, agent := range p.agents {
		entry, has := p.entries[node]
		switch {
		case node == p.own:
			peers[node] = agent.addresses
		case has && entry == p.tunnel:
			if peers[node] = agent.addresses; len(agent.addresses) == 0 || p.lapsed(agent, now) {
				away[node] = true
			}
		case !has && !agent.ready && !agent.other:
			away[node] = true // it starts for the first time
		}
	}
	for node, entry := range p.entries {
		if p.agents[node] == nil && entry == p.tunnel && node != p.own {
			away[node] = true // it is being replaced, or has gone with its node
		}
	}
	return peers, away
}

func (p *peers) lapsed(agent *peer, now time.Time) bool {
	return !agent.ready && now.Sub(agent.since) >= p.away
}

// from returns the addresses of the other nodes' agents. Each may send tunnels: it does so before its entry is here,
// and its node's kernel goes on when it is not ready.
func (p *peers) from() (all []netip.Addr) {
	for node, agent := range p.agents {
		if node != p.own {
			all = append(all, agent.addresses...)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// faults returns a fault for each node that gets no new connections because of its agent. A node without any agent has
// none: it may be going, or agents are not wanted there.
func (p *peers) faults(now time.Time) (all []translate.Fault) {
	for _, node := range slices.Sorted(maps.Keys(p.agents)) {
		if agent := p.agents[node]; node != p.own && p.entries[node] == p.tunnel && agent.listed && p.lapsed(agent, now) {
			all = append(all, translate.Fault{Code: translate.AgentAway, Object: "Node " + node,
				Text:   fmt.Sprintf("its shunt-kube has not been ready for %s, and new connections from outside do not go to its pods while pods on other nodes take them", p.away),
				Remedy: "see why the pod of shunt-kube on this node is not ready"})
		}
	}
	return all
}

// followTunnels follows the ConfigMap with the tunnels that nodes open.
func (s *Source) followTunnels(handler cache.ResourceEventHandler) (err error) {
	if s.options.Direct.Tunnel == (place.Tunnel{}) {
		return nil
	}
	s.tunnels, err = s.followMap(s.options.Direct.Entries, "the ConfigMap of the nodes' tunnels", handler)
	return err
}

// checkAgents refuses options that contradict each other.
func (o *Options) checkAgents() error {
	if o.Elect && o.Agents == "" {
		return errors.New("an election needs the Service of the agents")
	}
	if o.Direct.Tunnel != (place.Tunnel{}) && o.Agents == "" {
		return errors.New("direct return between nodes needs the Service of the agents")
	}
	return nil
}

// readTunnels returns the tunnels that nodes open, and passes this node's entry on.
func (s *Source) readTunnels() map[string]place.Tunnel {
	data := s.dataOf(s.tunnels, s.options.Direct.Entries)
	if s.options.Direct.Seen != nil {
		s.options.Direct.Seen(place.OwnTunnel(data, s.options.Node))
	}
	return place.ParseTunnels(data)
}

// listedAgents returns the agents in the EndpointSlices, by node. An agent is ready if one of its endpoints is: it has
// one in each family, and for a moment a predecessor's.
func (s *Source) listedAgents() map[string]listing {
	all := map[string]listing{}
	for _, object := range s.agents.GetStore().List() {
		for _, e := range object.(*discoveryv1.EndpointSlice).Endpoints {
			if e.NodeName == nil || len(e.Addresses) == 0 {
				continue
			}
			l := all[*e.NodeName]
			l.ready = l.ready || e.Conditions.Ready == nil || *e.Conditions.Ready
			if a, err := netip.ParseAddr(e.Addresses[0]); err == nil && a.Zone() == "" && !a.Is4In6() && !slices.Contains(l.addresses, a) {
				l.addresses = append(l.addresses, a)
				slices.SortFunc(l.addresses, netip.Addr.Compare)
			}
			all[*e.NodeName] = l
		}
	}
	return all
}

// Encapsulates takes the encapsulation of this node's file: nodes with different ports do not open each other's tunnels. Any
// goroutine may call it, and it does not wait.
func (s *Source) Encapsulates(e model.Encapsulation) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.guePort != e.GUEPort {
		s.guePort, s.others = e.GUEPort, true
		s.awake()
	}
}

// ownTunnel returns the tunnels that this node uses and opens. A command that only looks has no file, and finds the port in the
// agent's entry.
func (s *Source) ownTunnel(entries map[string]place.Tunnel) place.Tunnel {
	tunnel := s.options.Direct.Tunnel
	if tunnel.Forwarding != model.ForwardingDSRGUE {
		return tunnel
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.guePort != 0 {
		tunnel.Port = s.guePort
	} else if own := entries[s.options.Node]; own.Forwarding == tunnel.Forwarding {
		tunnel.Port = own.Port
	}
	return tunnel
}

// Decapsulation returns this node's part of direct return between nodes; nil: there is none. It implements daemon.Source's
// FirstDecapsulation, and is called after First.
func (s *Source) Decapsulation() *model.Decapsulation {
	if s.tunnels == nil {
		return nil
	}
	d := &model.Decapsulation{Tunnelled: true, Nodes: slices.Clone(s.peers.nodes)}
	for _, a := range s.peers.senders {
		d.From = append(d.From, netip.PrefixFrom(a, a.BitLen()))
	}
	return d
}

// open calls Opens if the node opens other tunnels than before. The cluster's services are in force.
func (s *Source) open() {
	if s.tunnels == nil || s.peers.opened == s.peers.tunnel {
		return
	}
	s.peers.opened = s.peers.tunnel
	if s.options.Direct.Opens != nil {
		s.options.Direct.Opens(s.peers.opened)
	}
}

// awaitPeers waits until the agents of all nodes that open tunnels are listed, with an address of each family that this node has. Agents that are
// replaced at the same time are not listed for a second or two. Without their addresses, an agent that starts would move flows away from their nodes,
// and drop their tunnels. Until it has services, the data plane of its predecessor goes on. A command that only looks does not wait.
func (s *Source) awaitPeers(ctx context.Context) {
	if s.tunnels == nil || s.refused != nil {
		return
	}
	s.readNode()
	missing := s.missingPeers()
	if len(missing) > 0 {
		s.options.Log.Info("waiting for the agents of nodes that open tunnels", "nodes", missing)
	}
	patience := time.After(cmp.Or(s.options.Direct.Patience, peersPatience))
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for len(missing) > 0 {
		select {
		case <-again.C:
			missing = s.missingPeers()
		case <-ctx.Done():
			return
		case <-patience:
			if missing = s.forgetNodes(ctx, missing); len(missing) > 0 {
				s.options.Log.Warn("nodes that open tunnels have no agent, or none with an address of each family; going on without them", "nodes", missing)
			}
			return
		}
	}
}

// missingPeers returns the nodes that open tunnels and are not listed with an address of each family that this node and the agents' Service have.
func (s *Source) missingPeers() (nodes []string) {
	listed := s.listedAgents()
	for node, entry := range place.ParseTunnels(s.dataOf(s.tunnels, s.options.Direct.Entries)) {
		lacks := func(own netip.Addr) bool {
			same := func(a netip.Addr) bool { return a.Is4() == own.Is4() }
			return s.agentsHave(own.Is4()) && !slices.ContainsFunc(listed[node].addresses, same)
		}
		if node != s.options.Node && entry.Forwarding == s.options.Direct.Tunnel.Forwarding && slices.ContainsFunc(s.translator.Node.Addresses, lacks) {
			nodes = append(nodes, node)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// agentsHave reports whether the Service of the agents has endpoints of a family; a Service that is not there may have any.
func (s *Source) agentsHave(is4 bool) bool {
	object, there, err := s.services.GetStore().GetByKey(s.options.Agents)
	if err != nil || !there {
		return true
	}
	return slices.ContainsFunc(object.(*corev1.Service).Spec.IPFamilies, func(f corev1.IPFamily) bool { return (f == corev1.IPv4Protocol) == is4 })
}

// forgetNodes removes the entries of nodes that are no longer in the cluster, and returns the other ones: an agent whose node has gone cannot
// remove its entry. A node that comes back with the name has an agent that writes it again. Each node costs a request, so only those are asked for that
// have been awaited in vain.
func (s *Source) forgetNodes(ctx context.Context, nodes []string) []string {
	ctx, cancel := context.WithTimeout(ctx, peersPatience)
	defer cancel()
	var gone []string
	for _, node := range nodes {
		if _, err := s.options.Client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); apierrors.IsNotFound(err) {
			gone = append(gone, node)
		}
	}
	if len(gone) == 0 {
		return nodes
	}
	if err := place.ForgetTunnels(ctx, s.options.Client, s.options.Direct.Entries, gone); err != nil {
		s.options.Log.Warn("cannot remove the tunnels of nodes that have gone from the ConfigMap; the next agent that starts tries again", "nodes", gone, "error", err)
	} else {
		s.options.Log.Info("removed the tunnels of nodes that have gone from the ConfigMap", "nodes", gone)
	}
	return slices.DeleteFunc(nodes, func(node string) bool { return slices.Contains(gone, node) })
}

// readPeers returns the Services whose translation depends on agents that have changed.
func (s *Source) readPeers() (concerned []translate.Key) {
	if s.tunnels == nil {
		return nil
	}
	now := time.Now()
	entries := s.readTunnels()
	s.peers.tunnel = s.ownTunnel(entries)
	s.peers.note(s.listedAgents(), entries, now)
	peers, away := s.peers.known(now)
	changed := map[string]bool{}
	for _, before := range []map[string][]netip.Addr{s.translator.Peers, peers} {
		for node := range before {
			changed[node] = !slices.Equal(s.translator.Peers[node], peers[node])
		}
	}
	for _, before := range []map[string]bool{s.translator.Away, away} {
		for node := range before {
			changed[node] = changed[node] || s.translator.Away[node] != away[node]
		}
	}
	maps.DeleteFunc(changed, func(_ string, is bool) bool { return !is })
	s.translator.Peers, s.translator.Away = peers, away
	s.awayFaults = s.peers.faults(now)
	senders := s.peers.from()
	// With its own addresses, a node without other nodes has level 2, too.
	nodes := slices.Concat(senders, peers[s.options.Node], s.translator.Node.Addresses)
	slices.SortFunc(nodes, netip.Addr.Compare)
	if nodes = slices.Compact(nodes); !slices.Equal(senders, s.peers.senders) || !slices.Equal(nodes, s.peers.nodes) {
		s.peers.senders, s.peers.nodes, s.peers.undeclared = senders, nodes, true
	}
	if len(changed) == 0 {
		return nil
	}
	for _, object := range s.services.GetStore().List() {
		if service := object.(*corev1.Service); s.onNodes(service, changed) {
			concerned = append(concerned, service.Namespace+"/"+service.Name)
		}
	}
	return concerned
}

// onNodes reports whether a Service is for clients outside and has an endpoint on one of these nodes.
func (s *Source) onNodes(service *corev1.Service, nodes map[string]bool) bool {
	if service.Spec.Type != corev1.ServiceTypeNodePort && service.Spec.Type != corev1.ServiceTypeLoadBalancer && len(service.Spec.ExternalIPs) == 0 {
		return false
	}
	return slices.ContainsFunc(s.slicesOf(service.Namespace+"/"+service.Name), func(slice *discoveryv1.EndpointSlice) bool {
		return slices.ContainsFunc(slice.Endpoints, func(e discoveryv1.Endpoint) bool { return e.NodeName != nil && nodes[*e.NodeName] })
	})
}

// ageAgents has the next step look at the ages of agents.
func (s *Source) ageAgents() {
	if s.tunnels == nil {
		return
	}
	s.mutex.Lock()
	s.others = true
	s.mutex.Unlock()
	s.awake()
}
