package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
)

// bridged is a host with two pods behind a bridge, as Docker and the CNI plugin bridge make them, and rules that see bridged packets.
//
//	pod1 eth0 ══ veth1 ┐
//	pod2 eth0 ══ veth2 ┴ node: br0
type bridged struct {
	lab  *lab.Lab
	pods [2]*lab.Host
}

func newBridged(ctx context.Context) (b *bridged, err error) {
	b = &bridged{}
	if b.lab, err = lab.New(""); err != nil {
		return nil, err
	}
	if err := b.build(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("build a host with bridged pods: %w", err), b.lab.Close())
	}
	return b, nil
}

func (b *bridged) build(ctx context.Context) error {
	const bridge = "br0"
	node, err := b.lab.AddHost("node")
	if err == nil {
		err = node.AddBridge(bridge)
	}
	if err != nil {
		return err
	}
	var pods []plain.Pod
	for i := range b.pods {
		if b.pods[i], err = b.lab.AddHost(fmt.Sprintf("pod%d", i+1)); err != nil {
			return err
		}
		port := fmt.Sprintf("veth%d", i+1)
		end := lab.End{Host: b.pods[i], Interface: "eth0", IPv4: netip.PrefixFrom(b.address(i, false), 24), IPv6: netip.PrefixFrom(b.address(i, true), 64)}
		if err := errors.Join(b.lab.Connect(lab.End{Host: node, Interface: port}, end, lab.Cable{}), node.Plug(port, bridge)); err != nil {
			return err
		}
		pods = append(pods, plain.Pod{Interface: port, Addresses: []netip.Addr{b.address(i, false), b.address(i, true)}})
	}
	for _, tables := range []string{"iptables", "ip6tables"} {
		if err := node.SetSysctl("net.bridge.bridge-nf-call-"+tables, "1"); err != nil {
			return fmt.Errorf("%w; load the module: modprobe br_netfilter", err)
		}
	}
	if err := node.Run(func() error { _, err := plain.Install(pods); return err }); err != nil {
		return err
	}
	return b.lab.Ready(ctx)
}

func (b *bridged) address(pod int, is6 bool) netip.Addr {
	if is6 {
		return netip.MustParseAddr(fmt.Sprintf("2001:db8:245::%d", pod+1))
	}
	return netip.AddrFrom4([4]byte{10, 245, 1, byte(pod + 1)})
}

// serve has the second pod answer.
func (b *bridged) serve(is6 bool) (*traffic.Server, error) {
	return traffic.Serve(b.pods[1], netip.AddrPortFrom(b.address(1, is6), 0))
}
