package place

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/pool"
)

func networks(texts ...string) (all []netip.Prefix) {
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// said is a log.
type said struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *said) count(text string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Count(s.text.String(), text)
}

// TestWriter: an entry exists while the networks do not have the whole pool, beside the entries of other nodes; it is
// written again when somebody else has changed it, and after a refusal; and nothing is written before both sides are
// known, or when both are equal.
func TestWriter(t *testing.T) {
	addresses, err := pool.Parse([]string{"192.0.2.240-192.0.2.250", "2001:db8:1::/120"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "networks"}, Data: map[string]string{"n2": "10.0.0.0/8"}}
	client := fake.NewClientset(object)
	var mu sync.Mutex
	writes, refuse := 0, false
	client.PrependReactor("patch", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		writes++
		if refuse {
			return true, nil, errors.New("no right")
		}
		return false, nil, nil
	})
	log := &said{}
	w, err := New(Options{Client: client, Object: "kube-system/networks", Node: "n1", Pool: addresses, Log: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	w.retry = time.Millisecond
	var ended sync.WaitGroup
	ended.Go(func() { w.Run(ctx) })
	defer ended.Wait()
	defer cancel()
	has := func(want map[string]string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			now, err := client.CoreV1().ConfigMaps("kube-system").Get(ctx, "networks", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			_, is := w.due()
			if fmt.Sprint(now.Data) == fmt.Sprint(want) && !is {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the entries are %v, want %v", now.Data, want)
			}
		}
	}
	count := func(want int) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if writes != want {
			t.Errorf("it has written %d times, want %d", writes, want)
		}
	}
	whole := networks("192.0.2.7/24", "2001:db8:1::7/64")
	w.In(whole[:1]) // but for IPv6
	w.In(whole)
	w.Seen(nil)
	has(map[string]string{"n2": "10.0.0.0/8"})
	count(0)
	w.In(networks("192.0.2.7/24", "10.9.0.1/16", "192.0.2.8/24"))
	has(map[string]string{"n1": "10.9.0.0/16,192.0.2.0/24", "n2": "10.0.0.0/8"})
	count(1)
	if _, err := client.CoreV1().ConfigMaps("kube-system").Update(ctx, object, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.Seen(nil)
	has(map[string]string{"n1": "10.9.0.0/16,192.0.2.0/24", "n2": "10.0.0.0/8"})
	count(2)
	mu.Lock()
	refuse = true
	mu.Unlock()
	w.In(nil)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		mu.Lock()
		enough := writes > 4
		mu.Unlock()
		if enough {
			break
		}
		if time.Now().After(end) {
			t.Fatal("it does not try again")
		}
	}
	if n := log.count("no right"); n != 1 {
		t.Errorf("a refusal is logged %d times", n)
	}
	mu.Lock()
	refuse = false
	mu.Unlock()
	has(map[string]string{"n1": "", "n2": "10.0.0.0/8"})
	w.In(whole)
	has(map[string]string{"n2": "10.0.0.0/8"})
}

// TestNobodyWrites: without an object there is no Writer, and its methods do nothing.
func TestNobodyWrites(t *testing.T) {
	var w *Writer
	w.In(nil)
	w.Seen(nil)
	w.Run(t.Context())
	for _, wrong := range []string{"", "x", "/x", "x/", "x/y/z"} {
		if _, err := New(Options{Object: wrong}); err == nil || !strings.Contains(err.Error(), "NAMESPACE/NAME") {
			t.Errorf("an object called %q: %v", wrong, err)
		}
	}
}

// TestParse: an entry comes back unchanged, and a text that is no entry is left out.
func TestParse(t *testing.T) {
	got := Parse(map[string]string{"n1": format(networks("192.0.2.7/24", "2001:db8::1/64")), "n2": "", "n3": "192.0.2.0/24,etwas", "n4": "192.0.2.0", "n1_tunnel": "ipip", "n5_tunnel": ""})
	if want := "map[n1:[192.0.2.0/24 2001:db8::/64] n2:[]]"; fmt.Sprint(got) != want {
		t.Errorf("read is %v, want %s", got, want)
	}
}

