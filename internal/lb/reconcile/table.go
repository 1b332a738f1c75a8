package reconcile

import (
	"fmt"
	"slices"
)

// assignServices plans the tables and records, or returns an error if they do not fit.
func (p *planner) assignServices() error {
	positions, err := p.newServicePositions()
	if err != nil {
		return err
	}
	naming := map[BackendRef]bool{} // backends in tables that change
	for _, want := range p.scope.services {
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
		if err := p.planTable(&step, want, before); err != nil {
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
			before.from = step.from // it would give the same slots
		}
	}
	p.planNaming(naming)
	return nil
}

// planNaming lists the backends of naming that no slot names yet.
func (p *planner) planNaming(naming map[BackendRef]bool) {
	for _, b := range p.scope.backends {
		if ref := p.refs[b]; naming[ref] && p.mirror.naming[ref] == 0 {
			p.named = append(p.named, p.desired.record(b, ref))
		}
	}
}

// planTable decides the new slots of the service, their region, and its record.
func (p *planner) planTable(step *tableStep, want *targetService, before *mirrorService) error {
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
		// All its backends drain: new flows go to no backend, but known flows continue.
		current = make([]BackendRef, before.record.Size)
	}
	record.Size = uint32(len(current))
	step.slots = before.nextSlots(record, current, want.membership(p.refs))
	if record.Size == before.record.Size {
		record.Offset = before.record.Offset
		step.runs = changedRuns(before.slots, step.slots)
		step.late = !before.record.tracked() && before.tally.transition+before.tally.marked > 0
	} else if record.Size > 0 {
		if p.room == nil {
			p.room = p.newRoom()
		}
		found, err := p.room.take(record.Size, p.limits.Slots, want.serviceKey)
		if err != nil {
			return err
		}
		record.Offset, step.fresh = found.offset, true
	}
	step.put = step.put || *record != before.record
	return nil
}

// room is the part of the slot array that is free for new tables.
type room struct {
	free   gaps
	inUse  uint64 // slots that are not free
	before uint64 // of the slots in use, those of tables before
}

// newRoom returns the room that is left when the early services are gone and the doubtful ones are settled.
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
	room.free = newGaps(used, p.limits.Slots)
	return room
}

// take finds a region for the service's table, or returns an error.
func (r *room) take(size, limit uint32, service serviceKey) (region, error) {
	found, ok := r.free.take(size)
	if !ok {
		why := fmt.Sprintf("%d in use now, and %d in one piece for the new table of service %s", r.inUse, size, service)
		if r.before > 0 {
			why += fmt.Sprintf("; %d of those in use belong to earlier tables, and become free when the slots have settled", r.before)
		}
		return region{}, &CapacityError{What: "slots", Need: r.inUse + uint64(size), Limit: uint64(limit), Why: why}
	}
	r.inUse += uint64(size)
	return found, nil
}

// newServicePositions returns one position for each new service, in order.
func (p *planner) newServicePositions() ([]BackendRef, error) {
	fresh := 0
	for _, want := range p.scope.services {
		if _, ok := p.indices[want.serviceKey]; !ok {
			fresh++
		}
	}
	if fresh == 0 {
		return nil, nil
	}
	limit := p.limits.Services
	need := len(p.mirror.services) - len(p.earlyServices) + fresh
	positions := p.mirror.servicePositions.free(fresh, limit, p.earlyServices)
	if need > int(limit) || len(positions) < fresh {
		return nil, &CapacityError{What: "services", Need: uint64(need), Limit: uint64(limit),
			Why: fmt.Sprintf("%d wanted, and %d that are removed only afterwards; one with addresses of both families counts twice",
				p.desired.halves, len(p.lateServices))}
	}
	return positions, nil
}
