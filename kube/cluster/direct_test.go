package cluster

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// direct is a cluster with a Service that clients outside use, and a load from there.
type direct struct {
	*test
	values map[string]any // of the chart
	web    *corev1.Service
	ways   []*way // of the load
	load   *load
}

// TestDirectReturn has a cluster go through the life of direct return between nodes, with clients outside that ask all the time:
//
//	shunt-kube comes, with gue and moving, to two nodes of three ─► NAT, and still so on three nodes
//	moving ends                                                  ─► direct return: pods see the client
//	agents are replaced; endpoints come and go                   ─► no connection is lost
//	gue ─► ipip ─► "" (NAT) ─► gue                               ─► each new connection is served afterwards; lost ones are in the log
//	uninstalled                                                  ─► nothing is left
func TestDirectReturn(t *testing.T) {
	d := &direct{test: bringUp(t, options(t)), values: map[string]any{"directReturn": "gue", "moving": true, "nodeSelector": map[string]string{"agent": "wanted"}}}
	for _, n := range d.Nodes[:2] {
		ok(t, d.LabelNode(within(t), n, "agent", "wanted"))
	}
	ok(t, d.Install(within(t), d.values))
	d.serve(t)
	others := must(d.Serve(within(t), "other", false))(t)
	for _, pod := range d.pods {
		ok(t, d.label(within(t), &pod, "serves", "yes"))
	}
	d.web = must(d.Service(within(t), "web", "type: LoadBalancer, selector: {serves: 'yes'}, ipFamilyPolicy: PreferDualStack, "+
		"ports: [{name: http, port: 80, targetPort: 8080}, {name: dns, port: 53, targetPort: 5353, protocol: UDP}]", outer4, outer6))(t)
	hosts := must(d.Service(within(t), "hosts", "type: NodePort, selector: {app: host}, ports: [{port: 80, targetPort: 8080}]"))(t)

	d.awaitLevel(t, d.Nodes[:2], nat)
	d.explained(t, "web", "have nat, not direct return: connections from before are left to the host (--moving)")
	ok(t, d.LabelNode(within(t), d.Nodes[2], "agent", "wanted"))
	d.awaitAgents(t)
	d.awaitLevel(t, d.Nodes, nat)
	d.upgrade(t, "moving", false)
	d.awaitLevel(t, d.Nodes, "dsr-gue")

	// Clients in the cluster have NAT: at their sockets, or at tc.
	inside := []Client{d.From(&d.pods[0]), d.From(&d.hosts[0])}
	for _, a := range d.addresses(d.Nodes[:1]) {
		d.answers(inside, "inside, "+a.ip.String(), a.ip.String(), a.tcp, a.udp, Names(d.pods))
	}
	d.answers(append(inside, d.FromOutside()), "node port of servers in the nodes' network", d.Nodes[0].Addr4().String(), hosts.Spec.Ports[0].NodePort, 0, Names(d.hosts))
	d.explained(t, "hosts", "have nat, not direct return: endpoint", "has the address of its node")
	t.Run("long packets", d.longPackets)
	t.Run("pods in gVisor", func(t *testing.T) { d.sandboxed(t, d.web, d.Nodes[0]) }) // KNOWN_ISSUES.md: another node's node port

	d.begin(t)
	d.step(t, "1 nothing changes", keptAll|newAll, func() {})
	d.step(t, "2 agents are replaced in turn", keptAll|newAll, func() { d.replace(t, func() { d.restart(t) }) })
	d.step(t, "3 all agents are deleted", keptAll|newAll, func() {
		d.replace(t, func() {
			for name := range d.agents(t) {
				ok(t, d.Client.CoreV1().Pods(Namespace).Delete(within(t), name, metav1.DeleteOptions{}))
			}
		})
	})
	for i, label := range []string{"yes", "no", "yes", "no"} { // with "no", a connection that has just gone to such a pod is lost
		d.step(t, fmt.Sprintf("4.%d endpoints change", i+1), keptAll, func() { d.serveToo(t, label, others[i/2:]...) })
	}
	d.step(t, "5 from gue to ipip", 0, func() { d.upgrade(t, "directReturn", "ipip") })
	d.awaitLevel(t, d.Nodes, "dsr-ipip")
	d.step(t, "6 from ipip to NAT", 0, func() { d.upgrade(t, "directReturn", "") })
	d.awaitLevel(t, d.Nodes, nat)
	if _, err := d.tunnels(t); !apierrors.IsNotFound(err) {
		t.Errorf("without direct return, the ConfigMap of the tunnels: %v", err)
	}
	d.step(t, "7 from NAT to gue", 0, func() { d.upgrade(t, "directReturn", "gue") })
	d.awaitLevel(t, d.Nodes, "dsr-gue")
	d.load.end()
	t.Log("failed of all, by step: new connections, and questions on connections that are kept\n" + d.load.String())
	t.Run("uninstall", d.uninstalls)
}

var outer4, outer6 = netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:203::10")

// nat is the forwarding of a Service without direct return.
const nat = "nat"

