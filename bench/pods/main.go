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

	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/compare"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
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
	all := map[string][]compare.Row{}
	for _, family := range []string{"IPv4", "IPv6"} {
		server, err := traffic.Serve(b.Pods[1], netip.AddrPortFrom(b.Address(1, family == "IPv6"), 0))
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
