package reconcile

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/model"
)

// maxBackendIndex is the highest index a slot has room for (20 bits).
const maxBackendIndex = 1<<20 - 1

// plan is a list of operations in the order of its fields. It is made from the mirror
// without changing it.
type plan struct {
	// What is in doubt and still wanted is carried out again.
	settle []uint32

	// What nothing takes over from goes first, and so makes room.
	withdrawals    []AddressRecord
	earlyFrontends []model.Frontend
	earlyServices  []uint32
	earlyGrace     bool
	earlyBackends  []uint32
	earlyGraceMore bool // the positions of earlyBackends are needed at once

	// What is new or different.
	sources       []AddressRecord
	backends      []BackendRecord
	places        bool            // some of them need a position
	named         []BackendRecord // backends that no slot names yet
	filters       []filterStep
	filtersGone   []Filter // of services that go on filtering
	tables        []tableStep
	clashing      []model.Frontend // go just before what shares parts of their range
	frontends     []frontendStep
	lateFrontends []model.Frontend
	addresses     []AddressRecord

	// What the new has taken over from.
	lateServices []uint32
	lateBackends []uint32
	filtersLate  []Filter // of services that are gone, or let everybody in now
	forgotten    []AddressRecord

	target     *target
	refs       map[model.BackendAddress]BackendRef
	indices    map[serviceKey]uint32
	tenants    map[serviceKey]serviceRef
	moves      map[serviceKey]TableDifference
	repairs    int
	difference Difference
}

