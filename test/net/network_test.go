package net

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestVIPOnTheLink: a VIP on the client's own link is resolved by ARP and neighbour
// solicitation, which the program answers, also when the daemon is dead; with `announce: none`
// no host answers.
func TestVIPOnTheLink(t *testing.T) {
	for _, layout := range []lab.Layout{lab.OneArm, lab.TwoArm} {
		t.Run(string(layout), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: layout, VIPOnLink: true})
			b.write(b.file(settings{}))
			b.start()
			eventually(t, 10*time.Second, "announcement", b.announced)
			sessions := b.open(t, 2)
			for _, vip := range vips {
				if got, want := b.resolved(t, vip), b.Balancer.Interfaces()[0].MAC.String(); got != want {
					t.Errorf("the client resolved %s to %s, want the balancer's %s", vip, got, want)
				}
			}
			b.kill()
			b.forget(t)
			b.goOn(t, "resolved anew after kill -9", sessions)
			for _, reason := range []string{"arp_answered", "nd_answered"} {
				if b.status().Reasons[reason].Packets == 0 {
					t.Errorf("%s counts nothing", reason)
				}
			}
			b.start()
			b.reload(b.file(settings{announce: "none"}))
			b.forget(t)
			for _, vip := range vips {
				if err := b.tryUDP(at(vip, 53)); err == nil {
					t.Errorf("%s answered, although it is not announced", vip)
				}
				if got := b.resolved(t, vip); got != "" {
					t.Errorf("the client resolved %s to %s, although it is not announced", vip, got)
				}
			}
		})
	}
}

// resolved is the MAC address that the client has for an address, or "".
func (b *bed) resolved(t *testing.T, address netip.Addr) string {
	t.Helper()
	family := netlink.FAMILY_V4
	if address.Is6() {
		family = netlink.FAMILY_V6
	}
	entries, err := b.Client.Netlink().NeighList(0, family)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range entries {
		if a, _ := netip.AddrFromSlice(n.IP); a.Unmap() == address {
			return n.HardwareAddr.String()
		}
	}
	return ""
}

// forget makes the client resolve everything again.
func (b *bed) forget(t *testing.T) {
	t.Helper()
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		entries, err := b.Client.Netlink().NeighList(0, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range entries {
			if n.State == netlink.NUD_NOARP || n.State == netlink.NUD_PERMANENT {
				continue // multicast
			}
			if err := b.Client.Netlink().NeighDel(&n); err != nil && !errors.Is(err, syscall.ENOENT) {
				t.Fatal(err)
			}
		}
	}
}

