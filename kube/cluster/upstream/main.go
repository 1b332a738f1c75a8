// Command upstream runs Kubernetes' own tests of Services ("[sig-network] Services"), first in a cluster with
// shunt-kube, then in the same cluster with kube-proxy in mode nftables, and writes one table of both:
// `make test-kube-e2e`.
//
// It ends with code 1 if a test passes with kube-proxy and not with shunt-kube.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/kube/cluster"
)

// run has the command line's options.
type run struct {
	options            cluster.Options
	focus, table, logs string
	limit              time.Duration
}

func main() {
	var r run
	r.options.Flags(flag.CommandLine)
	flag.StringVar(&r.options.Upstream, "upstream", "", "the folder that test/kube/upstream has made")
	flag.StringVar(&r.focus, "focus", services, "run only tests whose names match this regular expression")
	flag.DurationVar(&r.limit, "limit", 2*time.Hour, "run no further tests after this time with each of the two")
	flag.StringVar(&r.table, "table", "", "the file for the table; empty: standard output alone")
	flag.StringVar(&r.logs, "logs", os.TempDir(), "the folder for what the tests write")
	flag.Parse()
	o := r.options
	if o.Kube == "" || o.Programs == "" || o.Helm == "" || o.Chart == "" || o.Upstream == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "upstream: give --kube, --programs, --helm, --chart and --upstream, or run `make test-kube-e2e`")
		os.Exit(2)
	}
	told, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := r.both(told); err != nil {
		fmt.Fprintln(os.Stderr, "upstream:", err)
		os.Exit(1)
	}
}

func (r *run) both(ctx context.Context) error {
	ours, err := r.arm(ctx, "shunt-kube", func(c *cluster.Cluster, ctx context.Context) error {
		if err := c.Install(ctx, nil); err != nil {
			return err
		}
		return c.AwaitAgents(ctx)
	})
	if err != nil {
		return err
	}
	theirs, err := r.arm(ctx, "kube-proxy", func(c *cluster.Cluster, _ context.Context) error { return c.StartKubeProxy() })
	if err != nil {
		return err
	}
	rows := compare(theirs, ours)
	text := draw(rows)
	if r.table != "" {
		err = os.WriteFile(r.table, []byte(text), 0o644)
	}
	fmt.Print(text)
	return errors.Join(err, verdict(rows))
}

// arm starts a cluster, gives it a balancer, and runs the tests.
func (r *run) arm(ctx context.Context, name string, balance func(*cluster.Cluster, context.Context) error) (specs []cluster.Spec, err error) {
	c, err := cluster.Up(ctx, r.options)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Down()) }()
	starting, cancel := context.WithTimeoutCause(ctx, cluster.Patience, fmt.Errorf("%s was not ready within %s", name, cluster.Patience))
	defer cancel()
	// A node's bridge is made with its first pod, and shunt-kube waits for the bridge.
	if _, err := c.Serve(starting, "first", false); err != nil {
		return nil, err
	}
	if err := balance(c, starting); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	if err := c.StartResolver(starting); err != nil {
		return nil, fmt.Errorf("start a resolver with %s: %w", name, err)
	}
	log := filepath.Join(r.logs, "shunt-upstream-"+name+".log")
	begin := time.Now()
	fmt.Printf("with %s: the tests write to %s\n", name, log)
	testing, stop := context.WithTimeout(ctx, r.limit)
	defer stop()
	specs, err = c.Test(testing, r.focus, skip(), log)
	fmt.Printf("with %s: %d s\n", name, int(time.Since(begin).Seconds()))
	return specs, err
}
