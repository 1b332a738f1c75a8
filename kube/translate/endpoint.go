package translate

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// standing is the rank of an endpoint; a higher one is better.
type standing int

const (
	gone    standing = iota // not ready, or ends and does not serve any more
	parting                 // ends, and still serves (KEP-1669)
	ready
)

// endpoint is a destination of a port of a Service.
type endpoint struct {
	model.BackendAddress
	name     string // of its pod; may be empty
	standing standing
	node     string // may be empty
	local    bool   // on this node
	zones    []string
	nodes    []string
}

// endpoints returns the destinations of a port of the Service, each address and port once, by address. The caller must not change the list: it is made once for a
// translation.
func (s *translation) endpoints(port *corev1.ServicePort, endpointSlices []*discoveryv1.EndpointSlice) []endpoint {
	all, known := s.listed[port]
	if !known {
		all = s.list(port, endpointSlices)
		if s.listed == nil {
			s.listed = map[*corev1.ServicePort][]endpoint{}
		}
		s.listed[port] = all
	}
	return all
}

func (s *translation) list(port *corev1.ServicePort, endpointSlices []*discoveryv1.EndpointSlice) []endpoint {
	var all []endpoint
	for _, slice := range endpointSlices {
		if slice.AddressType != discoveryv1.AddressTypeIPv4 && slice.AddressType != discoveryv1.AddressTypeIPv6 {
			continue // FQDN: a packet cannot be sent there
		}
		number, ok := s.numberIn(slice, port)
		if !ok {
			continue
		}
		for i := range slice.Endpoints {
			if e, ok := s.endpoint(slice, &slice.Endpoints[i]); ok && s.has(e.Address.Is4()) {
				e.Port = number
				all = append(all, e)
			}
		}
	}
	// While a pod's endpoint moves from one slice to another it is in both: the better one counts.
	slices.SortFunc(all, func(a, b endpoint) int {
		return cmp.Or(a.Address.Compare(b.Address), int(a.Port)-int(b.Port), int(b.standing)-int(a.standing), strings.Compare(a.name, b.name))
	})
	return slices.CompactFunc(all, func(a, b endpoint) bool { return a.BackendAddress == b.BackendAddress })
}

// numberIn returns a slice's port number for a port of the Service: pods may use different numbers under
// one name, and have slices of their own then.
func (s *translation) numberIn(slice *discoveryv1.EndpointSlice, port *corev1.ServicePort) (number uint16, ok bool) {
	want := port.Protocol
	if want == "" {
		want = corev1.ProtocolTCP
	}
	for _, p := range slice.Ports {
		name, protocol := "", corev1.ProtocolTCP
		if p.Name != nil {
			name = *p.Name
		}
		if p.Protocol != nil {
			protocol = *p.Protocol
		}
		if name != port.Name || protocol != want {
			continue
		}
		if p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
			s.once("slice "+slice.Name+" "+name, ObjectInvalid, "give it a port from 1 to 65535", "EndpointSlice %s has no port number for %q, and its endpoints are not used", slice.Name, name)
			return 0, false
		}
		return uint16(*p.Port), true
	}
	return 0, false
}

func (s *translation) endpoint(slice *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) (endpoint, bool) {
	if len(e.Addresses) == 0 {
		return endpoint{}, false
	}
	text := e.Addresses[0] // the others belong to the same pod, and no consumer uses them (EndpointSlice's documentation)
	address, ok := unicast(text)
	if !ok || address.Is4() != (slice.AddressType == discoveryv1.AddressTypeIPv4) {
		s.once("slice "+slice.Name+" "+text, ObjectInvalid, "correct it", "EndpointSlice %s has the endpoint %q, which is no %s address that packets can be sent to", slice.Name, text, slice.AddressType)
		return endpoint{}, false
	}
	found := endpoint{BackendAddress: model.BackendAddress{Address: address}, standing: standingOf(e.Conditions)}
	if e.NodeName != nil {
		found.node = *e.NodeName
	}
	found.local = found.node != "" && found.node == s.t.Node.Name
	if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
		found.name = e.TargetRef.Name
		if !address.Is4() && s.has(true) {
			found.name += " (IPv6)" // the pod's other address has its name
		}
	}
	if e.Hints != nil {
		for _, z := range e.Hints.ForZones {
			found.zones = append(found.zones, z.Name)
		}
		for _, n := range e.Hints.ForNodes {
			found.nodes = append(found.nodes, n.Name)
		}
	}
	return found, true
}

