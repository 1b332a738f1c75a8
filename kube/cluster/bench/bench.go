package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/kube/cluster"
	"github.com/shunt-lb/shunt/kube/cluster/meter"
)

// bench is one run.
type bench struct {
	*cluster.Cluster
	settings settings
	results  results

	client, here, there corev1.Pod   // client and here are pods of n1, there is a pod of n2
	servers             []corev1.Pod // one a node
	local, remote, flip *corev1.Service
	ways                []way
	filled              int
	last                string // address and port of the last Service that fill has made
}

// way has the client and the address by which a server is asked.
type way struct {
	name    string
	outside bool // the client is
	to      netip.AddrPort
	// measure sends to the address.
	measure func(ctx context.Context, kind traffic.Kind, to netip.AddrPort, duration time.Duration) (meter.Sample, error)
}

// kinds are the measurements on each way, with their names on the page.
var kinds = []struct {
	kind traffic.Kind
	name string
}{{traffic.CRR, "TCP connections with one request"}, {traffic.RR, "TCP requests, one connection"}, {traffic.UDPRR, "UDP requests"}}

// ports are the pods' ports, by the names of the Services' ports.
var ports = map[string]int32{"tcp": meter.Port, "udp": meter.Port, "http": 8080}

const servicePorts = "ports: [{name: tcp, port: 9000}, {name: udp, port: 9000, protocol: UDP}, {name: http, port: 80}]"

// node returns the node that has a balancer.
func (b *bench) node() *cluster.Node { return b.Nodes[0] }

func newBench(ctx context.Context, c *cluster.Cluster, s settings) (b *bench, err error) {
	b = &bench{Cluster: c, settings: s, results: results{Command: "make bench-kube BENCHFLAGS='" + flagsOf(s) + "'", Unmeasured: unmeasured(), Duration: s.duration}}
	if b.results.Machine, err = machine.Describe(); err != nil {
		return nil, err
	}
	if b.results.Programs, err = versions(s.options.Kube); err != nil {
		return nil, err
	}
	clients, err := c.ServeLoad(ctx, "client")
	if err != nil {
		return nil, fmt.Errorf("start the client: %w", err)
	}
	if b.servers, err = c.ServeLoad(ctx, "server"); err != nil {
		return nil, fmt.Errorf("start the servers: %w", err)
	}
	b.client, b.here, b.there = clients[0], b.servers[0], b.servers[1]
	// The client outside opens as many connections as the client in the pod (kube/cluster/pod).
	if err := c.Outside.SetSysctl("net.ipv4.tcp_tw_reuse", "1"); err != nil {
		return nil, err
	}
	for name, x := range map[string]struct {
		into **corev1.Service
		spec string
		pod  corev1.Pod
	}{
		"local":  {&b.local, "type: NodePort, externalTrafficPolicy: Local, " + servicePorts, b.here},
		"remote": {&b.remote, "type: NodePort, " + servicePorts, b.there},
		"flip":   {&b.flip, servicePorts, b.here},
	} {
		if *x.into, err = c.Service(ctx, name, x.spec); err != nil {
			return nil, err
		}
		if err := c.Point(ctx, *x.into, ports, x.pod); err != nil {
			return nil, err
		}
	}
	for _, n := range []*cluster.Node{b.node(), c.Nodes[1]} {
		if err := c.LabelNode(ctx, n, directLabel, ""); err != nil {
			return nil, err
		}
	}
	b.ways = slices.DeleteFunc(b.allWays(), func(w way) bool { return !s.ways.MatchString(w.name) })
	return b, nil
}

func (b *bench) allWays() []way {
	inside := func(ctx context.Context, kind traffic.Kind, to netip.AddrPort, duration time.Duration) (meter.Sample, error) {
		return b.Measure(ctx, &b.client, kind, to, duration)
	}
	outside := func(_ context.Context, kind traffic.Kind, to netip.AddrPort, duration time.Duration) (meter.Sample, error) {
		return meter.Measure(b.Outside, kind, to, duration)
	}
	at := func(address string) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr(address), meter.Port)
	}
	// A node port has one number for TCP and another one for UDP.
	nodePort := func(of *corev1.Service) func(context.Context, traffic.Kind, netip.AddrPort, time.Duration) (meter.Sample, error) {
		return func(ctx context.Context, kind traffic.Kind, to netip.AddrPort, duration time.Duration) (meter.Sample, error) {
			port := of.Spec.Ports[0].NodePort
			if kind == traffic.UDPRR {
				port = of.Spec.Ports[1].NodePort
			}
			return outside(ctx, kind, netip.AddrPortFrom(to.Addr(), uint16(port)), duration)
		}
	}
	n1 := netip.AddrPortFrom(b.node().Addr4(), 0)
	return []way{
		{"Pod to cluster IP, endpoint on the node", false, at(b.local.Spec.ClusterIP), inside},
		{"Pod to pod of the node, no Service", false, at(b.here.Status.PodIP), inside},
		{"Pod to cluster IP, endpoint on another node", false, at(b.remote.Spec.ClusterIP), inside},
		{"Outside to node port, endpoint on the node (policy Local)", true, n1, nodePort(b.local)},
		{"Outside to pod of the node, no Service", true, at(b.here.Status.PodIP), outside},
		{"Outside to node port, endpoint on another node", true, n1, nodePort(b.remote)},
		{"Outside to pod of the other node, no Service", true, at(b.there.Status.PodIP), outside},
	}
}

