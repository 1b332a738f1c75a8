// Package demo shows the pod shortcuts to a user who has nothing but the binary: two pods on one host and one on
// another, with netfilter rules as kube-proxy and Calico write them, in network namespaces of its own. Each line with a
// claim is a Claim, which is checked in this run. No claim depends on speed, which is only shown.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/compare"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/shunt-lb/shunt/internal/story"
	"golang.org/x/sys/unix"
)

const (
	// patience limits every wait for something that takes milliseconds.
	patience = 5 * time.Second
	// rounds is the number of rounds of every way, interleaved: 5 rounds of 4 kinds by 3 ways take 4 s.
	rounds   = 5
	roundFor = 60 * time.Millisecond
	// port is the port of the second pod's server.
	port = 8080
)

// vip is the address of a service with one endpoint, the second pod.
var vip = netip.MustParseAddrPort("10.97.0.10:80")

// Options configure the demo.
type Options struct {
	Out io.Writer // where the story is printed
}

// Facts are the demo's findings; `shunt demo accelerate -o json` prints them as JSON.
type Facts struct {
	OK      bool    `json:"ok"` // every claim is true
	ID      string  `json:"id"`
	Seconds float64 `json:"seconds"`
	// Checked and Bypass count packets by outcome in the modes.
	Checked watch.Status  `json:"checked"`
	Bypass  watch.Status  `json:"bypass"`
	Effect  float64       `json:"rule_took_effect_milliseconds"`
	Rows    []compare.Row `json:"rows"`
	// AcrossRows has the ways to a pod of the other host.
	AcrossRows []compare.Row `json:"across_rows"`
	// SteerRows has the ways of a port that is steered through another interface.
	SteerRows []compare.Row `json:"steer_rows"`
	// Sockets has the results of the test of paired sockets on this kernel. The other two fields are microseconds of a request
	// through a proxy on loopback.
	Sockets     []sockets.Check `json:"sockets"`
	ProxyPlain  float64         `json:"proxy_plain_microseconds"`
	ProxyPaired float64         `json:"proxy_paired_microseconds"`
	Claims      story.Claims    `json:"claims"`
}

// demo is one run.
type demo struct {
	*story.Teller
	facts           *Facts
	bed             *bed.Bed
	rules           *plain.Rules
	server          *traffic.Server
	checked, bypass *watch.Watch
	sides           [2]side // the host, and the other one
	farServer       *traffic.Server
	opened          []*watch.Watch // watches of the way to the other host
	dialled         uint16         // connections
}

// Run runs the whole demo. It cleans up before it returns. A step that failed, or a statement that turned out to be false, is
// a claim that makes Facts.OK false. The error is ctx's if ctx ended, or that of a failed cleanup.
func Run(parent context.Context, opts Options) (*Facts, error) {
	d := &demo{Teller: story.NewTeller(opts.Out), facts: &Facts{Rows: []compare.Row{}, AcrossRows: []compare.Row{}, SteerRows: []compare.Row{}}}
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(parent, time.Minute, errors.New("the demo took longer than a minute"))
	defer cancel()
	if fault := d.story(ctx); fault != nil && parent.Err() == nil {
		d.Claim(false, "%v", fault)
	}
	err := errors.Join(parent.Err(), d.takeDown())
	d.facts.Seconds = time.Since(begin).Seconds()
	d.facts.Claims = d.Claims
	d.facts.OK = err == nil && d.Claims.Untrue() == 0
	return d.facts, err
}

// story runs the steps in the order in which they are printed.
func (d *demo) story(ctx context.Context) error {
	return d.Tell(ctx,
		story.Step("Two pods on one host", d.build),
		story.Step("The plain path", d.plainPath),
		story.Step("The shortcut, checked", d.checkedPath),
		story.Step("Nothing of yours is skipped silently", d.effects),
		story.Step("The shortcut, bypass", d.bypassPath),
		story.Step("Side by side", d.measure),
		story.Step("A pod of another host", d.across),
		story.Step("A port through an interface of its own", d.steered),
		story.Step("Two sockets of one host", d.socketPairs),
		story.Step("What is skipped", d.skipped),
	)
}

func (d *demo) build(ctx context.Context) (err error) {
	pair, err := bed.NewPair(ctx, 2, 1)
	if err != nil {
		return err
	}
	d.bed = pair[0] // closing it closes the other
	d.facts.ID = d.bed.Lab.ID()
	d.rules, err = d.bed.Install(plain.Service{Address: vip, Endpoint: netip.AddrPortFrom(d.bed.Address(1, false), port), Protocol: unix.IPPROTO_TCP})
	if err != nil {
		return err
	}
	farRules, err := pair[1].Install()
	if err != nil {
		return err
	}
	d.sides = [2]side{{bed: pair[0], rules: d.rules}, {bed: pair[1], rules: farRules}}
	if d.server, err = traffic.Serve(d.bed.Pods[1], netip.AddrPortFrom(d.bed.Address(1, false), port)); err != nil {
		return err
	}
	d.Say("  pod1 eth0 %s ══ veth1 ┐\n", d.bed.Address(0, false))
	d.Say("                             ├ node: netfilter, conntrack, routes\n")
	d.Say("  pod2 eth0 %s ══ veth2 ┘\n\n", d.bed.Address(1, false))
	d.Claim(true, "a host and two pods (namespaces shunt-%s-…), %d services of %d endpoints, and a policy for each pod", d.facts.ID, plain.Services+1, plain.Endpoints)
	return nil
}

