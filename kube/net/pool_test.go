package net

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/kube/give"
	"github.com/shunt-lb/shunt/kube/pool"
	"github.com/shunt-lb/shunt/kube/translate"
)

// balanced is the spec of a Service of type LoadBalancer.
const balanced = "type: LoadBalancer, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]"

// addresses are the addresses in a Service's status.
func (b *bed) addresses(name string) (all []string) {
	b.t.Helper()
	service, err := b.client.CoreV1().Services("default").Get(within(b.t), name, metav1.GetOptions{})
	b.must(err)
	for _, i := range service.Status.LoadBalancer.Ingress {
		all = append(all, i.IP)
	}
	return all
}

// given waits until a Service has these addresses.
func (b *bed) given(name string, want ...string) {
	b.t.Helper()
	eventually(b.t, fmt.Sprintf("Service %s has %v", name, want), func() error {
		if has := b.addresses(name); !slices.Equal(has, want) {
			return fmt.Errorf("it has %v", has)
		}
		return nil
	})
}

// TestLoadBalancerPool: Services get addresses of the pool, which a client in their network finds by asking for them,
// and keep them: through a restart of the agent with a smaller pool, too. An address that cannot be had is an Event.
func TestLoadBalancerPool(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	front := b.Balancer.Interfaces()[0]
	b.node("n1", front.IPv4.Addr(), front.IPv6.Addr())
	b.node("n2")
	for i, node := range []string{"n1", "n1", "n2"} {
		b.pod(b.Backends[i], node, "web")
	}
	const first, second, six = "198.51.100.200", "198.51.100.201", "2001:db8:c::200"
	if !front.IPv4.Contains(netip.MustParseAddr(first)) || !front.IPv6.Contains(netip.MustParseAddr(six)) {
		t.Fatalf("the client is in the networks %s and %s, and the pool is not", front.IPv4, front.IPv6)
	}
	all := []string{"b1", "b2", "b3"}
	b.start("--load-balancer-pool", first+"-"+second+","+six)
	b.service("one", balanced+", ipFamilyPolicy: PreferDualStack")
	b.given("one", first, six)
	b.served(t, "tcp", at(first, 80), all...)
	b.served(t, "tcp", at(six, 80), all...)
	b.answered(t, "the node to its load balancer", func() (string, error) { return b.askInside(at(first, 80)) }, all...)
	b.service("two", balanced+", allocateLoadBalancerNodePorts: false")
	b.given("two", second)
	b.service("three", balanced)
	b.events(t, "three", "Warning NoAddressFree 1 it gets no IPv4 address: none of the pool's is free")
	b.service("other", balanced+", loadBalancerClass: example.org/other")
	b.service("asks", balanced+", loadBalancerIP: "+second)
	b.events(t, "asks", "Warning AddressRefused 1 it asks for the address "+second+", which Service default/two has")
	for _, name := range []string{"three", "other", "asks"} {
		if has := b.addresses(name); len(has) > 0 {
			t.Errorf("Service %s has got %v", name, has)
		}
	}

	b.must(b.client.CoreV1().Services("default").Delete(within(t), "one", metav1.DeleteOptions{}))
	b.given("three", first)
	b.events(t, "three", "Normal NoAddressFree 1 Ended")
	b.served(t, "tcp", at(first, 80), all...)

	b.must(b.agent.End(syscall.SIGTERM, patience))
	b.start("--load-balancer-pool", first)
	b.events(t, "two", "Warning AddressNotInPool 1 its address "+second+" is not in the pool: it keeps the address")
	b.given("two", second)
	b.served(t, "tcp", at(second, 80), all...)

	b.localAddress(t, first)

	// With another type it has no address of a load balancer any more, by the apiserver, and nobody else gets an
	// address that is not in the pool.
	two, err := b.client.CoreV1().Services("default").Get(within(t), "two", metav1.GetOptions{})
	b.must(err)
	two.Spec.Type, two.Spec.AllocateLoadBalancerNodePorts = corev1.ServiceTypeClusterIP, nil
	_, err = b.client.CoreV1().Services("default").Update(within(t), two, metav1.UpdateOptions{})
	b.must(err)
	b.given("two")
	b.events(t, "two", "Normal AddressNotInPool 1 Ended")
	b.unserved(t, at(second, 80))
	b.events(t, "asks", "Warning AddressRefused 1 it asks for the address "+second+", which is not in the pool")

	b.must(b.agent.End(syscall.SIGTERM, patience))
	b.start()
	b.service("later", balanced)
	b.served(t, "tcp", at(b.service("last", strings.Replace(balanced, "LoadBalancer", "ClusterIP", 1)).Spec.ClusterIP, 80), all...)
	if has := b.addresses("later"); len(has) > 0 {
		t.Errorf("without a pool, a Service has got %v", has)
	}
}

