package source

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/kube/translate"
)

// outer has the Services that have addresses for clients outside of the cluster, or may get some.
type outer struct {
	services map[translate.Key]*corev1.Service
	changed  bool                              // one of them has changed
	at       map[string]map[translate.Key]bool // by an address of a load balancer
}

// note records a Service in its present state; nil: it does not exist.
func (o *outer) note(key translate.Key, service *corev1.Service) {
	if service != nil && service.Spec.Type != corev1.ServiceTypeLoadBalancer && len(service.Spec.ExternalIPs) == 0 {
		service = nil
	}
	before := o.services[key]
	if before == service { // informers make a new object for each change
		return
	}
	o.changed = true
	o.record(key, before, false)
	o.record(key, service, true)
	if service == nil {
		delete(o.services, key)
		return
	}
	if o.services == nil {
		o.services = map[translate.Key]*corev1.Service{}
	}
	o.services[key] = service
}

// record notes that a Service has its load balancer's addresses, or no longer has them.
func (o *outer) record(key translate.Key, service *corev1.Service, has bool) {
	if service == nil {
		return
	}
	for _, i := range service.Status.LoadBalancer.Ingress {
		there := o.at[i.IP]
		switch {
		case i.IP == "":
		case has && there == nil:
			if o.at == nil {
				o.at = map[string]map[translate.Key]bool{}
			}
			o.at[i.IP] = map[translate.Key]bool{key: true}
		case has:
			there[key] = true
		default:
			if delete(there, key); len(there) == 0 {
				delete(o.at, i.IP)
			}
		}
	}
}

// beside returns the other Services that share an address with this one, directly or by way of further Services; sorted.
func (o *outer) beside(key translate.Key) (all []translate.Key) {
	seen := map[translate.Key]bool{key: true}
	for next := []translate.Key{key}; len(next) > 0; next = next[1:] {
		service := o.services[next[0]]
		if service == nil {
			continue
		}
		for _, i := range service.Status.LoadBalancer.Ingress {
			for other := range o.at[i.IP] {
				if !seen[other] {
					seen[other] = true
					next, all = append(next, other), append(all, other)
				}
			}
		}
	}
	slices.Sort(all)
	return all
}

func (o *outer) all() []*corev1.Service { return slices.Collect(maps.Values(o.services)) }