// use opens a connection to an address, sends requests over it, and closes it. forwarded is the number of its packets that
// the host has forwarded; with a watch, the number since the connection took its shortcut, and begun is the number before
// that.
func (d *demo) use(ctx context.Context, address netip.AddrPort, way *watch.Watch) (begun, forwarded seen, err error) {
	c, err := d.dial(ctx, address)
	if err != nil {
		return begun, forwarded, err
	}
	if way != nil {
		err = settle(c, way)
		if err == nil {
			begun, err = d.sides[0].seen()
		}
	}
	if err = errors.Join(err, askAll(c)); err != nil {
		return begun, forwarded, errors.Join(err, c.Close())
	}
	if err := end(c); err != nil {
		return begun, forwarded, err
	}
	all, err := d.sides[0].seen()
	return begun, all.since(begun), err
}

// settle sends requests until a connection takes the shortcut.
func settle(c net.Conn, w *watch.Watch) error {
	first, _, err := taken(w, "")
	for end := time.Now().Add(patience); err == nil; {
		if err = ask(c); err != nil {
			return err
		}
		var now uint64
		if now, _, err = taken(w, ""); now > first {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("the connection has not taken the shortcut within %s", patience)
		}
	}
	return err
}

const (
	requestsEach = 100
	firstPort    = 20000 // below the ports that the kernel gives to clients
)

// dial opens a connection from a port of its own, so that late packets of an earlier connection do not count as its packets.
func (d *demo) dial(ctx context.Context, address netip.AddrPort) (net.Conn, error) {
	d.dialled++
	from := netip.AddrPortFrom(d.bed.Address(0, false), firstPort+d.dialled)
	if err := errors.Join(d.sides[0].follow(from.Port()), d.sides[1].follow(from.Port())); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return d.bed.Pods[0].DialFrom(ctx, "tcp", from, address.String())
}

// ask sends an octet, and waits for it to come back.
func ask(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	octet := []byte{'r'}
	if _, err := c.Write(octet); err != nil {
		return err
	}
	_, err := io.ReadFull(c, octet)
	return err
}

func askAll(c net.Conn) error {
	for range requestsEach {
		if err := ask(c); err != nil {
			return err
		}
	}
	return nil
}

// end closes the client's side, and waits for the server to close.
func end(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	err := c.(*net.TCPConn).CloseWrite()
	if err == nil {
		if n, readErr := c.Read(make([]byte, 1)); n != 0 || !errors.Is(readErr, io.EOF) {
			err = fmt.Errorf("close a connection: read %d octets, %w", n, readErr)
		}
	}
	return errors.Join(err, c.Close())
}

func (d *demo) plainPath(ctx context.Context) error {
	_, forwarded, err := d.use(ctx, d.server.Address, nil)
	if err != nil {
		return err
	}
	d.Claim(forwarded.all >= 2*requestsEach, "a connection with %d requests: the host's rules have seen %s", requestsEach, forwarded)
	return nil
}

// open opens the shortcut, and waits until both pods may take it.
func (d *demo) open(mode shortcut.Mode) (*watch.Watch, error) {
	w, err := watch.Open(watch.Options{Mode: mode, Find: watch.Fixed(d.bed.Watched()...), In: d.bed.Node.Run})
	if err != nil {
		return nil, err
	}
	d.sides[0].watch = w
	s, err := w.Status()
	for _, p := range s.Pods {
		if p.State != shortcut.Taken.String() {
			err = errors.Join(err, fmt.Errorf("%s is left alone: %s: %s", p.Address, p.State, p.Why))
		}
	}
	if err == nil {
		d.Say("  program   sh_pod on veth1 and veth2, by %s\n", s.Pods[0].Attach)
		for _, p := range s.Pods {
			d.Say("  pod       %-20s behind %s may take the shortcut\n", p.Address, p.Interface)
		}
		d.Say("\n")
	}
	return w, err
}

// taken returns the number of packets that took the shortcut, and the number that was left to the stack for a reason.
func taken(w *watch.Watch, reason string) (took, left uint64, err error) {
	s, err := w.Status()
	return s.Counts["taken"].Packets, s.Counts[reason].Packets, err
}

