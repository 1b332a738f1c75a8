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
	port  uint16       // the client's, of the connection that is in use
	late  uint64       // packets before that connection that the watch had no CPU time for
}

// seen is a number of packets of one connection that a host's rules have seen.
type seen struct {
	all  uint64
	late uint64 // these of them that were left to the rules because the watch had no CPU time to judge for a second
}

func (s seen) since(before seen) seen { return seen{s.all - before.all, s.late - before.late} }

// none reports whether all packets took the shortcut while shunt could judge the pods, and it could for most of the requests.
func (s seen) none() bool { return s.all <= min(s.late, requestsEach) }

func (s seen) String() string {
	if s.all == 0 || s.late == 0 {
		return fmt.Sprintf("%d packets", s.all)
	}
	return fmt.Sprintf("%d packets (%d while shunt had no CPU time to judge the pods)", s.all, s.late)
}

// follow counts from now on, and packets of a connection that begins only: its client has the port.
func (s *side) follow(port uint16) (err error) {
	s.port = port
	if s.late, err = s.unwatched(); err != nil {
		return err
	}
	return s.bed.Node.Run(func() error { return s.rules.Count(port) })
}

// seen returns the packets of that connection until now.
func (s *side) seen() (n seen, err error) {
	err = s.bed.Node.Run(func() (err error) {
		n.all, err = s.rules.Counted(s.port)
		return err
	})
	if err == nil {
		n.late, err = s.unwatched()
	}
	return seen{n.all, n.late - s.late}, err
}

func (s *side) unwatched() (packets uint64, err error) {
	if s.watch == nil {
		return 0, nil
	}
	st, err := s.watch.Status()
	packets = st.Counts["unwatched"].Packets
	for _, steer := range st.Steers {
		packets += steer.Counts["unwatched"].Packets
	}
	return packets, err
}

// both returns the numbers of packets that the rules of each host have seen.
func (d *demo) both() (of [2]seen, err error) {
	for i := range d.sides {
		n, fault := d.sides[i].seen()
		of[i], err = n, errors.Join(err, fault)
	}
	return of, err
}

// across shows a connection to a pod of another host, whose packets go past the stacks of both.
func (d *demo) across(ctx context.Context) (err error) {
	if d.farServer, err = traffic.Serve(d.sides[1].bed.Pods[0], netip.AddrPortFrom(d.sides[1].bed.Address(0, false), port)); err != nil {
		return err
	}
	d.Say("  pod1 eth0 %s ══ veth1 node eth0 ══ eth0 node2 veth1 ══ eth0 %s n2pod1\n\n", d.bed.Address(0, false), d.farServer.Address.Addr())
	_, here, err := d.use(ctx, d.farServer.Address, nil)
	if err != nil {
		return err
	}
	there, err := d.sides[1].seen()
	if err != nil {
		return err
	}
	d.Claim(here.all >= 2*requestsEach && there.all >= 2*requestsEach, "plain, %d requests: the rules of the two hosts have seen %s and %s", requestsEach, here, there)
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
	if err = errors.Join(err, askAll(c)); err != nil {
		return errors.Join(err, c.Close())
	}
	if err := end(c); err != nil {
		return err
	}
	after, err := d.both()
	here, there := after[0].since(before[0]), after[1].since(before[1])
	d.Claim(here.none() && there.none(), "%s, %d requests of a connection that takes the shortcuts of both: their rules have seen %s and %s", mode, requestsEach, here, there)
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
