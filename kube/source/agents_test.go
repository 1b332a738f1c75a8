package source_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/shunt-lb/shunt/kube/source"
)

// agents are the endpoints of the nodes' agents; "n2 not": it is not ready.
func agents(nodes ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "agents-1", Labels: map[string]string{discoveryv1.LabelServiceName: "agents"}}, AddressType: discoveryv1.AddressTypeIPv4}
	for i, node := range nodes {
		name, not, _ := strings.Cut(node, " ")
		ready := not == ""
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.0.%d", i+1)}, NodeName: &name, Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
	}
	return s
}

// TestAgents: addresses are announced by agents that are ready, and by this one, whether it is or not; they move when the agents change.
func TestAgents(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	client := fake.NewClientset(node("10.0.0.1"), service("plain", "10.96.1.1"))
	const addresses = 20
	for i := range addresses {
		s := service(fmt.Sprintf("s%02d", i), fmt.Sprintf("10.96.0.%d", i+1))
		s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeLoadBalancer, 0
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("192.0.2.%d", i+1)}}
		if _, err := client.CoreV1().Services("default").Create(ctx, s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	slices := client.DiscoveryV1().EndpointSlices("kube-system")
	if _, err := slices.Create(ctx, agents("n1 not", "n2"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	k := &taker{}
	s, err := source.New(source.Options{Client: client, Node: "n1", Announce: true, Elect: true, Agents: "kube-system/agents", Log: slog.New(slog.NewTextHandler(k, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	count := func() map[string]int {
		nodes := map[string]int{}
		for _, a := range s.Status().Announced {
			nodes[a.Node]++
			if a.Here != (a.Node == "n1") {
				t.Errorf("it is %v", a)
			}
		}
		return nodes
	}
	s.First()
	if n := count(); n["n1"] == 0 || n["n2"] == 0 || n["n1"]+n["n2"] != addresses {
		t.Errorf("at the start, they are announced by %v", n)
	}
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	defer ended.Wait()
	defer cancel()
	for _, step := range []struct {
		agents []string
		want   string // each of these nodes announces some, and no other
	}{{[]string{"n1", "n2"}, "n1 n2"}, {[]string{"n1", "n2", "n3"}, "n1 n2 n3"}, {[]string{"n1", "n2 not", "n3"}, "n1 n3"}, {nil, "n1"}, {[]string{"n3"}, "n1 n3"}} {
		if _, err := slices.Update(ctx, agents(step.agents...), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			n, all := count(), 0
			for _, node := range strings.Fields(step.want) {
				if n[node] > 0 {
					all += n[node]
				}
			}
			if len(n) == len(strings.Fields(step.want)) && all == addresses {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("of the agents %v, they are announced by %v, want %s", step.agents, n, step.want)
			}
		}
	}
	for _, wrong := range []string{"x", "/x", "x/", "x/y/z"} {
		if _, err := source.New(source.Options{Client: client, Node: "n1", Agents: wrong, Log: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), "NAMESPACE/NAME") {
			t.Errorf("a Service called %q: %v", wrong, err)
		}
	}
}

// TestNetworks: addresses move when a node's networks change, to nodes that are in theirs; this node's own entry is passed on.
func TestNetworks(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	balanced := service("web", "10.96.0.1")
	balanced.Spec.Type = corev1.ServiceTypeLoadBalancer
	balanced.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	client := fake.NewClientset(node("10.0.0.1"), balanced, agents("n1", "n2"))
	var mu sync.Mutex
	var own []string
	k := &taker{}
	options := source.Options{Client: client, Node: "n1", Announce: true, Elect: true, Agents: "kube-system/agents", Networks: "kube-system/networks", Log: slog.New(slog.NewTextHandler(k, nil)),
		Placed: func(entry *string) {
			mu.Lock()
			defer mu.Unlock()
			if entry == nil {
				own = append(own, "none")
			} else {
				own = append(own, *entry)
			}
		}}
	s, err := source.New(options)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	s.First()
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	defer ended.Wait()
	defer cancel()
	settled := func(when, by, entry string, faults int) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			st := s.Status()
			mu.Lock()
			last := own[len(own)-1]
			mu.Unlock()
			if len(st.Announced) == 1 && st.Announced[0].Node == by && last == entry && len(st.Faults) == faults {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%s, announced is %v, this node's entry is %q, and the faults are %v; want %s, %q and %d", when, st.Announced, last, st.Faults, by, entry, faults)
			}
		}
	}
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "networks"}}
	for i, step := range []struct {
		data      map[string]string
		by, entry string
		faults    int
	}{
		{map[string]string{"n1": "192.0.2.0/24", "n2": ""}, "n1", "192.0.2.0/24", 0},
		{map[string]string{"n1": "198.51.100.0/24"}, "n2", "198.51.100.0/24", 0},
		{map[string]string{"n2": "198.51.100.0/24"}, "n1", "none", 0},
		{map[string]string{"n1": "", "n2": ""}, s.Status().Announced[0].Node, "", 1}, // as without any
	} {
		object.Data = step.data
		change := func() (err error) {
			_, err = client.CoreV1().ConfigMaps("kube-system").Update(ctx, object, metav1.UpdateOptions{})
			return err
		}
		if i == 0 {
			change = func() (err error) {
				_, err = client.CoreV1().ConfigMaps("kube-system").Create(ctx, object, metav1.CreateOptions{})
				return err
			}
		}
		if err := change(); err != nil {
			t.Fatal(err)
		}
		settled(fmt.Sprintf("with the networks %v", step.data), step.by, step.entry, step.faults)
	}
	for _, wrong := range []string{"x", "/x", "x/", "x/y/z"} {
		options.Networks = wrong
		if _, err := source.New(options); err == nil || !strings.Contains(err.Error(), "NAMESPACE/NAME") {
			t.Errorf("a ConfigMap called %q: %v", wrong, err)
		}
	}
}

// TestSharedAddress: two Services with one address, each with a policy Local, are announced by one node, also when the endpoints of one
// alone change, or it gets another address.
func TestSharedAddress(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	on := func(of string, nodes ...string) *discoveryv1.EndpointSlice {
		s := slice(of)
		for i, node := range nodes {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.244.0.%d", i+1)}, NodeName: &node})
		}
		return s
	}
	balanced := func(name, clusterIP, address string, port int32) *corev1.Service {
		s := service(name, clusterIP)
		s.Spec.Type, s.Spec.Ports, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Port: port}}, corev1.ServiceExternalTrafficPolicyLocal
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
		return s
	}
	client := fake.NewClientset(node("10.0.0.1"), balanced("a", "10.96.0.1", "192.0.2.1", 80), balanced("b", "10.96.0.2", "192.0.2.1", 81), agents("n1", "n2", "n3"),
		on("a", "n1", "n2"), on("b", "n2", "n3"))
	k := &taker{}
	s, err := source.New(source.Options{Client: client, Node: "n1", Announce: true, Elect: true, Agents: "kube-system/agents", Log: slog.New(slog.NewTextHandler(k, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	s.First()
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	defer ended.Wait()
	defer cancel()
	announced := func(want string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			var have []string
			for _, a := range s.Status().Announced {
				have = append(have, fmt.Sprintf("%s of %s by %s", a.Address, strings.Join(a.Services, " "), a.Node))
			}
			if strings.Join(have, ", ") == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("announced is %q, want %q", have, want)
			}
		}
	}
	announced("192.0.2.1 of default/a default/b by n2")
	if _, err := client.DiscoveryV1().EndpointSlices("default").Update(ctx, on("b", "n1"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	announced("192.0.2.1 of default/a default/b by n1")
	if _, err := client.DiscoveryV1().EndpointSlices("default").Update(ctx, on("a", "n3"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Services("default").Update(ctx, balanced("b", "10.96.0.2", "192.0.2.2", 81), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	announced("192.0.2.1 of default/a by n3, 192.0.2.2 of default/b by n1")
}