// localAddress: with the policy Local, a node answers for the address while it has an endpoint.
func (b *bed) localAddress(t *testing.T, address string) {
	three, err := b.client.CoreV1().Services("default").Get(within(t), "three", metav1.GetOptions{})
	b.must(err)
	three.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	_, err = b.client.CoreV1().Services("default").Update(within(t), three, metav1.UpdateOptions{})
	b.must(err)
	b.served(t, "tcp", at(address, 80), "b1", "b2")
	for _, pod := range []string{"b1", "b2"} {
		b.ready(pod, false)
	}
	b.isAt(t, address, "")
	b.answered(t, "the node, which has all endpoints", func() (string, error) { return b.askInside(at(address, 80)) }, "b3")
	b.ready("b2", true)
	b.served(t, "tcp", at(address, 80), "b2")
	b.ready("b1", true)
}

// neighbour is the hardware address that answers the client's ARP for an address; empty: nobody does.
func (b *bed) neighbour(address string) (mac string, err error) {
	if _, err := b.Client.Command(within(b.t), "ip", "neighbour", "flush", "dev", "eth0").CombinedOutput(); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(within(b.t), time.Second)
	defer cancel()
	_, _ = lab.Get(ctx, b.Client.HTTPClient(false), at(address, 80)) // which has it ask
	entry, err := b.Client.Command(within(b.t), "ip", "neighbour", "show", address).CombinedOutput()
	if err == nil && !strings.Contains(string(entry), address) {
		err = fmt.Errorf("it has not asked: %q", entry)
	}
	if _, found, ok := strings.Cut(string(entry), "lladdr "); ok {
		mac = strings.Fields(found)[0]
	}
	return mac, err
}

// isAt waits until a hardware address answers the client's ARP for an address; empty: until nobody does.
func (b *bed) isAt(t *testing.T, address, want string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the client's ARP for %s is answered by %q", address, want), func() error {
		mac, err := b.neighbour(address)
		if err == nil && mac != want {
			err = fmt.Errorf("it is by %q", mac)
		}
		return err
	})
}

// election holds, for TestElection, the slice of the agents, and the addresses by whether this node is to announce them.
type election struct {
	*bed
	agents *discoveryv1.EndpointSlice
	count  int
	here   map[bool][]string
}

// elects sets whether the agent of n2 is ready, and waits until the agent of n1 has elected.
func (e *election) elects(t *testing.T, second bool) {
	t.Helper()
	of := e.client.DiscoveryV1().EndpointSlices("kube-system")
	e.agents.Endpoints[1].Conditions.Ready = &second
	update := func() (err error) {
		_, err = of.Update(within(t), e.agents, metav1.UpdateOptions{})
		return err
	}
	if e.agent == nil {
		update = func() (err error) {
			_, err = of.Create(within(t), e.agents, metav1.CreateOptions{})
			return err
		}
	}
	e.must(update())
	if e.agent == nil {
		return
	}
	eventually(t, "the addresses that are announced here", func() error {
		if err := e.announced(t); err != nil {
			return err
		}
		if len(e.here[true])+len(e.here[false]) != e.count || len(e.here[false]) > 0 != second {
			return fmt.Errorf("they are %v", e.here)
		}
		return nil
	})
}

