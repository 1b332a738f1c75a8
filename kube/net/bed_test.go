// Package net has objects of a real apiserver become services that answer packets. There is no kubelet: a test sets the
// pods and their states, and the controller manager makes EndpointSlices from them.
//
//	client ─── n1: control plane on loopback, shunt-kube ─── switch ─┬─ b1, b2   pods of n1
//	                                                                 └─ b3       pod of n2
//
// It needs root and the control plane's binary, whose path is in SHUNT_KUBE; with SHUNT_KUBE=build it is built:
// `make test-services`. The shunt-kube process is this test binary again.
package net

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/shunt-lb/shunt/internal/commands"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/kube/command"
)

// childVariable makes this binary one of these commands.
const childVariable = "SHUNT_KUBE_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(childVariable) {
	case "shunt-kube":
		os.Exit(command.Main(os.Args[1:], os.Stdout, os.Stderr))
	case "fleet":
		os.Exit(runFleet())
	case "shunt":
		os.Exit(commands.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// clusterIPs is the range of the apiserver's cluster IPs.
const clusterIPs = "10.96.0.0/16,fd00:96::/112"

// patience bounds waits for steps that take milliseconds, on a machine that does much else.
const patience = 30 * time.Second

type bed struct {
	*lab.Topology
	t        *testing.T
	folder   string
	instance string
	settings string // the file's, beside the settings of all tests
	cgroup   string // of programs on the node
	plane    *lab.Process
	alive    *os.File // the control plane ends when this does, and so with this process
	agent    *lab.Process
	client   *kubernetes.Clientset
}

var beds atomic.Int32

// unique returns a name for something of one bed, because tests run beside each other.
func unique(kind string) string { return fmt.Sprintf("%s%dx%d", kind, os.Getpid(), beds.Add(1)) }

// newBed builds the network and starts the control plane. shunt-kube is not started.
func newBed(t *testing.T) *bed {
	t.Helper()
	return build(t, lab.Options{ID: unique("k"), Layout: lab.TwoArm, Backends: 3}, nil)
}

// Where pods at a bridge are.
var (
	bridged4 = netip.MustParsePrefix("10.88.0.1/24")
	bridged6 = netip.MustParsePrefix("2001:db8:88::1/64")
)

// newNode is a bed whose pods are at a bridge of the node, as CNI's plugin bridge has them, and whose client is beside the node:
//
//	client ─── switch ─── n1 ─┬─ pod
//	                          └─ pod
func newNode(t *testing.T, names ...string) *bed {
	t.Helper()
	b := build(t, lab.Options{ID: unique("kp"), Layout: lab.OneArm, Backends: 1, Forwarding: true}, func(b *bed) []*lab.Host {
		pods, err := b.AddPods(b.Balancer, "cni0", bridged4, bridged6, names...)
		b.must(err)
		b.must(b.Ready(within(t)))
		return pods
	})
	b.settings = "interfaces: [{name: eth0, attach: native}, {name: cni0, attach: tc}]"
	return b
}

// build is newBed in another network. pods, unless it is nil, makes the node's pods, in place of the backends.
func build(t *testing.T, o lab.Options, pods func(*bed) []*lab.Host) *bed {
	t.Helper()
	binary := needsPlane(t)
	topology, err := lab.Build(within(t), o)
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{Topology: topology, t: t, folder: t.TempDir(), instance: unique("kube-")}
	b.settings = "interfaces: [{name: eth0, attach: native}, {name: eth1, attach: native}]"
	if pods != nil {
		b.Backends = pods(b)
	}
	b.cgroup = newCgroup(t, b.instance)
	t.Cleanup(b.close)
	b.servePods()
	b.control(binary)
	return b
}

// needsPlane returns the path of the control plane's binary, or skips the test.
func needsPlane(t *testing.T) string {
	t.Helper()
	binary := os.Getenv("SHUNT_KUBE")
	if binary == "" {
		t.Skip("SHUNT_KUBE is not set: `make test-services` builds the control plane and runs this")
	}
	if os.Geteuid() != 0 {
		t.Skip("network namespaces and BPF need root: run the tests with sudo")
	}
	if binary == "build" {
		var err error
		if binary, err = built(); err != nil {
			t.Fatal(err)
		}
	}
	return binary
}

// built builds the control plane, unless that was done before, and returns its path.
var built = sync.OnceValues(func() (string, error) {
	c := exec.Command("../../test/kube/build")
	c.Stderr = os.Stderr
	path, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("build the control plane with test/kube/build: %w", err)
	}
	return strings.TrimSpace(string(path)), nil
})

