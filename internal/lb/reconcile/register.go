package reconcile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// register is a desired state in the form that a plan needs: every service, and the totals over all services
// for a backend, a frontend or an address that several services may name. The next desired state replaces it
// service by service, so that the cost of a change depends on its size.
type register struct {
	list      []*model.Service // of all, as it was last compared and made
	services  map[string]*declared
	backends  map[model.BackendAddress]use
	owners    map[model.Frontend]serviceKey
	sharers   map[model.Frontend]map[serviceKey]int // number of frontends of each service at an address and protocol, by fragmentsOf
	addresses map[netip.Addr]role
	sources   map[netip.Addr]bool // full NAT sends from them
	hostOwn   map[netip.Addr]bool
	halves    int // of all services
	prefixes  int // that the lists of sources of all halves have
}

// declared is a service as a source declares it, and its halves in the data plane's terms.
type declared struct {
	service *model.Service
	halves  []targetService
}

// use counts the halves of services that name a backend.
type use struct {
	named int
	open  int // where it takes new flows
	alive int // where it is not down
}

// role counts the frontends at an address, without those of packets between nodes.
type role struct {
	frontends int
	announced int // of services that have it announced
	direct    int // of services with direct return
}

func newRegister() *register {
	return &register{
		services:  map[string]*declared{},
		backends:  map[model.BackendAddress]use{},
		owners:    map[model.Frontend]serviceKey{},
		sharers:   map[model.Frontend]map[serviceKey]int{},
		addresses: map[netip.Addr]role{},
	}
}

// change is the difference between two desired states.
type change struct {
	gone []*declared // services that are gone or have changed
	come []*declared // services that are new or different, in the order of the configuration

	// The totals for these after the change; before it, once the change is made.
	list             []*model.Service
	sources, hostOwn map[netip.Addr]bool
}

// compare finds the change that turns the register into this desired state, or returns an error if the state
// contradicts itself. Unchanged services cost one comparison of pointers each.
func (g *register) compare(desired Desired) (*change, error) {
	c := &change{list: desired.Services, sources: map[netip.Addr]bool{}, hostOwn: desired.HostOwn}
	for _, source := range desired.NATSources {
		c.sources[source] = true
	}
	left, fresh := model.Changed(g.list, desired.Services)
	leaves := make(map[string]bool, len(left)) // or changes, or has another position
	for _, service := range left {
		leaves[service.Name] = true
	}
	found := make(map[string]bool, len(fresh))
	for _, service := range fresh {
		known := g.services[service.Name]
		if found[service.Name] || known != nil && !leaves[service.Name] {
			return nil, fmt.Errorf("service %q is listed twice: names must differ", service.Name)
		}
		found[service.Name] = true
		if known != nil && known.service.Equal(service) {
			continue
		}
		halves, err := halvesOf(service)
		if err != nil {
			return nil, err
		}
		if known != nil {
			c.gone = append(c.gone, known)
		}
		c.come = append(c.come, &declared{service: service, halves: halves})
	}
	for _, service := range slices.SortedFunc(slices.Values(left), func(a, b *model.Service) int { return strings.Compare(a.Name, b.Name) }) {
		if !found[service.Name] {
			c.gone = append(c.gone, g.services[service.Name])
		}
	}
	return c, nil
}

// do makes the change, or returns an error if the services contradict each other, and then changes nothing.
func (g *register) do(c *change) error {
	for _, d := range c.gone {
		g.remove(d)
	}
	for i, d := range c.come {
		if err := g.add(d); err != nil {
			g.restore(c, c.come[:i])
			return err
		}
	}
	g.swap(c)
	return nil
}

// undo reverts a change that was made.
func (g *register) undo(c *change) {
	g.restore(c, c.come)
	g.swap(c)
}

func (g *register) restore(c *change, come []*declared) {
	for _, d := range come {
		g.remove(d)
	}
	for _, d := range c.gone {
		_ = g.add(d) // it was there before
	}
}

func (g *register) swap(c *change) {
	g.list, c.list = c.list, g.list
	g.sources, c.sources = c.sources, g.sources
	g.hostOwn, c.hostOwn = c.hostOwn, g.hostOwn
}