// fillers is the number of goroutines that make Services.
const fillers = 8

// fill makes Services until there are n, not counting the measured ones. Each has one port, and all servers as
// endpoints.
func (b *bench) fill(ctx context.Context, n int) error {
	begin := time.Now()
	b.results.now.Services = n
	numbers := make(chan int)
	failed := make(chan error, fillers)
	var all sync.WaitGroup
	for range fillers {
		all.Go(func() {
			for i := range numbers {
				service, err := b.Service(ctx, fmt.Sprintf("filler-%05d", i), "ports: [{name: http, port: 80}]")
				if err == nil {
					err = b.Point(ctx, service, ports, b.servers...)
				}
				if err != nil {
					failed <- err
					return
				}
				if i == n-1 {
					b.last = cluster.At(service.Spec.ClusterIP, 80)
				}
			}
		})
	}
	err := func() error {
		defer close(numbers)
		for ; b.filled < n; b.filled++ {
			select {
			case numbers <- b.filled:
			case err := <-failed:
				return err
			}
		}
		return nil
	}()
	all.Wait()
	select {
	case err = <-failed: // the last ones
	default:
	}
	fmt.Printf("%d Services after %s\n", n, time.Since(begin).Round(time.Second))
	return err
}

// round measures each balancer once. They take turns at being the first.
func (b *bench) round(ctx context.Context, round int) error {
	all := b.balancers()
	b.results.now.Round = round
	for i := range all {
		balancer := all[(i+round)%len(all)]
		b.results.now.Balancer = balancer.name
		begin := time.Now()
		if err := b.part(ctx, balancer); err != nil {
			return fmt.Errorf("%d Services, round %d, %s: %w", b.filled, round+1, balancer.name, err)
		}
		if err := b.results.write(b.settings.results); err != nil {
			return err
		}
		fmt.Printf("%d Services, round %d of %d, %s: %s\n", b.filled, round+1, b.settings.rounds, balancer.name, time.Since(begin).Round(time.Second))
	}
	return nil
}

// part is a balancer's part of a round.
func (b *bench) part(ctx context.Context, with balancer) error {
	starting, cancel := context.WithTimeoutCause(ctx, startPatience, fmt.Errorf("it did not serve all within %s", startPatience))
	defer cancel()
	begin := time.Now()
	if err := with.start(starting); err != nil {
		return err
	}
	if err := b.served(starting); err != nil {
		return err
	}
	b.results.add("Start to all Services served", "s", time.Since(begin).Seconds())
	idle, err := b.quiet(ctx)
	if err != nil {
		return err
	}
	b.results.add(idleRow, "CPUs", idle)
	for _, w := range b.ways {
		if with.outside && !w.outside {
			continue
		}
		for _, k := range kinds {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			// Connections of earlier measurements must not take room from this one.
			if err := b.ForgetConnections(); err != nil {
				return err
			}
			sample, err := w.measure(ctx, k.kind, w.to, b.settings.duration)
			if err != nil {
				b.results.fail(w.name+": "+k.name, err)
				continue
			}
			b.results.add(w.name+": "+k.name, perSecond, sample.Rate())
			b.results.add(w.name+": "+k.name, cpuOfEach, float64(sample.CPUPerTransaction(idle).Nanoseconds())/1000)
		}
	}
	if !with.outside {
		if err := b.change(ctx); err != nil {
			return err
		}
	}
	if err := with.alive(); err != nil {
		return err
	}
	stopping, cancel := context.WithTimeoutCause(ctx, startPatience, fmt.Errorf("it was not gone within %s", startPatience))
	defer cancel()
	return with.stop(stopping)
}

