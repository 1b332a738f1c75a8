package net

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// A shunt process with clusterVariable has a source that declares what a file of gob says, whenever it changes.
const clusterVariable = "SHUNT_NET_CLUSTER"

// declared is the declaration of a source of a cluster's node.
type declared struct {
	Services      []model.Service
	Decapsulation model.Decapsulation
}

func declaredIn(path string) (d declared, text []byte) {
	text, err := os.ReadFile(path)
	if err != nil || len(text) == 0 {
		return d, nil
	}
	if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&d); err != nil {
		panic(fmt.Sprint("the test's own file has faults: ", err))
	}
	return d, text
}

// clusterSource follows the file.
func clusterSource(path string, log *slog.Logger) daemon.Source {
	return daemon.Source{
		Name:  "cluster",
		First: func() []model.Service { d, _ := declaredIn(path); return d.Services },
		FirstDecapsulation: func() *model.Decapsulation {
			d, text := declaredIn(path)
			if text == nil {
				return nil
			}
			return &d.Decapsulation
		},
		Run: func(ctx context.Context, declare func(daemon.Change) error) {
			_, last := declaredIn(path)
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for {
				if d, text := declaredIn(path); text != nil && !bytes.Equal(text, last) {
					last = text
					if err := declare(daemon.Change{Declare: d.Services, Whole: true, Decapsulation: &d.Decapsulation}); err != nil {
						log.Error("cluster refused", "error", err)
					} else {
						log.Info("cluster taken", "services", len(d.Services))
					}
				}
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
			}
		},
	}
}

// clusterBed is three nodes of a cluster with direct return between nodes, behind a router. Each has pods, of which some
// are ready.
type clusterBed struct {
	*lab.Mesh
	t       *testing.T
	daemons []*process
	folder  string
	gue     bool
	near    *lab.Host            // a client at the nodes' own link, which no node has asked for yet
	pods    map[string]*lab.Host // by name
	ready   [][]string           // names of the endpoints of a node
	version int
}

var (
	clusterVIPs  = []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}
	clusterPorts = []uint16{80, 5353} // of the VIPs, and of the pods 8080 and 5353
)

const clusterNodePort = 30080

