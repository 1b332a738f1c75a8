package state

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/model"
)

// Drain says that a backend is to get no new flows, and for how long its old ones may go on.
type Drain struct {
	Since    time.Time `json:"since"`
	Deadline time.Time `json:"deadline,omitzero"` // the backend is left out from then on; zero: never
	By       string    `json:"by"`                // who asked for it
}

// Override is a drain that is in force, in every service that has the backend.
type Override struct {
	Backend model.BackendAddress
	Drain
	Sources []string // those that name the backend, in order; the override ends with the last
	Over    bool     // the deadline has passed: the backend is left out
}

// passed reports whether the backend is to be left out at a time.
func (o Override) passed(now time.Time) bool {
	return !o.Deadline.IsZero() && !now.Before(o.Deadline)
}

// SelectorError says that a selector does not tell which backend is meant.
type SelectorError struct {
	Selector string
	// Candidates all have the name that was given; empty: nothing matches.
	Candidates []model.BackendAddress
	// Drained: only drained backends were looked at.
	Drained bool
}

// Error names the selector, and how to say which backend is meant.
func (e *SelectorError) Error() string {
	switch {
	case len(e.Candidates) > 0:
		names := make([]string, len(e.Candidates))
		for i, c := range e.Candidates {
			names[i] = c.String()
		}
		return fmt.Sprintf("look for backend %q: %s are called so: give the address of the one that is meant", e.Selector, strings.Join(names, " and "))
	case e.Drained:
		return fmt.Sprintf("look for backend %q: no drained backend has this name or address: `shunt backend list` shows them", e.Selector)
	}
	return fmt.Sprintf("look for backend %q: none has this name or address: `shunt backend list` shows them", e.Selector)
}

// SetDrain drains what the selector names in every service that has it, and returns its
// identity. A selector is
//
//	10.0.0.2:8080, [2001:db8::2]:8080   the backend with this port
//	10.0.0.2, 2001:db8::2               every backend at this address, whatever its port
//	green                               the backend that is called so
//
// Another drain of the same backend replaces the one before. Since is the present moment
// unless given; a deadline in the past leaves the backend out at once. The override
// outlives the process if the Writer was opened with a file. The error is a
// *SelectorError, or that of writing the file; either way nothing has changed.
func (w *Writer) SetDrain(selector string, d Drain) ([]model.BackendAddress, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	backends, err := resolve(selector, w.configured())
	if err != nil {
		return nil, err
	}
	if d.Since.IsZero() {
		d.Since = w.now()
	}
	d.Since, d.Deadline = wall(d.Since), wall(d.Deadline)
	next := maps.Clone(w.overrides)
	for _, b := range backends {
		next[b] = Override{Backend: b, Drain: d, Sources: w.naming(b)}
	}
	if err := w.take(next); err != nil {
		return nil, err
	}
	return backends, nil
}

// ClearDrain ends the drain of what the selector names among drained backends, and
// returns its identity. The error is a *SelectorError, or that of writing the file; either
// way nothing has changed.
func (w *Writer) ClearDrain(selector string) ([]model.BackendAddress, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	drained := slices.DeleteFunc(w.configured(), func(b model.Backend) bool {
		_, is := w.overrides[b.BackendAddress]
		return !is
	})
	for b := range w.overrides { // after a start, before the source that names it has spoken
		drained = append(drained, model.Backend{BackendAddress: b, Name: b.String()})
	}
	backends, err := resolve(selector, drained)
	if err != nil {
		err.Drained = true
		return nil, err
	}
	next := maps.Clone(w.overrides)
	for _, b := range backends {
		delete(next, b)
	}
	if err := w.take(next); err != nil {
		return nil, err
	}
	return backends, nil
}

// take makes other overrides those in force, once the file has them.
func (w *Writer) take(next map[model.BackendAddress]Override) error {
	before := w.overrides
	w.overrides, w.unsaved = next, true
	if err := w.save(); err != nil {
		w.overrides = before // still unsaved: nobody knows which of the two the file has
		return err
	}
	w.publish()
	return nil
}

// Drains lists the overrides in force, by address and port.
func (w *Writer) Drains() []Override { return slices.Clone(w.Snapshot().Drains) }

