// Package state holds the desired state: what the sources say shunt should do, and what
// operators say on top of it. There is one way in, the Writer, and readers get snapshots
// that never change.
//
//	source   ──Replace──────────────► Writer ──Snapshot, Watch──► reconciler
//	operator ──Set, Clear───────────►   │
//	                                     └──► file of overrides, which a restart reads
//
// A source owns the objects it names, and no two sources may name the same one. An
// override changes what they say for as long as one of them names its backend.
package state

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/model"
)

// Revision counts the changes of the desired state; 0 is the empty state at start.
type Revision uint64

// Snapshot is the desired state of all sources at one moment, with overrides applied. It
// is shared: whoever reads it must not change it.
type Snapshot struct {
	Revision Revision
	// Config has services by source name, then in the source's order. A backend that is
	// drained has weight 0 in all of them, and is in none once the deadline of its drain has
	// passed. One that is said to be up or down has that as its Override.
	Config    model.Config
	Overrides []Override // by address, port and kind
}

// ConflictError says that a source names something another one owns. Nothing of the
// refused configuration has been taken over.
type ConflictError struct {
	Source string // who was refused
	Object string // what it named: `service "web"`, "frontend tcp 192.0.2.10:80"
	Owner  string // the source that has it
	Detail string // how they meet, where that is not plain; may be empty
}

// Error names both sources, the object, and the way out.
func (e *ConflictError) Error() string {
	detail := ""
	if e.Detail != "" {
		detail = " (" + e.Detail + ")"
	}
	return fmt.Sprintf("take over configuration of source %q: %s belongs to source %q%s: remove it from one of them",
		e.Source, e.Object, e.Owner, detail)
}

// Writer collects what the sources and operators want. Its methods may be called from any
// goroutine.
type Writer struct {
	now  func() time.Time
	file *overrideFile // nil: overrides end with the process

	// changing is held through a whole change, writing the file included.
	changing  sync.Mutex
	sources   map[string]model.Config
	merged    model.Config // of the sources, without overrides
	overrides map[overrideKey]Override
	unsaved   bool  // the file may have other overrides
	saveError error // why, if that is known

	// mutex is held for moments only: readers do not wait for the disk.
	mutex    sync.Mutex
	snapshot *Snapshot
	changed  chan struct{} // closed when snapshot is replaced
}

// NewWriter is a writer that no source has spoken to, at revision 0. Its overrides end
// with the process; see Open.
func NewWriter() *Writer {
	return &Writer{
		now:       time.Now,
		sources:   map[string]model.Config{},
		overrides: map[overrideKey]Override{},
		snapshot:  &Snapshot{},
		changed:   make(chan struct{}),
	}
}

// Replace makes cfg all that this source wants; the zero Config withdraws everything.
// The writer keeps its own copy. It returns the revision that contains cfg, which is the
// present one if nothing changed, or a *ConflictError, and then nothing has changed.
// Overrides whose backend no source names any more end; see Save for the file.
func (w *Writer) Replace(source string, cfg model.Config) (Revision, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	overrides, different := w.overridesAfter(source, cfg)
	if !different && reflect.DeepEqual(w.sources[source], cfg) {
		return w.snapshot.Revision, nil
	}
	next := maps.Clone(w.sources)
	next[source] = clone(cfg)
	merged, err := merge(source, next)
	if err != nil {
		return w.snapshot.Revision, err
	}
	w.sources, w.merged = next, merged
	if different {
		w.overrides, w.unsaved = overrides, true
		_ = w.save() // is tried again by Save, and what the file has too much ends again at the next start
	}
	return w.publish(), nil
}

// publish makes the present sources, overrides and time the snapshot that readers get.
func (w *Writer) publish() Revision {
	now := w.now()
	for key, o := range w.overrides {
		o.Over = o.passed(now)
		w.overrides[key] = o
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.snapshot = &Snapshot{
		Revision:  w.snapshot.Revision + 1,
		Config:    effective(w.merged, w.overrides),
		Overrides: listed(w.overrides),
	}
	close(w.changed)
	w.changed = make(chan struct{})
	return w.snapshot.Revision
}

// Snapshot is the present desired state.
func (w *Writer) Snapshot() *Snapshot {
	snapshot, _ := w.Watch()
	return snapshot
}

// Watch is the present desired state and a channel that is closed once there is a newer
// one. Changes in between are not lost and not counted: look again, and watch anew.
func (w *Writer) Watch() (*Snapshot, <-chan struct{}) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.snapshot, w.changed
}

