package file

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

func (p *Parsed) buildLimits(doc *document, b *builder) {
	l := &doc.Limits
	p.Config.Limits = model.Limits{
		Flows: uint32(l.Flows.Value), Services: uint32(l.Services.Value),
		Backends: uint32(l.Backends.Value), Slots: uint32(l.Slots.Value),
		Remembered: uint32(l.Remembered.Value), Filters: uint32(l.Filters.Value),
	}
	services := uint64(len(doc.Services.Items))
	format := "there are %d services"
	if b.halves > services {
		services, format = b.halves, "there are %d services (a service with addresses of both families counts twice)"
	}
	p.within(&l.Services, doc.Services.Mark, "limits.services", services, format)
	backends, format := uint64(len(b.distinct)), "the services have %d different backends"
	for _, most := range b.named {
		backends, format = backends+most, "the services have up to %d different backends (each dns as many as its max)"
	}
	p.within(&l.Backends, doc.Services.Mark, "limits.backends", backends, format)
	p.within(&l.Slots, doc.Services.Mark, "limits.slots", 2*b.slots, "the services' tables need %d slots (twice their size, because a new table is built beside the old one)")
	p.within(&l.Filters, doc.Services.Mark, "limits.filters", b.filters, "allow_from and deny_from of all services list %d prefixes")
	p.room(doc, b)
}

// within checks a need against its limit.
func (p *Parsed) within(limit *config.Number, services config.Mark, key string, need uint64, format string) {
	if need <= limit.Value || limit.Bad {
		return
	}
	p.faults.Errorf(limitOr(services, limit), raise(key, need), format+", %s is %d", need, key, limit.Value)
}

// raise returns the remedy for a limit that is too small, or says that no limit is large enough.
func raise(key string, need uint64) string {
	_, name, _ := strings.Cut(key, ".")
	fields := config.FieldsOf(reflect.TypeFor[limitsEntry]())
	most := fields[slices.IndexFunc(fields, func(f config.Field) bool { return f.Name == name })].Max
	if need > most {
		return fmt.Sprintf("that is more than one shunt can have: %s is at most %d", key, most)
	}
	return fmt.Sprintf("set %s to %d or more", key, need)
}

// limitOr returns the position of a fault about a limit: the limit, or the services if the limit is the
// default.
func limitOr(services config.Mark, limit *config.Number) config.Mark {
	if limit.Set {
		return limit.Mark
	}
	return services
}

// room checks a need against the maps that have no limit of their own.
func (p *Parsed) room(doc *document, b *builder) {
	limit, services := &doc.Limits.Services, doc.Services.Mark
	exact, pieces := 0, 0
	for _, f := range b.frontends {
		if f.Ports.Exact() {
			exact++
		} else {
			pieces += piecesOf(f.Ports)
		}
	}
	if room := max(model.FrontendsMin, model.FrontendsPerService*int(limit.Value)); exact > room && !limit.Bad {
		need := (exact + model.FrontendsPerService - 1) / model.FrontendsPerService
		p.faults.Errorf(limitOr(services, limit), raise("limits.services", uint64(need))+"; or use ranges",
			"the services have %d frontends with an exact port, limits.services is %d, which makes room for %d", exact, limit.Value, room)
	}
	if pieces > model.RangePiecesMax {
		p.faults.Errorf(services, "use fewer ranges, any, or ranges like 8192-8319, which begin at a multiple of their size",
			"the services' ranges of ports need %d entries (one for each aligned block of a range), there is room for %d", pieces, model.RangePiecesMax)
	}
	addresses := len(b.vips)
	for _, source := range p.Config.SNAT.Addresses {
		if _, both := b.vips[source]; !both {
			addresses++
		}
	}
	if addresses > model.AddressesMax {
		p.faults.Errorf(services, "use fewer addresses", "the services and snat have %d different addresses, there is room for %d", addresses, model.AddressesMax)
	}
	if count := len(p.Config.SNAT.Addresses); count > model.SourcesMax {
		p.faults.Errorf(doc.SNAT.Addresses.Mark, "list fewer", "there are %d source addresses, there is room for %d", count, model.SourcesMax)
	}
}

// piecesOf counts the aligned blocks that make up a range: at each step the largest one
// that begins there and does not pass the end.
func piecesOf(r value.PortRange) int {
	count := 0
	for first, last := uint32(r.First), uint32(r.Last); first <= last; count++ {
		size := uint32(1)
		for first&(2*size-1) == 0 && first+2*size-1 <= last {
			size *= 2
		}
		first += size
	}
	return count
}
