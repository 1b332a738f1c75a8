package net

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/packet"
)

// directWays are the ways of packets to backends that answer clients directly.
var directWays = []struct {
	layout    lab.Layout
	attach    string
	noOffload bool
}{
	{lab.OneArm, "native", false},
	{lab.OneArm, "generic", false},
	{lab.TwoArm, "native", false},
	{lab.TwoArm, "generic", false},
	{lab.OneArm, "native", true},
	{lab.TwoArm, "generic", true},
	{lab.OneArm, "tc", false},
	{lab.TwoArm, "tc", false},
}

// directServices are one service for each forwarding, and for each tunnel between families.
// Service n has the n-th VIPs after the first, of both families.
var directServices = []struct {
	name, forwarding string
	of               func(*lab.Host) []netip.Addr // a backend's addresses
}{
	{"l2", "dsr-l2", both},
	{"ipip", "dsr-ipip", both},
	{"gue", "dsr-gue", both},
	{"ipip-over-4", "dsr-ipip", only4},
	{"ipip-over-6", "dsr-ipip", only6},
	{"gue-over-4", "dsr-gue", only4},
	{"gue-over-6", "dsr-gue", only6},
}

func both(h *lab.Host) []netip.Addr  { return []netip.Addr{h.Addr4(), h.Addr6()} }
func only4(h *lab.Host) []netip.Addr { return []netip.Addr{h.Addr4()} }
func only6(h *lab.Host) []netip.Addr { return []netip.Addr{h.Addr6()} }

// roomy is an MTU with room for 1500 bytes and any outer header between balancer and backends.
const roomy = 1600

// directVIPs are the VIPs of service n.
func directVIPs(n int) []netip.Addr {
	v4, v6 := lab.VIP4, lab.VIP6
	for range n {
		v4, v6 = v4.Next(), v6.Next()
	}
	return []netip.Addr{v4, v6}
}

// newDirectBed is a bed whose backends have the VIPs of the first services, serve TCP 80 and
// UDP 53 there, and have a way to the client that does not lead over the balancer:
//
//	client ─┬─ lb ─┬─ switch ─┬─ b1         (one-arm: all of them at the switch)
//	        │      └──────────┼─ b2
//	        └─────────────────┘ eth1
//
// The client's own MTU is 1500.
func newDirectBed(t *testing.T, options lab.Options, services int) *bed {
	t.Helper()
	b := newBed(t, options)
	if options.Layout == lab.TwoArm {
		if err := b.Shortcut(); err != nil {
			t.Fatal(err)
		}
	}
	var vips []netip.Addr
	for n := range services {
		vips = append(vips, directVIPs(n)...)
	}
	for _, backend := range b.Backends {
		b.serveVIPs(backend, vips)
	}
	if err := b.Client.SetMTU("eth0", 1500); err != nil {
		t.Fatal(err)
	}
	return b
}

// serveVIPs starts servers. UDP answers come from the address that a socket is bound to, so
// each VIP has a socket of its own; it may exist before the VIP.
func (b *bed) serveVIPs(backend *lab.Host, vips []netip.Addr) {
	b.t.Helper()
	err := errors.Join(backend.SetSysctl("net.ipv4.ip_nonlocal_bind", "1"), backend.SetSysctl("net.ipv6.ip_nonlocal_bind", "1"))
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := backend.ServeHTTP(":80", backend.Name()); err != nil {
		b.t.Fatal(err)
	}
	for _, vip := range vips {
		if _, err := backend.ServeUDP(at(vip, 53), backend.Name()); err != nil {
			b.t.Fatal(err)
		}
	}
}

