package source

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/kube/translate"
)

// outer are the Services that have addresses for clients outside of the cluster, or may get some.
type outer struct {
	services map[translate.Key]*corev1.Service
	changed  bool // one of them is another than before
}

// note notes a Service as it is now; nil: there is none.
func (o *outer) note(key translate.Key, service *corev1.Service) {
	if service != nil && service.Spec.Type != corev1.ServiceTypeLoadBalancer && len(service.Spec.ExternalIPs) == 0 {
		service = nil
	}
	before := o.services[key]
	if before == service { // informers make another one for each change
		return
	}
	o.changed = true
	if service == nil {
		delete(o.services, key)
		return
	}
	if o.services == nil {
		o.services = map[translate.Key]*corev1.Service{}
	}
	o.services[key] = service
}

func (o *outer) all() []*corev1.Service { return slices.Collect(maps.Values(o.services)) }
