package daemon_test

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
)

// besideBed is a server whose eth0 has a lease, and a service whose backend is behind eth1:
//
//	client ── eth0 server eth1 ── backend
type besideBed struct {
	*bed
	asked int
}

func newBesideBed(t *testing.T) *besideBed {
	b := &besideBed{bed: newBed(t)}
	n := b.net
	backend, err := n.Lab.AddHost("backend")
	b.Must(err)
	b.Must(n.Lab.Connect(
		lab.End{Host: n.Server, Interface: "eth1", IPv4: netip.MustParsePrefix("10.0.0.1/24"), IPv6: netip.MustParsePrefix("2001:db8:1::1/64")},
		lab.End{Host: backend, Interface: "eth0", IPv4: netip.MustParsePrefix("10.0.0.2/24"), IPv6: netip.MustParsePrefix("2001:db8:1::2/64")},
		lab.Cable{}))
	b.Must(n.Client.SetOffload("eth0", map[string]bool{"gro": true})) // a veth takes frames from XDP only then
	b.Must(backend.SetOffload("eth0", map[string]bool{"gro": true, "tx": false}))
	ctx, cancel := context.WithTimeout(context.Background(), nodetest.Patience)
	defer cancel()
	b.Must(n.Lab.Ready(ctx))
	for _, address := range []string{"10.0.0.2:53", "[2001:db8:1::2]:53"} {
		_, err := backend.ServeUDP(address, "backend")
		b.Must(err)
	}
	_, err = n.Server.ServeUDP("[2001:db8::10]:5000", "kernel")
	b.Must(err)
	return b
}

const (
	leaseKeys = `
udp_socket: SOCKET
udp:
  - {name: feed, interface: eth0, queues: all, address: [192.0.2.10, "2001:db8::10"], port: 5000, tx: true, allow: {user: 65534}}
`
	serviceKeys = `
interfaces: [{name: eth0}, {name: eth1}]
services:
  - {name: dns, address: [192.0.2.100, "2001:db8::100"], port: 53, protocol: udp, backends: [{address: 10.0.0.2}, {address: "2001:db8:1::2"}]}
`
)

// file makes the daemon's file of these keys.
func (b *besideBed) file(keys ...string) {
	b.Helper()
	b.Write(strings.ReplaceAll(strings.Join(keys, ""), "SOCKET", b.socket()))
}

// answers waits until the right one answers at an address: "x", "kernel" or "backend".
func (b *besideBed) answers(who string, addresses ...string) {
	b.Helper()
	for _, address := range addresses {
		deadline := time.Now().Add(nodetest.Patience)
		for within := answersWithin; !b.askAt(address, who, within); within = longer(within) {
			if time.Now().After(deadline) {
				st, _ := b.Ask()
				b.Fatalf("%s does not answer at %s: %v\n%s", who, address, st, b.Process.Log())
			}
			time.Sleep(time.Millisecond)
		}
	}
}

func (b *besideBed) askAt(address, who string, within time.Duration) bool {
	b.Helper()
	conn, err := b.net.Client.Dial(context.Background(), "udp", address)
	b.Must(err)
	defer conn.Close() //nolint:errcheck // nothing is lost
	b.asked++
	if _, err := fmt.Fprintf(conn, "ask %d", b.asked); err != nil {
		return false
	}
	_ = conn.SetReadDeadline(time.Now().Add(within))
	buffer := make([]byte, 2048)
	n, err := conn.Read(buffer)
	return err == nil && strings.HasPrefix(string(buffer[:n]), who)
}

var (
	leased = []string{"192.0.2.10:5000", "[2001:db8::10]:5000"}
	served = []string{"192.0.2.100:53", "[2001:db8::100]:53"}
)

// undisturbed requires that the lease is the first one.
func (b *besideBed) undisturbed(after string) {
	b.Helper()
	st := b.Is(after, func(st *shuntv1.GetStatusResponse) bool { return len(st.Udp) == 1 })
	if l := lease(st, "feed"); l.Given != 1 || l.Holder == nil || l.Failed != "" {
		b.Errorf("after %s the lease is %v", after, l)
	}
	accounted(b.T, after, lease(st, "feed").Total)
}

