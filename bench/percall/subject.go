package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/internal/lab"
)

// subject is the measured object: the programs of a running shunt, on both sides of it.
type subject struct {
	clients, servers side
	service          netip.AddrPort
	config           string                   // for the report
	in               func(func() error) error // runs on a thread of this CPU, in the balancer's namespace
	closers          []func() error           // last first
}

// serverPort is the port of the backends in our own configuration; no process listens there.
const serverPort = 8080

// findSubject takes the running instance that was named, or starts one of its own.
func findSubject(o options, flows uint32) (*subject, error) {
	if o.link != "" {
		return pinnedSubject(o)
	}
	s, err := startSubject(o, flows)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// close undoes everything, last first.
func (s *subject) close() error {
	var errs []error
	for i := len(s.closers) - 1; i >= 0; i-- {
		errs = append(errs, s.closers[i]())
	}
	s.closers = nil
	return errors.Join(errs...)
}

// pinnedSubject takes the programs from pinned links. The links' interfaces must be in the
// current namespace.
func pinnedSubject(o options) (*subject, error) {
	s := &subject{service: o.service, config: "running instance", in: func(f func() error) error { return f() }}
	reverse := o.reverseLink
	if reverse == "" {
		reverse = o.link
	}
	for _, from := range []struct {
		to  *side
		pin string
	}{{&s.clients, o.link}, {&s.servers, reverse}} {
		if err := from.to.take(from.pin); err != nil {
			return nil, errors.Join(fmt.Errorf("take the program of %s: %w", from.pin, err), s.close())
		}
		s.closers = append(s.closers, from.to.program.Close)
	}
	return s, nil
}

// take fills a side from a pinned XDP link.
func (d *side) take(pin string) error {
	l, err := link.LoadPinnedLink(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return err
	}
	xdp := info.XDP()
	if xdp == nil {
		return errors.New("it is not an XDP link")
	}
	iface, err := netlink.LinkByIndex(int(xdp.Ifindex))
	if err != nil {
		return fmt.Errorf("interface %d: %w; run this in its namespace", xdp.Ifindex, err)
	}
	d.ifindex, d.mac = xdp.Ifindex, iface.Attrs().HardwareAddr
	d.peer = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	d.program, err = ebpf.NewProgramFromID(info.Program)
	return err
}

// startSubject builds the namespaces and starts shunt run in them.
func startSubject(o options, flows uint32) (*subject, error) {
	s := &subject{service: netip.AddrPortFrom(bed.VIP, 80)}
	dir, err := os.MkdirTemp("", "shunt-percall-")
	if err != nil {
		return s, err
	}
	s.closers = append(s.closers, func() error { return os.RemoveAll(dir) })
	binary, err := shuntBinary(o, dir)
	if err != nil {
		return s, err
	}
	b, err := bed.Build(lab.TwoArm)
	if err != nil {
		return s, err
	}
	s.closers = append(s.closers, b.Close)
	s.in = func(f func() error) error { return b.InPinned(bed.Balancer, o.cpu, f) }
	// Flows come from behind the client, as through a router.
	err = b.Host(bed.Balancer).AddRoute(lab.Route{To: o.clients, Via: bed.ClientAddress})
	if err != nil {
		return s, err
	}
	if s.config, err = writeConfig(b, dir, flows, o.features); err != nil {
		return s, err
	}
	args := append([]string{"run", "--instance", "bench", "--config", filepath.Join(dir, "shunt.yaml")}, strings.Fields(o.shuntArgs)...)
	child, err := b.Start(bed.Balancer, binary, args...)
	if err != nil {
		return s, err
	}
	s.closers = append(s.closers, child.Stop)
	for _, from := range []struct {
		to   *side
		name string
		peer net.HardwareAddr
	}{{&s.clients, bed.ClientsInterface, b.ClientMAC}, {&s.servers, bed.ServersInterface, b.ServerMAC}} {
		if err := from.to.attached(b, from.name, child); err != nil {
			return s, err
		}
		from.to.peer = from.peer
		s.closers = append(s.closers, from.to.program.Close)
	}
	return s, s.waitForwarding(child, o.clients)
}

// shuntBinary is the named binary, or one built from this repository.
func shuntBinary(o options, dir string) (string, error) {
	if o.shunt != "" {
		return o.shunt, nil
	}
	binary := filepath.Join(dir, "shunt")
	build := exec.Command("go", "build", "-o", binary, "github.com/shunt-lb/shunt/cmd/shunt")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build shunt: %w; name a binary with --shunt\n%s", err, out)
	}
	return binary, nil
}

// exampleFlows is the number of flows that fit the README's example: two backends, and the ports of
// one source address.
const exampleFlows = 1 << 15

