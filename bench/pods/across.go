package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/compare"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"golang.org/x/sys/unix"
)

// port is the port of the other host's pod: a steer is for a port.
const port = 8080

// pair is two hosts with a pod each, and the watches of all ways.
type pair struct {
	beds [2]*bed.Bed
	open []*watch.Watch
}

// across compares the ways to a pod of another host: by the shortcuts of both hosts, and by a steer of the first. The rows are by family.
func across(ctx context.Context, o options) (all map[string][]compare.Row, err error) {
	p := &pair{}
	if p.beds, err = bed.NewPair(ctx, 1, 1); err != nil {
		return nil, err
	}
	defer func() {
		for _, w := range p.open {
			err = errors.Join(err, w.Close())
		}
		err = errors.Join(err, p.beds[0].Close()) // and the other with it
	}()
	if err := manyPorts(p.beds[0].Pods[0]); err != nil {
		return nil, err
	}
	for _, b := range p.beds {
		if _, err := b.Install(); err != nil {
			return nil, err
		}
	}
	ways := []compare.Way{{Name: "plain"}}
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		way, err := p.way(string(mode), watch.Options{Mode: mode, FindFar: watch.Beyond(bed.Uplink)}, p.beds[:]...)
		if err != nil {
			return nil, err
		}
		ways = append(ways, way)
	}
	steer, err := p.way("steer", watch.Options{Mode: shortcut.Checked, Steers: p.steers()}, p.beds[0])
	if err != nil {
		return nil, err
	}
	ways = append(ways, steer)
	all = map[string][]compare.Row{}
	for _, family := range []string{"IPv4", "IPv6"} {
		server, err := traffic.Serve(p.beds[1].Pods[0], netip.AddrPortFrom(p.beds[1].Address(0, family == "IPv6"), port))
		if err != nil {
			return nil, err
		}
		all[family], err = compare.Run(ctx, compare.Options{From: p.beds[0].Pods[0], To: server.Address, Kinds: traffic.Kinds, Ways: ways, Rounds: o.rounds, Duration: o.duration})
		server.Close()
		if err != nil {
			return nil, err
		}
	}
	return all, p.used()
}

// steers are for the other host's pod, by the uplink that the routes lead by, too.
func (p *pair) steers() (all []watch.Steer) {
	for _, is6 := range []bool{false, true} {
		to := p.beds[1].Address(0, is6)
		s := watch.Steer{Name: fmt.Sprint("to ", to), Network: netip.PrefixFrom(to, to.BitLen()), Interface: bed.Uplink,
			Ports: []watch.Port{{Protocol: unix.IPPROTO_TCP, Number: port}, {Protocol: unix.IPPROTO_UDP, Number: port}}}
		for _, i := range p.beds[1].Node.Interfaces() {
			if i.Name == bed.Uplink {
				s.NextHop = i.IPv4.Addr()
				if is6 {
					s.NextHop = i.IPv6.Addr()
				}
			}
		}
		all = append(all, s)
	}
	return all
}

// way opens a watch on each of the hosts, which is suspended until the way is entered.
func (p *pair) way(name string, opts watch.Options, on ...*bed.Bed) (compare.Way, error) {
	var own []*watch.Watch
	for _, b := range on {
		opts.Find, opts.In = watch.Fixed(b.Watched()...), b.Node.Run
		w, err := watch.Open(opts)
		if err != nil {
			return compare.Way{}, err
		}
		p.open, own = append(p.open, w), append(own, w)
		if err := w.Suspend(); err != nil {
			return compare.Way{}, err
		}
	}
	each := func(do func(*watch.Watch) error) func() error {
		return func() (err error) {
			for _, w := range own {
				err = errors.Join(err, do(w))
			}
			return err
		}
	}
	return compare.Way{Name: name, Enter: each((*watch.Watch).Resume), Leave: each((*watch.Watch).Suspend)}, nil
}

// used fails if a way took no packets: its rows would be those of the plain path.
func (p *pair) used() error {
	var errs []error
	for i, w := range p.open {
		s, err := w.Status()
		if err == nil && s.Counts["taken"].Packets == 0 {
			err = fmt.Errorf("no packet took the shortcut: %v", s.Counts)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("watch %d of the ways to another host: %w", i, err))
		}
	}
	return errors.Join(errs...)
}
