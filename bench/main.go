// Bench compares shunt with other ways from a client to web servers, all in one run, in
// the same namespaces (package bed) and with the same offload settings:
//
//	go run -exec sudo ./bench                     everything, about forty minutes
//	go run -exec sudo ./bench --quick             does it work, about two minutes
//
// Figures: keep-alive requests per second and new connections per second (wrk), the latency of answers at a fixed rate
// (package load), and bulk transfers with their losses (iperf3). Arms are interleaved: every round measures each once,
// and each starts from nothing. The report has medians over the rounds, ratios between arms, the machine and the exact
// command.
//
// Needs root, and nginx, wrk, iperf3 and the peers from Debian. Only ratios of one run have a meaning: machines differ
// and are noisy.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/load"
	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/internal/lab"
)

// options is the command line.
type options struct {
	arms             []string
	layouts          []string
	offloads         []string
	rounds           int
	connectionRounds int           // rounds that measure new connections, which take longest
	duration         time.Duration // of new connections: longer than ports rest
	keepalive        time.Duration // of keep-alive and of the fixed rate
	bulk             time.Duration // of each bulk transfer; 0 leaves them out
	rate             int           // requests per second at the fixed rate; 0 leaves it out
	connections      int
	shunt            string
	shuntArgs        string
	out              string
	quick            bool
}

// run is one run of the benchmark.
type run struct {
	options   options
	bed       *bed.Bed
	dir       string // configuration files and logs of the children
	shunt     string // path of the binary
	shuntArgs []string
}

func main() {
	if is, err := load.Main(os.Args, os.Stdout); is {
		exit(err)
	}
	o := parseFlags()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := benchmark(ctx, o)
	stop()
	exit(err)
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// parseFlags reads the command line and exits on a wrong one.
func parseFlags() options {
	var o options
	var names []string
	for _, a := range arms {
		names = append(names, a.name)
	}
	armList := flag.String("arms", strings.Join(names, ","), "arms to measure, comma separated")
	layouts := flag.String("layout", "two-arm,one-arm", "how the balancer is connected: two-arm, one-arm, or both")
	offloads := flag.String("offload", "off", "checksum offload: off, default, or off,default")
	flag.IntVar(&o.rounds, "rounds", 3, "number of rounds; the report has their medians")
	flag.IntVar(&o.connectionRounds, "connection-rounds", 1, "rounds that also measure new connections")
	flag.DurationVar(&o.duration, "duration", 75*time.Second, "length of the measurement of new connections; longer than the 60 s for which a port rests")
	flag.DurationVar(&o.keepalive, "keepalive-duration", 10*time.Second, "length of the measurements of keep-alive requests and of the fixed rate; 0 leaves out keep-alive")
	flag.DurationVar(&o.bulk, "bulk-duration", 5*time.Second, "length of each bulk transfer, TCP and UDP; 0 leaves them out")
	flag.IntVar(&o.rate, "rate", 10000, "requests per second for the latency figures; 0 leaves them out")
	flag.IntVar(&o.connections, "connections", 50, "connections of the client")
	flag.StringVar(&o.shunt, "shunt", "", "shunt binary (default: built from this repository)")
	flag.StringVar(&o.shuntArgs, "shunt-args", "", "more arguments of shunt run, separated by spaces")
	flag.StringVar(&o.out, "out", "", "directory for the report (default: bench/results, or none with --quick)")
	flag.BoolVar(&o.quick, "quick", false, "one round with measurements of two seconds, to check that everything works")
	flag.Parse()
	if o.quick {
		o.rounds, o.connectionRounds, o.duration, o.keepalive, o.rate = 1, 1, 2*time.Second, min(o.keepalive, 2*time.Second), min(o.rate, 2000)
		o.bulk = min(o.bulk, time.Second)
	}
	o.arms, o.layouts, o.offloads = strings.Split(*armList, ","), strings.Split(*layouts, ","), strings.Split(*offloads, ",")
	for _, name := range o.arms {
		if !slices.Contains(names, name) {
			usage("unknown arm %q; the arms are %s", name, strings.Join(names, ", "))
		}
	}
	for _, layout := range o.layouts {
		if layout != string(lab.TwoArm) && layout != string(lab.OneArm) {
			usage("unknown layout %q; the layouts are %s and %s", layout, lab.TwoArm, lab.OneArm)
		}
	}
	for _, offload := range o.offloads {
		if offload != "off" && offload != "default" {
			usage("unknown offload setting %q; the settings are off and default", offload)
		}
	}
	if flag.NArg() > 0 {
		usage("unexpected argument %q", flag.Arg(0))
	}
	if o.rounds < 1 || o.connectionRounds < 0 || o.duration < time.Second || o.connections < 2 ||
		o.keepalive < time.Second && o.keepalive != 0 || o.bulk < time.Second && o.bulk != 0 || o.rate > 0 && o.keepalive == 0 {
		usage("rounds must be at least 1, durations at least 1s (keep-alive with --rate 0 and bulk may be 0) and connections at least 2")
	}
	return o
}

func usage(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...)
	os.Exit(2)
}

