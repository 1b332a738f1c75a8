package reconcile

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// Difference describes the effects of a change of the desired state, in the user's terms.
type Difference struct {
	Services  []ServiceDifference `json:"services,omitempty"`
	Addresses []AddressDifference `json:"addresses,omitempty"`
	// Repairs is the number of records that are written again or removed because an earlier change was
	// interrupted.
	Repairs int `json:"repairs,omitempty"`
	// Ended are services that were merged into others earlier, and whose flows end now.
	Ended []string `json:"-"`
	// Cuts are the flows in use that the change ends. The caller counts them and sets the field.
	Cuts []Cut `json:"-"`
}

// Change says whether a service or an address is added, removed or changed.
type Change string

// The kinds of changes.
const (
	Added   Change = "added"
	Removed Change = "removed"
	Changed Change = "changed"
)

// Cut describes flows that end with a change.
type Cut struct {
	Service   string `json:"service"`    // "": all services that have the backend
	Backend   string `json:"backend"`    // "": all backends of the service
	OpenFlows uint64 `json:"open_flows"` // 0: they are not counted
	Text      string `json:"text"`       // "7 open flows of service web end with it"
}

// ServiceDifference is the change of one service. For an added or removed service everything is listed.
type ServiceDifference struct {
	Name             string                `json:"name"`
	Change           Change                `json:"change"`
	TakesOver        []string              `json:"-"` // removed services whose flows go on with this one; only the text has them
	Attributes       []AttributeDifference `json:"attributes,omitempty"`
	Filters          *FilterDifference     `json:"filters,omitempty"`
	FrontendsAdded   []string              `json:"frontends_added,omitempty"`
	FrontendsRemoved []string              `json:"frontends_removed,omitempty"`
	BackendsAdded    []string              `json:"backends_added,omitempty"`
	BackendsRemoved  []string              `json:"backends_removed,omitempty"`
	Weights          []WeightDifference    `json:"weights,omitempty"`
	States           []StateDifference     `json:"states,omitempty"`
	BackendChanges   []BackendDifference   `json:"backend_changes,omitempty"`
	Tables           []TableDifference     `json:"tables,omitempty"`
}

// AttributeDifference is a changed value; name and values are written as in the configuration. A value that
// does not matter before and after is not listed.
type AttributeDifference struct {
	Name   string `json:"name"`
	Before string `json:"before"`
	After  string `json:"after"`
}

// String is "tracking from auto to none".
func (a AttributeDifference) String() string {
	return fmt.Sprintf("%s from %s to %s", a.Name, a.Before, a.After)
}

// BackendDifference lists the other changes of a backend that stays.
type BackendDifference struct {
	Backend    string                `json:"backend"`
	Attributes []AttributeDifference `json:"attributes"`
}

// WeightDifference is a change of the weight of a backend that stays.
type WeightDifference struct {
	Backend string `json:"backend"`
	Before  uint16 `json:"before"`
	After   uint16 `json:"after"`
}

// StateDifference is a change of whether a backend that stays takes new flows.
type StateDifference struct {
	Backend string `json:"backend"`
	Before  string `json:"before"` // "up", "at N %" of its weight, "idle" or "down"
	After   string `json:"after"`
}

// TableDifference is the change of one family's table. Slots decide where new flows go;
// flows that are tracked stay with their backend.
type TableDifference struct {
	Family      string `json:"family"`       // "ipv4" or "ipv6"
	SlotsBefore uint32 `json:"slots_before"` // 0: there was no table
	Slots       uint32 `json:"slots"`        // 0: no backend takes new flows
	// SlotsMoved is the number of Slots that name another backend than before. If the size changes it is the
	// same share of all possible flows, rounded to slots.
	SlotsMoved uint32 `json:"slots_moved"`
}

// AddressDifference is a change of the roles of one of our addresses.
type AddressDifference struct {
	Address netip.Addr `json:"address"`
	Change  Change     `json:"change"`
	Before  []string   `json:"before,omitempty"` // of "vip", "source", "host-own", "announce"
	After   []string   `json:"after,omitempty"`
}

