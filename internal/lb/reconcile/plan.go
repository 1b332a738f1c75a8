package reconcile

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// maxBackendIndex is the highest index a slot has room for (20 bits).
const maxBackendIndex = 1<<20 - 1

// plan is a list of operations in the order of its fields. It is made from the mirror
// without changing it.
type plan struct {
	// Entries in doubt that are still wanted are written again.
	settle []uint32

	// Entries that no new entry replaces are removed first, which makes room.
	withdrawals    []AddressRecord
	earlyFrontends []model.Frontend
	earlyServices  []uint32
	earlyGrace     bool
	earlyBackends  []uint32
	earlyGraceMore bool // the positions of earlyBackends are needed at once

	// New and changed entries.
	sources       []AddressRecord
	backends      []BackendRecord
	assigns       bool            // some backends need a position
	named         []BackendRecord // backends that no slot names yet
	filters       []filterStep
	filtersGone   []Filter // of services that go on filtering
	tables        []tableStep
	clashing      []model.Frontend // removed just before a frontend that shares parts of their ranges
	frontends     []frontendStep
	lateFrontends []model.Frontend
	addresses     []AddressRecord

	// Entries that new entries have replaced.
	remnants     []remnantStep
	lateServices []uint32
	lateBackends []uint32
	filtersLate  []Filter // of services that are gone, or admit all sources now
	forgotten    []AddressRecord

	desired    *register // the register after the change
	change     *change
	scope      *scope
	limits     model.Limits
	refs       map[model.BackendAddress]BackendRef
	indices    map[serviceKey]uint32
	heirs      map[serviceKey]serviceKey // the service whose position a new service has taken over, by the new one
	takenBy    map[uint32]serviceKey     // the service that has taken over a position, by the position
	merges     map[uint32]serviceKey     // the service that takes over the frontends of a removed service, by its position
	leaves     bool                      // a merge may leave flows with a backend that the receiver lacks
	ended      []string                  // names of the remnants that go
	short      int                       // number of remnants that have to go, because their positions are needed
	tenants    map[serviceKey]serviceRef
	moves      map[serviceKey]TableDifference
	repairs    int
	difference Difference
}

// tableStep changes one service: its slots, then its record.
type tableStep struct {
	record ServiceRecord
	slots  Table
	fresh  bool  // slots is written to record's region, where no record points
	runs   []run // otherwise these change in place
	put    bool  // the record is different
	first  bool  // there was none
	from   *filling
	late   bool // the record is for the slots as they will be
}

type frontendStep struct {
	model.Frontend
	service uint32
}

// planner holds the values that the parts of newPlan share.
type planner struct {
	*plan
	mirror   *mirror
	known    tables
	room     *room           // nil: no table has needed a region yet
	unwanted map[uint32]bool // services that go
	early    map[uint32]bool // of them, the services that go first
	puts     map[model.Frontend]bool
}

func newPlan(m *mirror, desired *register, s *scope, limits model.Limits, known tables, short int) (*plan, error) {
	p := &planner{
		plan: &plan{
			desired: desired, scope: s, limits: limits, short: short,
			refs:    map[model.BackendAddress]BackendRef{},
			indices: map[serviceKey]uint32{},
			heirs:   map[serviceKey]serviceKey{},
			takenBy: map[uint32]serviceKey{},
			merges:  map[uint32]serviceKey{},
			tenants: map[serviceKey]serviceRef{},
			moves:   map[serviceKey]TableDifference{},
		},
		mirror: m, known: known,
		unwanted: map[uint32]bool{},
		early:    map[uint32]bool{},
		puts:     map[model.Frontend]bool{},
	}
	p.matchServices()
	p.planRemovals()
	if err := p.assignBackends(); err != nil {
		return nil, err
	}
	if err := p.assignServices(); err != nil {
		return nil, err
	}
	if err := p.planFilters(); err != nil {
		return nil, err
	}
	p.planFrontends()
	p.planAddresses()
	p.planGrace()
	return p.plan, nil
}

