package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/kube/cluster"
)

// balancer is one of the compared balancers. stop removes it from the node completely.
type balancer struct {
	name        string
	start, stop func(ctx context.Context) error
	alive       func() error
}

// The balancers' names, which are the columns of the page.
const (
	nftables = "kube-proxy nftables"
	iptables = "kube-proxy iptables"
	ours     = "shunt-kube"
)

func (b *bench) balancers() []balancer {
	return []balancer{b.kubeProxy(nftables, "nftables"), b.kubeProxy(iptables, "iptables"), b.shuntKube()}
}

func (b *bench) kubeProxy(name, mode string) balancer {
	return balancer{name: name, alive: b.CheckKubeProxy,
		start: func(context.Context) error { return b.StartKubeProxyOn(mode, b.node()) },
		stop: func(ctx context.Context) error {
			if err := b.StopKubeProxy(); err != nil {
				return err
			}
			return b.CleanKubeProxy(ctx)
		}}
}

// tableSize is the table size of a service with few backends (docs/guide/configuration.md, table_size).
const tableSize = 4093

func (b *bench) shuntKube() balancer {
	return balancer{name: ours, alive: func() error { return nil }, // its pod is started again, and its programs go on meanwhile
		start: func(ctx context.Context) error {
			room := b.settings.services[len(b.settings.services)-1] + 100 // the Services of the measurements, and the cluster's own
			err := b.Install(ctx, map[string]any{
				"nodeSelector": map[string]string{"kubernetes.io/hostname": b.node().Name()},
				"config": map[string]any{"interfaces": []any{map[string]string{"name": "eth0"}, map[string]string{"name": "cni0", "attach": "tc"}},
					"limits": map[string]int{"services": max(1000, room), "slots": max(1<<22, (room+100)*tableSize)}},
			})
			if err != nil {
				return err
			}
			return b.AwaitAgents(ctx)
		},
		stop: func(ctx context.Context) error {
			if err := b.Uninstall(ctx); err != nil {
				return err
			}
			return cluster.Eventually(ctx, func() error { // at times, kubelet stops a container after its pod has gone
				left, err := b.Remains(ctx)
				if err == nil && len(left) > 0 {
					err = fmt.Errorf("remains of shunt-kube: %s", strings.Join(left, "; "))
				}
				return err
			})
		}}
}

// startPatience allows for a balancer that reads 10,000 Services, on a machine with other work.
const startPatience = 15 * time.Minute
