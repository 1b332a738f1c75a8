package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/compare"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/internal/pod/watch"
)

// acrossRounds is the number of rounds of every way to the other host: 3 rounds of 4 kinds by 3 ways take 2 s.
const acrossRounds = 3

// side is one of the two hosts.
type side struct {
	bed   *bed.Bed
	rules *plain.Rules
	watch *watch.Watch // the watch that is in use
}

func (s *side) seen() (packets uint64, err error) {
	err = s.bed.Node.Run(func() (err error) {
		packets, err = s.rules.Seen()
		return err
	})
	return packets, err
}

// both returns the number of packets that the rules of each host have seen.
func (d *demo) both() (seen [2]uint64, err error) {
	for i := range d.sides {
		n, fault := d.sides[i].seen()
		seen[i], err = n, errors.Join(err, fault)
	}
	return seen, err
}

// across shows a connection to a pod of another host, whose packets go past the stacks of both.
func (d *demo) across(ctx context.Context) (err error) {
	if d.farServer, err = traffic.Serve(d.sides[1].bed.Pods[0], netip.AddrPortFrom(d.sides[1].bed.Address(0, false), port)); err != nil {
		return err
	}
	d.Say("  pod1 eth0 %s ══ veth1 node eth0 ══ eth0 node2 veth1 ══ eth0 %s n2pod1\n\n", d.bed.Address(0, false), d.farServer.Address.Addr())
	before, err := d.both()
	if err != nil {
		return err
	}
	if _, _, err := d.use(ctx, d.farServer.Address, nil); err != nil {
		return err
	}
	after, err := d.both()
	if err != nil {
		return err
	}
	d.Claim(after[0]-before[0] >= 2*requestsEach && after[1]-before[1] >= 2*requestsEach,
		"plain, %d requests: the rules of the two hosts have seen %d and %d packets", requestsEach, after[0]-before[0], after[1]-before[1])
	ways := []compare.Way{{Name: "plain"}}
	for _, mode := range []shortcut.Mode{shortcut.Checked, shortcut.Bypass} {
		if err := d.acrossBy(ctx, mode); err != nil {
			return err
		}
		watches := [2]*watch.Watch{d.sides[0].watch, d.sides[1].watch}
		way := compare.Way{
			Name:  string(mode),
			Enter: func() error { return errors.Join(watches[0].Resume(), watches[1].Resume()) },
			Leave: func() error { return errors.Join(watches[0].Suspend(), watches[1].Suspend()) },
		}
		if err := way.Leave(); err != nil {
			return err
		}
		ways = append(ways, way)
	}
	d.Say("\n  medians of %d rounds in turn, %d ms each; figures are shown, not claimed\n\n", acrossRounds, roundFor.Milliseconds())
	d.facts.AcrossRows, err = compare.Run(ctx, compare.Options{
		From: d.bed.Pods[0], To: d.farServer.Address, Kinds: traffic.Kinds, Rounds: acrossRounds, Duration: roundFor, Ways: ways,
	})
	if err == nil {
		compare.Print(d.Out, d.facts.AcrossRows)
	}
	return err
}

// acrossBy uses a connection whose packets take the shortcut of both hosts, in a mode.
func (d *demo) acrossBy(ctx context.Context, mode shortcut.Mode) error {
	for i := range d.sides {
		s := &d.sides[i]
		w, err := watch.Open(watch.Options{Mode: mode, Find: watch.Fixed(s.bed.Watched()...), FindFar: watch.Beyond(bed.Uplink), In: s.bed.Node.Run})
		if err != nil {
			return err
		}
		s.watch = w
		d.opened = append(d.opened, w)
		if err := awaitNetworks(w); err != nil {
			return err
		}
	}
	c, err := d.dial(ctx, d.farServer.Address)
	if err != nil {
		return err
	}
	for i := range d.sides {
		if err := settleBoth(c, &d.sides[i]); err != nil {
			return errors.Join(err, c.Close())
		}
	}
	before, err := d.both()
	for range requestsEach {
		if err = errors.Join(err, ask(c)); err != nil {
			return errors.Join(err, c.Close())
		}
	}
	if err := end(c); err != nil {
		return err
	}
	after, err := d.both()
	d.Claim(after == before, "%s, %d requests of a connection that takes the shortcuts of both: their rules have seen %d and %d packets",
		mode, requestsEach, after[0]-before[0], after[1]-before[1])
	return err
}

// awaitNetworks waits until the networks of the other host may take the shortcut.
func awaitNetworks(w *watch.Watch) error {
	for end := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		s, err := w.Status()
		if err != nil {
			return err
		}
		taken := 0
		for _, f := range s.Far {
			if f.State == shortcut.Taken.String() {
				taken++
			}
		}
		if taken == 2 { // IPv4 and IPv6
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("the other host's networks are left alone: %+v", s.Far)
		}
	}
}

// settleBoth sends requests until the packets that a host's pod sends, and the packets that come in for it, take the shortcut.
func settleBoth(c net.Conn, s *side) error {
	counts := func() (out, in uint64, err error) {
		st, err := s.watch.Status()
		return st.From[s.bed.Interface(0)]["taken"].Packets, st.From[bed.Uplink]["taken"].Packets, err
	}
	out, in, err := counts()
	for end := time.Now().Add(patience); err == nil; {
		if err = ask(c); err != nil {
			return err
		}
		var nowOut, nowIn uint64
		if nowOut, nowIn, err = counts(); nowOut > out && nowIn > in {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("the connection has not taken the shortcut of both hosts within %s", patience)
		}
	}
	return err
}