// matchServices finds the services that stay, the services that go, and the services in doubt.
func (p *planner) matchServices() {
	for _, index := range p.scope.former {
		p.unwanted[index] = true
	}
	for _, want := range p.scope.services {
		if index, ok := p.mirror.byKey[want.serviceKey]; ok {
			p.indices[want.serviceKey] = index
			delete(p.unwanted, index)
		} else if index, ok := p.mirror.revivable(want); ok {
			p.takeOver(want.serviceKey, index)
		}
	}
	p.matchHeirs()
	p.matchMerges()
	p.matchRemnants()
	for _, index := range slices.Sorted(maps.Keys(p.mirror.unsettled)) {
		service := p.mirror.services[index]
		if !p.unwanted[index] && (service.doubt || service.slotsDoubt) {
			p.settle = append(p.settle, index)
			p.repairs++
		} else if !service.leaving && service.tally.closing > 0 {
			p.repairs++ // is finished before anything else
		}
	}
	for _, f := range p.scope.frontends {
		index, ok := p.indexOf(f.service)
		have, known := p.mirror.frontends[f.Frontend]
		if ok && known && !have.doubt && len(have.services) == 1 && have.services[0] == index {
			continue
		}
		p.puts[f.Frontend] = true
		if have.doubt {
			p.repairs++
		}
	}
}

// indexOf returns the position of a service that is wanted, if it has one by now.
func (p *planner) indexOf(key serviceKey) (uint32, bool) {
	if index, ok := p.indices[key]; ok {
		return index, true
	}
	index, ok := p.mirror.byKey[key] // one that the change leaves alone
	return index, ok
}

// planRemovals sorts removals into early and late ones. A service goes early if no frontend is put at one of
// its addresses: then no service takes over its traffic, and no address stays a VIP that has no frontend
// meanwhile.
func (p *planner) planRemovals() {
	takenOver := map[netip.Addr]bool{}
	for f := range p.puts {
		takenOver[f.Address] = true
	}
	late := map[uint32]bool{}
	for _, f := range slices.Concat(p.scope.had, slices.Collect(maps.Keys(p.puts))) {
		for _, service := range p.mirror.frontends[f].services {
			late[service] = late[service] || takenOver[f.Address]
		}
	}
	for _, index := range slices.Sorted(maps.Keys(p.unwanted)) {
		if late[index] {
			p.lateServices = append(p.lateServices, index)
		} else {
			p.earlyServices = append(p.earlyServices, index)
			p.early[index] = true
		}
	}
	for _, f := range p.scope.had {
		if _, wanted := p.desired.owner(f); wanted {
			continue
		}
		have := p.mirror.frontends[f]
		if have.doubt {
			p.repairs++
		}
		switch {
		case slices.ContainsFunc(have.services, func(s uint32) bool { return p.early[s] }):
			p.earlyFrontends = append(p.earlyFrontends, f)
		case p.clashes(f):
			p.clashing = append(p.clashing, f)
		default:
			p.lateFrontends = append(p.lateFrontends, f)
		}
	}
	p.planBackendRemovals()
}

// clashes reports whether a frontend that is put has a range that shares ports with this range. Ranges are kept
// in pieces, and deleting one range would remove pieces of the other.
func (p *planner) clashes(f model.Frontend) bool {
	split := func(r value.PortRange) bool { return !r.Exact() && r != value.AnyPort }
	if !split(f.Ports) {
		return false
	}
	for g := range p.puts {
		if g.Address == f.Address && g.Protocol == f.Protocol && split(g.Ports) &&
			g.Ports.First <= f.Ports.Last && f.Ports.First <= g.Ports.Last {
			return true
		}
	}
	return false
}

// planBackendRemovals removes early each backend that no slot will name once the early services are gone and the
// doubts are settled.
func (p *planner) planBackendRemovals() {
	wanted := map[uint32]bool{}
	for _, b := range p.scope.backends {
		if index, ok := p.mirror.byAddress[b]; ok {
			wanted[index] = true
			p.refs[b] = p.mirror.backends[index].BackendRef
		}
	}
	leaving := map[BackendRef]int{} // number of early services that name it
	for _, index := range p.earlyServices {
		for _, ref := range p.mirror.services[index].named {
			leaving[ref]++
		}
	}
	held := map[BackendRef]bool{}
	for _, index := range p.lateServices { // they are removed unchanged
		p.mirror.services[index].inDoubt(held)
	}
	for _, index := range p.scope.positions {
		ref := p.mirror.backends[index].BackendRef
		switch {
		case wanted[index]:
		case held[ref] || p.mirror.naming[ref] > leaving[ref]:
			p.lateBackends = append(p.lateBackends, index)
		default:
			p.earlyBackends = append(p.earlyBackends, index)
		}
	}
}

