// Remember counts how many flows a service with direct return has to remember while its
// backends are replaced one at a time, against a table of all its flows:
//
//	go run -exec sudo ./bench/remember            writes a plot and a page to bench/results
//	go run -exec sudo ./bench/remember --quick    with few flows, to standard output alone
//
// Data plane and reconciler are those of shunt run, in a network namespace of their own;
// traffic and time are simulated. Every packet of every flow is a run of the loaded XDP
// program, and the backend is read off the frame that leaves. Hours go by in seconds
// because the reconciler's clock is the simulation's, and the entries of sh_remembered are
// aged in the map. Manners of replacing are simulated at once, each in a data plane of
// its own:
//
//	drain   the old backend gets weight 0 when the new one comes, and goes one interval later
//	swap    the old backend goes and the new one comes in one reload
//
// and both once more with the new backend under the old one's name, and so with its slots.
//
// The run fails if a flow whose backend was not removed reaches another one, or if a flow
// could not be remembered.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/bench/chart"
	"github.com/shunt-lb/shunt/internal/lb/maglev"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// backendCount is the number of backends of the service at any time.
const backendCount = 20

// quickFlows is --flows with --quick: it takes under a minute.
const quickFlows = 1000

// options is the command line.
type options struct {
	flows     int
	changes   int
	interval  time.Duration
	settle    time.Duration
	tableSize uint32
	tracking  model.Tracking
	seed      uint64
	out       string
	progress  bool
}

func parseOptions(args []string) (options, error) {
	o := options{tracking: model.TrackingAuto, progress: true}
	flags := flag.NewFlagSet("remember", flag.ContinueOnError)
	flags.IntVar(&o.flows, "flows", 10_000, "number of flows alive at once")
	flags.IntVar(&o.changes, "changes", backendCount, "number of backends that are replaced, one after another")
	flags.DurationVar(&o.interval, "interval", 20*time.Minute, "simulated time between two replacements, and how long a draining backend stays")
	flags.DurationVar(&o.settle, "settle", 15*time.Minute, "timeouts.settle")
	// While one drains, the table has one more backend than at other times.
	size := flags.Uint("table-size", uint(maglev.SizeFor(backendCount+1)), "slots of the service's table")
	flags.Uint64Var(&o.seed, "seed", 1, "seed of the flows' lengths and times")
	quick := flags.Bool("quick", false, fmt.Sprintf("%d flows, and no files", quickFlows))
	flags.StringVar(&o.out, "out", filepath.Join("bench", "results"), "directory for the plot and the page; empty: none")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.tableSize = uint32(*size)
	if *quick {
		o.flows, o.out = quickFlows, ""
	}
	switch {
	case o.flows < 1 || o.flows > 1_000_000:
		return o, fmt.Errorf("--flows %d: must be 1 to 1000000", o.flows)
	case o.changes < 1 || o.changes > 200:
		return o, fmt.Errorf("--changes %d: must be 1 to 200, the number of addresses for backends", o.changes)
	case o.interval < step || o.interval%step != 0:
		return o, fmt.Errorf("--interval %s: must be a multiple of %s, the simulation's step", o.interval, step)
	}
	return o, nil
}

func main() {
	o, err := parseOptions(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	if err == nil {
		err = run(ctx, o)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "remember:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if os.Geteuid() != 0 {
		return errors.New("loading BPF programs and making network namespaces needs root; run this again with go run -exec sudo")
	}
	begun := time.Now()
	results, err := simulate(ctx, o, manners)
	if err != nil {
		return err
	}
	r, err := newReport(o, results, time.Since(begun))
	if err != nil {
		return err
	}
	path, err := r.write(o.out)
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	if path != "" {
		err = chart.Draw(path)
	}
	return errors.Join(err, r.verdict())
}

// simulate runs all manners at once, each on a thread of its own.
func simulate(ctx context.Context, o options, manners []manner) ([]*result, error) {
	type outcome struct {
		index  int
		result *result
		err    error
	}
	outcomes := make(chan outcome)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for i, m := range manners {
		go func() {
			r, err := simulateManner(ctx, o, m)
			outcomes <- outcome{i, r, err}
		}()
	}
	results := make([]*result, len(manners))
	var errs []error
	for range manners {
		one := <-outcomes
		if one.err != nil {
			errs = append(errs, fmt.Errorf("manner %s: %w", manners[one.index].name, one.err))
			cancel()
		}
		results[one.index] = one.result
	}
	return results, errors.Join(errs...)
}
