// Package state holds the desired state: the declarations of sources, and the overrides of
// operators. Only the Writer changes it, and readers get snapshots that never change.
//
//	source   ──Replace────► Writer ──Snapshot, Watch──► reconciler
//	operator ──Set, Clear─►   │
//	                          └──► file of overrides, which a restart reads
//
// One source configures this machine. A source owns the services that it names, and no two
// sources may name the same service. An override changes their declarations for as long as one
// of them names its backend.
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
// is shared: its readers must not change it.
type Snapshot struct {
	Revision Revision
	Node     model.Node // as its owner declares it
	// Decapsulation is the node's, or that of direct return between nodes if a source declares it.
	Decapsulation model.Decapsulation
	// Services are sorted by source name, then in the source's order, each with its Source. A drained backend has
	// the weight 0 as its Override in all of them, and is in none after the deadline of its drain. A backend that
	// an operator has declared up or down has this state as its Override. An unchanged service is the
	// same pointer in the next snapshot: see model.Changed.
	Services []*model.Service
	// Configured are the Services as the sources declare them, without overrides.
	Configured []*model.Service
	Overrides  []Override // by address, port and kind
}

// ConflictError says that a source names something that belongs to another source. Nothing of the refused
// configuration has been applied.
type ConflictError struct {
	Source  string // the refused source
	Service string // its service that names the object; "" if the object is the node
	Object  string // `service "web"`, "frontend tcp 192.0.2.10:80", "the node"
	Owner   string // the source that has the object
	Detail  string // how the two conflict, if that is not plain; may be empty
}

// Error names both sources, the object, and the remedy.
func (e *ConflictError) Error() string {
	detail := ""
	if e.Detail != "" {
		detail = " (" + e.Detail + ")"
	}
	return fmt.Sprintf("take over configuration of source %q: %s belongs to source %q%s: remove it from one of them",
		e.Source, e.Object, e.Owner, detail)
}

// Writer collects the declarations of sources and the overrides of operators. Its methods may be called from
// any goroutine.
type Writer struct {
	now  func() time.Time
	file *overrideFile // nil: overrides end with the process

	// changing is held during a whole change, writing the file included.
	changing   sync.Mutex
	owner      string // the source that has configured the node; empty: none has
	node       model.Node
	between    between
	sources    map[string][]*model.Service // in the source's order
	services   map[string]*model.Service   // of all sources, by name
	claims     claims                      // of their frontends
	tried      map[string]*model.Service   // services that the last Try would have put in, by name: Replace uses the same
	overrides  map[overrideKey]Override
	overridden map[*model.Service]*model.Service // services with overrides applied
	unsaved    bool                              // the file may have other overrides
	saveError  error                             // why, if that is known

	// mutex is held for moments only: readers do not wait for the disk.
	mutex    sync.Mutex
	snapshot *Snapshot
	changed  chan struct{} // closed when snapshot is replaced
}

// NewWriter returns a writer without declarations, at revision 0. Its overrides end with the process; see Open.
func NewWriter() *Writer {
	return &Writer{
		now:       time.Now,
		sources:   map[string][]*model.Service{},
		services:  map[string]*model.Service{},
		claims:    claims{},
		overrides: map[overrideKey]Override{},
		snapshot:  &Snapshot{},
		changed:   make(chan struct{}),
	}
}

// between is the declaration of direct return between the nodes of a cluster.
type between struct {
	source        string // empty: no source has declared it
	decapsulation model.Decapsulation
}

// Declaration is a source's desired configuration.
type Declaration struct {
	Source string
	// Node describes this machine. nil: the source does not describe it. Only one source does.
	Node *model.Node
	// Decapsulation is this machine's part of direct return between the nodes of a cluster, with Tunnelled set, or the
	// zero value, which ends it. nil: it stays as the source last declared it. Only one source declares it, and none while
	// the node decapsulates for its own servers.
	Decapsulation *model.Decapsulation
	// Services are all services that the source wants: an empty list withdraws everything. For a part they are
	// the new or changed services.
	Services []model.Service
	// Part: the source's other services stay unchanged, except for the withdrawn ones.
	Part      bool
	Withdrawn []string // names of services; of a part
}

// Replace replaces each source's last declaration, or a part of it, by the given one, for all sources in one step.
// Each source may be declared once. The writer keeps its own copy. Replace returns the revision that contains
// the declarations (the present one if nothing changed), or a *ConflictError, and then nothing has
// changed: a service belongs to the source that named it first, and so does the node. Of two sources in one
// call the former counts as the first. Overrides whose backend is no longer named by any source end; see Save
// for the file. The cost of a part depends on the changes, except for copies of lists of pointers.
func (w *Writer) Replace(declared ...Declaration) (Revision, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	next, err := w.draft(declared)
	if err != nil {
		return w.snapshot.Revision, err
	}
	w.tried = nil
	if w.agrees(next) {
		return w.snapshot.Revision, nil
	}
	w.owner, w.node, w.between, w.sources, w.overrides = next.owner, next.node, next.between, next.sources, next.overrides
	for _, s := range next.gone {
		delete(w.services, s.Name)
	}
	for _, s := range next.come {
		w.services[s.Name] = s
	}
	if next.overridesChanged {
		w.unsaved = true
		_ = w.save() // Save tries again; an override that only the file has ends again at the next start
	}
	return w.publish(next.gone, next.come), nil
}

