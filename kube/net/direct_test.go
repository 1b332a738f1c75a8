package net

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
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
	"k8s.io/client-go/tools/clientcmd"

	"github.com/shunt-lb/shunt/internal/lab"
)

// directBed is three nodes of a cluster behind a router, each with an agent and a pod. The control plane is on loopback of n1, where
// the test brings the connections of the other agents:
//
//	client ─── router ─── switch ─┬─ n1 ─── p1
//	                              ├─ n2 ─── p2
//	                              └─ n3 ─── p3
type directBed struct {
	*bed
	mesh   *lab.Mesh
	agents []*lab.Process
	more   string // settings of the agents' files
}

// The addresses of the Service of type LoadBalancer.
var directVIPs = []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}

// directTunnels is the ConfigMap of the chart.
const directTunnels = "shunt-kube-tunnels"

func newDirectBed(t *testing.T) *directBed {
	t.Helper()
	binary := needsPlane(t)
	mesh, err := lab.BuildMesh(within(t), unique("kd"), 3, 0)
	if err != nil {
		t.Fatal(err)
	}
	b := &directBed{mesh: mesh, agents: make([]*lab.Process, 3)}
	b.bed = &bed{Topology: &lab.Topology{Lab: mesh.Lab, Client: mesh.Client, Balancer: mesh.Machines[0], Switch: mesh.Switch}, t: t, folder: t.TempDir()}
	t.Cleanup(b.close)
	for i, m := range mesh.Machines {
		pods, err := b.AddPods(m, "cni0", podsOf(i, false), podsOf(i, true), fmt.Sprintf("p%d", i+1))
		b.must(err)
		b.Backends = append(b.Backends, pods...)
		b.must(m.SetForwarding(true))
		for j, other := range mesh.Machines {
			if i != j {
				b.must(errors.Join(m.AddRoute(lab.Route{To: podsOf(j, false).Masked(), Via: other.Addr4()}), m.AddRoute(lab.Route{To: podsOf(j, true).Masked(), Via: other.Addr6()})))
			}
		}
	}
	b.must(mesh.Ready(within(t)))
	b.servePods()
	b.control(binary)
	settings, err := clientcmd.BuildConfigFromFlags("", b.kubeconfig())
	b.must(err)
	server, err := url.Parse(settings.Host)
	b.must(err)
	for _, m := range mesh.Machines[1:] {
		b.forward(m, server.Host)
	}
	for i, m := range mesh.Machines {
		b.node(fmt.Sprintf("n%d", i+1), m.Addr4(), m.Addr6())
	}
	_, err = b.client.CoreV1().ConfigMaps("kube-system").Create(within(t), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: directTunnels}}, metav1.CreateOptions{})
	b.must(err)
	for _, six := range []bool{false, true} {
		slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("shunt-kube-%t", six), Labels: map[string]string{discoveryv1.LabelServiceName: "shunt-kube", corev1.IsHeadlessService: ""}},
			AddressType: discoveryv1.AddressTypeIPv4}
		for i, m := range mesh.Machines {
			address, node := m.Addr4(), fmt.Sprintf("n%d", i+1)
			if six {
				slice.AddressType, address = discoveryv1.AddressTypeIPv6, m.Addr6()
			}
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{address.String()}, NodeName: &node})
		}
		_, err := b.client.DiscoveryV1().EndpointSlices("kube-system").Create(within(t), slice, metav1.CreateOptions{})
		b.must(err)
	}
	return b
}

// podsOf is the network of a node's pods.
func podsOf(n int, six bool) netip.Prefix {
	if six {
		return netip.MustParsePrefix(fmt.Sprintf("2001:db8:88:%d::1/64", n+1))
	}
	return netip.MustParsePrefix(fmt.Sprintf("10.88.%d.1/24", n+1))
}

// forward brings connections to an address on a machine's loopback to the same address on n1.
func (b *directBed) forward(m *lab.Host, address string) {
	b.t.Helper()
	listener, err := m.Listen("tcp", address)
	b.must(err)
	var open sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	open.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			open.Go(func() {
				defer near.Close()
				far, err := b.Balancer.Dial(ctx, "tcp", address)
				if err != nil {
					return // the agent sees its connection end
				}
				defer far.Close()
				defer context.AfterFunc(ctx, func() { near.Close(); far.Close() })()
				var both sync.WaitGroup
				for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
					both.Go(func() { _, _ = io.Copy(way[0], way[1]); near.Close(); far.Close() })
				}
				both.Wait()
			})
		}
	})
	b.t.Cleanup(func() { listener.Close(); cancel(); open.Wait() })
}

