// Offered shows how many packets a second a node forwards to one Service with one remote backend, and with how much CPU,
// over the packets that it is offered: shunt at XDP and at tc, kube-proxy's iptables, nftables and IPVS, and a MAC swap as the floor.
//
//	go run -exec sudo ./bench/offered            writes a plot and a page to bench/results, about 5 minutes
//	go run -exec sudo ./bench/offered --quick    one short round, to standard output alone
//
//	 wire (CPU 0)                               node (CPU 1)
//	┌──────────────────────────────┐  veth  ┌──────────────────────────────┐
//	│ live frames, fixed rate ──►  ├────────┤ eth0 ──► Service, one of the │
//	│ XDP: counts and drops  ◄──   ├────────┤ eth0 ◄── arms: NAT to backend │
//	└──────────────────────────────┘        └──────────────────────────────┘
//
// Each arm has a node of its own, and all live at the same time. Arms take turns at each load, and so do loads, for several
// rounds. Client and backend are both behind the node's only interface, as on a node of a cluster. The node's packet work is
// done by one thread of the kernel (threaded NAPI), which has a CPU for itself: its CPU time is the softirq of the node.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	benchbed "github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/cpus"
)

// options limit the measurements.
type options struct {
	rounds     int
	warm, each time.Duration
	loads      []float64 // frames a second
}

// brief is one short round.
func brief() options {
	return options{rounds: 1, warm: 20 * time.Millisecond, each: 100 * time.Millisecond, loads: []float64{100e3, 400e3, 1000e3}}
}

func main() {
	o := options{rounds: 5, warm: 50 * time.Millisecond, each: 300 * time.Millisecond,
		loads: []float64{100e3, 200e3, 300e3, 400e3, 500e3, 600e3, 800e3, 1000e3, 1300e3, 1600e3, 2000e3, 2500e3, 3000e3}}
	quick := flag.Bool("quick", false, "one short round, printed to standard output only")
	flag.IntVar(&o.rounds, "rounds", o.rounds, "number of rounds; each arm has a turn at each load in a round")
	flag.Func("loads", "1000 packets a second that are offered, with commas", func(text string) (err error) {
		o.loads, err = parseLoads(text)
		return err
	})
	dir := flag.String("results", "bench/results", "folder for the page and the plot")
	flag.Parse()
	if *quick {
		o = brief()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	err := compare(ctx, o, *quick, filepath.Clean(*dir))
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "offered:", err)
		os.Exit(1)
	}
}

func parseLoads(text string) (loads []float64, err error) {
	for part := range strings.SplitSeq(text, ",") {
		n, err := strconv.ParseFloat(part, 64)
		if err != nil || n <= 0 {
			return nil, fmt.Errorf("%q is no number above 0", part)
		}
		loads = append(loads, 1000*n)
	}
	return loads, nil
}

func compare(ctx context.Context, o options, quick bool, dir string) (err error) {
	if o.rounds < 1 {
		return errors.New("--rounds must be at least 1")
	}
	lock, err := benchbed.Lock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	folder, err := os.MkdirTemp("", "shunt-offered-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	program := filepath.Join(folder, "shunt")
	if err := benchbed.BuildShunt(ctx, program); err != nil {
		return err
	}
	r, err := run(ctx, o, arms, program)
	if err != nil {
		return err
	}
	if quick {
		return r.page(os.Stdout, "")
	}
	return r.write(dir)
}

// run measures all arms that this machine has. program is shunt.
func run(ctx context.Context, o options, arms []arm, program ...string) (r report, err error) {
	debug.SetGCPercent(-1) // a run allocates some megabytes
	two := cpus.Two()
	restore, err := cpus.Process(two[0]) // the node's CPU is for the node alone
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, restore()) }()
	r = report{options: o, apart: two[0] != cpus.Any, missing: map[string]error{}, results: map[string][][]result{}}
	var beds []*bed
	defer func() {
		for _, b := range beds {
			err = errors.Join(err, b.close())
		}
	}()
	for _, a := range arms {
		b, err := newBed(ctx, a, two, program)
		var none missing
		if errors.As(err, &none) {
			r.missing[a.name] = none
			continue
		}
		if err != nil {
			return r, err
		}
		beds = append(beds, b)
		r.arms = append(r.arms, a)
		r.results[a.name] = make([][]result, len(o.loads))
	}
	for round := range o.rounds {
		for i, load := range o.loads {
			for _, b := range beds {
				got, err := b.measure(ctx, two[0], load, o.warm, o.each)
				if err != nil {
					return r, fmt.Errorf("round %d, %.0f packets a second: %w", round+1, load, err)
				}
				r.results[b.arm.name][i] = append(r.results[b.arm.name][i], got)
			}
		}
	}
	return r, nil
}
