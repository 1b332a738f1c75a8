package net

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// meshBed has three machines that are all balancers and servers, behind a router with ECMP.
type meshBed struct {
	*lab.Mesh
	t       *testing.T
	daemons []*process // of the machines, in their order
	folder  string
}

// meshServices are one for each encapsulation, one of NAT whose server is the router, and one of NAT whose
// servers are the router and m1.
const meshServices = `
  - name: ipip
    address: [192.0.2.10, "2001:db8::10"]
    port: 8080
    protocol: [tcp, udp]
    forwarding: dsr-ipip
    announce: none
    health: {tcp: {}, interval: 300ms, timeout: 300ms, rise: 1, fall: 3}
    backends: BACKENDS
  - name: gue
    address: [192.0.2.11, "2001:db8::11"]
    port: 8080
    protocol: [tcp, udp]
    forwarding: dsr-gue
    announce: none
    backends: BACKENDS
  - name: nat
    address: [192.0.2.12, "2001:db8::12"]
    port: 80
    announce: none
    backends: [{address: 10.0.0.254, port: 8080}, {address: "2001:db8:1::254", port: 8080}]
  - name: half
    address: 192.0.2.13
    port: 80
    announce: none
    backends: [{address: 10.0.0.254, port: 8080}, {address: 10.0.0.1, port: 8080}]
`

var (
	meshVIPs    = []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10"), netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
	meshNATVIPs = []netip.Addr{netip.MustParseAddr("192.0.2.12"), netip.MustParseAddr("2001:db8::12")}
	meshHalfVIP = netip.MustParseAddr("192.0.2.13")
)