func (d *demo) checkedPath(ctx context.Context) (err error) {
	if d.checked, err = d.open(shortcut.Checked); err != nil {
		return err
	}
	before, _, err := taken(d.checked, "")
	if err != nil {
		return err
	}
	begun, forwarded, err := d.use(ctx, d.server.Address, d.checked)
	if err != nil {
		return err
	}
	after, _, err := taken(d.checked, "")
	d.Claim(begun.all >= 3, "a connection begins: the host's rules have seen its SYN, SYN and ACK, ACK and the packets before shunt had told conntrack about it, %s", begun)
	d.Claim(forwarded.none(), "of its %d later requests they have seen %s", requestsEach, forwarded)
	d.Claim(after-before+forwarded.all >= 2*requestsEach, "%d packets took the shortcut, both FINs among them", after-before)
	return err
}

func (d *demo) bypassPath(ctx context.Context) (err error) {
	if err := d.checked.Suspend(); err != nil {
		return err
	}
	if d.bypass, err = d.open(shortcut.Bypass); err != nil {
		return err
	}
	_, forwarded, err := d.use(ctx, d.server.Address, nil)
	if err != nil {
		return err
	}
	took, _, err := taken(d.bypass, "")
	if err != nil {
		return err
	}
	d.Claim(forwarded.none() && took+forwarded.all >= 2*requestsEach, "a connection with %d requests: the host's rules have seen %s, and %d took the shortcut", requestsEach, forwarded, took)
	if _, _, err := d.use(ctx, vip, nil); err != nil {
		return err
	}
	_, nat, err := taken(d.bypass, "nat")
	d.Claim(nat > 0, "a connection to the service %s works here too: %d answers went back through the translation", vip, nat)
	return err
}

// forwarded returns the number of packets that the host has forwarded.
func (d *demo) forwarded() (packets uint64, err error) {
	err = d.bed.Node.Run(func() (err error) {
		packets, err = d.rules.Seen()
		return err
	})
	return packets, err
}

// measure compares the three ways.
func (d *demo) measure(ctx context.Context) error {
	if err := d.bypass.Suspend(); err != nil {
		return err
	}
	begin, err := d.forwarded()
	if err != nil {
		return err
	}
	d.Say("  medians of %d rounds in turn, %d ms each; figures are shown, not claimed\n\n", rounds, roundFor.Milliseconds())
	d.facts.Rows, err = compare.Run(ctx, compare.Options{
		From: d.bed.Pods[0], To: d.server.Address, Kinds: traffic.Kinds, Rounds: rounds, Duration: roundFor,
		Ways: []compare.Way{
			{Name: "plain"},
			{Name: "checked", Enter: d.checked.Resume, Leave: d.checked.Suspend},
			{Name: "bypass", Enter: d.bypass.Resume, Leave: d.bypass.Suspend},
		},
	})
	if err != nil {
		return err
	}
	compare.Print(d.Out, d.facts.Rows)
	after, err := d.forwarded()
	if err != nil {
		return err
	}
	if d.facts.Checked, err = d.checked.Status(); err != nil {
		return err
	}
	d.facts.Bypass, err = d.bypass.Status()
	d.Say("\n")
	d.Claim(after > begin && d.facts.Checked.Counts["taken"].Packets > 0 && d.facts.Bypass.Counts["taken"].Packets > 0,
		"all three paths delivered all packets: %d packets forwarded, %d by the shortcut checked, %d by bypass",
		after-begin, d.facts.Checked.Counts["taken"].Packets, d.facts.Bypass.Counts["taken"].Packets)
	return err
}

// skipped prints the parts of the stack that the shortcut skips.
func (d *demo) skipped(context.Context) error {
	d.Say("                     plain   checked              bypass\n")
	d.Say("  netfilter          all     how it begins        nothing\n")
	d.Say("  conntrack          all     how it begins; the   nothing\n")
	d.Say("                             entry is kept alive\n")
	d.Say("  routing, TTL       all     how it begins        nothing\n")
	d.Say("  qdisc, tc          all     a pod whose interface has any is left alone\n")
	d.Say("  tcpdump on a veth  both    what its own pod sent\n")
	d.Say("  counters of rules  all     the first packets    nothing\n")
	d.Say("  A steered port skips the same as bypass, both ways; paired sockets skip everything, except for how a connection begins and ends.\n")
	return nil
}

// takeDown removes everything.
func (d *demo) takeDown() error {
	var errs []error
	for _, w := range append(d.opened, d.checked, d.bypass) {
		if w != nil {
			errs = append(errs, w.Close())
		}
	}
	for _, s := range []*traffic.Server{d.server, d.farServer} {
		if s != nil {
			s.Close()
		}
	}
	if d.bed != nil {
		errs = append(errs, d.bed.Close())
	}
	return errors.Join(errs...)
}
