package source_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/kube/event"
	"github.com/shunt-lb/shunt/kube/source"
	"github.com/shunt-lb/shunt/kube/translate"
)

// The client library's fake has no defaults, no validation and no selectors: kube/net tests the features that need them
// with a real apiserver.

func service(name, address string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIPs: []string{address}, Ports: []corev1.ServicePort{{Port: 80, NodePort: 30080}}}}
}

func slice(of string, addresses ...string) *discoveryv1.EndpointSlice {
	number, name := int32(8080), ""
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: of + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: of}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &number}}}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func node(address string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}}}
}

// taker takes services over, and refuses some.
type taker struct {
	mutex  sync.Mutex
	calls  int
	moves  int    // calls with services
	tells  string // the node's part of direct return between nodes
	has    map[string]model.Service
	now    string
	refuse func([]model.Service) error
	log    bytes.Buffer
}

func (k *taker) Write(text []byte) (int, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return k.log.Write(text)
}

func (k *taker) declare(change daemon.Change) error {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.calls++
	if len(change.Declare)+len(change.Withdraw) > 0 {
		k.moves++
	}
	if k.refuse != nil {
		if err := k.refuse(change.Declare); err != nil {
			return err
		}
	}
	if change.Whole != (k.has == nil) {
		return fmt.Errorf("all is declared: %v, in call %d", change.Whole, k.calls)
	}
	if d := change.Decapsulation; d != nil {
		k.tells = fmt.Sprintf("%t from %v at %v", d.Tunnelled, d.From, d.Nodes)
	}
	if change.Whole {
		k.has = map[string]model.Service{}
	}
	for _, name := range change.Withdraw {
		delete(k.has, name)
	}
	for _, s := range change.Declare {
		k.has[s.Name] = s
	}
	k.now = ""
	for _, name := range slices.Sorted(maps.Keys(k.has)) {
		s := k.has[name]
		k.now += s.Name
		for _, f := range s.Frontends {
			k.now += " " + f.String()
		}
		for _, b := range s.Backends {
			k.now += " " + b.Address.String()
		}
		k.now += "\n"
	}
	return nil
}