// add adds a service whose name is free. If another service has one of its frontends, it returns an error and
// adds nothing.
func (g *register) add(d *declared) error {
	for i, f := range d.service.Frontends {
		owner, taken := g.owners[f]
		if !taken {
			g.owners[f] = serviceKey{d.service.Name, f.Address.Is6()}
			continue
		}
		for _, mine := range d.service.Frontends[:i] {
			delete(g.owners, mine)
		}
		return fmt.Errorf("frontend %s of service %q belongs to service %q already: remove it from one of them",
			f, d.service.Name, owner.name)
	}
	g.services[d.service.Name] = d
	g.count(d, 1)
	return nil
}

// remove removes a service of the register.
func (g *register) remove(d *declared) {
	for _, f := range d.service.Frontends {
		delete(g.owners, f)
	}
	delete(g.services, d.service.Name)
	g.count(d, -1)
}

// count adds a service to the totals, or with -1 removes it.
func (g *register) count(d *declared, sign int) {
	for i := range d.halves {
		half := &d.halves[i]
		g.halves += sign
		for prefix := range half.rules {
			if prefix.Bits() > 0 {
				g.prefixes += sign
			}
		}
		for _, f := range half.frontends {
			g.countFrontend(half, f, d.service.Announce.Answers(), sign)
		}
		for member, b := range half.backends {
			u := g.backends[b]
			u.named += sign
			if half.members[member].Weight > 0 {
				u.open += sign
			}
			if !half.down[member] {
				u.alive += sign
			}
			if g.backends[b] = u; u.named == 0 {
				delete(g.backends, b)
			}
		}
	}
}

func (g *register) countFrontend(half *targetService, f model.Frontend, announced bool, sign int) {
	if f.Tunnelled() { // it makes no address ours, and its fragments follow their first one
		return
	}
	r := g.addresses[f.Address]
	r.frontends += sign
	if announced {
		r.announced += sign
	}
	if half.forwarding.Direct() {
		r.direct += sign
	}
	if g.addresses[f.Address] = r; r.frontends == 0 {
		delete(g.addresses, f.Address)
	}
	at := fragmentsOf(f)
	if g.sharers[at] == nil {
		g.sharers[at] = map[serviceKey]int{}
	}
	here := g.sharers[at]
	if here[half.serviceKey] += sign; here[half.serviceKey] == 0 {
		delete(here, half.serviceKey)
	}
	if len(here) == 0 {
		delete(g.sharers, at)
	}
}

// fragmentsOf returns the frontend of fragments without ports at a frontend's address and protocol.
func fragmentsOf(f model.Frontend) model.Frontend {
	return model.Frontend{Address: f.Address, Protocol: f.Protocol | model.Fragments}
}

// owner returns the half of a service that a frontend belongs to. Fragments without ports have an owner if all
// flows to an address and protocol belong to one service, and that service can place them. With another service
// at the address, their owner is unknown.
func (g *register) owner(f model.Frontend) (serviceKey, bool) {
	if f.Configured() {
		key, ok := g.owners[f]
		return key, ok
	}
	if len(g.sharers[f]) != 1 {
		return serviceKey{}, false
	}
	only := slices.Collect(maps.Keys(g.sharers[f]))[0]
	return only, g.half(only).placesFragments()
}

// half returns the half of a service in the register.
func (g *register) half(key serviceKey) *targetService {
	half, _ := g.find(key)
	return half
}

// find returns the half of a service, if it is in the register.
func (g *register) find(key serviceKey) (*targetService, bool) {
	if d, ok := g.services[key.name]; ok {
		for i := range d.halves {
			if d.halves[i].serviceKey == key {
				return &d.halves[i], true
			}
		}
	}
	return nil, false
}

// names reports whether a service names the backend.
func (g *register) names(b model.BackendAddress) bool { return g.backends[b].named > 0 }

// record returns the backend's record at a position.
func (g *register) record(b model.BackendAddress, ref BackendRef) BackendRecord {
	u := g.backends[b]
	return BackendRecord{BackendRef: ref, BackendAddress: b, Draining: u.open == 0, Down: u.alive == 0}
}

// address returns the wanted record of an address; it may be empty.
func (g *register) address(address netip.Addr) AddressRecord {
	r := g.addresses[address]
	record := AddressRecord{
		Address: address, VIP: r.frontends > 0, Source: g.sources[address],
		Announce: r.announced > 0 || g.sources[address], Direct: r.direct > 0,
	}
	if (record.VIP || record.Source) && g.hostOwn[address] {
		record.HostOwn, record.Announce = true, false
	}
	return record
}
