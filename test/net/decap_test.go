package net

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/realserver"
	"github.com/shunt-lb/shunt/internal/packet"
)

// backendBed is a backend behind a balancer of a few lines in this file: it puts packets from
// the client to a VIP into a tunnel, and routes the answers like any router.
//
//	client ── eth0 sender eth1 ── eth0 backend
//	198.51.100.7 … .1   10.0.0.1 … .20       (IPv6 likewise)
type backendBed struct {
	t                       *testing.T
	client, sender, backend *lab.Host
	wrapper                 atomic.Pointer[wrapper]
	before                  traces
}

// wrapper describes the sender's outer headers.
type wrapper struct {
	gue, six bool
	from     netip.Addr // outer source; the sender's own if invalid
}

const (
	tunnelPort = 6080
	// tunnelMTU has room for a packet of 1500 and the longest outer headers.
	tunnelMTU = 1600
)

func newBackendBed(t *testing.T) *backendBed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces and BPF need root: run the tests with sudo")
	}
	t.Parallel()
	l, err := lab.New(fmt.Sprintf("d%dx%d", os.Getpid(), beds.Add(1)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	b := &backendBed{t: t}
	for name, to := range map[string]**lab.Host{"client": &b.client, "sender": &b.sender, "backend": &b.backend} {
		if *to, err = l.AddHost(name); err != nil {
			t.Fatal(err)
		}
	}
	end := func(h *lab.Host, iface, four, six string) lab.End {
		return lab.End{Host: h, Interface: iface, IPv4: netip.MustParsePrefix(four), IPv6: netip.MustParsePrefix(six)}
	}
	route := func(h *lab.Host, to, via string) error {
		return h.AddRoute(lab.Route{To: netip.MustParsePrefix(to), Via: netip.MustParseAddr(via)})
	}
	err = errors.Join(
		l.Connect(end(b.client, "eth0", "198.51.100.7/24", "2001:db8:9::7/64"), end(b.sender, "eth0", "198.51.100.1/24", "2001:db8:9::1/64"), lab.Cable{}),
		l.Connect(end(b.sender, "eth1", "10.0.0.1/24", "2001:db8:2::1/64"), end(b.backend, "eth0", "10.0.0.20/24", "2001:db8:2::20/64"), lab.Cable{MTU: tunnelMTU}),
		route(b.client, "0.0.0.0/0", "198.51.100.1"), route(b.client, "::/0", "2001:db8:9::1"),
		route(b.backend, "0.0.0.0/0", "10.0.0.1"), route(b.backend, "::/0", "2001:db8:2::1"),
		b.sender.SetForwarding(true),
		// The sender's packets are copies of the client's, so the client has to finish them.
		b.client.SetOffload("eth0", map[string]bool{"tx": false, "tso": false, "gso": false}),
		l.Ready(t.Context()),
	)
	if err != nil {
		t.Fatal(err)
	}
	for _, device := range []string{"all", "eth0"} {
		for _, name := range []string{"arp_ignore", "arp_announce"} {
			if err := b.backend.SetSysctl("net.ipv4.conf."+device+"."+name, "0"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := b.backend.ServeHTTP(":80", "backend"); err != nil {
		t.Fatal(err)
	}
	b.wrap()
	b.before = b.traces()
	return b
}

// wrap starts the sender, which acts as the balancer.
func (b *backendBed) wrap() {
	b.t.Helper()
	for _, vip := range vips { // the sender's kernel must not forward them
		if err := b.sender.Netlink().RouteAdd(blackhole(vip)); err != nil {
			b.t.Fatal(err)
		}
	}
	in, out := rawSocket(b.t, b.sender, "eth0"), rawSocket(b.t, b.sender, "eth1")
	done := make(chan struct{})
	go func() {
		defer close(done)
		frame := make([]byte, 1<<16)
		for {
			n, err := in.Read(frame)
			if errors.Is(err, os.ErrClosed) {
				return
			}
			w := b.wrapper.Load()
			if err != nil || w == nil {
				continue
			}
			p, err := packet.Parse(frame[:n])
			if err != nil || !slices.Contains(vips, p.Destination()) {
				continue
			}
			_, _ = out.Write(packet.Must(b.wrapped(p, *w))) // TCP repeats a lost frame
		}
	}()
	b.t.Cleanup(func() {
		_, _ = in.Close(), out.Close()
		<-done
	})
}

func blackhole(vip netip.Addr) *netlink.Route {
	return &netlink.Route{Dst: &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(vip.BitLen(), vip.BitLen())}, Type: unix.RTN_BLACKHOLE}
}

func (b *backendBed) wrapped(p packet.Packet, w wrapper) packet.Packet {
	from, to, protocol := b.sender.Interfaces()[1].IPv4.Addr(), b.backend.Addr4(), uint8(4)
	if w.six {
		from, to = b.sender.Interfaces()[1].IPv6.Addr(), b.backend.Addr6()
	}
	if w.from.IsValid() {
		from = w.from
	}
	if p.IPv6 != nil {
		protocol = 41
	}
	inner := packet.Quote(p, 0)
	macs := packet.MACs(b.sender.Interfaces()[1].MAC, b.backend.Interfaces()[0].MAC)
	source, _ := transportPorts(p)
	outer := packet.NewUDP(netip.AddrPortFrom(from, 0xc000|source), netip.AddrPortFrom(to, tunnelPort), macs,
		packet.Data(append([]byte{0, protocol, 0, 0}, inner...)), packet.TransportChecksum(packet.Checksum{Mode: packet.Zero}))
	if w.gue {
		return outer
	}
	outer.UDP, outer.Payload = nil, inner
	if outer.IPv6 != nil {
		outer.IPv6.NextHeader = protocol
	} else {
		outer.IPv4.Protocol = protocol
	}
	return outer
}

func transportPorts(p packet.Packet) (source, destination uint16) {
	if p.TCP != nil {
		return p.TCP.SourcePort, p.TCP.DestinationPort
	}
	return 0, 0
}

// rawSocket reads and writes frames of an interface; closing it ends a Read.
func rawSocket(t *testing.T, h *lab.Host, iface string) *os.File {
	t.Helper()
	index, err := h.InterfaceIndex(iface)
	if err != nil {
		t.Fatal(err)
	}
	var file *os.File
	err = h.Run(func() error {
		const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // wire order
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, all)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), iface)
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index})
	})
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// traces are the settings that `shunt decap` must leave unchanged.
type traces struct {
	Addresses []string
	Settings  map[string]string
	Program   bool
	Files     []string
}