// servePods starts the pods' servers.
func (b *bed) servePods() {
	b.t.Helper()
	for _, pod := range b.Backends {
		for _, port := range []string{":8080", ":9090"} {
			_, err := pod.ServeHTTP(port, pod.Name())
			b.must(err)
		}
		_, err := pod.ServeUDP(":5353", pod.Name())
		b.must(err)
	}
}

// control starts the control plane on the node, and connects with it.
func (b *bed) control(binary string) {
	b.t.Helper()
	plane := b.Balancer.Command(context.Background(), binary, "control-plane", b.folder, clusterIPs)
	input, alive, err := os.Pipe()
	b.must(err)
	plane.Stdin, b.alive = input, alive
	b.plane, err = plane.Spawn()
	b.must(err)
	b.awaits(b.plane, "ready\n")
	b.connect()
}

func (b *bed) endPlane() {
	if b.plane != nil {
		if err := b.plane.End(syscall.SIGTERM, patience); err != nil {
			b.t.Errorf("the control plane: %v\n%s", err, b.plane.Log())
		}
	}
	_ = b.alive.Close()
}

// connect makes the client that changes objects, and the kubeconfig of shunt-kube, which has the rights of the chart's
// ClusterRoles.
func (b *bed) connect() {
	b.t.Helper()
	admin := filepath.Join(b.folder, "admin.kubeconfig")
	settings, err := clientcmd.BuildConfigFromFlags("", admin)
	if err != nil {
		b.t.Fatal(err)
	}
	settings.Dial = b.Balancer.Dial
	settings.QPS = -1 // no limit of the client's own
	if b.client, err = kubernetes.NewForConfig(settings); err != nil {
		b.t.Fatal(err)
	}
	text, err := os.ReadFile(admin)
	if err != nil {
		b.t.Fatal(err)
	}
	own := strings.Replace(string(text), "user: {", "user: {as: 'system:serviceaccount:kube-system:shunt-kube', ", 1)
	if err := os.WriteFile(b.kubeconfig(), []byte(own), 0o600); err != nil {
		b.t.Fatal(err)
	}
	for _, file := range []string{"role.yaml", "load-balancer.yaml", "direct-return.yaml"} {
		rules, err := os.ReadFile("../../deploy/helm/shunt-kube/templates/" + file)
		b.must(err)
		for text := range strings.SplitSeq(string(rules), "\n---\n") {
			b.grant(text)
		}
	}
	_, err = b.client.CoordinationV1().Leases("kube-system").Create(within(b.t), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "shunt-kube"}}, metav1.CreateOptions{})
	b.must(err)
}

// grant makes a ClusterRole of the chart's, and has shunt-kube have it. Other objects are templates.
func (b *bed) grant(text string) {
	b.t.Helper()
	if first, rest, _ := strings.Cut(text, "\n"); strings.HasPrefix(first, "{{- if .Values.") { // the file's
		text = rest
	}
	if strings.Contains(text, "{{") {
		return
	}
	role := &rbacv1.ClusterRole{}
	b.must(yaml.UnmarshalStrict([]byte(text), role))
	_, err := b.client.RbacV1().ClusterRoles().Create(within(b.t), role, metav1.CreateOptions{})
	b.must(err)
	_, err = b.client.RbacV1().ClusterRoleBindings().Create(within(b.t), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "kube-system", Name: "shunt-kube"}},
	}, metav1.CreateOptions{})
	b.must(err)
}

