// Package source follows the apiserver of a cluster, and declares its Services to the balancer.
//
//	informers ──► keys that changed ──► translate ──► Set ──► declare
//	              (one for a Service,                 the changed services, once the first
//	               whichever part changed)            full list is there, and then all
//
// While the apiserver does not answer, its last statements stay. Nothing is declared before it has
// listed everything once: a partial declaration would withdraw services that a restart has kept.
package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/kube/event"
	"github.com/shunt-lb/shunt/kube/translate"
)

// Name is the source's name in the state and in messages.
const Name = "kubernetes"

// Refused services are tried again: the rest of the node may have made room.
const (
	retryFirst = time.Second
	retryMax   = time.Minute
)

// lookInterval is the interval at which faults on this machine are looked for.
const lookInterval = time.Minute

// byService is the index of EndpointSlices by their Service.
const byService = "service"

// Options select the objects that are followed, and the node.
type Options struct {
	Client kubernetes.Interface
	// Node is the name of this machine's Node object.
	Node string
	// ProxyName: see translate.Translator.
	ProxyName string
	// Moving: see translate.Translator.
	Moving bool
	// Outside: see translate.Translator.
	Outside bool
	// Announce: see translate.Translator.
	Announce bool
	// Agents is the NAMESPACE/NAME of the Service whose endpoints are the agents of all nodes. Empty: they are not known.
	Agents string
	// Elect has one ready agent, or this one, announce each address; it needs Agents. false: each agent asks for all addresses.
	Elect bool
	// Networks is the NAMESPACE/NAME of the ConfigMap with the networks of nodes, for Elect; see package place. Empty: each agent's node counts as a node in all networks.
	Networks string
	// Placed is called with this node's entry in the ConfigMap whenever the ConfigMap may have changed; the entry is nil if there is none. It must not wait. nil: it is
	// not called.
	Placed func(entry *string)
	// Direct sets up direct return between nodes; it needs Agents.
	Direct Direct
	// Balance is called whenever a Service of type LoadBalancer or with external IPs has changed, with all Services of these kinds: they have
	// addresses for clients outside, or may get some. It returns their faults. nil: it is not called.
	Balance func([]*corev1.Service) []translate.Fault
	// Look finds faults on this machine, each minute; nil: none are looked for.
	Look func() []translate.Fault
	// Answer sets the answers at the ports for health, and returns faults; nil: there are no answers. It is called when one has
	// changed and the node has taken over the cluster's state, and each minute.
	Answer func(map[translate.Key]translate.Health) []translate.Fault
	// Tell is called with all faults whenever they have changed; nil: it is not called. It must not wait.
	Tell func([]event.Fault)
	// Grace is the time for which a Service may be without an endpoint that takes connections until that is a fault; 0:
	// without limit.
	Grace time.Duration
	// Contact observes the Client's requests, for Status; nil: nothing does.
	Contact *Contact
	Log     *slog.Logger
}

// Source follows one apiserver. Its methods except Open, InStep and Status are for one goroutine.
type Source struct {
	options    Options
	factories  []informers.SharedInformerFactory
	services   cache.SharedIndexInformer
	slices     cache.SharedIndexInformer
	nodes      cache.SharedIndexInformer
	agents     cache.SharedIndexInformer // their EndpointSlices; nil: they are not known
	networks   cache.SharedIndexInformer // the ConfigMap with the networks of nodes; nil: they are not known
	tunnels    cache.SharedIndexInformer // the ConfigMap with the tunnels that nodes open; nil: there is no direct return between nodes
	registered []cache.InformerSynced
	complaint  atomic.Pointer[string] // the last error that the apiserver answered instead of objects
	refused    func(error)            // called when the apiserver refuses to show objects; nil: it is asked again
	inStep     atomic.Bool            // the last declaration was taken over
	published  atomic.Pointer[shuntv1.Cluster]

	measures *measures
	started  time.Time

	mutex    sync.Mutex
	dirty    map[translate.Key]dirt
	all      bool        // every Service is dirty, because the node has changed
	others   bool        // the agents have changed, or this node's port for tunnels
	guePort  uint16      // of this node's file; 0: not known
	triggers []time.Time // of the changes of endpoints in dirty
	wake     chan struct{}

	translator translate.Translator
	nodeKnown  bool
	nodeFaults []translate.Fault
	found      []translate.Fault // by Look
	unanswered []translate.Fault // by Answer
	unbalanced []translate.Fault // by Balance
	peers      peers
	awayFaults []translate.Fault // of peers
	outer      outer             // the Services for Balance
	askAgain   bool              // call Answer although nothing has changed
	set        translate.Set
	standing   standing
	said       map[translate.Fault]time.Time // faults in the log, with their times
	begun      time.Time                     // when work first changed something that is not in force yet
	underWay   []time.Time                   // the triggers of changes that are not in force yet
	lacking    lacking
	stale      bool // Tell does not know the present faults
}

