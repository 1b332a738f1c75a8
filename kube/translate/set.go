package translate

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Key names a Service: "namespace/name".
type Key = string

// Set has the translations of all Services. An address and port belongs to one of them: if several Services want it, to
// the one that was created first, and if two were created in one second, to the first by name. So all nodes agree
// without talking. The cost of a change depends on the Service that changes, and on Services that want the same
// frontends.
type Set struct {
	members map[Key]*member
	claims  map[model.Frontend][]*member // the owner first
	refused map[string]string            // names of services that the node refuses, with the reason
	faulty  map[Key]*member              // the members with faults
	short   map[*member]bool             // the members that have less than they want
	partly  map[*member]bool             // the members with faults and services
	bare    map[*member]bool             // the members without services

	health   map[Key]Health           // of the Services with a port for health checks
	unheard  bool                     // health has changed since HealthSettled was last called
	services map[string]model.Service // of all, by name
	pending  map[string]bool          // names of the services that have changed since Settled was last called
}

type member struct {
	key      Key
	created  time.Time
	wanted   Translation
	services []model.Service // with the frontends that they may have
	faults   []Fault
}

// Put sets the translation of a Service. Unchanged services of the balancer keep their
// lists, so that the comparison costs little.
func (s *Set) Put(key Key, created time.Time, wanted Translation) (changed bool) {
	if s.members == nil {
		s.members, s.claims, s.refused = map[Key]*member{}, map[model.Frontend][]*member{}, map[string]string{}
		s.faulty, s.short, s.partly, s.bare = map[Key]*member{}, map[*member]bool{}, map[*member]bool{}, map[*member]bool{}
		s.services, s.pending, s.health = map[string]model.Service{}, map[string]bool{}, map[Key]Health{}
	}
	healthChanged := s.health[key] != wanted.Health
	s.unheard = s.unheard || healthChanged
	if delete(s.health, key); wanted.Health.Port != 0 {
		s.health[key] = wanted.Health
	}
	m, known := s.members[key]
	if !known {
		if len(wanted.Services)+len(wanted.Faults) == 0 {
			return false
		}
		m = &member{key: key}
		s.members[key] = m
	}
	if known && !healthChanged && m.created.Equal(created) && slices.Equal(m.wanted.Faults, wanted.Faults) && equal(m.wanted.Services, wanted.Services) {
		return false
	}
	if !sameFrontends(m.wanted.Services, wanted.Services) {
		for i := range m.wanted.Services {
			delete(s.refused, m.wanted.Services[i].Name)
		}
	}
	touched := s.withdraw(m)
	if len(wanted.Services)+len(wanted.Faults) == 0 {
		delete(s.members, key)
	} else {
		m.created, m.wanted = created, wanted
		for f := range m.frontends() {
			s.claims[f] = append(s.claims[f], m)
			slices.SortFunc(s.claims[f], func(a, b *member) int { return cmp.Or(a.created.Compare(b.created), strings.Compare(a.key, b.key)) })
			for _, other := range s.claims[f] {
				touched[other] = true
			}
		}
	}
	touched[m] = true
	for other := range touched {
		s.settle(other)
	}
	return true
}

// Remove removes a Service.
func (s *Set) Remove(key Key) (changed bool) { return s.Put(key, time.Time{}, Translation{}) }

// Refuse leaves a service of the balancer out until it has other frontends, or all are readmitted.
func (s *Set) Refuse(name, why string) {
	if s.refused[name] != "" {
		return
	}
	for _, m := range s.members {
		if slices.ContainsFunc(m.services, func(x model.Service) bool { return x.Name == name }) {
			s.refused[name] = why
			s.settle(m)
			return
		}
	}
}

// Refused reports whether a service is left out.
func (s *Set) Refused() bool { return len(s.refused) > 0 }

// Readmit readmits all refused services.
func (s *Set) Readmit() {
	clear(s.refused)
	for _, m := range slices.Collect(maps.Keys(s.short)) {
		s.settle(m)
	}
}

// Services returns all services, by Service and name.
func (s *Set) Services() []model.Service {
	all := []model.Service{}
	for _, key := range slices.Sorted(maps.Keys(s.members)) {
		all = append(all, s.members[key].services...)
	}
	return all
}

// Health returns the answers for the ports of health checks.
func (s *Set) Health() map[Key]Health { return maps.Clone(s.health) }

// HealthPending reports whether Health has changed since HealthSettled was last called.
func (s *Set) HealthPending() bool { return s.unheard }

// HealthSettled records that the answers are in force.
func (s *Set) HealthSettled() { s.unheard = false }

// Len returns the number of services of the balancer.
func (s *Set) Len() int { return len(s.services) }

// Count returns the numbers of Services that are served without a fault, with one, and not at all. Services that yield
// nothing, without a fault, are not counted.
func (s *Set) Count() (whole, part, none int) {
	part, none = len(s.partly), len(s.bare)
	return len(s.members) - part - none, part, none
}

