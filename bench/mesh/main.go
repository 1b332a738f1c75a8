// Mesh compares shunt with HAProxy in the network of `shunt demo mesh`: a client, a router with ECMP, and three
// machines, each of which is a balancer and a server:
//
//	go run -exec sudo ./bench/mesh                about five minutes
//	go run -exec sudo ./bench/mesh --quick        does it work, about half a minute
//
//	client ─── router ─── switch ─┬─ m1   on each: the balancer, and nginx
//	          (ECMP, policy 1)    ├─ m2
//	                              └─ m3
//
// Figures: keep-alive requests per second, as fast as it goes (wrk), and the latency of answers at a fixed rate
// (package load, which counts waiting times, too). Arms are interleaved: every round measures each once, and
// each starts from nothing. Ratios are of the measurements of one round. The report has medians with the
// smallest and the largest, the machine and the exact command.
//
// Needs root, and nginx, wrk and HAProxy from Debian. Only ratios of one run mean anything: machines differ
// and are noisy, and here all hosts share one's processors.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/load"
	"github.com/shunt-lb/shunt/bench/machine"
)

// options is the command line.
type options struct {
	rounds      int
	duration    time.Duration // of each measurement
	rates       []int         // requests per second, one for each latency figure
	connections int
	offload     bool
	shunt       string // "": built from this repository
	out         string // "": no report is stored
}

func parseOptions(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("mesh", flag.ContinueOnError)
	flags.IntVar(&o.rounds, "rounds", 7, "number of rounds; the report has their medians")
	flags.DurationVar(&o.duration, "duration", 3*time.Second, "length of each measurement, in whole seconds")
	rates := flags.String("rate", "5000,20000", "requests per second for the latency figures, comma separated")
	flags.IntVar(&o.connections, "connections", 50, "connections of the client")
	flags.BoolVar(&o.offload, "offload", false, "leave checksum and segmentation offload on, as veth has them by default")
	flags.StringVar(&o.shunt, "shunt", "", "shunt binary (default: built from this repository)")
	flags.StringVar(&o.out, "out", "", "directory for the report (default: none)")
	quick := flags.Bool("quick", false, "one round of a second each at 1000 requests per second: does everything still work?")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	for _, text := range strings.Split(*rates, ",") {
		rate, err := strconv.Atoi(text)
		if err != nil || rate < 1 {
			return o, fmt.Errorf("--rate %s: %q must be a whole number of at least 1", *rates, text)
		}
		o.rates = append(o.rates, rate)
	}
	if *quick {
		o.rounds, o.duration, o.rates = 1, time.Second, []int{1000}
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("%q: unexpected argument; there are only flags", flags.Arg(0))
	case o.rounds < 1:
		return o, fmt.Errorf("--rounds %d: must be at least 1", o.rounds)
	case o.duration < time.Second || o.duration%time.Second != 0:
		return o, fmt.Errorf("--duration %s: must be at least 1s, and whole seconds, because wrk takes no others", o.duration)
	case o.connections < wrkThreads:
		return o, fmt.Errorf("--connections %d: must be at least %d, one for each thread of wrk", o.connections, wrkThreads)
	}
	return o, nil
}

func main() {
	is, err := load.Main(os.Args, os.Stdout)
	if !is {
		var o options
		if o, err = parseOptions(os.Args[1:]); err == nil {
			ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
			err = run(ctx, o)
			stop()
		}
	}
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mesh:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if os.Geteuid() != 0 {
		return errors.New("making network namespaces needs root; run this again with go run -exec sudo")
	}
	programs := []bed.Program{{Name: "nginx", Package: "nginx-light"}, {Name: "wrk", Package: "wrk"}, {Name: "haproxy", Package: "haproxy"}}
	if err := bed.Need(programs...); err != nil {
		return err
	}
	lock, err := bed.Lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	folder, err := os.MkdirTemp("", "shunt-mesh-")
	if err != nil {
		return fmt.Errorf("make a working directory: %w", err)
	}
	defer os.RemoveAll(folder)
	if o.shunt == "" {
		o.shunt = filepath.Join(folder, "shunt")
		if err := bed.BuildShunt(ctx, o.shunt); err != nil {
			return fmt.Errorf("%w; name a binary with --shunt", err)
		}
	}
	where, err := machine.Describe()
	if err != nil {
		return err
	}
	r := report{Machine: where, Programs: bed.Versions(ctx, programs), Command: machine.Command("bench/mesh"), options: o}
	for round := 1; round <= o.rounds; round++ {
		// The first arm of one round is the last of the next, so a machine that slows down with time slows all
		// arms.
		for i := range arms {
			a := arms[(i+round-1)%len(arms)]
			s, err := measure(ctx, o, folder, a)
			if err != nil {
				return fmt.Errorf("round %d, %s: %w", round, a.name, err)
			}
			s.Arm, s.Round = a.name, round
			fmt.Fprintln(os.Stderr, s)
			r.Samples = append(r.Samples, s)
		}
	}
	return r.write()
}