// Empty reports whether there is nothing to change.
func (d Difference) Empty() bool {
	return len(d.Services) == 0 && len(d.Addresses) == 0 && d.Repairs == 0
}

// String returns one line for each service and address, with a sign in front: + added, - removed, ~ changed, !
// ended. Without a change it returns "nothing to change".
func (d Difference) String() string {
	if d.Empty() {
		return "nothing to change"
	}
	var lines []string
	for _, service := range d.Services {
		lines = append(lines, service.String())
	}
	for _, address := range d.Addresses {
		lines = append(lines, address.String())
	}
	for _, cut := range d.Cuts {
		lines = append(lines, "! "+cut.Text)
	}
	if d.Repairs > 0 {
		lines = append(lines, fmt.Sprintf("~ %s repaired after an interrupted change", value.Counted(d.Repairs, "record")))
	}
	return strings.Join(lines, "\n")
}

var signs = map[Change]string{Added: "+", Removed: "-", Changed: "~"}

// String returns one line: "~ service web: backend 10.0.0.3:8080 removed, 83 of 251 slots moved".
func (s ServiceDifference) String() string {
	var clauses []string
	switch s.Change {
	case Added:
		clauses = append(clauses, value.Counted(len(s.FrontendsAdded), "frontend"), value.Counted(len(s.BackendsAdded), "backend"))
	case Removed:
		clauses = append(clauses, value.Counted(len(s.FrontendsRemoved), "frontend"), value.Counted(len(s.BackendsRemoved), "backend"))
	default:
		for _, a := range s.Attributes {
			clauses = append(clauses, a.String())
		}
		if s.Filters != nil {
			clauses = append(clauses, s.Filters.String())
		}
		for _, part := range []struct {
			what, verb string
			items      []string
		}{
			{"frontend", "added", s.FrontendsAdded}, {"frontend", "removed", s.FrontendsRemoved},
			{"backend", "added", s.BackendsAdded}, {"backend", "removed", s.BackendsRemoved},
		} {
			for _, item := range part.items {
				clauses = append(clauses, fmt.Sprintf("%s %s %s", part.what, item, part.verb))
			}
		}
		for _, w := range s.Weights {
			clauses = append(clauses, fmt.Sprintf("weight of %s from %d to %d", w.Backend, w.Before, w.After))
		}
		for _, state := range s.States {
			clauses = append(clauses, fmt.Sprintf("backend %s from %s to %s", state.Backend, state.Before, state.After))
		}
		for _, b := range s.BackendChanges {
			for _, a := range b.Attributes {
				clauses = append(clauses, fmt.Sprintf("backend %s: %s", b.Backend, a))
			}
		}
	}
	for _, name := range s.TakesOver {
		clauses = append(clauses, "takes over the flows of service "+name)
	}
	for _, table := range s.Tables {
		text := table.String()
		if len(s.Tables) > 1 {
			text = map[string]string{"ipv4": "IPv4", "ipv6": "IPv6"}[table.Family] + ": " + text
		}
		clauses = append(clauses, text)
	}
	return fmt.Sprintf("%s service %s: %s", signs[s.Change], s.Name, strings.Join(clauses, ", "))
}

// String returns "83 of 251 slots moved", or describes the change of the table as a whole.
func (t TableDifference) String() string {
	switch {
	case t.SlotsBefore == 0:
		return fmt.Sprintf("table of %d slots", t.Slots)
	case t.Slots == 0:
		return "no backend left for new flows"
	case t.SlotsBefore != t.Slots:
		return fmt.Sprintf("table resized from %d to %d slots, %d of them moved", t.SlotsBefore, t.Slots, t.SlotsMoved)
	}
	return fmt.Sprintf("%d of %d slots moved", t.SlotsMoved, t.Slots)
}

