package reconcile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/maglev"
	"github.com/shunt-lb/shunt/internal/model"
)

// serviceKey identifies a service of the data plane. A slot can name only backends that
// the packet's family reaches, so a configured service with frontends of both families
// is two services there, of one name.
type serviceKey struct {
	name string
	ipv6 bool
}

// seed tells the two halves of a service apart in the maps, where the name does not.
// A name cannot contain a slash, so the IPv6 half never has another service's seed text.
func (k serviceKey) seed() uint32 {
	if k.ipv6 {
		return maglev.Seed(k.name + "/6")
	}
	return maglev.Seed(k.name)
}

// keyOf is the key that the record of a living service was made from.
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

// target is the desired state in the data plane's terms, without positions.
type target struct {
	services []targetService
	backends []model.BackendAddress // each once, in the order of the configuration
	// draining backends take no new flows in any service that names them; of those some are down.
	draining  map[model.BackendAddress]bool
	down      map[model.BackendAddress]bool
	frontends []targetFrontend
	addresses map[netip.Addr]AddressRecord
	limits    model.Limits
}

type targetFrontend struct {
	model.Frontend
	service serviceKey
}

type targetService struct {
	serviceKey
	forwarding model.Forwarding
	tracking   model.Tracking
	affinity   time.Duration
	policy     model.Policy
	rules      map[netip.Prefix]bool // which sources may; nil: all
	size       uint32                // 0: nobody takes new flows
	members    []maglev.Member
	backends   []model.BackendAddress // of the members, by the same index
}

// newTarget translates the desired state, or says how it contradicts itself. Sources
// check what people write; this guards the maps against sources.
func newTarget(desired Desired) (*target, error) {
	t := &target{
		addresses: map[netip.Addr]AddressRecord{},
		draining:  map[model.BackendAddress]bool{},
		down:      map[model.BackendAddress]bool{},
		limits:    desired.Limits,
	}
	names := map[string]bool{}
	owners := map[model.Frontend]string{}
	for _, service := range desired.Services {
		if names[service.Name] {
			return nil, fmt.Errorf("service %q is there twice: names must differ", service.Name)
		}
		names[service.Name] = true
		if err := checkFilters(service); err != nil {
			return nil, err
		}
		for _, f := range service.Frontends {
			if owner, ok := owners[f]; ok {
				return nil, fmt.Errorf("frontend %s of service %q belongs to service %q already: remove it from one of them",
					f, service.Name, owner)
			}
			owners[f] = service.Name
		}
		for _, ipv6 := range []bool{false, true} {
			if err := t.add(service, ipv6); err != nil {
				return nil, err
			}
		}
	}
	t.addFragments(desired.Services)
	for _, source := range desired.Sources {
		record := t.addresses[source]
		record.Address, record.Source, record.Announce = source, true, true
		t.addresses[source] = record
	}
	for address, record := range t.addresses {
		if desired.HostOwn != nil && desired.HostOwn(address) {
			record.HostOwn, record.Announce = true, false
			t.addresses[address] = record
		}
	}
	return t, nil
}

// add adds the half of the service that serves one family, if it has frontends.
func (t *target) add(service model.Service, ipv6 bool) error {
	half := targetService{
		serviceKey: serviceKey{name: service.Name, ipv6: ipv6},
		forwarding: service.Forwarding,
		tracking:   trackingOf(service),
		affinity:   service.AffinityTimeout,
		policy:     service.Policy,
		rules:      rulesOf(service, ipv6),
	}
	half.policy.Filters = half.rules != nil
	frontends := 0
	for _, f := range service.Frontends {
		if f.Address.Is6() != ipv6 {
			continue
		}
		frontends++
		t.frontends = append(t.frontends, targetFrontend{f, half.serviceKey})
		record := t.addresses[f.Address]
		record.Address, record.VIP = f.Address, true
		record.Announce = record.Announce || service.Announce == model.AnnounceL2
		record.Direct = record.Direct || service.Forwarding.Direct()
		t.addresses[f.Address] = record
	}
	if frontends == 0 {
		return nil
	}
	weight := uint32(0)
	own := map[model.BackendAddress]bool{}
	for _, b := range service.Backends {
		if !reaches(service, b, ipv6) {
			continue
		}
		if own[b.BackendAddress] {
			return fmt.Errorf("service %q has backend %s twice: remove one", service.Name, b.BackendAddress)
		}
		own[b.BackendAddress] = true
		weight += min(b.Share(), 1)
		half.members = append(half.members, maglev.Member{Key: maglev.Key(b), Weight: b.Share()})
		half.backends = append(half.backends, b.BackendAddress)
		drains, known := t.draining[b.BackendAddress]
		if !known {
			t.backends = append(t.backends, b.BackendAddress)
		}
		t.draining[b.BackendAddress] = b.Share() == 0 && (drains || !known)
		t.down[b.BackendAddress] = b.Down && (t.down[b.BackendAddress] || !known)
	}
	if weight > 0 {
		half.size = service.TableSize
		if half.size == 0 {
			half.size = maglev.SizeFor(len(half.members))
		} else if !slices.Contains(maglev.Sizes, half.size) {
			return fmt.Errorf("service %q has table size %d: it must be one of %d", service.Name, half.size, maglev.Sizes)
		}
	}
	t.services = append(t.services, half)
	return nil
}

