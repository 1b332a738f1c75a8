// Command pods compares the ways from one pod to another on one host. Rounds are interleaved, and ratios compare each
// round's measurements with the first way's:
//
//	plain           routed veths, with rules as kube-proxy and Calico write them
//	no-rules        the same without rules
//	bridge          a bridge instead of routes, with the rules
//	checked, bypass the shortcut in its modes, past the rules of plain
//	sockets         pairs of sockets
//	bypass+sockets  both
//
// the ways to a pod of another host, past the rules of both:
//
//	plain           the hosts' own path
//	checked, bypass the shortcuts of both hosts
//	steer           a port through an interface of its own, which is a shortcut of the first host, both ways
//
// and pairs of sockets on loopback, between one client and one server, and from nginx to nginx. It makes namespaces of its
// own, needs root, and nginx and wrk from Debian unless -nginx=false. It prints a table for each family; -json writes every
// round to a file.
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

type options struct {
	rounds   int
	duration time.Duration
	nginx    bool
	file     string
}

func main() {
	var o options
	flag.IntVar(&o.rounds, "rounds", 9, "number of rounds of each way")
	flag.DurationVar(&o.duration, "for", 300*time.Millisecond, "length of one measurement")
	flag.BoolVar(&o.nginx, "nginx", true, "also compare nginx in front of nginx, where each measurement takes at least a second")
	flag.StringVar(&o.file, "json", "", "file for the figures of each round")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := run(ctx, o); err != nil {
		fmt.Fprintf(os.Stderr, "pods: %v\n", err)
		os.Exit(1)
	}
}

// beds are the hosts of all ways.
type beds struct {
	ruled, bare *bed.Bed
	bridged     *bridged
}

func (b *beds) close() (err error) {
	for _, one := range []*bed.Bed{b.ruled, b.bare} {
		if one != nil {
			err = errors.Join(err, one.Close())
		}
	}
	if b.bridged != nil {
		err = errors.Join(err, b.bridged.lab.Close())
	}
	return err
}

func (b *beds) build(ctx context.Context) (err error) {
	if b.ruled, err = bed.New(ctx, 2); err != nil {
		return err
	}
	if _, err = b.ruled.Install(); err != nil {
		return err
	}
	if b.bare, err = bed.New(ctx, 2); err != nil {
		return err
	}
	if b.bridged, err = newBridged(ctx); err != nil {
		return err
	}
	return errors.Join(manyPorts(b.ruled.Pods[0]), manyPorts(b.bare.Pods[0]), manyPorts(b.bridged.pods[0]))
}

// manyPorts lets a client make more short connections than it has ports. By default each port stays taken for a minute, and with few
// left the search for one takes most of the time of connect(2).
func manyPorts(client *lab.Host) error {
	return errors.Join(client.SetSysctl("net.ipv4.ip_local_port_range", "1024 65535"), client.SetSysctl("net.ipv4.tcp_tw_reuse", "1"))
}

// report is the contents of the file of -json.
type report struct {
	Families map[string][]compare.Row `json:"families"`
	Across   map[string][]compare.Row `json:"across"` // to another host, by family
	Nginx    []nginxRow               `json:"nginx,omitempty"`
}

func run(ctx context.Context, o options) (err error) {
	b := &beds{}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.build(ctx); err != nil {
		return err
	}
	all := report{Families: map[string][]compare.Row{}}
	if o.nginx { // before this process is in a cgroup whose sockets are paired
		if all.Nginx, err = compareNginx(b.ruled.Pods[0], o.rounds, o.duration); err != nil {
			return err
		}
	}
	cgroup, leave, err := lab.EnterCgroup(fmt.Sprintf("shunt-bench-%d", os.Getpid()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, leave()) }()
	shortcuts, closeAll, err := b.shortcuts()
	defer closeAll()
	if err != nil {
		return err
	}
	paired := pairing(cgroup)
	shortcuts = append(shortcuts, paired, both("bypass+sockets", shortcuts[1], pairing(cgroup)))
	for _, family := range []string{"IPv4", "IPv6", "loopback"} {
		rows, err := b.compare(ctx, family, shortcuts, paired, o)
		if err != nil {
			return err
		}
		all.Families[family] = rows
		fmt.Printf("%s, medians of %d rounds of %s\n", family, o.rounds, o.duration)
		compare.Print(os.Stdout, rows)
	}
	if all.Across, err = across(ctx, o); err != nil {
		return err
	}
	for _, family := range []string{"IPv4", "IPv6"} {
		fmt.Printf("%s to another host, medians of %d rounds of %s\n", family, o.rounds, o.duration)
		compare.Print(os.Stdout, all.Across[family])
	}
	if o.file == "" {
		return nil
	}
	text, err := json.MarshalIndent(all, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(o.file, text, 0o644)
}

// compare measures all ways of a family, or those on loopback.
func (b *beds) compare(ctx context.Context, family string, shortcuts []compare.Way, paired compare.Way, o options) ([]compare.Row, error) {
	is6 := family == "IPv6"
	at, pod := b.ruled.Address(1, is6), b.ruled.Pods[1]
	if family == "loopback" {
		at, pod = netip.MustParseAddr("127.0.0.1"), b.ruled.Pods[0]
	}
	server, err := traffic.Serve(pod, netip.AddrPortFrom(at, 0))
	if err != nil {
		return nil, err
	}
	defer server.Close()
	ways := []compare.Way{{Name: "plain"}}
	if family == "loopback" {
		ways = append(ways, paired)
	} else {
		bare, err := traffic.Serve(b.bare.Pods[1], netip.AddrPortFrom(b.bare.Address(1, is6), 0))
		if err != nil {
			return nil, err
		}
		defer bare.Close()
		bridge, err := b.bridged.serve(is6)
		if err != nil {
			return nil, err
		}
		defer bridge.Close()
		ways = append(ways, compare.Way{Name: "no-rules", From: b.bare.Pods[0], To: bare.Address}, compare.Way{Name: "bridge", From: b.bridged.pods[0], To: bridge.Address})
		ways = append(ways, shortcuts...)
	}
	return compare.Run(ctx, compare.Options{From: b.ruled.Pods[0], To: server.Address, Kinds: traffic.Kinds, Ways: ways, Rounds: o.rounds, Duration: o.duration})
}

// shortcuts are the ways by the shortcut's modes.
func (b *beds) shortcuts() (ways []compare.Way, closeAll func(), err error) {
	var open []*watch.Watch
	closeAll = func() {
		for _, w := range open {
			_ = w.Close() // the namespaces go
		}
	}
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		w, err := watch.Open(watch.Options{Mode: mode, Find: watch.Fixed(b.ruled.Watched()...), In: b.ruled.Node.Run})
		if err != nil {
			return nil, closeAll, err
		}
		open = append(open, w)
		if err := w.Suspend(); err != nil {
			return nil, closeAll, err
		}
		ways = append(ways, compare.Way{Name: string(mode), Enter: w.Resume, Leave: w.Suspend})
	}
	return ways, closeAll, nil
}

// both are two ways at once.
func both(name string, one, other compare.Way) compare.Way {
	return compare.Way{
		Name:  name,
		Enter: func() error { return errors.Join(one.Enter(), other.Enter()) },
		Leave: func() error { return errors.Join(other.Leave(), one.Leave()) },
	}
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
