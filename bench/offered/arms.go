package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	benchbed "github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/macswap"
	"github.com/shunt-lb/shunt/internal/lab"
	"golang.org/x/sys/unix"
)

// childVariable is set for the process that is shunt.
const childVariable = "SHUNT_OFFERED_CHILD"

// arm is a way from the node's interface to the backend.
type arm struct {
	name, what string
	floor      bool // it translates nothing
	start      func(ctx context.Context, b *bed) (stop func() error, err error)
}

// arms are all, in the order of their turns and of the report.
var arms = []arm{
	{name: "MAC swap", what: "the floor: an XDP program that only writes new MAC addresses (bench/bpf/macswap.bpf.c), so no Service", floor: true, start: startMACSwap},
	{name: "shunt, XDP", what: "`shunt run`, `forwarding: nat`, `attach: native`", start: shuntAt("native")},
	{name: "shunt, tc", what: "the same with `attach: tc`", start: shuntAt("tc")},
	{name: "iptables", what: "the rules of kube-proxy 1.34 in mode iptables for this Service", start: startIPTables},
	{name: "nftables", what: "the rules of kube-proxy 1.34 in mode nftables", start: startNFTables},
	{name: "IPVS", what: "round robin and masquerade, with conntrack, and the rules of kube-proxy 1.34 in mode ipvs without the rules that ask ipset, so with a bit less work for each packet than in a cluster", start: startIPVS},
}

// missing is the reason why a machine does not have an arm.
type missing struct{ error }

// startMACSwap has the frames of both directions go to the wire.
func startMACSwap(_ context.Context, b *bed) (func() error, error) {
	hop := macswap.Hop{Destination: b.wire.Interfaces()[0].MAC, Source: b.node.Interfaces()[0].MAC}
	return macswap.Way{In: iface, Out: iface, Hop: hop, Back: hop}.Attach(b.node)
}

// shuntAt runs shunt with its program at a hook.
func shuntAt(hook string) func(context.Context, *bed) (func() error, error) {
	return func(ctx context.Context, b *bed) (func() error, error) {
		text := fmt.Sprintf(`interfaces: [{name: %s, attach: %s}]
services:
  - name: offered
    address: %s
    port: %d
    protocol: udp
    forwarding: nat
    announce: none
    backends: [{address: %s, port: %d}]
api: {socket: %s}
`, iface, hook, service.Addr(), service.Port(), endpoint.Addr(), endpoint.Port(), filepath.Join(b.folder, "api.sock"))
		return benchbed.Shunt{Host: b.node, Folder: b.folder, Config: text, Program: b.program, Env: []string{childVariable + "=1"}}.Start(ctx)
	}
}

// startIPTables installs rules. They go with the namespace.
func startIPTables(ctx context.Context, b *bed) (func() error, error) {
	return nothing, errors.Join(b.node.SetForwarding(true), b.node.SetSysctl("net.ipv4.conf.all.route_localnet", "1"), b.rules(ctx, kubeProxyIPTables, iptables))
}

func startNFTables(ctx context.Context, b *bed) (func() error, error) {
	return nothing, errors.Join(b.node.SetForwarding(true), b.rules(ctx, kubeProxyNFTables, nft, "-f", "-"))
}

func startIPVS(ctx context.Context, b *bed) (func() error, error) {
	err := b.node.AddIPVS(unix.IPPROTO_UDP, service, endpoint)
	if errors.Is(err, lab.ErrNoIPVS) {
		return nothing, missing{err}
	}
	return nothing, errors.Join(err, b.node.SetForwarding(true), b.rules(ctx, kubeProxyIPVS, iptables))
}

func nothing() error { return nil }

// The programs that load rules from their standard input.
var (
	iptables = benchbed.Program{Name: "iptables-restore", Package: "iptables"}
	nft      = benchbed.Program{Name: "nft", Package: "nftables"}
)

// rules loads rules in the node.
func (b *bed) rules(ctx context.Context, rules string, program benchbed.Program, args ...string) error {
	if err := benchbed.Need(program); err != nil {
		return missing{err}
	}
	names := strings.NewReplacer("NODEPORT", fmt.Sprint(service.Port()), "NODEIP", node.String(), "CLUSTERIP", clusterIP.Addr().String(),
		"CLUSTERPORT", fmt.Sprint(clusterIP.Port()), "ENDPOINT", endpoint.String(), "BACKEND", backend.String())
	c := b.node.Command(ctx, program.Name, args...)
	c.Stdin = strings.NewReader(names.Replace(rules))
	if said, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", program.Name, err, said)
	}
	return nil
}
