package reconcile

import (
	"cmp"
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// A flow names its service by position and generation, and the position is freed with the service. A service
// that is renamed, or split into several services with other names, would lose its flows, although its
// frontends and backends stay. So the new service that takes most of its frontends over also takes its position
// over: this service is the heir.
//
// With direct return, or affinity, there is no heir: the seed of the flow hash comes from the name, so that all
// balancers of a fleet agree, and under another name every flow has another slot. If a service is merged into
// one that has a position, a remnant keeps the flows (remnant.go).

// matchHeirs hands the positions of services that go to new services that take their frontends over.
func (p *planner) matchHeirs() {
	for _, t := range p.takings(canInherit, false) {
		if _, has := p.indices[t.by]; has || !p.unwanted[t.former] {
			continue
		}
		p.heirs[t.by] = keyOf(p.mirror.services[t.former].record)
		p.takeOver(t.by, t.former)
	}
}

func canInherit(former *mirrorService, want *targetService) bool {
	return !former.doubt && !former.slotsDoubt && !former.leaving && goOn(former.record, want)
}

// goOn reports whether flows of a service can belong to a service with another name.
func goOn(former ServiceRecord, want *targetService) bool {
	return translatesAlone(former) && want.affinity == 0 && former.Forwarding == want.forwarding
}

// takeOver gives a new service the position of a service that goes, or of a remnant.
func (p *planner) takeOver(key serviceKey, position uint32) {
	p.indices[key], p.takenBy[position] = position, key
	delete(p.unwanted, position)
}

// taking says that a service takes frontends over.
type taking struct {
	former uint32 // position of a service that goes
	by     serviceKey
}

// takings lists the takings that may allows; the one with the most frontends comes first. A frontend in doubt
// may never have belonged to the former service, and then clients of the former service would meet the lists of
// sources of an heir.
func (p *planner) takings(may func(former *mirrorService, want *targetService) bool, inDoubt bool) []taking {
	count := map[taking]int{}
	add := func(f model.Frontend, by serviceKey) {
		want, wanted := p.wanted(by)
		have := p.mirror.frontends[f]
		if have.doubt && !inDoubt {
			return
		}
		for _, former := range have.services {
			if wanted && p.unwanted[former] && may(p.mirror.services[former], want) {
				count[taking{former, by}]++
			}
		}
	}
	near := map[model.Frontend][]targetFrontend{} // by address and protocol
	for _, f := range p.scope.frontends {
		if f.Configured() {
			add(f.Frontend, f.service)
			near[fragmentsOf(f.Frontend)] = append(near[fragmentsOf(f.Frontend)], f)
		}
	}
	for _, f := range p.scope.had { // a frontend with more ports may replace it
		if _, wanted := p.desired.owner(f); wanted || !f.Configured() {
			continue
		}
		for _, g := range near[fragmentsOf(f)] {
			if g.Covers(f) {
				add(f, g.service)
			}
		}
	}
	return slices.SortedFunc(maps.Keys(count), func(a, b taking) int {
		return cmp.Or(cmp.Compare(count[b], count[a]), cmp.Compare(a.former, b.former), cmp.Compare(a.by.name, b.by.name))
	})
}

// wanted returns the half of a service that is new or different.
func (p *planner) wanted(key serviceKey) (*targetService, bool) {
	i := slices.IndexFunc(p.scope.services, func(s *targetService) bool { return s.serviceKey == key })
	if i < 0 {
		return nil, false
	}
	return p.scope.services[i], true
}

// lend notes that a frontend has gone from a service to another one. Flows that began there name the former
// service, and may be with any backend of the other one.
func (m *mirror) lend(from []uint32, to uint32) {
	receiver, ok := m.services[to]
	if !ok {
		return
	}
	note := func(lender *mirrorService) {
		if lender.lent == nil {
			lender.lent = map[serviceRef]bool{}
		}
		lender.lent[serviceRef{to, receiver.record.Generation}] = true
	}
	for _, index := range from {
		lender := m.services[index]
		if index == to || lender == nil {
			continue
		}
		note(lender)
		for at := range m.remnants { // their frontends may be among the lender's
			if m.services[at].lent[serviceRef{index, lender.record.Generation}] {
				note(m.services[at])
			}
		}
	}
}

// translatesAlone reports whether all flows of a service are in the flow table. A client of affinity, or a flow
// of direct return, may be remembered only with the service's own backend, because the frontend may come back.
func translatesAlone(record ServiceRecord) bool {
	return !record.Forwarding.Direct() && record.AffinityTimeout == 0
}

// borrowed returns the members of a service's position that belong to services to which it has lent frontends.
func (m *mirror) borrowed(index uint32, desired *register) (all []Member) {
	lender := m.services[index]
	for _, at := range m.receivers(index) {
		receiver := m.services[at]
		if !translatesAlone(lender.record) || !translatesAlone(receiver.record) {
			continue
		}
		for _, b := range desired.half(keyOf(receiver.record)).keepers() {
			all = append(all, Member{index, lender.record.Generation, m.backends[m.byAddress[b]].BackendRef})
		}
	}
	return all
}
