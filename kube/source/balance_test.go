package source_test

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/shunt-lb/shunt/kube/source"
	"github.com/shunt-lb/shunt/kube/translate"
)

// TestBalance: Balance gets all Services with addresses for clients outside when one of them changes, and is not called
// when another object does; their faults are faults like others.
func TestBalance(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	outer, plain := service("outer", "10.96.0.1"), service("plain", "10.96.0.2")
	plain.Spec.Ports[0].NodePort = 30081
	outer.Spec.ExternalIPs = []string{"192.0.2.1"}
	client := fake.NewClientset(outer, plain, node("10.0.0.1"))
	var heard [][]string
	s, err := source.New(source.Options{Client: client, Node: "n1", Log: slog.New(slog.DiscardHandler), Balance: func(services []*corev1.Service) []translate.Fault {
		var names []string
		for _, service := range services {
			names = append(names, service.Name)
		}
		slices.Sort(names)
		heard = append(heard, names)
		return []translate.Fault{{Code: translate.PoolExhausted, Object: "Service default/outer"}}
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	current := func(services int) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			got, faults := s.Current()
			if len(faults) != 1 || faults[0].Code != translate.PoolExhausted {
				t.Fatalf("the faults are %v", faults)
			}
			n := 0
			for _, service := range got {
				n += len(service.Backends) + 1
			}
			if n == services {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("there are %d services and backends, want %d", n, services)
			}
		}
	}
	hears := func(times int, last ...string) {
		t.Helper()
		if len(heard) != times || !slices.Equal(heard[len(heard)-1], last) {
			t.Errorf("it was heard %v, want %d times, and %v last", heard, times, last)
		}
	}
	current(2)
	hears(1, "outer")
	_, err = client.DiscoveryV1().EndpointSlices("default").Create(ctx, slice("outer", "10.244.0.1"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	current(3)
	hears(1, "outer")
	plain.Spec.Type = corev1.ServiceTypeLoadBalancer
	plain.Spec.Ports = append(plain.Spec.Ports, corev1.ServicePort{Name: "more", Port: 81})
	if _, err = client.CoreV1().Services("default").Update(ctx, plain, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	current(4)
	hears(2, "outer", "plain")
	if err = client.CoreV1().Services("default").Delete(ctx, "outer", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	current(2)
	hears(3, "plain")
}
