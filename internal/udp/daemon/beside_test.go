package daemon_test

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/vishvananda/netlink"
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

// answers waits until the one who should answers at an address: "x", "kernel" or "backend".
func (b *besideBed) answers(who string, addresses ...string) {
	b.Helper()
	for _, address := range addresses {
		for deadline := time.Now().Add(nodetest.Patience); ; {
			if b.askAt(address, who) {
				break
			}
			if time.Now().After(deadline) {
				st, _ := b.Ask()
				b.Fatalf("%s does not answer at %s: %v\n%s", who, address, st, b.Process.Log())
			}
		}
	}
}

func (b *besideBed) askAt(address, who string) bool {
	b.Helper()
	conn, err := b.net.Client.Dial(context.Background(), "udp", address)
	b.Must(err)
	defer conn.Close() //nolint:errcheck // nothing is lost
	b.asked++
	if _, err := fmt.Fprintf(conn, "ask %d", b.asked); err != nil {
		return false
	}
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
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
		if code := cli.Main([]string{"check", "--host", "--config", b.Config()}, nil, &out, &out); code != 0 || strings.Contains(out.String(), "sh_udp") {
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
	if name := b.program(); name != "sh_udp" {
		t.Errorf("with the balancer at tc eth0 has the program %q", name)
	}
	b.file(leaseKeys, serviceKeys)
	b.Reload()
	b.answers("x", leased...)
	b.answers("backend", served...)
	b.undisturbed("the balancer is at XDP again")

	nodetest.Kill(b.Process) // its program stays, the guest ends
	b.answers("kernel", leased...)
	b.answers("backend", served...)
	b.run()
	b.answers("x", leased...)
	b.answers("backend", served...)

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