// NextDeadline is when the next deadline passes, after which PassDeadlines is to be called;
// it may be in the past already. ok is false when none is due. A change of the drains
// changes it, and every such change is a new snapshot.
func (w *Writer) NextDeadline() (next time.Time, ok bool) {
	for _, o := range w.Snapshot().Drains {
		if !o.Over && !o.Deadline.IsZero() && (!ok || o.Deadline.Before(next)) {
			next, ok = o.Deadline, true
		}
	}
	return next, ok
}

// PassDeadlines leaves out the backends whose deadline has passed, in a new snapshot if
// there are such, and returns the present revision. It may be called at any time.
func (w *Writer) PassDeadlines() Revision {
	w.changing.Lock()
	defer w.changing.Unlock()
	now := w.now()
	for _, o := range w.overrides {
		if o.passed(now) && !o.Over {
			return w.publish()
		}
	}
	return w.snapshot.Revision
}

// configured is every backend of every service, with its name there.
func (w *Writer) configured() []model.Backend {
	var all []model.Backend
	for _, service := range w.merged.Services {
		all = append(all, service.Backends...)
	}
	return all
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

// names reports whether a configuration has a backend.
func names(cfg model.Config, b model.BackendAddress) bool {
	return slices.ContainsFunc(cfg.Services, func(s model.Service) bool {
		return slices.ContainsFunc(s.Backends, func(x model.Backend) bool { return x.BackendAddress == b })
	})
}

// overridesAfter is what remains of the overrides once a source wants cfg. A source that
// has not spoken since the start still counts as naming what it named before.
func (w *Writer) overridesAfter(source string, cfg model.Config) (next map[model.BackendAddress]Override, different bool) {
	next = map[model.BackendAddress]Override{}
	for backend, o := range w.overrides {
		before, is := slices.Contains(o.Sources, source), names(cfg, backend)
		if before != is {
			different = true
			o.Sources = slices.DeleteFunc(slices.Clone(o.Sources), func(s string) bool { return s == source })
			if is {
				o.Sources = append(o.Sources, source)
				slices.Sort(o.Sources)
			}
		}
		if len(o.Sources) > 0 {
			next[backend] = o
		}
	}
	return next, different
}

// resolve finds what a selector names among backends, in order of address and port, each
// once. What can be read as an address is an address first, then a name.
func resolve(selector string, among []model.Backend) ([]model.BackendAddress, *SelectorError) {
	var found []model.BackendAddress
	find := func(is func(model.Backend) bool) {
		for _, b := range among {
			if is(b) {
				found = append(found, b.BackendAddress)
			}
		}
		slices.SortFunc(found, compareBackends)
		found = slices.Compact(found)
	}
	if address, err := netip.ParseAddr(selector); err == nil {
		find(func(b model.Backend) bool { return b.Address == address.Unmap() })
	} else if pair, err := netip.ParseAddrPort(selector); err == nil {
		exact := model.BackendAddress{Address: pair.Addr().Unmap(), Port: pair.Port()}
		find(func(b model.Backend) bool { return b.BackendAddress == exact })
	}
	if len(found) > 0 {
		return found, nil
	}
	find(func(b model.Backend) bool { return b.Name == selector })
	if len(found) == 1 {
		return found, nil
	}
	return nil, &SelectorError{Selector: selector, Candidates: found}
}

func compareBackends(a, b model.BackendAddress) int {
	return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Port, b.Port))
}

// wall is a time as the file keeps it: deadlines are moments of the wall clock, because
// they outlive the process.
func wall(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return t.Round(0).UTC()
}

// effective is the configuration with overrides applied. It shares what they do not change.
func effective(cfg model.Config, overrides map[model.BackendAddress]Override) model.Config {
	if len(overrides) == 0 {
		return cfg
	}
	cfg.Services = slices.Clone(cfg.Services)
	for i := range cfg.Services {
		service := &cfg.Services[i]
		kept := make([]model.Backend, 0, len(service.Backends))
		for _, b := range service.Backends {
			o, drained := overrides[b.BackendAddress]
			if drained && o.Over {
				continue
			}
			if drained {
				b.Weight = 0
			}
			kept = append(kept, b)
		}
		service.Backends = kept
	}
	return cfg
}

// listed is the overrides in order of address and port.
func listed(overrides map[model.BackendAddress]Override) []Override {
	return slices.SortedFunc(maps.Values(overrides), func(a, b Override) int { return compareBackends(a.Backend, b.Backend) })
}
