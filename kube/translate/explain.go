package translate

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Explanation has the ways in which a Service is served, and the reasons.
type Explanation struct {
	// Unserved is the reason why the Service is left alone; empty: it is not.
	Unserved string
	Ports    []PortExplanation
	Health   Health
	Faults   []Fault
	// Announced are the addresses of a load balancer, with the nodes that announce them.
	Announced []Announcement
}

// PortExplanation explains one port.
type PortExplanation struct {
	Name     string // may be empty
	Port     int32
	Protocol corev1.Protocol
	Variants []VariantExplanation // none: the port is not served, and a fault has the reason
	// NAT is the reason why clients outside are not served by direct return, as the translator should; empty: they are, or it should not.
	NAT string
}

// VariantExplanation explains one of the balancer's services for a port.
type VariantExplanation struct {
	model.Service
	// Endpoints are all endpoints of the EndpointSlices, including endpoints that are no backends. If the backends are nodes, they are all endpoints of the family.
	Endpoints []EndpointExplanation
}

// EndpointExplanation explains one endpoint.
type EndpointExplanation struct {
	model.BackendAddress
	Pod   string // may be empty
	Takes bool   // whether it takes new connections
	Why   string
}

// Explain explains the result of Service.
func (t *Translator) Explain(service *corev1.Service, endpointSlices []*discoveryv1.EndpointSlice) Explanation {
	e := Explanation{Unserved: t.notOurs(service)}
	if e.Unserved != "" {
		return e
	}
	s := t.begin(service, endpointSlices) // of the whole Service: its ports have one node that announces
	for i := range service.Spec.Ports {
		port, before := &service.Spec.Ports[i], len(s.services)
		s.port(port, endpointSlices)
		explained := PortExplanation{Name: port.Name, Port: port.Port, Protocol: cmp.Or(port.Protocol, corev1.ProtocolTCP)}
		for _, served := range s.services[before:] {
			if served.Frontends[0].Protocol&model.Tunnelled != 0 && len(served.Backends) == 0 {
				continue // it only refuses packets that come too late
			}
			v := VariantExplanation{Service: served}
			for _, endpoint := range s.endpoints(port, endpointSlices) {
				switch {
				case !served.Policy.Tunnelled:
					v.Endpoints = append(v.Endpoints, endpoint.explained(&served))
				case endpoint.Address.Is4() == served.Frontends[0].Address.Is4():
					v.Endpoints = append(v.Endpoints, s.throughNode(endpoint, &served))
				}
			}
			explained.Variants = append(explained.Variants, v)
		}
		explained.NAT = s.natWhy
		e.Ports = append(e.Ports, explained)
	}
	whole := s.end(endpointSlices)
	e.Health, e.Faults, e.Announced = whole.Health, whole.Faults, whole.Announced
	return e
}

// notOurs returns the reason why a Service is not for this proxy, or "".
func (t *Translator) notOurs(service *corev1.Service) string {
	switch label := service.Labels[proxyName]; {
	case service.Spec.Type == corev1.ServiceTypeExternalName:
		return fmt.Sprintf("it is of type ExternalName: DNS answers with %s, and no packet goes to the Service", service.Spec.ExternalName)
	case labelled(service, proxyName) && (label != t.ProxyName || t.ProxyName == ""):
		return fmt.Sprintf("its label %s gives it to %q", proxyName, label)
	case label != t.ProxyName:
		return fmt.Sprintf("it does not have the label %s: %s, and this shunt-kube serves only Services that have it", proxyName, t.ProxyName)
	case labelled(service, headless):
		return fmt.Sprintf("its label %s makes it headless: DNS answers with the pods' addresses, and no packet goes to the Service", headless)
	case !t.ours(service):
		return "it is headless: DNS answers with the pods' addresses, and no packet goes to the Service"
	}
	return ""
}

// explained returns the part of an endpoint in a service.
func (e endpoint) explained(service *model.Service) EndpointExplanation {
	x := EndpointExplanation{BackendAddress: e.BackendAddress, Pod: e.name}
	at := slices.IndexFunc(service.Backends, func(b model.Backend) bool { return b.BackendAddress == e.BackendAddress })
	x.Takes = at >= 0 && service.Backends[at].Weight > 0
	if service.Forwarding == model.ForwardingNATDestination && !e.local {
		x.Why = "on another node, and the traffic policy is Local"
		if service.Frontends[0].Protocol&model.Tunnelled != 0 {
			x.Why = "on another node, and the packets are for endpoints of this one"
		}
		return x
	}
	x.Why = e.why(x.Takes)
	if !x.Takes && at >= 0 {
		x.Why += keeps
	}
	return x
}

// keeps follows the reason why an endpoint that has connections takes no more.
const keeps = "; it keeps its connections"

// throughNode returns the part of an endpoint in a service whose backends are nodes.
func (s *translation) throughNode(e endpoint, service *model.Service) EndpointExplanation {
	x := EndpointExplanation{BackendAddress: e.BackendAddress, Pod: e.name, Takes: s.direct.takes[e.BackendAddress]}
	x.Why = e.why(x.Takes)
	if s.t.Away[e.node] {
		x.Why = "the agent of its node is not ready"
	}
	if !x.Takes && slices.ContainsFunc(service.Backends, func(b model.Backend) bool { return b.Name == e.node }) {
		x.Why += keeps
	}
	where := "on node " + e.node
	if e.local {
		where = "on this node"
	}
	x.Why += ", " + where
	return x
}

// why returns the reason why an endpoint that could be a backend takes new connections, or does not.
func (e endpoint) why(takes bool) string {
	switch {
	case takes && e.standing == parting:
		return "terminating, still serving, and no endpoint is ready"
	case takes:
		return "ready"
	case e.standing == ready:
		return "ready, but its hints are for other nodes or zones"
	case e.standing == parting:
		return "terminating; others are ready"
	}
	return "not ready, or terminating and not serving"
}