func newMeshBed(t *testing.T) *meshBed {
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
	b := &meshBed{Mesh: mesh, t: t, folder: t.TempDir(), daemons: make([]*process, 3)}
	t.Cleanup(b.close)
	for _, h := range append(b.Machines[:3:3], b.Router) {
		if _, err := h.ServeHTTP(":8080", h.Name()); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.SetHashPolicy(1); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *meshBed) instance(n int) string { return b.ID() + "-" + b.Machines[n].Name() }
func (b *meshBed) socket(n int) string   { return filepath.Join(b.folder, b.instance(n)+".sock") }
func (b *meshBed) path(n int) string     { return filepath.Join(b.folder, b.instance(n)+".yaml") }

// write gives a machine the common file, with its own attach mode and the backends on these machines.
func (b *meshBed) write(n int, attach string, machines ...int) {
	b.t.Helper()
	var backends []string
	for _, m := range machines {
		backends = append(backends, fmt.Sprintf("{address: %s}, {address: %q}", b.Machines[m].Addr4(), b.Machines[m].Addr6()))
	}
	text := "interfaces: [{name: eth0, attach: " + attach + "}]\ndecapsulation: {from: [10.0.0.0/24, \"2001:db8:1::/64\"]}\nservices:" +
		strings.ReplaceAll(meshServices, "BACKENDS", "["+strings.Join(backends, ", ")+"]")
	if err := os.WriteFile(b.path(n), []byte(text), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

func (b *meshBed) start(n int) {
	b.t.Helper()
	p := starts(b.t, command(b.Machines[n], "run", "--config", b.path(n), "--instance", b.instance(n), "--socket", b.socket(n)))
	b.daemons[n] = p
	eventually(b.t, 30*time.Second, "shunt run on "+b.Machines[n].Name(), func() error {
		if strings.Contains(p.log(), "msg=running") {
			return nil
		}
		select {
		case <-p.ended:
			b.t.Fatalf("shunt run ended: %v\n%s", p.Err(), p.log())
		default:
		}
		return errors.New(p.log())
	})
	eventually(b.t, 10*time.Second, "every backend is up", func() error {
		active := 16
		if n == 0 { // this machine cannot be its own server with NAT
			active = 15
		}
		if out := b.status(n); strings.Count(out, " active ") != active {
			return errors.New(out)
		}
		return nil
	})
}

// answerUDP makes a machine answer datagrams to the VIPs, which it has by now: a server that is bound to no
// address would answer from another one.
func (b *meshBed) answerUDP(n int) {
	b.t.Helper()
	for _, vip := range meshVIPs {
		if _, err := b.Machines[n].ServeUDP(netip.AddrPortFrom(vip, 8080).String(), b.Machines[n].Name()); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (b *meshBed) end(n int, signal syscall.Signal) {
	b.t.Helper()
	if err := b.daemons[n].end(signal); err != nil {
		b.t.Errorf("shunt run on %s: %v\n%s", b.Machines[n].Name(), err, b.daemons[n].log())
	}
	b.daemons[n] = nil
}

func (b *meshBed) shunt(n int, args ...string) (int, string) {
	out, err := command(b.Machines[n], args...).CombinedOutput()
	if err != nil {
		return 1, string(out)
	}
	return 0, string(out)
}

func (b *meshBed) close() {
	for n, p := range b.daemons {
		if p == nil {
			continue
		}
		if b.t.Failed() {
			b.t.Logf("%s:\n%s\n%s", b.Machines[n].Name(), p.log(), b.status(n))
		}
		b.end(n, syscall.SIGTERM)
		for _, vip := range meshVIPs {
			if b.has(n, vip) {
				b.t.Errorf("%s still has %s after shunt has ended", b.Machines[n].Name(), vip)
			}
		}
		if value, err := b.Machines[n].Sysctl("net.ipv4.conf.all.arp_ignore"); err != nil || value != "0" {
			b.t.Errorf("%s: arp_ignore is %q after shunt has ended, want 0; %v", b.Machines[n].Name(), value, err)
		}
	}
	if err := b.Close(); err != nil {
		b.t.Error(err)
	}
}

// has reports whether a machine has an address.
func (b *meshBed) has(n int, a netip.Addr) bool {
	list, err := b.Machines[n].Netlink().AddrList(nil, 0)
	if err != nil {
		b.t.Error(err)
	}
	for _, own := range list {
		if ip, _ := netip.AddrFromSlice(own.IP); ip.Unmap() == a {
			return true
		}
	}
	return false
}

// lead makes the router route all VIPs to these machines.
func (b *meshBed) lead(machines ...int) {
	b.t.Helper()
	var to []*lab.Host
	for _, n := range machines {
		to = append(to, b.Machines[n])
	}
	for _, vip := range append(append(meshVIPs[:4:4], meshNATVIPs...), meshHalfVIP) {
		if err := b.Lead(vip, to...); err != nil {
			b.t.Fatal(err)
		}
	}
}

// open opens connections to a VIP, from consecutive ports, and counts them by server.
func (b *meshBed) open(vip netip.Addr, port uint16, count int) (sessions []*lab.Session, served map[string]int) {
	b.t.Helper()
	served = map[string]int{}
	ctx := within(b.t, 30*time.Second)
	for range count {
		s, err := b.Client.OpenSession(ctx, "tcp", netip.AddrPort{}, netip.AddrPortFrom(vip, port).String())
		if err != nil {
			b.t.Fatalf("connect to %s: %v", vip, err)
		}
		b.t.Cleanup(func() { _ = s.Close() })
		answer, err := s.Ask(ctx, "/first")
		if err != nil {
			b.t.Fatal(err)
		}
		served[answer.Backend]++
		sessions = append(sessions, s)
	}
	return sessions, served
}

// goOn sends another request on each connection; the same machine has to serve it.
func (b *meshBed) goOn(what string, sessions []*lab.Session, served map[string]int) {
	b.t.Helper()
	now := map[string]int{}
	for _, s := range sessions {
		answer, err := s.Ask(within(b.t, 10*time.Second), "/next")
		if err != nil {
			b.t.Fatalf("%s: %v", what, err)
		}
		now[answer.Backend]++
	}
	if fmt.Sprint(now) != fmt.Sprint(served) {
		b.t.Errorf("%s: served by %v, before by %v", what, now, served)
	}
}

// status is the output of `shunt status` on a machine.
func (b *meshBed) status(n int) string {
	b.t.Helper()
	_, out := b.shunt(n, "status", "--instance", b.instance(n), "--socket", b.socket(n))
	return out
}

// TestMesh: a packet reaches its server through any machine that ECMP chooses, over IPIP and GUE and both
// families, beside NAT; connections go on when ECMP moves them, and when daemons die.
func TestMesh(t *testing.T) {
	const connections = 24 // one of three gets none: once in 10^4 runs, so the test only requires that several serve
	for _, attach := range []string{"native", "generic"} {
		t.Run(attach, func(t *testing.T) {
			b := newMeshBed(t)
			for n := range b.Machines {
				b.write(n, attach, 0, 1, 2)
				b.start(n)
			}
			for n := range b.Machines {
				b.answerUDP(n)
			}
			b.lead(0, 1, 2)
			for _, vip := range meshVIPs {
				sessions, served := b.open(vip, 8080, connections)
				if len(served) < 2 || served["router"] > 0 {
					t.Errorf("%s: served by %v, want several machines", vip, served)
				}
				b.lead(1) // all packets to one machine
				b.goOn("all to m2", sessions, served)
				if n := b.datagrams(vip); n < 2 {
					t.Errorf("%s: datagrams are answered by %d machines, want several", vip, n)
				}
				b.lead(2, 0)
				b.goOn("m2 left out", sessions, served)
				b.lead(0, 1, 2)
			}
			for _, vip := range meshNATVIPs {
				if _, served := b.open(vip, 80, 6); served["router"] != 6 {
					t.Errorf("%s: served by %v, want the NAT service's server", vip, served)
				}
			}
			b.lead(0)
			if _, served := b.open(meshHalfVIP, 80, 12); served["router"] != 12 {
				t.Errorf("by m1, which cannot be its own server with NAT: served by %v", served)
			}
			b.lead(1)
			if _, served := b.open(meshHalfVIP, 80, 24); len(served) != 2 {
				t.Errorf("by m2: served by %v, want router and m1", served)
			}
			b.lead(0, 1, 2)
			sessions, served := b.open(meshVIPs[0], 8080, connections)
			for n := range b.Machines { // the data planes go on alone, and a new daemon takes them over
				b.end(n, syscall.SIGKILL)
			}
			b.lead(1)
			b.goOn("without daemons", sessions, served)
			for n := range b.Machines {
				b.start(n)
			}
			b.lead(2)
			b.goOn("taken over", sessions, served)
			for n := range b.Machines {
				for _, reason := range []string{"decap_ipip", "decap_gue"} {
					if !strings.Contains(b.status(n), reason) {
						t.Errorf("%s: %s counts nothing", b.Machines[n].Name(), reason)
					}
				}
			}
		})
	}
}

// datagrams is the number of machines that answer datagrams to a VIP.
func (b *meshBed) datagrams(vip netip.Addr) int {
	b.t.Helper()
	seen := map[string]bool{}
	for range 24 {
		answer, err := b.Client.AskUDP(within(b.t, 10*time.Second), netip.AddrPortFrom(vip, 8080).String(), []byte("who?"))
		if err != nil {
			b.t.Fatalf("datagram to %s: %v", vip, err)
		}
		seen[answer.Backend] = true
	}
	return len(seen)
}

// TestMeshTools: `shunt check --host` and `shunt doctor` know the layout, a reload begins and ends it, and
// `shunt detach` removes everything that a killed daemon has left.
func TestMeshTools(t *testing.T) {
	b := newMeshBed(t)
	for n := range 2 {
		b.write(n, "native", 0, 1, 2)
		_, out := b.shunt(n, "check", "--host", "--config", b.path(n))
		if n == 0 && !strings.Contains(out, "error: services[3].backends[1].address: 10.0.0.1 is this machine's own address") {
			t.Errorf("m1 as a backend of NAT: shunt check says\n%s", out)
		}
		if strings.Count(out, "error: ") != 1-n {
			t.Errorf("on m%d shunt check says\n%s", n+1, out)
		}
		b.start(n)
	}
	doctor := func() string {
		_, out := b.shunt(0, "doctor", "--backend", "--vip", meshVIPs[0].String()+","+meshVIPs[1].String(), "--forwarding", "dsr-ipip")
		return out
	}
	if out := doctor(); !strings.Contains(out, "this machine is ready for direct return") {
		t.Errorf("shunt doctor on a balancer that is a backend:\n%s", out)
	}
	text, err := os.ReadFile(b.path(0))
	if err != nil {
		t.Fatal(err)
	}
	reload := func(text string) {
		t.Helper()
		if err := os.WriteFile(b.path(0), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if code, out := b.shunt(0, "reload", "--socket", b.socket(0)); code != 0 {
			t.Fatalf("shunt reload:\n%s", out)
		}
	}
	begin := strings.Index(string(text), "decapsulation")
	reload(string(text[:begin]) + string(text[strings.Index(string(text), "services"):]))
	if b.has(0, meshVIPs[0]) || !strings.Contains(doctor(), "nothing decapsulates IPv4 from IPv4") {
		t.Errorf("without decapsulation the machine is a backend still:\n%s", doctor())
	}
	reload(string(text))
	if out := doctor(); !b.has(0, meshVIPs[0]) || !strings.Contains(out, "this machine is ready for direct return") {
		t.Errorf("with decapsulation again:\n%s", out)
	}
	b.end(0, syscall.SIGKILL)
	if !b.has(0, meshVIPs[0]) {
		t.Error("the VIP went with the daemon, while packets for it still come")
	}
	if code, out := b.shunt(0, "detach", "--instance", b.instance(0)); code != 0 {
		t.Errorf("shunt detach:\n%s", out)
	}
	if value, err := b.Machines[0].Sysctl("net.ipv4.conf.all.arp_ignore"); err != nil || value != "0" || b.has(0, meshVIPs[0]) {
		t.Errorf("after shunt detach arp_ignore is %q, and the VIP there: %v; %v", value, b.has(0, meshVIPs[0]), err)
	}
	b.write(2, "tc", 0, 1, 2)
	p := starts(t, command(b.Machines[2], "run", "--config", b.path(2), "--instance", b.instance(2), "--socket", b.socket(2)))
	select {
	case <-p.ended:
	case <-within(t, 20*time.Second).Done():
		t.Error("shunt run goes on")
	}
	if !strings.Contains(p.log(), "it has attach: tc, and decapsulation is at XDP") || b.has(2, meshVIPs[0]) {
		t.Errorf("with attach: tc:\n%s", p.log())
	}
}

// TestMeshChecks: all machines, the server's own too, notice when a server ends, and give it no new flows.
func TestMeshChecks(t *testing.T) {
	b := newMeshBed(t)
	server, err := b.Machines[2].ServeHTTP(":8081", "m3")
	if err != nil {
		t.Fatal(err)
	}
	for n := range b.Machines {
		b.write(n, "native", 0, 1, 2)
		text, err := os.ReadFile(b.path(n))
		if err == nil {
			err = os.WriteFile(b.path(n), []byte(strings.Replace(string(text), "tcp: {}", "tcp: {port: 8081}", 1)), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		if n < 2 {
			if _, err := b.Machines[n].ServeHTTP(":8081", b.Machines[n].Name()); err != nil {
				t.Fatal(err)
			}
		}
	}
	for n := range b.Machines {
		b.start(n)
	}
	b.lead(0, 1, 2)
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	for n := range b.Machines {
		eventually(t, 10*time.Second, "the server of m3 is down on "+b.Machines[n].Name(), func() error {
			if out := b.status(n); strings.Count(out, " is down in ipip ") != 2 {
				return errors.New(out)
			}
			return nil
		})
	}
	if _, served := b.open(meshVIPs[0], 8080, 24); served["m3"] > 0 {
		t.Errorf("new connections are served by %v, and m3 is down", served)
	}
}