func programName(id uint32) string {
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	if err != nil {
		return err.Error()
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return err.Error()
	}
	return info.Name
}

// program is the name of the XDP program on the server's eth0.
func (b *besideBed) program() (name string) {
	b.Helper()
	b.Must(b.net.Server.Run(func() error {
		dev, err := netlink.LinkByName("eth0")
		if err == nil && dev.Attrs().Xdp != nil && dev.Attrs().Xdp.Attached {
			name = programName(dev.Attrs().Xdp.ProgId)
		}
		return err
	}))
	return name
}

// Both products on one interface, in one daemon, over IPv4 and IPv6: each comes, goes and is killed, and the other goes
// on; a lease that is held is not disturbed.
func TestOneInterfaceWithTheBalancer(t *testing.T) {
	b := newBesideBed(t)
	resumable := udptest.BoundRings(t, b.net.Server)
	b.file(leaseKeys, serviceKeys)
	b.run()
	b.answers("kernel", leased...)
	b.answers("backend", served...)
	worker := b.work("feed", 0)
	b.answers("x", leased...)
	b.answers("backend", served...)
	b.undisturbed("both run")
	if name := b.program(); name != "sh_xdp" {
		t.Errorf("eth0 has the program %q", name)
	}
	b.showsGuest(true)

	b.file(leaseKeys)
	b.Reload()
	if name := b.program(); name != "sh_udp" {
		t.Errorf("without the balancer eth0 has the program %q", name)
	}
	b.answers("x", leased...)
	b.undisturbed("the balancer has gone")

	b.file(leaseKeys, serviceKeys)
	b.Must(b.net.Server.Run(func() error { // the next file, while the daemon has the interface without a balancer
		var out bytes.Buffer
		if code := cli.Main(line, []string{"check", "--host", "--config", b.Config()}, nil, &out, &out); code != 0 || strings.Contains(out.String(), "sh_udp") {
			t.Errorf("shunt check --host ends with %d and says\n%s", code, out.String())
		}
		return nil
	}))
	b.Reload()
	if name := b.program(); name != "sh_xdp" {
		t.Errorf("with the balancer again eth0 has the program %q", name)
	}
	b.answers("x", leased...)
	b.answers("backend", served...)
	b.undisturbed("the balancer has come again")

	b.file(leaseKeys, strings.Replace(serviceKeys, "[{name: eth0}, {name: eth1}]", "[{name: eth0, attach: generic}, {name: eth1, attach: generic}]", 1))
	b.Reload()
	b.answers("x", leased...)
	b.answers("backend", served...)
	b.undisturbed("the balancer's mode has changed")
	b.file(leaseKeys, strings.Replace(serviceKeys, "[{name: eth0}, {name: eth1}]", "[{name: eth0, attach: tc}, {name: eth1, attach: tc}]", 1))
	b.Reload()
	b.answers("x", leased...)
	b.answers("backend", served...)
	b.undisturbed("the balancer is at tc")
	b.showsGuest(false)
	if name := b.program(); name != "sh_udp" {
		t.Errorf("with the balancer at tc eth0 has the program %q", name)
	}
	b.file(leaseKeys, serviceKeys)
	b.Reload()
	b.answers("x", leased...)
	b.answers("backend", served...)
	b.undisturbed("the balancer is at XDP again")

	nodetest.Kill(b.Process) // both programs stay
	b.answers("x", leased...)
	b.answers("backend", served...)
	b.run()
	b.answers("x", leased...)
	b.answers("backend", served...)
	if resumable {
		b.Is("the lease is resumed", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Resumed == 1 })
		b.undisturbed("the daemon was killed")
	}
	b.showsGuest(true)

	b.file(serviceKeys)
	b.Reload()
	b.answers("kernel", leased...)
	b.answers("backend", served...)
	b.file(leaseKeys, serviceKeys)
	b.Reload()
	b.answers("x", leased...)
	b.answers("backend", served...)
	nodetest.Kill(worker)
	b.answers("kernel", leased...)
	b.answers("backend", served...)
}