// dirt lists the parts of a Service that have changed.
type dirt struct{ service, endpoints bool }

// New returns a source that has not listed anything.
func New(o Options) (*Source, error) {
	s := &Source{
		options: o, dirty: map[translate.Key]dirt{}, wake: make(chan struct{}, 1), said: map[translate.Fault]time.Time{},
		standing: newStanding(),
		measures: newMeasures(), started: time.Now(), lacking: newLacking(o.Grace), stale: true,
		translator: translate.Translator{Node: translate.Node{Name: o.Node}, ProxyName: o.ProxyName, Moving: o.Moving, Announce: o.Announce, Outside: o.Outside, Direct: o.Direct.Tunnel.Forwarding},
		peers:      newPeers(o.Node, o.Direct),
	}
	if err := o.checkAgents(); err != nil {
		return nil, err
	}
	factory := func(tweak func(*metav1.ListOptions)) informers.SharedInformerFactory {
		f := informers.NewSharedInformerFactoryWithOptions(o.Client, 0, informers.WithTweakListOptions(tweak), informers.WithTransform(slim))
		s.factories = append(s.factories, f)
		return f
	}
	s.publish()
	all := factory(func(*metav1.ListOptions) {})
	s.services = all.Core().V1().Services().Informer()
	// Slices of headless Services may be most of a cluster's slices, and they yield nothing.
	served := factory(func(l *metav1.ListOptions) { l.LabelSelector = "!" + corev1.IsHeadlessService })
	s.slices = served.Discovery().V1().EndpointSlices().Informer()
	own := factory(func(l *metav1.ListOptions) {
		l.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, o.Node).String()
	})
	s.nodes = own.Core().V1().Nodes().Informer()
	if err := s.slices.AddIndexers(cache.Indexers{byService: func(object any) ([]string, error) { return keysOf(object), nil }}); err != nil {
		return nil, fmt.Errorf("index EndpointSlices: %w", err)
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc: func(object any) { s.changed(object, object) }, DeleteFunc: func(object any) { s.changed(nil, object) },
		UpdateFunc: func(before, after any) { s.changed(after, before, after) }, // the label may have changed
	}
	for _, informer := range []cache.SharedIndexInformer{s.services, s.slices, s.nodes} {
		if err := s.hear(informer, handler); err != nil {
			return nil, err
		}
	}
	return s, s.followAgents()
}

// hear registers a handler for an informer's objects.
func (s *Source) hear(informer cache.SharedIndexInformer, handler cache.ResourceEventHandler) error {
	registration, err := informer.AddEventHandler(handler)
	if err == nil {
		err = informer.SetWatchErrorHandlerWithContext(s.lost)
	}
	if err != nil {
		return fmt.Errorf("follow the apiserver: %w", err)
	}
	s.registered = append(s.registered, registration.HasSynced)
	return nil
}

// Open starts to follow, and waits until the apiserver has listed everything once, or ctx ends, which
// also ends the following.
func (s *Source) Open(ctx context.Context) error {
	for _, f := range s.factories {
		f.Start(ctx.Done())
	}
	if !cache.WaitForCacheSync(ctx.Done(), s.registered...) {
		if said := s.complaint.Load(); said != nil {
			return fmt.Errorf("read Services, EndpointSlices and Node %q: %w; the apiserver said: %s: give this user the rights in deploy/helm/shunt-kube/templates/role.yaml", s.options.Node, context.Cause(ctx), *said)
		}
		return fmt.Errorf("read Services, EndpointSlices and Node %q: %w: is the apiserver where the kubeconfig says?", s.options.Node, context.Cause(ctx))
	}
	s.awaitPeers(ctx)
	return nil
}

