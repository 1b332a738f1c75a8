package source_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/source"
)

// summary is the parts of a status that a test looks at.
func summary(c *shuntv1.Cluster) string {
	s := c.Services
	text := fmt.Sprintf("served %d, in part %d, unserved %d, alone %d", s.Served, s.InPart, s.Unserved, s.LeftAlone)
	for _, f := range c.Faults {
		text += fmt.Sprintf("; %s %s", f.Code, f.Object)
	}
	for _, a := range c.Announced {
		text += fmt.Sprintf("; %s %v node %q here %t", a.Address, a.Services, a.Node, a.Here)
	}
	return text
}

// TestStatus: Services are counted by their states as they come and go; the node is in step from the first time that
// all is taken over, until something is refused.
func TestStatus(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	sctp, both, headless, balanced := service("sctp", "10.96.0.2"), service("both", "10.96.0.3"), service("headless", ""), service("balanced", "10.96.0.4")
	sctp.Spec.Ports = []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolSCTP}}
	both.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80}, {Name: "b", Port: 81, Protocol: corev1.ProtocolSCTP}}
	headless.Spec.ClusterIPs = []string{corev1.ClusterIPNone}
	balanced.Spec.Type, balanced.Spec.Ports[0].NodePort = corev1.ServiceTypeLoadBalancer, 0
	balanced.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.9"}, {IP: "192.0.2.10"}}
	client := fake.NewClientset(node("10.0.0.1"), service("a", "10.96.0.1"), slice("a", "10.244.0.1"), sctp, both, headless, balanced)
	full := errors.New("there is no room")
	var broken sync.Map
	k := &taker{refuse: func([]model.Service) error {
		if _, is := broken.Load(true); is {
			return full
		}
		return nil
	}}
	contact := &source.Contact{Log: slog.New(slog.NewTextHandler(k, nil)), Server: "https://192.0.2.1:6443"}
	s, err := source.New(source.Options{Client: client, Node: "n1", Announce: true, Contact: contact, Log: contact.Log, Grace: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if c := s.Status(); c.Node != "n1" || c.InStepSince != nil || summary(c) != "served 0, in part 0, unserved 0, alone 0" {
		t.Errorf("before it has begun: %v", c)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	s.First()
	const faults = "; sctp_refused Service default/both; sctp_refused Service default/sctp"
	const announced = "; 192.0.2.9 [default/balanced] node \"\" here true; 192.0.2.10 [default/balanced] node \"\" here true"
	if c := s.Status(); c.InStepSince != nil || summary(c) != "served 2, in part 1, unserved 1, alone 1"+faults+announced || strings.Join(c.NodeAddresses, " ") != "10.0.0.1" {
		t.Errorf("before anything is declared: %v", c)
	}
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	defer ended.Wait()
	defer cancel()
	is := func(what, want string, holds func(*shuntv1.Cluster) bool) *shuntv1.Cluster {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			c := s.Status()
			if summary(c) == want && holds(c) {
				return c
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %s\n%v\nwant %s", what, summary(c), c, want)
			}
		}
	}
	inStep := func(c *shuntv1.Cluster) bool { return c.InStepSince != nil && c.Changed != nil && c.Refused == "" }
	const lacking = "; endpoints_missing Service default/balanced; endpoints_missing Service default/both"
	at := is("it is in step", "served 2, in part 1, unserved 1, alone 1"+faults+lacking+announced, inStep)
	for _, f := range at.Faults {
		if f.Since == nil || f.Text == "" || f.Remedy == "" {
			t.Errorf("a fault lacks something: %v", f)
		}
	}
	if err := client.CoreV1().Services("default").Delete(ctx, "both", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := client.CoreV1().Services("default").Delete(ctx, "headless", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := client.CoreV1().Services("default").Delete(ctx, "sctp", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	const fewer = "served 2, in part 0, unserved 0, alone 0; endpoints_missing Service default/balanced" + announced
	later := is("three go", fewer, inStep)
	if !later.InStepSince.AsTime().Equal(at.InStepSince.AsTime()) || !later.Changed.AsTime().After(at.Changed.AsTime()) {
		t.Errorf("in step since %v, and then %v; changed %v, and then %v", at.InStepSince, later.InStepSince, at.Changed, later.Changed)
	}

	broken.Store(true, true)
	if _, err := client.CoreV1().Services("default").Create(ctx, service("b", "10.96.0.5"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const more = "; frontend_taken Service default/b; frontend_taken Service default/b" // a has the node port, at both addresses
	is("it is refused", "served 2, in part 1, unserved 0, alone 0"+more+"; endpoints_missing Service default/b; endpoints_missing Service default/balanced"+announced,
		func(c *shuntv1.Cluster) bool { return c.InStepSince == nil && c.Refused == full.Error() })
	broken.Clear()
	if err := client.CoreV1().Services("default").Delete(ctx, "b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	is("it is taken over", fewer, func(c *shuntv1.Cluster) bool {
		return inStep(c) && c.InStepSince.AsTime().After(at.InStepSince.AsTime())
	})
}

// TestContactState: since when the apiserver does not answer, and which of the lists that are followed it refuses.
func TestContactState(t *testing.T) {
	server := &answering{}
	contact := &source.Contact{Log: slog.New(slog.DiscardHandler)}
	wrapped := contact.Wrap(server)
	const slices = "/apis/discovery.k8s.io/v1/endpointslices"
	ask := func(method, path string, status int) {
		t.Helper()
		server.answer = http.Response{StatusCode: status, Status: fmt.Sprint(status, " ", http.StatusText(status))}
		request, err := http.NewRequestWithContext(t.Context(), method, "http://127.0.0.1"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = wrapped.RoundTrip(request)
	}
	is := func(what string, away bool, why string) {
		t.Helper()
		if since, text := contact.State(); since.IsZero() == away || text != why {
			t.Errorf("%s: away since %s, %q; want %t, %q", what, since, text, away, why)
		}
	}
	ask(http.MethodGet, "/api/v1/services", 200)
	ask(http.MethodGet, "/api/v1/namespaces/a/events/x", 404)
	ask(http.MethodPut, "/api/v1/namespaces/a/services/x/status", 403)
	ask(http.MethodGet, slices, 410)
	is("what is no list, and a watch that is too old", false, "")
	ask(http.MethodGet, slices, 403)
	ask(http.MethodGet, "/api/v1/nodes", 500)
	ask(http.MethodGet, "/api/v1/services", 200)
	const refused = "GET /api/v1/nodes: 500 Internal Server Error"
	is("two are refused", false, refused+"; GET "+slices+": 403 Forbidden")
	ask(http.MethodGet, slices, 200)
	is("one is refused", false, refused)
	server.err = errors.New("connection refused")
	ask(http.MethodGet, slices, 200)
	is("it is away", true, "connection refused")
	server.err = nil
	ask(http.MethodGet, slices, 200)
	is("it is back", false, refused)
}
