package state

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Kind names the property of its backend that an override changes. The value is the word used in output and
// in the API.
type Kind string

// The kinds, in the order of the output.
const (
	KindDrain  Kind = "drain"  // no new flows; old flows stay until a deadline, if there is one
	KindWeight Kind = "weight" // a weight that replaces the source's
	KindHealth Kind = "health" // up or down, against the checks
)

// Kinds lists all kinds.
var Kinds = []Kind{KindDrain, KindWeight, KindHealth}

// Health is the value of an override of KindHealth. The value is the word used in output and in
// the API.
type Health string

// The two values that an operator may set; without either there is no override.
const (
	HealthUp   = Health(model.HealthUp)
	HealthDown = Health(model.HealthDown)
)

// Author is the user who set an override.
type Author struct {
	By     string `json:"by"`     // the user's name
	UID    uint32 `json:"uid"`    // of the requesting process, from the kernel
	Client string `json:"client"` // the name that the process gave itself: "shunt", "curl/8.14.1"
}

// Setting is the contents of an override. Only the value of its kind is set.
type Setting struct {
	Kind     Kind
	Weight   uint16
	Health   Health
	Deadline time.Time // of a drain: the backend is left out from then on; zero: never
	Since    time.Time
	Author
}

// Override is a setting that is in force, in every service that has the backend. A backend
// has at most one of each kind.
type Override struct {
	Backend model.BackendAddress
	Setting
	Sources []string // the sources that name the backend, in order; without any the override ends
	Over    bool     // the deadline has passed: the backend is left out
}

// overrideKey identifies an override.
type overrideKey struct {
	backend model.BackendAddress
	kind    Kind
}

// passed reports whether the backend has to be left out at a time.
func (o Override) passed(now time.Time) bool {
	return !o.Deadline.IsZero() && !now.Before(o.Deadline)
}

// SelectorError says that a selector does not identify a backend.
type SelectorError struct {
	Selector string
	// Candidates are the backends with the given name; empty: no backend matches.
	Candidates []model.BackendAddress
	// Overridden: only backends with an override of these kinds were searched.
	Overridden []Kind
}

// Error names the selector, and says how to identify a backend.
func (e *SelectorError) Error() string {
	switch {
	case len(e.Candidates) > 0:
		names := make([]string, len(e.Candidates))
		for i, c := range e.Candidates {
			names[i] = c.String()
		}
		return fmt.Sprintf("look for backend %q: %s have this name: give the address of one of them", e.Selector, strings.Join(names, " and "))
	case len(e.Overridden) == 1:
		return fmt.Sprintf("look for backend %q: no backend with an override of its %s has this name or address: `shunt override list` shows them", e.Selector, e.Overridden[0])
	case len(e.Overridden) > 1:
		return fmt.Sprintf("look for backend %q: no backend with an override has this name or address: `shunt override list` shows them", e.Selector)
	}
	return fmt.Sprintf("look for backend %q: no backend has this name or address: `shunt backend list` shows them", e.Selector)
}

// Set overrides the selected backends in every service that has them, and returns their
// identities. A selector is
//
//	10.0.0.2:8080, [2001:db8::2]:8080   the backend with this port
//	10.0.0.2, 2001:db8::2               every backend at this address, with any port
//	green                               the backend with this name
//
// Another setting of the same kind replaces the one before. Since is the present moment
// unless given; a deadline in the past leaves the backend out at once. The override
// outlives the process if the Writer was opened with a file and Unsaved returns nil. The
// error is a *SelectorError, and then nothing has changed.
func (w *Writer) Set(selector string, s Setting) ([]model.BackendAddress, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	backends, err := resolve(selector, w.configured())
	if err != nil {
		return nil, err
	}
	if s.Since.IsZero() {
		s.Since = w.now()
	}
	s.Since, s.Deadline = wall(s.Since), wall(s.Deadline)
	next := maps.Clone(w.overrides)
	for _, b := range backends {
		next[overrideKey{b, s.Kind}] = Override{Backend: b, Setting: s, Sources: w.naming(b)}
	}
	w.take(next)
	return backends, nil
}

// Clear ends the overrides of some kinds, or of all kinds if none is given, of the selected backends, and
// returns them. Only backends with such an override are searched. The error is a *SelectorError, and then
// nothing has changed.
func (w *Writer) Clear(selector string, kinds ...Kind) ([]Override, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	if len(kinds) == 0 {
		kinds = Kinds
	}
	concerned := map[model.BackendAddress]bool{}
	for key := range w.overrides {
		if slices.Contains(kinds, key.kind) {
			concerned[key.backend] = true
		}
	}
	var among []model.Backend
	for b := range w.configured() {
		if concerned[b.BackendAddress] {
			among = append(among, *b)
		}
	}
	for b := range concerned { // after a start, before the source that names it has declared anything
		among = append(among, model.Backend{BackendAddress: b, Name: b.String()})
	}
	backends, err := resolve(selector, pointers(among))
	if err != nil {
		err.Overridden = kinds
		return nil, err
	}
	return w.end(func(o Override) bool {
		return slices.Contains(backends, o.Backend) && slices.Contains(kinds, o.Kind)
	}), nil
}