// errRefused is the error with which Ask gives up.
var errRefused = errors.New("the apiserver refuses to show them")

// Ask is Open for one look: it takes a refusal as final, while an agent would ask until it has the rights.
func (s *Source) Ask(ctx context.Context) error {
	ctx, s.refused = context.WithCancelCause(ctx)
	return s.Open(ctx)
}

// Current translates the present objects. Status then covers them, too.
func (s *Source) Current() ([]model.Service, []translate.Fault) {
	s.work()
	s.look()
	s.balance()
	s.publish()
	return s.set.Services(), s.faults()
}

// faults returns all present faults.
func (s *Source) faults() []translate.Fault {
	return slices.Concat(s.nodeFaults, s.found, s.unanswered, s.unbalanced, s.awayFaults, s.set.Faults())
}

// allFaults returns the present faults, including the faults of Services that have lacked endpoints for long.
func (s *Source) allFaults() []translate.Fault { return append(s.faults(), s.lacking.faults()...) }

// look calls Look.
func (s *Source) look() {
	if s.options.Look != nil {
		s.found = s.options.Look()
	}
}

// lookAgain looks for changes that no object shows.
func (s *Source) lookAgain() {
	s.look()
	s.askAgain = true // the obstacle of an answer may have gone
}

// balance calls Balance if the Services have changed since the last call.
func (s *Source) balance() {
	if s.options.Balance != nil && s.outer.changed {
		s.outer.changed = false
		s.unbalanced = s.options.Balance(s.outer.all())
	}
}

// answer calls Answer if an answer has changed, or could not be given.
func (s *Source) answer() {
	if s.options.Answer == nil || !s.inStep.Load() || !s.askAgain && !s.set.HealthPending() {
		return
	}
	s.unanswered = s.options.Answer(s.set.Health())
	s.set.HealthSettled()
	s.askAgain = false
}

// First translates the objects when the node starts. It is called after Open, and implements
// daemon.Source's First.
func (s *Source) First() []model.Service {
	services, _ := s.Current()
	return services
}

// Follow calls declare with all services at first, and then with the changed ones, until ctx ends. It is
// called after Open, and implements daemon.Source's Run.
func (s *Source) Follow(ctx context.Context, declare func(daemon.Change) error) {
	var again <-chan time.Time
	wait, inStep, due := retryFirst, false, true
	looks, graces, ages := time.NewTicker(lookInterval), time.NewTicker(s.lacking.interval()), time.NewTicker(s.peers.interval())
	defer looks.Stop()
	defer graces.Stop()
	defer ages.Stop()
	for {
		if s.work() || due {
			left, err := s.declare(declare, !inStep)
			s.inStep.Store(err == nil)
			s.standing.declared(err, !s.begun.IsZero())
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				s.options.Log.Error("the node does not apply the cluster's services, and the earlier ones stay in force; trying again", "error", err, "after", wait)
				again, wait = time.After(wait), min(2*wait, retryMax)
			default:
				if !s.begun.IsZero() { // otherwise nothing has changed, and it was only declared again
					s.measures.carriedOut(s.begun, s.underWay)
				}
				s.begun, s.underWay = time.Time{}, nil
				again, wait = nil, retryFirst
				if left { // the other source may have changed without notice
					again = time.After(retryMax)
				}
				if !inStep {
					inStep = true
					s.options.Log.Info("in step with the cluster", "services", s.set.Len(), "node", s.options.Node)
				}
			}
		}
		if inStep {
			s.open()
		}
		s.answer()
		s.balance()
		s.report()
		s.publish()
		s.tell()
		due = false
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-looks.C:
			s.lookAgain()
		case now := <-graces.C:
			s.stale = s.lacking.age(now) || s.stale
		case <-ages.C:
			s.ageAgents()
		case <-again:
			s.set.Readmit()
			due = true
		}
	}
}

// InStep reports whether the node has taken over the cluster's last state. It is for any goroutine.
func (s *Source) InStep() bool { return s.inStep.Load() }

