// Overload shows how long datagrams wait for a program that gets more than it can work off: with the kernel's
// socket, and with the UDP path's rings for three bounds of the delay:
//
//	go run -exec sudo ./bench/overload            writes a plot and a page to bench/results
//	go run -exec sudo ./bench/overload --quick    one short round, to standard output alone
//
// A client and a server in network namespaces of their own have one link with one queue. Each datagram has the
// time at which it was sent; the delay is that until the program begins to work on it, which takes workFor.
// Receivers take turns at each load, and so do loads, for several rounds.
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
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	quick := flag.Bool("quick", false, "one short round, printed to standard output only")
	dir := flag.String("results", "bench/results", "folder for the page and the plot")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	if err := run(ctx, *quick, *dir); err != nil {
		fmt.Fprintln(os.Stderr, "overload:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, quick bool, dir string) (err error) {
	debug.SetGCPercent(-1) // a run allocates some megabytes
	rounds, each := 5, 500*time.Millisecond
	if quick {
		rounds, each = 1, 300*time.Millisecond
	}
	b, err := newBed(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	r := report{rounds: rounds, each: each, results: map[string][][]result{}}
	for round := range rounds {
		for i, load := range loads {
			for _, name := range receivers() {
				got, err := b.measure(ctx, name, load, each)
				if err != nil {
					return fmt.Errorf("round %d, load %g, %s: %w", round+1, load, name, err)
				}
				if r.results[name] == nil {
					r.results[name] = make([][]result, len(loads))
				}
				r.results[name][i] = append(r.results[name][i], got)
			}
		}
	}
	if quick {
		return r.page(os.Stdout, "")
	}
	return r.write(filepath.Clean(dir))
}
