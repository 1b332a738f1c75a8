package lab

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/packet"
)

// needRoot skips the test for ordinary users.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run the tests with sudo")
	}
}

// deadline is for one test's waits; each takes milliseconds.
func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func build(t *testing.T, o Options) *Topology {
	t.Helper()
	needRoot(t)
	topology, err := Build(deadline(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := topology.Close(); err != nil {
			t.Error(err)
		}
	})
	return topology
}

// own is an id that no other process's tests have.
func own(name string) string { return fmt.Sprintf("%s%d", name, os.Getpid()) }

// namespaces are the names that stand under /run/netns for a lab.
func namespaces(t *testing.T, id string) []string {
	t.Helper()
	names, err := leftovers(id)
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// Every layout carries TCP and UDP over both families from the client to every backend,
// through the balancer's kernel where that is in the way.
func TestEveryLayoutConnects(t *testing.T) {
	for _, layout := range []Layout{OneArm, TwoArm, Direct} {
		for _, router := range []bool{false, true} {
			for _, noOffload := range []bool{false, true} {
				name := fmt.Sprintf("%s router=%v noOffload=%v", layout, router, noOffload)
				t.Run(name, func(t *testing.T) {
					topology := build(t, Options{Layout: layout, Router: router, NoOffload: noOffload, Forwarding: true, VIPOnLink: noOffload})
					ctx := deadline(t)
					client := topology.Client.HTTPClient(false)
					for _, b := range topology.Backends {
						for _, address := range []netip.Addr{b.Addr4(), b.Addr6()} {
							at := netip.AddrPortFrom(address, 8080).String()
							exchange(ctx, t, topology, b, client, at)
						}
					}
				})
			}
		}
	}
}

// exchange asks a backend for its name, over TCP and UDP, and checks the client that it saw.
func exchange(ctx context.Context, t *testing.T, topology *Topology, b *Host, client *http.Client, at string) {
	t.Helper()
	web, err := b.ServeHTTP(at, b.Name())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.ServeUDP(at, b.Name()); err != nil {
		t.Fatal(err)
	}
	overTCP, err := Get(ctx, client, at)
	if err != nil {
		t.Fatal(err)
	}
	overUDP, err := topology.Client.AskUDP(ctx, at, []byte("ping"))
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []Answer{overTCP, overUDP} {
		remote := netip.MustParseAddrPort(a.Remote).Addr()
		if a.Backend != b.Name() || remote != topology.Client.Addr4() && remote != topology.Client.Addr6() {
			t.Errorf("asked %s at %s, got %+v", b.Name(), at, a)
		}
	}
	if web.Requests() != 1 || web.Connections() != 1 {
		t.Errorf("%s counted %d requests on %d connections, want 1 on 1", b.Name(), web.Requests(), web.Connections())
	}
}

// Each datagram from a socket of its own is a new flow, as long as there are ports.
func TestUDPPortsAreNotUsedTwice(t *testing.T) {
	topology := build(t, Options{Backends: 1})
	client := topology.Client
	if err := client.SetSysctl("net.ipv4.ip_local_port_range", "50000 50003"); err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for i := range 4 {
		open := func() (net.Conn, error) { return client.Dial(deadline(t), "udp", "10.0.0.2:9") }
		if i%2 == 1 {
			open = func() (net.Conn, error) {
				return client.OpenSession(deadline(t), "udp", netip.MustParseAddrPort("10.0.0.100:0"), "10.0.0.2:9")
			}
		}
		c, err := open()
		if err != nil {
			t.Fatal(err)
		}
		used[c.LocalAddr().String()] = true
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(used) != 4 {
		t.Errorf("four sockets sent from %v", used)
	}
	for _, address := range []string{"10.0.0.2:9", "10.0.0.2:10"} { // no port is left for the first
		c, err := client.Dial(deadline(t), "udp", address)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
}

func TestChecksummedTransfersBothWays(t *testing.T) {
	topology := build(t, Options{Backends: 1})
	ctx, b := deadline(t), topology.Backends[0]
	if _, err := b.ServeHTTP("10.0.0.2:80", "b1"); err != nil {
		t.Fatal(err)
	}
	client := topology.Client.HTTPClient(true)
	for _, transfer := range []func() (string, error){
		func() (string, error) { return Download(ctx, client, "10.0.0.2:80", 20<<20) },
		func() (string, error) { return Upload(ctx, client, "10.0.0.2:80", 20<<20) },
	} {
		if backend, err := transfer(); err != nil || backend != "b1" {
			t.Errorf("from %q: %v", backend, err)
		}
	}
}

// The capture sees passing packets, with the checksum as the sender left it: partial with offload,
// right without.
func TestCaptureShowsChecksumsAsSent(t *testing.T) {
	for _, noOffload := range []bool{false, true} {
		topology := build(t, Options{Backends: 1, NoOffload: noOffload})
		ctx := deadline(t)
		if _, err := topology.Backends[0].ServeUDP("10.0.0.2:53", "b1"); err != nil {
			t.Fatal(err)
		}
		for _, end := range []struct {
			host     *Host
			iface    string
			outgoing bool
		}{{topology.Client, "eth0", true}, {topology.Switch, "client", false}, {topology.Backends[0], "eth0", false}} {
			capture, err := end.host.Capture(end.iface)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := topology.Client.AskUDP(ctx, "10.0.0.2:53", []byte("look")); err != nil {
				t.Fatal(err)
			}
			frame, p, err := capture.Await(ctx, func(_ Frame, p packet.Packet) bool {
				return p.UDP != nil && p.UDP.DestinationPort == 53
			})
			if err != nil {
				t.Fatal(err)
			}
			want := packet.Partial
			if noOffload {
				want = packet.Correct
			}
			if p.UDP.Checksum.Mode != want || frame.ChecksumPending == noOffload || frame.Outgoing != end.outgoing {
				t.Errorf("noOffload=%v at %s/%s: %s, pending %v, outgoing %v",
					noOffload, end.host.Name(), end.iface, p, frame.ChecksumPending, frame.Outgoing)
			}
			capture.Close()
			capture.Close()
			for range capture.Frames() { // ends, because it is closed
			}
		}
	}
}

func TestSendPutsAFrameOnTheWire(t *testing.T) {
	topology := build(t, Options{Backends: 1})
	capture, err := topology.Backends[0].Capture("eth0")
	if err != nil {
		t.Fatal(err)
	}
	want := packet.TCP4("203.0.113.1:1", "192.0.2.10:80", "S", packet.MACs(topology.Client.Interfaces()[0].MAC, topology.Backends[0].Interfaces()[0].MAC))
	if err := topology.Client.Send("eth0", packet.Must(want)); err != nil {
		t.Fatal(err)
	}
	_, got, err := capture.Await(deadline(t), func(_ Frame, p packet.Packet) bool { return p.TCP != nil })
	if err != nil {
		t.Fatal(err)
	}
	if d := packet.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// The router answers for the narrow path behind it, and counts hops.
func TestRouterSendsErrors(t *testing.T) {
	topology := build(t, Options{Layout: TwoArm, Router: true, Backends: 1, Forwarding: true})
	if err := topology.NarrowToService(1300); err != nil {
		t.Fatal(err)
	}
	if err := topology.NarrowToClient(1300); err != nil {
		t.Fatal(err)
	}
	capture, err := topology.Client.Capture("eth0")
	if err != nil {
		t.Fatal(err)
	}
	gateway, client := topology.Router.Interfaces()[0], topology.Client.Interfaces()[0]
	send := func(p packet.Packet) {
		t.Helper()
		if err := topology.Client.Send("eth0", packet.Must(p.With(packet.MACs(client.MAC, gateway.MAC)))); err != nil {
			t.Fatal(err)
		}
	}
	big := packet.Data(make([]byte, 1400))
	for _, c := range []struct {
		name string
		sent packet.Packet
		like func(packet.Packet) bool
	}{
		{"too big, IPv4", packet.UDP4("198.51.100.7:1", "192.0.2.10:53", big), func(p packet.Packet) bool {
			return p.ICMP != nil && p.ICMP.Type == 3 && p.ICMP.Code == 4 && p.ICMP.Rest == 1300
		}},
		{"too big, IPv6", packet.UDP6("[2001:db8:c::7]:1", "[2001:db8::10]:53", big), func(p packet.Packet) bool {
			return p.ICMPv6 != nil && p.ICMPv6.Type == 2 && p.ICMPv6.Rest == 1300
		}},
		{"time exceeded, IPv4", packet.UDP4("198.51.100.7:1", "192.0.2.10:53", packet.TTL(1)), func(p packet.Packet) bool {
			return p.ICMP != nil && p.ICMP.Type == 11
		}},
		{"time exceeded, IPv6", packet.UDP6("[2001:db8:c::7]:1", "[2001:db8::10]:53", packet.TTL(1)), func(p packet.Packet) bool {
			return p.ICMPv6 != nil && p.ICMPv6.Type == 3
		}},
	} {
		send(c.sent)
		ctx, cancel := context.WithTimeout(deadline(t), 5*time.Second)
		_, p, err := capture.Await(ctx, func(_ Frame, p packet.Packet) bool { return c.like(p) })
		cancel()
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		quote := quoteOf(p)
		about, err := packet.ParseQuote(quote)
		if err != nil || about.Destination() != c.sent.Destination() {
			t.Errorf("%s: quotes %s (%v)", c.name, about, err)
		}
	}
	// Towards the client: the router must refuse the backend's packet, too.
	back, err := topology.Backends[0].Capture("eth0")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := topology.Backends[0].Dial(deadline(t), "udp", "198.51.100.7:9")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(make([]byte, 1400)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := back.Await(deadline(t), func(_ Frame, p packet.Packet) bool {
		return p.ICMP != nil && p.ICMP.Type == 3 && p.ICMP.Code == 4 && p.ICMP.Rest == 1300
	}); err != nil {
		t.Error(err)
	}
}

func quoteOf(p packet.Packet) []byte {
	if p.ICMP != nil {
		return p.ICMP.Quote
	}
	return p.ICMPv6.Quote
}

// Commands, sysctls, MACs and offloads act on the namespace and on nothing else.
func TestHostSettingsStayInTheNamespace(t *testing.T) {
	topology := build(t, Options{Backends: 1, MTU: 1400})
	h, ctx := topology.Balancer, deadline(t)
	outside, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for value, on := range map[string]bool{"1": true, "0": false} {
		if err := h.SetForwarding(on); err != nil {
			t.Fatal(err)
		}
		if got, err := h.Sysctl("net.ipv4.ip_forward"); err != nil || got != value {
			t.Errorf("ip_forward is %q (%v), want %s", got, err, value)
		}
	}
	if after, _ := os.ReadFile("/proc/sys/net/ipv4/ip_forward"); !bytes.Equal(outside, after) {
		t.Errorf("outside, ip_forward went from %s to %s", outside, after)
	}
	if err := h.SetSysctl("kernel.hostname", "x"); err == nil || !strings.Contains(err.Error(), "only net.*") {
		t.Errorf("a sysctl of the machine: %v", err)
	}
	out, err := h.Command(ctx, "/bin/readlink", "/proc/self/ns/net").Output()
	if err != nil {
		t.Fatal(err)
	}
	var inside string
	if err := h.Run(func() (err error) { inside, err = os.Readlink("/proc/thread-self/ns/net"); return err }); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(out)); got != inside || got == before {
		t.Errorf("the child is in %s, the host is %s, the test in %s", got, inside, before)
	}
	mac := net.HardwareAddr{2, 0, 0, 0, 0xaa, 0xbb}
	if err := h.SetMAC("eth0", mac); err != nil {
		t.Fatal(err)
	}
	link, err := h.Netlink().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if got := link.Attrs(); !bytes.Equal(got.HardwareAddr, mac) || got.MTU != 1400 || !bytes.Equal(h.Interfaces()[0].MAC, mac) {
		t.Errorf("eth0 has mac %s and mtu %d, want %s and 1400", got.HardwareAddr, got.MTU, mac)
	}
	if err := h.SetOffload("eth0", map[string]bool{"tx": false, "gro": true}); err != nil {
		t.Fatal(err)
	}
	on, err := h.Offload("eth0")
	if err != nil || on["tx"] || !on["gro"] || on["tso"] {
		t.Errorf("offload tx %v gro %v tso %v (%v), want only gro", on["tx"], on["gro"], on["tso"], err)
	}
	if err := h.SetQueue("eth0", "pfifo"); err != nil {
		t.Fatal(err)
	}
	if queues, err := h.Netlink().QdiscList(link); err != nil || len(queues) != 1 || queues[0].Type() != "pfifo" {
		t.Errorf("eth0 sends through %v (%v), want one pfifo", queues, err)
	}
	if err := h.SetQueue("eth0", "nosuch"); err == nil || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("a queue of a kind that does not exist: %v", err)
	}
}

// A command that is still running when the lab closes is ended with it.
func TestCloseEndsCommands(t *testing.T) {
	topology := build(t, Options{Backends: 1})
	c := topology.Client.Command(context.Background(), "/bin/sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	if err := topology.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("sleep ended by itself")
		}
	case <-deadline(t).Done():
		t.Error("the command outlives the lab")
		c.Process.Kill()
	}
}

func TestDialFromAPort(t *testing.T) {
	topology := build(t, Options{Backends: 1})
	ctx := deadline(t)
	if _, err := topology.Backends[0].ServeHTTP("10.0.0.2:80", "b1"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // again, while the first is in TIME_WAIT
		conn, err := topology.Client.DialFrom(ctx, "tcp", netip.MustParseAddrPort("0.0.0.0:40000"), "10.0.0.2:80")
		if err != nil {
			t.Fatal(err)
		}
		if got := conn.LocalAddr().String(); got != "10.0.0.100:40000" {
			t.Errorf("connected from %s", got)
		}
		conn.(*net.TCPConn).SetLinger(0)
		conn.Close()
	}
	if _, err := topology.Client.Dial(ctx, "tcp", "localhost:80"); err == nil {
		t.Error("a name was looked up, but not in the namespace")
	}
}

// Frames that XDP redirects arrive only if the far end of the balancer's cable runs GRO.
func TestFarEndsOfTheBalancerRunGRO(t *testing.T) {
	for _, o := range []Options{{}, {Router: true}, {Layout: TwoArm}, {Layout: Direct}, {Layout: Direct, Router: true, Backends: 3}} {
		topology := build(t, o)
		for _, i := range topology.Balancer.Interfaces() {
			far, iface, err := topology.FarEnd(topology.Balancer, i.Name)
			if err != nil {
				t.Fatal(err)
			}
			on, err := far.Offload(iface)
			if err != nil || !on["gro"] || !on["tx"] {
				t.Errorf("%s: far end %s/%s of %s: gro %v tx %v (%v)", o.Layout, far.Name(), iface, i.Name, on["gro"], on["tx"], err)
			}
		}
		if err := topology.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	needRoot(t)
	links := func() []string {
		list, err := netlink.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, l := range list {
			names = append(names, l.Attrs().Name)
		}
		return names
	}
	before := links()
	topology := build(t, Options{Layout: TwoArm, Router: true, Backends: 3})
	if got := len(namespaces(t, topology.ID())); got != 7 {
		t.Errorf("%d namespaces while it stands, want 7", got)
	}
	if ids, err := IDs(); err != nil || !slices.Contains(ids, topology.ID()) {
		t.Errorf("IDs %q lack %s (%v)", ids, topology.ID(), err)
	}
	server, err := topology.Backends[0].ServeHTTP("[::]:80", "b1")
	if err != nil {
		t.Fatal(err)
	}
	open, err := topology.Client.Dial(deadline(t), "udp", "192.0.2.10:53") // holds the namespace after its name is gone
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	for range 2 {
		if err := topology.Close(); err != nil {
			t.Error(err)
		}
	}
	if left := namespaces(t, topology.ID()); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	if after := links(); !slices.Equal(before, after) {
		t.Errorf("links outside were %q, are %q", before, after)
	}
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	if err := topology.Client.Run(func() error { return nil }); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("run after close: %v", err)
	}
	if _, err := topology.AddHost("late"); err == nil {
		t.Error("a host joined a closed lab")
	}
}

// A build that fails half-way, or is given up, leaves nothing.
func TestFailedBuildLeavesNothing(t *testing.T) {
	needRoot(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Build(ctx, Options{ID: own("late")}); err == nil {
		t.Error("built although given up")
	}
	if _, err := Build(deadline(t), Options{ID: own("mtu"), MTU: 20}); err == nil { // less than any IP packet
		t.Error("built with an MTU of 20")
	}
	for _, id := range []string{own("late"), own("mtu")} {
		if left := namespaces(t, id); len(left) != 0 {
			t.Errorf("left: %q", left)
		}
	}
}

// Sweep removes the remains of a crashed process, down to a name without a namespace, and nothing
// of another lab.
func TestSweep(t *testing.T) {
	other := build(t, Options{ID: own("other"), Backends: 1})
	crashed := build(t, Options{ID: own("crash"), Backends: 1})
	if _, err := New(own("crash")); err == nil || !strings.Contains(err.Error(), "already exists") {
		t.Errorf("a second lab of the same id: %v", err)
	}
	half := filepath.Join(directory, prefix+own("crash")+"-half")
	if err := os.WriteFile(half, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Sweep(own("crash")); err != nil {
			t.Error(err)
		}
	}
	if left := namespaces(t, own("crash")); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	if got := len(namespaces(t, own("other"))); got != len(other.Hosts()) {
		t.Errorf("the other lab has %d namespaces, want %d", got, len(other.Hosts()))
	}
	// The crashed lab's process still holds the namespaces here: their links must be gone.
	links, err := crashed.Client.Netlink().LinkList()
	if err != nil || len(links) != 1 {
		t.Errorf("%d links left in the client's namespace (%v), want loopback", len(links), err)
	}
	if err := Sweep("../x"); err == nil {
		t.Error("swept a path")
	}
}

func TestRunSurvivesAFunctionThatLeaves(t *testing.T) {
	topology := build(t, Options{Backends: 1})
	err := topology.Client.Run(func() error { return unix.Setns(-1, unix.CLONE_NEWNET) })
	if err == nil {
		t.Error("the function's error is lost")
	}
	before, _ := os.Readlink("/proc/thread-self/ns/net")
	for range 50 {
		inside := ""
		if err := topology.Client.Run(func() (err error) { inside, err = os.Readlink("/proc/thread-self/ns/net"); return err }); err != nil {
			t.Fatal(err)
		}
		if now, _ := os.Readlink("/proc/thread-self/ns/net"); now != before || inside == before {
			t.Fatalf("the test was in %s, is in %s; inside was %s", before, now, inside)
		}
	}
}
