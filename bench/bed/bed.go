// Package bed is the machine park of the benchmarks: three network namespaces on one
// host, joined by veth pairs, and the processes that run in them.
//
//	 shunt-bench-client          shunt-bench-lb             shunt-bench-servers
//	┌──────────────────┐  ┌──────────────────────────┐  ┌────────────────────────┐
//	│ 10.1.0.2/24   up ├──┤ clients          servers ├──┤ lb  10.2.0.2/24        │
//	│                  │  │ 10.1.0.1/24  10.2.0.1/24 │  │     10.2.0.3/24        │
//	│ 10.9.0.1/24   by ├──┼──────────────────────────┼──┤ by  10.9.0.2/24        │
//	└──────────────────┘  └──────────────────────────┘  └────────────────────────┘
//
// "by" is a veth that passes the balancer by. Everything else of the client and of the
// servers is routed through the balancer.
package bed

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The namespaces.
const (
	Client   = "shunt-bench-client"
	Balancer = "shunt-bench-lb"
	Servers  = "shunt-bench-servers"
)

// The balancer's interfaces.
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

// Bed is the built topology. Close it.
type Bed struct {
	spaces map[string]netns.NsHandle
	// Hardware addresses, for programs that write next hops themselves.
	ClientMAC, ServerMAC, ToClientMAC, ToServerMAC net.HardwareAddr
}

// Build makes the namespaces and everything in them, after removing what an earlier
// run left behind. Needs root.
func Build() (*Bed, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("building network namespaces needs root; run this again with sudo")
	}
	b := &Bed{spaces: map[string]netns.NsHandle{}}
	for _, name := range []string{Client, Balancer, Servers} {
		if err := b.newSpace(name); err != nil {
			b.Close()
			return nil, fmt.Errorf("making namespace %s: %w", name, err)
		}
	}
	if err := b.connect(); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// newSpace makes one named namespace with its loopback up.
