// Package translate translates objects of Kubernetes for the balancer: Services, EndpointSlices
// and this node become services of the model. It is pure: the same objects give the same services,
// and a part that cannot be served is a fault that names its object.
//
//	Service ────────┐
//	EndpointSlices ─┼─► Translator ─► services of one Service, faults ─► Set ─► all services
//	this node ──────┘                                                     the owner of each frontend
//
// A port of a Service is a service of the balancer, called namespace/name:port. Traffic policies and
// source ranges that hold only for some of its addresses make more services, with @external,
// @load-balancer or @cluster at the end of the name. With direct return between nodes, services for clients outside have two levels: NAME@direct, whose backends are nodes,
// and NAME@here, whose backends are this node's endpoints.
package translate