// ClearAll ends the overrides of some kinds, or of all kinds if none is given, and returns them.
func (w *Writer) ClearAll(kinds ...Kind) []Override {
	w.changing.Lock()
	defer w.changing.Unlock()
	return w.end(func(o Override) bool { return len(kinds) == 0 || slices.Contains(kinds, o.Kind) })
}

// end ends overrides, and returns them.
func (w *Writer) end(over func(Override) bool) []Override {
	next := maps.Clone(w.overrides)
	var ended []Override
	for _, o := range listed(w.overrides) {
		if over(o) {
			ended = append(ended, o)
			delete(next, overrideKey{o.Backend, o.Kind})
		}
	}
	if len(ended) > 0 {
		w.take(next)
	}
	return ended
}

// take puts other overrides into force. A disk that is full or read-only does not keep an operator from
// draining a backend: Unsaved then reports that the file differs.
func (w *Writer) take(next map[overrideKey]Override) {
	w.overrides, w.unsaved = next, true
	_ = w.save()
	w.publish(nil, nil)
}

// Overrides lists the overrides in force, by address, port and kind.
func (w *Writer) Overrides() []Override { return slices.Clone(w.Snapshot().Overrides) }

// NextDeadline returns the time of the next deadline, after which PassDeadlines has to be called; it may be in
// the past already. ok is false if there is none. Only a change of the overrides changes it, and every such
// change makes a new snapshot.
func (w *Writer) NextDeadline() (next time.Time, ok bool) {
	for _, o := range w.Snapshot().Overrides {
		if !o.Over && !o.Deadline.IsZero() && (!ok || o.Deadline.Before(next)) {
			next, ok = o.Deadline, true
		}
	}
	return next, ok
}

// PassDeadlines leaves out the backends whose deadline has passed, in a new snapshot if there are any, and
// returns the present revision. It may be called at any time.
func (w *Writer) PassDeadlines() Revision {
	w.changing.Lock()
	defer w.changing.Unlock()
	now := w.now()
	for _, o := range w.overrides {
		if o.passed(now) && !o.Over {
			return w.publish(nil, nil)
		}
	}
	return w.snapshot.Revision
}

// configured returns every backend of every service, with its name there.
func (w *Writer) configured() iter.Seq[*model.Backend] {
	return func(yield func(*model.Backend) bool) {
		for _, service := range listOf(w.sources) {
			for b := range pointers(service.Backends) {
				if !yield(b) {
					return
				}
			}
		}
	}
}

// pointers returns pointers to the elements of a list, which may be long, with large elements.
func pointers[T any](all []T) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for i := range all {
			if !yield(&all[i]) {
				return
			}
		}
	}
}

// naming lists the sources that have a backend.
func (w *Writer) naming(b model.BackendAddress) (sources []string) {
	for _, source := range slices.Sorted(maps.Keys(w.sources)) {
		if names(w.sources[source], b) {
			sources = append(sources, source)
		}
	}
	return sources
}

// names reports whether services have a backend.
func names(services []*model.Service, b model.BackendAddress) bool {
	return slices.ContainsFunc(services, func(s *model.Service) bool { return has(s, b) })
}

func has(s *model.Service, b model.BackendAddress) bool {
	return slices.ContainsFunc(s.Backends, func(x model.Backend) bool { return x.BackendAddress == b })
}

// overridesAfter returns the overrides that remain when a source wants services, and gone and come are its
// changed services. A source that has not declared anything since the start still counts as naming its earlier
// backends: first says that this is its first declaration.
func overridesAfter(overrides map[overrideKey]Override, source string, services, gone, come []*model.Service, first bool) (next map[overrideKey]Override, different bool) {
	if len(overrides) == 0 {
		return overrides, false
	}
	next = map[overrideKey]Override{}
	for key, o := range overrides {
		before := slices.Contains(o.Sources, source)
		is := names(come, key.backend)
		if !is && before { // all services are searched only if the backend has left one
			is = !first && !names(gone, key.backend) || names(services, key.backend)
		}
		if before != is {
			different = true
			o.Sources = slices.DeleteFunc(slices.Clone(o.Sources), func(s string) bool { return s == source })
			if is {
				o.Sources = append(o.Sources, source)
				slices.Sort(o.Sources)
			}
		}
		if len(o.Sources) > 0 {
			next[key] = o
		}
	}
	return next, different
}