// String returns "+ address 192.0.2.10: vip, announce".
func (a AddressDifference) String() string {
	text := ""
	switch a.Change {
	case Added:
		text = strings.Join(a.After, ", ")
	case Removed:
		text = strings.Join(a.Before, ", ")
	default:
		text = strings.Join(a.Before, ", ") + " -> " + strings.Join(a.After, ", ")
	}
	return fmt.Sprintf("%s address %s: %s", signs[a.Change], a.Address, text)
}

// roles lists the roles of an address record, in words.
func roles(record AddressRecord) []string {
	var words []string
	for _, role := range []struct {
		is   bool
		word string
	}{{record.VIP, "vip"}, {record.Source, "source"}, {record.HostOwn, "host-own"}, {record.Announce, "announce"}, {record.Direct, "direct"}} {
		if role.is {
			words = append(words, role.word)
		}
	}
	return words
}

// tableDifference compares two tables of a family.
func tableDifference(ipv6 bool, before, after []BackendRef) TableDifference {
	d := TableDifference{Family: "ipv4", SlotsBefore: uint32(len(before)), Slots: uint32(len(after))}
	if ipv6 {
		d.Family = "ipv6"
	}
	if len(before) == 0 || len(after) == 0 {
		d.SlotsMoved = d.Slots
		return d
	}
	// A flow hash h in [0,1) has slot floor(h*size). In units of 1/(before*after) both
	// tables have whole-numbered borders, and between two borders nothing changes.
	moved, total := uint64(0), uint64(len(before))*uint64(len(after))
	for at := uint64(0); at < total; {
		i, j := at/uint64(len(after)), at/uint64(len(before))
		end := min((i+1)*uint64(len(after)), (j+1)*uint64(len(before)))
		if before[i] != after[j] {
			moved += end - at
		}
		at = end
	}
	d.SlotsMoved = uint32((moved + uint64(len(before))/2) / uint64(len(before)))
	return d
}

// view is the part of a service that a Difference compares.
type view struct {
	service   *model.Service        // nil: there was no such service
	rules     map[netip.Prefix]bool // of both families
	frontends map[model.Frontend]bool
	backends  map[model.BackendAddress]backendView
	adopted   bool // only the record's fields and the list of backends are known
}

// backendView is the part of a backend that a Difference compares.
type backendView struct {
	weight  uint16
	state   string
	closed  bool // takes no new flows
	name    string
	backup  bool
	checkAt model.BackendAddress
}

func newView(service *model.Service) view {
	return view{service, map[netip.Prefix]bool{}, map[model.Frontend]bool{}, map[model.BackendAddress]backendView{}, false}
}

// stateOf tells whether the backend takes new flows, regardless of its weight.
func stateOf(b model.Backend) string {
	switch {
	case b.Observed.Down:
		return "down"
	case b.Observed.Idle:
		return "idle"
	case b.Observed.Ramp > 0:
		return fmt.Sprintf("at %d %%", b.Observed.Ramp)
	}
	return "up"
}

// viewOf returns the view of a configured service, without backends that no frontend can reach.
func viewOf(service *model.Service) view {
	v := newView(service)
	v.rules = allRules(service)
	for _, f := range service.Frontends {
		v.frontends[f] = true
	}
	for _, ipv6 := range []bool{false, true} {
		if !slices.ContainsFunc(service.Frontends, func(f model.Frontend) bool { return f.Address.Is6() == ipv6 }) {
			continue
		}
		for _, b := range serving(service, ipv6) {
			v.backends[b.BackendAddress] = backendView{b.EffectiveWeight(), stateOf(b), b.Share() == 0, b.Name, b.Backup, b.CheckAt}
		}
	}
	return v
}

