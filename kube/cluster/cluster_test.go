package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shunt-lb/shunt/internal/lab"
)

// options are the programs and images that `make test-kube` has built.
func options(t *testing.T) Options {
	t.Helper()
	o := Options{Kube: os.Getenv("SHUNT_KUBE"), Programs: os.Getenv("SHUNT_KUBE_PROGRAMS"), GVisor: os.Getenv("SHUNT_KUBE_GVISOR"), Helm: os.Getenv("SHUNT_KUBE_HELM"), Chart: "../../deploy/helm/shunt-kube"}
	if o.Kube == "" || o.Programs == "" || o.Helm == "" || o.GVisor == "" {
		t.Skip("SHUNT_KUBE, SHUNT_KUBE_PROGRAMS, SHUNT_KUBE_HELM and SHUNT_KUBE_GVISOR are not set: `make test-kube` builds Kubernetes and Helm, and runs this")
	}
	if os.Geteuid() != 0 {
		t.Skip("namespaces and BPF need root: run the tests with sudo")
	}
	return o
}

// test is one cluster with its servers.
type test struct {
	*Cluster
	*testing.T
	pods, hosts []corev1.Pod
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func must[V any](value V, err error) func(t *testing.T) V {
	return func(t *testing.T) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newTest brings a cluster up, with agents and servers. The agents are started before any pod is there. At the end of
// the test nothing may be left.
func newTest(t *testing.T, o Options) *test {
	t.Helper()
	begin := time.Now()
	s := bringUp(t, o)
	ok(t, s.Install(within(t), nil))
	s.serve(t)
	t.Logf("in step after %s", time.Since(begin).Round(time.Millisecond))
	return s
}

// bringUp brings a cluster up. At the end of the test nothing may be left.
func bringUp(t *testing.T, o Options) *test {
	t.Helper()
	begin := time.Now()
	c := must(Up(t.Context(), o))(t)
	t.Logf("up after %s", time.Since(begin).Round(time.Millisecond))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the cluster was %s", c.ID())
		}
		begin := time.Now()
		if err := c.Down(); err != nil {
			t.Error(err)
		}
		t.Logf("down after %s", time.Since(begin).Round(time.Millisecond))
		if left := must(c.Left())(t); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	})
	return &test{Cluster: c, T: t}
}

// serve starts the servers, and waits for them and for the agents.
func (s *test) serve(t *testing.T) {
	t.Helper()
	s.pods = must(s.Serve(within(t), "web", false))(t)
	s.hosts = must(s.Serve(within(t), "host", true))(t)
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	ok(t, s.AwaitAgents(ctx))
}