// standingOf reads conditions by the rules of the EndpointSlice API: a missing ready counts as true, a missing
// serving as ready, and a missing terminating as false. ready already includes publishNotReadyAddresses.
func standingOf(c discoveryv1.EndpointConditions) standing {
	isReady := c.Ready == nil || *c.Ready
	serves, ends := isReady, c.Terminating != nil && *c.Terminating
	if c.Serving != nil {
		serves = *c.Serving
	}
	switch {
	case isReady:
		return ready
	case serves && ends:
		return parting
	}
	return gone
}

// chosen returns the backends for a traffic policy. Backends with weight 1 take new flows: the endpoints that are ready
// or, if there is none, endpoints that end but still serve (KEP-1669). All others have weight 0 and keep their flows,
// except for UDP, where a client that goes on sending would stay with a gone endpoint without end. elsewhere: other
// nodes could serve flows that this node must not.
func (t *Translator) chosen(endpoints []endpoint, local bool, protocol model.Protocol) (backends []model.Backend, elsewhere bool) {
	for _, is4 := range []bool{true, false} {
		var candidates []endpoint
		for _, e := range endpoints {
			if e.Address.Is4() != is4 {
				continue
			}
			if local && !e.local {
				elsewhere = elsewhere || e.standing != gone
				continue
			}
			candidates = append(candidates, e)
		}
		backends = append(backends, t.weighed(candidates, local, protocol)...)
	}
	elsewhere = elsewhere && !slices.ContainsFunc(backends, func(b model.Backend) bool { return b.Weight > 0 })
	name(backends)
	return backends, elsewhere
}

// weighed returns the backends of one family.
func (t *Translator) weighed(candidates []endpoint, local bool, protocol model.Protocol) (backends []model.Backend) {
	takes := gone + 1
	if slices.ContainsFunc(candidates, func(e endpoint) bool { return e.standing == ready }) {
		takes = ready
	}
	hinted := func(endpoint) bool { return true }
	if !local && takes == ready {
		hinted = t.hinted(candidates)
	}
	for _, e := range candidates {
		b := model.Backend{BackendAddress: e.BackendAddress, Name: e.name}
		if e.standing >= takes && hinted(e) {
			b.Weight = 1
		} else if protocol == model.UDP && e.standing == gone {
			continue
		}
		backends = append(backends, b)
	}
	return backends
}

// hinted returns a function that selects the ready endpoints that this node should use (KEP-2433, KEP-3015): the endpoints
// whose hints name the node, or its zone. If an endpoint has no hint, or no hint is for this node, it selects all.
func (t *Translator) hinted(candidates []endpoint) func(endpoint) bool {
	for _, topology := range []struct {
		own   string
		hints func(endpoint) []string
	}{{t.Node.Name, func(e endpoint) []string { return e.nodes }}, {t.Node.Zone, func(e endpoint) []string { return e.zones }}} {
		all, some := topology.own != "", false
		for _, e := range candidates {
			if e.standing == ready {
				all = all && len(topology.hints(e)) > 0
				some = some || slices.Contains(topology.hints(e), topology.own)
			}
		}
		if all && some {
			return func(e endpoint) bool { return slices.Contains(topology.hints(e), topology.own) }
		}
	}
	return func(endpoint) bool { return true }
}

// name gives each backend a unique name: its pod's. If a pod is in the list twice, its address is
// added; an endpoint without a pod has only the address.
func name(backends []model.Backend) {
	count := map[string]int{}
	for _, b := range backends {
		count[b.Name]++
	}
	for i := range backends {
		b := &backends[i]
		switch {
		case b.Name == "":
			b.Name = b.BackendAddress.String()
		case count[b.Name] > 1:
			b.Name += " " + b.BackendAddress.String()
		}
	}
}

// annotatedRanges returns loadBalancerSourceRanges in the form from before the field existed.
func annotatedRanges(service *corev1.Service) (texts []string) {
	for _, text := range strings.Split(service.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey], ",") {
		if text = strings.TrimSpace(text); text != "" {
			texts = append(texts, text)
		}
	}
	return texts
}
