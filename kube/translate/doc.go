// Package translate says what objects of Kubernetes mean to the balancer: Services, EndpointSlices
// and this node, as services of the model. It is pure: the same objects give the same services,
// and what cannot be served is a fault that names its object.
//
//	Service ────────┐
//	EndpointSlices ─┼─► Translator ─► services of one Service, faults ─► Set ─► all services
//	this node ──────┘                                                     who has which frontend
//
// A port of a Service is a service of the balancer, called namespace/name:port. Traffic policies and
// source ranges that are for some of its addresses alone make more of them, with @external,
// @load-balancer or @cluster at the end of the name.
package translate
