// Command dns compares the times that pods wait for a name, through a node-local cache and CoreDNS, by the host's
// rules and with shunt. Each way has a host of its own, with the same pods, and blocks of questions go round the
// hosts:
//
//	pod ──► cache in a pod ──────────────► CoreDNS in a pod
//	pod ──► cache in the host's namespace ─► CoreDNS in a pod
//
//	plain    the host's rules translate the services, as kube-proxy's do
//	bypass   shunt translates them at the socket, and packets between pods take the shortcut
//	steer    the same in the mode checked, with a steer to each server's pod
//
// Questions are for one name, which is in the cache, or for a new one each, which is not. It needs root, and CoreDNS:
//
//	CGO_ENABLED=0 GOBIN=/tmp/coredns go install github.com/coredns/coredns@v1.15.0
//	go run -exec sudo ./bench/dns -coredns /tmp/coredns/coredns
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	benchbed "github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
)

// The ways.
const (
	byRules = "plain"
	bypass  = "bypass"
	steer   = "steer"
)

var ways = []string{byRules, bypass, steer}

// childVariable makes a test's binary the command line.
const childVariable = "SHUNT_DNS_CHILD"

type options struct {
	coredns       string
	rounds, block int
	file          string
}

func main() {
	var o options
	flag.StringVar(&o.coredns, "coredns", "coredns", "path of CoreDNS")
	flag.IntVar(&o.rounds, "rounds", 20, "number of rounds of each way")
	flag.IntVar(&o.block, "block", 200, "questions in each round")
	flag.StringVar(&o.file, "json", "", "file for the time of each question")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := run(ctx, o); err != nil {
		fmt.Fprintf(os.Stderr, "dns: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	folder, err := os.MkdirTemp("", "shunt-dns-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	program := filepath.Join(folder, "shunt")
	if err := benchbed.BuildShunt(ctx, program); err != nil {
		return err
	}
	worlds, closeAll, err := newWorlds(ctx, func(w *world) (func() error, error) { return w.startCoreDNS(ctx, o.coredns) }, program)
	defer func() { err = errors.Join(err, closeAll()) }()
	if err != nil {
		return err
	}
	var all []*row
	for _, cache := range []string{"cache in a pod", "cache on the host"} {
		for _, kind := range []string{"cached", "not cached"} {
			rows, err := compare(ctx, worlds, cache, kind, o)
			if err != nil {
				return err
			}
			show(rows)
			all = append(all, rows...)
		}
	}
	if o.file == "" {
		return nil
	}
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return os.WriteFile(o.file, text, 0o644)
}

// newWorlds is a world for each way, with name servers that start starts. closeAll is never nil.
func newWorlds(ctx context.Context, start func(*world) (func() error, error), program ...string) (worlds []*world, closeAll func() error, err error) {
	var undo []func() error
	closeAll = func() (err error) {
		for i := range undo {
			err = errors.Join(err, undo[len(undo)-1-i]())
		}
		return err
	}
	cgroup, leave, err := lab.EnterCgroup(fmt.Sprintf("shunt-dns-%d", os.Getpid()))
	if err != nil {
		return nil, closeAll, err
	}
	undo = append(undo, leave)
	for i, way := range ways {
		w, err := newWorld(ctx, way, byte(i))
		if err != nil {
			return nil, closeAll, err
		}
		undo = append(undo, w.close)
		if way != byRules { // first, as a server's sockets are translated when they connect
			stop, err := w.accelerate(ctx, cgroup, program...)
			if err != nil {
				return nil, closeAll, err
			}
			undo = append(undo, stop)
		}
		stop, err := start(w)
		if stop != nil {
			undo = append(undo, stop)
		}
		if err != nil {
			return nil, closeAll, err
		}
		worlds = append(worlds, w)
	}
	return worlds, closeAll, nil
}

// row is one way to ask one kind of question.
type row struct {
	Cache     string            `json:"cache"`
	Kind      string            `json:"kind"`
	Way       string            `json:"way"`
	Rounds    [][]time.Duration `json:"rounds_nanoseconds"`
	Forwarded uint64            `json:"forwarded"` // packets that the host's rules have seen
}

// compare asks in all worlds in turn.
func compare(ctx context.Context, worlds []*world, cache, kind string, o options) (rows []*row, err error) {
	for _, w := range worlds {
		rows = append(rows, &row{Cache: cache, Kind: kind, Way: w.way})
	}
	for round := range o.rounds {
		for i, w := range worlds {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			number := 0
			names := func() string {
				if number++; kind == "cached" {
					return "cached.test"
				}
				return fmt.Sprintf("n%d.r%d.%s.test", number, round, rows[i].slug())
			}
			at := w.vip(cache)
			if _, err := w.askMany(at, 3, func() string { return "cached.test" }); err != nil { // the first one fills the cache
				return nil, fmt.Errorf("%s, %s: %w", w.way, cache, err)
			}
			before, err := w.seen()
			if err != nil {
				return nil, err
			}
			took, err := w.askMany(at, o.block, names)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", w.way, cache, err)
			}
			after, err := w.seen()
			if err != nil {
				return nil, err
			}
			rows[i].Rounds = append(rows[i].Rounds, took)
			rows[i].Forwarded += after - before
		}
	}
	return rows, nil
}

// vip is the address of a cache's service.
func (w *world) vip(cache string) netip.Addr {
	if cache == "cache in a pod" {
		return w.services()[0].vip
	}
	return w.services()[1].vip
}

// slug makes names of one row differ from those of others.
func (r *row) slug() string {
	if r.Cache == "cache in a pod" {
		return "pod"
	}
	return "host"
}

// show prints rows as a table. Ratios compare a round's quantiles with the first way's in the same round.
func show(rows []*row) {
	fmt.Printf("%s, %s\n  %-8s %9s %9s %9s %9s   %-24s %-24s %s\n", rows[0].Cache, rows[0].Kind, "", "median", "90 %", "99 %", "longest", "median beside the first", "99 % beside the first", "forwarded for a question")
	for _, r := range rows {
		var all []time.Duration
		var middle, high []float64
		for i, round := range r.Rounds {
			all = append(all, round...)
			middle = append(middle, float64(quantile(round, 0.5))/float64(quantile(rows[0].Rounds[i], 0.5)))
			high = append(high, float64(quantile(round, 0.99))/float64(quantile(rows[0].Rounds[i], 0.99)))
		}
		us := func(q float64) string { return fmt.Sprintf("%.1f µs", float64(quantile(all, q))/1000) }
		ratio := func(values []float64) string {
			mid, lowest, highest := traffic.Median(values)
			return fmt.Sprintf("%.2f [%.2f to %.2f]", mid, lowest, highest)
		}
		fmt.Printf("  %-8s %9s %9s %9s %9s   %-24s %-24s %.2f\n", r.Way, us(0.5), us(0.9), us(0.99), us(1), ratio(middle), ratio(high), float64(r.Forwarded)/float64(len(all)))
	}
}