// ownByHand gives backends VIPs as dsr-l2 needs them: on lo, and unknown to ARP.
func (b *bed) ownByHand(vips []netip.Addr, backends ...*lab.Host) {
	b.t.Helper()
	for _, backend := range backends {
		err := errors.Join(backend.SetSysctl("net.ipv4.conf.all.arp_ignore", "1"), backend.SetSysctl("net.ipv4.conf.all.arp_announce", "2"))
		for _, vip := range vips {
			err = errors.Join(err, backend.AddAddress("lo", netip.PrefixFrom(vip, vip.BitLen())))
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
}

// decap runs `shunt decap` on backends for VIPs, and waits until it removes outer headers.
func (b *bed) decap(vips []netip.Addr, backends ...*lab.Host) {
	b.t.Helper()
	b.decapFrom(vips, firstSources, backends...)
}

// decapFrom is decap for tunnels from these addresses.
func (b *bed) decapFrom(vips []netip.Addr, from []netip.Prefix, backends ...*lab.Host) {
	b.t.Helper()
	var started []*process
	for _, backend := range backends {
		args := []string{"decap", "--interface", "eth0"}
		for _, f := range from {
			args = append(args, "--from", f.Addr().String())
		}
		for _, vip := range vips {
			args = append(args, "--vip", vip.String())
		}
		started = append(started, b.spawn(backend, args...))
	}
	b.others = append(b.others, started...)
	for _, p := range started {
		b.awaits(p, "undoes all of it")
	}
}

// directFile is a configuration with the first services, on TCP and UDP, ports 80 and 53.
func (b *bed) directFile(attach string, services int) string {
	var text strings.Builder
	text.WriteString("limits: {flows: 10000}\ninterfaces:\n")
	for _, i := range b.Balancer.Interfaces() {
		fmt.Fprintf(&text, "  - {name: %s, attach: %s}\n", i.Name, attach)
	}
	text.WriteString("services:\n")
	for n, s := range directServices[:services] {
		vips := directVIPs(n)
		fmt.Fprintf(&text, "  - name: %s\n    address: [%s, %q]\n    port: [80, 53]\n    protocol: [tcp, udp]\n    forwarding: %s\n    backends:\n",
			s.name, vips[0], vips[1], s.forwarding)
		for _, backend := range b.Backends {
			for _, address := range s.of(backend) {
				fmt.Fprintf(&text, "      - {address: %q}\n", address)
			}
		}
	}
	return text.String()
}

// uploadSize is the number of bytes of each service's and family's upload.
func uploadSize() int64 {
	if soak {
		return 100 << 20
	}
	return size(1, 1)
}

// TestDirect covers each forwarding of direct return, over both families and between them, TCP
// and UDP: the backend sees the client and the VIP, and its answer comes without the balancer.
func TestDirect(t *testing.T) {
	for _, way := range directWays {
		name := fmt.Sprintf("%s/%s", way.layout, way.attach)
		if way.noOffload {
			name += "/checksums-in-software"
		}
		t.Run(name, func(t *testing.T) {
			b := newDirectBed(t, lab.Options{Layout: way.layout, MTU: roomy, NoOffload: way.noOffload}, len(directServices))
			if way.attach == "tc" {
				b.completesInSoftware(t)
			}
			b.ownByHand(directVIPs(0), b.Backends...)
			var tunnelled []netip.Addr
			for n := 1; n < len(directServices); n++ {
				tunnelled = append(tunnelled, directVIPs(n)...)
			}
			b.decap(tunnelled, b.Backends...)
			b.write(b.directFile(way.attach, len(directServices)))
			b.start()
			backwards := b.watchBackwards(t)
			for n, s := range directServices {
				for _, vip := range directVIPs(n) {
					t.Run(s.name+"/"+family(vip), func(t *testing.T) { b.answersDirectly(t, vip) })
				}
			}
			backwards()
			for n, s := range directServices {
				for _, vip := range directVIPs(n) {
					t.Run(s.name+"/"+family(vip)+"/much", func(t *testing.T) {
						b.datagramsOfEverySize(t, at(vip, 53))
						if _, err := lab.Upload(within(t, time.Minute), b.Client.HTTPClient(false), at(vip, 80), uploadSize()); err != nil {
							t.Error(err)
						}
					})
				}
			}
			b.nothingWentWrongDirectly(t, way.attach == "native" && !way.noOffload)
		})
	}
}

// answersDirectly sends requests until all backends have answered, over TCP and UDP.
func (b *bed) answersDirectly(t *testing.T, vip netip.Addr) {
	t.Helper()
	const requests = 20 // all to one of two backends: once in 2^19 runs
	client := b.Client.HTTPClient(false)
	seen := map[string]int{}
	for i := range requests {
		web, err := b.get(client, at(vip, 80))
		if err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		if web.Local != at(vip, 80) {
			t.Fatalf("the backend was asked at %s", web.Local)
		}
		dns, err := b.askUDP(b.Client, at(vip, 53), []byte("who?"))
		if err != nil {
			t.Fatalf("datagram %d: %v", i, err)
		}
		for protocol, a := range map[string]lab.Answer{"tcp": web, "udp": dns} {
			if saw := netip.MustParseAddrPort(a.Remote).Addr(); saw != b.Client.Addr4() && saw != b.Client.Addr6() {
				t.Fatalf("the backend saw %s over %s, not the client", a.Remote, protocol)
			}
			seen[protocol+" "+a.Backend]++
		}
	}
	if len(seen) != 2*len(b.Backends) {
		t.Errorf("%d requests and datagrams were answered by %v; want some by each", requests, seen)
	}
}

// watchBackwards counts packets to the balancer from a VIP; verify checks that there were
// none. IPv6 neighbour and ARP messages do not count.
func (b *bed) watchBackwards(t *testing.T) (verify func()) {
	t.Helper()
	interfaces := b.Balancer.Interfaces()
	far, name, err := b.FarEnd(b.Balancer, interfaces[len(interfaces)-1].Name)
	if err != nil {
		t.Fatal(err)
	}
	capture, err := far.Capture(name)
	if err != nil {
		t.Fatal(err)
	}
	mac := interfaces[len(interfaces)-1].MAC
	var wrong []string
	var forward int
	done := make(chan struct{})
	go func() {
		defer close(done)
		for f := range capture.Frames() {
			p, err := packet.Parse(f.Data)
			if err != nil {
				continue
			}
			text := p.String()
			if !f.Outgoing {
				forward++
				continue
			}
			if source, ok := sourceOf(f.Data); ok && isVIP(source) && bytes.Equal(f.Data[:6], mac) {
				wrong = append(wrong, text)
			}
		}
	}()
	return func() {
		t.Helper()
		capture.Close()
		<-done
		if n := capture.Dropped(); n != 0 {
			t.Errorf("the capture lost %d frames, so it proves nothing", n)
		}
		if forward == 0 {
			t.Error("the capture saw nothing that the balancer sent, so it proves nothing")
		}
		if len(wrong) > 0 {
			t.Errorf("%d answers came to the balancer, the first: %s", len(wrong), wrong[0])
		}
	}
}

// sourceOf is the source address of an IP packet in an untagged frame.
func sourceOf(frame []byte) (netip.Addr, bool) {
	switch {
	case len(frame) >= 34 && frame[12] == 0x08 && frame[13] == 0x00:
		return netip.AddrFromSlice(frame[26:30])
	case len(frame) >= 54 && frame[12] == 0x86 && frame[13] == 0xdd:
		return netip.AddrFromSlice(frame[22:38])
	}
	return netip.Addr{}, false
}

func isVIP(a netip.Addr) bool {
	return netip.MustParsePrefix("192.0.2.0/24").Contains(a) || netip.MustParsePrefix("2001:db8::/64").Contains(a)
}

// nothingWentWrongDirectly checks for drops that an undisturbed network has no reason for, and
// for answers that went over the balancer.
func (b *bed) nothingWentWrongDirectly(t *testing.T, unfinished bool) {
	t.Helper()
	s := b.status()
	for _, reason := range []string{"malformed_transport", "no_backend", "backend_gone", "no_source", "table_full", "unresolved",
		"egress_unlisted", "internal", "fib_fallback", "flow_moved", "too_big", "too_big_answered", "not_remembered", "tx_refused", "redirect_refused"} {
		if c := s.Reasons[reason]; c.Packets != 0 {
			t.Errorf("%d packets with reason %s", c.Packets, reason)
		}
	}
	if completed := s.Reasons["checksum_completed"].Packets; unfinished == (completed == 0) {
		t.Errorf("%d checksums were completed; want some: %v", completed, unfinished)
	}
	if len(s.Services) == 0 {
		t.Error("shunt status shows no services")
	}
	for _, service := range s.Services {
		if service.PacketsIn == 0 || service.PacketsOut != 0 {
			t.Errorf("service %s counted %d packets in, %d out", service.Name, service.PacketsIn, service.PacketsOut)
		}
	}
}

// largest is a UDP payload that makes a packet of 1500 bytes.
func largest(vip netip.Addr) []byte {
	if vip.Is4() {
		return make([]byte, 1500-20-8)
	}
	return make([]byte, 1500-40-8)
}

// TestDirectMTU: a network with room for the outer header lets the clients' largest packets
// through. One without it lets small ones through, and the others are counted. (TestDirect's
// uploads show that 1600 bytes are enough for all.)
func TestDirectMTU(t *testing.T) {
	const services = 3 // one of each forwarding
	// No room, and just enough for IPIP over IPv4.
	for _, mtu := range []int{1500, 1520} {
		t.Run(fmt.Sprint(mtu), func(t *testing.T) {
			b := newDirectBed(t, lab.Options{Layout: lab.TwoArm, MTU: mtu}, services)
			var vips []netip.Addr
			for n := range services {
				vips = append(vips, directVIPs(n)...)
			}
			b.decap(vips, b.Backends...)
			b.write(b.directFile("native", services))
			b.start()
			for n, s := range directServices[:services] {
				for _, vip := range directVIPs(n) {
					overhead := map[string]int{"dsr-l2": 0, "dsr-ipip": 20, "dsr-gue": 32}[s.forwarding]
					if vip.Is6() && overhead > 0 {
						overhead += 20
					}
					b.largeAndSmall(t, vip, 1500+overhead <= mtu, s.name)
				}
			}
		})
	}
}

// largeAndSmall sends the largest datagram, and a small one, to a VIP.
func (b *bed) largeAndSmall(t *testing.T, vip netip.Addr, fits bool, name string) {
	t.Helper()
	if _, err := b.askUDP(b.Client, at(vip, 53), []byte("who?")); err != nil {
		t.Errorf("%s: a small datagram: %v", name, err)
	}
	if fits {
		if _, err := b.askUDP(b.Client, at(vip, 53), largest(vip)); err != nil {
			t.Errorf("%s over %s: a datagram that fits: %v", name, family(vip), err)
		}
		return
	}
	tooBig := func() uint64 { // its sender may be told, and then has to make fragments of it
		reasons := b.status().Reasons
		return reasons["too_big"].Packets + reasons["too_big_answered"].Packets
	}
	before := tooBig()
	conn, err := b.Client.Dial(within(t, answerTimeout), "udp", at(vip, 53))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(largest(vip)); err != nil {
		t.Fatal(err)
	}
	eventually(t, answerTimeout, name+" over "+family(vip)+": too_big", func() error {
		if after := tooBig(); after != before+1 {
			return fmt.Errorf("%d packets before, %d after", before, after)
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := lab.AskUDPOn(ctx, conn, largest(vip)); err == nil {
		t.Errorf("%s over %s: a datagram that does not fit was answered", name, family(vip))
	}
}