// Try returns the snapshot that Replace would publish, or the error that it would return. Nothing changes.
func (w *Writer) Try(declared ...Declaration) (*Snapshot, error) {
	w.changing.Lock()
	defer w.changing.Unlock()
	next, err := w.draft(declared)
	if err != nil {
		return nil, err
	}
	w.claims.undo(next.gone, next.come)
	w.tried = make(map[string]*model.Service, len(next.come))
	for _, s := range next.come {
		w.tried[s.Name] = s
	}
	configured := listOf(next.sources)
	overridden := w.overridden
	if next.overridesChanged {
		overridden = overriddenIn(configured, next.overrides, w.overridden)
	} else {
		overridden = overriddenAfter(overridden, next.gone, next.come, next.overrides)
	}
	return w.snapshotOf(next.node, next.between, configured, overridden, next.overrides), nil
}

// draft is a writer's state after a change that has not been adopted yet.
type draft struct {
	declaring        []string // the sources that change it
	owner            string
	node             model.Node
	between          between
	sources          map[string][]*model.Service
	gone, come       []*model.Service // services that the change removes, and adds
	overrides        map[overrideKey]Override
	overridesChanged bool
}

// draft returns the writer's state after these declarations. Unless there is an error, the writer's claims are then
// the draft's claims. The caller holds changing.
func (w *Writer) draft(declared []Declaration) (*draft, error) {
	next := &draft{owner: w.owner, node: w.node, between: w.between, sources: maps.Clone(w.sources), overrides: w.overrides}
	for _, d := range declared {
		if d.Node != nil {
			if next.owner != "" && next.owner != d.Source {
				return nil, &ConflictError{Source: d.Source, Object: "the node", Owner: next.owner}
			}
			next.node, next.owner = cloneNode(*d.Node), d.Source
		}
		if err := next.declareBetween(d); err != nil {
			return nil, err
		}
		list, gone, come, err := w.taken(d)
		if err != nil {
			return nil, err
		}
		_, spoken := w.sources[d.Source]
		overrides, changed := overridesAfter(next.overrides, d.Source, list, gone, come, !spoken)
		next.overrides, next.overridesChanged = overrides, next.overridesChanged || changed
		next.sources[d.Source] = list
		next.gone, next.come = append(next.gone, gone...), append(next.come, come...)
		next.declaring = append(next.declaring, d.Source)
	}
	if err := next.nameConflict(w.services); err != nil {
		return nil, err
	}
	return next, w.claims.do(next)
}

// declareBetween takes a source's part of direct return between nodes.
func (d *draft) declareBetween(by Declaration) error {
	if by.Decapsulation != nil {
		if d.between.source != "" && d.between.source != by.Source {
			return &ConflictError{Source: by.Source, Object: "direct return between nodes", Owner: d.between.source}
		}
		d.between = between{by.Source, cloneDecapsulation(*by.Decapsulation)}
		if !d.between.decapsulation.Tunnelled {
			d.between = between{}
		}
	}
	if d.between.source == "" || len(d.node.Decapsulation.From) == 0 {
		return nil
	}
	if by.Node != nil && by.Decapsulation == nil {
		return &ConflictError{Source: by.Source, Object: "`decapsulation`", Owner: d.between.source, Detail: "it takes the same packets for direct return between nodes"}
	}
	return &ConflictError{Source: by.Source, Object: "direct return between nodes", Owner: d.owner, Detail: "it has `decapsulation`, which takes the same packets for this machine's own servers"}
}