func (b *backendBed) traces() traces {
	b.t.Helper()
	seen := traces{Settings: map[string]string{}}
	err := b.backend.Run(func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			list, err := netlink.AddrList(l, netlink.FAMILY_ALL)
			if err != nil {
				return err
			}
			for _, a := range list {
				if a.IP.IsLinkLocalUnicast() {
					continue // the kernel's own address, which appears some time after the interface
				}
				seen.Addresses = append(seen.Addresses, l.Attrs().Name+" "+a.IPNet.String())
			}
			seen.Program = seen.Program || l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached
		}
		space, err := host.Space()
		if err != nil {
			return err
		}
		for _, pattern := range []string{realserver.RunDirectory + "/decap-" + space + ".*", filepath.Join(kernel.DefaultPinRoot, "shunt", "_decap", space)} {
			found, err := filepath.Glob(pattern)
			if err != nil {
				return err
			}
			seen.Files = append(seen.Files, found...)
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, device := range []string{"all", "eth0", "lo"} {
		for _, name := range []string{"arp_ignore", "arp_announce", "rp_filter"} {
			setting := "net.ipv4.conf." + device + "." + name
			if seen.Settings[setting], err = b.backend.Sysctl(setting); err != nil {
				b.t.Fatal(err)
			}
		}
	}
	return seen
}

func (b *backendBed) requireNoTraces() {
	b.t.Helper()
	if got, want := fmt.Sprintf("%+v", b.traces()), fmt.Sprintf("%+v", b.before); got != want {
		b.t.Errorf("shunt decap has left traces:\n%s\nbefore it was\n%s", got, want)
	}
}

// decap starts `shunt decap -o json` on the backend and waits until it is ready.
func (b *backendBed) decap(args ...string) *process {
	b.t.Helper()
	args = append([]string{"decap", "--interface", "eth0", "-o", "json", "--interval", "1s"}, args...)
	for _, vip := range vips {
		args = append(args, "--vip", vip.String())
	}
	p := spawn(b.t, b.backend, args...)
	b.t.Cleanup(func() {
		if err := p.end(syscall.SIGTERM); err != nil {
			b.t.Errorf("shunt decap: %v", err)
		}
		if b.t.Failed() {
			b.t.Logf("the output of shunt decap:\n%s", p.log())
		}
	})
	eventually(b.t, 30*time.Second, "start of shunt decap", func() error {
		select {
		case <-p.ended:
			b.t.Fatalf("shunt decap ended: %v\n%s", p.Err(), p.log())
		default:
		}
		if len(p.events("started")) > 0 {
			return nil
		}
		return errors.New(p.log())
	})
	return p
}

func (b *backendBed) stop(p *process) {
	b.t.Helper()
	if err := p.end(syscall.SIGTERM); err != nil {
		b.t.Fatalf("shunt decap: %v\n%s", err, p.log())
	}
}

// event has the fields of a line of `shunt decap -o json` that the tests read.
type event struct {
	Event    string
	Attached *struct{ Mode string }
	VIPs     []struct{ Added bool }
	Numbers  struct {
		Kinds, Refused map[string]uint64
	}
	Findings []struct{ Code, Subject string }
}

// events are the lines of one kind so far.
func (p *process) events(kind string) (list []event) {
	for _, line := range strings.Split(p.log(), "\n") {
		var e event
		if json.Unmarshal([]byte(line), &e) == nil && e.Event == kind {
			list = append(list, e)
		}
	}
	return list
}

func (b *backendBed) get(vip netip.Addr) error {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	answer, err := lab.Get(ctx, b.client.HTTPClient(false), at(vip, 80))
	if err != nil {
		return err
	}
	if from := netip.MustParseAddrPort(answer.Remote).Addr(); from != b.client.Addr4() && from != b.client.Addr6() {
		return fmt.Errorf("the backend saw %s instead of the client", from)
	}
	return nil
}

func (w wrapper) String() string {
	name := "ipip"
	if w.gue {
		name = "gue"
	}
	if w.six {
		return name + " over ipv6"
	}
	return name + " over ipv4"
}

var wrappers = []wrapper{{}, {six: true}, {gue: true}, {gue: true, six: true}}

// TestDecapEndToEnd sends TCP in every tunnel, in both modes; afterwards nothing is left.
func TestDecapEndToEnd(t *testing.T) {
	for _, mode := range []string{"native", "generic"} {
		t.Run(mode, func(t *testing.T) {
			b := newBackendBed(t)
			p := b.decap("--attach", mode, "--from", "10.0.0.0/24", "--from", "2001:db8:2::1")
			start := p.events("started")[0]
			if start.Attached == nil || start.Attached.Mode != mode || len(start.Findings) != 0 {
				t.Errorf("it says %+v", start)
			}
			for _, w := range wrappers {
				b.wrapper.Store(&w)
				for _, vip := range vips {
					name := fmt.Sprintf("%s in %s", family(vip), w)
					if err := b.get(vip); err != nil {
						t.Fatalf("%s: %v\n%s", name, err, p.log())
					}
					if _, err := lab.Upload(within(t, time.Minute), b.client.HTTPClient(false), at(vip, 80), 2<<20); err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					if _, err := lab.Download(within(t, time.Minute), b.client.HTTPClient(false), at(vip, 80), 2<<20); err != nil {
						t.Fatalf("%s: %v", name, err)
					}
				}
			}
			eventually(t, 10*time.Second, "numbers", func() error {
				for _, e := range p.events("counted") {
					if e.Numbers.Kinds["decap_ipip"] > 0 && e.Numbers.Kinds["decap_gue"] > 0 {
						return nil
					}
				}
				return errors.New(p.log())
			})
			b.stop(p)
			last := p.events("stopped")
			if len(last) != 1 || len(last[0].Numbers.Refused) != 0 {
				t.Errorf("at its end it says %+v", last)
			}
			b.requireNoTraces()
		})
	}
}

// TestDecapRefusesStrangers: packets in a tunnel from elsewhere are dropped and counted.
func TestDecapRefusesStrangers(t *testing.T) {
	b := newBackendBed(t)
	p := b.decap("--from", "10.0.0.2", "--from", "2001:db8:2::1")
	b.wrapper.Store(&wrapper{})
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if _, err := lab.Get(ctx, b.client.HTTPClient(false), at(vips[0], 80)); err == nil {
		t.Error("a sender that is not permitted got through")
	}
	b.wrapper.Store(&wrapper{from: netip.MustParseAddr("10.0.0.2")})
	if err := b.get(vips[0]); err != nil {
		t.Errorf("a permitted sender: %v", err)
	}
	b.stop(p)
	if last := p.events("stopped"); len(last) != 1 || last[0].Numbers.Refused["decap_sender"] == 0 {
		t.Errorf("at its end it says %+v", last)
	}
	b.requireNoTraces()
}

// TestDecapKilled: kill -9 loses nothing; the next start takes over, and its end still undoes
// everything.
func TestDecapKilled(t *testing.T) {
	b := newBackendBed(t)
	if err := b.backend.SetSysctl("net.ipv4.conf.eth0.rp_filter", "1"); err != nil {
		t.Fatal(err)
	}
	b.before = b.traces()
	from := []string{"--from", "10.0.0.0/24", "--from", "2001:db8:2::/64"}
	p := b.decap(from...)
	b.wrapper.Store(&wrapper{gue: true})
	if err := p.end(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := b.get(vips[1]); err != nil {
		t.Errorf("after kill -9: %v", err)
	}
	p = b.decap(from...)
	for _, vip := range p.events("started")[0].VIPs {
		if !vip.Added {
			t.Error("the second start does not know that the first had added the VIPs")
		}
	}
	if err := b.get(vips[0]); err != nil {
		t.Errorf("after the second start: %v", err)
	}
	out, err := command(b.backend, "decap", "--interface", "eth0", "--vip", "192.0.2.10", "--from", "10.0.0.1").CombinedOutput()
	if err == nil || !strings.Contains(string(out), fmt.Sprintf("process %d", p.command.Process.Pid)) {
		t.Errorf("a second one beside it: %v\n%s", err, out)
	}
	if err := b.get(vips[0]); err != nil {
		t.Errorf("after the refused start: %v", err)
	}
	b.stop(p)
	b.requireNoTraces()
}

// TestDecapKilledThenAttachNone: the program of a killed predecessor does not survive a start
// with `--attach none`.
func TestDecapKilledThenAttachNone(t *testing.T) {
	b := newBackendBed(t)
	p := b.decap("--from", "10.0.0.0/24")
	if err := p.end(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if out, err := command(b.backend, "decap", "--interface", "eth7", "--vip", "192.0.2.10", "--from", "10.0.0.1").CombinedOutput(); err == nil || !strings.Contains(string(out), "eth7") {
		t.Errorf("an interface that does not exist: %v\n%s", err, out)
	}
	if !b.traces().Program {
		t.Error("a refused start has taken the predecessor's program off")
	}
	p = b.decap("--attach", "none")
	if b.traces().Program {
		t.Error("the program is still there")
	}
	b.stop(p)
	b.requireNoTraces()
}

// TestDecapIsQuiet: on one link with the client, no host learns from the backend that it has
// the VIPs: it answers neither ARP nor neighbour solicitations, and does not use them as the
// source of its own.
func TestDecapIsQuiet(t *testing.T) {
	b := newBackendBed(t)
	p := b.decap("--attach", "none")
	if err := b.quiet(); err != nil {
		t.Error(err)
	}
	b.stop(p)
	b.requireNoTraces()

	// The test notices the fault: the same VIPs without the settings.
	for _, vip := range vips {
		if err := b.backend.AddAddress("lo", netip.PrefixFrom(vip, vip.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.quiet(); err == nil || !strings.Contains(err.Error(), vips[0].String()) {
		t.Errorf("with the VIP on lo and nothing set: %v", err)
	}
}

// quiet sends requests for the VIPs to the backend, and sends a SYN to each as dsr-l2 does, so
// that the backend has to ask for the sender's MAC address. It fails if any answer or request
// shows a VIP.
func (b *backendBed) quiet() error {
	b.t.Helper()
	wire := rawSocket(b.t, b.sender, "eth1")
	defer wire.Close()
	mine, its := b.sender.Interfaces()[1], b.backend.Interfaces()[0]
	if err := forgetNeighbours(b.backend); err != nil {
		b.t.Fatal(err)
	}
	for _, p := range []packet.Packet{
		packet.NewARPRequest(mine.MAC, mine.IPv4.Addr(), vips[0]),
		packet.NewNeighbourSolicitation(mine.MAC, mine.IPv6.Addr(), vips[1]),
		packet.NewTCP(netip.AddrPortFrom(mine.IPv4.Addr(), 40000), netip.AddrPortFrom(vips[0], 80), "S", packet.MACs(mine.MAC, its.MAC)),
		packet.NewTCP(netip.AddrPortFrom(mine.IPv6.Addr(), 40000), netip.AddrPortFrom(vips[1], 80), "S", packet.MACs(mine.MAC, its.MAC)),
	} {
		if _, err := wire.Write(packet.Must(p)); err != nil {
			b.t.Fatal(err)
		}
	}
	// The answers to the SYNs come last, once the backend has resolved the sender's address.
	answered, told := map[netip.Addr]bool{}, []string{}
	_ = wire.SetReadDeadline(time.Now().Add(answerTimeout))
	frame := make([]byte, 1<<16)
	for len(answered) < len(vips) {
		n, err := wire.Read(frame)
		if err != nil {
			return fmt.Errorf("answers came for %v alone: %w", answered, err)
		}
		p, err := packet.Parse(frame[:n])
		if err != nil || !bytes.Equal(p.Ethernet.Source, its.MAC) {
			continue
		}
		if p.TCP != nil {
			answered[p.Source()] = true
		}
		if p.ARP != nil && p.ARP.SenderAddress == vips[0] {
			told = append(told, p.String())
		}
		if p.ICMPv6 != nil && p.ICMPv6.Neighbour != nil && (p.Source() == vips[1] || p.ICMPv6.Neighbour.Target == vips[1]) {
			told = append(told, p.String())
		}
	}
	if len(told) > 0 {
		return fmt.Errorf("the backend tells the network of a VIP: %s", strings.Join(told, "; "))
	}
	return nil
}

func forgetNeighbours(h *lab.Host) error {
	for _, kind := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		entries, err := h.Netlink().NeighList(0, kind)
		if err != nil {
			return err
		}
		for _, n := range entries {
			if n.State == netlink.NUD_NOARP || n.State == netlink.NUD_PERMANENT {
				continue
			}
			if err := h.Netlink().NeighDel(&n); err != nil && !errors.Is(err, syscall.ENOENT) {
				return err
			}
		}
	}
	return nil
}

// doctor returns the codes that `shunt doctor --backend` finds, and its exit code.
func (b *backendBed) doctor(args ...string) (code int, found []string) {
	b.t.Helper()
	args = append([]string{"doctor", "--backend", "-o", "json"}, args...)
	for _, vip := range vips {
		args = append(args, "--vip", vip.String())
	}
	out, err := command(b.backend, args...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code = exit.ExitCode()
	} else if err != nil {
		b.t.Fatal(err)
	}
	var answer struct {
		OK       bool
		Findings []struct{ Code, Subject, Text, Meaning, Remedy string }
	}
	if err := json.Unmarshal(out, &answer); err != nil || answer.OK != (code == 0) {
		b.t.Fatalf("shunt doctor: exit code %d, %v\n%s", code, err, out)
	}
	for _, f := range answer.Findings {
		if f.Text == "" || f.Meaning == "" || f.Remedy == "" {
			b.t.Errorf("a finding without text, meaning or remedy: %+v", f)
		}
		found = append(found, f.Code+" "+f.Subject)
	}
	return code, found
}

// doctorFault is a fault that the test makes and repairs.
type doctorFault struct {
	found        string
	make, repair func() error
	harmless     bool // worth a report, but no fault
}

func (b *backendBed) doctorFaults() []doctorFault {
	set := func(name, value string) func() error {
		return func() error { return b.backend.SetSysctl(name, value) }
	}
	lo := func(change func(link netlink.Link, a *netlink.Addr) error) func() error {
		return func() error {
			return b.backend.Run(func() error {
				link, err := netlink.LinkByName("lo")
				if err != nil {
					return err
				}
				a, err := netlink.ParseAddr(vips[0].String() + "/32")
				if err != nil {
					return err
				}
				return change(link, a)
			})
		}
	}
	both := func(f ...func() error) func() error {
		return func() error {
			for _, do := range f {
				if err := do(); err != nil {
					return err
				}
			}
			return nil
		}
	}
	defaults := func(change func(*netlink.Route) error) func() error {
		return func() error {
			return b.backend.Run(func() error { return change(&netlink.Route{Gw: net.ParseIP("10.0.0.1").To4()}) })
		}
	}
	return []doctorFault{
		{found: "vip_missing 192.0.2.10", make: lo(netlink.AddrDel), repair: lo(netlink.AddrAdd)},
		{found: "vip_visible 2001:db8::10",
			make: func() error { return b.backend.AddAddress("eth0", netip.PrefixFrom(vips[1], 128)) },
			repair: func() error {
				return b.backend.Run(func() error {
					link, err := netlink.LinkByName("eth0")
					if err != nil {
						return err
					}
					a, err := netlink.ParseAddr(vips[1].String() + "/128")
					if err != nil {
						return err
					}
					return netlink.AddrDel(link, a)
				})
			}},
		{found: "vip_arp_answered eth0",
			make:   both(set("net.ipv4.conf.all.arp_ignore", "0"), set("net.ipv4.conf.eth0.arp_ignore", "0")),
			repair: both(set("net.ipv4.conf.all.arp_ignore", "1"), set("net.ipv4.conf.eth0.arp_ignore", "1"))},
		{found: "vip_arp_announced eth0",
			make:   both(set("net.ipv4.conf.all.arp_announce", "0"), set("net.ipv4.conf.eth0.arp_announce", "1")),
			repair: both(set("net.ipv4.conf.all.arp_announce", "2"), set("net.ipv4.conf.eth0.arp_announce", "2"))},
		{found: "reverse_path_strict eth0", make: set("net.ipv4.conf.all.rp_filter", "1"), repair: set("net.ipv4.conf.all.rp_filter", "0"), harmless: true},
		{found: "tunnel_mtu 192.0.2.10", // and IPv6's, whose headers are longer
			make: func() error { return b.backend.SetMTU("eth0", 1510) }, repair: func() error { return b.backend.SetMTU("eth0", tunnelMTU) }},
		{found: "default_route_missing IPv4", make: defaults(netlink.RouteDel), repair: defaults(netlink.RouteAdd)},
	}
}

// TestDoctorBackend: the doctor finds each fault when it is made, and is silent when it is
// repaired.
func TestDoctorBackend(t *testing.T) {
	b := newBackendBed(t)
	p := b.decap("--from", "10.0.0.0/24")
	for _, c := range b.doctorFaults() {
		t.Run(c.found, func(t *testing.T) {
			if code, found := b.doctor("--interface", "eth0", "--forwarding", "dsr-ipip"); code != 0 || len(found) != 0 {
				t.Fatalf("before: exit code %d, %v", code, found)
			}
			if err := c.make(); err != nil {
				t.Fatal(err)
			}
			code, found := b.doctor("--interface", "eth0", "--forwarding", "dsr-ipip")
			if !slices.Contains(found, c.found) || (code == 0) != c.harmless {
				t.Errorf("exit code %d, %v", code, found)
			}
			if err := c.repair(); err != nil {
				t.Fatal(err)
			}
			if code, found := b.doctor("--interface", "eth0", "--forwarding", "dsr-ipip"); code != 0 || len(found) != 0 {
				t.Fatalf("repaired: exit code %d, %v", code, found)
			}
		})
	}
	b.stop(p)
	// lo had the VIP's IPv4 address added by hand in between; it is the same address.
	b.requireNoTraces()
	code, found := b.doctor("--forwarding", "dsr-gue")
	for _, want := range []string{"vip_missing 192.0.2.10", "tunnel_missing 2001:db8::10", "vip_arp_answered eth0"} {
		if code != 1 || !slices.Contains(found, want) {
			t.Errorf("without shunt decap: exit code %d, %v; want %s among them", code, found, want)
		}
	}
	out, err := command(b.backend, "doctor").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), "--backend") {
		t.Errorf("shunt doctor alone: %v\n%s", err, out)
	}
}
