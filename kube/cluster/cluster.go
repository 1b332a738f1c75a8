// Package cluster is a Kubernetes cluster of three nodes on one machine, without kube-proxy: a real
// control plane, kubelets and containerd, with shunt-kube as a DaemonSet.
//
//	outside ── router ── switch ─┬─ plane    etcd, apiserver, controllers, scheduler
//	                             ├─ n1 ┐
//	                             ├─ n2 ├──── each: containerd, kubelet, cni0 ── pods
//	                             └─ n3 ┘
//
// Each host is a network namespace, shunt-<id>-<host>. A node has namespaces of processes, mounts and host
// name, too, and a cgroup with the name of its network namespace. Processes and mounts end with the
// process that made the cluster, however it ends; Down removes network namespaces and cgroups.
//
// It needs root, the packages containerd, runc and containernetworking-plugins, and the binary of
// Kubernetes' components that test/kube/build makes.
package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/shunt-lb/shunt/internal/lab"
)

// Options of a cluster.
type Options struct {
	Kube     string // the binary of Kubernetes' components
	Programs string // the folder with the binaries shunt-kube and pod
	Helm     string // the binary that test/kube/helm makes; Install needs it
	Chart    string // the folder of shunt-kube's chart; Install needs it
	Upstream string // the folder that test/kube/upstream makes; Test needs it
	GVisor   string // the runsc that test/kube/gvisor makes; ServeSandboxed needs it
	CNI      string // the plugin that gives pods their interface, Bridge or Ptp; empty: Bridge
	ID       string // of the lab; empty: a random one
}

// The plugins of CNI: a node has one interface for all pods, cni0, or one for each pod.
const (
	Bridge = "bridge"
	Ptp    = "ptp"
)

// Flags defines flags for the options that make targets build.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.StringVar(&o.Kube, "kube", "", "the binary that test/kube/build has made")
	flags.StringVar(&o.Programs, "programs", "", "the folder with the binaries shunt-kube and pod")
	flags.StringVar(&o.Helm, "helm", "", "the binary that test/kube/helm has made")
	flags.StringVar(&o.Chart, "chart", "", "the folder of shunt-kube's chart")
	flags.StringVar(&o.CNI, "cni", Bridge, "CNI's plugin for pods: bridge or ptp")
}

// Cluster is a running cluster.
type Cluster struct {
	*lab.Lab
	Outside *lab.Host // a machine that is no part of the cluster
	Router  *lab.Host
	Plane   *lab.Host
	Nodes   []*Node
	Client  *kubernetes.Clientset // may do everything
	Folder  string

	options Options
	network *lab.Host // the switch
	plane   *part
	proxies []proxy
}

// Node is a node of the cluster.
type Node struct {
	*lab.Host
	Pods4, Pods6 netip.Prefix // ranges of its pods' addresses
	part         *part
}

// part is a process with all processes that it has started; it ends when its standard input does.
type part struct {
	*lab.Process
	input *os.File
}

// NodeCount is the number of nodes of a cluster.
const NodeCount = 3

// ClusterIPs are the ranges of the cluster's cluster IPs.
const ClusterIPs = "10.96.0.0/16,fd00:96::/112"

// Balancers are the ranges of load balancers' addresses; the router has routes to n1 for them (RFC 5737,
// RFC 3849).
var Balancers = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:203::/64")}

// Patience limits waits for steps that take seconds on a machine without other work.
const Patience = 2 * time.Minute

