// Package state holds the desired state: what the sources say shunt should do, and what
// operators say on top of it. There is one way in, the Writer, and readers get snapshots
// that never change.
//
//	source   ──Replace────► Writer ──Snapshot, Watch──► reconciler
//	operator ──Set, Clear─►   │
//	                          └──► file of overrides, which a restart reads
//
// One source configures this machine. A source owns the services it names, and no two sources
// may name the same one. An override changes what they say for as long as one of them names
// its backend.
package state

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Revision counts the changes of the desired state; 0 is the empty state at start.
type Revision uint64

// Snapshot is the desired state of all sources at one moment, with overrides applied. It
// is shared: whoever reads it must not change it.
type Snapshot struct {
	Revision Revision
	// Config has the node as its owner says, and services by source name, then in the source's
	// order, each with its Source. A backend that is drained has weight 0 in all of them, and is in
	// none once the deadline of its drain has passed. One that is said to be up or down has that
	// as its Override.
	Config model.Config
	// Configured is Config.Services as the sources say, without overrides.
	Configured []model.Service
	Overrides  []Override // by address, port and kind
}

// ConflictError says that a source names something another one owns. Nothing of the
// refused configuration has been taken over.
type ConflictError struct {
	Source  string // who was refused
	Service string // its service that names the object; "" where the object is the node
	Object  string // `service "web"`, "frontend tcp 192.0.2.10:80", "the node"
	Owner   string // the source that has it
	Detail  string // how they meet, where that is not plain; may be empty
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
	owner     string // the source that has configured the node; empty: none has
	sources   map[string][]model.Service
	merged    model.Config // the node, and services of all sources, without overrides
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
		sources:   map[string][]model.Service{},
		overrides: map[overrideKey]Override{},
		snapshot:  &Snapshot{},
		changed:   make(chan struct{}),
	}
}

// Declaration is all that a source wants.
type Declaration struct {
	Source string
	// Node is what this machine is. nil: the source does not say, as all but one of them.
	Node     *model.Node
	Services []model.Service // none withdraws everything
}

// Replace puts each declaration in the place of its source's last one: all of them as a whole, in
// one step. The writer keeps its own copy. It returns the revision that contains them, which is the
// present one if nothing changed, or a *ConflictError, and then nothing has changed: a service
// belongs to the source that named it first, and so does the node. Of two sources that are declared
// here the former is the first. Overrides whose backend no source names any more end; see Save for
// the file.
func (w *Writer) Replace(declared ...Declaration) (Revision, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	return w.adopt(w.draft(declared))
}

// Try is what Replace would publish, or the error that it would return. Nothing changes.
func (w *Writer) Try(declared ...Declaration) (*Snapshot, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	draft, err := w.draft(declared)
	if err != nil {
		return nil, err
	}
	return draft.snapshot(w.snapshot.Revision + 1), nil
}

// draft is what a writer knows, after a change that may be taken over.
type draft struct {
	declaring        []string // the sources that change it
	owner            string
	sources          map[string][]model.Service
	merged           model.Config
	overrides        map[overrideKey]Override
	overridesChanged bool
}

// draft is what the writer knows once sources have declared this. The caller holds changing.
func (w *Writer) draft(declared []Declaration) (draft, error) {
	next := draft{owner: w.owner, sources: maps.Clone(w.sources), overrides: w.overrides}
	node := w.merged.Node
	for _, d := range declared {
		if d.Node != nil {
			if next.owner != "" && next.owner != d.Source {
				return draft{}, &ConflictError{Source: d.Source, Object: "the node", Owner: next.owner}
			}
			node, next.owner = *d.Node, d.Source
		}
		overrides, changed := overridesAfter(next.overrides, d.Source, d.Services)
		next.overrides, next.overridesChanged = overrides, next.overridesChanged || changed
		next.sources[d.Source] = w.taken(d.Source, d.Services)
		next.declaring = append(next.declaring, d.Source)
	}
	next.merged.Node = cloneNode(node)
	var err error
	next.merged.Services, err = next.merge()
	return next, err
}

// taken is what a source wants, as the writer keeps it: a copy, but for services that say what the
// source has said before. Those are what they were, so that everybody finds at once that they are
// the same.
func (w *Writer) taken(source string, services []model.Service) []model.Service {
	before := map[string]*model.Service{}
	for i := range w.sources[source] {
		before[w.sources[source][i].Name] = &w.sources[source][i]
	}
	taken := slices.Clone(services)
	for i := range taken {
		taken[i].Source = source
		if known, ok := before[taken[i].Name]; ok && known.Equal(&taken[i]) {
			taken[i] = *known
		} else {
			taken[i] = cloneService(taken[i])
		}
	}
	return taken
}

