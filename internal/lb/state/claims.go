package state

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// nameConflict returns a *ConflictError if a new service has the name of one that stays, or of another new one.
func (d *draft) nameConflict(services map[string]*model.Service) error {
	gone := make(map[*model.Service]bool, len(d.gone))
	for _, s := range d.gone {
		gone[s] = true
	}
	come := make(map[string]*model.Service, len(d.come))
	for _, s := range d.come {
		other := come[s.Name]
		if known := services[s.Name]; other == nil && !gone[known] {
			other = known
		}
		if other != nil {
			refused, owner := d.refuse(other.Source, s.Source)
			return &ConflictError{Source: refused, Service: s.Name, Object: fmt.Sprintf("service %q", s.Name), Owner: owner}
		}
		come[s.Name] = s
	}
	return nil
}

// refuse decides which of two conflicting sources is refused, and which one stays: the later one is refused.
func (d *draft) refuse(one, other string) (refused, owner string) {
	if slices.Index(d.declaring, one) > slices.Index(d.declaring, other) {
		return one, other
	}
	return other, one
}

// claims are the frontends of all sources, by address and protocol. No two sources have ports in common there. Within
// one source a narrower frontend may win over a wider one; between sources, that would take traffic away from another
// source's service.
type claims map[claimKey]*claimsAt

type claimKey struct {
	address  netip.Addr
	protocol model.Protocol
}

// claimsAt are the claims at one address and protocol.
type claimsAt struct {
	exact  map[uint16][]claim // of one port each
	ranges []claim
}

type claim struct {
	model.Frontend
	service *model.Service
}

// do replaces the claims by those of a draft, or returns a *ConflictError and changes nothing.
func (c claims) do(d *draft) error {
	for _, s := range d.gone {
		c.remove(s)
	}
	for i, s := range d.come {
		if err := c.conflict(d, s); err != nil {
			c.undo(d.gone, d.come[:i])
			return err
		}
		c.add(s)
	}
	return nil
}

// undo reverts a change.
func (c claims) undo(gone, come []*model.Service) {
	for _, s := range come {
		c.remove(s)
	}
	for _, s := range gone {
		c.add(s)
	}
}

func (c claims) add(s *model.Service) {
	for _, f := range s.Frontends {
		key := claimKey{f.Address, f.Protocol}
		at := c[key]
		if at == nil {
			at = &claimsAt{exact: map[uint16][]claim{}}
			c[key] = at
		}
		if f.Ports.Exact() {
			at.exact[f.Ports.First] = append(at.exact[f.Ports.First], claim{f, s})
		} else {
			at.ranges = append(at.ranges, claim{f, s})
		}
	}
}

func (c claims) remove(s *model.Service) {
	for _, f := range s.Frontends {
		key := claimKey{f.Address, f.Protocol}
		at := c[key]
		if at == nil {
			continue // the service has the frontend twice
		}
		others := func(x claim) bool { return x.service == s && x.Frontend == f }
		if !f.Ports.Exact() {
			at.ranges = slices.DeleteFunc(at.ranges, others)
		} else if left := slices.DeleteFunc(at.exact[f.Ports.First], others); len(left) > 0 {
			at.exact[f.Ports.First] = left
		} else {
			delete(at.exact, f.Ports.First)
		}
		if len(at.exact)+len(at.ranges) == 0 {
			delete(c, key)
		}
	}
}

// conflict returns a *ConflictError if a new service meets another source's claim.
func (c claims) conflict(d *draft, s *model.Service) error {
	for _, f := range s.Frontends {
		other, meets := c.meets(f, s.Source)
		if !meets {
			continue
		}
		mine, theirs := claim{f, s}, other
		if refused, _ := d.refuse(s.Source, other.service.Source); refused == other.service.Source {
			mine, theirs = theirs, mine
		}
		return &ConflictError{Source: mine.service.Source, Service: mine.service.Name, Object: "frontend " + mine.Frontend.String(),
			Owner: theirs.service.Source, Detail: "it has " + theirs.Frontend.String()}
	}
	return nil
}

// meets returns the first claim, by port, of another source that shares a port with a frontend.
func (c claims) meets(f model.Frontend, source string) (first claim, found bool) {
	at := c[claimKey{f.Address, f.Protocol}]
	if at == nil {
		return first, false
	}
	look := func(all []claim) {
		for _, x := range all {
			if x.service.Source == source || x.Ports.First > f.Ports.Last || f.Ports.First > x.Ports.Last {
				continue
			}
			if !found || cmp.Or(cmp.Compare(x.Ports.First, first.Ports.First), cmp.Compare(x.Ports.Last, first.Ports.Last), byName(x.service, first.service)) < 0 {
				first, found = x, true
			}
		}
	}
	look(at.ranges)
	if wide := int(f.Ports.Last) - int(f.Ports.First); wide < len(at.exact) {
		for port := int(f.Ports.First); port <= int(f.Ports.Last); port++ {
			look(at.exact[uint16(port)])
		}
	} else {
		for _, all := range at.exact {
			look(all)
		}
	}
	return first, found
}