// Pending lists the changes since Settled was last called, or everything at first: services that are new or different,
// and names of services that no longer exist; by name.
func (s *Set) Pending() (declare []model.Service, withdraw []string) {
	for _, name := range slices.Sorted(maps.Keys(s.pending)) {
		if service, is := s.services[name]; is {
			declare = append(declare, service)
		} else {
			withdraw = append(withdraw, name)
		}
	}
	return declare, withdraw
}

// Settled records that the pending changes are in force.
func (s *Set) Settled() { s.pending = map[string]bool{} } // not cleared: at first it had all services

// Faults returns the faults of all Services, by Service.
func (s *Set) Faults() (all []Fault) {
	for _, key := range slices.Sorted(maps.Keys(s.faulty)) {
		all = append(all, s.faulty[key].faults...)
	}
	return all
}

// secondary marks frontends that a Service has beside the ordinary ones: another frontend has their faults.
const secondary = model.Inside | model.Tunnelled

// Lacking returns the names of a Service's services without an endpoint that takes connections, on any node.
func (s *Set) Lacking(key Key) (names []string) {
	m := s.members[key]
	if m == nil {
		return nil
	}
	for i := range m.services {
		service := &m.services[i]
		other := service.Frontends[0].Protocol&secondary != 0 // another service has the same endpoints, and is reported
		if service.Policy.Rejects && !other && !slices.ContainsFunc(service.Backends, func(b model.Backend) bool { return b.Weight > 0 }) {
			names = append(names, service.Name)
		}
	}
	return names
}

// withdraw removes a Service's claims, and returns the members whose frontends may change.
func (s *Set) withdraw(m *member) map[*member]bool {
	touched := map[*member]bool{}
	for f := range m.frontends() {
		left := slices.DeleteFunc(s.claims[f], func(x *member) bool { return x == m })
		for _, other := range left {
			touched[other] = true
		}
		if s.claims[f] = left; len(left) == 0 {
			delete(s.claims, f)
		}
	}
	m.wanted = Translation{}
	return touched
}

// frontends returns the wanted frontends, each once.
func (m *member) frontends() map[model.Frontend]bool {
	all := map[model.Frontend]bool{}
	for i := range m.wanted.Services {
		for _, f := range m.wanted.Services[i].Frontends {
			all[f] = true
		}
	}
	return all
}

// settle decides which of its wanted services a Service may have.
func (s *Set) settle(m *member) {
	found := faults(slices.Clone(m.wanted.Faults))
	object := "Service " + m.key
	before := m.services
	m.services = nil
	had := map[model.Frontend]string{}
	for _, service := range m.wanted.Services {
		if why := s.refused[service.Name]; why != "" {
			found.add(ServiceRefused, object, "change one of the two", "%s is not served: %s", service.Name, why)
			continue
		}
		var kept []model.Frontend
		for _, f := range service.Frontends {
			owner := s.claims[f][0]
			switch {
			case (owner != m || had[f] != "") && f.Protocol&secondary != 0:
			case owner != m:
				found.add(FrontendTaken, object, "give one of them another address or port", "%s is not served for it: Service %s was there first", f, owner.key)
			case had[f] != "":
				found.add(FrontendTaken, object, "give one of them another address or port", "%s is not served for %s: it is %s already", f, service.Name, had[f])
			default:
				had[f] = service.Name
				kept = append(kept, f)
			}
		}
		if len(kept) == 0 {
			continue
		}
		if len(kept) < len(service.Frontends) {
			service.Frontends = kept
		}
		m.services = append(m.services, service)
	}
	m.faults = found
	s.note(m, before)
}

// note records the changes of a Service that had these services before.
func (s *Set) note(m *member, before []model.Service) {
	if delete(s.faulty, m.key); len(m.faults) > 0 {
		s.faulty[m.key] = m
	}
	if delete(s.short, m); len(m.services) < len(m.wanted.Services) {
		s.short[m] = true
	}
	delete(s.partly, m)
	delete(s.bare, m)
	switch {
	case s.members[m.key] != m: // it is being removed
	case len(m.services) == 0:
		s.bare[m] = true
	case len(m.faults) > 0:
		s.partly[m] = true
	}
	if equal(before, m.services) {
		return
	}
	for i := range before {
		delete(s.services, before[i].Name)
		s.pending[before[i].Name] = true
	}
	for _, service := range m.services {
		s.services[service.Name] = service
		s.pending[service.Name] = true
	}
}

func sameFrontends(a, b []model.Service) bool {
	return slices.EqualFunc(a, b, func(x, y model.Service) bool { return x.Name == y.Name && slices.Equal(x.Frontends, y.Frontends) })
}

func equal(a, b []model.Service) bool {
	return slices.EqualFunc(a, b, func(x, y model.Service) bool { return x.Equal(&y) })
}
