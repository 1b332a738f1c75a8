package file

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// frontendsMax limits the number of frontends that one file can produce.
const frontendsMax = 1 << 18

// frontend is one address, port and protocol of a service.
type frontend struct {
	model.Frontend
	service *serviceEntry
	port    config.Mark
}

// span is a range of ports with the position of its owner.
type span struct {
	ports value.PortRange
	index int
}

// precedence is 0 for an exact port, which beats 1, a range, which beats 2, any. Spans
// of different precedence may overlap.
func precedence(r value.PortRange) int {
	switch {
	case r == value.AnyPort:
		return 2
	case r.Exact():
		return 0
	}
	return 1
}

// overlapping reports every span that overlaps another of its precedence, with one that
// it overlaps; later is the larger index.
func overlapping(spans []span, report func(earlier, later int)) {
	slices.SortStableFunc(spans, func(a, b span) int {
		return cmp.Or(cmp.Compare(precedence(a.ports), precedence(b.ports)), cmp.Compare(a.ports.First, b.ports.First), cmp.Compare(a.index, b.index))
	})
	for i, furthest := 1, 0; i < len(spans); i++ {
		s, before := spans[i], spans[furthest]
		if precedence(s.ports) != precedence(before.ports) {
			furthest = i
			continue
		}
		if s.ports.First <= before.ports.Last {
			report(min(s.index, before.index), max(s.index, before.index))
		}
		if s.ports.Last > before.ports.Last {
			furthest = i
		}
	}
}

// overlaps reports frontends of different services that claim the same packets: once for each port entry and
// each service that it collides with.
func (b *builder) overlaps() {
	type host struct {
		address  netip.Addr
		protocol model.Protocol
	}
	groups := map[host][]span{}
	var order []host
	for i, f := range b.frontends {
		h := host{f.Address, f.Protocol}
		if groups[h] == nil {
			order = append(order, h)
		}
		groups[h] = append(groups[h], span{f.Ports, i})
	}
	type collision struct {
		port  config.Position
		other *serviceEntry
	}
	type finding struct {
		earlier, Later frontend
		count          int
	}
	found := map[collision]*finding{}
	var findings []*finding
	for _, h := range order {
		overlapping(groups[h], func(earlier, later int) {
			e, l := b.frontends[earlier], b.frontends[later]
			key := collision{l.port.At, e.service}
			if found[key] == nil {
				found[key] = &finding{earlier: e, Later: l}
				findings = append(findings, found[key])
			}
			found[key].count++
		})
	}
	for _, f := range findings {
		more := ""
		if f.count > 1 {
			more = fmt.Sprintf(" (and %d more here)", f.count-1)
		}
		b.parsed.faults.Errorf(f.Later.port, "a packet can belong to one service only: give them other ports or addresses",
			"%s overlaps %s of service %q at %s%s", f.Later.Frontend, f.earlier.Frontend, f.earlier.service.Name.Value, f.earlier.port.At, more)
	}
}
