// Package bed builds a host with pods, in network namespaces of a lab: for the demo, the tests and the
// measurements. The pods are connected as Calico connects them: each has a veth, an address without a subnet,
// and a gateway that is the same for all.
//
//	pod1 eth0 ══ veth1 ┐
//	pod2 eth0 ══ veth2 ├ node: routes to each pod, netfilter rules
//	pod3 eth0 ══ veth3 ┘
//
//	pod<i>  10.244.1.<i>  2001:db8:244:1::<i>
//	gateway 169.254.1.1   fd00::1              on every veth
//
// A pair is two such hosts, with a cable between the nodes, and a route on each to the pods of the other:
//
//	node  eth0  192.168.7.1  2001:db8:7::1
//	node2 eth0  192.168.7.2  2001:db8:7::2     its pods are n2pod<i>, 10.244.2.<i>, 2001:db8:244:2::<i>
package bed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/watch"
)

// The gateway's addresses.
var (
	gateway4 = netip.MustParsePrefix("169.254.1.1/32")
	gateway6 = netip.MustParsePrefix("fd00::1/128")
)

// Bed is a host and its pods.
type Bed struct {
	Lab  *lab.Lab
	Node *lab.Host
	Pods []*lab.Host

	number int // of the node, from 1
}

// Uplink is the node's interface towards the other node of a pair.
const Uplink = "eth0"

// New builds a host with a number of pods, and waits until their interfaces pass packets. If it fails, it leaves
// nothing.
func New(ctx context.Context, pods int) (*Bed, error) {
	l, err := lab.New("")
	if err != nil {
		return nil, err
	}
	b := &Bed{Lab: l, number: 1}
	err = b.build("node", "pod", pods)
	if err == nil {
		err = l.Ready(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("build a host with pods: %w", err), l.Close())
	}
	return b, nil
}

// NewPair builds two hosts with pods, as New does. Both belong to one lab: closing one closes the other.
func NewPair(ctx context.Context, pods, podsOfOther int) (pair [2]*Bed, err error) {
	l, err := lab.New("")
	if err != nil {
		return pair, err
	}
	pair = [2]*Bed{{Lab: l, number: 1}, {Lab: l, number: 2}}
	err = errors.Join(pair[0].build("node", "pod", pods), pair[1].build("node2", "n2pod", podsOfOther))
	if err == nil {
		err = join(pair[0], pair[1])
	}
	if err == nil {
		err = l.Ready(ctx)
	}
	if err != nil {
		return pair, errors.Join(fmt.Errorf("build two hosts with pods: %w", err), l.Close())
	}
	return pair, nil
}

// join lays the cable between two nodes, and adds the routes.
func join(a, b *Bed) error {
	if err := a.Lab.Connect(a.uplink(), b.uplink(), lab.Cable{}); err != nil {
		return err
	}
	var errs []error
	for _, way := range [][2]*Bed{{a, b}, {b, a}} {
		from, to := way[0], way[1]
		for _, is6 := range []bool{false, true} {
			via := to.uplink().IPv4.Addr()
			if is6 {
				via = to.uplink().IPv6.Addr()
			}
			errs = append(errs, from.Node.AddRoute(lab.Route{To: to.Network(is6), Via: via, Interface: Uplink}))
		}
	}
	return errors.Join(errs...)
}

func (b *Bed) uplink() lab.End {
	return lab.End{
		Host: b.Node, Interface: Uplink,
		IPv4: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, 7, byte(b.number)}), 24),
		IPv6: netip.MustParsePrefix(fmt.Sprintf("2001:db8:7::%d/64", b.number)),
	}
}

// Network returns the network from which all pods of the host have their addresses.
func (b *Bed) Network(is6 bool) netip.Prefix {
	bits := 24
	if is6 {
		bits = 64
	}
	return netip.PrefixFrom(b.Address(0, is6), bits).Masked()
}

// build makes the node and its pods.
func (b *Bed) build(node, podName string, pods int) (err error) {
	if b.Node, err = b.Lab.AddHost(node); err != nil {
		return err
	}
	if err := b.Node.SetForwarding(true); err != nil {
		return err
	}
	for i := range pods {
		pod, err := b.Lab.AddHost(fmt.Sprintf("%s%d", podName, i+1))
		if err != nil {
			return err
		}
		b.Pods = append(b.Pods, pod)
		at := lab.End{Host: b.Node, Interface: b.Interface(i), IPv4: gateway4, IPv6: gateway6}
		of := lab.End{
			Host: pod, Interface: "eth0",
			IPv4: netip.PrefixFrom(b.Address(i, false), 32), IPv6: netip.PrefixFrom(b.Address(i, true), 128),
		}
		if err := b.Lab.Connect(at, of, lab.Cable{}); err != nil {
			return err
		}
		for _, r := range []struct {
			host *lab.Host
			lab.Route
		}{
			{b.Node, lab.Route{To: of.IPv4, Interface: at.Interface}},
			{b.Node, lab.Route{To: of.IPv6, Interface: at.Interface}},
			{pod, lab.Route{To: gateway4, Interface: "eth0"}},
			{pod, lab.Route{To: gateway6, Interface: "eth0"}},
			{pod, lab.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: gateway4.Addr(), Interface: "eth0"}},
			{pod, lab.Route{To: netip.MustParsePrefix("::/0"), Via: gateway6.Addr(), Interface: "eth0"}},
		} {
			if err := r.host.AddRoute(r.Route); err != nil {
				return err
			}
		}
	}
	return nil
}

// Interface returns the host's end of a pod's veth; pods are numbered from 0.
func (b *Bed) Interface(pod int) string { return fmt.Sprintf("veth%d", pod+1) }

// Address returns a pod's address.
func (b *Bed) Address(pod int, is6 bool) netip.Addr { return AddressOn(b.number, pod, is6) }

// AddressOn returns the address of a pod of a node, in any bed; nodes are numbered from 1, pods from 0.
func AddressOn(node, pod int, is6 bool) netip.Addr {
	if is6 {
		return netip.MustParseAddr(fmt.Sprintf("2001:db8:244:%d::%d", node, pod+1))
	}
	return netip.AddrFrom4([4]byte{10, 244, byte(node), byte(pod + 1)})
}

// Watched returns the pods as the watch takes them.
func (b *Bed) Watched() (pods []watch.Pod) {
	for i := range b.Pods {
		pods = append(pods, watch.Pod{Interface: b.Interface(i), Addresses: []netip.Addr{b.Address(i, false), b.Address(i, true)}})
	}
	return pods
}

// Install writes the rules of the plain path on the host.
func (b *Bed) Install(more ...plain.Service) (r *plain.Rules, err error) {
	var pods []plain.Pod
	for _, p := range b.Watched() {
		pods = append(pods, plain.Pod(p))
	}
	err = b.Node.Run(func() (err error) {
		r, err = plain.Install(pods, more...)
		return err
	})
	return r, err
}

// Close removes everything.
func (b *Bed) Close() error { return b.Lab.Close() }
