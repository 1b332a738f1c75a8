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
	outside     bool // only ways from outside are measured: the others are as with the balancer before
	start, stop func(ctx context.Context) error
	alive       func() error
}

// The balancers' names, which are the columns of the page.
const (
	nftables = "kube-proxy nftables"
	iptables = "kube-proxy iptables"
	ours     = "shunt-kube"
	direct   = "shunt-kube, direct return"
)

func (b *bench) balancers() []balancer {
	return []balancer{b.kubeProxy(nftables, "nftables"), b.kubeProxy(iptables, "iptables"), b.shuntKube(), b.directReturn()}
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
			return b.install(ctx, map[string]any{"nodeSelector": map[string]string{"kubernetes.io/hostname": b.node().Name()}})
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

// directReturn is shunt-kube on the node and on the other endpoint's node, with direct return between them. It has started once the other
// endpoint sees the client's address.
func (b *bench) directReturn() balancer {
	with := b.shuntKube()
	with.name, with.outside = direct, true
	with.start = func(ctx context.Context) error {
		if err := b.install(ctx, map[string]any{"nodeSelector": map[string]string{directLabel: ""}, "directReturn": "gue"}); err != nil {
			return err
		}
		return cluster.Eventually(ctx, func() error {
			answer, err := b.FromOutside().Ask(ctx, "tcp", cluster.At(b.node().Addr4().String(), b.remote.Spec.Ports[2].NodePort))
			if err == nil && !strings.HasPrefix(answer.Remote, b.Outside.Addr4().String()+":") {
				err = fmt.Errorf("the pod sees %s, and not the client %s", answer.Remote, b.Outside.Addr4())
			}
			return err
		})
	}
	return with
}

// directLabel is the label of the nodes that directReturn runs on.
const directLabel = "shunt-bench-direct-return"

// install installs shunt-kube with room for all Services, and waits for its agents.
func (b *bench) install(ctx context.Context, values map[string]any) error {
	room := b.settings.services[len(b.settings.services)-1] + 100 // the Services of the measurements, and the cluster's own
	values["config"] = map[string]any{"interfaces": []any{map[string]string{"name": "eth0"}, map[string]string{"name": "cni0", "attach": "tc"}},
		"limits": map[string]int{"services": max(1000, room), "slots": max(1<<22, (room+100)*tableSize)}}
	if err := b.Install(ctx, values); err != nil {
		return err
	}
	return b.AwaitAgents(ctx)
}

// startPatience allows for a balancer that reads 10,000 Services, on a machine with other work.
const startPatience = 15 * time.Minute
