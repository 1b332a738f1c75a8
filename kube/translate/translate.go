package translate

import (
	"crypto/sha256"
	"encoding/hex"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// proxyName is the label that gives a Service to another implementation (KEP-2447 and the Service
// documentation: service.kubernetes.io/service-proxy-name).
const proxyName = "service.kubernetes.io/service-proxy-name"

// headless is the label that, with any value, makes a Service headless although it has a cluster IP, as in kube-proxy (core/v1
// documentation: IsHeadlessService).
const headless = corev1.IsHeadlessService

// affinityMax is the longest affinity, the same as in the configuration file.
const affinityMax = 12 * time.Hour

// Node has the facts about the balancer's node that matter.
type Node struct {
	Name      string
	Zone      string         // topology.kubernetes.io/zone; may be empty
	Addresses []netip.Addr   // unmapped; where node ports are served
	Pods      []netip.Prefix // ranges of its pods' addresses; none: the cluster does not say
}

// Translator has the parameters of the translation of every Service.
type Translator struct {
	Node Node
	// ProxyName is the service-proxy-name of this proxy's Services; empty: Services without the label.
	ProxyName string
	// Moving leaves kube-proxy's connections to the host: connections that began before shunt served the services.
	Moving bool
	// Announce answers ARP and neighbour discovery for the addresses of shunt's load balancers.
	Announce bool
	// Agents are the nodes of the agents: one of them announces an address. nil: they are not known, and each asks for it.
	Agents []string
	// Networks are the networks in which the agents' nodes have interfaces; a node without an entry counts as a node in all networks.
	Networks map[string][]netip.Prefix
	// Beside lists the other Services that share a load balancer's address with this one, directly or by way of further Services; nil: there are none.
	Beside func(*corev1.Service) []Neighbour
	// Outside keeps external IPs from clients in the cluster: they are for clients outside.
	Outside bool
	// Direct is model.ForwardingDSRIPIP or model.ForwardingDSRGUE if nodes send packets of clients outside to each other through such tunnels, so that pods see
	// the clients' addresses; see level. Any other value: they use NAT.
	Direct model.Forwarding
	// Peers are the nodes whose agents take packets out of these tunnels, each with its addresses. This node is one of them, whether or not it is in the map.
	Peers map[string][]netip.Addr
	// Away are the nodes whose agents do not take packets out of tunnels at present, although they should: they have never been ready, or not been ready for long. New
	// connections avoid these nodes. A node that is in Peers, too, keeps its connections.
	Away map[string]bool
}

// Neighbour is a Service with its EndpointSlices.
type Neighbour struct {
	Service *corev1.Service
	Slices  []*discoveryv1.EndpointSlice
}

// Translation is the translation of a Service with its EndpointSlices.
type Translation struct {
	Services []model.Service // by name
	Faults   []Fault
	Health   Health
	// Announced are the addresses of a load balancer that should be announced, each once.
	Announced []Announcement
}

// Announcement is an address that should be announced.
type Announcement struct {
	Address netip.Addr
	Node    string // of the agent that should announce it; empty: each agent asks for it, and one gets it
	Here    bool   // on this node
}

// Health is the answer for a Service's healthCheckNodePort.
type Health struct {
	Port  uint16 // 0: it has none
	Local int    // pods on this node that are ready, each counted once
}

// NodeOf reads a Node. Invalid addresses are faults.
func NodeOf(node *corev1.Node) (Node, []Fault) {
	var found faults
	n := Node{Name: node.Name, Zone: node.Labels[corev1.LabelTopologyZone]}
	for _, a := range node.Status.Addresses {
		if a.Type != corev1.NodeInternalIP {
			continue
		}
		address, ok := unicast(a.Address)
		if !ok {
			found.add(ObjectInvalid, "Node "+node.Name, "correct the node's status", "InternalIP %q is no address that packets can be sent to", a.Address)
			continue
		}
		if !slices.Contains(n.Addresses, address) {
			n.Addresses = append(n.Addresses, address)
		}
	}
	for _, text := range podRanges(node) {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix.Addr().Is4In6() {
			found.add(ObjectInvalid, "Node "+node.Name, "correct the node's spec", "podCIDR %q is no prefix", text)
			continue
		}
		n.Pods = append(n.Pods, prefix.Masked())
	}
	return n, found
}

// podRanges returns the present field, or the one from before dual stack.
func podRanges(node *corev1.Node) []string {
	if len(node.Spec.PodCIDRs) == 0 && node.Spec.PodCIDR != "" {
		return []string{node.Spec.PodCIDR}
	}
	return node.Spec.PodCIDRs
}

// Service translates a Service. endpointSlices are the slices that name it in their label
// kubernetes.io/service-name. A Service that is not for a proxy yields nothing, without a fault:
// one that is headless, an ExternalName, or another proxy's.
func (t *Translator) Service(service *corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) Translation {
	if !t.ours(service) {
		return Translation{}
	}
	s := t.begin(service, endpointSlices)
	for i := range service.Spec.Ports {
		s.port(&service.Spec.Ports[i], endpointSlices)
	}
	return s.end(endpointSlices)
}

// begin finds the common properties of a Service's ports.
func (t *Translator) begin(service *corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) *translation {
	s := &translation{t: t, service: service, object: "Service " + service.Namespace + "/" + service.Name}
	s.families()
	s.affinity()
	s.elect(endpointSlices)
	return s
}

func (s *translation) end(endpointSlices []*discoveryv1.EndpointSlice) Translation {
	health := s.health(endpointSlices)
	return Translation{s.services, s.faults, health, s.announced}
}

// health counts the pods of all ports, in the family that has more of them, because a pod has an endpoint in each.
func (s *translation) health(endpointSlices []*discoveryv1.EndpointSlice) (h Health) {
	number := s.service.Spec.HealthCheckNodePort
	if number == 0 {
		return h
	}
	if number < 0 || number > 65535 {
		s.faults.add(ObjectInvalid, s.object, "give it a port from 1 to 65535", "healthCheckNodePort %d is out of range", number)
		return h
	}
	h.Port = uint16(number)
	pods := map[bool]map[netip.Addr]bool{true: {}, false: {}}
	for i := range s.service.Spec.Ports {
		for _, e := range s.endpoints(&s.service.Spec.Ports[i], endpointSlices) {
			if e.local && e.standing == ready {
				pods[e.Address.Is4()][e.Address] = true
			}
		}
	}
	h.Local = max(len(pods[true]), len(pods[false]))
	return h
}

// ours reports whether a Service is for this proxy. A label without a value gives it to another one, too.
func (t *Translator) ours(service *corev1.Service) bool {
	if service.Spec.Type == corev1.ServiceTypeExternalName || labelled(service, headless) ||
		service.Labels[proxyName] != t.ProxyName || labelled(service, proxyName) != (t.ProxyName != "") {
		return false
	}
	addresses := clusterIPs(service)
	return len(addresses) > 0 && addresses[0] != corev1.ClusterIPNone
}

// OwnClass is the loadBalancerClass of Services that only shunt serves.
const OwnClass = "shunt-lb.github.io/shunt"

// Balances reports whether a Service is of type LoadBalancer and shunt's: by its class, or because it has none.
func (t *Translator) Balances(service *corev1.Service) bool {
	class := service.Spec.LoadBalancerClass
	return service.Spec.Type == corev1.ServiceTypeLoadBalancer && (class == nil || *class == OwnClass) && t.ours(service)
}

// labelled reports whether a Service has a label, with any value.
func labelled(service *corev1.Service, label string) bool {
	_, is := service.Labels[label]
	return is
}

// clusterIPs returns the present field, or the one from before dual stack.
func clusterIPs(service *corev1.Service) []string {
	if len(service.Spec.ClusterIPs) == 0 && service.Spec.ClusterIP != "" {
		return []string{service.Spec.ClusterIP}
	}
	return service.Spec.ClusterIPs
}

// translation is the unfinished translation of one Service.
type translation struct {
	t       *Translator
	service *corev1.Service
	object  string
	cluster []netip.Addr // its cluster IPs
	sticky  time.Duration
	// reported are the parts whose faults are reported once, not for each port.
	reported map[string]bool
	listed   map[*corev1.ServicePort][]endpoint // results of endpoints

	services  []model.Service
	faults    faults
	announced []Announcement
	direct    *level         // of the last port; nil: it is not served by direct return
	natWhy    string         // why the last port is served by NAT instead; empty: it is not, or nothing else is wanted
	announcer string         // the node that should announce its addresses; empty: each agent asks for them, or none can announce them
	part      model.Announce // of this node: it announces them, stands by, or does neither (empty)
}

// once reports a fault of a part that several ports share.
func (s *translation) once(part string, code Code, remedy, format string, values ...any) {
	if s.reported[part] {
		return
	}
	if s.reported == nil {
		s.reported = map[string]bool{}
	}
	s.reported[part] = true
	s.faults.add(code, s.object, remedy, format, values...)
}

func (s *translation) families() {
	for _, text := range clusterIPs(s.service) {
		if address, ok := unicast(text); ok {
			s.cluster = append(s.cluster, address)
		} else {
			s.once(text, ObjectInvalid, "make the Service anew", "cluster IP %q is no address that packets can be sent to", text)
		}
	}
}

// has reports whether the Service has cluster IPs of a family.
func (s *translation) has(is4 bool) bool {
	return slices.ContainsFunc(s.cluster, func(a netip.Addr) bool { return a.Is4() == is4 })
}

func (s *translation) affinity() {
	switch s.service.Spec.SessionAffinity {
	case corev1.ServiceAffinityNone, "":
		return
	case corev1.ServiceAffinityClientIP:
	default:
		s.faults.add(ObjectInvalid, s.object, "use None or ClientIP", "session affinity %q is not known, and flows are placed one by one", s.service.Spec.SessionAffinity)
		return
	}
	seconds := int32(corev1.DefaultClientIPServiceAffinitySeconds)
	if c := s.service.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		seconds = *c.ClientIP.TimeoutSeconds
	}
	s.sticky = time.Duration(seconds) * time.Second
	switch {
	case seconds <= 0:
		s.sticky = 0
		s.faults.add(ObjectInvalid, s.object, "give it 1 to 43200 seconds", "a session affinity of %d s is out of range, and flows are placed one by one", seconds)
	case s.sticky > affinityMax:
		s.sticky = affinityMax
		s.faults.add(AffinityShortened, s.object, "give it at most 43200 seconds, or accept that an idle client may be placed anew",
			"session affinity of %d s is kept for %d s after a client's last packet", seconds, int(affinityMax/time.Second))
	}
}

