// Udppath compares ways to answer datagrams, and to receive them: the kernel's sockets, blocking, spinning, in batches, and polling
// the driver; the UDP path's rings, sleeping, adaptive and spinning, from C and from Go; and peers, where this machine has them: libxdp's
// own socket, DPDK's testpmd over AF_XDP, and for receiving a program that drops all, which is the limit:
//
//	go run -exec sudo ./bench/udppath            writes a page to bench/results
//	go run -exec sudo ./bench/udppath --quick    one short round, to standard output alone
//
// A client and a server in network namespaces of their own have one link with one queue. The ways take turns, for several
// rounds, each in a process of its own on a CPU of its own. In each turn the client first asks one question after the
// other, for the round trip, and then keeps many questions open, for the answers a second. Then each way has a turn in which it
// only receives: the kernel makes frames on the client's CPU as fast as the link takes them. The ways of the kernel run without a
// program on the interface. It needs a C compiler; a peer that is missing is named with the reason.
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
	if text := os.Getenv(subjectVariable); text != "" {
		if err := subject(text); err != nil {
			fmt.Fprintln(os.Stderr, "subject:", err)
			os.Exit(1)
		}
		return
	}
	quick := flag.Bool("quick", false, "one short round, printed to standard output only")
	rounds := flag.Int("rounds", 7, "number of rounds; each way runs once in a round")
	dir := flag.String("results", "bench/results", "folder for the page")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	o := options{rounds: *rounds, each: 500 * time.Millisecond, frames: 1 << 20}
	if *quick {
		o = options{rounds: 1, each: 50 * time.Millisecond, frames: 1 << 16}
	}
	r, err := run(ctx, o)
	if err == nil {
		if *quick {
			err = r.page(os.Stdout)
		} else {
			err = r.write(filepath.Clean(*dir))
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "udppath:", err)
		os.Exit(1)
	}
}

// options limit the measurements.
type options struct {
	rounds int
	each   time.Duration // of the round trips, and of the answers a second
	frames int           // of a turn to receive
}

func run(ctx context.Context, o options) (r report, err error) {
	debug.SetGCPercent(-1) // a run allocates some megabytes
	if o.rounds < 1 {
		return r, errors.New("--rounds must be at least 1")
	}
	b, err := newBed(ctx)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	r = report{options: o, apart: b.apart(), missing: b.missing, results: map[string][]result{}, rates: map[string][]rate{}}
	for round := range o.rounds {
		for _, w := range ways {
			if !b.has(w) {
				continue
			}
			if !w.limit {
				got, err := b.echo(ctx, w, o.each)
				if err != nil {
					return r, fmt.Errorf("round %d, %s: %w", round+1, w.name, err)
				}
				r.results[w.name] = append(r.results[w.name], got)
			}
			got, err := b.receive(ctx, w, o.frames)
			if err != nil {
				return r, fmt.Errorf("round %d, %s, receiving: %w", round+1, w.name, err)
			}
			r.rates[w.name] = append(r.rates[w.name], got)
		}
	}
	return r, nil
}