// announced asks the agent for the addresses that are to be announced.
func (e *election) announced(t *testing.T) error {
	_, out := e.run("shunt-kube", "status", "--socket", e.socket(), "-o", "json")
	var st struct {
		Cluster struct {
			Announced []struct {
				Address string
				Node    string
				Here    bool
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &st); err != nil {
		return fmt.Errorf("%w in %s", err, out)
	}
	e.here = map[bool][]string{}
	for _, a := range st.Cluster.Announced {
		if a.Here != (a.Node == "n1") {
			t.Errorf("it is %+v", a)
		}
		e.here[a.Here] = append(e.here[a.Here], a.Address)
	}
	return nil
}

// says waits until `shunt-kube status` has a text, or has it not.
func (e *election) says(t *testing.T, text string, has bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("the status has %q: %v", text, has), func() error {
		if _, out := e.run("shunt-kube", "status", "--socket", e.socket()); strings.Contains(out, text) != has {
			return errors.New(out)
		}
		return nil
	})
}

// announcedBy runs a shunt on another host of the client's segment, which is to have these addresses.
func (b *bed) announcedBy(t *testing.T, host *lab.Host, addresses []string) {
	t.Helper()
	folder, instance := t.TempDir(), b.instance+"-2"
	file, socket := filepath.Join(folder, "shunt.yaml"), filepath.Join(folder, "shunt.sock")
	b.must(os.WriteFile(file, fmt.Appendf(nil, `interfaces: [{name: eth0, attach: generic}]
services: [{name: web, address: [%s], port: 80, announce: l2, forwarding: nat, backends: [{address: %s, port: 8080}]}]
`, strings.Join(addresses, ", "), b.Client.Addr4()), 0o644))
	on := func(args ...string) *lab.Command {
		c := b.child("shunt", args...)
		there := host.Command(context.Background(), c.Path, args...)
		there.Env = c.Env
		return there
	}
	p, err := on("run", "--config", file, "--instance", instance, "--socket", socket).Spawn()
	b.must(err)
	t.Cleanup(func() {
		if err := p.End(syscall.SIGTERM, patience); err != nil {
			t.Errorf("the other node's shunt: %v\n%s", err, p.Log())
		}
		if out, err := on("detach", "--instance", instance).CombinedOutput(); err != nil && !strings.Contains(string(out), "nothing of it is on this machine") {
			t.Errorf("shunt detach: %v\n%s", err, out)
		}
	})
	b.awaits(p, "msg=running")
}

// TestElection: of two nodes whose agents are ready, each is to announce some of the addresses, and the other one
// stands by: when a node dies silently, the addresses are announced long before the cluster has noticed. When it is
// back, they are left to it, whether or not the cluster has noticed.
func TestElection(t *testing.T) {
	t.Parallel()
	b := newNode(t, "p1")
	front := b.Balancer.Interfaces()[0]
	b.node("n1", front.IPv4.Addr(), front.IPv6.Addr())
	b.node("n2")
	b.pod(b.Backends[0], "n1", "web")
	n2, err := b.AddHost("n2")
	b.must(err)
	b.must(b.ConnectPort(lab.End{Host: n2, Interface: "eth0", IPv4: netip.MustParsePrefix("10.0.0.99/24"), IPv6: netip.MustParsePrefix("2001:db8:1::99/64")}, b.Switch, "br0", lab.Cable{}))
	b.must(b.Ready(within(t)))
	nodes := []string{"n1", "n2"}
	e := &election{bed: b, count: 8, agents: &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "shunt-kube-1", Labels: map[string]string{discoveryv1.LabelServiceName: "shunt-kube", corev1.IsHeadlessService: ""}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}, NodeName: &nodes[0]}, {Addresses: []string{"192.0.2.2"}, NodeName: &nodes[1]}},
	}}
	e.elects(t, true)
	b.start("--load-balancer-pool", "10.0.0.200-10.0.0.207", "--agents", "kube-system/shunt-kube")
	for i := range e.count {
		b.service(fmt.Sprintf("w%d", i), balanced)
	}
	e.elects(t, true)
	own, other := e.here[true], e.here[false]
	if len(own) == 0 {
		t.Fatalf("n1 announces none: %v", e.here)
	}
	b.announcedBy(t, n2, other) // in the place of an agent on n2
	here, there := front.MAC.String(), n2.Interfaces()[0].MAC.String()
	b.isAt(t, own[0], here)
	b.served(t, "tcp", at(own[0], 80), "p1")
	for _, address := range other {
		b.isAt(t, address, there)
	}
	e.says(t, "address_", false) // no condition: a standby is as it should be
	e.says(t, ": node n2 announces it", true)

	b.must(n2.SetUp("eth0", false))
	died := time.Now()
	eventually(t, "the address of a node that has died is served", func() error {
		ctx, cancel := context.WithTimeout(within(t), time.Second/4)
		defer cancel()
		_, err := lab.Get(ctx, b.Client.HTTPClient(false), at(other[0], 80))
		return err
	})
	t.Logf("the address of a node that has died is served after %v", time.Since(died).Round(time.Millisecond))
	for _, address := range other {
		b.served(t, "tcp", at(address, 80), "p1")
	}
	e.says(t, "no host answered for "+other[0], true)
	b.must(n2.SetUp("eth0", true)) // and the cluster has not noticed
	for _, address := range other {
		b.isAt(t, address, there)
	}
	e.says(t, "no host answered for ", false)

	b.must(n2.SetUp("eth0", false))
	b.served(t, "tcp", at(other[0], 80), "p1")
	e.elects(t, false) // the cluster has noticed
	e.says(t, "no host answered for ", false)
	b.served(t, "tcp", at(other[0], 80), "p1")

	b.must(n2.SetUp("eth0", true))
	e.elects(t, true)
	b.isAt(t, other[0], there)
	b.served(t, "tcp", at(own[0], 80), "p1")
}