// benchmark runs all rounds and writes the report. It names a missing program before it measures anything.
func benchmark(ctx context.Context, o options) (err error) {
	programs := []bed.Program{{Name: "nginx", Package: "nginx-light"}, {Name: "wrk", Package: "wrk"}}
	if o.bulk > 0 {
		programs = append(programs, bed.Program{Name: "iperf3", Package: "iperf3"})
	}
	for _, a := range arms {
		if slices.Contains(o.arms, a.name) {
			programs = append(programs, a.programs...)
		}
	}
	if err := bed.Need(programs...); err != nil {
		return fmt.Errorf("%w; install what is missing, or leave peers out with --arms", err)
	}
	r := &run{options: o, shuntArgs: strings.Fields(o.shuntArgs)}
	if r.dir, err = os.MkdirTemp("", "shunt-bench-"); err != nil {
		return fmt.Errorf("make a working directory: %w", err)
	}
	defer os.RemoveAll(r.dir)
	if slices.Contains(o.arms, "shunt") {
		if err := r.findShunt(ctx); err != nil {
			return err
		}
	}
	where, err := machine.Describe()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("building network namespaces needs root; run this again with go run -exec sudo")
	}
	samples, err := r.rounds(ctx)
	if err != nil {
		return err
	}
	return report{Machine: where, Programs: bed.Versions(ctx, programs), Command: machine.Command("bench"), Samples: samples}.write(o)
}

// findShunt builds shunt unless a binary was named.
func (r *run) findShunt(ctx context.Context) error {
	if r.shunt = r.options.shunt; r.shunt != "" {
		return nil
	}
	r.shunt = filepath.Join(r.dir, "shunt")
	if err := bed.BuildShunt(ctx, r.shunt); err != nil {
		return fmt.Errorf("%w; name a binary with --shunt, or leave it out with --arms", err)
	}
	return nil
}

// rounds measures everything. An arm that fails is in the report with its error, and
// the others go on; the run fails only when it was interrupted.
func (r *run) rounds(ctx context.Context) (samples []sample, err error) {
	for round := 1; round <= r.options.rounds; round++ {
		for _, set := range r.options.settings() {
			for _, a := range arms {
				if !slices.Contains(r.options.arms, a.name) {
					continue
				}
				s := sample{Arm: a.name, setting: set, Round: round}
				if a.incremental && set.Offload == "default" {
					s.Error = "cannot complete checksums, so not measured with offload on"
				} else if err := r.freshArm(ctx, a, &s); err != nil {
					s.Error = err.Error()
				}
				if ctx.Err() != nil {
					return nil, errors.New("interrupted")
				}
				fmt.Fprintln(os.Stderr, s.line())
				samples = append(samples, s)
			}
		}
	}
	return samples, nil
}

// freshArm measures an arm in namespaces and with servers of its own: closed connections
// of one arm rest for a minute and would be in the way of the next one's.
func (r *run) freshArm(ctx context.Context, a arm, s *sample) (err error) {
	if r.bed, err = bed.Build(lab.Layout(s.Layout)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.bed.Close()) }()
	if err := r.bed.SetOffload(s.Offload == "default"); err != nil {
		return err
	}
	servers, err := startServers(r)
	if err != nil {
		return err
	}
	err = r.measureArm(ctx, a, s)
	return errors.Join(err, servers.Stop())
}