// Up starts a cluster: its nodes are ready, and nothing runs on them. After an error nothing is left.
func Up(ctx context.Context, o Options) (c *Cluster, err error) {
	switch o.CNI {
	case Bridge, Ptp:
	case "":
		o.CNI = Bridge
	default:
		return nil, fmt.Errorf("make a cluster: CNI's plugin %q is neither %s nor %s", o.CNI, Bridge, Ptp)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, Patience, fmt.Errorf("the cluster was not up within %s", Patience))
	defer cancel()
	c = &Cluster{options: o}
	if c.Folder, err = os.MkdirTemp("", "shunt-cluster-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Down())
			c = nil
		}
	}()
	if c.Lab, err = lab.New(o.ID); err != nil {
		return c, err
	}
	if err := c.lay(ctx); err != nil {
		return c, err
	}
	if err := c.writeImages(); err != nil {
		return c, err
	}
	if err := c.startPlane(ctx); err != nil {
		return c, err
	}
	if err := c.startNodes(); err != nil {
		return c, err
	}
	return c, c.awaitNodes(ctx)
}

// pauseImage holds pods' namespaces (test/kube/node), PodImage runs in the test's pods, and
// AgentImage is shunt-kube's name in manifests.
const (
	pauseImage = "shunt.test/pause:1"
	PodImage   = "shunt.test/pod:1"
	AgentImage = "shunt.test/shunt-kube:1"
)

func (c *Cluster) writeImages() error {
	if err := os.Mkdir(c.in("images"), 0o755); err != nil {
		return err
	}
	pod, errPod := inRoot(filepath.Join(c.options.Programs, "pod"))
	agent, errAgent := inRoot(filepath.Join(c.options.Programs, "shunt-kube"))
	if err := errors.Join(errPod, errAgent); err != nil {
		return err
	}
	pods := []image{{pauseImage, []string{"/pod", "pause"}}, {PodImage, []string{"/pod", "serve"}}}
	if c.options.Upstream != "" {
		pods = append(pods, image{upstreamPauseImage, []string{"/pod", "pause"}})
	}
	err := errors.Join(
		writeImages(c.in("images", "pod.tar"), pods, pod),
		writeImages(c.in("images", "agent.tar"), []image{{AgentImage, []string{"/shunt-kube", "run"}}}, agent),
	)
	if err == nil && c.options.Upstream != "" {
		err = c.writeUpstreamImages()
	}
	return err
}

func (c *Cluster) in(name ...string) string {
	return filepath.Join(append([]string{c.Folder}, name...)...)
}

// spawn starts a part on a host.
func (c *Cluster) spawn(host *lab.Host, args ...string) (*part, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close()
	command := host.Command(context.Background(), c.options.Kube, args...)
	command.Stdin = read
	process, err := command.Spawn()
	if err != nil {
		return nil, errors.Join(err, write.Close())
	}
	return &part{process, write}, nil
}

// end stops a part and waits for its end. A nil part is no error.
func (p *part) end() error {
	if p == nil {
		return nil
	}
	defer p.input.Close()
	if err := p.End(syscall.SIGTERM, Patience); err != nil {
		return fmt.Errorf("%w\n%s", err, p.Log())
	}
	return nil
}

func (c *Cluster) startPlane(ctx context.Context) (err error) {
	folder := c.in("plane")
	if err := os.Mkdir(folder, 0o755); err != nil {
		return err
	}
	args := []string{"control-plane", "--address", c.Plane.Addr4().String()}
	for _, n := range c.Nodes {
		args = append(args, "--node", fmt.Sprintf("%s=%s", n.Name(), n.addresses()))
	}
	if c.plane, err = c.spawn(c.Plane, append(args, folder, ClusterIPs)...); err != nil {
		return err
	}
	if err := c.plane.says(ctx, "ready\n"); err != nil {
		return fmt.Errorf("start the control plane: %w", err)
	}
	settings, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return err
	}
	settings.Dial = c.Plane.Dial
	settings.QPS = -1 // no limit of the client's own
	c.Client, err = kubernetes.NewForConfig(settings)
	return err
}

// Kubeconfig returns a file that gives its reader all rights, from within the cluster's network.
func (c *Cluster) Kubeconfig() string { return c.in("plane", "admin.kubeconfig") }