// TestElectionByNetwork: addresses of a network in which this node has no interface are announced by the other node,
// regardless of the hash. The node gets an interface there, and says so itself, so it announces some of them; then it
// loses it again. Where no node is in the network, an Event says so.
func TestElectionByNetwork(t *testing.T) {
	t.Parallel()
	b := newNode(t, "p1")
	front := b.Balancer.Interfaces()[0]
	b.node("n1", front.IPv4.Addr(), front.IPv6.Addr())
	b.node("n2")
	b.pod(b.Backends[0], "n1", "web")
	n2, err := b.AddHost("n2")
	b.must(err)
	b.must(b.ConnectPort(lab.End{Host: n2, Interface: "eth0", IPv4: netip.MustParsePrefix("10.7.0.99/24"), IPv6: netip.MustParsePrefix("2001:db8:7777::99/64")}, b.Switch, "br0", lab.Cable{}))
	b.must(b.Ready(within(t)))
	ip := func(host *lab.Host, args ...string) {
		t.Helper()
		if out, err := host.Command(within(t), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v\n%s", args, err, out)
		}
	}
	ip(b.Client, "address", "add", "10.7.0.100/24", "dev", "eth0")
	nodes := []string{"n1", "n2"}
	e := &election{bed: b, count: 8, agents: &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "shunt-kube-1", Labels: map[string]string{discoveryv1.LabelServiceName: "shunt-kube", corev1.IsHeadlessService: ""}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}, NodeName: &nodes[0]}, {Addresses: []string{"192.0.2.2"}, NodeName: &nodes[1]}},
	}}
	e.elects(t, true)
	const n2s = "10.7.0.0/24,2001:db8:7777::/64"
	networks := b.client.CoreV1().ConfigMaps("kube-system")
	_, err = networks.Create(within(t), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "shunt-kube-networks"}, Data: map[string]string{"n2": n2s}}, metav1.CreateOptions{})
	b.must(err)
	entries := func(want map[string]string) {
		t.Helper()
		eventually(t, fmt.Sprintf("the nodes' networks are %v", want), func() error {
			now, err := networks.Get(within(t), "shunt-kube-networks", metav1.GetOptions{})
			if err == nil && !maps.Equal(now.Data, want) {
				err = fmt.Errorf("they are %v", now.Data)
			}
			return err
		})
	}
	announced := func(here func(int) bool, what string) {
		t.Helper()
		eventually(t, "n1 announces "+what, func() error {
			err := e.announced(t)
			if err == nil && (len(e.here[true])+len(e.here[false]) != e.count || !here(len(e.here[true]))) {
				err = fmt.Errorf("by whether n1 announces them: %v", e.here)
			}
			return err
		})
	}
	b.start("--load-balancer-pool", "10.7.0.200-10.7.0.207", "--agents", "kube-system/shunt-kube", "--load-balancer-networks", "kube-system/shunt-kube-networks")
	for i := range e.count {
		b.service(fmt.Sprintf("w%d", i), balanced)
	}
	apart := map[string]string{"n1": "10.0.0.0/24,10.88.0.0/24,2001:db8:1::/64,2001:db8:88::/64", "n2": n2s}
	entries(apart)
	announced(func(here int) bool { return here == 0 }, "none, because it is in another network")
	b.announcedBy(t, n2, e.here[false]) // in the place of an agent on n2
	other := n2.Interfaces()[0].MAC.String()
	for _, address := range e.here[false] {
		b.isAt(t, address, other)
	}

	ip(b.Balancer, "address", "add", "10.7.0.1/24", "dev", "eth0")
	entries(map[string]string{"n2": n2s})
	announced(func(here int) bool { return here > 0 && here < e.count }, "some, because it is in the network now")
	t.Logf("in the network, n1 announces %v", e.here[true])

	ip(b.Balancer, "address", "delete", "10.7.0.1/24", "dev", "eth0")
	entries(apart)
	announced(func(here int) bool { return here == 0 }, "none any more")
	for _, address := range e.here[false] {
		b.isAt(t, address, other)
	}

	_, err = networks.Patch(within(t), "shunt-kube-networks", types.MergePatchType, []byte(`{"data": {"n2": "10.0.0.0/24"}}`), metav1.PatchOptions{})
	b.must(err)
	announced(func(here int) bool { return here > 0 }, "some, because no node is in the network")
	for i := range e.count {
		b.events(t, fmt.Sprintf("w%d", i), "Warning AddressNotInNetwork 1 its address "+b.addresses(fmt.Sprintf("w%d", i))[0]+" is announced by node n")
	}
	ip(b.Balancer, "address", "add", "10.7.0.1/24", "dev", "eth0")
	b.events(t, "w0", "Normal AddressNotInNetwork 1 Ended")
	announced(func(here int) bool { return here == e.count }, "all, because it alone is in the network")
}