// variant is a service of the balancer: frontends of a port that are treated alike.
type variant struct {
	suffix    string
	frontends []model.Frontend
	local     bool   // backends only on this node
	here      bool   // local, for packets out of tunnels: see level
	level     *level // backends are nodes; nil: they are endpoints
	inside    bool   // for clients outside the cluster: clients inside have another variant at the same frontends
	allow     []netip.Prefix
	deny      []netip.Prefix
	announce  bool
}

// port adds the services of one port.
func (s *translation) port(port *corev1.ServicePort, endpointSlices []*discoveryv1.EndpointSlice) {
	s.direct, s.natWhy = nil, ""
	protocol, ok := s.protocol(port)
	if !ok {
		return
	}
	endpoints := s.endpoints(port, endpointSlices)
	local := s.service.Spec.InternalTrafficPolicy != nil && *s.service.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	inner := variant{local: local, frontends: s.frontends(s.cluster, port.Port, protocol)}
	outer := variant{suffix: "@external", local: s.service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal}
	external := outer
	external.suffix, external.frontends = "@external-ips", s.frontends(s.externalIPs(), port.Port, protocol)
	nodePorts := s.nodePort(port, protocol)
	outer.frontends = nodePorts
	if s.t.Outside {
		external.deny = s.pods(external.frontends)
	} else {
		outer.frontends = append(external.frontends, outer.frontends...)
		external.frontends = nil
	}
	balancer := outer
	balancer.suffix, balancer.frontends = "@load-balancer", s.frontends(s.ingress(), port.Port, protocol)
	balancer.announce = s.t.Announce && s.t.Balances(s.service)
	allow, limited := s.sourceRanges()
	if balancer.allow = allow; !limited && !balancer.announce {
		outer.frontends = append(outer.frontends, balancer.frontends...)
		balancer.frontends = nil
	}
	second := s.levels(&outer, &external, &balancer, endpoints, nodePorts, protocol)
	everywhere := variant{suffix: "@cluster"}
	outer.forInside(&inner, &everywhere)
	if !limited {
		balancer.forInside(&inner, &everywhere)
	}
	if outer.local == inner.local && outer.level == nil {
		inner.frontends, inner.inside = append(inner.frontends, outer.frontends...), outer.inside
		outer.frontends = nil
	}
	name := s.service.Namespace + "/" + s.service.Name
	if port.Name != "" {
		name += ":" + port.Name
	}
	for _, v := range slices.Concat([]variant{inner, everywhere}, outer.halves(), external.halves(), balancer.halves(), second) {
		if len(v.frontends) > 0 {
			service := s.serviceOf(name, v, endpoints, protocol)
			s.services = append(s.services, service)
			if v.announce {
				s.announce(&service)
			}
		}
	}
}