// served waits until the balancer serves the Services of the measurements, and the last one that was made.
func (b *bench) served(ctx context.Context) error {
	from := b.From(&b.client)
	return cluster.Eventually(ctx, func() error {
		for _, address := range []string{cluster.At(b.local.Spec.ClusterIP, 80), cluster.At(b.remote.Spec.ClusterIP, 80), cluster.At(b.flip.Spec.ClusterIP, 80), b.last} {
			if _, err := from.Ask(ctx, "tcp", address); err != nil {
				return err
			}
		}
		for _, of := range []*corev1.Service{b.local, b.remote} {
			if _, err := b.FromOutside().Ask(ctx, "tcp", cluster.At(b.node().Addr4().String(), of.Spec.Ports[2].NodePort)); err != nil {
				return err
			}
		}
		return nil
	})
}

// A machine is quiet when two windows in a row differ by less than this many CPUs, or after the last window.
const (
	quietWindow = time.Second
	quietWithin = 0.05
	quietMost   = 60
)

// quiet waits until the work of a start has ended, and returns the number of CPUs that are busy then.
func (b *bench) quiet(ctx context.Context) (busy float64, err error) {
	before := -1.0
	for range quietMost {
		if busy, err = b.busy(ctx, quietWindow); err != nil {
			return 0, err
		}
		if before >= 0 && busy-before < quietWithin && before-busy < quietWithin {
			break
		}
		before = busy
	}
	return b.busy(ctx, max(quietWindow, b.settings.duration))
}

// busy returns the number of CPUs that work during a time.
func (b *bench) busy(ctx context.Context, during time.Duration) (float64, error) {
	begin := time.Now()
	before, err := meter.Busy()
	if err != nil {
		return 0, err
	}
	select {
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	case <-time.After(during):
	}
	after, err := meter.Busy()
	return (after - before).Seconds() / time.Since(begin).Seconds(), err
}

// Each change comes long after the one before has been carried out. By default, kube-proxy leaves a second between two.
const (
	changeInterval = 1500 * time.Millisecond
	changeLimit    = 2 * time.Minute
)

// change gives a Service another endpoint again and again, and measures the time until new connections go there.
func (b *bench) change(ctx context.Context) error {
	address := cluster.At(b.flip.Spec.ClusterIP, 80)
	for i := range b.settings.changes {
		to := b.there
		if i%2 == 1 {
			to = b.here
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(changeInterval):
		}
		var turn meter.Turn
		var failed error
		var waiting sync.WaitGroup
		waiting.Go(func() { turn, failed = b.Until(ctx, &b.client, address, to.Name, changeLimit) })
		begin := time.Now()
		err := b.Repoint(ctx, b.flip, ports, to)
		waiting.Wait()
		if err != nil {
			return err
		}
		if failed != nil {
			b.results.fail("Change of endpoints to new connections", failed)
			continue
		}
		b.results.add("Change of endpoints to new connections", "ms", float64(turn.At.Sub(begin).Microseconds())/1000)
	}
	return b.Repoint(ctx, b.flip, ports, b.here)
}

// versions returns the versions of the programs that take part.
func versions(kube string) (map[string]string, error) {
	all := map[string]string{}
	for name, command := range map[string][]string{"kube-proxy": {kube, "kube-proxy", "--version"}, "nft": {"nft", "--version"}, "iptables": {"iptables", "--version"}} {
		output, err := exec.Command(command[0], command[1:]...).Output()
		if err != nil {
			return nil, fmt.Errorf("%s: %w: install the packages nftables and iptables", strings.Join(command, " "), err)
		}
		all[name] = strings.TrimSpace(string(output))
	}
	return all, nil
}

// unmeasured lists the measurements that this program does not make, with the reasons.
func unmeasured() []string {
	all := []string{
		"Packets offered at a fixed rate: each rate here is of one client that waits for each answer. `bench/offered` offers them, to one Service with the same rules.",
	}
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		return append(all, "kube-proxy in mode ipvs: this kernel has no IPVS.")
	}
	return append(all, "kube-proxy in mode ipvs: this program has no column for it, although this kernel has IPVS.")
}

func flagsOf(s settings) string {
	var numbers []string
	for _, n := range s.services {
		numbers = append(numbers, fmt.Sprint(n))
	}
	text := fmt.Sprintf("--services %s --rounds %d --duration %s --changes %d", strings.Join(numbers, ","), s.rounds, s.duration, s.changes)
	if pattern := s.ways.String(); pattern != "" {
		text += fmt.Sprintf(" --ways %q", pattern)
	}
	return text
}

// mostServices is the number of Services for which the cluster's range of cluster IPs and shunt's slots have room.
const mostServices = 16000