// TestGivers: of several agents one gives, another one follows, and no address is given twice.
func TestGivers(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	addresses, err := pool.Parse([]string{"198.51.100.100-198.51.100.139"})
	b.must(err)
	var running sync.WaitGroup
	defer running.Wait()
	var givers []*give.Giver
	ends := map[string]context.CancelFunc{}
	for i := range 3 {
		name := fmt.Sprintf("n%d", i+1)
		g, err := give.New(give.Options{Client: b.client, Lease: "kube-system/shunt-kube", Node: name, Pool: addresses, Ours: (&translate.Translator{}).Balances, Log: slog.New(slog.DiscardHandler)})
		b.must(err)
		ctx, end := context.WithCancel(t.Context())
		defer end()
		givers, ends[name] = append(givers, g), end
		running.Go(func() { g.Run(ctx) })
	}
	holder := func() (name string) {
		eventually(t, "an agent has the Lease", func() error {
			lease, err := b.client.CoordinationV1().Leases("kube-system").Get(within(t), "shunt-kube", metav1.GetOptions{})
			if err == nil && lease.Spec.HolderIdentity != nil {
				name = *lease.Spec.HolderIdentity
			}
			if name == "" {
				return errors.Join(err, errors.New("nobody has"))
			}
			return nil
		})
		return name
	}
	before := holder()
	var names []string
	make10 := func() {
		for range 10 {
			name := fmt.Sprintf("s%d", len(names))
			b.service(name, balanced)
			names = append(names, name)
			for _, g := range givers {
				g.Wake()
			}
		}
	}
	make10()
	ends[before]() // perhaps while it gives
	make10()
	after := ""
	eventually(t, "another agent has the Lease", func() error {
		if after = holder(); after == before {
			return fmt.Errorf("%s still has it", before)
		}
		return nil
	})
	make10()
	of := map[string]string{}
	for _, name := range names {
		eventually(t, "Service "+name+" has an address", func() error {
			has := b.addresses(name)
			if len(has) != 1 {
				return fmt.Errorf("it has %v", has)
			}
			if other := of[has[0]]; other != "" && other != name {
				t.Fatalf("%s and %s have both got %s", name, other, has[0])
			}
			of[has[0]] = name
			return nil
		})
	}
}
