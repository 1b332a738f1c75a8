// Command demo shows Services of a Kubernetes cluster without kube-proxy: `make demo-kube`. It starts a
// cluster of three nodes (package cluster), runs shunt-kube on each, asks Services from a pod, from a
// node and from outside, and removes everything, even after Ctrl-C. It exits with 1 if a claim was not
// true.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/internal/story"
	"github.com/shunt-lb/shunt/kube/cluster"
)

const (
	exitUntrue      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// patience limits the whole demo. It takes half a minute on a machine without other work.
const patience = 5 * time.Minute

// demo is one run.
type demo struct {
	*story.Teller
	options     cluster.Options
	cluster     *cluster.Cluster
	pods, hosts []corev1.Pod
	web, local  *corev1.Service
}

func main() {
	var o cluster.Options
	o.Flags(flag.CommandLine)
	flag.Parse()
	if o.Kube == "" || o.Programs == "" || o.Helm == "" || o.Chart == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "demo: give --kube, --programs, --helm and --chart, or run `make demo-kube`")
		os.Exit(exitUsage)
	}
	told, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(told, o))
}

// run runs the whole demo, and returns the exit code.
func run(told context.Context, o cluster.Options) int {
	d := &demo{Teller: story.NewTeller(os.Stdout), options: o}
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(told, patience, fmt.Errorf("the demo took longer than %s", patience))
	defer cancel()
	err := d.Tell(ctx,
		story.Step("A cluster without kube-proxy", d.up),
		story.Step("Nobody balances", d.alone),
		story.Step("shunt-kube on every node", d.agents),
		story.Step("ClusterIP", d.clusterIP),
		story.Step("NodePort", d.nodePort),
		story.Step("LoadBalancer", d.loadBalancer),
	)
	if err != nil && told.Err() == nil {
		d.Claim(false, "%v", err)
	}
	d.down()
	if told.Err() != nil {
		d.Say("\ninterrupted: %v\n", err)
		return exitInterrupted
	}
	d.Say("\n%s\n", d.Claims.Verdict(time.Since(begin).Seconds()))
	if d.Claims.Untrue() > 0 {
		return exitUntrue
	}
	return 0
}

func (d *demo) up(ctx context.Context) (err error) {
	begin := time.Now()
	if d.cluster, err = cluster.Up(ctx, d.options); err != nil {
		return err
	}
	d.Say("%s\n", d.cluster.Draw())
	d.Claim(true, "a control plane and %d nodes, each in namespaces of its own (shunt-%s-…): ready after %.1f s", len(d.cluster.Nodes), d.cluster.ID(), time.Since(begin).Seconds())
	begin = time.Now()
	if d.pods, err = d.cluster.Serve(ctx, "web", false); err != nil {
		return err
	}
	if d.hosts, err = d.cluster.Serve(ctx, "host", true); err != nil {
		return err
	}
	d.Claim(true, "a web server in a pod of each node, and one in each node's own network: ready after %.1f s", time.Since(begin).Seconds())
	return nil
}

// outer are the addresses that an outer load balancer reports.
var outer = []netip.Addr{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("203.0.113.11")}

func (d *demo) alone(ctx context.Context) (err error) {
	const ports = "selector: {app: web}, ports: [{port: 80, targetPort: 8080}]"
	if d.web, err = d.cluster.Service(ctx, "web", "type: LoadBalancer, "+ports, outer[0]); err != nil {
		return err
	}
	if d.local, err = d.cluster.Service(ctx, "local", "type: LoadBalancer, externalTrafficPolicy: Local, "+ports, outer[1]); err != nil {
		return err
	}
	from := d.cluster.From(&d.pods[0])
	if answer, err := from.Ask(ctx, "tcp", d.pods[1].Status.PodIP+":8080"); err != nil || answer.Backend != d.pods[1].Name {
		return fmt.Errorf("a pod asks another one itself, and is answered by %q: %w", answer.Backend, errors.Join(err, ctx.Err()))
	}
	_, err = from.Ask(ctx, "tcp", d.web.Spec.ClusterIP+":80")
	d.Claim(err != nil, "%s reaches the pod of n2 itself, and cannot reach the Service %s: nobody on the node knows it", from.Name, d.web.Spec.ClusterIP)
	return nil
}