func (b *directBed) name(n int) string { return fmt.Sprintf("kube-%d-n%d", os.Getpid(), n+1) }
func (b *directBed) file(n int, suffix string) string {
	return filepath.Join(b.folder, b.name(n)+suffix)
}

// on is this binary as a command on a node.
func (b *directBed) on(n int, program string, args ...string) *lab.Command {
	self, err := os.Executable()
	b.must(err)
	c := b.mesh.Machines[n].Command(context.Background(), self, args...)
	c.Env = append(os.Environ(), childVariable+"="+program)
	return c
}

// agent starts an agent, with more settings in its file and more flags.
func (b *directBed) agent(n int, settings string, more ...string) *lab.Process {
	b.t.Helper()
	file := b.file(n, ".yaml")
	b.must(os.WriteFile(file, []byte("interfaces: [{name: eth0, attach: native}, {name: cni0, attach: tc}]\nlimits: {flows: 20000}\n"+settings), 0o644))
	p, err := b.on(n, "shunt-kube", append([]string{"run", "--config", file, "--instance", b.name(n), "--socket", b.file(n, ".sock"), "--kubeconfig", b.kubeconfig(), "--node-name", fmt.Sprintf("n%d", n+1),
		"--agents", "kube-system/shunt-kube", "--direct-return-tunnels", "kube-system/" + directTunnels}, more...)...).Spawn()
	b.must(err)
	return p
}

// begin starts agents, which are in step afterwards.
func (b *directBed) begin(nodes []int, more ...string) {
	b.t.Helper()
	for _, n := range nodes {
		b.agents[n] = b.agent(n, b.more, more...)
	}
	for _, n := range nodes {
		b.awaits(b.agents[n], "in step with the cluster")
	}
}

func (b *directBed) end(n int, signal syscall.Signal) {
	b.t.Helper()
	p := b.agents[n]
	b.agents[n] = nil
	if err := p.End(signal, patience); err != nil && signal != syscall.SIGKILL {
		b.t.Errorf("shunt-kube on n%d: %v\n%s", n+1, err, p.Log())
	}
}

func (b *directBed) close() {
	for n := range b.mesh.Machines {
		if b.agents[n] != nil {
			if b.t.Failed() {
				status, _ := b.on(n, "shunt", "status", "--all", "--instance", b.name(n), "--socket", b.file(n, ".sock")).CombinedOutput()
				b.t.Logf("n%d:\n%s\n%s", n+1, b.agents[n].Log(), status)
			}
			b.end(n, syscall.SIGINT)
		}
		if out, err := b.on(n, "shunt", "detach", "--instance", b.name(n)).CombinedOutput(); err != nil && !strings.Contains(string(out), "nothing of it is on this machine") {
			b.t.Errorf("shunt detach: %v\n%s", err, out)
		}
		_ = os.Remove("/var/lib/shunt/" + b.name(n) + ".overrides.json")
	}
	b.endPlane()
	if err := b.Close(); err != nil {
		b.t.Error(err)
	}
}

// entries waits until the ConfigMap has these entries.
func (b *directBed) entries(want string) {
	b.t.Helper()
	eventually(b.t, "the entries are "+want, func() error {
		object, err := b.client.CoreV1().ConfigMaps("kube-system").Get(within(b.t), directTunnels, metav1.GetOptions{})
		if err == nil && fmt.Sprint(object.Data) != want {
			err = fmt.Errorf("they are %v", object.Data)
		}
		return err
	})
}

// ways are the addresses and ports of a Service for clients outside: the load balancer's, and node ports of all nodes.
func (b *directBed) ways(service *corev1.Service) (all []way) {
	for i, network := range []string{"tcp", "udp"} {
		for _, vip := range directVIPs {
			all = append(all, way{network, netip.AddrPortFrom(vip, uint16(service.Spec.Ports[i].Port))})
		}
		for _, m := range b.mesh.Machines {
			for _, a := range []netip.Addr{m.Addr4(), m.Addr6()} {
				all = append(all, way{network, netip.AddrPortFrom(a, uint16(service.Spec.Ports[i].NodePort))})
			}
		}
	}
	return all
}

type way struct {
	network string
	netip.AddrPort
}

func (w way) String() string { return w.network + " " + w.AddrPort.String() }

