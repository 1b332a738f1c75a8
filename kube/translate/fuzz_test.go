package translate_test

import (
	"encoding/json"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/kube/translate"
)

// FuzzService translates objects that no apiserver would accept. The resulting services are always
// within the model and the same each time, and the state accepts them.
func FuzzService(f *testing.F) {
	f.Add([]byte(`{"metadata":{"namespace":"a","name":"b"},"spec":{"clusterIPs":["10.0.0.1","fd00::1"],"externalIPs":["10.0.0.1"],"ports":[{"port":80,"nodePort":30000},{"name":"x","port":80}],"type":"NodePort","sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":{"timeoutSeconds":-1}}}}`),
		[]byte(`{"addressType":"IPv4","ports":[{"port":80},{"name":"x","port":70000}],"endpoints":[{"addresses":["10.0.0.2"]},{"addresses":["10.0.0.2"],"conditions":{"ready":false}},{"addresses":["::ffff:1.2.3.4"]}]}`))
	f.Add([]byte(`{"spec":{"type":"LoadBalancer","clusterIP":"10.0.0.1","loadBalancerSourceRanges":["::/0","x"],"ports":[{"port":-1},{"port":1,"protocol":"SCTP"}]},"status":{"loadBalancer":{"ingress":[{"ip":"fe80::1%eth0"},{"ip":"1.2.3.4","ipMode":"x"}]}}}`), []byte(`{}`))
	f.Fuzz(func(t *testing.T, serviceText, sliceText []byte) {
		service, slice := &corev1.Service{}, &discoveryv1.EndpointSlice{}
		if json.Unmarshal(serviceText, service) != nil || json.Unmarshal(sliceText, slice) != nil {
			return
		}
		translator := translate.Translator{Node: here, Announce: len(serviceText)%2 == 0}
		got := translator.Service(service, []*discoveryv1.EndpointSlice{slice})
		again := translator.Service(service.DeepCopy(), []*discoveryv1.EndpointSlice{slice.DeepCopy()})
		if a, b := dump(got.Services, got.Faults), dump(again.Services, again.Faults); a != b {
			t.Errorf("twice the same gives\n%s\nand\n%s", a, b)
		}
		var set translate.Set
		set.Put("x", time.Time{}, got)
		had := map[model.Frontend]bool{}
		for _, s := range set.Services() {
			within(t, &s)
			for _, f := range s.Frontends {
				if had[f] {
					t.Errorf("%s is there twice", f)
				}
				had[f] = true
			}
		}
		if _, err := state.NewWriter().Try(state.Declaration{Source: "kubernetes", Services: got.Services}); err != nil && len(service.Spec.Ports) < 2 {
			t.Errorf("the state refuses it: %v", err)
		}
	})
}

// within reports values that the model does not have.
func within(t *testing.T, s *model.Service) {
	t.Helper()
	if len(s.Frontends) == 0 || len(s.Name) > 63 || s.AffinityTimeout < 0 {
		t.Errorf("%+v", s)
	}
	for _, f := range s.Frontends {
		if f.Ports.First == 0 || f.Ports.First != f.Ports.Last || !f.Address.IsValid() || f.Address.Is4In6() || f.Protocol&^model.Inside != model.TCP && f.Protocol&^model.Inside != model.UDP {
			t.Errorf("frontend %+v", f)
		}
	}
	identities, names := map[model.BackendAddress]bool{}, map[string]bool{}
	for _, b := range s.Backends {
		if b.Port == 0 || !b.Address.IsValid() || b.Address.Is4In6() || b.Weight > 1 || b.Name == "" || identities[s.Identity(b.BackendAddress)] || names[b.Name] {
			t.Errorf("backend %+v of %s", b, s.Name)
		}
		identities[s.Identity(b.BackendAddress)], names[b.Name] = true, true
	}
	for _, p := range s.AllowFrom {
		if p != p.Masked() {
			t.Errorf("prefix %s", p)
		}
	}
}