// adoptedViews returns the services in the maps that were never applied, as far as the maps describe them.
func (r *Reconciler) adoptedViews() map[string]view {
	views := map[string]view{}
	for _, index := range slices.Sorted(maps.Keys(r.mirror.services)) {
		service := r.mirror.services[index]
		name := service.record.Name
		if service.remnant != nil {
			continue
		}
		if r.applied.services[name] != nil {
			continue
		}
		v, ok := views[name]
		if !ok {
			record := service.record
			v = newView(&model.Service{Forwarding: record.Forwarding, Tracking: record.Tracking, AffinityTimeout: record.AffinityTimeout, Policy: record.Policy})
			v.adopted = true
			views[name] = v
		}
		if service.record.Policy.Filters {
			r.mirror.rules(index, service.record.Generation, v.rules)
		}
		for _, ref := range service.named {
			if backend, ok := r.mirror.backends[ref.Index]; ok && backend.BackendRef == ref {
				v.backends[backend.BackendAddress] = backendView{}
			}
		}
	}
	for f, entry := range r.mirror.frontends {
		if service, ok := r.mirror.services[entry.services[len(entry.services)-1]]; ok {
			if v := views[service.record.Name]; v.adopted && f.Configured() {
				v.frontends[f] = true
			}
		}
	}
	return views
}