// TestCluster brings one cluster up for all.
func TestCluster(t *testing.T) {
	s := newTest(t, options(t))
	const ports = "ipFamilyPolicy: PreferDualStack, ports: [{name: http, port: 80, targetPort: 8080}, {name: dns, port: 53, targetPort: 5353, protocol: UDP}]"
	outer := []netip.Addr{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:203::10")}
	c := s.Cluster
	web := must(c.Service(within(t), "web", "type: LoadBalancer, selector: {app: web}, "+ports, outer...))(t)
	local := must(c.Service(within(t), "local", "type: LoadBalancer, externalTrafficPolicy: Local, selector: {app: web}, "+ports, netip.MustParseAddr("203.0.113.11")))(t)
	hosts := must(c.Service(within(t), "hosts", "type: NodePort, selector: {app: host}, ports: [{port: 80, targetPort: 8080}]"))(t)

	all := Names(s.pods)
	inside := []Client{c.From(&s.pods[0]), c.From(&s.hosts[0])}
	everywhere := append([]Client{c.FromOutside()}, inside...)
	for _, ip := range web.Spec.ClusterIPs {
		s.answers(inside, "cluster IP "+ip, ip, 80, 53, all)
	}
	for _, node := range c.Nodes {
		for _, ip := range []netip.Addr{node.Addr4(), node.Addr6()} {
			s.answers(everywhere, "node port at "+ip.String(), ip.String(), web.Spec.Ports[0].NodePort, web.Spec.Ports[1].NodePort, all)
		}
	}
	for _, ip := range outer {
		s.answers(everywhere, "load balancer "+ip.String(), ip.String(), 80, 53, all)
	}
	s.answers(inside, "servers in the nodes' network", hosts.Spec.ClusterIP, 80, 0, Names(s.hosts))
	s.answers(everywhere, "node port of servers in the nodes' network", c.Nodes[0].Addr4().String(), hosts.Spec.Ports[0].NodePort, 0, Names(s.hosts))
	t.Run("the apiserver by its Service", func(t *testing.T) {
		if _, err := inside[0].Ask(within(t), "tcp", "10.96.0.1:443"); err == nil || !strings.Contains(err.Error(), "400 Bad Request") {
			t.Errorf("a pod that asks 10.96.0.1:443 without TLS gets %v", err)
		}
	})
	t.Run("where agents attach", s.attached)
	t.Run("local policy", func(t *testing.T) { s.localPolicy(t, local) })
	t.Run("agents are replaced", func(t *testing.T) { s.replacesAgents(t, web) })
	t.Run("pods are replaced", func(t *testing.T) { s.replacesPods(t, web) })
	t.Run("pods in gVisor", func(t *testing.T) { s.sandboxed(t, web, s.Nodes[0], s.Nodes[1]) })
	t.Run("explain", func(t *testing.T) { s.explains(t, local) })
	t.Run("a kube-proxy beside", s.findsKubeProxy)
	t.Run("a pool of addresses", s.pool)
	t.Run("uninstall", s.uninstalls)
}

// TestPtp: pods with an interface each at the node, for which shunt's file has a pattern, because it cannot name them.
// Programs in pods and on nodes are served as with a bridge, and so are clients outside, to pods of this node and of
// others, and pods that come later.
func TestPtp(t *testing.T) {
	o := options(t)
	o.CNI = Ptp
	s := newTest(t, o)
	const ports = "ipFamilyPolicy: PreferDualStack, ports: [{name: http, port: 80, targetPort: 8080}, {name: dns, port: 53, targetPort: 5353, protocol: UDP}]"
	outer := netip.MustParseAddr("203.0.113.10")
	web := must(s.Service(within(t), "web", "type: LoadBalancer, selector: {app: web}, "+ports, outer))(t)
	local := must(s.Service(within(t), "local", "type: LoadBalancer, externalTrafficPolicy: Local, selector: {app: web}, "+ports, netip.MustParseAddr("203.0.113.11")))(t)
	hosts := must(s.Service(within(t), "hosts", "type: NodePort, selector: {app: host}, ports: [{port: 80, targetPort: 8080}]"))(t)
	inside := []Client{s.From(&s.pods[0]), s.From(&s.hosts[0])}
	everywhere := append([]Client{s.FromOutside()}, inside...)
	for _, ip := range web.Spec.ClusterIPs {
		s.answers(inside, "cluster IP "+ip, ip, 80, 53, Names(s.pods))
	}
	for _, ip := range []netip.Addr{s.Nodes[1].Addr4(), s.Nodes[1].Addr6()} {
		s.answers(everywhere, "node port at "+ip.String(), ip.String(), web.Spec.Ports[0].NodePort, web.Spec.Ports[1].NodePort, Names(s.pods))
	}
	s.answers(everywhere, "load balancer "+outer.String(), outer.String(), 80, 53, Names(s.pods))
	s.answers(everywhere, "node port of servers in the nodes' network", s.Nodes[0].Addr4().String(), hosts.Spec.Ports[0].NodePort, 0, Names(s.hosts))
	t.Run("where agents attach", func(t *testing.T) { s.attachedTo(t, "interface=eth0 mode=native", "interface=veth") })
	t.Run("local policy", func(t *testing.T) { s.localPolicy(t, local) })
	t.Run("pods in gVisor", func(t *testing.T) { s.sandboxed(t, web, s.Nodes[0], s.Nodes[1]) })
	t.Run("agents are replaced", func(t *testing.T) { s.replacesAgents(t, web) })
	t.Run("pods are replaced", func(t *testing.T) { s.replacesPods(t, web) })
	t.Run("uninstall", s.uninstalls)
}

// sandboxed: the node's kernel does not see the sockets of a pod in gVisor, so the per-packet path serves its
// questions. As a server it is served as any other. nodes are those whose node ports are asked: the pod's own is the first node.
func (s *test) sandboxed(t *testing.T, web *corev1.Service, nodes ...*Node) {
	s = &test{Cluster: s.Cluster, T: t, pods: s.pods, hosts: s.hosts}
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	boxes := must(s.ServeSandboxed(ctx, "box"))(t)
	for _, box := range boxes {
		if kernel := string(must(s.tell(within(t), &box, "/kernel", nil))(t)); !strings.Contains(kernel, "gvisor") {
			t.Fatalf("pod %s has the kernel %s, not gVisor's", box.Name, kernel)
		}
	}
	box := must(s.Service(within(t), "box", "type: NodePort, selector: {app: box}, ipFamilyPolicy: PreferDualStack, ports: [{name: http, port: 80, targetPort: 8080}, {name: dns, port: 53, targetPort: 5353, protocol: UDP}]"))(t)
	from := []Client{s.From(&boxes[0])}
	for _, ip := range web.Spec.ClusterIPs {
		s.answers(from, "of a cluster IP "+ip, ip, 80, 53, Names(s.pods))
	}
	for _, node := range nodes {
		for _, ip := range []netip.Addr{node.Addr4(), node.Addr6()} {
			s.answers(from, "of a node port at "+ip.String(), ip.String(), web.Spec.Ports[0].NodePort, web.Spec.Ports[1].NodePort, Names(s.pods))
		}
	}
	to := []Client{s.From(&s.pods[0]), s.From(&s.hosts[0])}
	for _, ip := range box.Spec.ClusterIPs {
		s.answers(to, "to a cluster IP "+ip, ip, 80, 53, Names(boxes))
	}
	s.answers(append(to, s.FromOutside()), "to a node port", nodes[len(nodes)-1].Addr4().String(), box.Spec.Ports[0].NodePort, box.Spec.Ports[1].NodePort, Names(boxes))
	// For a Service of which it is an endpoint, the pod may get itself.
	for _, ip := range box.Spec.ClusterIPs {
		s.answers(from, "of its own cluster IP "+ip, ip, 80, 53, Names(boxes))
	}
}

// attached: packets from other machines meet XDP in the driver, packets of pods tc.
func (s *test) attached(t *testing.T) {
	s.attachedTo(t, "interface=eth0 mode=native", "interface=cni0 mode=tc")
}

// attachedTo: the log of each agent has these lines.
func (s *test) attachedTo(t *testing.T, wants ...string) {
	t.Helper()
	for _, agent := range must(s.Cluster.pods(within(t), "kube-system", "shunt-kube"))(t) {
		log := s.Log(within(t), &agent)
		for _, want := range wants {
			if !strings.Contains(log, want) {
				t.Errorf("shunt-kube on %s does not say %q:\n%s", agent.Spec.NodeName, want, log)
			}
		}
	}
}

// answers asks a Service over TCP and, if it has a port for that, over UDP.
func (s *test) answers(clients []Client, what, ip string, tcp, udp int32, by []string) {
	s.Run(what, func(t *testing.T) {
		for _, from := range clients {
			must(from.Served(within(t), "tcp", At(ip, tcp), by...))(t)
			if udp != 0 {
				must(from.Served(within(t), "udp", At(ip, udp), by...))(t)
			}
		}
	})
}

// localPolicy: a node's pods alone answer, and see the client's own address.
func (s *test) localPolicy(t *testing.T, local *corev1.Service) {
	for i, node := range s.Nodes {
		address := At(node.Addr4().String(), local.Spec.Ports[0].NodePort)
		must(s.FromOutside().Served(within(t), "tcp", address, s.pods[i].Name))(t)
	}
	must(s.FromOutside().Served(within(t), "udp", "203.0.113.11:53", s.pods[0].Name))(t)
	answer := must(s.FromOutside().Ask(within(t), "tcp", "203.0.113.11:80"))(t)
	if !strings.HasPrefix(answer.Remote, s.Outside.Addr4().String()+":") {
		t.Errorf("the pod sees %s, want the client %s", answer.Remote, s.Outside.Addr4())
	}
}

// pool: Services get addresses that nobody has set, and the router finds the nodes that have them by asking. With the policy Local, that is a
// node with an endpoint.
func (s *test) pool(t *testing.T) {
	before := s.agents(t)
	ok(t, s.Install(within(t), map[string]any{"loadBalancer": map[string]any{"pool": []string{"10.90.0.200-10.90.0.209", "fd00:90::200-fd00:90::209"}, "announce": "l2"}}))
	s.awaitOthers(t, before)
	ok(t, s.label(within(t), &s.pods[1], "only", "second"))
	const ports = "type: LoadBalancer, ipFamilyPolicy: PreferDualStack, ports: [{port: 80, targetPort: 8080}]"
	must(s.Service(within(t), "pooled", ports+", selector: {app: web}"))(t)
	must(s.Service(within(t), "here", ports+", selector: {only: second}, externalTrafficPolicy: Local"))(t)
	for name, by := range map[string][]string{"pooled": Names(s.pods), "here": {s.pods[1].Name}} {
		var given []string
		ok(t, Eventually(within(t), func() error {
			service, err := s.Client.CoreV1().Services("default").Get(within(t), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			given = nil
			for _, i := range service.Status.LoadBalancer.Ingress {
				given = append(given, i.IP)
			}
			if len(given) != 2 {
				return fmt.Errorf("Service %s has the addresses %v, want one of each family", name, given)
			}
			return nil
		}))
		for _, ip := range given {
			for _, from := range []Client{s.FromOutside(), s.From(&s.pods[0]), s.From(&s.hosts[2])} {
				must(from.Served(within(t), "tcp", At(ip, 80), by...))(t)
			}
		}
		t.Logf("Service %s was given %v", name, given)
		if name == "here" {
			answer := must(s.FromOutside().Ask(within(t), "tcp", At(given[0], 80)))(t)
			if !strings.HasPrefix(answer.Remote, s.Outside.Addr4().String()+":") {
				t.Errorf("the pod sees %s, want the client %s", answer.Remote, s.Outside.Addr4())
			}
		}
	}
}

// session opens a connection from outside to a Service, to this server.
func (s *test) session(t *testing.T, address, server string) *lab.Session {
	t.Helper()
	for range 200 {
		session := must(s.Outside.OpenSession(within(t), "tcp", netip.AddrPort{}, address))(t)
		if answer := must(session.Ask(within(t), "/"))(t); answer.Backend == server {
			t.Cleanup(func() { session.Close() })
			return session
		}
		session.Close()
	}
	t.Fatalf("no connection to %s is to %s", address, server)
	return nil
}

// replacesAgents: connections go on without an agent, with the next one, and through an upgrade, to a pod of the node
// and to one elsewhere.
func (s *test) replacesAgents(t *testing.T, web *corev1.Service) {
	address := At(s.Nodes[0].Addr4().String(), web.Spec.Ports[0].NodePort)
	here, there := s.session(t, address, s.pods[0].Name), s.session(t, address, s.pods[1].Name)
	goOn := func(when string) {
		t.Helper()
		for i, session := range []*lab.Session{here, there} {
			if answer, err := session.Ask(within(t), "/"); err != nil || answer.Backend != s.pods[i].Name {
				t.Errorf("%s, a connection to %s is answered by %q, %v", when, s.pods[i].Name, answer.Backend, err)
			}
		}
	}
	before := s.agents(t)
	for name := range before {
		ok(t, s.Client.CoreV1().Pods(Namespace).Delete(within(t), name, metav1.DeleteOptions{}))
	}
	goOn("while the agents are replaced")
	s.awaitOthers(t, before)
	goOn("with the next agents")
	before = s.agents(t)
	ok(t, s.Install(within(t), map[string]any{"healthPort": 10257}))
	s.awaitOthers(t, before)
	goOn("after an upgrade")
	must(s.FromOutside().Served(within(t), "tcp", address, Names(s.pods)...))(t)
}

// agents are the names of their pods.
func (s *test) agents(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, agent := range must(s.Cluster.pods(within(t), Namespace, "shunt-kube"))(t) {
		names[agent.Name] = true
	}
	return names
}

// awaitOthers waits until none of these agents is there, and all others are in step.
func (s *test) awaitOthers(t *testing.T, before map[string]bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience) // they are replaced one after the other
	defer cancel()
	ok(t, Eventually(ctx, func() error {
		agents, err := s.Cluster.pods(ctx, Namespace, "shunt-kube")
		for _, agent := range agents {
			if before[agent.Name] {
				err = fmt.Errorf("%s is still there", agent.Name)
			}
		}
		return err
	}))
	ok(t, s.AwaitAgents(ctx))
}

// command runs shunt-kube on the first node, and returns its output and its exit code.
func (s *test) command(t *testing.T, args ...string) (string, int) {
	t.Helper()
	command := s.Nodes[0].Command(within(t), filepath.Join(s.options.Programs, "shunt-kube"), append(args, "--kubeconfig", s.Kubeconfig(), "--node-name", "n1")...)
	command.Env = append(command.Environ(), s.agentVariables(t)...)
	output, err := command.CombinedOutput()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) {
		t.Fatal(err)
	}
	t.Logf("shunt-kube %s\n%s", strings.Join(args, " "), output)
	return string(output), command.ProcessState.ExitCode()
}

