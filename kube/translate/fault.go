package translate

import (
	"fmt"
)

// Code is a kind of fault. The value is the word used in output.
type Code string

// The kinds of faults.
const (
	// SCTPRefused is a port with a protocol that the data plane does not have.
	SCTPRefused Code = "sctp_refused"
	// ObjectInvalid is a part of an object that an apiserver would have refused, or that has no meaning here.
	ObjectInvalid Code = "object_invalid"
	// FamilyUnserved is an address of a family that the Service's cluster IPs do not have.
	FamilyUnserved Code = "family_unserved"
	// NodeAddressMissing is a node port without an address of this node to serve it at.
	NodeAddressMissing Code = "node_address_missing"
	// PodRangeMissing is a node without the ranges of its pods' addresses, although packets of pods have to be
	// recognised.
	PodRangeMissing Code = "pod_range_missing"
	// AffinityShortened is a session affinity that is longer than the data plane keeps one.
	AffinityShortened Code = "affinity_shortened"
	// HealthPortUnserved is a healthCheckNodePort that nothing answers.
	HealthPortUnserved Code = "health_port_unserved"
	// EndpointsMissing is a port that has had no endpoint that takes connections for a while.
	EndpointsMissing Code = "endpoints_missing"
	// FrontendTaken is an address and port that another Service has.
	FrontendTaken Code = "frontend_taken"
	// ServiceRefused is a service that the rest of the node refuses.
	ServiceRefused Code = "service_refused"
	// PoolExhausted is a Service of type LoadBalancer that gets no address, because none of the pool's is free.
	PoolExhausted Code = "pool_exhausted"
	// AddressOutsidePool is a load balancer's address that the pool does not have.
	AddressOutsidePool Code = "address_outside_pool"
	// AddressRefused is an address that a Service of type LoadBalancer asks for and does not get.
	AddressRefused Code = "address_refused"
	// NetworkUnreached is a load balancer's address that is announced by a node outside the address's network.
	NetworkUnreached Code = "network_unreached"
	// AgentAway is a node that gets no new connections from other nodes, because its agent has not been ready for long.
	AgentAway Code = "agent_away"
	// KubeProxyFound is a kube-proxy, or its rules, on this node.
	KubeProxyFound Code = "kube_proxy_found"
)

// Fault describes a part of an object that cannot be served, with a remedy.
type Fault struct {
	Code   Code
	Object string // "Service default/web", "EndpointSlice default/web-x7k2p", "Node n1"
	Text   string // the request, and the reason why it is not served
	Remedy string
}

// String returns the fault as one line.
func (f Fault) String() string { return fmt.Sprintf("%s: %s: %s", f.Object, f.Text, f.Remedy) }

// faults collects faults.
type faults []Fault

func (f *faults) add(code Code, object, remedy, format string, values ...any) {
	*f = append(*f, Fault{code, object, fmt.Sprintf(format, values...), remedy})
}