// clone copies cfg so deeply that the caller may go on changing what it passed.
func clone(cfg model.Config) model.Config {
	cfg.Interfaces = slices.Clone(cfg.Interfaces)
	cfg.SNAT.Addresses = slices.Clone(cfg.SNAT.Addresses)
	cfg.Services = slices.Clone(cfg.Services)
	for i := range cfg.Services {
		service := &cfg.Services[i]
		service.Frontends = slices.Clone(service.Frontends)
		service.Backends = slices.Clone(service.Backends)
		service.AllowFrom, service.DenyFrom = slices.Clone(service.AllowFrom), slices.Clone(service.DenyFrom)
		service.Health.HTTP.Statuses = slices.Clone(service.Health.HTTP.Statuses)
		service.Health.Exec = slices.Clone(service.Health.Exec)
	}
	return cfg
}

// merge is the union of all sources, or the *ConflictError that keeps source out.
// What concerns the whole machine (timeouts, limits, snat, encapsulation, api, each
// interface) may be said by several sources only if they say the same.
func merge(source string, sources map[string]model.Config) (model.Config, error) {
	var merged model.Config
	settings := map[string]string{} // object → the source that set it
	services := map[string]string{} // name → source
	interfaces := map[string]model.Interface{}
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		cfg := sources[name]
		for _, i := range cfg.Interfaces {
			object := fmt.Sprintf("interface %q", i.Name)
			if known, ok := interfaces[i.Name]; ok {
				if known != i {
					return merged, conflict(source, object, settings[object], name)
				}
				continue
			}
			interfaces[i.Name], settings[object] = i, name
			merged.Interfaces = append(merged.Interfaces, i)
		}
		for _, service := range cfg.Services {
			if owner, ok := services[service.Name]; ok {
				return merged, conflict(source, fmt.Sprintf("service %q", service.Name), owner, name)
			}
			services[service.Name] = name
			merged.Services = append(merged.Services, service)
		}
		for _, setting := range []struct {
			object   string
			from, to any
		}{
			{"timeouts", cfg.Timeouts, &merged.Timeouts},
			{"limits", cfg.Limits, &merged.Limits},
			{"snat", cfg.SNAT, &merged.SNAT},
			{"encapsulation", cfg.Encapsulation, &merged.Encapsulation},
			{"api", cfg.API, &merged.API},
		} {
			from, to := reflect.ValueOf(setting.from), reflect.ValueOf(setting.to).Elem()
			switch {
			case from.IsZero() || reflect.DeepEqual(setting.from, to.Interface()):
			case !to.IsZero():
				return merged, conflict(source, setting.object, settings[setting.object], name)
			default:
				to.Set(from)
				settings[setting.object] = name
			}
		}
	}
	return merged, frontendConflict(source, sources)
}

// conflict is the error for two sources that meet; the owner is the one not refused.
func conflict(source, object, one, other string) *ConflictError {
	owner := one
	if one == source {
		owner = other
	}
	return &ConflictError{Source: source, Object: object, Owner: owner}
}

// frontendConflict is a *ConflictError if two sources have frontends with a port in
// common. Within one source a narrower frontend may win over a wider one; between
// sources that would take traffic away from somebody else's service.
func frontendConflict(source string, sources map[string]model.Config) error {
	type owned struct {
		model.Frontend
		owner string
	}
	var frontends []owned
	for name, cfg := range sources {
		for _, service := range cfg.Services {
			for _, f := range service.Frontends {
				frontends = append(frontends, owned{f, name})
			}
		}
	}
	slices.SortFunc(frontends, func(a, b owned) int {
		return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol),
			cmp.Compare(a.Ports.First, b.Ports.First), cmp.Compare(a.Ports.Last, b.Ports.Last),
			cmp.Compare(a.owner, b.owner))
	})
	var widest map[string]owned // by source, of this address and protocol: reaches furthest
	for i, f := range frontends {
		if i == 0 || f.Address != frontends[i-1].Address || f.Protocol != frontends[i-1].Protocol {
			widest = map[string]owned{}
		}
		for _, owner := range slices.Sorted(maps.Keys(widest)) {
			other := widest[owner]
			if owner == f.owner || other.Ports.Last < f.Ports.First {
				continue
			}
			mine, theirs := f, other
			if theirs.owner == source {
				mine, theirs = theirs, mine
			}
			return &ConflictError{Source: source, Object: "frontend " + mine.Frontend.String(),
				Owner: theirs.owner, Detail: "it has " + theirs.Frontend.String()}
		}
		if reach, ok := widest[f.owner]; !ok || reach.Ports.Last < f.Ports.Last {
			widest[f.owner] = f
		}
	}
	return nil
}