// reached waits until the client reaches these pods by each of the ways, and they see the client itself, or a node.
func (b *directBed) reached(ways []way, direct bool, pods ...string) {
	b.t.Helper()
	for _, w := range ways {
		own := b.Client.Addr4()
		if w.Addr().Is6() {
			own = b.Client.Addr6()
		}
		b.answered(b.t, fmt.Sprintf("%s, direct return %t", w, direct), func() (string, error) {
			answer, err := b.ask(w.network, w.AddrPort.String())
			if err != nil {
				return "", err
			}
			from, err := netip.ParseAddrPort(answer.Remote)
			if err == nil && (from.Addr().Unmap() == own) != direct {
				err = fmt.Errorf("%s sees %s", answer.Backend, answer.Remote)
			}
			return answer.Backend, err
		}, pods...)
	}
}

// flow is a client's flow with the pod that it began with.
type flow struct {
	*lab.Session
	pod string
}

// flows begins some flows by each of the ways.
func (b *directBed) flows(ways []way) (all []*flow) {
	b.t.Helper()
	for _, w := range ways {
		for range 4 {
			s, err := b.Client.OpenSession(within(b.t), w.network, netip.AddrPort{}, w.AddrPort.String())
			b.must(err)
			b.t.Cleanup(func() { _ = s.Close() })
			all = append(all, &flow{Session: s})
		}
	}
	b.goOn("begin", all)
	return all
}

// goOn asks once more on all flows. A datagram may be lost, as on any network, but no flow changes its pod.
func (b *directBed) goOn(what string, all []*flow) {
	b.t.Helper()
	for _, f := range all {
		ctx, cancel := context.WithTimeout(b.t.Context(), 10*time.Second)
		answer, err := f.Ask(ctx, "/asked")
		cancel()
		if f.pod == "" {
			f.pod = answer.Backend
		}
		if err != nil || answer.Backend != f.pod {
			b.t.Fatalf("%s: a flow from %s to %s with %s is answered by %q: %v", what, f.LocalAddr(), f.RemoteAddr(), f.pod, answer.Backend, err)
		}
	}
}

// TestDirectReturn: pods of other nodes see the address of a client outside, and answer past the node that the packets came to, at node ports and at a load balancer's
// address. Agents that are killed and started again break nothing. An agent without the switch, and one that detaches, bring the
// Service back to NAT.
func TestDirectReturn(t *testing.T) {
	t.Parallel()
	b := newDirectBed(t)
	b.pod(b.Backends[1], "n2", "web")
	b.pod(b.Backends[2], "n3", "web")
	b.pod(b.Backends[0], "n1", "alone")
	const ports = "ports: [{name: http, port: 80, targetPort: 8080}, {name: dns, port: 53, targetPort: 5353, protocol: UDP}]"
	web := b.service("web", "type: LoadBalancer, selector: {app: web}, ipFamilyPolicy: PreferDualStack, "+ports)
	sticky := b.service("sticky", "type: NodePort, selector: {app: web}, sessionAffinity: ClientIP, "+ports)
	for _, vip := range directVIPs {
		web.Status.LoadBalancer.Ingress = append(web.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: vip.String()})
		b.must(b.mesh.Lead(vip, b.mesh.Machines[0]))
	}
	_, err := b.client.CoreV1().Services("default").UpdateStatus(within(t), web, metav1.UpdateOptions{})
	b.must(err)
	ways, all := b.ways(web), []int{0, 1, 2}

	t.Run("a file with decapsulation is refused", func(t *testing.T) {
		p := b.agent(0, "decapsulation: {from: [10.0.0.0/24]}\n", "--direct-return", "gue")
		eventually(t, "the agent ends", func() error {
			select {
			case <-p.Ended:
				return nil
			default:
				return errors.New(p.Log())
			}
		})
		if says := p.Log(); p.Err() == nil || !strings.Contains(says, "direct return between nodes") || !strings.Contains(says, "it has `decapsulation`") {
			t.Errorf("it ends with %v, and says\n%s", p.Err(), says)
		}
		b.entries("map[]")
	})
	for _, tunnel := range []string{"gue", "ipip"} {
		if t.Failed() {
			break
		}
		t.Run(tunnel, func(t *testing.T) {
			defer func(whole *testing.T) { b.t = whole }(b.t)
			b.t = t
			b.more = map[string]string{"gue": "encapsulation: {gue_port: 6081}\n"}[tunnel]
			b.begin(all, "--direct-return", tunnel)
			entry := map[string]string{"gue": "gue:6081", "ipip": "ipip"}[tunnel]
			b.entries(fmt.Sprintf("map[n1_tunnel:%s n2_tunnel:%[1]s n3_tunnel:%[1]s]", entry))
			b.reached(ways, true, "p2", "p3")
			b.sendsLong(t)
			b.fromInside(t, ways)
			first, err := b.ask("tcp", at(b.mesh.Machines[0].Addr4().String(), sticky.Spec.Ports[0].NodePort))
			b.must(err)
			b.served(t, "tcp", at(b.mesh.Machines[0].Addr4().String(), sticky.Spec.Ports[0].NodePort), first.Backend)
			held := b.flows(ways)
			for _, n := range all {
				b.end(n, syscall.SIGKILL)
			}
			b.goOn("without agents", held)
			b.begin(all, "--direct-return", tunnel)
			b.goOn("taken over", held)
			b.end(1, syscall.SIGTERM) // its data plane goes on
			b.goOn("without one agent", held)
			b.reached(ways[:2], true, "p2", "p3")
			b.begin([]int{1}, "--direct-return", tunnel)
			b.goOn("with the next agent", held)
			b.entries(fmt.Sprintf("map[n1_tunnel:%s n2_tunnel:%[1]s n3_tunnel:%[1]s]", entry))
			for _, f := range held {
				_ = f.Close()
			}
			b.counts(t)
			if tunnel == "ipip" {
				return // from here on, the tunnels do not matter
			}

			b.end(1, syscall.SIGTERM)
			b.begin([]int{1}) // without the switch
			b.entries(fmt.Sprintf("map[n1_tunnel:%s n3_tunnel:%[1]s]", entry))
			b.reached(ways, false, "p2", "p3")
			b.end(1, syscall.SIGTERM)
			b.begin([]int{1}, "--direct-return", tunnel)
			b.reached(ways, true, "p2", "p3")

			b.end(2, syscall.SIGINT) // it detaches, and its pod stays
			b.entries(fmt.Sprintf("map[n1_tunnel:%s n2_tunnel:%[1]s]", entry))
			b.reached(slices.DeleteFunc(slices.Clone(ways), func(w way) bool {
				return w.Addr() == b.mesh.Machines[2].Addr4() || w.Addr() == b.mesh.Machines[2].Addr6()
			}), false, "p2", "p3")
			b.end(0, syscall.SIGINT)
			b.end(1, syscall.SIGINT)
			b.entries("map[]")
		})
	}
}

