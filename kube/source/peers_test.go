package source_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/place"
	"github.com/shunt-lb/shunt/kube/source"
)

var gue = place.Tunnel{Forwarding: model.ForwardingDSRGUE, Port: 6080}

// onNodes is a slice with an endpoint on each of these nodes.
func onNodes(of string, nodes ...string) *discoveryv1.EndpointSlice {
	s := slice(of)
	for _, node := range nodes {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.244." + strings.TrimPrefix(node, "n") + ".5"}, NodeName: &node})
	}
	return s
}

func tunnels(data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "tunnels"}, Data: data}
}

// outside is how clients outside reach a Service: its services that are not for clients in the cluster alone, with
// their backends' names and weights.
func (k *taker) outside(name string) string {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	var parts []string
	for _, n := range slices.Sorted(maps.Keys(k.has)) {
		s := k.has[n]
		if n != "default/"+name && !strings.HasPrefix(n, "default/"+name+"@") || !slices.ContainsFunc(s.Frontends, func(f model.Frontend) bool { return f.Ports.First > 30000 && f.Protocol&model.Inside == 0 }) {
			continue
		}
		part := strings.TrimPrefix(n, "default/"+name) + " " + string(s.Forwarding)
		for _, b := range s.Backends {
			if part += " "; s.Policy.Tunnelled {
				part += b.Name + "="
			}
			part += fmt.Sprintf("%s*%d", b.Address, b.Weight)
		}
		parts = append(parts, strings.TrimSpace(part))
	}
	return strings.Join(parts, ", ")
}

// becomes waits until clients outside reach Services in these ways.
func (k *taker) becomes(t *testing.T, when string, want map[string]string) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		var wrong []string
		for name, way := range want {
			if now := k.outside(name); now != way {
				wrong = append(wrong, fmt.Sprintf("%s has %q, want %q", name, now, way))
			}
		}
		if len(wrong) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %s", when, strings.Join(wrong, "; "))
		}
	}
}

func nodePort(name, address string, number int32) *corev1.Service {
	s := service(name, address)
	s.Spec.Ports[0].NodePort = number
	return s
}

// heard are the calls of a source.
type heard struct {
	*taker
	mutex  sync.Mutex
	entry  string
	opened []place.Tunnel
}

func (h *heard) direct(away time.Duration) source.Direct {
	return source.Direct{Tunnel: gue, Entries: "kube-system/tunnels", Away: away, Patience: time.Millisecond,
		Seen: func(entry *string) {
			h.set(func() {
				if h.entry = "none"; entry != nil {
					h.entry = *entry
				}
			})
		},
		Opens: func(tunnel place.Tunnel) { h.set(func() { h.opened = append(h.opened, tunnel) }) },
	}
}

func (h *heard) set(do func()) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	do()
}

func (h *heard) awaits(t *testing.T, senders, entry string) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		h.taker.mutex.Lock()
		tells := h.tells
		h.taker.mutex.Unlock()
		h.mutex.Lock()
		now := fmt.Sprintf("it takes tunnels: %s, own entry %s, opened %v", tells, h.entry, h.opened)
		h.mutex.Unlock()
		from := strings.ReplaceAll(strings.ReplaceAll(senders, " ", "/32 "), "]", "/32]")
		if senders == "[]" {
			from = senders
		}
		nodes := strings.Replace(senders, "[", "[10.0.0.1 ", 1)
		if senders == "[]" {
			nodes = "[10.0.0.1]"
		}
		if want := fmt.Sprintf("it takes tunnels: true from %s at %s, own entry %s, opened [gue:6080]", from, nodes, entry); now == want {
			return
		} else if time.Now().After(end) {
			t.Fatalf("it is %q, want %q", now, want)
		}
	}
}

// follow runs a source until the test ends.
func follow(t *testing.T, options source.Options, k *taker) *source.Source {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s, err := source.New(options)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Open(ctx); err != nil {
		t.Fatal(err)
	}
	s.Encapsulates(model.Encapsulation{GUEPort: 6080})
	var ended sync.WaitGroup
	ended.Go(func() { s.Follow(ctx, k.declare) })
	t.Cleanup(func() { cancel(); ended.Wait() })
	return s
}