// adopt takes a draft over, unless there is an error, and returns the revision that contains it.
func (w *Writer) adopt(next draft, err error) (Revision, error) {
	if err != nil || w.agrees(next) {
		return w.snapshot.Revision, err
	}
	w.owner, w.sources, w.merged, w.overrides = next.owner, next.sources, next.merged, next.overrides
	if next.overridesChanged {
		w.unsaved = true
		_ = w.save() // is tried again by Save, and what the file has too much ends again at the next start
	}
	return w.publish(), nil
}

// agrees reports whether a draft changes nothing.
func (w *Writer) agrees(next draft) bool {
	same := func(a, b model.Service) bool { return a.Equal(&b) }
	for _, source := range next.declaring {
		if !slices.EqualFunc(next.sources[source], w.sources[source], same) {
			return false
		}
	}
	return !next.overridesChanged && next.owner == w.owner && reflect.DeepEqual(next.merged.Node, w.merged.Node)
}

// snapshot is what readers get of it.
func (d draft) snapshot(revision Revision) *Snapshot {
	return &Snapshot{
		Revision:   revision,
		Config:     effective(d.merged, d.overrides),
		Configured: d.merged.Services,
		Overrides:  listed(d.overrides),
	}
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
	w.snapshot = draft{merged: w.merged, overrides: w.overrides}.snapshot(w.snapshot.Revision + 1)
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

// cloneNode copies so deeply that the caller may go on changing what it passed.
func cloneNode(node model.Node) model.Node {
	node.Interfaces = slices.Clone(node.Interfaces)
	node.SNAT.Addresses = slices.Clone(node.SNAT.Addresses)
	node.Decapsulation.From = slices.Clone(node.Decapsulation.From)
	return node
}

// cloneService: see cloneNode.
func cloneService(service model.Service) model.Service {
	service.Frontends = slices.Clone(service.Frontends)
	service.Backends = slices.Clone(service.Backends)
	service.Names = slices.Clone(service.Names)
	service.AllowFrom, service.DenyFrom = slices.Clone(service.AllowFrom), slices.Clone(service.DenyFrom)
	service.Health.HTTP.Statuses = slices.Clone(service.Health.HTTP.Statuses)
	service.Health.Exec = slices.Clone(service.Health.Exec)
	return service
}

// merge is the union of all sources' services, or the *ConflictError that keeps one of them out.
func (d *draft) merge() (merged []model.Service, err error) {
	owners := map[string]string{} // service's name → source
	for _, name := range slices.Sorted(maps.Keys(d.sources)) {
		for _, service := range d.sources[name] {
			if owner, ok := owners[service.Name]; ok {
				refused, owner := d.refuse(owner, name)
				return nil, &ConflictError{Source: refused, Service: service.Name, Object: fmt.Sprintf("service %q", service.Name), Owner: owner}
			}
			owners[service.Name] = name
			merged = append(merged, service)
		}
	}
	return merged, d.frontendConflict()
}

// refuse is which of two sources that meet is refused, and which one stays: the later one.
func (d *draft) refuse(one, other string) (refused, owner string) {
	if slices.Index(d.declaring, one) > slices.Index(d.declaring, other) {
		return one, other
	}
	return other, one
}

// frontendConflict is a *ConflictError if two sources have frontends with a port in
// common. Within one source a narrower frontend may win over a wider one; between
// sources that would take traffic away from somebody else's service.
func (d *draft) frontendConflict() error {
	type owned struct {
		model.Frontend
		owner, service string
	}
	var frontends []owned
	for name, services := range d.sources {
		for i := range services {
			for _, f := range services[i].Frontends {
				frontends = append(frontends, owned{f, name, services[i].Name})
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
			if refused, _ := d.refuse(f.owner, owner); refused == owner {
				mine, theirs = theirs, mine
			}
			return &ConflictError{Source: mine.owner, Service: mine.service, Object: "frontend " + mine.Frontend.String(),
				Owner: theirs.owner, Detail: "it has " + theirs.Frontend.String()}
		}
		if reach, ok := widest[f.owner]; !ok || reach.Ports.Last < f.Ports.Last {
			widest[f.owner] = f
		}
	}
	return nil
}