// says is the output of a command, run on the server.
func (b *besideBed) says(args ...string) (said string) {
	b.Helper()
	b.Must(b.net.Server.Run(func() error {
		var out bytes.Buffer
		if code := cli.Main(line, args, nil, &out, &out); code != 0 {
			return fmt.Errorf("shunt %s ends with %d: %s", strings.Join(args, " "), code, out.String())
		}
		said = out.String()
		return nil
	}))
	return said
}

// showsGuest requires that commands show the UDP path behind the balancer, or do not.
func (b *besideBed) showsGuest(want bool) {
	b.Helper()
	row := regexp.MustCompile(`(?m)^(eth0)? +\(guest\) +sh_udp `)
	status := b.says("status", "--socket", b.Socket())
	chain := b.says("chain", "list", "--instance", b.instance())
	if guest := row.MatchString(status); guest != want {
		b.Errorf("a guest must be shown: %v; shunt status says\n%s", want, status)
	}
	if guest := row.MatchString(chain); guest != want {
		b.Errorf("a guest must be shown: %v; shunt chain list says\n%s", want, chain)
	}
}

func (b *besideBed) instance() string { return filepath.Base(b.Folder) }

// dropper pins a program that drops datagrams to port 5001 over IPv4, and passes all others.
func (b *besideBed) dropper() (pin string) {
	b.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "dropper", Type: ebpf.XDP, AttachType: ebpf.AttachXDP, License: "GPL", Flags: unix.BPF_F_XDP_HAS_FRAGS, Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // data
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // data_end
		asm.Mov.Imm(asm.R0, 2),                   // XDP_PASS
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, 38),
		asm.JGT.Reg(asm.R4, asm.R3, "end"),
		asm.LoadMem(asm.R5, asm.R2, 36, asm.Half), // UDP's destination port behind a plain header of IPv4
		asm.HostTo(asm.BE, asm.R5, asm.Half),
		asm.JNE.Imm(asm.R5, 5001, "end"),
		asm.Mov.Imm(asm.R0, 1), // XDP_DROP
		asm.Return().WithSymbol("end"),
	}})
	b.Must(err)
	defer p.Close()
	pin = filepath.Join(kernel.DefaultPinRoot, b.instance()+"-dropper")
	b.Must(p.Pin(pin))
	b.Cleanup(func() { _ = os.Remove(pin) })
	return pin
}

// A program of the user's after shunt's gets the packets that both products pass, and none that one of them has taken.
func TestProgramAfterBoth(t *testing.T) {
	b := newBesideBed(t)
	b.file(leaseKeys, serviceKeys)
	b.run()
	b.work("feed", 0)
	b.answers("x", leased...)
	b.answers("kernel", "192.0.2.10:5001")
	b.says("chain", "set", "--instance", b.instance(), "--interface", "eth0", "--position", "after", "--program", b.dropper())
	if b.askAt("192.0.2.10:5001", "kernel", 2*answersWithin) {
		t.Error("the program after both has not seen a datagram that both pass")
	}
	b.answers("x", leased...)
	b.answers("backend", served...)
	b.undisturbed("a program after")
	if chain := b.says("chain", "list", "--instance", b.instance()); !regexp.MustCompile(`(?s)\(shunt\) +sh_xdp .*\(guest\) +sh_udp .*after +dropper `).MatchString(chain) {
		t.Errorf("shunt chain list says\n%s", chain)
	}
	b.says("chain", "clear", "--instance", b.instance(), "--interface", "eth0", "--position", "after")
	b.answers("kernel", "192.0.2.10:5001")
	b.undisturbed("no program after")
}