// addFragments adds the frontends of fragments without ports: where all flows to an address and
// protocol are one service's, whose backends answer clients themselves and whose slots the
// addresses alone decide. With any other service there, nobody knows whose they are.
func (t *target) addFragments(services []model.Service) {
	hashes := map[string]bool{}
	for _, s := range services {
		hashes[s.Name] = s.Policy.HashAddresses && s.Forwarding.Direct()
	}
	owners := map[model.Frontend]serviceKey{}
	var order []model.Frontend
	for _, f := range t.frontends {
		f.Ports, f.Protocol = model.PortRange{}, f.Protocol|model.Fragments
		owner, known := owners[f.Frontend]
		if !known {
			order = append(order, f.Frontend)
		} else if owner != f.service {
			f.service = serviceKey{}
		}
		owners[f.Frontend] = f.service
	}
	for _, f := range order {
		if hashes[owners[f].name] {
			t.frontends = append(t.frontends, targetFrontend{f, owners[f]})
		}
	}
}

// reaches reports whether a backend serves frontends of a family. NAT does not translate
// between families. Direct return hands the client's packet over as it is, so a backend of
// the other family can, and does where the service has none of the same.
func reaches(service model.Service, b model.Backend, ipv6 bool) bool {
	if b.Address.Is6() == ipv6 {
		return true
	}
	return service.Forwarding.Direct() &&
		!slices.ContainsFunc(service.Backends, func(b model.Backend) bool { return b.Address.Is6() == ipv6 })
}

// Deserted is the families, "IPv4" or "IPv6", whose frontends of the service have no backend that
// takes new flows.
func Deserted(service model.Service) (families []string) {
	for _, ipv6 := range []bool{false, true} {
		if !slices.ContainsFunc(service.Frontends, func(f model.Frontend) bool { return f.Address.Is6() == ipv6 }) {
			continue
		}
		if !slices.ContainsFunc(service.Backends, func(b model.Backend) bool { return b.Share() > 0 && reaches(service, b, ipv6) }) {
			families = append(families, familyName(ipv6))
		}
	}
	return families
}

// trackingOf is the service's tracking, and auto where it does not matter: the maps then
// hold the same whatever is configured.
func trackingOf(service model.Service) model.Tracking {
	if service.Tracking == "" || !service.Forwarding.Direct() && service.AffinityTimeout == 0 {
		return model.TrackingAuto
	}
	return service.Tracking
}

// membership is the service's backends by position.
func (s *targetService) membership(refs map[model.BackendAddress]BackendRef) members {
	now := make(members, len(s.backends))
	for i, b := range s.backends {
		now[refs[b]] = s.members[i].Weight == 0
	}
	return now
}

// tables are those that have been filled since the last Apply, for each service: what Plan has
// filled, Apply needs again.
type tables map[serviceKey]filledTable

type filledTable struct {
	size    uint32
	members []maglev.Member
	slots   []int32 // maglev.Table's
}

// fill is the service's table, by the indices of its members.
func (t tables) fill(s *targetService) []int32 {
	if last, ok := t[s.serviceKey]; ok && last.size == s.size && slices.Equal(last.members, s.members) {
		return last.slots
	}
	slots := maglev.Table(s.size, s.seed(), s.members)
	t[s.serviceKey] = filledTable{s.size, s.members, slots}
	return slots
}

// keep forgets the tables of services that are not there.
func (t tables) keep(services []targetService) {
	there := map[serviceKey]bool{}
	for i := range services {
		there[services[i].serviceKey] = true
	}
	maps.DeleteFunc(t, func(k serviceKey, _ filledTable) bool { return !there[k] })
}

// slots is the service's table, each slot naming the backend of its member.
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

// filling is all that decides what a service's slots name, and which flows they may be left with.
type filling struct {
	size    uint32
	tracked bool
	members []maglev.Member
	refs    []BackendRef // of the members
}

// filling is what the service's slots are made from.
func (s *targetService) filling(refs map[model.BackendAddress]BackendRef, tracked bool) *filling {
	f := &filling{s.size, tracked, s.members, make([]BackendRef, len(s.backends))}
	for i, b := range s.backends {
		f.refs[i] = refs[b]
	}
	return f
}

func (f *filling) equal(o *filling) bool {
	return o != nil && f.size == o.size && f.tracked == o.tracked && slices.Equal(f.members, o.members) && slices.Equal(f.refs, o.refs)
}
