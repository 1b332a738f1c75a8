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
	f.Add([]byte(`{"metadata":{"namespace":"a","name":"b"},"spec":{"clusterIPs":["10.0.0.1","fd00::1"],"externalIPs":["192.0.2.1"],"ports":[{"port":80,"nodePort":30000}],"type":"LoadBalancer","internalTrafficPolicy":"Local"},"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.7"}]}}}`),
		[]byte(`{"addressType":"IPv4","ports":[{"port":80}],"endpoints":[{"addresses":["10.0.1.2"],"nodeName":"n1"},{"addresses":["10.0.2.2"],"nodeName":"n2","conditions":{"ready":false}},{"addresses":["10.0.3.3"],"nodeName":"n3"},{"addresses":["10.0.4.3"],"nodeName":"n4"}]}`))
	f.Add([]byte(`{"metadata":{"namespace":"a","name":"b"},"spec":{"clusterIP":"fd00::9","loadBalancerSourceRanges":["2001:db8::/32"],"sessionAffinity":"ClientIP","ports":[{"port":80,"protocol":"UDP"}],"type":"LoadBalancer"},"status":{"loadBalancer":{"ingress":[{"ip":"2001:db8::7"}]}}}`),
		[]byte(`{"addressType":"IPv6","ports":[{"port":80,"protocol":"UDP"}],"endpoints":[{"addresses":["fd00:3::3"],"nodeName":"n3"},{"addresses":["fd00:2::3"],"nodeName":"n2"},{"addresses":["fd00::2"],"nodeName":"n2"}]}`))
	f.Fuzz(func(t *testing.T, serviceText, sliceText []byte) {
		service, slice := &corev1.Service{}, &discoveryv1.EndpointSlice{}
		if json.Unmarshal(serviceText, service) != nil || json.Unmarshal(sliceText, slice) != nil {
			return
		}
		translator := translate.Translator{Node: here}
		if len(sliceText)%2 == 0 {
			translator = direct()
			translator.Away = map[string]bool{"n3": true, "n4": true}
		}
		translator.Announce, translator.Outside = len(serviceText)%2 == 0, len(serviceText)%3 == 0
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
	second := s.Frontends[0].Protocol & model.Tunnelled
	for _, f := range s.Frontends {
		protocol := f.Protocol &^ (model.Inside | model.Tunnelled)
		if f.Ports.First == 0 || f.Ports.First != f.Ports.Last || !f.Address.IsValid() || f.Address.Is4In6() || protocol != model.TCP && protocol != model.UDP {
			t.Errorf("frontend %+v", f)
		}
		if f.Protocol&model.Tunnelled != second || f.Address.IsUnspecified() && second == 0 || s.Policy.Tunnelled && f.Address.Is4() != s.Frontends[0].Address.Is4() {
			t.Errorf("frontend %+v among %v", f, s.Frontends)
		}
	}
	if s.Policy.Tunnelled != s.Forwarding.Encapsulates() || second != 0 && (s.Forwarding != model.ForwardingNATDestination || s.Announce != model.AnnounceNone || s.Policy.Inside) {
		t.Errorf("%+v", s)
	}
	identities, names := map[model.BackendAddress]bool{}, map[string]bool{}
	for _, b := range s.Backends {
		if (b.Port == 0) != s.Policy.Tunnelled || !b.Address.IsValid() || b.Address.Is4In6() || b.Weight > 1 && !s.Policy.Tunnelled || b.Name == "" || identities[s.Identity(b.BackendAddress)] || names[b.Name] {
			t.Errorf("backend %+v of %s", b, s.Name)
		}
		if s.Policy.Tunnelled && b.Address.Is4() != s.Backends[0].Address.Is4() {
			t.Errorf("the backends of %s are of two families: %+v", s.Name, s.Backends)
		}
		identities[s.Identity(b.BackendAddress)], names[b.Name] = true, true
	}
	for _, p := range s.AllowFrom {
		if p != p.Masked() {
			t.Errorf("prefix %s", p)
		}
	}
}