// assignBackends gives a position to each new backend, or returns an error if there are too few.
func (p *planner) assignBackends() error {
	var fresh []model.BackendAddress
	for _, b := range p.scope.backends {
		ref, ok := p.refs[b]
		if !ok {
			fresh = append(fresh, b)
			continue
		}
		record := p.desired.record(b, ref)
		switch entry := p.mirror.backends[ref.Index]; {
		case entry.doubt:
			p.backends = append(p.backends, record)
			p.repairs++
		case entry.BackendRecord != record:
			p.backends = append(p.backends, record)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	limit := min(p.limits.Backends, maxBackendIndex)
	need := len(p.mirror.backends) - len(p.earlyBackends) + len(fresh)
	refs := p.mirror.backendPositions.free(len(fresh), limit, p.earlyBackends)
	if need > int(limit) || len(refs) < len(fresh) {
		return &CapacityError{What: "backends", Need: uint64(need), Limit: uint64(limit),
			Why: fmt.Sprintf("%d wanted, and %d that are removed only afterwards", len(p.desired.backends), len(p.lateBackends))}
	}
	p.assigns = true
	for i, b := range fresh {
		p.refs[b] = refs[i]
		p.backends = append(p.backends, p.desired.record(b, refs[i]))
	}
	return nil
}

// planFrontends lists the frontends to put, in the order of the configuration.
func (p *planner) planFrontends() {
	for _, f := range p.scope.frontends {
		if p.puts[f.Frontend] {
			index, _ := p.indexOf(f.service)
			p.frontends = append(p.frontends, frontendStep{f.Frontend, index})
		}
	}
}

// planAddresses moves each address through the stages: no VIP any more, source or direct, all wanted roles, no
// source any more.
func (p *planner) planAddresses() {
	for _, address := range p.scope.addresses {
		have, want := p.mirror.addresses[address], p.desired.address(address)
		if have.doubt {
			p.repairs++
		}
		now, doubt := have.AddressRecord, have.doubt
		now.Address = address
		if now.VIP && !want.VIP {
			now.VIP, doubt = false, false
			p.withdrawals = append(p.withdrawals, now)
			if !now.Source {
				now = AddressRecord{Address: address}
			}
		}
		if want.Source && (!now.Source || doubt) {
			vip := now.VIP
			now, doubt = want, false
			now.VIP = vip
			p.sources = append(p.sources, now)
		}
		if want.Direct && now.VIP && !now.Direct {
			// Programs look for a direct-return service before a record says that there is one: otherwise a
			// flow that began with NAT meanwhile would end with the next packet.
			now.Direct = true
			p.sources = append(p.sources, now)
		}
		full := want
		full.Source = want.Source || now.Source
		if (want.VIP || want.Source) && (now != full || doubt) {
			p.addresses = append(p.addresses, full)
		}
		if now.Source && !want.Source {
			p.forgotten = append(p.forgotten, want)
		}
	}
}

// planGrace decides where new entries need positions that have just become free. Without new entries there is
// no wait: free positions stay free until an entry needs them.
func (p *planner) planGrace() {
	assigns := p.assigns
	for _, step := range p.tables {
		assigns = assigns || step.fresh || step.first
	}
	owed := p.mirror.graceOwed || len(p.earlyServices) > 0 || len(p.settle) > 0
	p.earlyGrace = len(p.earlyBackends) > 0 || assigns && owed
	p.earlyGraceMore = len(p.earlyBackends) > 0 && p.assigns
}

// operations returns the number of records that the plan touches.
func (p *plan) operations() int {
	return len(p.settle) + len(p.withdrawals) + len(p.earlyFrontends) + len(p.earlyServices) +
		len(p.earlyBackends) + len(p.sources) + len(p.backends) + len(p.tables) + len(p.clashing) +
		len(p.frontends) + len(p.lateFrontends) + len(p.addresses) + len(p.remnants) + len(p.lateServices) +
		len(p.lateBackends) + len(p.forgotten) + len(p.filters) + len(p.filtersGone) + len(p.filtersLate)
}

// compareFrontends orders frontends by address, protocol and ports.
func compareFrontends(a, b model.Frontend) int {
	return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(a.Ports.First, b.Ports.First), cmp.Compare(a.Ports.Last, b.Ports.Last))
}