// agentVariables is the environment that the chart gives an agent, and so what `kubectl exec` runs in its pod.
func (s *test) agentVariables(t *testing.T) (all []string) {
	t.Helper()
	set := must(s.Client.AppsV1().DaemonSets(Namespace).Get(within(t), Release, metav1.GetOptions{}))(t)
	for _, v := range set.Spec.Template.Spec.Containers[0].Env {
		if v.ValueFrom == nil {
			all = append(all, v.Name+"="+v.Value)
		}
	}
	return all
}

func (s *test) explains(t *testing.T, local *corev1.Service) {
	text, code := s.command(t, "explain", "default/local:http")
	for _, want := range []string{local.Spec.ClusterIP + ":80", "default/local:http@external", s.pods[0].Name, "on another node, and the traffic policy is Local"} {
		if !strings.Contains(text, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	if _, code := s.command(t, "explain", "default/nobody"); code != 1 {
		t.Errorf("a Service that there is not: exit code %d", code)
	}
}

// findsKubeProxy has a real one run beside, for as long as it takes to be found.
func (s *test) findsKubeProxy(t *testing.T) {
	if text, code := s.command(t, "check"); strings.Contains(text, "kube-proxy") {
		t.Fatalf("there is none yet, exit code %d", code)
	}
	ctx, cancel := context.WithCancel(t.Context())
	proxy := s.kubeProxy(ctx, s.Nodes[0])
	ok(t, proxy.Start())
	defer proxy.Wait() //nolint:errcheck // it is killed
	defer cancel()
	ok(t, Eventually(within(t), func() error {
		text, code := s.command(t, "check")
		for _, want := range []string{fmt.Sprintf("process %d", proxy.Process.Pid), "kube-proxy --cleanup"} {
			if code != 1 || !strings.Contains(text, want) {
				return fmt.Errorf("exit code %d, and no %q in %s", code, want, text)
			}
		}
		return nil
	}))
}

// uninstalls: nothing of shunt-kube is left, and nobody balances any more.
func (s *test) uninstalls(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	before := strings.Join(must(s.Remains(ctx))(t), "\n")
	for _, want := range []string{"daemonsets shunt-kube", "secrets sh.helm.release", "n1: /sys/fs/bpf/", "n2: /run/shunt/", "a program at eth0"} {
		if !strings.Contains(before, want) {
			t.Errorf("before, %q is not among what there is:\n%s", want, before)
		}
	}
	last := s.lastWords(ctx, t)
	begin := time.Now()
	ok(t, s.Uninstall(ctx))
	t.Logf("no pods of shunt-kube after %s", time.Since(begin).Round(time.Millisecond))
	defer func() {
		t.Logf("nothing of it after %s", time.Since(begin).Round(time.Millisecond))
		if t.Failed() {
			t.Log(last())
		}
	}()
	ok(t, Eventually(ctx, func() error { // kubelet stops a container after its pod has gone, at times
		left, err := s.Remains(ctx)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left: %s", strings.Join(left, "; "))
		}
		return err
	}))
}

// lastWords follows the agents' logs, which go with their pods, and returns their lines from now on.
func (s *test) lastWords(ctx context.Context, t *testing.T) func() string {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	var mutex sync.Mutex
	var all strings.Builder
	var following sync.WaitGroup
	for name := range s.agents(t) {
		stream := must(s.Client.CoreV1().Pods(Namespace).GetLogs(name, &corev1.PodLogOptions{Follow: true, TailLines: new(int64)}).Stream(ctx))(t)
		following.Go(func() {
			defer stream.Close()
			for lines := bufio.NewScanner(stream); lines.Scan(); {
				mutex.Lock()
				fmt.Fprintf(&all, "%s: %s\n", name, lines.Text())
				mutex.Unlock()
			}
		})
	}
	t.Cleanup(func() { cancel(); following.Wait() })
	return func() string {
		mutex.Lock()
		defer mutex.Unlock()
		return all.String()
	}
}

// replacesPods: pods that come instead of others answer, and nobody is sent to the others.
func (s *test) replacesPods(t *testing.T, web *corev1.Service) {
	for _, pod := range s.pods {
		ok(t, s.Client.CoreV1().Pods("default").Delete(within(t), pod.Name, metav1.DeleteOptions{}))
	}
	ok(t, Eventually(within(t), func() error {
		pods, err := s.Serve(within(t), "web", false)
		if err != nil {
			return err
		}
		for i := range pods {
			if pods[i].Name == s.pods[i].Name || pods[i].Status.PodIP == "" {
				return fmt.Errorf("%s is still there, or its successor has no address", s.pods[i].Name)
			}
		}
		s.pods = pods
		return nil
	}))
	for _, from := range []Client{s.FromOutside(), s.From(&s.hosts[1]), s.From(&s.pods[2])} {
		must(from.Served(within(t), "tcp", At(s.Nodes[2].Addr4().String(), web.Spec.Ports[0].NodePort), Names(s.pods)...))(t)
	}
}

// TestFailure has a part of the cluster fail, or the test receive an interrupt. The error names it, and nothing is
// left.
func TestFailure(t *testing.T) {
	o := options(t)
	kube := o.Kube
	o.Kube = filepath.Join(t.TempDir(), "kube")
	for name, c := range map[string]struct {
		script, says string
		patience     time.Duration
	}{
		"the control plane ends": {"echo broken; exit 3", "broken", time.Minute},
		"a node ends":            {`[ "$1" = node ] && { echo broken; exit 3; }; exec ` + kube + ` "$@"`, "broken", time.Minute},
		"stopped":                {"exec " + kube + ` "$@"`, "told to stop", 6 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			ok(t, os.WriteFile(o.Kube, []byte("#!/bin/sh\n"+c.script+"\n"), 0o755))
			o.ID = fmt.Sprintf("f%d", os.Getpid())
			ctx, cancel := context.WithTimeoutCause(t.Context(), c.patience, errors.New("told to stop"))
			defer cancel()
			if _, err := Up(ctx, o); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("Up returned %v, want %q", err, c.says)
			}
			if ids := must(lab.IDs())(t); strings.Contains(strings.Join(ids, " "), o.ID) {
				t.Errorf("namespaces of %s are left", o.ID)
			}
			if left := must(filepath.Glob("/sys/fs/cgroup/*/shunt-" + o.ID + "-*"))(t); len(left) > 0 {
				t.Errorf("cgroups are left: %v", left)
			}
		})
	}
}