// TestAddressInUse: shunt does not answer for an address that another host has, and
// `shunt status` names that host's MAC address.
func TestAddressInUse(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true, Backends: 3})
	other := b.Backends[2]
	for _, vip := range vips {
		if err := other.AddAddress("eth0", netip.PrefixFrom(vip, vip.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	b.write(b.file(settings{backends: []int{1, 2}}))
	b.start()
	mac := other.Interfaces()[0].MAC.String()
	eventually(t, 10*time.Second, "condition address_in_use for both addresses", func() error {
		code, out := b.shunt("status", "--instance", b.instance, "--socket", b.socket)
		for _, vip := range vips {
			if code != 0 || strings.Count(out, "address_in_use") != 2 || !strings.Contains(out, mac) || !strings.Contains(out, "("+vip.String()) {
				return fmt.Errorf("exit code %d:\n%s", code, out)
			}
		}
		return nil
	})
	for _, vip := range vips {
		_ = b.tryUDP(at(vip, 53)) // to cause a look-up; there is no such server
		if got := b.resolved(t, vip); got != mac {
			t.Errorf("the client resolved %s to %s, want its owner %s", vip, got, mac)
		}
	}
	reasons := b.status().Reasons
	if n := reasons["arp_answered"].Packets + reasons["nd_answered"].Packets; n != 0 {
		t.Errorf("shunt answered %d times for addresses that another host has", n)
	}
}

// TestBackendIsItsOwnClient: with full NAT a backend reaches itself through the VIP: its packets
// come back to it from the balancer.
func TestBackendIsItsOwnClient(t *testing.T) {
	for _, attach := range []string{"native", "generic"} {
		t.Run(attach, func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 1})
			b.write(b.file(settings{attach: attach}))
			b.start()
			self := b.Backends[0]
			for _, vip := range vips {
				client := self.HTTPClient(false)
				answer, err := b.get(client, at(vip, 80))
				if err != nil {
					t.Fatal(err)
				}
				if saw := netip.MustParseAddrPort(answer.Remote).Addr(); saw == self.Addr4() || saw == self.Addr6() {
					t.Errorf("the backend saw itself, %s, as client", saw)
				}
				if _, err := b.askUDP(self, at(vip, 53), []byte("who?")); err != nil {
					t.Error(err)
				}
				if _, err := lab.Download(within(t, time.Minute), client, at(vip, 80), size(10, 1)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestPathMTU: a router's "too big" passes the NAT, so that transfers complete although the path
// is narrower than both ends.
func TestPathMTU(t *testing.T) {
	const narrow = 1300
	for _, way := range []struct {
		layout             lab.Layout
		attach, forwarding string
	}{{lab.TwoArm, "native", "nat"}, {lab.TwoArm, "generic", "nat"}, {lab.OneArm, "native", "nat"}, {lab.TwoArm, "native", "nat-destination"}, {lab.TwoArm, "tc", "nat"}} {
		t.Run(fmt.Sprintf("%s/%s/%s", way.layout, way.attach, way.forwarding), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: way.layout, Router: true})
			if err := errors.Join(b.NarrowToClient(narrow), b.NarrowToService(narrow)); err != nil {
				t.Fatal(err)
			}
			b.write(b.file(settings{attach: way.attach, forwarding: way.forwarding}))
			b.start()
			client := b.Client.HTTPClient(false)
			for _, vip := range vips {
				before := b.status().Reasons["icmp_translated"].Packets
				if _, err := lab.Download(within(t, 20*time.Second), client, at(vip, 80), size(4, 1)); err != nil {
					t.Errorf("to the client: %v", err)
				}
				if after := b.status().Reasons["icmp_translated"].Packets; after == before {
					t.Errorf("no ICMP error was translated over %s: the path is not narrow, and the test proves nothing", family(vip))
				}
				if _, err := lab.Upload(within(t, 20*time.Second), client, at(vip, 80), size(4, 1)); err != nil {
					t.Errorf("to the service: %v", err)
				}
			}
		})
	}
}

// TestPingAndTTL: a VIP answers ping, and a packet whose TTL ends at the balancer gets a
// router's answer.
func TestPingAndTTL(t *testing.T) {
	for _, layout := range []lab.Layout{lab.OneArm, lab.TwoArm} {
		for _, attach := range []string{"native", "generic", "tc"} {
			t.Run(fmt.Sprintf("%s/%s", layout, attach), func(t *testing.T) {
				b := newBed(t, lab.Options{Layout: layout})
				b.write(b.file(settings{attach: attach}))
				b.start()
				for _, vip := range vips {
					b.ping(t, vip, []byte("0123456789abcdef0"))
					b.exceed(t, vip)
				}
			})
		}
	}
}

const (
	echoRequest4, echoReply4, exceeded4 = 8, 0, 11    // RFC 792
	echoRequest6, echoReply6, exceeded6 = 128, 129, 3 // RFC 4443
)

// listenICMP is a raw socket on the client.
func (b *bed) listenICMP(t *testing.T, v6 bool) net.PacketConn {
	t.Helper()
	network, address := "ip4:icmp", "0.0.0.0"
	if v6 {
		network, address = "ip6:ipv6-icmp", "::"
	}
	conn, err := b.Client.ListenPacket(network, address)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(answerTimeout)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// receive reads until a message satisfies want.
func receive(conn net.PacketConn, want func(from string, message []byte) bool) error {
	buffer := make([]byte, 2048)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			return err
		}
		if want(from.String(), buffer[:n]) {
			return nil
		}
	}
}

func (b *bed) ping(t *testing.T, vip netip.Addr, payload []byte) {
	t.Helper()
	request, reply := byte(echoRequest4), byte(echoReply4)
	if vip.Is6() {
		request, reply = echoRequest6, echoReply6
	}
	conn := b.listenICMP(t, vip.Is6())
	message := append([]byte{request, 0, 0, 0, 0x12, 0x34, 0, 1}, payload...)
	if vip.Is4() { // over IPv6 the kernel computes it, RFC 3542 section 3.1
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	if _, err := conn.WriteTo(message, &net.IPAddr{IP: vip.AsSlice()}); err != nil {
		t.Fatal(err)
	}
	err := receive(conn, func(from string, m []byte) bool {
		return from == vip.String() && m[0] == reply && string(m[4:]) == string(message[4:]) && (vip.Is6() || checksum(m) == 0)
	})
	if err != nil {
		t.Errorf("ping %s: %v", vip, err)
	}
}

// checksum is the Internet checksum of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// exceed sends a datagram with TTL 1 and waits for "time exceeded" that quotes it.
func (b *bed) exceed(t *testing.T, vip netip.Addr) {
	t.Helper()
	listener := b.listenICMP(t, vip.Is6())
	conn, err := b.Client.Dial(within(t, answerTimeout), "udp", at(vip, 53))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	level, option, kind, quoted := syscall.IPPROTO_IP, syscall.IP_TTL, byte(exceeded4), 8+20
	if vip.Is6() {
		level, option, kind, quoted = syscall.IPPROTO_IPV6, syscall.IPV6_UNICAST_HOPS, exceeded6, 8+40
	}
	err = raw.Control(func(fd uintptr) {
		err = os.NewSyscallError("setsockopt", syscall.SetsockoptInt(int(fd), level, option, 1))
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("who?")); err != nil {
		t.Fatal(err)
	}
	port := uint16(conn.LocalAddr().(*net.UDPAddr).Port)
	var router string
	err = receive(listener, func(from string, m []byte) bool {
		router = from
		return m[0] == kind && len(m) >= quoted+4 && binary.BigEndian.Uint16(m[quoted:]) == port && binary.BigEndian.Uint16(m[quoted+2:]) == 53
	})
	if err != nil {
		t.Errorf("time exceeded for a datagram to %s: %v", vip, err)
	}
	t.Logf("TTL 1 to %s: answered by %s", vip, router)
}

// TestRefusedFramesAreCounted: frames that the kernel refuses after the program's verdict are
// counted: a veth whose far end has GRO switched off does not take them.
func TestRefusedFramesAreCounted(t *testing.T) {
	for layout, reasons := range map[lab.Layout][]string{
		lab.TwoArm: {"redirect_refused"},
		lab.OneArm: {"tx_refused", "redirect_refused"}, // on a veth the way back is a redirect
	} {
		t.Run(string(layout), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: layout})
			b.write(b.file(settings{attach: "native"}))
			b.start()
			b.goOn(t, "with GRO", nil)
			refused := func() (sum uint64) {
				s := b.status()
				for _, reason := range reasons {
					sum += s.Reasons[reason].Packets
				}
				return sum
			}
			before := refused()
			interfaces := b.Balancer.Interfaces()
			far, iface, err := b.FarEnd(b.Balancer, interfaces[len(interfaces)-1].Name)
			if err != nil {
				t.Fatal(err)
			}
			gro := func(on bool) {
				if err := far.SetOffload(iface, map[string]bool{"gro": on}); err != nil {
					t.Fatal(err)
				}
			}
			gro(false)
			const want = 5
			// On a slow machine a datagram's time may be over before it is sent.
			eventually(t, 10*time.Second, "the count of refused frames", func() error {
				if err := b.tryUDP(at(lab.VIP4, 53)); err == nil {
					t.Fatal("a datagram was answered, although the far end takes no frames")
				}
				if n := refused() - before; n < want {
					return fmt.Errorf("%d refused frames are counted, want %d", n, want)
				}
				return nil
			})
			gro(true)
			eventually(t, 10*time.Second, "answers with GRO again", func() error { return b.tryUDP(at(lab.VIP4, 53)) })
			stays := refused()
			b.goOn(t, "with GRO again", nil)
			if n := refused() - stays; n != 0 {
				t.Errorf("%d refused frames are counted where all arrived", n)
			}
		})
	}
}