// declare passes on the changes, or everything. It leaves out services whose frontends belong to another source: one wrong object must not
// block all others. left: some were left out.
func (s *Source) declare(declare func(daemon.Change) error, all bool) (left bool, err error) {
	for {
		change := daemon.Change{Whole: all}
		if all {
			change.Declare = s.set.Services()
		} else {
			change.Declare, change.Withdraw = s.set.Pending()
		}
		if all || s.peers.undeclared {
			change.Decapsulation = s.Decapsulation()
		}
		err := declare(change)
		if err == nil {
			s.set.Settled()
			s.peers.undeclared = false
		}
		var conflict *state.ConflictError
		if !errors.As(err, &conflict) {
			return s.set.Refused(), err
		}
		if conflict.Service == "" {
			return true, err
		}
		s.set.Refuse(conflict.Service, conflict.Error())
	}
}

// changed records the Service of an object's event. after is the object's present state, or nil if it is gone; all are its present and former states.
func (s *Source) changed(after any, all ...any) {
	s.mutex.Lock()
	for i, object := range all {
		if tombstone, ok := object.(cache.DeletedFinalStateUnknown); ok {
			object = tombstone.Obj
		}
		if i == 0 {
			s.measures.note(object)
		}
		if _, ok := object.(*corev1.Node); ok {
			s.all = true
		}
		_, isService := object.(*corev1.Service)
		for _, key := range keysOf(object) {
			before := s.dirty[key]
			now := dirt{before.service || isService, before.endpoints || !isService}
			s.dirty[key] = now
			s.measures.wait(before, now)
		}
	}
	if at, known := trigger(after); known && at.After(s.started) { // other agents have carried out earlier ones
		s.triggers = append(s.triggers, at)
	}
	s.mutex.Unlock()
	s.awake()
}

func (s *Source) awake() {
	select {
	case s.wake <- struct{}{}:
	default: // it is awake already
	}
}

// keysOf returns the Service that an object is, or belongs to.
func keysOf(object any) []translate.Key {
	switch o := object.(type) {
	case *corev1.Service:
		return []string{o.Namespace + "/" + o.Name}
	case *discoveryv1.EndpointSlice:
		if name := o.Labels[discoveryv1.LabelServiceName]; name != "" {
			return []string{o.Namespace + "/" + name}
		}
	}
	return nil
}

// work translates the changes.
func (s *Source) work() (changed bool) {
	begin := time.Now()
	s.mutex.Lock()
	taken, triggers, all, others := s.dirty, s.triggers, s.all, s.others
	s.dirty, s.triggers, s.all, s.others = map[translate.Key]dirt{}, nil, false, false
	s.measures.waitNoMore()
	s.mutex.Unlock()
	defer func() {
		if !changed {
			return // no change has to be brought into force
		}
		if s.underWay = append(s.underWay, triggers...); s.begun.IsZero() {
			s.begun = begin
		}
	}()
	dirty := map[translate.Key]bool{}
	for key := range taken {
		dirty[key] = true
	}
	if all && s.readNode() {
		for _, key := range s.services.GetStore().ListKeys() {
			dirty[key] = true
		}
		others = true // this node's addresses may have changed
	}
	if others && s.options.Elect && s.readAgents() {
		for key := range s.outer.services {
			dirty[key] = true
		}
	}
	if others {
		for _, key := range s.readPeers() {
			dirty[key] = true
		}
		changed = s.peers.undeclared
	}
	if !s.nodeKnown {
		s.nodeFaults = []translate.Fault{{Code: translate.NodeAddressMissing, Object: "Node " + s.options.Node,
			Text:   "the cluster has no such node: node ports and local traffic policies have no endpoint here",
			Remedy: "give --node-name the name that `kubectl get nodes` shows"}}
	}
	if s.options.Elect {
		s.addNeighbours(dirty)
	}
	for key := range dirty {
		changed = s.translate(key) || changed
	}
	return changed
}

// addNeighbours adds the Services that share an address with one of these, before or now, because one node announces the address.
func (s *Source) addNeighbours(dirty map[translate.Key]bool) {
	for _, key := range slices.Collect(maps.Keys(dirty)) {
		others := s.outer.beside(key)
		s.outer.note(key, s.serviceOf(key))
		for _, other := range append(others, s.outer.beside(key)...) {
			dirty[other] = true
		}
	}
}

// serviceOf returns a Service; nil: it does not exist.
func (s *Source) serviceOf(key translate.Key) *corev1.Service {
	object, exists, err := s.services.GetStore().GetByKey(key)
	if err != nil || !exists {
		return nil
	}
	return object.(*corev1.Service)
}

