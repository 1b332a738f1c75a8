package source

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/kube/translate"
)

// Explain explains how a Service, NAMESPACE/NAME, is served on this node. It is called after Open.
func (s *Source) Explain(key translate.Key) (translate.Explanation, error) {
	s.work()
	object, exists, err := s.services.GetStore().GetByKey(key)
	if err == nil && !exists {
		err = fmt.Errorf("the cluster has no Service %s: `kubectl get services --all-namespaces` has their names", key)
	}
	if err != nil {
		return translate.Explanation{}, err
	}
	explanation := s.translator.Explain(object.(*corev1.Service), s.slicesOf(key))
	explanation.Faults = append(explanation.Faults, s.nodeFaults...)
	for _, f := range s.set.Faults() { // faults of frontends that two Services want, or that another source has
		if f.Object == "Service "+key && (f.Code == translate.FrontendTaken || f.Code == translate.ServiceRefused) {
			explanation.Faults = append(explanation.Faults, f)
		}
	}
	return explanation, nil
}