// TestDirect: nodes send each other packets once agents say that their nodes open tunnels. An agent that is replaced
// changes nothing, and only Services with endpoints on a changed node are translated anew.
func TestDirect(t *testing.T) {
	ctx := t.Context()
	client := fake.NewClientset(node("10.0.0.1"), another("n2"), another("n3"), nodePort("web", "10.96.0.1", 30080), nodePort("other", "10.96.0.2", 30081), onNodes("web", "n1", "n2"), onNodes("other", "n3"),
		agents("n1 not", "n2", "n3"), tunnels(map[string]string{"n2_tunnel": "gue:6080", "n3_tunnel": "ipip"}))
	k, h := &taker{}, &heard{}
	h.taker = k
	follow(t, source.Options{Client: client, Node: "n1", Agents: "kube-system/agents", Direct: h.direct(time.Hour), Log: slog.New(slog.NewTextHandler(k, nil))}, k)
	const direct, here, none = "@direct dsr-gue n1=10.0.0.1*1 n2=10.0.0.2*1", "@here nat-destination 10.244.1.5*1", ", @here nat-destination"
	k.becomes(t, "at first", map[string]string{"web": direct + ", " + here, "other": "nat 10.244.3.5*1" + none})
	h.awaits(t, "[10.0.0.2 10.0.0.3]", "none")

	setAgents := func(slice *discoveryv1.EndpointSlice) {
		t.Helper()
		if _, err := client.DiscoveryV1().EndpointSlices("kube-system").Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	setTunnels := func(data map[string]string) {
		t.Helper()
		if _, err := client.CoreV1().ConfigMaps("kube-system").Update(ctx, tunnels(data), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	calls := func() int {
		k.mutex.Lock()
		defer k.mutex.Unlock()
		return k.moves
	}
	before := calls()
	marked := func(mark string, nodes ...string) *discoveryv1.EndpointSlice { // the mark shows when the agents are known
		s, node := agents(nodes...), "n5"
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{mark}, NodeName: &node})
		return s
	}
	setAgents(marked("10.0.0.55", "n1", "n2 not", "n3"))
	h.awaits(t, "[10.0.0.2 10.0.0.3 10.0.0.55]", "none")
	setAgents(marked("10.0.0.56", "n1"))
	setTunnels(map[string]string{"n1_tunnel": "gue:6080", "n2_tunnel": "gue:6080", "n3_tunnel": "ipip"})
	h.awaits(t, "[10.0.0.2 10.0.0.3 10.0.0.56]", "gue:6080")
	round := func(tunnels map[string]string, senders, entry string) { // when it is over, an earlier change is in force
		t.Helper()
		tunnels["n1_tunnel"] = entry
		setTunnels(tunnels)
		h.awaits(t, senders, entry)
	}
	round(map[string]string{"n2_tunnel": "gue:6080", "n3_tunnel": "ipip"}, "[10.0.0.2 10.0.0.3 10.0.0.56]", "gue:1")
	if now := calls(); now != before || k.outside("web") != direct+", "+here {
		t.Errorf("while an agent is replaced, services are declared %d times, and web has %s", now-before, k.outside("web"))
	}

	moved := agents("n1", "n2", "n3")
	moved.Endpoints[1].Addresses = []string{"10.0.9.2"}
	setAgents(moved)
	k.becomes(t, "a node gets another address", map[string]string{"web": "@direct dsr-gue n1=10.0.0.1*1 n2=10.0.9.2*1, " + here, "other": "nat 10.244.3.5*1" + none})
	h.awaits(t, "[10.0.0.3 10.0.0.56 10.0.9.2]", "gue:1")
	setTunnels(map[string]string{"n2_tunnel": "gue:6080", "n3_tunnel": "gue:6080"})
	k.becomes(t, "another node changes its tunnels", map[string]string{"other": "@direct dsr-gue n3=10.0.0.3*1" + none})
	setTunnels(map[string]string{"n3_tunnel": "gue:6080"})
	k.becomes(t, "an agent that is ready opens none any more", map[string]string{"web": "nat 10.244.1.5*1 10.244.2.5*1, " + here, "other": "@direct dsr-gue n3=10.0.0.3*1" + none})
	setAgents(marked("10.0.0.56", "n1", "n2 not", "n3"))
	h.awaits(t, "[10.0.0.2 10.0.0.3 10.0.0.56]", "none")
	round(map[string]string{"n3_tunnel": "gue:6080"}, "[10.0.0.2 10.0.0.3 10.0.0.56]", "gue:2")
	k.becomes(t, "it is replaced by one that may open none, either", map[string]string{"web": "nat 10.244.1.5*1 10.244.2.5*1, " + here})
	setTunnels(map[string]string{"n2_tunnel": "geneve:6081", "n3_tunnel": "gue:6080"})
	k.becomes(t, "it opens tunnels of another kind", map[string]string{"web": "nat 10.244.1.5*1 10.244.2.5*1, " + here})
	setTunnels(map[string]string{"n2_tunnel": "gue:6080", "n3_tunnel": "gue:6080"})
	k.becomes(t, "it opens tunnels again, and is not ready yet", map[string]string{"web": direct + ", " + here})

	if _, err := client.DiscoveryV1().EndpointSlices("default").Update(ctx, onNodes("web", "n1", "n2", "n4"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	k.becomes(t, "a pod is on a node without an agent", map[string]string{"web": "nat 10.244.1.5*1 10.244.2.5*1 10.244.4.5*1, " + here})
	setAgents(agents("n1", "n2", "n3", "n4 not"))
	k.becomes(t, "an agent starts there", map[string]string{"web": direct + ", " + here})
	setTunnels(map[string]string{"n2_tunnel": "gue:6080", "n3_tunnel": "gue:6080", "n4_tunnel": "gue:6080"})
	k.becomes(t, "it opens tunnels", map[string]string{"web": direct + " n4=10.0.0.4*1, " + here})
	h.awaits(t, "[10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.56]", "none")
}

// TestDirectAway: new connections avoid a node whose agent is away for long, or is not listed when this one starts; a
// fault names the agent that is listed and not ready; and what is known of a node that has gone is forgotten.
func TestDirectAway(t *testing.T) {
	ctx := t.Context()
	client := fake.NewClientset(node("10.0.0.1"), another("n2"), another("n3"), nodePort("web", "10.96.0.1", 30080), onNodes("web", "n1", "n2"), agents("n1"), tunnels(map[string]string{"n2_tunnel": "gue:6080"}))
	k, h := &taker{}, &heard{}
	h.taker = k
	s := follow(t, source.Options{Client: client, Node: "n1", Agents: "kube-system/agents", Direct: h.direct(time.Millisecond), Log: slog.New(slog.NewTextHandler(k, nil))}, k)
	faults := func(want string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			var now []string
			for _, f := range s.Status().Faults {
				now = append(now, f.Code+" "+f.Object)
			}
			if strings.Join(now, ", ") == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the faults are %q, want %q", now, want)
			}
		}
	}
	const here = ", @here nat-destination 10.244.1.5*1"
	k.becomes(t, "an agent is not listed", map[string]string{"web": "@direct dsr-gue n1=10.0.0.1*1" + here})
	faults("")
	for _, step := range []struct {
		agents              []string
		want, says, senders string
	}{
		{[]string{"n1", "n2"}, "@direct dsr-gue n1=10.0.0.1*1 n2=10.0.0.2*1", "", "[10.0.0.2]"},
		{[]string{"n1", "n2 not"}, "@direct dsr-gue n1=10.0.0.1*1 n2=10.0.0.2*0", "agent_away Node n2", "[10.0.0.2]"},
		{[]string{"n1", "n2"}, "@direct dsr-gue n1=10.0.0.1*1 n2=10.0.0.2*1", "", "[10.0.0.2]"},
		{[]string{"n1"}, "@direct dsr-gue n1=10.0.0.1*1", "", "[]"},
	} {
		if _, err := client.DiscoveryV1().EndpointSlices("kube-system").Update(ctx, agents(step.agents...), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		k.becomes(t, fmt.Sprintf("of the agents %v", step.agents), map[string]string{"web": step.want + here})
		faults(step.says)
		h.awaits(t, step.senders, "none")
	}
	k.says(t, "fault ended")
}

// TestDirectReusedAddress: a machine has the address of one that has just gone: the address is no longer that one's.
func TestDirectReusedAddress(t *testing.T) {
	client := fake.NewClientset(node("10.0.0.1"), another("n2"), another("n3"), nodePort("web", "10.96.0.1", 30080), onNodes("web", "n1", "n2", "n3"), agents("n1", "n2"), tunnels(map[string]string{"n2_tunnel": "gue:6080", "n3_tunnel": "gue:6080"}))
	k, h := &taker{}, &heard{}
	h.taker = k
	follow(t, source.Options{Client: client, Node: "n1", Agents: "kube-system/agents", Direct: h.direct(time.Hour), Log: slog.New(slog.NewTextHandler(k, nil))}, k)
	const here = ", @here nat-destination 10.244.1.5*1"
	k.becomes(t, "at first", map[string]string{"web": "@direct dsr-gue n1=10.0.0.1*1 n2=10.0.0.2*1" + here})
	if _, err := client.DiscoveryV1().EndpointSlices("kube-system").Update(t.Context(), agents("n1", "n3"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	k.becomes(t, "a machine replaces another", map[string]string{"web": "@direct dsr-gue n1=10.0.0.1*1 n3=10.0.0.2*1" + here})
}

// TestDirectPort: a node opens GUE at the port of its file, and sends to nodes with this port alone. A command that looks
// takes the port from the agent's entry.
func TestDirectPort(t *testing.T) {
	client := fake.NewClientset(node("10.0.0.1"), another("n2"), another("n3"), nodePort("web", "10.96.0.1", 30080), onNodes("web", "n1", "n2"), agents("n1", "n2"), tunnels(map[string]string{"n1_tunnel": "gue:7000", "n2_tunnel": "gue:7000"}))
	k, h := &taker{}, &heard{}
	options := source.Options{Client: client, Node: "n1", Agents: "kube-system/agents", Direct: h.direct(time.Hour), Log: slog.New(slog.NewTextHandler(k, nil))}
	const direct, here = "@direct dsr-gue n1=10.0.0.1*1 n2=10.0.0.2*1", "@here nat-destination 10.244.1.5*1"
	looks, err := source.New(options)
	if err != nil {
		t.Fatal(err)
	}
	if err := looks.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	first := &taker{}
	services, _ := looks.Current()
	if err := first.declare(daemon.Change{Whole: true, Declare: services}); err != nil {
		t.Fatal(err)
	}
	first.becomes(t, "a command looks", map[string]string{"web": direct + ", " + here})
	if d := looks.Decapsulation(); d == nil || !d.Tunnelled || fmt.Sprint(d.From, d.Nodes) != "[10.0.0.2/32] [10.0.0.1 10.0.0.2]" {
		t.Errorf("the node's part is %v", d)
	}
	opened := func(want string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			h.mutex.Lock()
			now := fmt.Sprint(h.opened)
			h.mutex.Unlock()
			if now == want {
				return
			} else if time.Now().After(end) {
				t.Fatalf("the node opens %s, want %s", now, want)
			}
		}
	}
	s := follow(t, options, k)
	k.becomes(t, "the file has port 6080", map[string]string{"web": "nat 10.244.1.5*1 10.244.2.5*1, " + here})
	opened("[gue:6080]")
	s.Encapsulates(model.Encapsulation{GUEPort: 7000})
	k.becomes(t, "the file has port 7000", map[string]string{"web": direct + ", " + here})
	opened("[gue:6080 gue:7000]")
}

// TestNoDirect: without the switch, the node has no part in direct return.
func TestNoDirect(t *testing.T) {
	k := &taker{}
	s := follow(t, source.Options{Client: fake.NewClientset(node("10.0.0.1"), another("n2"), another("n3"), nodePort("web", "10.96.0.1", 30080), onNodes("web", "n1")), Node: "n1", Log: slog.New(slog.NewTextHandler(k, nil))}, k)
	k.becomes(t, "at first", map[string]string{"web": "nat 10.244.1.5*1"})
	if d := s.Decapsulation(); d != nil {
		t.Errorf("the node's part is %v", d)
	}
	k.mutex.Lock()
	defer k.mutex.Unlock()
	if k.tells != "" {
		t.Errorf("it declares %s", k.tells)
	}
}

// TestDirectOptions: direct return needs to know the agents, and the ConfigMap.
func TestDirectOptions(t *testing.T) {
	options := source.Options{Client: fake.NewClientset(), Node: "n1", Direct: source.Direct{Tunnel: gue, Entries: "kube-system/tunnels"}, Log: slog.New(slog.DiscardHandler)}
	if _, err := source.New(options); err == nil || !strings.Contains(err.Error(), "needs the Service of the agents") {
		t.Errorf("without agents: %v", err)
	}
	options.Agents = "kube-system/agents"
	for _, wrong := range []string{"", "x", "x/y/z"} {
		options.Direct.Entries = wrong
		if _, err := source.New(options); err == nil || !strings.Contains(err.Error(), "tunnels is NAMESPACE/NAME") {
			t.Errorf("a ConfigMap called %q: %v", wrong, err)
		}
	}
}

func another(node string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
}

// TestDirectAwaitsPeers: an agent that starts while another one is replaced waits for its address, or until its patience ends. It awaits no node that
// has gone, and removes its entry, and no address of a family that the agents' Service has not.
func TestDirectAwaitsPeers(t *testing.T) {
	own := node("10.0.0.1")
	own.Status.Addresses = append(own.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "fd00::1"})
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "agents"}, Spec: corev1.ServiceSpec{ClusterIP: "None", IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}}}
	client := fake.NewClientset(own, another("n2"), service, nodePort("web", "10.96.0.1", 30080), onNodes("web", "n2"), agents("n1"), tunnels(map[string]string{"n2_tunnel": "gue:6080", "n9_tunnel": "gue:6080"}))
	open := func(patience time.Duration) (k *taker, s *source.Source, opened chan error) {
		k, h := &taker{}, &heard{}
		h.taker = k
		direct := h.direct(time.Hour)
		direct.Patience = patience
		s, err := source.New(source.Options{Client: client, Node: "n1", Agents: "kube-system/agents", Direct: direct, Log: slog.New(slog.NewTextHandler(k, nil))})
		if err != nil {
			t.Fatal(err)
		}
		opened = make(chan error, 1)
		go func() { opened <- s.Open(t.Context()) }()
		return k, s, opened
	}
	says := func(k *taker, text string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			k.mutex.Lock()
			log := k.log.String()
			k.mutex.Unlock()
			if strings.Contains(log, text) {
				return
			} else if time.Now().After(end) {
				t.Fatalf("no %q in %s", text, log)
			}
		}
	}
	k, _, opened := open(time.Millisecond)
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	says(k, "going on without them")
	says(k, "removed the tunnels of nodes that have gone from the ConfigMap\" nodes=[n9]")
	entries, err := client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "tunnels", metav1.GetOptions{})
	if err != nil || len(entries.Data) != 1 || entries.Data["n2_tunnel"] == "" {
		t.Errorf("the entries are %v, %v", entries.Data, err)
	}
	k, s, opened := open(time.Hour)
	says(k, "waiting for the agents of nodes that open tunnels")
	if _, err := client.DiscoveryV1().EndpointSlices("kube-system").Update(t.Context(), agents("n1", "n2 not"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	for _, service := range s.First() {
		if service.Policy.Tunnelled && len(service.Backends) != 1 {
			t.Errorf("at first, %s has the nodes %v", service.Name, service.Backends)
		}
	}
	if d := s.Decapsulation(); len(d.From) != 1 {
		t.Errorf("at first, it takes tunnels from %v", d.From)
	}
}
