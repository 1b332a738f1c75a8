package pool

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/kube/translate"
)

// Gift has the addresses that a Service lacks and may have.
type Gift struct {
	Service   *corev1.Service
	Addresses []netip.Addr // of different families, in the order of its ipFamilies
}

// Name returns the Service's name, NAMESPACE/NAME.
func (g Gift) Name() string { return key(g.Service) }

// Plan decides which Services get which addresses, the oldest first, and which get none, and why. services are all Services that have an
// address, or may get one; ours reports whether this pool is for a Service. Plan changes nothing.
//
// It reads every address in use before it gives any, so neither the order of objects nor restarts nor waiting Services affect
// a Service that has an address.
func (p Pool) Plan(services []*corev1.Service, ours func(*corev1.Service) bool) (gifts []Gift, faults []translate.Fault) {
	services = slices.Clone(services)
	slices.SortFunc(services, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Time.Compare(b.CreationTimestamp.Time), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	held := map[netip.Addr]string{}
	for _, service := range services {
		for _, text := range slices.Concat(texts(service), service.Spec.ExternalIPs) {
			if a, err := netip.ParseAddr(text); err == nil && held[a.Unmap()] == "" {
				held[a.Unmap()] = key(service)
			}
		}
	}
	free := map[bool]func() (netip.Addr, bool){}
	for _, is4 := range []bool{true, false} {
		next, stop := iter.Pull(p.addresses(is4))
		defer stop()
		free[is4] = func() (netip.Addr, bool) {
			for {
				if a, ok := next(); !ok || held[a] == "" {
					return a, ok
				}
			}
		}
	}
	for _, service := range services {
		if !ours(service) || isForeign(service) {
			continue
		}
		w := want{pool: p, service: service, held: held, free: free}
		w.work()
		faults = append(faults, w.faults...)
		if len(w.gets) > 0 && service.DeletionTimestamp == nil {
			gifts = append(gifts, Gift{service, w.gets})
		}
	}
	return gifts, faults
}

func key(service *corev1.Service) string { return service.Namespace + "/" + service.Name }

// texts returns the addresses in a Service's status. A Service of another type has none: the apiserver empties its status.
func texts(service *corev1.Service) (all []string) {
	if service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	for _, i := range service.Status.LoadBalancer.Ingress {
		if i.IP != "" {
			all = append(all, i.IP)
		}
	}
	return all
}

// isForeign reports whether another load balancer serves the Service: a pool gives no names, and no addresses of proxies.
func isForeign(service *corev1.Service) bool {
	return slices.ContainsFunc(service.Status.LoadBalancer.Ingress, func(i corev1.LoadBalancerIngress) bool {
		return i.Hostname != "" || i.IPMode != nil && *i.IPMode != corev1.LoadBalancerIPModeVIP
	})
}

// want is an unfinished Service.
type want struct {
	pool    Pool
	service *corev1.Service
	held    map[netip.Addr]string
	free    map[bool]func() (netip.Addr, bool) // returns the next address of IPv4, or of IPv6, that no Service has
	gets    []netip.Addr
	faults  []translate.Fault
}

func (w *want) fault(code translate.Code, remedy, format string, values ...any) {
	w.faults = append(w.faults, translate.Fault{Code: code, Object: "Service " + key(w.service), Text: fmt.Sprintf(format, values...), Remedy: remedy})
}

func (w *want) work() {
	has := map[bool]netip.Addr{}
	for _, text := range texts(w.service) {
		a, err := netip.ParseAddr(text)
		if err != nil {
			continue // the apiserver does not accept it, and the translation reports it
		}
		has[a.Is4()] = a
		if !w.pool.Contains(a) {
			w.fault(translate.AddressOutsidePool, "add this address to the pool again, or make the Service anew, which then gets another address",
				"its address %s is not in the pool: it keeps the address", a)
		}
	}
	asked, asks := w.asked(has)
	var lacks []corev1.IPFamily
	for _, family := range w.service.Spec.IPFamilies {
		is4 := family == corev1.IPv4Protocol
		switch {
		case has[is4].IsValid():
		case asks && !asked.IsValid(): // a fault has the reason
		case asks && asked.Is4() == is4:
			w.give(asked)
		default:
			if a, ok := w.free[is4](); ok {
				w.give(a)
			} else {
				lacks = append(lacks, family)
			}
		}
	}
	optional := w.service.Spec.IPFamilyPolicy != nil && *w.service.Spec.IPFamilyPolicy == corev1.IPFamilyPolicyPreferDualStack && len(has)+len(w.gets) > 0
	for _, family := range lacks {
		switch {
		case w.pool.has(family == corev1.IPv4Protocol):
			w.fault(translate.PoolExhausted, "give the pool more addresses, or delete Services that need none", "it gets no %s address: none of the pool's is free", family)
		case !optional:
			w.fault(translate.PoolExhausted, "give the pool addresses of this family", "it gets no %s address: the pool has none of this family", family)
		}
	}
}

func (w *want) give(a netip.Addr) {
	w.held[a] = key(w.service)
	w.gets = append(w.gets, a)
}

// asked returns the address in spec.loadBalancerIP, which is of one of the Service's families. asks: the field is set;
// if its address cannot be given, a is not valid, and the Service gets no other address.
func (w *want) asked(has map[bool]netip.Addr) (a netip.Addr, asks bool) {
	text := w.service.Spec.LoadBalancerIP
	if text == "" {
		return a, false
	}
	const remedy = "correct spec.loadBalancerIP, or remove it"
	a, err := netip.ParseAddr(text)
	switch {
	case err != nil:
		w.fault(translate.AddressRefused, remedy, "it asks for the address %q, which is no address", text)
	case has[a.Is4()] == a:
		return a, true
	case has[a.Is4()].IsValid():
		w.fault(translate.AddressRefused, "make the Service anew to get the other address, or remove spec.loadBalancerIP", "it asks for the address %s, and keeps %s, which it has", a, has[a.Is4()])
		return a, true
	case !w.pool.Contains(a):
		w.fault(translate.AddressRefused, remedy, "it asks for the address %s, which is not in the pool", a)
	case w.held[a] != "":
		w.fault(translate.AddressRefused, remedy, "it asks for the address %s, which Service %s has", a, w.held[a])
	default:
		family := corev1.IPv6Protocol
		if a.Is4() {
			family = corev1.IPv4Protocol
		}
		if slices.Contains(w.service.Spec.IPFamilies, family) {
			return a, true
		}
		w.fault(translate.AddressRefused, remedy, "it asks for the address %s, and its ipFamilies do not have %s", a, family)
	}
	return netip.Addr{}, true
}
