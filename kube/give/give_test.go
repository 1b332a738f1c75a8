package give

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"github.com/shunt-lb/shunt/kube/pool"
	"github.com/shunt-lb/shunt/kube/translate"
)

// service is a Service of type LoadBalancer without an address, made at a second.
func service(name string, second int64) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, CreationTimestamp: metav1.Unix(second, 0)},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ClusterIPs: []string{"10.96.0.1"}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}}}
}

var ours = (&translate.Translator{}).Balances

// TestGiver: it writes missing addresses, with the mode in which packets arrive with them, and retries
// failed writes.
func TestGiver(t *testing.T) {
	p, err := pool.Parse([]string{"192.0.2.1-192.0.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset(service("x", 1), service("y", 2))
	fails := make(chan struct{}, 1)
	fails <- struct{}{}
	client.PrependReactor("update", "services", func(ktesting.Action) (bool, runtime.Object, error) {
		select {
		case <-fails:
			return true, nil, errors.New("the disk is full")
		default:
			return false, nil, nil
		}
	})
	var log safeBuffer
	g, err := New(Options{Client: client, Lease: "kube-system/shunt-kube", Node: "n1", Pool: p, Ours: ours, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { g.Run(ctx); close(ended) }()
	has := func(name, want string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			s, err := client.CoreV1().Services("a").Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if i := s.Status.LoadBalancer.Ingress; len(i) == 1 && i[0].IP == want && i[0].IPMode != nil && *i[0].IPMode == corev1.LoadBalancerIPModeVIP {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("Service %s has %+v, want %s; the log:\n%s", name, s.Status.LoadBalancer.Ingress, want, log.String())
			}
		}
	}
	has("x", "192.0.2.1")
	has("y", "192.0.2.2")
	if !strings.Contains(log.String(), "the disk is full") {
		t.Errorf("a failure is not told:\n%s", log.String())
	}
	cancel()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("it was told to end, and does not")
	}
	lease, err := client.CoordinationV1().Leases("kube-system").Get(t.Context(), "shunt-kube", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity != nil && *lease.Spec.HolderIdentity != "" {
		t.Errorf("it ended, and keeps the Lease: %+v, %v", lease, err)
	}
	if strings.Contains(log.String(), "another agent") {
		t.Errorf("it says that it has lost the Lease:\n%s", log.String())
	}
	for _, wrong := range []string{"", "x", "/x", "x/", "x/y/z"} {
		if _, err := New(Options{Lease: wrong}); err == nil || !strings.Contains(err.Error(), "NAMESPACE/NAME") {
			t.Errorf("a Lease called %q: %v", wrong, err)
		}
	}
}

// TestNoLease: an agent that may not use the Lease says so, once, and gives nothing.
func TestNoLease(t *testing.T) {
	p, err := pool.Parse([]string{"192.0.2.1"})
	if err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset(service("x", 1))
	asked := make(chan struct{}, 100)
	client.PrependReactor("get", "leases", func(ktesting.Action) (bool, runtime.Object, error) {
		asked <- struct{}{}
		return true, nil, errors.New("forbidden")
	})
	var log safeBuffer
	g, err := New(Options{Client: client, Lease: "kube-system/shunt-kube", Node: "n1", Pool: p, Ours: ours, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	ended := make(chan struct{})
	go func() { g.Run(ctx); close(ended) }()
	select {
	case <-asked:
	case <-ctx.Done():
		t.Fatal("it does not ask")
	}
	cancel()
	<-ended
	g.note(errors.New("forbidden"))
	if n := strings.Count(log.String(), "cannot use the Lease"); n != 1 || strings.Contains(log.String(), "gave") {
		t.Errorf("it says so %d times:\n%s", n, log.String())
	}
}
