package source

import (
	"fmt"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
)

// followAgents follows the agents of all nodes, as the endpoints of their Service: the control plane keeps their readiness there, in objects that this agent
// may read anyway, and that change only with an agent.
func (s *Source) followAgents() error {
	if s.options.Agents == "" {
		return nil
	}
	namespace, name, err := cache.SplitMetaNamespaceKey(s.options.Agents)
	if err != nil || namespace == "" || name == "" {
		return fmt.Errorf("the Service of the agents is NAMESPACE/NAME, not %q", s.options.Agents)
	}
	factory := informers.NewSharedInformerFactoryWithOptions(s.options.Client, 0, informers.WithNamespace(namespace), informers.WithTransform(slim),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = discoveryv1.LabelServiceName + "=" + name }))
	s.factories = append(s.factories, factory)
	s.agents = factory.Discovery().V1().EndpointSlices().Informer()
	s.others = true // even without a slice
	s.translator.Beside = s.neighbours
	changed := func() {
		s.mutex.Lock()
		s.others = true
		s.mutex.Unlock()
		s.awake()
	}
	return s.hear(s.agents, cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed() }, UpdateFunc: func(any, any) { changed() }, DeleteFunc: func(any) { changed() },
	})
}

// readAgents reports whether the set of nodes that can announce addresses has changed. This node is always among them: an agent
// that starts is not ready, and would otherwise give up addresses that its data plane has announced all the time.
func (s *Source) readAgents() bool {
	nodes := []string{s.options.Node}
	for _, object := range s.agents.GetStore().List() {
		for _, e := range object.(*discoveryv1.EndpointSlice).Endpoints {
			if e.NodeName != nil && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
				nodes = append(nodes, *e.NodeName)
			}
		}
	}
	slices.Sort(nodes)
	nodes = slices.Compact(nodes)
	if slices.Equal(nodes, s.translator.Agents) {
		return false
	}
	s.translator.Agents = nodes
	return true
}
