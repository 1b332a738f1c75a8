package reconcile

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Filter is a prefix of source addresses in the data plane, for one tenant of a service's position.
type Filter struct {
	Service    uint32 // index
	Generation uint8
	Prefix     netip.Prefix // masked; length 0: of the sources in no list
}

// rest returns the prefix of length 0 of a family.
func rest(ipv6 bool) netip.Prefix {
	if ipv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// rulesOf returns which sources of a family may use a service: the longest prefix that contains a source
// decides. It is nil if all sources may. Sources in no list may use the service if allow_from is empty.
func rulesOf(service *model.Service, ipv6 bool) map[netip.Prefix]bool {
	rules := map[netip.Prefix]bool{rest(ipv6): len(service.AllowFrom) == 0}
	for _, list := range []struct {
		prefixes []netip.Prefix
		allow    bool
	}{{service.AllowFrom, true}, {service.DenyFrom, false}} {
		for _, prefix := range list.prefixes {
			if prefix.Addr().Is6() == ipv6 {
				rules[prefix.Masked()] = list.allow
			}
		}
	}
	if len(rules) == 1 && rules[rest(ipv6)] {
		return nil
	}
	return rules
}

// checkFilters protects the maps from sources, which check the text that people write.
func checkFilters(service *model.Service) error {
	allowed := map[netip.Prefix]bool{}
	for _, prefix := range slices.Concat(service.AllowFrom, service.DenyFrom) {
		if !prefix.IsValid() || prefix.Addr().Is4In6() {
			return fmt.Errorf("service %q has %s in its lists of sources, which is not a prefix", service.Name, prefix)
		}
	}
	for _, prefix := range service.AllowFrom {
		allowed[prefix.Masked()] = true
	}
	for _, prefix := range service.DenyFrom {
		if allowed[prefix.Masked()] {
			return fmt.Errorf("service %q both allows and denies %s: remove it from one of the lists", service.Name, prefix)
		}
	}
	return nil
}

// serviceRef is a tenant of a service's position.
type serviceRef struct {
	index      uint32
	generation uint8
}

type mirrorFilter struct {
	allow bool
	doubt bool // it may be missing, or have the opposite verdict
}

// rules adds the prefixes in the lists of a tenant.
func (m *mirror) rules(index uint32, generation uint8, into map[netip.Prefix]bool) {
	for f, have := range m.filters {
		if f.Service == index && f.Generation == generation {
			into[f.Prefix] = have.allow
		}
	}
}

type filterStep struct {
	Filter
	allow bool
}

// planFilters orders the changes of each service's lists so that, at every moment, every source has the
// verdict from before the change or the verdict from after it:
//
//   - Puts come first, the longest prefix before the others. So if the longest prefix of a
//     source is new, its verdict is the new one; if it is old, all new prefixes are shorter,
//     and no longer prefix has been removed.
//   - Removals follow, the shortest prefix before the others: if an old prefix is still a
//     source's longest, it was the longest before the change, too.
//   - A service filters only after its lists are complete, and the lists are removed
//     only after it has stopped filtering and no program can remember otherwise.
func (p *planner) planFilters() error {
	rules := map[serviceRef]map[netip.Prefix]bool{}
	for _, want := range p.scope.services {
		tenant := p.tenants[want.serviceKey]
		rules[tenant] = want.rules
		for prefix, allow := range want.rules {
			f := Filter{tenant.index, tenant.generation, prefix}
			have, known := p.mirror.filters[f]
			if have.doubt {
				p.repairs++
			}
			if !known || have.doubt || have.allow != allow {
				p.filters = append(p.filters, filterStep{f, allow})
			}
		}
	}
	count := p.desired.prefixes
	room := count
	for _, f := range p.scope.filters {
		if _, wanted := rules[serviceRef{f.Service, f.Generation}][f.Prefix]; wanted {
			continue
		}
		if f.Prefix.Bits() > 0 {
			room++
		}
		if p.mirror.filters[f].doubt {
			p.repairs++
		}
		if rules[serviceRef{f.Service, f.Generation}] != nil {
			p.filtersGone = append(p.filtersGone, f)
		} else {
			p.filtersLate = append(p.filtersLate, f)
		}
	}
	slices.SortFunc(p.filters, func(a, b filterStep) int { return compareFilters(b.Filter, a.Filter) })
	slices.SortFunc(p.filtersGone, compareFilters)
	slices.SortFunc(p.filtersLate, compareFilters)
	limit := uint64(p.limits.Filters)
	if uint64(count) > limit {
		return &CapacityError{What: "filters", Need: uint64(count), Limit: limit, Why: "prefixes of allow_from and deny_from of all services together"}
	}
	if uint64(room) > 2*limit {
		return &CapacityError{What: "filters", Need: uint64(room+1) / 2, Limit: limit,
			Why: fmt.Sprintf("%d prefixes wanted, and %d that are removed only afterwards; there is room for twice the limit", count, room-count)}
	}
	return nil
}

// compareFilters orders filters by the length of the prefix.
func compareFilters(a, b Filter) int {
	return cmp.Or(cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()), cmp.Compare(a.Service, b.Service),
		cmp.Compare(a.Generation, b.Generation), a.Prefix.Addr().Compare(b.Prefix.Addr()))
}

