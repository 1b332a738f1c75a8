package demo

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/compare"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"golang.org/x/sys/unix"
)

// chosen is the interface, on both hosts, that a port is steered through.
const chosen = "eth1"

// secondCable connects the hosts once more. No route of this host leads there; the other host answers the pod by it.
func (d *demo) secondCable(ctx context.Context) (nextHop netip.Addr, err error) {
	end := func(i int) lab.End {
		return lab.End{Host: d.sides[i].bed.Node, Interface: chosen, IPv4: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, 8, byte(i + 1)}), 24)}
	}
	here, there := end(0), end(1)
	if err := d.bed.Lab.Connect(here, there, lab.Cable{}); err != nil {
		return nextHop, err
	}
	pod := netip.PrefixFrom(d.bed.Address(0, false), 32)
	if err := there.Host.AddRoute(lab.Route{To: pod, Via: here.IPv4.Addr(), Interface: chosen}); err != nil {
		return nextHop, err
	}
	return there.IPv4.Addr(), d.bed.Lab.Ready(ctx)
}

// steered shows a port that goes through an interface of its own, both ways.
func (d *demo) steered(ctx context.Context) error {
	nextHop, err := d.secondCable(ctx)
	if err != nil {
		return err
	}
	to := d.farServer.Address
	steer := watch.Steer{Name: "web", Network: netip.PrefixFrom(to.Addr(), to.Addr().BitLen()), Interface: chosen, NextHop: nextHop,
		Ports: []watch.Port{{Protocol: unix.IPPROTO_TCP, Number: to.Port()}, {Protocol: unix.IPPROTO_UDP, Number: to.Port()}}}
	d.Say("  pod1 eth0 ══ veth1 node %s ══ %s node2 %s    the routes lead by eth0\n\n", chosen, chosen, nextHop)
	w, err := watch.Open(watch.Options{Mode: shortcut.Checked, Find: watch.Fixed(d.bed.Watched()...), Steers: []watch.Steer{steer}, In: d.bed.Node.Run})
	if err != nil {
		return err
	}
	d.opened, d.sides[0].watch = append(d.opened, w), w
	ready := func(s watch.Status) bool { return len(s.Steers) == 1 && s.Steers[0].State == shortcut.Taken.String() }
	if _, err := d.await(w, ready); err != nil {
		return err
	}
	_, forwarded, err := d.use(ctx, to, nil)
	if err != nil {
		return err
	}
	s, err := w.Status()
	if err != nil {
		return err
	}
	took := s.Steers[0].Counts["taken"].Packets
	d.Claim(forwarded.none() && took+forwarded.all >= 2*requestsEach, "port %d of %s, %d requests: the host's rules have seen %s, and %d went through %s, both ways",
		to.Port(), to.Addr(), requestsEach, forwarded, took, chosen)
	if err := d.fallsBack(ctx, w, ready); err != nil {
		return err
	}
	if err := w.Suspend(); err != nil {
		return err
	}
	d.Say("\n  medians of %d rounds in turn, %d ms each; figures are shown, not claimed\n\n", acrossRounds, roundFor.Milliseconds())
	d.facts.SteerRows, err = compare.Run(ctx, compare.Options{
		From: d.bed.Pods[0], To: to, Kinds: traffic.Kinds, Rounds: acrossRounds, Duration: roundFor,
		Ways: []compare.Way{{Name: "plain"}, {Name: "steer", Enter: w.Resume, Leave: w.Suspend}},
	})
	if err == nil {
		compare.Print(d.Out, d.facts.SteerRows)
	}
	return err
}

// fallsBack removes the carrier of the chosen interface while a connection uses it.
func (d *demo) fallsBack(ctx context.Context, w *watch.Watch, ready func(watch.Status) bool) error {
	c, err := d.dial(ctx, d.farServer.Address)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing is lost
	if err := ask(c); err != nil {
		return err
	}
	other := d.sides[1].bed.Node
	begin := time.Now()
	if err := other.SetUp(chosen, false); err != nil { // its route by the interface goes too
		return err
	}
	s, err := d.await(w, func(s watch.Status) bool { return !ready(s) })
	if err != nil {
		return err
	}
	took := time.Since(begin)
	d.Claim(ask(c) == nil, "%s loses its carrier, and shunt removes the steer %.0f ms later: a connection goes on by the routes", chosen, float64(took.Microseconds())/1000)
	d.Say("    %s: %s\n", s.Steers[0].State, s.Steers[0].Why)
	if err := other.SetUp(chosen, true); err != nil {
		return err
	}
	if err := other.AddRoute(lab.Route{To: netip.PrefixFrom(d.bed.Address(0, false), 32), Via: netip.AddrFrom4([4]byte{192, 168, 8, 1}), Interface: chosen}); err != nil {
		return fmt.Errorf("make the other host answer by %s again: %w", chosen, err)
	}
	_, err = d.await(w, ready)
	return err
}