// restOfConfig is the configuration after the measured service: with features, services that switch
// on all features of the programs (a backend that is the balancer itself, clients that keep their
// backends, bounds of segments and of new flows, lists of sources, fragments by their addresses), and
// the socket. says is its name in the report.
func restOfConfig(dir string, features bool) (text, says string) {
	if features {
		says = " beside services that need every feature"
		text = fmt.Sprintf(`  - {name: host, address: 192.0.2.20, port: 80, forwarding: dsr-l2, backends: [{address: %s}]}
  - {name: addresses, address: 192.0.2.21, port: 80, forwarding: dsr-ipip, hash: addresses, deny_from: 203.0.113.0/24, backends: [{address: %s}]}
  - {name: client, address: 192.0.2.22, port: 80, affinity: client-ip, tcp_mss: 1400, max_new_flows_per_source: 1000/s, backends: [{address: %s, port: %d}]}
`, bed.ServerGateway, bed.ServerOne, bed.ServerTwo, serverPort)
	}
	return text + fmt.Sprintf("api: {socket: %s}\n", filepath.Join(dir, "shunt.sock")), says
}

// writeConfig writes the README's example, adapted to our interfaces, and with more source addresses
// for more flows than one has ports for. It returns the configuration's description for the report.
func writeConfig(b *bed.Bed, dir string, flows uint32, features bool) (string, error) {
	text := fmt.Sprintf(`interfaces:
  - name: %s
  - name: %s
services:
  - name: web
    address: %s
    port: 80
    protocol: tcp
    forwarding: nat
    backends:
      - {address: %s, port: %d}
      - {address: %s, port: %d}
`, bed.ClientsInterface, bed.ServersInterface, bed.VIP, bed.ServerOne, serverPort, bed.ServerTwo, serverPort)
	rest, says := restOfConfig(dir, features)
	text += rest
	what := "the README's example" + says
	if flows > exampleFlows {
		var sources []string
		for i := range 4 + 2*flows/exampleFlows {
			address := netip.AddrFrom4([4]byte{10, 2, 0, byte(100 + i)})
			sources = append(sources, address.String())
			if err := b.Host(bed.Balancer).AddAddress(bed.ServersInterface, netip.PrefixFrom(address, 24)); err != nil {
				return "", err
			}
		}
		text += fmt.Sprintf("limits: {flows: %d}\nsnat: {addresses: [%s]}\n", 2*flows, strings.Join(sources, ", "))
		what += fmt.Sprintf(", with %d source addresses and limits.flows %d", len(sources), 2*flows)
	}
	return what, os.WriteFile(filepath.Join(dir, "shunt.yaml"), []byte(text), 0o600)
}

// startLimit bounds the time until shunt run forwards.
const startLimit = 15 * time.Second

// attached waits until the interface has the program that its services need, and takes it.
func (d *side) attached(b *bed.Bed, name string, child *bed.Child) error {
	var iface netlink.Link
	err := until(child, func() (err error) {
		if !strings.Contains(child.Output(), "msg=running") {
			return errors.New("it does not forward yet")
		}
		err = b.In(bed.Balancer, func() error {
			iface, err = netlink.LinkByName(name)
			return err
		})
		if err == nil && (iface.Attrs().Xdp == nil || iface.Attrs().Xdp.ProgId == 0) {
			err = fmt.Errorf("no XDP program on %s", name)
		}
		return err
	})
	if err != nil {
		return err
	}
	d.ifindex, d.mac = uint32(iface.Attrs().Index), iface.Attrs().HardwareAddr
	d.program, err = ebpf.NewProgramFromID(ebpf.ProgramID(iface.Attrs().Xdp.ProgId))
	return err
}

// waitForwarding waits until a flow can be made: services are in the maps some time after
// the program is attached, and backends are resolved.
func (s *subject) waitForwarding(child *bed.Child, clients netip.Prefix) error {
	return until(child, func() error {
		return s.in(func() error {
			_, _, err := s.makeFlows(clients, 1)
			return err
		})
	})
}

// until tries again until f succeeds, the child ends, or the time is up.
func until(child *bed.Child, f func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-child.Ended():
			return fmt.Errorf("shunt run ended: %s", child.Output())
		case <-ctx.Done():
			return fmt.Errorf("after %s: %w; shunt run said:\n%s", startLimit, err, child.Output())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// mapOf is the map of a program that has this name.
func mapOf(program *ebpf.Program, name string) (*ebpf.Map, error) {
	info, err := program.Info()
	if err != nil {
		return nil, err
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, fmt.Errorf("open map %d of the program: %w", id, err)
		}
		if info, err := m.Info(); err == nil && info.Name == name {
			return m, nil
		}
		m.Close()
	}
	return nil, fmt.Errorf("the program uses no map %s", name)
}

// describe is the program's name and sizes.
func (s *subject) describe() string {
	info, err := s.clients.program.Info()
	if err != nil {
		return err.Error()
	}
	text := info.Name
	if n, err := info.TranslatedSize(); err == nil {
		text += fmt.Sprintf(", %d instructions", n/8)
	}
	if n, err := info.JitedSize(); err == nil {
		text += fmt.Sprintf(", %d bytes of machine code", n)
	}
	return text
}