// resolve finds the backends that a selector names, in order of address and port, each once. Text in the form of
// an address is read as an address first, and then as a name.
func resolve(selector string, among iter.Seq[*model.Backend]) ([]model.BackendAddress, *SelectorError) {
	var found []model.BackendAddress
	find := func(is func(*model.Backend) bool) {
		for b := range among {
			if is(b) {
				found = append(found, b.BackendAddress)
			}
		}
		slices.SortFunc(found, compareBackends)
		found = slices.Compact(found)
	}
	if address, err := netip.ParseAddr(selector); err == nil {
		find(func(b *model.Backend) bool { return b.Address == address.Unmap() })
	} else if pair, err := netip.ParseAddrPort(selector); err == nil {
		exact := model.BackendAddress{Address: pair.Addr().Unmap(), Port: pair.Port()}
		find(func(b *model.Backend) bool { return b.BackendAddress == exact })
	}
	if len(found) > 0 {
		return found, nil
	}
	find(func(b *model.Backend) bool { return b.Name == selector })
	if len(found) == 1 {
		return found, nil
	}
	return nil, &SelectorError{Selector: selector, Candidates: found}
}

func compareBackends(a, b model.BackendAddress) int {
	return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Port, b.Port))
}

// wall returns a time as the file keeps it: deadlines are moments of the wall clock, because they outlive the
// process.
func wall(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return t.Round(0).UTC()
}

// effective returns services with overrides applied.
func effective(configured []*model.Service, overridden map[*model.Service]*model.Service) []*model.Service {
	if len(overridden) == 0 {
		return configured
	}
	services := slices.Clone(configured)
	for i, s := range services {
		if with := overridden[s]; with != nil {
			services[i] = with
		}
	}
	return services
}

// overriddenIn returns the overridden form of services, by the service. A form that equals the former one is
// the same pointer.
func overriddenIn(services []*model.Service, overrides map[overrideKey]Override, before map[*model.Service]*model.Service) map[*model.Service]*model.Service {
	if len(overrides) == 0 {
		return nil
	}
	concerned := map[model.BackendAddress]bool{}
	for key := range overrides {
		concerned[key.backend] = true
	}
	all := map[*model.Service]*model.Service{}
	for _, s := range services {
		if !slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return concerned[b.BackendAddress] }) {
			continue
		}
		with := overriddenService(s, overrides)
		if was := before[s]; was != nil && was.Equal(with) {
			with = was
		}
		all[s] = with
	}
	return all
}

// overriddenAfter does the same as overriddenIn if overrides have not changed, and gone and come are the
// changed services.
func overriddenAfter(before map[*model.Service]*model.Service, gone, come []*model.Service, overrides map[overrideKey]Override) map[*model.Service]*model.Service {
	if len(overrides) == 0 || len(gone)+len(come) == 0 {
		return before
	}
	all := overriddenIn(come, overrides, nil)
	maps.Copy(all, before)
	for _, s := range gone {
		delete(all, s)
	}
	return all
}

// overriddenService returns a service with overrides applied. It shares unchanged parts. Of several overrides
// for one backend the one with the strongest restriction decides. The package health decides which backends
// serve under an override of health.
func overriddenService(service *model.Service, overrides map[overrideKey]Override) *model.Service {
	with := *service
	with.Backends = make([]model.Backend, 0, len(service.Backends))
	for _, b := range service.Backends {
		drain, drained := overrides[overrideKey{b.BackendAddress, KindDrain}]
		if drained && drain.Over {
			continue
		}
		if weight, is := overrides[overrideKey{b.BackendAddress, KindWeight}]; is {
			b.Override.Weighs, b.Override.Weight = true, weight.Weight
		}
		if drained {
			b.Override.Weighs, b.Override.Weight = true, 0
		}
		b.Override.Health = model.HealthState(overrides[overrideKey{b.BackendAddress, KindHealth}].Health)
		with.Backends = append(with.Backends, b)
	}
	return &with
}

// sameEffect reports whether two overrides have the same effect on services.
func sameEffect(a, b Override) bool {
	return a.Backend == b.Backend && a.Kind == b.Kind && a.Weight == b.Weight && a.Health == b.Health && a.Over == b.Over
}

// listed returns the overrides in order of address, port and kind.
func listed(overrides map[overrideKey]Override) []Override {
	return slices.SortedFunc(maps.Values(overrides), func(a, b Override) int {
		return cmp.Or(compareBackends(a.Backend, b.Backend), cmp.Compare(slices.Index(Kinds, a.Kind), slices.Index(Kinds, b.Kind)))
	})
}