func (d *demo) agents(ctx context.Context) error {
	begin := time.Now()
	if err := d.cluster.Install(ctx, nil); err != nil {
		return err
	}
	if err := d.cluster.AwaitAgents(ctx); err != nil {
		return err
	}
	d.Claim(true, "the chart in deploy/helm/shunt-kube, installed by Helm: in step with the cluster after %.1f s", time.Since(begin).Seconds())
	return nil
}

// shows lets clients ask an address until exactly these pods have answered.
func (d *demo) shows(ctx context.Context, address string, by []string, clients ...cluster.Client) error {
	for _, from := range clients {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		seen, err := from.Served(ctx, "tcp", address, by...)
		if err != nil {
			return err
		}
		var counts []string
		for name, n := range seen {
			counts = append(counts, fmt.Sprintf("%s %d×", name, n))
		}
		slices.Sort(counts)
		d.Claim(true, "%-14s → %-18s answered by %s", from.Name, address, strings.Join(counts, ", "))
	}
	return nil
}

func (d *demo) pod() cluster.Client  { return d.cluster.From(&d.pods[0]) }
func (d *demo) node() cluster.Client { return d.cluster.From(&d.hosts[0]) }

func (d *demo) clusterIP(ctx context.Context) error {
	d.Say("  connect() is given a pod's address, by programs at the node's cgroup; no packet is changed.\n\n")
	return d.shows(ctx, cluster.At(d.web.Spec.ClusterIP, 80), cluster.Names(d.pods), d.pod(), d.node())
}

func (d *demo) nodePort(ctx context.Context) error {
	d.Say("  Packets from other machines are balanced at the node's interfaces; programs of the cluster still connect straight to a pod.\n\n")
	port := d.web.Spec.Ports[0].NodePort
	if err := d.shows(ctx, cluster.At(d.cluster.Nodes[0].Addr4().String(), port), cluster.Names(d.pods), d.cluster.FromOutside(), d.pod(), d.node()); err != nil {
		return err
	}
	return d.shows(ctx, cluster.At(d.cluster.Nodes[1].Addr4().String(), port), cluster.Names(d.pods), d.cluster.FromOutside())
}

func (d *demo) loadBalancer(ctx context.Context) error {
	if err := d.shows(ctx, outer[0].String()+":80", cluster.Names(d.pods), d.cluster.FromOutside(), d.pod(), d.node()); err != nil {
		return err
	}
	d.Say("\n  With externalTrafficPolicy: Local the node's own pods answer, and see the client's address.\n\n")
	if err := d.shows(ctx, outer[1].String()+":80", cluster.Names(d.pods[:1]), d.cluster.FromOutside()); err != nil {
		return err
	}
	answer, err := d.cluster.FromOutside().Ask(ctx, "tcp", outer[1].String()+":80")
	if err != nil {
		return err
	}
	client, err := netip.ParseAddrPort(answer.Remote)
	if err != nil {
		return err
	}
	d.Claim(client.Addr() == d.cluster.Outside.Addr4(), "%s saw %s, the client's own address", answer.Backend, client.Addr())
	return nil
}

// down is a step, too, but one that is never skipped.
func (d *demo) down() {
	if d.cluster == nil {
		return // Up has removed its own remains
	}
	d.Begin("Everything goes")
	begin := time.Now()
	if err := d.cluster.Down(); err != nil {
		d.Claim(false, "taken away: %v", err)
		return
	}
	left, err := d.cluster.Left()
	if err != nil {
		d.Claim(false, "looked for what is left: %v", err)
		return
	}
	d.Claim(len(left) == 0, "no namespace, cgroup, mount, process or file of it is left after %.1f s%s", time.Since(begin).Seconds(), strings.Join(append([]string{""}, left...), "; "))
}