// `shunt detach` removes both products, from a daemon that runs and from one that was killed.
func TestDetachBoth(t *testing.T) {
	b := newBesideBed(t)
	b.file(leaseKeys, serviceKeys)
	b.run()
	b.work("feed", 0)
	b.answers("x", leased...)
	nodetest.Kill(b.Process)
	if name := b.program(); name != "sh_xdp" {
		t.Errorf("after kill -9 eth0 has the program %q", name)
	}
	b.says("detach", "--unattended", "--instance", b.instance())
	if name := b.program(); name != "" {
		t.Errorf("detached, eth0 has the program %q", name)
	}
	b.answers("kernel", leased...)

	b.run()
	b.answers("x", leased...) // the program has asked again
	b.answers("backend", served...)
	b.says("detach", "--socket", b.Socket(), "--instance", b.instance())
	<-b.Process.Ended
	if name := b.program(); name != "" {
		t.Errorf("detached, eth0 has the program %q", name)
	}
	b.answers("kernel", leased...)
}

// A version whose balancer has another ABI takes over an interface that both products have: the balancer never stops,
// and the lease goes on. The same holds at the start after that.
func TestUpgradeOfBoth(t *testing.T) {
	b := newBesideBed(t)
	resumable := udptest.BoundRings(t, b.net.Server)
	b.file(leaseKeys, serviceKeys)
	b.run()
	b.work("feed", 0)
	b.answers("x", leased...)
	b.answers("backend", served...)
	nodetest.Kill(b.Process)
	b.answers("x", leased...)
	b.answers("backend", served...)
	guest := func(st *shuntv1.GetStatusResponse) bool {
		return slices.ContainsFunc(st.Attached, func(a *shuntv1.Attachment) bool {
			return a.Interface == "eth0" && slices.ContainsFunc(a.Chain, func(p *shuntv1.ChainedProgram) bool { return p.Position == "guest" && p.Name == "sh_udp" })
		})
	}
	for _, when := range []string{"upgraded", "started again"} {
		b.run(nextVariable + "=1")
		if log := b.Process.Log(); strings.Contains(log, "upgraded the data plane") != (when == "upgraded") {
			t.Errorf("%s, the daemon says\n%s", when, log)
		}
		b.answers("x", leased...)
		b.answers("backend", served...)
		b.Is(when+", the guest is behind the balancer", guest)
		if resumable {
			b.Is(when+", the lease is resumed", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Resumed == 1 })
		}
		nodetest.Kill(b.Process)
		b.answers("x", leased...)
		b.answers("backend", served...)
	}
	detach := b.Spawn(b.Self(), nextVariable+"=1", detachVariable+"="+b.instance())
	<-detach.Ended
	if name := b.program(); name != "" || detach.Err() != nil {
		t.Errorf("detached, eth0 has the program %q: %v, %s", name, detach.Err(), detach.Log())
	}
	b.answers("kernel", leased...)
	b.unkept("detached")
}

// A balancer comes to an interface between two daemons: the lease goes on. After `shunt detach` in between, the program asks anew.
func TestBalancerComesBetweenDaemons(t *testing.T) {
	b := newBesideBed(t)
	udptest.NeedsBoundRings(t, b.net.Server)
	b.file(leaseKeys)
	b.run()
	b.work("feed", 0)
	b.answers("x", leased...)
	resumed := func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Resumed == 1 }
	for _, with := range []bool{true, false, true} {
		nodetest.Kill(b.Process)
		b.answers("x", leased...)
		if with {
			b.file(leaseKeys, serviceKeys)
		} else {
			b.says("detach", "--unattended", "--instance", b.instance())
			b.file(leaseKeys)
		}
		b.run()
		failed := func(p *shuntv1.Product) bool { return p.Failed != "" }
		if st, err := b.Ask(); err != nil || slices.ContainsFunc(st.Daemon.Products, failed) {
			t.Errorf("the daemon answers, and not all products have started: %v, %v", st.GetDaemon().GetProducts(), err)
		}
		b.answers("x", leased...)
		if with {
			b.answers("backend", served...)
			b.Is("the lease is resumed", resumed)
			b.showsGuest(true)
		}
	}
}
