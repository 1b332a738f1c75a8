// Command bench measures Services in one cluster with kube-proxy in mode nftables, with kube-proxy in mode iptables, with
// shunt-kube, and with shunt-kube and direct return, one after the other in each round: `make bench-kube`.
//
//	client (pod of n1) ── cluster IP ──► server (pod of n1)
//	outside ── router ── node port of n1 ──► server (pod of n1), or of n2
//
// Only n1 has a balancer, because all ways pass there; with direct return n2 has one, too, and answers the client itself. Client and server share one CPU, so that a rate shows the cost of a
// way; the CPU time is that of the whole machine, less its use without the load. Each way is also measured without
// a Service, by the pod's own address.
//
// The results go to a file after each balancer's part of a round, and the page is made from that file.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/kube/cluster"
)

// settings are the settings of the command line.
type settings struct {
	options  cluster.Options
	services []int
	rounds   int
	duration time.Duration
	changes  int
	ways     *regexp.Regexp
	results  string
	page     string
	from     string
}

const (
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	s := settings{services: []int{1, 1000, 10000}, ways: regexp.MustCompile("")}
	s.options.Flags(flag.CommandLine)
	flag.Func("services", "numbers of Services, with commas, growing (default 1,1000,10000)", func(text string) error {
		s.services = nil
		for part := range strings.SplitSeq(text, ",") {
			n, err := strconv.Atoi(part)
			if err != nil || n < 1 || n > mostServices || len(s.services) > 0 && n <= s.services[len(s.services)-1] {
				return fmt.Errorf("%q is not a list of growing numbers from 1 to %d", text, mostServices)
			}
			s.services = append(s.services, n)
		}
		return nil
	})
	flag.IntVar(&s.rounds, "rounds", 5, "rounds for each number of Services; each has all balancers")
	flag.DurationVar(&s.duration, "duration", 2*time.Second, "time of one measurement of a rate")
	flag.IntVar(&s.changes, "changes", 5, "changes of endpoints in each balancer's part of a round")
	flag.Func("ways", "measure only the ways whose names match this regular expression (default all)", func(text string) (err error) {
		s.ways, err = regexp.Compile(text)
		return err
	})
	flag.StringVar(&s.results, "results", "kubernetes-performance.json", "the file for the results")
	flag.StringVar(&s.page, "page", "", "the file for the page; empty: standard output")
	flag.StringVar(&s.from, "from", "", "make the page from this file of results, and measure nothing")
	flag.Parse()
	if flag.NArg() > 0 || s.rounds < 1 || s.duration <= 0 || s.changes < 0 {
		fmt.Fprintln(os.Stderr, "bench: give at least one round, a duration above 0, and flags alone")
		os.Exit(exitUsage)
	}
	if o := s.options; s.from == "" && (o.Kube == "" || o.Programs == "" || o.Helm == "" || o.Chart == "") {
		fmt.Fprintln(os.Stderr, "bench: give --kube, --programs, --helm and --chart, or run `make bench-kube`")
		os.Exit(exitUsage)
	}
	told, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(told, s); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(exitFailed)
	}
}

func run(ctx context.Context, s settings) error {
	file := s.from
	if file == "" {
		file = s.results
		if err := measure(ctx, s); err != nil {
			return fmt.Errorf("%w; what was measured before is in %s, if anything was", err, file)
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var r results
	if err := json.Unmarshal(text, &r); err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	page := r.page()
	if s.page == "" {
		_, err = fmt.Print(page)
		return err
	}
	return os.WriteFile(s.page, []byte(page), 0o644)
}

// measure brings a cluster up, measures, and takes it down.
func measure(ctx context.Context, s settings) (err error) {
	c, err := cluster.Up(ctx, s.options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Down()) }()
	b, err := newBench(ctx, c, s)
	if err != nil {
		return err
	}
	for _, n := range s.services {
		if err := b.fill(ctx, n); err != nil {
			return err
		}
		for round := range s.rounds {
			if err := b.round(ctx, round); err != nil {
				return err
			}
		}
	}
	return nil
}
