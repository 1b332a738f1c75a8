// Package bed is a host with pods, in network namespaces of a lab: for the demo, the tests and the
// measurements. The pods are connected as Calico connects them: a veth each, an address without a subnet,
// and a gateway that is the same for all.
//
//	pod1 eth0 ══ veth1 ┐
//	pod2 eth0 ══ veth2 ├ node: routes to each pod, netfilter rules
//	pod3 eth0 ══ veth3 ┘
//
//	pod<i>  10.244.1.<i>  2001:db8:244:1::<i>
//	gateway 169.254.1.1   fd00::1              on every veth
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
}

// New builds a host with so many pods, and waits until their interfaces pass packets. Nothing is left when
// it fails.
func New(ctx context.Context, pods int) (*Bed, error) {
	l, err := lab.New("")
	if err != nil {
		return nil, err
	}
	b := &Bed{Lab: l}
	if err := b.build(ctx, pods); err != nil {
		return nil, errors.Join(fmt.Errorf("build a host with pods: %w", err), l.Close())
	}
	return b, nil
}

func (b *Bed) build(ctx context.Context, pods int) (err error) {
	if b.Node, err = b.Lab.AddHost("node"); err != nil {
		return err
	}
	if err := b.Node.SetForwarding(true); err != nil {
		return err
	}
	for i := range pods {
		pod, err := b.Lab.AddHost(fmt.Sprintf("pod%d", i+1))
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
	return b.Lab.Ready(ctx)
}

// Interface is the host's end of a pod's veth; pods are numbered from 0.
func (b *Bed) Interface(pod int) string { return fmt.Sprintf("veth%d", pod+1) }

// Address is a pod's.
func (b *Bed) Address(pod int, is6 bool) netip.Addr {
	if is6 {
		return netip.MustParseAddr(fmt.Sprintf("2001:db8:244:1::%d", pod+1))
	}
	return netip.AddrFrom4([4]byte{10, 244, 1, byte(pod + 1)})
}

// Watched are the pods as the watch takes them.
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