func (b *bed) kubeconfig() string { return filepath.Join(b.folder, "shunt-kube.kubeconfig") }
func (b *bed) socket() string     { return filepath.Join(b.folder, "shunt.sock") }

func (b *bed) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// close ends everything, the data plane too.
func (b *bed) close() {
	if b.agent != nil {
		if err := b.agent.End(syscall.SIGINT, patience); err != nil {
			b.t.Errorf("shunt-kube: %v", err)
		}
		if b.t.Failed() {
			b.t.Logf("the log of shunt-kube:\n%s", b.agent.Log())
		}
	}
	b.endPlane()
	if code, out := b.run("shunt", "detach", "--instance", b.instance); code != 0 && !strings.Contains(out, "nothing of it is on this machine") {
		b.t.Errorf("shunt detach: exit code %d\n%s", code, out)
	}
	_ = os.Remove("/var/lib/shunt/" + b.instance + ".overrides.json")
	if err := b.Close(); err != nil {
		b.t.Error(err)
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for a condition that other processes bring about.
func eventually(t *testing.T, what string, ready func() error) {
	t.Helper()
	end := time.Now().Add(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s: %v", what, patience, err)
		}
		<-tick.C
	}
}

// awaits waits until a process has printed a text.
func (b *bed) awaits(p *lab.Process, text string) {
	b.t.Helper()
	eventually(b.t, fmt.Sprintf("%q from %s", text, p.Path), func() error {
		if strings.Contains(p.Log(), text) {
			return nil
		}
		select {
		case <-p.Ended:
			b.t.Fatalf("%s ended: %v\n%s", p.Path, p.Err(), p.Log())
		default:
		}
		return errors.New(p.Log())
	})
}

// child is this binary as a command, on the node.
func (b *bed) child(program string, args ...string) *lab.Command {
	self, err := os.Executable()
	if err != nil {
		panic(err) // Linux always knows
	}
	c := b.Balancer.Command(context.Background(), self, args...)
	c.Env = append(os.Environ(), childVariable+"="+program)
	return c
}

// run runs a command to its end.
func (b *bed) run(program string, args ...string) (code int, output string) {
	out, err := b.child(program, args...).CombinedOutput()
	var exit interface{ ExitCode() int }
	switch {
	case errors.As(err, &exit):
		return exit.ExitCode(), string(out)
	case err != nil:
		b.t.Errorf("%s %v: %v", program, args, err)
	}
	return 0, string(out)
}

// start runs shunt-kube, with more flags, and waits until it is in step.
func (b *bed) start(more ...string) {
	b.t.Helper()
	file := filepath.Join(b.folder, "shunt.yaml")
	b.must(os.WriteFile(file, fmt.Appendf(nil, `%s
services: [{name: edge, address: %s, port: 7000, backends: [{address: %s, port: 8080}]}]
sockets: {cgroup: %s}
metrics: {listen: "127.0.0.1:9470"}
`, b.settings, lab.VIP4, b.Backends[len(b.Backends)-1].Addr4(), b.cgroup), 0o644))
	p, err := b.child("shunt-kube", append([]string{"run", "--config", file, "--instance", b.instance, "--socket", b.socket(),
		"--kubeconfig", b.kubeconfig(), "--node-name", "n1", "--endpoint-grace", "1s"}, more...)...).Spawn()
	b.must(err)
	b.agent = p
	b.awaits(p, "in step with the cluster")
}

// node makes a Node object.
func (b *bed) node(name string, addresses ...netip.Addr) {
	b.t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	created, err := b.client.CoreV1().Nodes().Create(within(b.t), node, metav1.CreateOptions{})
	b.must(err)
	for _, a := range addresses {
		created.Status.Addresses = append(created.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	_, err = b.client.CoreV1().Nodes().UpdateStatus(within(b.t), created, metav1.UpdateOptions{})
	b.must(err)
}

// pod makes a pod as a kubelet would report it once it runs.
func (b *bed) pod(host *lab.Host, node, app string) {
	b.t.Helper()
	pod := &corev1.Pod{}
	b.must(yaml.UnmarshalStrict(fmt.Appendf(nil, `
metadata: {name: %s, namespace: default, labels: {app: %s, pod: %s}}
spec:
  nodeName: %s
  containers: [{name: c, image: none, ports: [{name: web, containerPort: 8080}, {name: dns, containerPort: 5353, protocol: UDP}]}]
`, host.Name(), app, host.Name(), node), pod))
	created, err := b.client.CoreV1().Pods("default").Create(within(b.t), pod, metav1.CreateOptions{})
	b.must(err)
	created.Status.Phase = corev1.PodRunning
	created.Status.PodIP = host.Addr4().String()
	created.Status.PodIPs = []corev1.PodIP{{IP: host.Addr4().String()}, {IP: host.Addr6().String()}}
	created.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = b.client.CoreV1().Pods("default").UpdateStatus(within(b.t), created, metav1.UpdateOptions{})
	b.must(err)
}

// ready sets whether a pod is ready.
func (b *bed) ready(name string, is bool) {
	b.t.Helper()
	pod, err := b.client.CoreV1().Pods("default").Get(within(b.t), name, metav1.GetOptions{})
	b.must(err)
	// The controller notes the time as the trigger of the EndpointSlice's change.
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}}
	if !is {
		pod.Status.Conditions[0].Status = corev1.ConditionFalse
	}
	_, err = b.client.CoreV1().Pods("default").UpdateStatus(within(b.t), pod, metav1.UpdateOptions{})
	b.must(err)
}

// service makes a Service of its spec, and returns it as the apiserver completed it.
func (b *bed) service(name, spec string) *corev1.Service {
	b.t.Helper()
	service := &corev1.Service{}
	b.must(yaml.UnmarshalStrict([]byte("spec: {"+spec+"}"), service))
	service.Namespace, service.Name = "default", name
	created, err := b.client.CoreV1().Services("default").Create(within(b.t), service, metav1.CreateOptions{})
	b.must(err)
	return created
}

// ask asks once, over a new connection or from a new socket.
func (b *bed) ask(network, address string) (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if network == "udp" {
		return b.Client.AskUDP(ctx, address, []byte("who?"))
	}
	return lab.Get(ctx, b.Client.HTTPClient(false), address)
}

// served waits until an address is answered by these backends and by no other: each of many requests
// by one of them, and each of them once at least.
func (b *bed) served(t *testing.T, network, address string, by ...string) {
	t.Helper()
	b.answered(t, network+" "+address, func() (string, error) {
		answer, err := b.ask(network, address)
		return answer.Backend, err
	}, by...)
}

// answered is served() by other means of asking, which return the backend's name.
func (b *bed) answered(t *testing.T, what string, ask func() (string, error), by ...string) {
	t.Helper()
	const requests = 24 // one of three backends not among them: once in 10,000 times, and then it is asked again
	eventually(t, fmt.Sprintf("%s is answered by %v", what, by), func() error {
		seen := map[string]int{}
		for range requests {
			backend, err := ask()
			if err != nil {
				return fmt.Errorf("after %v: %w", seen, err)
			}
			seen[backend]++
		}
		for _, name := range by {
			if seen[name] == 0 {
				return fmt.Errorf("it is answered by %v", seen)
			}
		}
		if len(seen) != len(by) {
			return fmt.Errorf("it is answered by %v", seen)
		}
		return nil
	})
}

// refused waits until connections to an address are refused at once.
func (b *bed) refused(t *testing.T, address string) {
	t.Helper()
	eventually(t, address+" is refused", func() error {
		_, err := b.ask("tcp", address)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return nil
		}
		return fmt.Errorf("it is not: %w", errors.Join(err, io.ErrNoProgress))
	})
}

func at(address string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port)).String()
}
