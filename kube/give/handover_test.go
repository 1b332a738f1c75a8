package give

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	ktesting "k8s.io/client-go/testing"

	"github.com/shunt-lb/shunt/kube/pool"
)

// slowClient is a client whose updates of Services' status report that they have begun, and wait.
type slowClient struct {
	kubernetes.Interface
	underWay chan<- struct{}
	goOn     <-chan struct{}
}

type slowCore struct {
	typedcorev1.CoreV1Interface
	client *slowClient
}

type slowServices struct {
	typedcorev1.ServiceInterface
	client *slowClient
}

func (c *slowClient) CoreV1() typedcorev1.CoreV1Interface {
	return slowCore{c.Interface.CoreV1(), c}
}

func (c slowCore) Services(namespace string) typedcorev1.ServiceInterface {
	return slowServices{c.CoreV1Interface.Services(namespace), c.client}
}

func (s slowServices) UpdateStatus(ctx context.Context, service *corev1.Service, o metav1.UpdateOptions) (*corev1.Service, error) {
	s.client.underWay <- struct{}{}
	<-s.client.goOn
	return s.ServiceInterface.UpdateStatus(ctx, service, o)
}

// TestHandover: an agent that has to end while it writes an address keeps the Lease until that is done: otherwise the
// next one would give the address to another Service meanwhile.
func TestHandover(t *testing.T) {
	p, err := pool.Parse([]string{"192.0.2.1-192.0.2.9"})
	if err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset(service("x", 2))
	var asked atomic.Int64
	client.PrependReactor("get", "leases", func(ktesting.Action) (bool, runtime.Object, error) {
		asked.Add(1) // by one that does not have it: the other one writes
		return false, nil, nil
	})
	underWay, goOn := make(chan struct{}, 10), make(chan struct{})
	run := func(node string, client kubernetes.Interface) (end func(), ended <-chan struct{}) {
		g, err := New(Options{Client: client, Lease: "kube-system/shunt-kube", Node: node, Pool: p, Ours: ours, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		g.times = leaseTimes{time.Minute, 30 * time.Second, 5 * time.Millisecond}
		ctx, cancel := context.WithCancel(context.Background())
		over := make(chan struct{})
		go func() { g.Run(ctx); close(over) }()
		t.Cleanup(func() { cancel(); <-over })
		return cancel, over
	}
	address := func(name string) string {
		t.Helper()
		s, err := client.CoreV1().Services("a").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if i := s.Status.LoadBalancer.Ingress; len(i) > 0 {
			return i[0].IP
		}
		return ""
	}
	until := func(what string, is func() bool) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not within 30 s: %s", what)
			}
		}
	}
	end, ended := run("n1", &slowClient{client, underWay, goOn})
	<-underWay
	run("n2", client)
	if _, err := client.CoreV1().Services("a").Create(t.Context(), service("w", 1), metav1.CreateOptions{}); err != nil { // its turn is before that of x
		t.Fatal(err)
	}
	end()
	before := asked.Load()
	until("the second agent asks for the Lease, or gives", func() bool { return asked.Load() > before+20 || address("w") != "" })
	if has := address("w"); has != "" {
		t.Errorf("a second agent has given w %s, and the first one writes still", has)
	}
	close(goOn)
	<-ended
	until("both Services have an address", func() bool { return address("w") != "" && address("x") != "" })
	if address("w") == address("x") {
		t.Errorf("both have got %s", address("w"))
	}
}