// forInside lets clients in the cluster reach all endpoints at external frontends, even with a policy Local for clients outside: no
// balancer that knows the endpoints has sent a client in the cluster to this node, and kube-proxy does the
// same (short circuit in pkg/proxy/nftables). With direct return they reach endpoints past all tunnels. If inner is for all endpoints, it gets the frontends, otherwise everywhere gets them.
func (v *variant) forInside(inner, everywhere *variant) {
	if !v.local && v.level == nil {
		return
	}
	to := inner
	if inner.local {
		to = everywhere
	}
	for _, f := range v.frontends {
		v.inside = true
		f.Protocol |= model.Inside
		to.frontends = append(to.frontends, f)
	}
}

// serviceOf returns the balancer's service of a variant.
func (s *translation) serviceOf(name string, v variant, endpoints []endpoint, protocol model.Protocol) model.Service {
	backends, elsewhere := s.t.chosen(endpoints, v.local, protocol)
	service := model.Service{
		Name: short(name + v.suffix), Frontends: once(v.frontends), Backends: backends,
		Forwarding: model.ForwardingNAT, Announce: model.AnnounceNone, Tracking: model.TrackingAuto,
		AffinityTimeout: s.sticky, AllowFrom: v.allow, DenyFrom: v.deny,
		// Without any endpoint clients are refused at once. With an endpoint on another node they are
		// not: a balancer in front sends them there as soon as it has noticed, and a refusal would be final.
		// Level 2 refuses as level 1 does: its connections without an endpoint here have lost theirs.
		Policy: model.Policy{Rejects: !elsewhere || v.here, Inside: v.inside, PassesBegun: s.t.Moving && !v.here},
	}
	if s.sticky > 0 { // after its time a client counts as a new one, as in kube-proxy: its address alone would always choose the same pod
		service.Tracking, service.Policy.Draws = model.TrackingAlways, true
	}
	if v.announce && s.part != "" && (!v.local || slices.ContainsFunc(backends, func(b model.Backend) bool { return b.Weight > 0 })) {
		service.Announce = s.part // with a local policy, only on nodes with an endpoint
	}
	if v.local {
		service.Forwarding = model.ForwardingNATDestination // the pod sees the client, as the policy demands
	}
	if v.level != nil {
		service.Forwarding, service.Policy.Tunnelled, service.Backends = s.t.Direct, true, v.nodes()
	}
	return service
}

