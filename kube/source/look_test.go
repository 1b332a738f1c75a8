package source

import (
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/shunt-lb/shunt/kube/translate"
)

// TestLookAgain: faults on the machine are looked for each minute; Services that are as before are not reported
// again.
func TestLookAgain(t *testing.T) {
	balanced := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Port: 80}}}}
	looks, tells := 0, 0
	s, err := New(Options{Client: fake.NewClientset(balanced), Node: "n1", Log: slog.New(slog.DiscardHandler),
		Look:    func() []translate.Fault { looks++; return nil },
		Balance: func([]*corev1.Service) []translate.Fault { tells++; return nil }})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.First()
	for range 3 {
		s.lookAgain()
		s.balance()
	}
	if looks != 4 || tells != 1 || !s.askAgain {
		t.Errorf("it has looked %d times and told %d times, want 4 and 1; it answers again: %t", looks, tells, s.askAgain)
	}
}
