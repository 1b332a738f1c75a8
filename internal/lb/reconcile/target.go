package reconcile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// serviceKey identifies a service of the data plane. A slot can name only backends that the packet's family
// reaches, so a configured service with frontends of both families is two services there, with one name.
type serviceKey struct {
	name string
	ipv6 bool
}

// seed tells the two halves of a service apart in the maps, which the name does not. A name cannot contain a
// slash, so the IPv6 half never has the seed text of another service.
func (k serviceKey) seed() uint32 {
	if k.ipv6 {
		return maglev.Seed(k.name + "/6")
	}
	return maglev.Seed(k.name)
}

// keyOf returns the key from which the record of a living service was made.
func keyOf(record ServiceRecord) serviceKey {
	ipv6 := serviceKey{name: record.Name, ipv6: true}
	if record.Seed == ipv6.seed() {
		return ipv6
	}
	return serviceKey{name: record.Name}
}

// String is `web (IPv4)`.
func (k serviceKey) String() string {
	return fmt.Sprintf("%q (%s)", k.name, familyName(k.ipv6))
}

func familyName(ipv6 bool) string {
	if ipv6 {
		return "IPv6"
	}
	return "IPv4"
}

// targetService is the half of a service that serves the frontends of one family, in the data
// plane's terms, without positions.
type targetService struct {
	serviceKey
	forwarding model.Forwarding
	tracking   model.Tracking
	affinity   time.Duration
	policy     model.Policy
	rules      map[netip.Prefix]bool // which sources may; nil: all
	frontends  []model.Frontend
	size       uint32 // 0: no backend takes new flows
	members    []maglev.Member
	backends   []model.BackendAddress // of the members, by the same index
	down       []bool                 // of the members, by the same index
	closesDown bool                   // no flow stays with backends that are down
}

// halvesOf translates a service, or returns an error if it contradicts itself. Sources check the text that
// people write; this check protects the maps from sources.
func halvesOf(service *model.Service) (halves []targetService, err error) {
	if err := checkFilters(service); err != nil {
		return nil, err
	}
	if err := checkTunnelled(service); err != nil {
		return nil, err
	}
	for _, ipv6 := range []bool{false, true} {
		half := targetService{
			serviceKey: serviceKey{name: service.Name, ipv6: ipv6},
			forwarding: service.Forwarding,
			tracking:   trackingOf(service),
			affinity:   service.AffinityTimeout,
			policy:     service.Policy,
			closesDown: service.ClosesDown,
			rules:      rulesOf(service, ipv6),
		}
		half.policy.Filters = half.rules != nil
		for _, f := range service.Frontends {
			if f.Address.Is6() == ipv6 {
				half.frontends = append(half.frontends, f)
			}
		}
		if len(half.frontends) == 0 {
			continue
		}
		if err := half.addBackends(service); err != nil {
			return nil, err
		}
		halves = append(halves, half)
	}
	return halves, nil
}

// checkTunnelled protects the maps from sources: the two levels of a service between nodes have to be such that a
// packet is encapsulated once at most, and a frontend of the second level must not look like a frontend of clients.
func checkTunnelled(service *model.Service) error {
	if service.Policy.Tunnelled && !service.Forwarding.Encapsulates() {
		return fmt.Errorf("service %q goes on at another service of this machine, and has forwarding %s: it must be %s or %s",
			service.Name, service.Forwarding, model.ForwardingDSRIPIP, model.ForwardingDSRGUE)
	}
	of := func(f model.Frontend, fault string) error {
		return fmt.Errorf("frontend %s of service %q %s", f, service.Name, fault)
	}
	for _, f := range service.Frontends {
		switch {
		case !f.Tunnelled() && f.Address.IsUnspecified():
			return of(f, "has the unspecified address, which only a frontend of packets between nodes can have")
		case !f.Tunnelled():
		case f.Protocol&^model.Tunnelled != model.TCP && f.Protocol&^model.Tunnelled != model.UDP:
			return of(f, "is for packets between nodes, and for something else as well")
		case !f.Ports.Exact():
			return of(f, "is for packets between nodes, and has more than one port")
		case service.Forwarding != model.ForwardingNATDestination:
			return of(f, fmt.Sprintf("is for packets between nodes, and forwarding is %s: it must be %s, so that no packet is encapsulated twice", service.Forwarding, model.ForwardingNATDestination))
		case service.Announce.Answers():
			return of(f, "is for packets between nodes, and cannot be announced")
		case !service.Frontends[0].Tunnelled():
			return of(f, "is for packets between nodes, and other frontends of the service are not")
		}
	}
	if len(service.Frontends) > 0 && service.Frontends[0].Tunnelled() {
		if i := slices.IndexFunc(service.Frontends, func(f model.Frontend) bool { return !f.Tunnelled() }); i >= 0 {
			return of(service.Frontends[i], "is for clients, and other frontends of the service are for packets between nodes")
		}
	}
	return nil
}