func newClusterBed(t *testing.T, gue bool, attach string) *clusterBed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces and BPF need root: run the tests with sudo")
	}
	t.Parallel()
	id := fmt.Sprintf("n%dx%d", os.Getpid(), beds.Add(1))
	mesh, err := lab.BuildMesh(within(t, 20*time.Second), id, 3, tunnelMTU)
	if err != nil {
		t.Fatal(err)
	}
	b := &clusterBed{Mesh: mesh, t: t, folder: t.TempDir(), gue: gue, daemons: make([]*process, 3), pods: map[string]*lab.Host{}, ready: make([][]string, 3)}
	t.Cleanup(b.close)
	for n, m := range b.Machines {
		names := []string{fmt.Sprintf("p%d1", n+1), fmt.Sprintf("p%d2", n+1)}
		pods, err := b.AddPods(m, "cni0", netip.MustParsePrefix(fmt.Sprintf("10.88.%d.1/24", n+1)), netip.MustParsePrefix(fmt.Sprintf("2001:db8:88:%d::1/64", n+1)), names...)
		if err == nil {
			err = m.SetForwarding(true)
		}
		if err != nil {
			t.Fatal(err)
		}
		for i, pod := range pods {
			b.pods[names[i]] = pod
			if _, err := pod.ServeHTTP(":8080", names[i]); err != nil {
				t.Fatal(err)
			}
			if _, err := pod.ServeUDP(":5353", names[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if b.near, err = b.AddHost("near"); err != nil {
		t.Fatal(err)
	}
	if err := b.ConnectPort(lab.End{Host: b.near, Interface: "eth0", IPv4: netip.MustParsePrefix("10.0.0.77/24"), IPv6: netip.MustParsePrefix("2001:db8:1::77/64")}, b.Switch, "br0", lab.Cable{MTU: tunnelMTU}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.Ready(within(t, 20*time.Second)), b.SetHashPolicy(1)); err != nil {
		t.Fatal(err)
	}
	for n := range b.Machines {
		text := "interfaces: [{name: eth0, attach: " + attach + "}, {name: cni0, attach: tc}]\nlimits: {flows: 20000}\n"
		if err := os.WriteFile(b.path(n), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

func (b *clusterBed) instance(n int) string { return b.ID() + "-" + b.Machines[n].Name() }
func (b *clusterBed) file(n int, suffix string) string {
	return filepath.Join(b.folder, b.instance(n)+suffix)
}
func (b *clusterBed) path(n int) string { return b.file(n, ".yaml") }

// services are the services of a node: level 1 of all, and its own level 2.
func (b *clusterBed) services(n int) declared {
	d := declared{Decapsulation: model.Decapsulation{Tunnelled: true}}
	forwarding := model.ForwardingDSRIPIP
	if b.gue {
		forwarding = model.ForwardingDSRGUE
	}
	one := func(port uint16) value.PortRange { return value.PortRange{First: port, Last: port} }
	service := func(name string, forwarding model.Forwarding, tunnels bool, backends []model.Backend, frontends ...model.Frontend) {
		d.Services = append(d.Services, model.Service{Name: name, Forwarding: forwarding, Announce: model.AnnounceNone, Tracking: model.TrackingAuto,
			TableSize: 2039, Policy: model.Policy{Tunnelled: tunnels, Rejects: true}, Backends: backends, Frontends: frontends})
	}
	var nodes []model.Backend
	backend := func(a netip.Addr, port uint16, weight int) model.Backend {
		ap := model.BackendAddress{Address: a, Port: port}
		return model.Backend{BackendAddress: ap, Weight: uint16(weight), Name: ap.String()}
	}
	for i, m := range b.Machines {
		for _, a := range []netip.Addr{m.Addr4(), m.Addr6()} {
			d.Decapsulation.From = append(d.Decapsulation.From, netip.PrefixFrom(a, a.BitLen()))
			d.Decapsulation.Nodes = append(d.Decapsulation.Nodes, a)
			if len(b.ready[i]) > 0 {
				nodes = append(nodes, backend(a, 0, len(b.ready[i])))
			}
		}
	}
	for i, protocol := range []model.Protocol{model.TCP, model.UDP} {
		pod := []uint16{8080, 5353}[i]
		var own []model.Backend
		for _, name := range b.ready[n] {
			own = append(own, backend(b.pods[name].Addr4(), pod, 1), backend(b.pods[name].Addr6(), pod, 1))
		}
		var outer, inner []model.Frontend
		for _, vip := range clusterVIPs {
			f := model.Frontend{Address: vip, Ports: one(clusterPorts[i]), Protocol: protocol}
			outer = append(outer, f)
			f.Protocol |= model.Tunnelled
			inner = append(inner, f)
		}
		for j, a := range []netip.Addr{b.Machines[n].Addr4(), b.Machines[n].Addr6()} {
			f := model.Frontend{Address: a, Ports: one(clusterNodePort), Protocol: protocol}
			outer = append(outer, f)
			f.Protocol |= model.Tunnelled
			f.Address = []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[j]
			inner = append(inner, f)
		}
		service(protocol.String(), forwarding, true, nodes, outer...)
		service(protocol.String()+"@node", model.ForwardingNATDestination, false, own, inner...)
	}
	return d
}

// declare has all nodes know the endpoints of each: ready is by node.
func (b *clusterBed) declare(ready ...[]string) {
	b.t.Helper()
	b.version++
	b.ready = ready
	for n := range b.Machines {
		before := 0
		if b.daemons[n] != nil {
			before = strings.Count(b.daemons[n].log(), "cluster taken")
		}
		var text bytes.Buffer
		if err := gob.NewEncoder(&text).Encode(b.services(n)); err != nil {
			b.t.Fatal(err)
		}
		next := b.file(n, ".next")
		if err := errors.Join(os.WriteFile(next, text.Bytes(), 0o644), os.Rename(next, b.file(n, ".cluster"))); err != nil {
			b.t.Fatal(err)
		}
		if b.daemons[n] != nil {
			eventually(b.t, 10*time.Second, "the change on "+b.Machines[n].Name(), func() error {
				if strings.Count(b.daemons[n].log(), "cluster taken") > before {
					return nil
				}
				return errors.New(b.daemons[n].log())
			})
		}
	}
}

func (b *clusterBed) start(n int) {
	b.t.Helper()
	c := command(b.Machines[n], "run", "--config", b.path(n), "--instance", b.instance(n), "--socket", b.file(n, ".sock"))
	c.Env = append(c.Env, clusterVariable+"="+b.file(n, ".cluster"))
	b.daemons[n] = starts(b.t, c)
	eventually(b.t, 2*time.Minute, "shunt run on "+b.Machines[n].Name(), func() error {
		if strings.Contains(b.daemons[n].log(), "msg=running") {
			return nil
		}
		select {
		case <-b.daemons[n].ended:
			b.t.Fatalf("shunt run ended: %v\n%s", b.daemons[n].Err(), b.daemons[n].log())
		default:
		}
		return errors.New(b.daemons[n].log())
	})
	if log := b.daemons[n].log(); strings.Contains(log, "cannot send to backend") { // its own address, until it decapsulates
		b.t.Errorf("shunt run on %s calls a backend out of reach:\n%s", b.Machines[n].Name(), log)
	}
}

func (b *clusterBed) end(n int, signal syscall.Signal) {
	b.t.Helper()
	if err := b.daemons[n].end(signal); err != nil {
		b.t.Errorf("shunt run on %s: %v\n%s", b.Machines[n].Name(), err, b.daemons[n].log())
	}
	b.daemons[n] = nil
}

func (b *clusterBed) status(n int) string {
	out, _ := command(b.Machines[n], "status", "--all", "--instance", b.instance(n), "--socket", b.file(n, ".sock")).CombinedOutput()
	return string(out)
}

func (b *clusterBed) close() {
	for n, p := range b.daemons {
		if p == nil {
			continue
		}
		if b.t.Failed() {
			b.t.Logf("%s:\n%s\n%s", b.Machines[n].Name(), p.log(), b.status(n))
		}
		b.end(n, syscall.SIGTERM)
	}
	for n, m := range b.Machines {
		if value, err := m.Sysctl("net.ipv4.conf.all.arp_ignore"); err != nil || value != "0" {
			b.t.Errorf("%s: arp_ignore is %q, want 0: the stack has no part in it; %v", m.Name(), value, err)
		}
		for _, suffix := range []string{".server", ".loopback"} {
			if _, err := os.Stat(filepath.Join("/run/shunt", b.instance(n)+suffix)); err == nil {
				b.t.Errorf("%s has left %s", m.Name(), suffix)
			}
		}
	}
	if err := b.Close(); err != nil {
		b.t.Error(err)
	}
}

// lead has the router lead the VIPs to these nodes.
func (b *clusterBed) lead(machines ...int) {
	b.t.Helper()
	var to []*lab.Host
	for _, n := range machines {
		to = append(to, b.Machines[n])
	}
	for _, vip := range clusterVIPs {
		if err := b.Lead(vip, to...); err != nil {
			b.t.Fatal(err)
		}
	}
}

// conversation is a client's flow with the pod that it began with.
type conversation struct {
	*lab.Session
	pod string
}

// ask asks on the flow. The pod sees the client's own address, and stays the same.
func (c *conversation) ask(ctx context.Context) error {
	answer, err := c.Ask(ctx, "/asked")
	if err != nil {
		return err
	}
	saw, err := netip.ParseAddrPort(answer.Remote)
	// The port is another one if the client has a flow from it to another service of the same pod.
	if own := netip.MustParseAddrPort(c.LocalAddr().String()); err != nil || saw.Addr().Unmap() != own.Addr().Unmap() {
		return fmt.Errorf("pod %s saw %s of %s; %w", answer.Backend, answer.Remote, own, err)
	}
	if c.pod == "" {
		c.pod = answer.Backend
	}
	if c.pod != answer.Backend {
		return fmt.Errorf("pod %s answers a flow of %s", answer.Backend, c.pod)
	}
	return nil
}

// converse begins so many flows with an address, some at a time.
func (b *clusterBed) converse(network string, to netip.AddrPort, count int) (all []*conversation, served map[string]int) {
	b.t.Helper()
	all, served = make([]*conversation, count), map[string]int{}
	b.each(count, "begin with "+to.String(), func(ctx context.Context, i int) error {
		s, err := b.Client.OpenSession(ctx, network, netip.AddrPort{}, to.String())
		if err != nil {
			return err
		}
		b.t.Cleanup(func() { _ = s.Close() })
		all[i] = &conversation{Session: s}
		return all[i].ask(ctx)
	})
	for _, c := range all {
		served[c.pod]++
	}
	return all, served
}

// goOn asks once more on all flows.
func (b *clusterBed) goOn(what string, all []*conversation) {
	b.t.Helper()
	b.each(len(all), what, func(ctx context.Context, i int) error { return all[i].ask(ctx) })
}

func (b *clusterBed) each(count int, what string, do func(ctx context.Context, i int) error) {
	b.t.Helper()
	const atOnce = 16
	ctx := within(b.t, time.Minute)
	errs := make([]error, count)
	var wait sync.WaitGroup
	for worker := range atOnce {
		wait.Go(func() {
			for i := worker; i < count; i += atOnce {
				errs[i] = do(ctx, i)
			}
		})
	}
	wait.Wait()
	if errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil }); len(errs) > 0 {
		b.t.Fatalf("%s: %d of %d flows broke: %v", what, len(errs), count, errors.Join(errs[:min(len(errs), 20)]...))
	}
}

// returns are the frames from the VIPs to the client, by the machine that sent them to the router.
type returns struct {
	sync.Mutex
	by map[string]int
}

func (b *clusterBed) watchReturns() (r *returns, stop func()) {
	b.t.Helper()
	capture, err := b.Router.Capture("eth1")
	if err != nil {
		b.t.Fatal(err)
	}
	names := map[string]string{}
	for _, m := range b.Machines {
		names[m.Interfaces()[0].MAC.String()] = m.Name()
	}
	r = &returns{by: map[string]int{}}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for f := range capture.Frames() {
			p, err := packet.Parse(f.Data)
			if err != nil || f.Outgoing || p.Destination() != b.Client.Addr4() && p.Destination() != b.Client.Addr6() {
				continue
			}
			r.Lock()
			r.by[names[p.Ethernet.Source.String()]]++
			r.Unlock()
		}
	}()
	return r, func() {
		capture.Close()
		<-ended
		if n := capture.Dropped(); n > 0 {
			b.t.Errorf("the capture has lost %d frames", n)
		}
	}
}

// reasons that nothing here has, on any node.
var clusterFaults = []string{"tunnelled_unknown", "decap_sender", "decap_not_vip", "internal", "unresolved", "egress_unlisted", "host_backend", "too_big", "redirect_refused", "tx_refused", "flow_moved", "no_source"}

func (b *clusterBed) nothingIsLost() {
	b.t.Helper()
	for n, m := range b.Machines {
		reasons := b.reasons(n)
		for _, reason := range clusterFaults {
			if count := reasons[reason]; count > 0 {
				b.t.Errorf("%s counts %s %d times", m.Name(), reason, count)
			}
		}
	}
}

// reasons are the packets that a node has counted.
func (b *clusterBed) reasons(n int) map[string]uint64 {
	b.t.Helper()
	out, err := command(b.Machines[n], "status", "-o", "json", "--instance", b.instance(n), "--socket", b.file(n, ".sock")).Output()
	var s status
	if err == nil {
		err = json.Unmarshal(out, &s)
	}
	if err != nil {
		b.t.Fatalf("shunt status on %s: %v\n%s", b.Machines[n].Name(), err, out)
	}
	all := map[string]uint64{}
	for reason, count := range s.Reasons {
		all[reason] = count.Packets
	}
	return all
}

// clusterFlows is the number of flows to one address. Both ends of the flows of three variants are in this process: 7,200
// descriptors for 200.
func clusterFlows() int {
	switch {
	case testing.Short():
		return 90
	case soak:
		return 400
	}
	return 200
}

// TestCluster: pods of other nodes see clients' addresses and answer past the node that the packets came to, which may be replaced by another
// at any time; and endpoints and daemons come and go without a broken flow.
func TestCluster(t *testing.T) {
	for _, c := range []struct {
		gue    bool
		attach string
	}{{true, "native"}, {false, "native"}, {true, "generic"}} {
		if testing.Short() && (c.attach == "generic" || !c.gue) {
			continue // an emulated machine needs minutes for the verifier
		}
		gue := c.gue
		t.Run(map[bool]string{true: "gue", false: "ipip"}[gue]+"/"+c.attach, func(t *testing.T) {
			flows := clusterFlows()
			b := newClusterBed(t, gue, c.attach)
			b.declare(nil, []string{"p21", "p22"}, []string{"p31"})
			for n := range b.Machines {
				b.start(n)
			}
			b.lead(0)
			watched, stop := b.watchReturns()
			var all []*conversation
			for _, to := range []struct {
				network string
				netip.AddrPort
			}{
				{"tcp", netip.AddrPortFrom(clusterVIPs[0], 80)}, {"tcp", netip.AddrPortFrom(clusterVIPs[1], 80)},
				{"udp", netip.AddrPortFrom(clusterVIPs[0], 5353)}, {"udp", netip.AddrPortFrom(clusterVIPs[1], 5353)},
				{"tcp", netip.AddrPortFrom(b.Machines[0].Addr4(), clusterNodePort)}, {"udp", netip.AddrPortFrom(b.Machines[0].Addr6(), clusterNodePort)},
				{"tcp", netip.AddrPortFrom(b.Machines[1].Addr6(), clusterNodePort)}, {"udp", netip.AddrPortFrom(b.Machines[1].Addr4(), clusterNodePort)},
			} {
				some, served := b.converse(to.network, to.AddrPort, flows)
				if len(served) != 3 || served["p11"]+served["p12"] > 0 {
					t.Errorf("%s %s is served by %v, want the three endpoints", to.network, to.AddrPort, served)
				}
				for pod, n := range served { // each has a third
					if n < flows/10 || n > flows*2/3 {
						t.Errorf("%s %s: %s serves %d of %d", to.network, to.AddrPort, pod, n, flows)
					}
				}
				all = append(all, some...)
			}
			stop()
			for _, c := range []struct{ network, address string }{
				{"udp", netip.AddrPortFrom(b.Machines[0].Addr4(), clusterNodePort).String()}, {"tcp", netip.AddrPortFrom(b.Machines[0].Addr4(), clusterNodePort).String()},
				{"udp", netip.AddrPortFrom(b.Machines[0].Addr6(), clusterNodePort).String()}, {"tcp", netip.AddrPortFrom(b.Machines[0].Addr6(), clusterNodePort).String()},
			} {
				for range 12 { // to both nodes with pods
					s, err := b.near.OpenSession(within(t, 10*time.Second), c.network, netip.AddrPort{}, c.address)
					if err != nil {
						t.Fatalf("a client at the nodes' link, %s %s: %v", c.network, c.address, err)
					}
					t.Cleanup(func() { _ = s.Close() })
					all = append(all, &conversation{Session: s})
					if err := all[len(all)-1].ask(within(t, 10*time.Second)); err != nil {
						t.Errorf("a client at the nodes' link, %s %s: %v", c.network, c.address, err)
					}
				}
			}
			if watched.by["m1"] > 0 || watched.by["m2"] < flows || watched.by["m3"] < flows {
				t.Errorf("frames to the client came by %v, want m2 and m3 alone", watched.by)
			}
			b.goOn("once more", all)
			b.lead(1) // the first node goes, and its connections go on by one that has endpoints itself
			b.goOn("by another node", all)
			b.lead(0, 1, 2)
			b.goOn("by all", all)

			b.declare([]string{"p11"}, []string{"p21", "p22"}, []string{"p31", "p32"}) // endpoints come …
			b.goOn("with more endpoints", all)
			if _, served := b.converse("tcp", netip.AddrPortFrom(clusterVIPs[0], 80), flows); len(served) != 5 {
				t.Errorf("new flows are served by %v, want five endpoints", served)
			}
			b.goOn("with more endpoints", all)
			b.declare(nil, []string{"p21", "p22"}, []string{"p31", "p32"}) // … and go
			b.goOn("with an endpoint less", all)

			for n := range b.Machines { // the data planes go on alone, and are taken over
				b.end(n, syscall.SIGKILL)
			}
			b.goOn("without daemons", all)
			if _, served := b.converse("udp", netip.AddrPortFrom(clusterVIPs[0], 5353), flows/10); len(served) < 3 {
				t.Errorf("without daemons new flows are served by %v", served)
			}
			for n := range b.Machines {
				b.start(n)
			}
			b.goOn("taken over", all)
			b.nothingIsLost()
			for n := range b.Machines {
				taken := b.reasons(n)[map[bool]string{true: "decap_gue", false: "decap_ipip"}[gue]]
				if n > 0 && taken < uint64(flows) {
					t.Errorf("%s has taken %d packets out of tunnels", b.Machines[n].Name(), taken)
				}
			}
		})
	}
}

// TestClusterUnderLoad: while flows are asked on all the time, endpoints come and go, senders are listed anew, and the node that has the
// VIP changes. No flow whose endpoint stays breaks.
func TestClusterUnderLoad(t *testing.T) {
	b := newClusterBed(t, true, "native")
	b.declare(nil, []string{"p21", "p22"}, []string{"p31"})
	for n := range b.Machines {
		b.start(n)
	}
	b.lead(0)
	flows := 100
	if testing.Short() {
		flows = 20
	}
	over, _ := b.converse("tcp", netip.AddrPortFrom(clusterVIPs[0], 80), flows)
	more, _ := b.converse("tcp", netip.AddrPortFrom(clusterVIPs[1], 80), flows)
	over = append(over, more...)
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	broken := make(chan error, len(over))
	asked := make([]int, len(over))
	for i, c := range over {
		wait.Go(func() {
			for ctx.Err() == nil {
				within, done := context.WithTimeout(t.Context(), patience*20*time.Second)
				err := c.ask(within)
				done()
				if err != nil {
					broken <- err
					return
				}
				asked[i]++
			}
		})
	}
	for range 3 {
		b.declare([]string{"p11", "p12"}, []string{"p21", "p22"}, []string{"p31"})
		b.lead(1)
		b.declare(nil, []string{"p21", "p22"}, []string{"p31", "p32"})
		b.lead(2, 0)
		b.declare(nil, []string{"p21", "p22"}, []string{"p31"})
		b.lead(0)
	}
	cancel()
	wait.Wait()
	close(broken)
	for err := range broken {
		t.Error(err)
	}
	total := 0
	for _, n := range asked {
		total += n
	}
	t.Logf("%d flows asked %d times during nine changes", len(over), total)
	if total < 10*len(over) {
		t.Errorf("%d flows asked %d times only: it was no load", len(over), total)
	}
	b.nothingIsLost()
}