// neighbours returns the Services beside one, with their endpoints.
func (s *Source) neighbours(service *corev1.Service) (all []translate.Neighbour) {
	for _, key := range s.outer.beside(service.Namespace + "/" + service.Name) {
		all = append(all, translate.Neighbour{Service: s.outer.services[key], Slices: s.slicesOf(key)})
	}
	return all
}

// readNode reports whether the node has changed. A deleted Node stays as it was:
// its machine still exists.
func (s *Source) readNode() bool {
	object, exists, err := s.nodes.GetStore().GetByKey(s.options.Node)
	if err != nil || !exists {
		return false
	}
	node, faults := translate.NodeOf(object.(*corev1.Node))
	s.nodeKnown, s.nodeFaults = true, faults
	before := s.translator.Node
	s.translator.Node = node
	return before.Zone != node.Zone || !slices.Equal(before.Addresses, node.Addresses) || !slices.Equal(before.Pods, node.Pods)
}

// translate updates one Service.
func (s *Source) translate(key translate.Key) (changed bool) {
	service := s.serviceOf(key)
	var wanted translate.Translation
	s.outer.note(key, service)
	if service == nil {
		changed = s.set.Remove(key)
	} else {
		wanted = s.translator.Service(service, s.slicesOf(key))
		changed = s.set.Put(key, service.CreationTimestamp.Time, wanted)
	}
	s.standing.note(key, service != nil, wanted)
	s.stale = s.lacking.note(key, s.set.Lacking(key)) || s.stale
	return changed
}

// slicesOf returns the EndpointSlices of a Service, by name.
func (s *Source) slicesOf(key translate.Key) []*discoveryv1.EndpointSlice {
	objects, _ := s.slices.GetIndexer().ByIndex(byService, key) // New made the index
	found := make([]*discoveryv1.EndpointSlice, len(objects))
	for i := range objects {
		found[i] = objects[i].(*discoveryv1.EndpointSlice)
	}
	slices.SortFunc(found, func(a, b *discoveryv1.EndpointSlice) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return found
}

// report logs a fault once when it begins, and once when it ends.
func (s *Source) report() {
	now := map[translate.Fault]time.Time{}
	for _, f := range s.faults() {
		now[f] = s.said[f]
		if now[f].IsZero() {
			now[f], s.stale = time.Now(), true
			s.options.Log.Warn(f.Text, "fault", f.Code, "object", f.Object, "remedy", f.Remedy)
		}
	}
	for f := range s.said {
		if now[f].IsZero() {
			s.stale = true
			s.options.Log.Info("fault ended", "fault", f.Code, "object", f.Object)
		}
	}
	s.said = now
}

// tell calls Tell if the faults have changed since the last call.
func (s *Source) tell() {
	if !s.stale {
		return
	}
	s.stale = false
	if s.options.Tell == nil {
		return
	}
	var all []event.Fault
	for _, f := range s.allFaults() {
		about := corev1.ObjectReference{APIVersion: "v1"}
		var name string
		about.Kind, name, _ = strings.Cut(f.Object, " ")
		switch about.Kind {
		case "Service":
			object, exists, err := s.services.GetStore().GetByKey(name)
			if err != nil || !exists {
				continue // it is being deleted, and its fault with it
			}
			service := object.(*corev1.Service)
			about.Namespace, about.Name, about.UID = service.Namespace, service.Name, service.UID
		default: // a Node: as in kubelet's Events, its name is the UID, because `kubectl describe node` shows such Events
			about.Name, about.UID = name, types.UID(name)
		}
		all = append(all, event.Fault{Fault: f, About: about})
	}
	s.options.Tell(all)
}

// lost is called when a list or a watch has failed. The informer tries again, less and less often.
func (s *Source) lost(_ context.Context, _ *cache.Reflector, err error) {
	text := err.Error()
	if s.refused != nil && (apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)) {
		s.complaint.CompareAndSwap(nil, &text)
		s.refused(errRefused)
		return
	}
	if before := s.complaint.Swap(&text); before != nil && *before == text {
		return
	}
	s.options.Log.Warn("the apiserver refuses a request; the services of its last answers stay in force", "error", err)
}

// slim removes large parts that are not used.
func slim(object any) (any, error) {
	if o, ok := object.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	if node, ok := object.(*corev1.Node); ok {
		node.Status.Images = nil
	}
	return object, nil
}
