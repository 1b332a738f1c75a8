// Package bed is the machine park of the benchmarks: three hosts of a lab, each a network
// namespace of this machine, joined by veth pairs, and the processes that run on them.
//
//	 client                      balancer                   servers
//	┌──────────────────┐  ┌──────────────────────────┐  ┌────────────────────────┐
//	│ 10.1.0.2/24   up ├──┤ clients          servers ├──┤ lb  10.2.0.2/24        │
//	│                  │  │ 10.1.0.1/24  10.2.0.1/24 │  │     10.2.0.3/24        │
//	│ 10.9.0.1/24   by ├──┼──────────────────────────┼──┤ by  10.9.0.2/24        │
//	└──────────────────┘  └──────────────────────────┘  └────────────────────────┘
//
// "by" is a veth that passes the balancer by. Everything else of the client and of the
// servers is routed through the balancer. With one arm, the same three hosts and addresses
// are on one switch, and the balancer sends out of the interface it receives on:
//
//	up ──┐ switch ┌── lb
//	     └─ br0 ──┘
//	         └── arm 10.1.0.1/24 10.2.0.1/24
//
// The namespaces are called shunt-bench-client and so on.
package bed

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// The hosts.
const (
	Client   = "client"
	Balancer = "balancer"
	Servers  = "servers"
	wire     = "wire" // the switch, with one arm
)

// The balancer's interfaces, with two arms.
const (
	ClientsInterface = "clients"
	ServersInterface = "servers"
)

// The addresses. VIP is on no interface: the client's default route leads to the balancer.
var (
	VIP           = netip.MustParseAddr("192.0.2.10")
	ClientAddress = netip.MustParseAddr("10.1.0.2")
	ClientGateway = netip.MustParseAddr("10.1.0.1") // the balancer, towards the client
	ServerGateway = netip.MustParseAddr("10.2.0.1") // the balancer, towards the servers
	ServerOne     = netip.MustParseAddr("10.2.0.2")
	ServerTwo     = netip.MustParseAddr("10.2.0.3")
	DirectClient  = netip.MustParseAddr("10.9.0.1")
	DirectServer  = netip.MustParseAddr("10.9.0.2")
)

// Queue is the kind of queue that every interface sends through. A veth has no queue, unlike a
// network card, and drops the frames for which its peer's ring of 256 has no room: their number says
// more about the sender's burst than about the balancer. With a queue the sender waits (Linux 6.16,
// dc82a33297fc).
const Queue = "pfifo"

// labID names the lab. The name is fixed, so that a run finds the remains of one that was killed.
const labID = "bench"

// Bed is the built topology. Close it.
type Bed struct {
	lab   *lab.Lab
	hosts map[string]*lab.Host
	lock  net.Listener
	// Hardware addresses, for programs that write next hops themselves.
	ClientMAC, ServerMAC net.HardwareAddr
}

// Lock is held by the one running benchmark, which closes it. Two benchmarks would measure each
// other.
func Lock() (net.Listener, error) {
	// An abstract socket goes away with its process, however that ends (unix(7)).
	lock, err := net.Listen("unix", "@shunt-bench")
	if err != nil {
		return nil, fmt.Errorf("another benchmark is running, and would disturb this one; wait for its end: %w", err)
	}
	return lock, nil
}