// TestParseTunnels: an entry comes back as it was written, other tunnels are none that this version opens, and networks are no tunnels.
func TestParseTunnels(t *testing.T) {
	gue, ipip := Tunnel{model.ForwardingDSRGUE, 6080}, Tunnel{Forwarding: model.ForwardingDSRIPIP}
	data := map[string]string{"n1": "192.0.2.0/24", "n1_tunnel": gue.String(), "n2_tunnel": ipip.String(), "n2": "", "n.3_tunnel": "gue", "n4_tunnel": "gue:0", "n5_tunnel": "gue:65536",
		"n6_tunnel": "ipip:1", "n7_tunnel": "geneve:6081", "n8_tunnel": ""}
	got := ParseTunnels(data)
	want := map[string]Tunnel{"n1": gue, "n2": ipip, "n.3": {}, "n4": {}, "n5": {}, "n6": {}, "n7": {}, "n8": {}}
	if !maps.Equal(got, want) {
		t.Errorf("read is %v, want %v", got, want)
	}
	if text := (Tunnel{Forwarding: model.ForwardingNAT}).String(); text != "" {
		t.Errorf("NAT is the tunnel %q", text)
	}
	if own := OwnTunnel(data, "n1"); own == nil || *own != "gue:6080" {
		t.Errorf("the own entry is %v", own)
	}
	if own := OwnTunnel(data, "n9"); own != nil {
		t.Errorf("the entry of a node that has none is %q", *own)
	}
}

// TestTunnels: the entry for tunnels is beside the entry for networks; it changes with the tunnels, goes when the node opens none, and when the agent withdraws it.
func TestTunnels(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "nodes"}, Data: map[string]string{"n1": "10.0.0.0/8", "n2_tunnel": "ipip"}}
	client := fake.NewClientset(object)
	log := &said{}
	w, err := NewTunnels(Options{Client: client, Object: "kube-system/nodes", Node: "n1", Log: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	var ended sync.WaitGroup
	ended.Go(func() { w.Run(ctx) })
	has := func(want string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			now, err := client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "nodes", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if _, is := w.due(); fmt.Sprint(now.Data) == want && !is {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the entries are %v, want %v", now.Data, want)
			}
		}
	}
	const others, both = "map[n1:10.0.0.0/8 n2_tunnel:ipip]", "map[n1:10.0.0.0/8 n1_tunnel:gue:6080 n2_tunnel:ipip]"
	w.Seen(nil)
	has(others)
	w.Opens(Tunnel{model.ForwardingDSRGUE, 6080})
	has(both)
	w.Opens(Tunnel{})
	has(others)
	w.Opens(Tunnel{model.ForwardingDSRGUE, 6080})
	has(both)
	if log.count("told the agents which tunnels this node opens") == 0 || log.count("tunnels=none") == 0 {
		t.Errorf("the log is %s", log.text.String())
	}
	cancel()
	ended.Wait()
	if err := w.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	has(others)
	if err := client.CoreV1().ConfigMaps("kube-system").Delete(t.Context(), "nodes", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := w.Withdraw(t.Context()); err != nil {
		t.Errorf("the ConfigMap has gone: %v", err)
	}
	client.PrependReactor("patch", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("no right") })
	if err := w.Withdraw(t.Context()); err == nil || !strings.Contains(err.Error(), "no right") {
		t.Errorf("a refusal is %v", err)
	}
	if _, err := NewTunnels(Options{Object: "x"}); err == nil || !strings.Contains(err.Error(), "NAMESPACE/NAME") {
		t.Errorf("an object called x: %v", err)
	}
	var none *Writer
	none.Opens(Tunnel{})
	if err := none.Withdraw(t.Context()); err != nil {
		t.Error(err)
	}
}
