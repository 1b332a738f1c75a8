package source

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/shunt-lb/shunt/kube/place"
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
	if s.options.Elect {
		s.translator.Beside = s.neighbours
	}
	changed := func() {
		s.mutex.Lock()
		s.others = true
		s.mutex.Unlock()
		s.awake()
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed() }, UpdateFunc: func(any, any) { changed() }, DeleteFunc: func(any) { changed() },
	}
	if err := s.hear(s.agents, handler); err != nil {
		return err
	}
	if s.options.Elect && s.options.Networks != "" {
		if s.networks, err = s.followMap(s.options.Networks, "the ConfigMap of the nodes' networks", handler); err != nil {
			return err
		}
	}
	return s.followTunnels(handler)
}

// followMap follows a ConfigMap; what says which one, in an error.
func (s *Source) followMap(object, what string, handler cache.ResourceEventHandler) (cache.SharedIndexInformer, error) {
	namespace, name, err := cache.SplitMetaNamespaceKey(object)
	if err != nil || namespace == "" || name == "" {
		return nil, fmt.Errorf("%s is NAMESPACE/NAME, not %q", what, object)
	}
	factory := informers.NewSharedInformerFactoryWithOptions(s.options.Client, 0, informers.WithNamespace(namespace), informers.WithTransform(slim),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) { // the agent may read no other ConfigMap
			l.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		}))
	s.factories = append(s.factories, factory)
	informer := factory.Core().V1().ConfigMaps().Informer()
	return informer, s.hear(informer, handler)
}

// dataOf returns the entries of a ConfigMap; nil: it does not exist.
func (s *Source) dataOf(informer cache.SharedIndexInformer, object string) map[string]string {
	if object, exists, err := informer.GetStore().GetByKey(object); err == nil && exists {
		return object.(*corev1.ConfigMap).Data
	}
	return nil
}

// readNetworks returns the networks of nodes, and passes this node's entry on.
func (s *Source) readNetworks() map[string][]netip.Prefix {
	if s.networks == nil {
		return nil
	}
	data := s.dataOf(s.networks, s.options.Networks)
	if s.options.Placed != nil {
		var own *string
		if text, has := data[s.options.Node]; has {
			own = &text
		}
		s.options.Placed(own)
	}
	return place.Parse(data)
}

// readAgents reports whether the set of nodes that can announce addresses has changed, or their networks have. This node is always among them: an agent
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
	networks := s.readNetworks()
	if slices.Equal(nodes, s.translator.Agents) && maps.EqualFunc(networks, s.translator.Networks, slices.Equal[[]netip.Prefix]) {
		return false
	}
	s.translator.Agents, s.translator.Networks = nodes, networks
	return true
}