func (d *direct) awaitAgents(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	ok(t, Eventually(ctx, func() error {
		agents, err := d.Cluster.pods(ctx, Namespace, "shunt-kube")
		if err == nil && len(agents) != len(d.Nodes) {
			err = fmt.Errorf("%d of %d nodes have an agent", len(agents), len(d.Nodes))
		}
		return err
	}))
	ok(t, d.AwaitAgents(ctx))
}

// upgrade changes a value of the chart, and waits for the agents that follow.
func (d *direct) upgrade(t *testing.T, value string, to any) {
	t.Helper()
	d.values[value] = to
	d.replace(t, func() { ok(t, d.Install(within(t), d.values)) })
}

// replace waits until other agents have followed those of now.
func (d *direct) replace(t *testing.T, how func()) {
	t.Helper()
	before := d.agents(t)
	how()
	d.awaitOthers(t, before)
}

// restart does as `kubectl rollout restart`.
func (d *direct) restart(t *testing.T) {
	t.Helper()
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`, time.Now().Format(time.RFC3339))
	must(d.Client.AppsV1().DaemonSets(Namespace).Patch(within(t), Release, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
}

// tunnels returns the ConfigMap in which agents say which tunnels their nodes open.
func (d *direct) tunnels(t *testing.T) (*corev1.ConfigMap, error) {
	return d.Client.CoreV1().ConfigMaps(Namespace).Get(within(t), Release+"-tunnels", metav1.GetOptions{})
}

// address is an address of the Service, with its ports.
type address struct {
	ip       netip.Addr
	tcp, udp int32
}

// addresses are the Service's node ports at nodes, and the load balancer's addresses.
func (d *direct) addresses(nodes []*Node) []address {
	all := []address{{outer4, 80, 53}, {outer6, 80, 53}}
	for _, n := range nodes {
		for _, ip := range []netip.Addr{n.Addr4(), n.Addr6()} {
			all = append(all, address{ip, d.web.Spec.Ports[0].NodePort, d.web.Spec.Ports[1].NodePort})
		}
	}
	return all
}

// awaitLevel waits until the client outside is served at all addresses, by each pod, with a forwarding: by direct return each pod sees the
// client's address, and by NAT none does. shunt-kube explains which it is.
func (d *direct) awaitLevel(t *testing.T, nodes []*Node, forwarding string) {
	t.Helper()
	begin := time.Now()
	for _, a := range d.addresses(nodes) {
		for network, port := range map[string]int32{"tcp": a.tcp, "udp": a.udp} {
			ok(t, Eventually(within(t), func() error { return d.asIs(t.Context(), network, At(a.ip.String(), port), forwarding != nat) }))
		}
	}
	t.Logf("by %s at all addresses after %s", forwarding, time.Since(begin).Round(time.Millisecond))
	if forwarding == nat {
		d.explained(t, "web", "by nat, as service default/web:http")
		return
	}
	wants := []string{"by " + forwarding + ", as service default/web:http@direct", "by " + forwarding + ", as service default/web:dns@direct-ipv6", "by nat-destination, as service default/web:http@here"}
	for _, n := range d.Nodes {
		wants = append(wants, fmt.Sprintf("%s (%s, weight 1)", n.Name(), n.Addr4()), fmt.Sprintf("%s (%s, weight 1)", n.Name(), n.Addr6()))
	}
	d.explained(t, "web", wants...)
	word := map[string]string{"dsr-gue": "gue:6080", "dsr-ipip": "ipip"}[forwarding]
	if entries := must(d.tunnels(t))(t).Data; !maps.Equal(entries, map[string]string{"n1_tunnel": word, "n2_tunnel": word, "n3_tunnel": word}) {
		t.Errorf("the agents' entries are %v", entries)
	}
}

// asIs asks at an address many times.
func (d *direct) asIs(ctx context.Context, network, at string, client bool) error {
	seen := map[string]bool{}
	for range 24 {
		answer, err := d.FromOutside().Ask(ctx, network, at)
		if err != nil {
			return fmt.Errorf("%s %s: after %v: %w", network, at, slices.Sorted(maps.Keys(seen)), err)
		}
		remote, err := netip.ParseAddrPort(answer.Remote)
		if err != nil {
			return err
		}
		if ip := remote.Addr().Unmap(); (ip == d.Outside.Addr4() || ip == d.Outside.Addr6()) != client {
			return fmt.Errorf("%s %s: pod %s sees %s; the client's address is wanted: %t", network, at, answer.Backend, ip, client)
		}
		seen[answer.Backend] = true
	}
	if got := slices.Sorted(maps.Keys(seen)); !slices.Equal(got, slices.Sorted(slices.Values(Names(d.pods)))) {
		return fmt.Errorf("%s %s is answered by %v", network, at, got)
	}
	return nil
}

// explained: `shunt-kube explain` in the agent's environment says this.
func (d *direct) explained(t *testing.T, service string, wants ...string) {
	t.Helper()
	text, code := d.command(t, "explain", "default/"+service)
	for _, want := range wants {
		if code != 0 || !strings.Contains(text, want) {
			t.Errorf("explain %s: exit code %d, and no %q in\n%s", service, code, want, text)
		}
	}
}

// longPackets: a client's packets that fill the network's MTU do not fit into outer headers, and the client hears of it.
func (d *direct) longPackets(t *testing.T) {
	const size = 20000
	for _, a := range d.addresses(d.Nodes) {
		for range 6 { // to other nodes, by tunnels, too
			session := must(d.Outside.OpenSession(within(t), "tcp", netip.AddrPort{}, At(a.ip.String(), a.tcp)))(t)
			answer := must(session.Ask(within(t), "/"+strings.Repeat("x", size)))(t)
			session.Close()
			if len(answer.Path) != size+1 {
				t.Errorf("%s: of a question of %d bytes, %s got %d", a.ip, size+1, answer.Backend, len(answer.Path))
			}
		}
	}
}

// keptByWay is the number of connections of a way that are open throughout.
const keptByWay = 4

// pace is the time between two turns of a way: eight ways leave most of two CPUs to the cluster.
const pace = 10 * time.Millisecond

// begin starts the load: at a load balancer's addresses, which are on n1, and at node ports of the other nodes.
func (d *direct) begin(t *testing.T) {
	t.Helper()
	for _, a := range d.addresses([]*Node{d.Nodes[1]}) {
		for network, port := range map[string]int32{"tcp": a.tcp, "udp": a.udp} {
			w := d.wayFromOutside(network+" "+At(a.ip.String(), port), network, At(a.ip.String(), port))
			for range keptByWay {
				w.held = append(w.held, must(w.hold(within(t)))(t))
			}
			d.ways = append(d.ways, w)
		}
	}
	d.load = newLoad(t.Context(), d.ways, pace)
	t.Cleanup(d.load.end)
}

// whole has the kinds of connections of which a step may lose none.
type whole int

const (
	keptTCP whole = 1 << iota
	keptUDP
	newTCP
	newUDP
	keptAll = keptTCP | keptUDP
	newAll  = newTCP | newUDP
)

// covers reports whether no connection of a way may be lost.
func (w whole) covers(of *way, kept bool) bool {
	kind := map[bool]whole{true: keptTCP, false: newTCP}[kept]
	if strings.HasPrefix(of.name, "udp") {
		kind <<= 1
	}
	return w&kind != 0
}

// step does something, and waits until all kept connections have been asked afterwards. New connections must be served afterwards, and
// meanwhile the connections of some kinds, too.
func (d *direct) step(t *testing.T, name string, kinds whole, do func()) {
	t.Helper()
	d.load.enter(name)
	begin := time.Now()
	do()
	took := time.Since(begin).Round(time.Millisecond)
	after := name + ", afterwards"
	d.load.enter(after)
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	ok(t, Eventually(ctx, func() error {
		for _, w := range d.ways {
			if _, asked := d.load.counted(after, keptName(w)); asked <= 2*keptByWay {
				return fmt.Errorf("%s: %s: %d questions", after, w.name, asked)
			}
		}
		return nil
	}))
	for _, w := range d.ways {
		d.intact(t, after, w.name)
		for _, when := range []string{name, after} {
			if kinds.covers(w, false) {
				d.intact(t, when, w.name)
			}
			if kinds.covers(w, true) {
				d.intact(t, when, keptName(w))
			}
		}
	}
	t.Logf("%s: %s; lost %s", name, took, d.lost(name, after))
}

// intact: no connection of a way is lost in a step.
func (d *direct) intact(t *testing.T, step, way string) {
	t.Helper()
	if failed, of := d.load.counted(step, way); failed > 0 {
		t.Errorf("%s: %s: %d of %d failed: %v", step, way, failed, of, d.load.first(step, way))
	}
}

// lost returns the numbers of all ways together, in some steps.
func (d *direct) lost(steps ...string) string {
	sums := map[string]*[2]int{}
	for _, w := range d.ways {
		for name, kind := range map[string]string{w.name: "new", keptName(w): "kept"} {
			kind += " " + w.name[:len("tcp")]
			if sums[kind] == nil {
				sums[kind] = &[2]int{}
			}
			for _, step := range steps {
				failed, of := d.load.counted(step, name)
				sums[kind][0], sums[kind][1] = sums[kind][0]+failed, sums[kind][1]+of
			}
		}
	}
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(sums)) {
		all = append(all, fmt.Sprintf("%s %d of %d", kind, sums[kind][0], sums[kind][1]))
	}
	return strings.Join(all, ", ")
}

// serveToo adds pods to the Service's endpoints, or takes them away, and waits until nodes know.
func (d *direct) serveToo(t *testing.T, label string, pods ...corev1.Pod) {
	t.Helper()
	by := Names(d.pods)
	for _, pod := range pods {
		ok(t, d.label(within(t), &pod, "serves", label))
		if label == "yes" {
			by = append(by, pod.Name)
		}
	}
	for _, a := range d.addresses(d.Nodes) {
		must(d.FromOutside().Served(within(t), "tcp", At(a.ip.String(), a.tcp), by...))(t)
	}
}