func (b *Bed) newSpace(name string) error {
	if _, err := os.Stat(filepath.Join("/run/netns", name)); err == nil {
		if err := netns.DeleteNamed(name); err != nil {
			return fmt.Errorf("removing the one of an earlier run: %w", err)
		}
	}
	return onThread(func() error {
		ns, err := netns.NewNamed(name) // moves the thread into it
		if err != nil {
			return err
		}
		b.spaces[name] = ns
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		// Frames of an interface nobody listens on would only add noise.
		if err := sysctl("net/ipv6/conf/default/disable_ipv6", "1"); err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
}

// end is one end of a veth pair.
type end struct {
	space, name string
	addresses   []netip.Addr
}

// connect makes the veth pairs and routes.
func (b *Bed) connect() error {
	pairs := [][2]end{
		{{Client, "up", []netip.Addr{ClientAddress}}, {Balancer, ClientsInterface, []netip.Addr{ClientGateway}}},
		{{Balancer, ServersInterface, []netip.Addr{ServerGateway}}, {Servers, "lb", []netip.Addr{ServerOne, ServerTwo}}},
		{{Client, "by", []netip.Addr{DirectClient}}, {Servers, "by", []netip.Addr{DirectServer}}},
	}
	for _, pair := range pairs {
		if err := b.addPair(pair[0], pair[1]); err != nil {
			return fmt.Errorf("joining %s and %s: %w", pair[0].space, pair[1].space, err)
		}
	}
	for space, gateway := range map[string]netip.Addr{Client: ClientGateway, Servers: ServerGateway} {
		err := b.In(space, func() error { return netlink.RouteAdd(&netlink.Route{Gw: gateway.AsSlice()}) })
		if err != nil {
			return fmt.Errorf("setting the default route of %s: %w", space, err)
		}
	}
	if err := b.In(Balancer, func() error { return sysctl("net/ipv4/ip_forward", "1") }); err != nil {
		return err
	}
	for _, m := range []struct {
		to          *net.HardwareAddr
		space, name string
	}{
		{&b.ClientMAC, Client, "up"}, {&b.ServerMAC, Servers, "lb"},
		{&b.ToClientMAC, Balancer, ClientsInterface}, {&b.ToServerMAC, Balancer, ServersInterface},
	} {
		link, err := b.Link(m.space, m.name)
		if err != nil {
			return err
		}
		*m.to = link.Attrs().HardwareAddr
	}
	return nil
}

// addPair makes one veth pair, its ends in their namespaces, addressed and up.
func (b *Bed) addPair(one, two end) error {
	err := b.In(one.space, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = one.name
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: attrs, PeerName: two.name, PeerNamespace: netlink.NsFd(b.spaces[two.space]),
		})
	})
	if err != nil {
		return err
	}
	for _, e := range []end{one, two} {
		err := b.In(e.space, func() error {
			link, err := netlink.LinkByName(e.name)
			if err != nil {
				return err
			}
			for _, address := range e.addresses {
				ipnet := &net.IPNet{IP: address.AsSlice(), Mask: net.CIDRMask(24, 32)}
				if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipnet}); err != nil {
					return fmt.Errorf("adding %s to %s: %w", address, e.name, err)
				}
			}
			return netlink.LinkSetUp(link)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// SetOffload gives every interface the same settings: checksums by the sender's kernel
// ("off", which takes segmentation offload with it) or left to the receiver as veth does
// by default ("default"). GRO is on at the far ends in both, because a veth peer that has
// neither GRO nor an XDP program drops frames redirected to it.
func (b *Bed) SetOffload(checksum bool) error {
	ends := []struct {
		space, name string
		far         bool
	}{
		{Client, "up", true}, {Servers, "lb", true}, {Client, "by", true}, {Servers, "by", true},
		{Balancer, ClientsInterface, false}, {Balancer, ServersInterface, false},
	}
	for _, e := range ends {
		want := map[string]bool{"tx-checksum-ip-generic": checksum}
		if checksum {
			want["tx-tcp-segmentation"] = true
		}
		if e.far {
			want["rx-gro"] = true
		}
		err := b.In(e.space, func() error {
			tool, err := ethtool.NewEthtool()
			if err != nil {
				return err
			}
			defer tool.Close()
			return tool.Change(e.name, want)
		})
		if err != nil {
			return fmt.Errorf("setting offloads of %s in %s: %w", e.name, e.space, err)
		}
	}
	return nil
}

// Link looks an interface up.
func (b *Bed) Link(space, name string) (link netlink.Link, err error) {
	err = b.In(space, func() error {
		link, err = netlink.LinkByName(name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("looking up %s in %s: %w", name, space, err)
	}
	return link, nil
}

// In runs f on a thread inside the namespace. f must not start goroutines that rely on it.
func (b *Bed) In(space string, f func() error) error {
	ns, known := b.spaces[space]
	if !known {
		return fmt.Errorf("no namespace %q", space)
	}
	return onThread(func() error {
		if err := netns.Set(ns); err != nil {
			return fmt.Errorf("entering namespace %s: %w", space, err)
		}
		return f()
	})
}

// onThread runs f on a locked thread and brings the thread back to its namespace. A thread
// that cannot come back stays locked and dies with its goroutine.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			done <- err
			return
		}
		defer home.Close()
		err = f()
		if back := netns.Set(home); back == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// sysctl writes one of the current namespace's settings, named by its path below /proc/sys.
func sysctl(name, value string) error {
	if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0o644); err != nil {
		return fmt.Errorf("setting %s to %s: %w", name, value, err)
	}
	return nil
}

// Close removes the namespaces; interfaces go with them. Processes must have ended.
func (b *Bed) Close() error {
	var errs []error
	for name, ns := range b.spaces {
		errs = append(errs, ns.Close(), netns.DeleteNamed(name))
	}
	b.spaces = nil
	err := errors.Join(errs...)
	if errors.Is(err, unix.ENOENT) {
		return nil // somebody else tidied up
	}
	return err
}

// InPinned is In on a thread that runs only on one CPU.
func (b *Bed) InPinned(space string, cpu int, f func() error) error {
	return b.In(space, func() error {
		var before, only unix.CPUSet
		if err := unix.SchedGetaffinity(0, &before); err != nil {
			return err
		}
		only.Set(cpu)
		if err := unix.SchedSetaffinity(0, &only); err != nil {
			return fmt.Errorf("pinning to CPU %d: %w", cpu, err)
		}
		return errors.Join(f(), unix.SchedSetaffinity(0, &before))
	})
}
