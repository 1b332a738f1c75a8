package reconcile

import (
	"cmp"
	"maps"
	"slices"
)

// A flow names its service by position and generation, and a service's position goes with it. A service that gets
// another name, or is split into several with other names, would lose its flows that way, though their frontends and
// backends stay. So the new service that takes most of its frontends over takes its position over, too: the heir.
//
// With direct return, or affinity, there is no heir: the seed of the flow hash comes from the name, so that all
// balancers of a fleet agree, and under another name the slots of all flows are others.

// matchHeirs gives services that go to new ones which take their frontends over.
func (p *planner) matchHeirs() {
	type pair struct {
		former uint32
		heir   serviceKey
	}
	takes := map[pair]int{}
	for _, f := range p.scope.frontends {
		have := p.mirror.frontends[f.Frontend]
		if _, has := p.indices[f.service]; has || !f.Configured() || have.doubt || len(have.services) != 1 || !p.unwanted[have.services[0]] {
			continue
		}
		former := p.mirror.services[have.services[0]]
		want, wanted := p.wanted(f.service)
		if wanted && !former.doubt && !former.slotsDoubt && !former.leaving && want.affinity == 0 && translatesAlone(former.record) && former.record.Forwarding == want.forwarding {
			takes[pair{have.services[0], f.service}]++
		}
	}
	pairs := slices.SortedFunc(maps.Keys(takes), func(a, b pair) int {
		return cmp.Or(cmp.Compare(takes[b], takes[a]), cmp.Compare(a.former, b.former), cmp.Compare(a.heir.name, b.heir.name))
	})
	for _, m := range pairs {
		if _, has := p.indices[m.heir]; has || !p.unwanted[m.former] {
			continue
		}
		p.indices[m.heir] = m.former
		p.heirs[m.heir] = keyOf(p.mirror.services[m.former].record)
		delete(p.unwanted, m.former)
	}
}

// wanted is the half of a service that is new or different.
func (p *planner) wanted(key serviceKey) (*targetService, bool) {
	i := slices.IndexFunc(p.scope.services, func(s *targetService) bool { return s.serviceKey == key })
	if i < 0 {
		return nil, false
	}
	return p.scope.services[i], true
}

// lend notes that a frontend has gone from a service to another one. Flows that began there name the former, and may
// be with any backend of the other one.
func (m *mirror) lend(from []uint32, to uint32) {
	receiver, ok := m.services[to]
	if !ok {
		return
	}
	for _, index := range from {
		if lender := m.services[index]; index != to && lender != nil {
			if lender.lent == nil {
				lender.lent = map[serviceRef]bool{}
			}
			lender.lent[serviceRef{to, receiver.record.Generation}] = true
		}
	}
}

// translatesAlone reports whether flows of a service are in the flow table and nowhere else. What a client or a flow of
// direct return is remembered with must be the service's own backend, because the frontend may come back.
func translatesAlone(record ServiceRecord) bool {
	return !record.Forwarding.Direct() && record.AffinityTimeout == 0
}

// borrowed are the members of a service's position that are those of services to which it has lent frontends.
func (m *mirror) borrowed(index uint32, desired *register) (all []Member) {
	lender := m.services[index]
	for ref := range lender.lent {
		receiver := m.services[ref.index]
		if receiver == nil || receiver.record.Generation != ref.generation {
			delete(lender.lent, ref)
			continue
		}
		if !translatesAlone(lender.record) || !translatesAlone(receiver.record) {
			continue
		}
		for _, b := range desired.half(keyOf(receiver.record)).keepers() {
			all = append(all, Member{index, lender.record.Generation, m.backends[m.byAddress[b]].BackendRef})
		}
	}
	return all
}