// tableStep changes one service: its slots, then its record.
type tableStep struct {
	record ServiceRecord
	slots  []Slot
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

// planner carries what the parts of newPlan share.
type planner struct {
	*plan
	mirror   *mirror
	known    tables
	unwanted map[uint32]bool // services that go
	early    map[uint32]bool // of them, those that go first
	puts     map[model.Frontend]bool
}

func newPlan(m *mirror, t *target, known tables) (*plan, error) {
	p := &planner{
		plan: &plan{
			target:  t,
			refs:    map[model.BackendAddress]BackendRef{},
			indices: map[serviceKey]uint32{},
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
	if err := p.placeBackends(); err != nil {
		return nil, err
	}
	if err := p.placeServices(); err != nil {
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

// matchServices finds which services stay, which go, and what is in doubt.
func (p *planner) matchServices() {
	for index := range p.mirror.services {
		p.unwanted[index] = true
	}
	for _, want := range p.target.services {
		if index, ok := p.mirror.byKey[want.serviceKey]; ok {
			p.indices[want.serviceKey] = index
			delete(p.unwanted, index)
		}
	}
	for _, index := range slices.Sorted(maps.Keys(p.mirror.services)) {
		service := p.mirror.services[index]
		if !p.unwanted[index] && (service.doubt || service.slotsDoubt) {
			p.settle = append(p.settle, index)
			p.repairs++
		} else if !service.leaving && service.tally.closing > 0 {
			p.repairs++ // is finished before anything else
		}
	}
	for _, f := range p.target.frontends {
		index, ok := p.indices[f.service]
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

// planRemovals sorts what goes into what goes first and what goes last. A service goes
// first if no frontend is put at an address of one of its own: then nobody takes over its
// traffic, and no address stays a VIP that has no frontend meanwhile.
func (p *planner) planRemovals() {
	takenOver := map[netip.Addr]bool{}
	for f := range p.puts {
		takenOver[f.Address] = true
	}
	wanted := map[model.Frontend]bool{}
	for _, f := range p.target.frontends {
		wanted[f.Frontend] = true
	}
	late := map[uint32]bool{}
	for f, have := range p.mirror.frontends {
		for _, service := range have.services {
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
	for _, f := range slices.SortedFunc(maps.Keys(p.mirror.frontends), compareFrontends) {
		if wanted[f] {
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

// clashes reports whether a frontend that is put has a range with ports of this range.
// Ranges are kept in pieces, and deleting one would tear pieces out of the other.
func (p *planner) clashes(f model.Frontend) bool {
	split := func(r model.PortRange) bool { return !r.Exact() && r != model.AnyPort }
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

// planBackendRemovals lets backends go first that no slot will name once the early
// services are gone and what is in doubt is settled.
func (p *planner) planBackendRemovals() {
	wanted := map[uint32]bool{}
	for _, b := range p.target.backends {
		if index, ok := p.mirror.byAddress[b]; ok {
			wanted[index] = true
			p.refs[b] = p.mirror.backends[index].BackendRef
		}
	}
	var unwanted []uint32
	for index := range p.mirror.backends {
		if !wanted[index] {
			unwanted = append(unwanted, index)
		}
	}
	if len(unwanted) == 0 {
		return
	}
	named := map[BackendRef]bool{}
	for index, service := range p.mirror.services {
		switch {
		case !p.unwanted[index]: // will be settled
			for _, ref := range service.namedBySlots() {
				named[ref] = true
			}
		case !p.early[index]:
			service.names(named)
		}
	}
	slices.Sort(unwanted)
	for _, index := range unwanted {
		if named[p.mirror.backends[index].BackendRef] {
			p.lateBackends = append(p.lateBackends, index)
		} else {
			p.earlyBackends = append(p.earlyBackends, index)
		}
	}
}

// placeBackends gives a position to each new backend, or says that there are too few.
func (p *planner) placeBackends() error {
	var fresh []model.BackendAddress
	for _, b := range p.target.backends {
		ref, ok := p.refs[b]
		if !ok {
			fresh = append(fresh, b)
			continue
		}
		record := p.backendRecord(b)
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
	limit := min(p.target.limits.Backends, maxBackendIndex)
	need := len(p.mirror.backends) - len(p.earlyBackends) + len(fresh)
	free := p.mirror.backendPositions.clone()
	for _, index := range p.earlyBackends {
		free.release(index)
	}
	refs := free.take(len(fresh), limit)
	if need > int(limit) || len(refs) < len(fresh) {
		return &CapacityError{What: "backends", Need: uint64(need), Limit: uint64(limit),
			Why: fmt.Sprintf("%d wanted, and %d that leave only afterwards", len(p.target.backends), len(p.lateBackends))}
	}
	p.places = true
	for i, b := range fresh {
		p.refs[b] = refs[i]
		p.backends = append(p.backends, p.backendRecord(b))
	}
	return nil
}

func (p *planner) backendRecord(b model.BackendAddress) BackendRecord {
	return BackendRecord{BackendRef: p.refs[b], BackendAddress: b, Draining: p.target.draining[b], Down: p.target.down[b]}
}

// placeServices plans the tables and records, or says what does not fit.
func (p *planner) placeServices() error {
	positions, err := p.newServicePositions()
	if err != nil {
		return err
	}
	room := p.newRoom()
	naming := map[BackendRef]bool{} // backends in tables that change
	for _, want := range p.target.services {
		before, step := &mirrorService{}, tableStep{}
		if index, ok := p.indices[want.serviceKey]; ok {
			before = p.mirror.services[index]
			step.record.Index, step.record.Generation = index, before.record.Generation
		} else {
			step.record.Index, step.record.Generation = positions[0].Index, positions[0].Generation
			p.indices[want.serviceKey] = step.record.Index
			positions, step.put, step.first = positions[1:], true, true
		}
		p.tenants[want.serviceKey] = serviceRef{step.record.Index, step.record.Generation}
		if err := p.planTable(&step, want, before, room); err != nil {
			return err
		}
		if step.fresh || len(step.runs) > 0 || len(step.slots) != len(before.slots) {
			after := currents(step.slots)
			p.moves[want.serviceKey] = tableDifference(want.ipv6, currents(before.slots), after)
			for _, ref := range after {
				naming[ref] = true
			}
		}
		if step.put || len(step.runs) > 0 {
			p.tables = append(p.tables, step)
		} else {
			before.from = step.from // the slots are what would be made of it
		}
	}
	p.planNaming(naming)
	return nil
}

// planNaming lists those of naming that no slot has named yet.
func (p *planner) planNaming(naming map[BackendRef]bool) {
	if len(naming) == 0 {
		return
	}
	before := map[BackendRef]bool{}
	for _, service := range p.mirror.services {
		service.names(before)
	}
	for _, b := range p.target.backends {
		if ref := p.refs[b]; naming[ref] && !before[ref] {
			p.named = append(p.named, p.backendRecord(b))
		}
	}
}

// planTable decides what the service's slots become, where they lie, and what the record says.
func (p *planner) planTable(step *tableStep, want targetService, before *mirrorService, room *room) error {
	record := &step.record
	record.Name, record.Forwarding, record.Seed = want.name, want.forwarding, want.seed()
	record.Tracking, record.AffinityTimeout, record.Policy = want.tracking, want.affinity, want.policy
	step.from = want.filling(p.refs, record.tracked())
	if step.from.equal(before.from) {
		step.slots = before.slots
		record.Offset, record.Size = before.record.Offset, before.record.Size
		if before.tally.before > 0 {
			record.BeforeOffset, record.BeforeSize = before.record.BeforeOffset, before.record.BeforeSize
		}
		step.put = step.put || *record != before.record
		return nil
	}
	current := want.slots(step.from.refs, p.known)
	if want.size == 0 && record.tracked() {
		// All its backends drain: new flows go nowhere, but known ones go on.
		current = make([]BackendRef, before.record.Size)
	}
	record.Size = uint32(len(current))
	step.slots = before.nextSlots(record, current, want.membership(p.refs))
	if record.Size == before.record.Size {
		record.Offset = before.record.Offset
		step.runs = changedRuns(before.slots, step.slots)
		step.late = !before.record.tracked() && before.tally.transition+before.tally.marked > 0
	} else if record.Size > 0 {
		place, err := room.take(record.Size, p.target.limits.Slots, want.serviceKey)
		if err != nil {
			return err
		}
		record.Offset, step.fresh = place.offset, true
	}
	step.put = step.put || *record != before.record
	return nil
}

// room is the part of the slot array that new tables may have.
type room struct {
	free   gaps
	inUse  uint64 // slots that are not free
	before uint64 // of those, slots of tables before
}

// newRoom is what is left once the early services are gone and what is in doubt is settled.
func (p *planner) newRoom() *room {
	room := &room{}
	var used []region
	for index, service := range p.mirror.services {
		switch {
		case p.early[index]:
			continue
		case p.unwanted[index]:
			used = append(used, service.regions()...)
		default: // will be settled
			used = append(used, service.record.table(), service.record.before())
		}
		room.before += uint64(service.record.BeforeSize)
	}
	used = slices.DeleteFunc(used, func(r region) bool { return r.size == 0 })
	for _, u := range used {
		room.inUse += uint64(u.size)
	}
	room.free = newGaps(used, p.target.limits.Slots)
	return room
}

// take finds a place for the service's table, or says why there is none.
func (r *room) take(size, limit uint32, service serviceKey) (region, error) {
	place, ok := r.free.take(size)
	if !ok {
		why := fmt.Sprintf("%d in use now, and %d in one piece for the new table of service %s", r.inUse, size, service)
		if r.before > 0 {
			why += fmt.Sprintf("; %d of those in use are tables before, and free once their flows have settled", r.before)
		}
		return region{}, &CapacityError{What: "slots", Need: r.inUse + uint64(size), Limit: uint64(limit), Why: why}
	}
	r.inUse += uint64(size)
	return place, nil
}

// newServicePositions is one position for each new service, in order.
func (p *planner) newServicePositions() ([]BackendRef, error) {
	fresh := 0
	for _, want := range p.target.services {
		if _, ok := p.indices[want.serviceKey]; !ok {
			fresh++
		}
	}
	limit := p.target.limits.Services
	need := len(p.mirror.services) - len(p.earlyServices) + fresh
	free := p.mirror.servicePositions.clone()
	for _, index := range p.earlyServices {
		free.release(index)
	}
	taken := free.take(fresh, limit)
	if fresh > 0 && (need > int(limit) || len(taken) < fresh) {
		return nil, &CapacityError{What: "services", Need: uint64(need), Limit: uint64(limit),
			Why: fmt.Sprintf("%d wanted, and %d that leave only afterwards; one with addresses of both families counts twice",
				len(p.target.services), len(p.lateServices))}
	}
	return taken, nil
}

// planFrontends lists what is put, in the order of the configuration.
func (p *planner) planFrontends() {
	for _, f := range p.target.frontends {
		if p.puts[f.Frontend] {
			p.frontends = append(p.frontends, frontendStep{f.Frontend, p.indices[f.service]})
		}
	}
}

// planAddresses walks each address through the stages: no VIP any more, source or direct,
// all that is wanted, no source any more.
func (p *planner) planAddresses() {
	all := map[netip.Addr]bool{}
	for address := range p.mirror.addresses {
		all[address] = true
	}
	for address := range p.target.addresses {
		all[address] = true
	}
	for _, address := range slices.SortedFunc(maps.Keys(all), netip.Addr.Compare) {
		have := p.mirror.addresses[address]
		want, wanted := p.target.addresses[address]
		if have.doubt {
			p.repairs++
		}
		want.Address = address
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
			// Programs look for a direct-return service before a record says that there is one:
			// a flow begun with NAT in between would end with the next packet.
			now.Direct = true
			p.sources = append(p.sources, now)
		}
		full := want
		full.Source = want.Source || now.Source
		if wanted && (now != full || doubt) {
			p.addresses = append(p.addresses, full)
		}
		if now.Source && !want.Source {
			p.forgotten = append(p.forgotten, want)
		}
	}
}

// planGrace decides where new things need what has just become free. Without new things
// nothing waits: what is free stays so until somebody needs it.
func (p *planner) planGrace() {
	places := p.places
	for _, step := range p.tables {
		places = places || step.fresh || step.first
	}
	owed := p.mirror.graceOwed || len(p.earlyServices) > 0 || len(p.settle) > 0
	p.earlyGrace = len(p.earlyBackends) > 0 || places && owed
	p.earlyGraceMore = len(p.earlyBackends) > 0 && p.places
}

// operations is how many records the plan touches.
func (p *plan) operations() int {
	return len(p.settle) + len(p.withdrawals) + len(p.earlyFrontends) + len(p.earlyServices) +
		len(p.earlyBackends) + len(p.sources) + len(p.backends) + len(p.tables) + len(p.clashing) +
		len(p.frontends) + len(p.lateFrontends) + len(p.addresses) + len(p.lateServices) +
		len(p.lateBackends) + len(p.forgotten) + len(p.filters) + len(p.filtersGone) + len(p.filtersLate)
}

// compareFrontends orders frontends by address, protocol and ports.
func compareFrontends(a, b model.Frontend) int {
	return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(a.Ports.First, b.Ports.First), cmp.Compare(a.Ports.Last, b.Ports.Last))
}

// execute carries the plan out, up to the first operation that fails.
func (r *Reconciler) execute(p *plan) error {
	for _, stage := range []func(*plan) error{r.settleDoubts, r.removeEarly, r.add, r.removeLate} {
		if err := stage(p); err != nil {
			return err
		}
	}
	return nil
}

// settleDoubts repeats what failed, for services that stay.
func (r *Reconciler) settleDoubts(p *plan) error { return each(p.settle, r.settleDoubt) }

// settleDoubt repeats what failed of one service.
func (r *Reconciler) settleDoubt(index uint32) error {
	service := r.mirror.services[index]
	if service.slotsDoubt {
		if service.leaving { // they may belong to no table any more
			if err := r.grace(); err != nil {
				return err
			}
		}
		if err := r.rewriteSlots(index, service.slots, nil); err != nil {
			return err
		}
	}
	if service.doubt {
		return r.putService(service.record, service.slots)
	}
	return nil
}

// removeEarly removes what nothing takes over from.
func (r *Reconciler) removeEarly(p *plan) error {
	if err := each(p.withdrawals, r.setAddress); err != nil {
		return err
	}
	if err := each(p.earlyFrontends, r.deleteFrontend); err != nil {
		return err
	}
	if err := each(p.earlyServices, r.deleteService); err != nil {
		return err
	}
	if p.earlyGrace {
		if err := r.grace(); err != nil {
			return err
		}
	}
	if err := each(p.earlyBackends, r.deleteBackend); err != nil {
		return err
	}
	if p.earlyGraceMore {
		return r.grace()
	}
	return nil
}

// add puts what is new or different.
func (r *Reconciler) add(p *plan) error {
	if err := each(p.sources, r.setAddress); err != nil {
		return err
	}
	if err := each(p.backends, r.putBackend); err != nil {
		return err
	}
	if len(p.named) > 0 && r.beforeNaming != nil {
		r.beforeNaming(p.named)
	}
	if err := each(p.filters, r.putFilter); err != nil {
		return err
	}
	if err := each(p.filtersGone, r.deleteFilter); err != nil {
		return err
	}
	if err := each(p.tables, r.changeTable); err != nil {
		return err
	}
	if err := each(p.clashing, r.deleteFrontend); err != nil {
		return err
	}
	put := func(f frontendStep) error { return r.putFrontend(f.Frontend, f.service) }
	if err := each(p.frontends, put); err != nil {
		return err
	}
	if err := each(p.addresses, r.setAddress); err != nil {
		return err
	}
	return each(p.lateFrontends, r.deleteFrontend)
}

// changeTable brings one service to its slots and its record.
func (r *Reconciler) changeTable(step tableStep) error {
	if service, ok := r.mirror.services[step.record.Index]; ok {
		service.from = nil // until all is done
	}
	if err := r.changeTableOf(step); err != nil {
		return err
	}
	r.mirror.services[step.record.Index].from = step.from
	return nil
}

func (r *Reconciler) changeTableOf(step tableStep) error {
	if step.fresh {
		// Nothing points there yet, so a failure leaves nothing to remember.
		if err := r.writeSlots(step.record, step.slots, run{0, len(step.slots)}); err != nil {
			return err
		}
	}
	// The record goes first where it says how the slots are to be read: flows must be
	// followed before a slot changes, and looked for no more before it settles at once.
	if step.put && !step.late {
		if err := r.putService(step.record, step.slots); err != nil {
			return err
		}
	}
	if len(step.runs) > 0 {
		if err := r.rewriteSlots(step.record.Index, step.slots, step.runs); err != nil {
			return err
		}
	}
	if step.put && step.late {
		return r.putService(step.record, step.slots)
	}
	return nil
}

// removeLate removes what the new has taken over from.
func (r *Reconciler) removeLate(p *plan) error {
	if err := each(p.lateServices, r.deleteService); err != nil {
		return err
	}
	if len(p.lateBackends)+len(p.filtersLate) > 0 {
		if err := r.grace(); err != nil {
			return err
		}
	}
	if err := each(p.lateBackends, r.deleteBackend); err != nil {
		return err
	}
	if err := each(p.filtersLate, r.deleteFilter); err != nil {
		return err
	}
	if len(p.forgotten) > 0 && r.beforeForgetting != nil {
		r.beforeForgetting()
	}
	return each(p.forgotten, r.setAddress)
}

// each calls do for every item, up to the first error.
func each[T any](items []T, do func(T) error) error {
	for _, item := range items {
		if err := do(item); err != nil {
			return err
		}
	}
	return nil
}