// TestMissedFramesAreCounted: frames that an interface does not take, so that no program sees
// them, are counted and a condition. Here they are too long; this stands for a full ring, which
// has the same counter but would give so many only by chance.
func TestMissedFramesAreCounted(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	if err := b.Balancer.SetMTU("eth0", 1300); err != nil {
		t.Fatal(err)
	}
	b.write(b.file(settings{}))
	b.start()
	const unknown = -1
	missed := func() int {
		for _, a := range b.status().Attached {
			if a.Interface == "eth0" && a.Missed != nil {
				return int(*a.Missed)
			}
		}
		return unknown
	}
	before := missed() // the kernel may have lost a frame of its own while the bed was made
	if before == unknown {
		t.Fatal("at the beginning the status shows no number of missed frames")
	}
	far, iface, err := b.FarEnd(b.Balancer, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	const sent = 7
	for range sent {
		// The kernel may report that it dropped the frame.
		if err := far.Send(iface, make([]byte, 1400)); err != nil && !errors.Is(err, syscall.ENOBUFS) {
			t.Fatal(err)
		}
	}
	eventually(t, 10*time.Second, "the count of missed frames, and the condition", func() error {
		if n := missed(); n != before+sent {
			return fmt.Errorf("the status shows %d frames missed, want %d", n, before+sent)
		}
		if text := b.status().condition("frames_missed"); !strings.HasPrefix(text, "eth0: ") || !strings.Contains(text, "tc qdisc") {
			return fmt.Errorf("the condition says %q", text)
		}
		return nil
	})
	b.kill()
	if n := missed(); n != unknown {
		t.Errorf("without a daemon, which knows the interface, %d frames are shown as missed", n)
	}
}

// TestDriverWithoutNativeMode: for an interface whose driver has no native mode, `native` fails
// with the reason; `auto` falls back to generic, and says so.
func TestDriverWithoutNativeMode(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.addMacvlan("mv0")
	with := func(attach string) string { return withInterface(b.file(settings{attach: "native"}), "mv0", attach) }
	b.write(with("native"))
	p := b.launch()
	select {
	case <-p.ended:
	case <-time.After(patience * time.Minute): // loading can be slow on a busy machine
		_ = p.end(syscall.SIGKILL)
		t.Fatal("`attach: native` was accepted by macvlan")
	}
	said := p.log()
	for _, word := range []string{"mv0", "native", "support"} {
		if p.command.ProcessState.ExitCode() != 1 || !strings.Contains(said, word) {
			t.Errorf("the failure does not say %q:\n%s", word, said)
		}
	}
	if _, err := os.Stat("/sys/fs/bpf/shunt/" + b.instance); err == nil {
		t.Error("the start that failed left its pins")
	}
	b.write(with("auto"))
	b.start()
	s := b.status()
	modes := map[string]string{}
	for _, a := range s.Attached {
		modes[a.Interface] = a.Mode
	}
	if modes["mv0"] != "generic" || modes["eth0"] != "native" {
		t.Errorf("attached in modes %v", modes)
	}
	if c := s.condition("attach_degraded"); !strings.Contains(c, "mv0") || !strings.Contains(c, "support") {
		t.Errorf("the condition attach_degraded says %q", c)
	}
	b.goOn(t, "beside a generic interface", nil)

	b.write(with("native"))
	if code, out := b.shunt("reload", "--socket", b.socket); code != 1 || !strings.Contains(out, "mv0") {
		t.Errorf("reload to native mode: exit code %d, want 1 and the interface:\n%s", code, out)
	}
	link, err := b.Balancer.Netlink().LinkByName("mv0")
	if err != nil {
		t.Fatal(err)
	}
	if link.Attrs().Xdp == nil || !link.Attrs().Xdp.Attached {
		t.Error("the refused reload took the program off the interface")
	}
	b.goOn(t, "after the refused reload", nil)
}