// sendsLong has the client send more than fits into one packet, through cables whose MTU has no room for outer headers.
func (b *directBed) sendsLong(t *testing.T) {
	t.Helper()
	for _, vip := range directVIPs {
		for range 4 { // to both pods
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			if _, err := lab.Upload(ctx, b.Client.HTTPClient(false), netip.AddrPortFrom(vip, 80).String(), 1<<20); err != nil {
				t.Errorf("1 MiB to %s: %v", vip, err)
			}
			cancel()
		}
	}
}

// fromInside asks from a pod of n1 whose sockets are not served. The endpoints see the address of n1 towards them, because answers past n1
// could come from the node's own address.
func (b *directBed) fromInside(t *testing.T, ways []way) {
	t.Helper()
	n1 := b.mesh.Machines[0]
	for _, w := range ways {
		if slices.Contains([]netip.Addr{directVIPs[0], directVIPs[1], n1.Addr4(), n1.Addr6()}, w.Addr()) {
			b.answered(t, "a pod asks "+w.String(), func() (string, error) {
				answer, err := askFrom(b.Backends[0], w.network, w.AddrPort.String())
				if from, e := netip.ParseAddrPort(answer.Remote); err == nil && (e != nil || from.Addr().Unmap() != n1.Addr4() && from.Addr().Unmap() != n1.Addr6()) {
					err = fmt.Errorf("%s sees %s; %w", answer.Backend, answer.Remote, e)
				}
				return answer.Backend, err
			}, "p2", "p3")
		}
	}
}

// counts reports packets that a node has lost.
func (b *directBed) counts(t *testing.T) {
	t.Helper()
	for n := range b.mesh.Machines {
		out, err := b.on(n, "shunt", "status", "-o", "json", "--instance", b.name(n), "--socket", b.file(n, ".sock")).Output()
		var status struct {
			Reasons map[string]struct{ Packets uint64 } `json:"reasons"`
		}
		if err == nil {
			err = json.Unmarshal(out, &status)
		}
		b.must(err)
		for _, reason := range []string{"tunnelled_unknown", "decap_sender", "internal"} {
			if count := status.Reasons[reason].Packets; count > 0 {
				t.Errorf("n%d counts %s %d times", n+1, reason, count)
			}
		}
	}
}