// addBackends adds the backends that serve the half's family, and decides the size of its table.
func (s *targetService) addBackends(service *model.Service) error {
	weight := uint32(0)
	own := make(map[model.BackendAddress]bool, len(service.Backends))
	for _, b := range serving(service, s.ipv6) {
		if own[b.BackendAddress] {
			return fmt.Errorf("service %q has backend %s twice: remove one", service.Name, b.BackendAddress)
		}
		own[b.BackendAddress] = true
		weight += min(b.Share(), 1)
		s.members = append(s.members, maglev.Member{Key: maglev.Key(b), Weight: b.Share()})
		s.backends = append(s.backends, b.BackendAddress)
		s.down = append(s.down, b.Observed.Down)
	}
	if weight == 0 {
		return nil
	}
	s.size = service.TableSize
	if s.size == 0 {
		s.size = maglev.SizeFor(len(s.members))
	} else if !slices.Contains(maglev.Sizes, s.size) {
		return fmt.Errorf("service %q has table size %d: it must be one of %d", service.Name, s.size, maglev.Sizes)
	}
	return nil
}

// placesFragments reports whether the service's fragments without ports can be placed: its
// backends answer clients themselves, and the addresses alone decide the slot.
func (s *targetService) placesFragments() bool {
	return s.policy.HashAddresses && s.forwarding.Direct()
}

// serving returns the backends for frontends of a family. NAT does not translate between families. Direct
// return forwards the client's packet unchanged, so backends of the other family can serve it, and do if the
// service has none of the same family.
func serving(service *model.Service, ipv6 bool) []model.Backend {
	same := 0
	for i := range service.Backends {
		if service.Backends[i].Address.Is6() == ipv6 {
			same++
		}
	}
	if same == len(service.Backends) || same == 0 && service.Forwarding.Direct() {
		return service.Backends
	}
	backends := make([]model.Backend, 0, same)
	for _, b := range service.Backends {
		if b.Address.Is6() == ipv6 {
			backends = append(backends, b)
		}
	}
	return backends
}

// Deserted returns the families, "IPv4" or "IPv6", whose frontends of the service have no backend that takes
// new flows.
//
// A service of packets between nodes has none where a node has no endpoint, which is no fault.
func Deserted(service *model.Service) (families []string) {
	for _, ipv6 := range []bool{false, true} {
		if !slices.ContainsFunc(service.Frontends, func(f model.Frontend) bool { return f.Address.Is6() == ipv6 && !f.Tunnelled() }) {
			continue
		}
		if !slices.ContainsFunc(serving(service, ipv6), func(b model.Backend) bool { return b.Share() > 0 }) {
			families = append(families, familyName(ipv6))
		}
	}
	return families
}

// trackingOf returns the service's tracking, and auto if the setting does not matter: the maps then have the
// same contents for every setting.
func trackingOf(service *model.Service) model.Tracking {
	if service.Tracking == "" || !service.Forwarding.Direct() && service.AffinityTimeout == 0 {
		return model.TrackingAuto
	}
	return service.Tracking
}

// closed reports whether flows with one of the service's backends, by its index, end: for these flows it counts
// as no backend of the service.
func (s *targetService) closed(i int) bool { return s.closesDown && s.down[i] }

// membership returns the service's backends with which flows may stay, by position.
func (s *targetService) membership(refs map[model.BackendAddress]BackendRef) members {
	now := make(members, len(s.backends))
	for i, b := range s.backends {
		if !s.closed(i) {
			now[refs[b]] = s.members[i].Weight == 0
		}
	}
	return now
}

// tables are the tables that have been filled since the last Apply, for each service: Apply needs the tables
// that Plan has filled.
type tables map[serviceKey]filledTable

type filledTable struct {
	size    uint32
	members []maglev.Member
	slots   []int32 // maglev.Table's
}

// fill returns the service's table, by the indices of its members.
func (t tables) fill(s *targetService) []int32 {
	if last, ok := t[s.serviceKey]; ok && last.size == s.size && slices.Equal(last.members, s.members) {
		return last.slots
	}
	slots := maglev.Table(s.size, s.seed(), s.members)
	t[s.serviceKey] = filledTable{s.size, s.members, slots}
	return slots
}

// keep drops the tables of other services.
func (t tables) keep(services []*targetService) {
	there := map[serviceKey]bool{}
	for _, s := range services {
		there[s.serviceKey] = true
	}
	maps.DeleteFunc(t, func(k serviceKey, _ filledTable) bool { return !there[k] })
}

// slots returns the service's table, each slot naming the backend of its member.
func (s *targetService) slots(refs []BackendRef, known tables) []BackendRef {
	if s.size == 0 {
		return nil
	}
	slots := make([]BackendRef, s.size)
	for i, member := range known.fill(s) {
		slots[i] = refs[member]
	}
	return slots
}

// filling is all input that decides which backends a service's slots name, and with which backends flows may
// stay.
type filling struct {
	size    uint32
	seed    uint32 // a service may have the position of one with another name
	tracked bool
	members []maglev.Member
	refs    []BackendRef // of the members
	closed  []bool       // of the members: flows with them end
}

// filling returns the input from which the service's slots are made.
func (s *targetService) filling(refs map[model.BackendAddress]BackendRef, tracked bool) *filling {
	f := &filling{s.size, s.seed(), tracked, s.members, make([]BackendRef, len(s.backends)), make([]bool, len(s.backends))}
	for i, b := range s.backends {
		f.refs[i], f.closed[i] = refs[b], s.closed(i)
	}
	return f
}

func (f *filling) equal(o *filling) bool {
	return o != nil && f.size == o.size && f.seed == o.seed && f.tracked == o.tracked && slices.Equal(f.members, o.members) && slices.Equal(f.refs, o.refs) &&
		slices.Equal(f.closed, o.closed)
}