// nameMax is the largest size of a service's name in the data plane's map of names, in bytes.
const nameMax = 63

// short returns a name that fits. A namespace, a Service and a port may have 63, 63 and 15 bytes; a name that is too
// long keeps its beginning, and gets the first 40 bits of its SHA-256, so that it is equal on all
// nodes and unique.
func short(name string) string {
	if len(name) <= nameMax {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	end := "~" + hex.EncodeToString(sum[:5])
	return strings.ToValidUTF8(name[:nameMax-len(end)], "") + end
}

// once returns a list without duplicates.
func once[T comparable](list []T) []T {
	var kept []T
	for _, x := range list {
		if !slices.Contains(kept, x) {
			kept = append(kept, x)
		}
	}
	return kept
}

func (s *translation) protocol(port *corev1.ServicePort) (model.Protocol, bool) {
	if port.Port < 1 || port.Port > 65535 {
		s.faults.add(ObjectInvalid, s.object, "give it a port from 1 to 65535", "port %d is out of range", port.Port)
		return 0, false
	}
	switch port.Protocol {
	case corev1.ProtocolTCP, "":
		return model.TCP, true
	case corev1.ProtocolUDP:
		return model.UDP, true
	case corev1.ProtocolSCTP:
		s.faults.add(SCTPRefused, s.object, "use TCP or UDP, or clients that talk to the pods directly",
			"port %d is SCTP, which shunt does not balance: packets to it are not taken", port.Port)
	default:
		s.faults.add(ObjectInvalid, s.object, "use TCP or UDP", "protocol %q of port %d is not known", port.Protocol, port.Port)
	}
	return 0, false
}

func (s *translation) frontends(addresses []netip.Addr, port int32, protocol model.Protocol) (all []model.Frontend) {
	for _, a := range addresses {
		all = append(all, model.Frontend{Address: a, Ports: value.PortRange{First: uint16(port), Last: uint16(port)}, Protocol: protocol})
	}
	return all
}

// usable returns the addresses of a field that the Service can have.
func (s *translation) usable(field string, texts []string) (all []netip.Addr) {
	for _, text := range texts {
		address, ok := unicast(text)
		switch {
		case !ok:
			s.once(text, ObjectInvalid, "correct it", "%s %q is no address that packets can be sent to", field, text)
		case !s.has(address.Is4()):
			s.once(text, FamilyUnserved, "give the Service this family in ipFamilies, or remove the address",
				"%s %s is of a family that the Service does not have", field, address)
		default:
			all = append(all, address)
		}
	}
	return all
}

// pods returns the sources that may not use frontends for clients outside. The list has at least one source of each family,
// because without any, sockets would be served, too: they have no source.
func (s *translation) pods(frontends []model.Frontend) []netip.Prefix {
	if len(frontends) > 0 && len(s.t.Node.Pods) == 0 {
		s.once("pods", PodRangeMissing, "give the node a podCIDR, or keep others from making Services with externalIPs",
			"external IPs also take packets of pods on node %q, which has no podCIDR", s.t.Node.Name)
	}
	return append([]netip.Prefix{nobody4, nobody6}, s.t.Node.Pods...)
}

// Addresses that no client has.
var (
	nobody4 = netip.MustParsePrefix("0.0.0.0/32")
	nobody6 = netip.MustParsePrefix("::/128")
)

func (s *translation) externalIPs() []netip.Addr {
	return s.usable("external IP", s.service.Spec.ExternalIPs)
}

// ingress returns the addresses that a load balancer passes on unchanged (KEP-1860: ipMode VIP).
func (s *translation) ingress() []netip.Addr {
	if s.service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	var texts []string
	for _, i := range s.service.Status.LoadBalancer.Ingress {
		if i.IP != "" && (i.IPMode == nil || *i.IPMode == corev1.LoadBalancerIPModeVIP) {
			texts = append(texts, i.IP)
		}
	}
	return s.usable("load balancer's address", texts)
}

func (s *translation) nodePort(port *corev1.ServicePort, protocol model.Protocol) []model.Frontend {
	if port.NodePort == 0 || s.service.Spec.Type != corev1.ServiceTypeNodePort && s.service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	if port.NodePort < 1 || port.NodePort > 65535 {
		s.faults.add(ObjectInvalid, s.object, "give it a port from 1 to 65535", "node port %d is out of range", port.NodePort)
		return nil
	}
	var addresses []netip.Addr
	for _, a := range s.t.Node.Addresses {
		if s.has(a.Is4()) {
			addresses = append(addresses, a)
		}
	}
	if len(addresses) == 0 {
		s.once("node ports", NodeAddressMissing, "give the node an InternalIP of the Service's family",
			"node port %d is not served here: node %q has no address for it", port.NodePort, s.t.Node.Name)
		return nil
	}
	return s.frontends(append(addresses, s.loopback()...), port.NodePort, protocol)
}

// loopback returns the addresses at which the node's own programs find node ports, too: their sockets are served there, only in the
// node's network namespace. A frame from elsewhere to such an address is treated like a frame to the node's own address.
func (s *translation) loopback() (all []netip.Addr) {
	for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		if s.has(a.Is4()) {
			all = append(all, a)
		}
	}
	return all
}

// sourceRanges returns the clients that may use the load balancer's addresses; limited: not all may.
// The annotation is the field's predecessor, and the field takes precedence.
func (s *translation) sourceRanges() (allow []netip.Prefix, limited bool) {
	texts := s.service.Spec.LoadBalancerSourceRanges
	if len(texts) == 0 {
		texts = annotatedRanges(s.service)
	}
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix.Addr().Is4In6() {
			s.once(text, ObjectInvalid, "correct it", "source range %q is no prefix; it lets no client in", text)
			continue
		}
		allow = append(allow, prefix.Masked())
	}
	if len(texts) > 0 && len(allow) == 0 {
		allow = []netip.Prefix{nobody4} // an empty list would let all clients in
	}
	return allow, len(texts) > 0
}

// unicast reads an address that packets can be sent to: unmapped, without a zone.
func unicast(text string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		return netip.Addr{}, false
	}
	broadcast := a == netip.AddrFrom4([4]byte{255, 255, 255, 255})
	return a, !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && !a.IsLinkLocalUnicast() && !broadcast
}
