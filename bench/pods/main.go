// Command pods compares the ways from one pod to another on one host: plain, and the shortcut in its modes.
// Rounds are interleaved, and ratios are those of each round's measurements. It makes namespaces of its own,
// needs root, and prints a table for each family; -json writes every round to a file.
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
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/compare"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/internal/pod/watch"
)

func main() {
	rounds := flag.Int("rounds", 9, "rounds of every way")
	duration := flag.Duration("for", 300*time.Millisecond, "length of one measurement")
	file := flag.String("json", "", "file for every round")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := run(ctx, *rounds, *duration, *file); err != nil {
		fmt.Fprintf(os.Stderr, "pods: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, rounds int, duration time.Duration, file string) (err error) {
	b, err := bed.New(ctx, 2)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	if _, err := b.Install(); err != nil {
		return err
	}
	ways := []compare.Way{{Name: "plain"}}
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		w, err := watch.Open(watch.Options{Mode: mode, Find: watch.Fixed(b.Watched()...), In: b.Node.Run})
		if err != nil {
			return err
		}
		defer w.Close() //nolint:errcheck // the namespaces go
		if err := w.Suspend(); err != nil {
			return err
		}
		ways = append(ways, compare.Way{Name: string(mode), Enter: w.Resume, Leave: w.Suspend})
	}
	cgroup, leave, err := lab.EnterCgroup(fmt.Sprintf("shunt-bench-%d", os.Getpid()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, leave()) }()
	paired := pairing(cgroup)
	ways = append(ways, paired)
	all := map[string][]compare.Row{}
	for _, family := range []string{"IPv4", "IPv6", "loopback"} {
		at, pod := b.Address(1, family == "IPv6"), b.Pods[1]
		if family == "loopback" {
			at, pod, ways = netip.MustParseAddr("127.0.0.1"), b.Pods[0], []compare.Way{{Name: "plain"}, paired}
		}
		server, err := traffic.Serve(pod, netip.AddrPortFrom(at, 0))
		if err != nil {
			return err
		}
		all[family], err = compare.Run(ctx, compare.Options{
			From: b.Pods[0], To: server.Address, Kinds: traffic.Kinds, Ways: ways, Rounds: rounds, Duration: duration,
		})
		server.Close()
		if err != nil {
			return err
		}
		fmt.Printf("%s, medians of %d rounds of %s\n", family, rounds, duration)
		compare.Print(os.Stdout, all[family])
	}
	if file == "" {
		return nil
	}
	text, err := json.MarshalIndent(all, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
}

// pairing is the way by socket pairs, of the sockets that are made while it is entered.
func pairing(cgroup string) compare.Way {
	var pairs *sockets.Sockets
	return compare.Way{
		Name: "sockets",
		Enter: func() (err error) {
			pairs, err = sockets.Open(sockets.Options{Cgroups: []string{cgroup}, Limit: sockets.LimitDefault})
			return err
		},
		Leave: func() error {
			counts, err := pairs.Counts()
			if err == nil && counts["taken"].Packets == 0 && counts["joined"].Packets > 0 {
				err = fmt.Errorf("nothing went from socket to socket: %v", counts)
			}
			_, shutErr := pairs.Shut(time.Second)
			return errors.Join(err, shutErr, pairs.Close())
		},
	}
}