// taken returns the list of a source after a declaration, and the difference from the list before. The writer
// keeps copies, except for services that the source has declared before: such services keep their objects, so that
// every reader finds at once that they are unchanged.
func (w *Writer) taken(d Declaration) (list, gone, come []*model.Service, err error) {
	before := w.sources[d.Source]
	replaced := map[*model.Service]*model.Service{} // the replacement of a service; nil: none
	if d.Part {
		for _, name := range d.Withdrawn {
			if known := w.services[name]; known != nil && known.Source == d.Source {
				replaced[known] = nil
			}
		}
	} else {
		list = make([]*model.Service, 0, len(d.Services))
	}
	declared := make(map[string]bool, len(d.Services))
	for i := range d.Services {
		next := d.Services[i]
		if declared[next.Name] {
			return nil, nil, nil, &ConflictError{Source: d.Source, Service: next.Name, Object: fmt.Sprintf("service %q", next.Name), Owner: d.Source}
		}
		declared[next.Name] = true
		next.Source = d.Source
		known := w.services[next.Name]
		ours := known != nil && known.Source == d.Source
		if ours && known.Equal(&next) {
			delete(replaced, known)
			if !d.Part {
				list = append(list, known)
			}
			continue
		}
		fresh := w.tried[next.Name]
		if fresh == nil || !fresh.Equal(&next) {
			fresh = new(model.Service)
			*fresh = cloneService(next)
		}
		switch {
		case !d.Part:
			list = append(list, fresh)
		case ours:
			replaced[known] = fresh
		default:
			come = append(come, fresh)
		}
	}
	if !d.Part {
		gone, come = model.Changed(before, list)
		return list, gone, come, nil
	}
	if len(replaced)+len(come) == 0 {
		return before, nil, nil, nil
	}
	list = append(put(before, replaced), come...)
	for old, next := range replaced {
		gone = append(gone, old)
		if next != nil {
			come = append(come, next)
		}
	}
	// Maps have no order, but of several conflicts the same one must be reported each time.
	slices.SortFunc(gone, byName)
	slices.SortFunc(come, byName)
	return list, gone, come, nil
}

// put returns a list with some services replaced by others; nil removes a service.
func put(before []*model.Service, replaced map[*model.Service]*model.Service) []*model.Service {
	const few = 16 // up to here, searching for each service costs less than one pass over all services
	list := slices.Clone(before)
	if len(replaced) <= few {
		for old, next := range replaced {
			list[slices.Index(before, old)] = next
		}
	} else {
		for i, s := range before {
			if next, changes := replaced[s]; changes {
				list[i] = next
			}
		}
	}
	return slices.DeleteFunc(list, func(s *model.Service) bool { return s == nil })
}

func byName(a, b *model.Service) int { return cmp.Compare(a.Name, b.Name) }

// agrees reports whether a draft changes nothing.
func (w *Writer) agrees(next *draft) bool {
	for _, source := range next.declaring {
		if !slices.Equal(next.sources[source], w.sources[source]) {
			return false
		}
	}
	return !next.overridesChanged && next.owner == w.owner && reflect.DeepEqual(next.node, w.node) &&
		next.between.source == w.between.source && next.between.decapsulation.Equal(w.between.decapsulation)
}

// listOf returns the services of all sources, by source name, then in the source's order.
func listOf(sources map[string][]*model.Service) []*model.Service {
	count := 0
	for _, services := range sources {
		count += len(services)
	}
	all := make([]*model.Service, 0, count)
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		all = append(all, sources[name]...)
	}
	return all
}

// snapshotOf returns the next snapshot.
func (w *Writer) snapshotOf(node model.Node, between between, configured []*model.Service, overridden map[*model.Service]*model.Service, overrides map[overrideKey]Override) *Snapshot {
	decapsulation := node.Decapsulation
	if between.source != "" {
		decapsulation = between.decapsulation
	}
	return &Snapshot{
		Revision: w.snapshot.Revision + 1, Node: node, Decapsulation: decapsulation,
		Services: effective(configured, overridden), Configured: configured, Overrides: listed(overrides),
	}
}

// publish makes the present sources, overrides and time the snapshot that readers get. gone and come are the
// services that have changed since the last one.
func (w *Writer) publish(gone, come []*model.Service) Revision {
	now := w.now()
	for key, o := range w.overrides {
		o.Over = o.passed(now)
		w.overrides[key] = o
	}
	configured := listOf(w.sources)
	if now := listed(w.overrides); slices.EqualFunc(now, w.snapshot.Overrides, sameEffect) {
		w.overridden = overriddenAfter(w.overridden, gone, come, w.overrides)
	} else {
		w.overridden = overriddenIn(configured, w.overrides, w.overridden)
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.snapshot = w.snapshotOf(w.node, w.between, configured, w.overridden, w.overrides)
	close(w.changed)
	w.changed = make(chan struct{})
	return w.snapshot.Revision
}

// Snapshot returns the present desired state.
func (w *Writer) Snapshot() *Snapshot {
	snapshot, _ := w.Watch()
	return snapshot
}

// Watch returns the present desired state and a channel that is closed when there is a newer one. Intermediate
// changes are not lost and not counted: read again, and watch anew.
func (w *Writer) Watch() (*Snapshot, <-chan struct{}) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.snapshot, w.changed
}

// cloneNode copies so deeply that the caller may change its argument afterwards.
func cloneNode(node model.Node) model.Node {
	node.Interfaces = slices.Clone(node.Interfaces)
	node.SNAT.Addresses = slices.Clone(node.SNAT.Addresses)
	node.Decapsulation = cloneDecapsulation(node.Decapsulation)
	return node
}

// cloneDecapsulation: see cloneNode.
func cloneDecapsulation(d model.Decapsulation) model.Decapsulation {
	d.From, d.Nodes = slices.Clone(d.From), slices.Clone(d.Nodes)
	return d
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
