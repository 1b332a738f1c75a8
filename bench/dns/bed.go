package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	benchbed "github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"golang.org/x/sys/unix"
)

// patience bounds waits for steps that take milliseconds.
const patience = 30 * time.Second

// The pods of a world.
const (
	asking = iota
	caching
	answering
	pods
)

// hostCache is the address of the cache in the host's namespace, on lo.
var hostCache = netip.MustParseAddr("169.254.20.10")

// world is a host whose pods ask for names. Services are translated by the host's rules, unless shunt does.
type world struct {
	*bed.Bed
	way    string
	number byte
	rules  *plain.Rules
	folder string
}

// newWorld builds one. Its services have addresses that no other world has, as the cgroup is the same.
func newWorld(ctx context.Context, way string, number byte) (w *world, err error) {
	w = &world{way: way, number: number}
	if w.Bed, err = bed.New(ctx, pods); err != nil {
		return nil, err
	}
	if err := w.furnish(ctx); err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

func (w *world) furnish(ctx context.Context) (err error) {
	if w.folder, err = os.MkdirTemp("", "shunt-dns-"); err != nil {
		return err
	}
	outside, err := w.Lab.AddHost("outside") // the balancer wants an interface; nothing comes by it
	if err != nil {
		return err
	}
	ends := [2]lab.End{{Host: w.Node, Interface: "eth0", IPv4: netip.MustParsePrefix("192.168.9.1/24")}, {Host: outside, Interface: "eth0", IPv4: netip.MustParsePrefix("192.168.9.2/24")}}
	if err := errors.Join(w.Lab.Connect(ends[0], ends[1], lab.Cable{}), w.Node.SetUp("lo", true), w.Node.AddAddress("lo", netip.PrefixFrom(hostCache, 32))); err != nil {
		return err
	}
	var services []plain.Service
	for _, s := range w.services() {
		for _, protocol := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			services = append(services, plain.Service{Address: netip.AddrPortFrom(s.vip, 53), Endpoint: netip.AddrPortFrom(s.to, 53), Protocol: protocol})
		}
	}
	if w.rules, err = w.Install(services...); err != nil {
		return err
	}
	return w.Lab.Ready(ctx)
}

func (w *world) close() error { return errors.Join(w.Close(), os.RemoveAll(w.folder)) }

// service is an address of the cluster, and the server that answers there.
type service struct {
	name    string
	vip, to netip.Addr
}

// services are the cache in a pod, the cache in the host's namespace, and the server that the first one asks.
func (w *world) services() []service {
	at := func(last byte) netip.Addr { return netip.AddrFrom4([4]byte{10, 97, w.number, last}) }
	return []service{
		{"cache-in-pod", at(10), w.Address(caching, false)},
		{"cache-on-host", at(11), hostCache},
		{"upstream", at(12), w.Address(answering, false)},
	}
}

// file is the configuration of `shunt run`: services are translated at the socket, and packets between pods go past the
// host's stack. A steer sends them past it in the mode checked, too, which without a steer wants conntrack to have seen
// an answer.
func (w *world) file(cgroup, socket string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "api: {socket: %s}\nmetrics: {listen: \"127.0.0.1:9470\"}\ninterfaces: [{name: eth0, attach: tc}]\nsockets: {cgroup: %s}\nservices:\n", socket, cgroup)
	for _, s := range w.services() {
		for _, protocol := range []string{"udp", "tcp"} {
			fmt.Fprintf(&b, "  - {name: %s-%s, address: %s, port: 53, protocol: %[2]s, announce: none, backends: [{address: %[4]s}]}\n", s.name, protocol, s.vip, s.to)
		}
	}
	if w.way != steer {
		fmt.Fprintf(&b, "accelerate: {interfaces: \"veth*\", mode: bypass}\n")
		return b.String()
	}
	b.WriteString("accelerate:\n  interfaces: \"veth*\"\n  mode: checked\n  steer:\n")
	for _, pod := range []int{caching, answering} {
		fmt.Fprintf(&b, "    - {name: dns%d, ports: [53/udp, 53/tcp], to: %s, interface: %s}\n", pod, w.Address(pod, false), w.Interface(pod))
	}
	return b.String()
}

// accelerate starts `shunt run`, and returns when packets take the shortcut.
func (w *world) accelerate(ctx context.Context, cgroup string, program ...string) (stop func() error, err error) {
	return benchbed.Shunt{Host: w.Node, Folder: w.folder, Config: w.file(cgroup, filepath.Join(w.folder, "api.sock")), Program: program, Env: []string{childVariable + "=1"}}.Start(ctx)
}

// seen is the number of packets that the host has forwarded.
func (w *world) seen() (packets uint64, err error) {
	err = w.Node.Run(func() (err error) {
		packets, err = w.rules.Seen()
		return err
	})
	return packets, err
}

// server is a name server of a world.
type server struct {
	name     string
	host     *lab.Host
	address  netip.Addr
	upstream netip.Addr // not valid: it answers itself
}

// servers are all of a world. The cache on the host asks the pod itself, as the rules translate nothing that the host sends.
func (w *world) servers() []server {
	return []server{
		{"answers", w.Pods[answering], w.Address(answering, false), netip.Addr{}},
		{"cache-in-pod", w.Pods[caching], w.Address(caching, false), w.services()[2].vip},
		{"cache-on-host", w.Node, hostCache, w.Address(answering, false)},
	}
}

// startCoreDNS starts them, and returns when they answer.
func (w *world) startCoreDNS(ctx context.Context, program string) (stop func() error, err error) {
	var stops []func() error
	stop = func() (err error) {
		for _, one := range stops {
			err = errors.Join(err, one())
		}
		return err
	}
	for _, s := range w.servers() {
		text := fmt.Sprintf(".:53 {\n\tbind %s\n\ttemplate IN A {\n\t\tanswer \"{{ .Name }} 300 IN A 192.0.2.1\"\n\t}\n}\n", s.address)
		if s.upstream.IsValid() {
			text = fmt.Sprintf(".:53 {\n\tbind %s\n\tcache 300\n\tforward . %s\n}\n", s.address, s.upstream)
		}
		file := filepath.Join(w.folder, s.name+".corefile")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			return stop, err
		}
		p, err := s.host.Command(context.Background(), program, "-conf", file).Spawn()
		if err != nil {
			return stop, err
		}
		stops = append(stops, func() error { return p.End(syscall.SIGKILL, patience) })
		if err := benchbed.Until(ctx, func() error {
			return s.host.Run(func() error {
				if _, err := ask(s.address, "ready.test"); err != nil {
					return fmt.Errorf("CoreDNS (%s) does not answer: %w\n%s", s.name, err, p.Log())
				}
				return nil
			})
		}); err != nil {
			return stop, err
		}
	}
	return stop, nil
}