func (k *taker) awaits(t *testing.T, what, want string) {
	t.Helper()
	end := time.Now().Add(30 * time.Second)
	for {
		k.mutex.Lock()
		now, log := k.now, k.log.String()
		k.mutex.Unlock()
		if now == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: the services are\n%s\nwant\n%s\nthe log:\n%s", what, now, want, log)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// says waits for a text in the log: a declaration is reported a moment later.
func (k *taker) says(t *testing.T, what string) {
	t.Helper()
	end := time.Now().Add(30 * time.Second)
	for {
		k.mutex.Lock()
		log := k.log.String()
		k.mutex.Unlock()
		if strings.Contains(log, what) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the log lacks %q:\n%s", what, log)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func TestFollow(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	client := fake.NewClientset(service("a", "10.96.0.1"), slice("a", "10.244.0.1"), slice("b", "10.244.0.2"))
	k := &taker{}
	s, err := source.New(source.Options{Client: client, Node: "n1", Log: slog.New(slog.NewTextHandler(k, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	defer ended.Wait()
	defer cancel()
	a := "default/a tcp 10.96.0.1:80"
	k.awaits(t, "at first", a+" 10.244.0.1\n")
	k.says(t, "the cluster has no such node")
	k.says(t, "node port 30080 is not served here")
	if k.calls != 1 {
		t.Errorf("the first list was declared in %d steps", k.calls)
	}

	options := metav1.CreateOptions{}
	if _, err := client.CoreV1().Nodes().Create(ctx, node("10.0.0.1"), options); err != nil {
		t.Fatal(err)
	}
	a += " tcp 10.0.0.1:30080 tcp 127.0.0.1:30080"
	k.awaits(t, "the node comes", a+" 10.244.0.1\n")
	if _, err := client.CoreV1().Services("default").Create(ctx, service("b", "10.96.0.2"), options); err != nil {
		t.Fatal(err)
	}
	b := "default/b tcp 10.96.0.2:80" // a has the node port
	k.awaits(t, "a Service comes after its slice", a+" 10.244.0.1\n"+b+" 10.244.0.2\n")
	k.says(t, "Service default/a was there first")
	if _, err := client.DiscoveryV1().EndpointSlices("default").Update(ctx, slice("a"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	k.awaits(t, "endpoints go", a+"\n"+b+" 10.244.0.2\n")
	if err := client.CoreV1().Nodes().Delete(ctx, "n1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := client.CoreV1().Services("default").Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	k.awaits(t, "a Service and the node go; what is known of the node stays", b+" tcp 10.0.0.1:30080 tcp 127.0.0.1:30080 10.244.0.2\n")
	k.says(t, "fault ended")
}

// TestRefused has the rest of the node refuse one service for good, and then all for a while.
func TestRefused(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	client := fake.NewClientset(service("a", "10.96.0.1"), service("b", "10.96.0.2"), node("10.0.0.1"))
	full := true
	k := &taker{refuse: func(services []model.Service) error {
		for _, s := range services {
			for _, f := range s.Frontends {
				if f.Address.String() == "10.96.0.1" {
					return fmt.Errorf("take over: %w", &state.ConflictError{Source: source.Name, Service: s.Name, Object: "frontend " + f.String(), Owner: "file"})
				}
			}
		}
		if full {
			full = false
			return errors.New("there is no room")
		}
		return nil
	}}
	s, err := source.New(source.Options{Client: client, Node: "n1", Log: slog.New(slog.NewTextHandler(k, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	defer ended.Wait()
	defer cancel()
	k.awaits(t, "after both", "default/b tcp 10.96.0.2:80\n")
	k.says(t, "service_refused")
	k.says(t, "there is no room")
}

// TestNothingBeforeTheFirstList: an apiserver that says nothing makes Open end with its context.
func TestNothingBeforeTheFirstList(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	s, err := source.New(source.Options{Client: fake.NewClientset(), Node: "n1", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Open returned %v", err)
	}
}

// TestLook: an obstacle on the machine is a fault.
func TestLook(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := source.New(source.Options{Client: fake.NewClientset(node("10.0.0.1")), Node: "n1", Log: slog.New(slog.DiscardHandler),
		Look: func() []translate.Fault {
			return []translate.Fault{{Code: translate.KubeProxyFound, Object: "Node n1", Text: "it runs"}}
		}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, faults := s.Current(); len(faults) != 1 || faults[0].Code != translate.KubeProxyFound {
			t.Errorf("the faults are %v", faults)
		}
	}
}

// TestTell: all faults are sent when they have changed, each with its object; a Service that has had no endpoint for a
// while is one.
func TestTell(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	sctp := service("sctp", "10.96.0.2")
	sctp.UID, sctp.Spec.Ports = "4711", []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolSCTP}}
	client := fake.NewClientset(node("10.0.0.1"), service("a", "10.96.0.1"), slice("a", "10.244.0.1"), sctp)
	told := make(chan []event.Fault, 100)
	k := &taker{}
	s, err := source.New(source.Options{Client: client, Node: "n1", Log: slog.New(slog.NewTextHandler(k, nil)), Grace: 50 * time.Millisecond,
		Look: func() []translate.Fault {
			return []translate.Fault{{Code: translate.KubeProxyFound, Object: "Node n1", Text: "it runs"}}
		},
		Tell: func(all []event.Fault) { told <- all }})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	s.First() // looks
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	defer ended.Wait()
	defer cancel()
	awaits := func(what, want string) {
		t.Helper()
		timeout := time.After(30 * time.Second)
		var now string
		for {
			select {
			case all := <-told:
				now = ""
				for _, f := range all {
					now += fmt.Sprintf("%s %s %s %s\n", f.Code, f.About.Kind, f.About.Name, f.About.UID)
				}
				if now == want {
					return
				}
			case <-timeout:
				t.Fatalf("%s: told last was\n%s\nwant\n%s", what, now, want)
			}
		}
	}
	const always = "kube_proxy_found Node n1 n1\nsctp_refused Service sctp 4711\n"
	awaits("at first", always)
	if _, err := client.DiscoveryV1().EndpointSlices("default").Update(ctx, slice("a"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	awaits("a has no endpoint", always+"endpoints_missing Service a \n")
	if _, err := client.DiscoveryV1().EndpointSlices("default").Update(ctx, slice("a", "10.244.0.1"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	awaits("a has one again", always)
	if err := client.CoreV1().Services("default").Delete(ctx, "sctp", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	awaits("a Service goes", "kube_proxy_found Node n1 n1\n")
	select {
	case all := <-told:
		t.Errorf("it tells without a change: %v", all)
	default:
	}
}

// TestMetrics: each family's value after one list, one change of endpoints and one of a Service.
func TestMetrics(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	old, recent := slice("a", "10.244.0.1"), slice("a", "10.244.0.1", "10.244.0.2")
	old.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2020-01-01T00:00:00Z"} // an agent before has carried it out
	client := fake.NewClientset(node("10.0.0.1"), service("a", "10.96.0.1"), old)
	k := &taker{}
	s, err := source.New(source.Options{Client: client, Node: "n1", Log: slog.New(slog.NewTextHandler(k, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	defer ended.Wait()
	defer cancel()
	const a = "default/a tcp 10.96.0.1:80 tcp 10.0.0.1:30080 tcp 127.0.0.1:30080 10.244.0.1"
	k.awaits(t, "at first", a+"\n")
	begin := time.Now()
	recent.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: begin.Add(-time.Minute).Format(time.RFC3339Nano)}
	if _, err := client.DiscoveryV1().EndpointSlices("default").Update(ctx, recent, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	k.awaits(t, "an endpoint comes, whose trigger is before the start", a+" 10.244.0.2\n")
	recent.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)}
	recent.Endpoints = recent.Endpoints[:1]
	if _, err := client.DiscoveryV1().EndpointSlices("default").Update(ctx, recent, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Services("default").Create(ctx, service("b", "10.96.0.2"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	k.awaits(t, "one goes, and a Service comes", a+"\ndefault/b tcp 10.96.0.2:80\n")
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(s.Collectors()...)
	end := time.Now().Add(30 * time.Second)
	for { // a declaration is counted a moment later
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		values := map[string]float64{}
		for _, f := range families {
			m := f.GetMetric()[0]
			name := strings.TrimPrefix(f.GetName(), "kubeproxy_")
			values[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
		wrong := ""
		for name, want := range map[string]float64{"sync_proxy_rules_service_changes_total": 2, "sync_proxy_rules_endpoint_changes_total": 3,
			"sync_proxy_rules_service_changes_pending": 0, "sync_proxy_rules_endpoint_changes_pending": 0, "network_programming_duration_seconds": 1} {
			if got, has := values[name]; !has || got != want {
				wrong += fmt.Sprintf("%s is %v (%v), want %v\n", name, got, has, want)
			}
		}
		if steps := values["sync_proxy_rules_duration_seconds"]; steps < 3 || steps > 4 {
			wrong += fmt.Sprintf("%v steps\n", steps)
		}
		for _, name := range []string{"sync_proxy_rules_last_queued_timestamp_seconds", "sync_proxy_rules_last_timestamp_seconds"} {
			if at := values[name]; at < float64(begin.Unix()) || at > float64(time.Now().Unix()+1) {
				wrong += fmt.Sprintf("%s is %v\n", name, at)
			}
		}
		if wrong == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatal(wrong)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// TestExplain explains a Service that exists, and names one that does not.
func TestExplain(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := source.New(source.Options{Client: fake.NewClientset(node("10.0.0.1"), service("a", "10.96.0.1"), service("b", "10.96.0.1"), slice("a", "10.244.0.1")),
		Node: "n1", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	e, err := s.Explain("default/a")
	if err != nil || len(e.Ports) != 1 || len(e.Ports[0].Variants[0].Endpoints) != 1 || len(e.Faults) != 0 {
		t.Errorf("%+v, %v", e, err)
	}
	// The frontends belong to the other Service.
	if e, err := s.Explain("default/b"); err != nil || len(e.Faults) == 0 || e.Faults[0].Code != translate.FrontendTaken {
		t.Errorf("%+v, %v", e.Faults, err)
	}
	if _, err := s.Explain("default/c"); err == nil || !strings.Contains(err.Error(), "no Service default/c") {
		t.Errorf("the error is %v", err)
	}
}

// BenchmarkChange is one endpoint that changes among Services of 100: translation and set alone, and
// with the desired state.
func BenchmarkChange(b *testing.B) {
	var addresses []string
	for i := range 100 {
		addresses = append(addresses, fmt.Sprintf("10.244.0.%d", i+1))
	}
	for _, services := range []int{1, 1000, 10000} {
		w := newWhole(services, addresses)
		b.Run(fmt.Sprintf("%dx100/translated", services), func(b *testing.B) {
			for i := range b.N {
				w.put(i%services, addresses[:99-i%2])
				w.set.Pending()
				w.set.Settled()
			}
		})
		b.Run(fmt.Sprintf("%dx100/desired", services), func(b *testing.B) {
			for i := range b.N {
				w.put(i%services, addresses[:99-i%2])
				if err := w.declare(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