// difference translates the plan into the user's terms.
func (r *Reconciler) difference(p *plan, whole bool) Difference {
	d := Difference{Repairs: p.repairs, Ended: p.ended}
	before := map[string]view{} // services that may have changed or gone, as they were
	if whole {
		before = r.adoptedViews()
		for name, applied := range r.applied.services {
			before[name] = view{service: applied.service}
		}
	}
	for _, gone := range p.change.gone {
		before[gone.service.Name] = view{service: gone.service}
	}
	tables, takesOver := map[string][]TableDifference{}, r.takesOver(p)
	for _, want := range p.scope.services {
		if move := p.moves[want.serviceKey]; move.SlotsMoved > 0 || move.Slots != move.SlotsBefore {
			tables[want.name] = append(tables[want.name], move)
		}
	}
	for _, come := range p.change.come {
		name := come.service.Name
		old, known := before[name]
		delete(before, name)
		difference, differs := ServiceDifference{Name: name, Change: Changed}, false
		if !known || old.adopted || !old.service.Equal(come.service) {
			difference, differs = r.serviceDifference(name, old, viewOf(come.service))
		}
		if !known {
			difference.Change = Added
		}
		difference.TakesOver = takesOver[name]
		difference.Tables = tables[name]
		if !known || differs || len(difference.Tables) > 0 {
			d.Services = append(d.Services, difference)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		difference, _ := r.serviceDifference(name, before[name], view{})
		difference.Change = Removed
		d.Services = append(d.Services, difference)
	}
	d.Addresses = r.addressDifferences(p)
	if d.Empty() {
		d.Repairs = p.operations()
	}
	return d
}

// takesOver lists, for each service that receives flows of services that go, the names of these services. A
// service that loses the flows of a family is not listed.
func (r *Reconciler) takesOver(p *plan) map[string][]string {
	from := map[string]map[string]bool{}
	add := func(by serviceKey, former string) {
		if from[by.name] == nil {
			from[by.name] = map[string]bool{}
		}
		from[by.name][former] = true
	}
	for by, former := range p.heirs {
		add(by, former.name)
	}
	for former, by := range p.merges {
		add(by, r.mirror.services[former].record.Name)
	}
	ends := map[string]bool{}
	for _, index := range slices.Concat(p.earlyServices, p.lateServices) {
		if service := r.mirror.services[index]; service.remnant == nil {
			ends[service.record.Name] = true
		}
	}
	all := map[string][]string{}
	for by, names := range from {
		for _, name := range slices.Sorted(maps.Keys(names)) {
			if !ends[name] {
				all[by] = append(all[by], name)
			}
		}
	}
	return all
}

// serviceDifference compares two views, and reports whether they differ.
func (r *Reconciler) serviceDifference(name string, before, after view) (ServiceDifference, bool) {
	if before.service != nil && !before.adopted {
		before = viewOf(before.service)
	}
	d := ServiceDifference{Name: name, Change: Changed}
	if before.service != nil && after.service != nil {
		d.Attributes = differentAttributes(before.service, after.service, before.adopted)
		d.Filters = filterDifference(before.rules, after.rules)
	}
	for _, f := range slices.SortedFunc(maps.Keys(after.frontends), compareFrontends) {
		if !before.frontends[f] {
			d.FrontendsAdded = append(d.FrontendsAdded, f.String())
		}
	}
	for _, f := range slices.SortedFunc(maps.Keys(before.frontends), compareFrontends) {
		if !after.frontends[f] {
			d.FrontendsRemoved = append(d.FrontendsRemoved, f.String())
		}
	}
	for _, b := range slices.SortedFunc(maps.Keys(after.backends), compareBackends) {
		was, known := before.backends[b]
		is := after.backends[b]
		_, exists := r.mirror.byAddress[b]
		switch {
		case !known && before.adopted && is.closed && exists:
			// The backend had no slot to show that it belonged to the service, and gets none.
		case !known:
			d.BackendsAdded = append(d.BackendsAdded, b.String())
		case before.adopted:
		default:
			d.compareBackend(b.String(), was, is)
		}
	}
	for _, b := range slices.SortedFunc(maps.Keys(before.backends), compareBackends) {
		if _, ok := after.backends[b]; !ok {
			d.BackendsRemoved = append(d.BackendsRemoved, b.String())
		}
	}
	return d, d.Filters != nil || len(d.Attributes)+len(d.FrontendsAdded)+len(d.FrontendsRemoved)+len(d.BackendsAdded)+
		len(d.BackendsRemoved)+len(d.Weights)+len(d.States)+len(d.BackendChanges) > 0
}

// compareBackend adds the differences of a backend that stays.
func (s *ServiceDifference) compareBackend(name string, before, after backendView) {
	if before.weight != after.weight {
		s.Weights = append(s.Weights, WeightDifference{name, before.weight, after.weight})
	}
	if before.state != after.state {
		s.States = append(s.States, StateDifference{name, before.state, after.state})
	}
	var changes []AttributeDifference
	if before.name != after.name {
		changes = append(changes, AttributeDifference{"name", before.name, after.name})
	}
	if before.backup != after.backup {
		changes = append(changes, AttributeDifference{"backup", strconv.FormatBool(before.backup), strconv.FormatBool(after.backup)})
	}
	if before.checkAt.Address != after.checkAt.Address {
		changes = append(changes, AttributeDifference{"health.address", checkedAddressText(before.checkAt.Address), checkedAddressText(after.checkAt.Address)})
	}
	if before.checkAt.Port != after.checkAt.Port {
		changes = append(changes, AttributeDifference{"health.port", checkedPortText(before.checkAt.Port), checkedPortText(after.checkAt.Port)})
	}
	if len(changes) > 0 {
		s.BackendChanges = append(s.BackendChanges, BackendDifference{name, changes})
	}
}

// checkedAddressText returns the address to which the checks of a backend go.
func checkedAddressText(a netip.Addr) string {
	if !a.IsValid() {
		return "the backend's"
	}
	return a.String()
}

// checkedPortText returns the port to which the checks of a backend go.
func checkedPortText(port uint16) string {
	if port == 0 {
		return "that of the service's health"
	}
	return strconv.Itoa(int(port))
}

func compareBackends(a, b model.BackendAddress) int {
	return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Port, b.Port))
}

// addressDifferences compares the roles of the addresses in the plan's scope.
func (r *Reconciler) addressDifferences(p *plan) []AddressDifference {
	var differences []AddressDifference
	for _, address := range p.scope.addresses {
		before, after := roles(r.mirror.addresses[address].AddressRecord), roles(p.desired.address(address))
		change := Changed
		switch {
		case slices.Equal(before, after):
			continue
		case len(before) == 0:
			change = Added
		case len(after) == 0:
			change = Removed
		}
		differences = append(differences, AddressDifference{address, change, before, after})
	}
	return differences
}