func (r *Reconciler) putFilter(f filterStep) error {
	m := &r.mirror
	m.filters[f.Filter] = mirrorFilter{allow: f.allow, doubt: true}
	if err := r.maps.PutFilter(f.Filter, f.allow); err != nil {
		return fmt.Errorf("put source prefix %s of the service at index %d: %w", f.Prefix, f.Service, err)
	}
	m.filters[f.Filter] = mirrorFilter{allow: f.allow}
	return nil
}

func (r *Reconciler) deleteFilter(f Filter) error {
	m := &r.mirror
	m.filters[f] = mirrorFilter{allow: m.filters[f].allow, doubt: true}
	if err := r.maps.DeleteFilter(f); err != nil {
		return fmt.Errorf("delete source prefix %s of the service at index %d: %w", f.Prefix, f.Service, err)
	}
	delete(m.filters, f)
	return nil
}

// FilterDifference is the number of prefixes that are added to the lists of sources and removed from them. A
// prefix that changes lists counts in both.
type FilterDifference struct {
	AllowAdded   int `json:"allow_from_added,omitempty"`
	AllowRemoved int `json:"allow_from_removed,omitempty"`
	DenyAdded    int `json:"deny_from_added,omitempty"`
	DenyRemoved  int `json:"deny_from_removed,omitempty"`
	// Others4 and Others6 say how sources of a family that are in no list are treated, if that changes:
	// "allowed" or "denied".
	Others4 string `json:"others_ipv4,omitempty"`
	Others6 string `json:"others_ipv6,omitempty"`
}

// String is "allow_from: 2 added, sources in no list denied".
func (d FilterDifference) String() string {
	var clauses []string
	for _, list := range []struct {
		name           string
		added, removed int
	}{{"allow_from", d.AllowAdded, d.AllowRemoved}, {"deny_from", d.DenyAdded, d.DenyRemoved}} {
		var parts []string
		if list.added > 0 {
			parts = append(parts, fmt.Sprintf("%d added", list.added))
		}
		if list.removed > 0 {
			parts = append(parts, fmt.Sprintf("%d removed", list.removed))
		}
		if len(parts) > 0 {
			clauses = append(clauses, list.name+": "+strings.Join(parts, " and "))
		}
	}
	switch {
	case d.Others4 == "" && d.Others6 == "":
	case d.Others4 == "" || d.Others6 == "" || d.Others4 == d.Others6:
		clauses = append(clauses, "sources in no list "+cmp.Or(d.Others4, d.Others6))
	default:
		clauses = append(clauses, "IPv4 sources in no list "+d.Others4, "IPv6 sources in no list "+d.Others6)
	}
	return strings.Join(clauses, ", ")
}

// allRules returns the rules of a configured service for both families that it has frontends of.
func allRules(service *model.Service) map[netip.Prefix]bool {
	all := map[netip.Prefix]bool{}
	for _, f := range service.Frontends {
		maps.Copy(all, rulesOf(service, f.Address.Is6()))
	}
	return all
}

// filterDifference compares the rules of two views; nil: they are equal.
func filterDifference(before, after map[netip.Prefix]bool) *FilterDifference {
	var d FilterDifference
	tally := func(from, to map[netip.Prefix]bool, allows, denies *int) {
		for prefix, allow := range from {
			if other, ok := to[prefix]; prefix.Bits() == 0 || ok && other == allow {
				continue
			}
			if allow {
				*allows++
			} else {
				*denies++
			}
		}
	}
	tally(after, before, &d.AllowAdded, &d.DenyAdded)
	tally(before, after, &d.AllowRemoved, &d.DenyRemoved)
	for ipv6, others := range map[bool]*string{false: &d.Others4, true: &d.Others6} {
		was, ok := before[rest(ipv6)]
		was = was || !ok
		is, ok := after[rest(ipv6)]
		if is = is || !ok; was != is {
			*others = map[bool]string{true: "allowed", false: "denied"}[is]
		}
	}
	if d == (FilterDifference{}) {
		return nil
	}
	return &d
}

// dumpFilters writes a line for each prefix, the longest first.
func dumpFilters(out *strings.Builder, filters map[Filter]bool) {
	order := func(a, b Filter) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Generation, b.Generation), compareFilters(b, a))
	}
	for _, f := range slices.SortedFunc(maps.Keys(filters), order) {
		verdict := "deny"
		if filters[f] {
			verdict = "allow"
		}
		fmt.Fprintf(out, "filter %s: service %d generation %d, %s\n", f.Prefix, f.Service, f.Generation, verdict)
	}
}