// says waits until a part has written a text.
func (p *part) says(ctx context.Context, text string) error {
	return Eventually(ctx, func() error {
		if strings.Contains(p.Log(), text) {
			return nil
		}
		if err := p.hasEnded(); err != nil {
			return err
		}
		return fmt.Errorf("it has not said %q; it said:\n%s", text, p.Log())
	})
}

// hasEnded returns an error after which Eventually does not wait.
func (p *part) hasEnded() error {
	select {
	case <-p.Ended:
		return fatal{fmt.Errorf("it has ended (%v):\n%s", p.Err(), p.Log())}
	default:
		return nil
	}
}

func (c *Cluster) startNodes() (err error) {
	for _, n := range c.Nodes {
		folder := c.in(n.Name())
		if err := os.Mkdir(folder, 0o755); err != nil {
			return err
		}
		n.part, err = c.spawn(n.Host, "node", "--name", n.Name(), "--folder", folder, "--plane", c.in("plane"), "--images", c.in("images"),
			"--cgroup", n.Namespace(), "--addresses", n.addresses(), "--pods", n.Pods4.String()+","+n.Pods6.String(), "--cni", c.options.CNI, "--gvisor", c.options.GVisor)
		if err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) addresses() string { return n.Addr4().String() + "," + n.Addr6().String() }

// Down removes everything, including the remains of an Up that failed.
func (c *Cluster) Down() error {
	var mu sync.Mutex
	var failures []error
	var all sync.WaitGroup
	for _, n := range c.Nodes {
		all.Go(func() {
			err := n.part.end()
			mu.Lock()
			defer mu.Unlock()
			failures = append(failures, err)
		})
	}
	all.Wait()
	failures = append(failures, c.plane.end())
	if c.Lab != nil {
		failures = append(failures, c.Lab.Close())
	}
	return errors.Join(append(failures, os.RemoveAll(c.Folder))...)
}

// Left lists the remains on the machine of a cluster that is down: namespaces, cgroups, mounts, processes
// and files. The list should be empty.
func (c *Cluster) Left() (left []string, err error) {
	prefix := "shunt-" + c.ID() + "-"
	for _, pattern := range []string{"/run/netns/" + prefix + "*", "/sys/fs/cgroup/*/" + prefix + "*", "/sys/fs/cgroup/" + prefix + "*", c.Folder} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		left = append(left, found...)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, c.Folder) || strings.Contains(line, prefix) {
			left = append(left, "the mount "+strings.TrimSpace(line))
		}
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	for _, file := range commands {
		text, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(text), c.Folder) { // the process may have ended meanwhile
			left = append(left, "the process "+strings.ReplaceAll(string(text), "\x00", " "))
		}
	}
	return left, nil
}

// Draw returns the cluster as a picture in text.
func (c *Cluster) Draw() string {
	n := c.Nodes
	return fmt.Sprintf(`outside ─────── router ────── switch ─┬─ plane  %s   etcd, apiserver, controllers, scheduler
%-13s   to addresses of       ├─ n1     %s  kubelet, containerd, shunt-kube ── cni0 ─ pods %s
                load balancers        ├─ n2     %s  kubelet, containerd, shunt-kube ── cni0 ─ pods %s
                by n1                 └─ n3     %s  kubelet, containerd, shunt-kube ── cni0 ─ pods %s
`, c.Plane.Addr4(), c.Outside.Addr4(), n[0].Addr4(), n[0].Pods4, n[1].Addr4(), n[1].Pods4, n[2].Addr4(), n[2].Pods4)
}

// fatal is an error that no retry can cure.
type fatal struct{ error }

func (f fatal) Unwrap() error { return f.error }

// Eventually repeats try until it returns no error, or ctx ends: then it returns the last error.
func Eventually(ctx context.Context, try func() error) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var last error // of a try that had its time
	for {
		err := try()
		var hopeless fatal
		if err == nil || errors.As(err, &hopeless) {
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), last)
		case <-tick.C:
		}
	}
}