// Build makes the hosts and the links between them, after removing the remains of a run that was
// killed. Needs root. A second bed at the same time is refused.
func Build(layout lab.Layout) (*Bed, error) {
	lock, err := Lock()
	if err != nil {
		return nil, err
	}
	b := &Bed{lock: lock, hosts: map[string]*lab.Host{}}
	if err := b.build(layout); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func (b *Bed) build(layout lab.Layout) (err error) {
	if err := lab.Sweep(labID); err != nil {
		return err
	}
	if b.lab, err = lab.New(labID); err != nil {
		return err
	}
	for _, name := range []string{Client, Balancer, Servers} {
		if b.hosts[name], err = b.lab.AddHost(name); err != nil {
			return err
		}
		// Frames of an address family nobody measures would only add noise.
		if err := b.hosts[name].SetSysctl("net.ipv6.conf.default.disable_ipv6", "1"); err != nil {
			return err
		}
	}
	if err := b.connect(layout); err != nil {
		return err
	}
	everywhere := netip.MustParsePrefix("0.0.0.0/0")
	if err := errors.Join(
		b.hosts[Servers].AddAddress("lb", netip.PrefixFrom(ServerTwo, 24)),
		b.hosts[Client].AddRoute(lab.Route{To: everywhere, Via: ClientGateway}),
		b.hosts[Servers].AddRoute(lab.Route{To: everywhere, Via: ServerGateway}),
		b.hosts[Balancer].SetSysctl("net.ipv4.ip_forward", "1"),
		// Now and then a client closes first, and has the TIME-WAIT: after half a million
		// connections, half of its ports rest, and connect() walks all of these before it finds
		// another. This reduced 20,000 connections a second to 400, direct or balanced (Linux 6.18).
		b.hosts[Client].SetSysctl("net.ipv4.tcp_tw_reuse", "1"),
		b.hosts[Balancer].SetSysctl("net.ipv4.tcp_tw_reuse", "1"), // HAProxy connects from there
	); err != nil {
		return err
	}
	for _, host := range b.hosts {
		for _, i := range host.Interfaces() {
			if err := host.SetQueue(i.Name, Queue); err != nil {
				return err
			}
		}
	}
	b.ClientMAC, b.ServerMAC = b.hosts[Client].Interfaces()[0].MAC, b.hosts[Servers].Interfaces()[0].MAC
	return nil
}

// connect lays the cables.
func (b *Bed) connect(layout lab.Layout) error {
	end := func(host, name string, address netip.Addr) lab.End {
		return lab.End{Host: b.hosts[host], Interface: name, IPv4: netip.PrefixFrom(address, 24)}
	}
	client, servers := end(Client, "up", ClientAddress), end(Servers, "lb", ServerOne)
	var err error
	switch layout {
	case lab.TwoArm:
		err = b.connectAll([2]lab.End{client, end(Balancer, ClientsInterface, ClientGateway)},
			[2]lab.End{end(Balancer, ServersInterface, ServerGateway), servers})
	case lab.OneArm:
		err = b.connectSwitch(client, end(Balancer, "arm", ClientGateway), servers)
		if err == nil {
			err = b.hosts[Balancer].AddAddress("arm", netip.PrefixFrom(ServerGateway, 24))
		}
	default:
		err = fmt.Errorf("layout %q: must be %s or %s", layout, lab.TwoArm, lab.OneArm)
	}
	if err != nil {
		return err
	}
	return b.connectAll([2]lab.End{end(Client, "by", DirectClient), end(Servers, "by", DirectServer)})
}

func (b *Bed) connectAll(pairs ...[2]lab.End) error {
	for _, pair := range pairs {
		if err := b.lab.Connect(pair[0], pair[1], lab.Cable{}); err != nil {
			return err
		}
	}
	return nil
}

// connectSwitch makes the switch, and connects all ends to it.
func (b *Bed) connectSwitch(ends ...lab.End) (err error) {
	if b.hosts[wire], err = b.lab.AddHost(wire); err != nil {
		return err
	}
	if err := b.hosts[wire].AddBridge("br0"); err != nil {
		return err
	}
	for _, e := range ends {
		if err := b.lab.ConnectPort(e, b.hosts[wire], "br0", lab.Cable{}); err != nil {
			return err
		}
	}
	return nil
}

// ToClients is the balancer's interface towards the client, ToServers that towards the servers. They
// are one with one arm.
func (b *Bed) ToClients() lab.Interface { return b.hosts[Balancer].Interfaces()[0] }

// ToServers: see ToClients.
func (b *Bed) ToServers() lab.Interface {
	all := b.hosts[Balancer].Interfaces()
	return all[len(all)-1]
}

// SetOffload gives every interface the same settings: the sender's kernel computes checksums (false,
// which also switches segmentation offload off), or leaves them to the receiver as veth does by
// default (true). GRO is on at the far ends in both cases, because a veth peer that has neither GRO
// nor an XDP program drops frames redirected to it.
func (b *Bed) SetOffload(checksum bool) error {
	for name, host := range b.hosts {
		for _, i := range host.Interfaces() {
			want := map[string]bool{"tx": checksum, "tso": checksum}
			if name != Balancer {
				want["gro"] = true
			}
			if err := host.SetOffload(i.Name, want); err != nil {
				return err
			}
		}
	}
	return nil
}

// Dropped is the number of frames that each interface has dropped, by "host interface direction".
// The sending end drops a frame for which the ring of a veth has no room. "servers sockets" are the
// datagrams that came too fast for the program that reads them (RcvbufErrors, of UDP).
func (b *Bed) Dropped() (map[string]uint64, error) {
	dropped := map[string]uint64{}
	for name, host := range b.hosts {
		for _, i := range host.Interfaces() {
			link, err := host.Netlink().LinkByName(i.Name)
			if err != nil {
				return nil, fmt.Errorf("host %s: read %s: %w", name, i.Name, err)
			}
			statistics := link.Attrs().Statistics
			dropped[name+" "+i.Name+" out"], dropped[name+" "+i.Name+" in"] = statistics.TxDropped, statistics.RxDropped
		}
	}
	var err error
	dropped["servers sockets"], err = b.socketDrops()
	return dropped, err
}

// socketDrops reads RcvbufErrors of UDP on the servers: names in one line, values in the next
// (proc_pid_net(5), snmp).
func (b *Bed) socketDrops() (uint64, error) {
	var text []byte
	err := b.In(Servers, func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/snmp")
		return err
	})
	if err != nil {
		return 0, err
	}
	return udpValue(string(text), "RcvbufErrors")
}

// udpValue is a counter of UDP in the text of /proc/net/snmp.
func udpValue(text, name string) (uint64, error) {
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "Udp:" {
			continue
		}
		if i := slices.Index(names, name); i >= 0 && i < len(fields) {
			return strconv.ParseUint(fields[i], 10, 64)
		}
		names = fields
	}
	return 0, fmt.Errorf("/proc/net/snmp has no %s of Udp", name)
}

// Host is one of the bed's hosts.
func (b *Bed) Host(name string) *lab.Host { return b.hosts[name] }

// In runs f on a thread in the host's namespace, as lab.Host.Run does.
func (b *Bed) In(host string, f func() error) error { return b.hosts[host].Run(f) }

// InPinned is In on a thread that runs only on one CPU.
func (b *Bed) InPinned(host string, cpu int, f func() error) error {
	return b.In(host, func() error {
		var before, only unix.CPUSet
		if err := unix.SchedGetaffinity(0, &before); err != nil {
			return err
		}
		only.Set(cpu)
		if err := unix.SchedSetaffinity(0, &only); err != nil {
			return fmt.Errorf("pin to CPU %d: %w", cpu, err)
		}
		return errors.Join(f(), unix.SchedSetaffinity(0, &before))
	})
}

// Close removes the hosts and stops the processes that still run on them.
func (b *Bed) Close() error {
	var err error
	if b.lab != nil {
		err = b.lab.Close()
	}
	return errors.Join(err, b.lock.Close())
}
