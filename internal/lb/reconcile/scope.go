package reconcile

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// scope is the part of the state that a plan examines: all entries that a change of the desired state may
// touch. If the maps are not known to match the desired state before it, the scope is all their contents as
// well.
type scope struct {
	services  []*targetService       // that are new or different, in the order of the configuration
	former    []uint32               // positions of services that may have to go
	backends  []model.BackendAddress // wanted, each once, in the order of the configuration
	positions []uint32               // positions of backends that may have to go
	frontends []targetFrontend       // wanted, in the order of the configuration
	had       []model.Frontend       // that may have to go
	addresses []netip.Addr           // that may need another record
	filters   []Filter               // that may have to go
}

type targetFrontend struct {
	model.Frontend
	service serviceKey
}

// newScope returns the scope of a change that desired has already made. Lists of the mirror's entries are
// sorted.
func newScope(m *mirror, desired *register, c *change, whole bool) *scope {
	s := &scope{}
	for _, d := range c.come {
		for i := range d.halves {
			s.services = append(s.services, &d.halves[i])
		}
	}
	s.addBackends(m, desired, c)
	s.addFrontends(m, desired, c)
	s.addAddresses(desired, c)
	for _, half := range halvesIn(c.gone) {
		index, ok := m.byKey[half.serviceKey]
		if !ok {
			continue
		}
		s.former = append(s.former, index)
		for prefix := range half.rules {
			s.filters = append(s.filters, Filter{index, m.services[index].record.Generation, prefix})
		}
	}
	if whole {
		s.former = slices.AppendSeq(s.former, maps.Keys(m.services))
		s.positions = slices.AppendSeq(s.positions, maps.Keys(m.backends))
		s.had = slices.AppendSeq(s.had, maps.Keys(m.frontends))
		s.addresses = slices.AppendSeq(s.addresses, maps.Keys(m.addresses))
		s.filters = slices.AppendSeq(s.filters, maps.Keys(m.filters))
	}
	s.former = sortedOnce(s.former, func(a, b uint32) int { return int(a) - int(b) })
	s.positions = sortedOnce(s.positions, func(a, b uint32) int { return int(a) - int(b) })
	s.had = sortedOnce(s.had, compareFrontends)
	s.addresses = sortedOnce(s.addresses, netip.Addr.Compare)
	s.filters = sortedOnce(s.filters, compareFilters)
	return s
}

func sortedOnce[T comparable](all []T, order func(a, b T) int) []T {
	slices.SortFunc(all, order)
	return slices.Compact(all)
}

// halvesIn returns the halves of services, in their order.
func halvesIn(all []*declared) (halves []*targetService) {
	for _, d := range all {
		for i := range d.halves {
			halves = append(halves, &d.halves[i])
		}
	}
	return halves
}

// addBackends adds the backends that services name or named.
func (s *scope) addBackends(m *mirror, desired *register, c *change) {
	seen := map[model.BackendAddress]bool{}
	for _, half := range slices.Concat(s.services, halvesIn(c.gone)) {
		for _, b := range half.backends {
			if seen[b] {
				continue
			}
			seen[b] = true
			if desired.names(b) {
				s.backends = append(s.backends, b)
			} else if index, ok := m.byAddress[b]; ok {
				s.positions = append(s.positions, index)
			}
		}
	}
}

// addFrontends adds the frontends that services have or had, followed by the frontends of fragments at the same
// addresses.
func (s *scope) addFrontends(m *mirror, desired *register, c *change) {
	seen := map[model.Frontend]bool{}
	var fragments []model.Frontend
	add := func(f model.Frontend) {
		if owner, wanted := desired.owner(f); wanted {
			s.frontends = append(s.frontends, targetFrontend{f, owner})
		} else if _, there := m.frontends[f]; there {
			s.had = append(s.had, f)
		}
	}
	for _, half := range slices.Concat(s.services, halvesIn(c.gone)) {
		for _, f := range half.frontends {
			if !seen[f] {
				seen[f] = true
				add(f)
			}
			if at := fragmentsOf(f); !seen[at] && !f.Tunnelled() {
				seen[at] = true
				fragments = append(fragments, at)
			}
		}
	}
	for _, f := range fragments {
		add(f)
	}
}

// addAddresses adds the addresses of these frontends, and the addresses that full NAT or the host has now or
// had.
func (s *scope) addAddresses(desired *register, c *change) {
	for _, half := range slices.Concat(s.services, halvesIn(c.gone)) {
		for _, f := range half.frontends {
			if !f.Tunnelled() {
				s.addresses = append(s.addresses, f.Address)
			}
		}
	}
	for _, sets := range [][2]map[netip.Addr]bool{{desired.sources, c.sources}, {desired.hostOwn, c.hostOwn}} {
		for a := range sets[0] {
			if !sets[1][a] {
				s.addresses = append(s.addresses, a)
			}
		}
		for a := range sets[1] {
			if !sets[0][a] {
				s.addresses = append(s.addresses, a)
			}
		}
	}
}
