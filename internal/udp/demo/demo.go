// Package demo shows the UDP path to a user who has nothing but the binary: a server behind AF_XDP that
// runs as nobody, without any capability, beside the kernel's own sockets, in namespaces of its own.
//
//	client eth0 ═══ eth0 server    the program, and AF_XDP sockets on both queues
//	       eth1 ═══ eth1           no program: the kernel's sockets at their best
//
// The demo is the process with the rights, and has the broker. The worker (`shunt demo udp-worker`) is an example of
// any program that uses package udp: it leases memory and sockets from the broker, and only maps them. Each line with a
// claim is a Claim, which is checked in this run. No claim depends on speed, which is only shown.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/story"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/lease"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/udp"
)

const (
	// patience limits every wait for something that takes milliseconds.
	patience = 5 * time.Second
	// rounds is the number of rounds of every way to receive, interleaved: medians are shown.
	rounds = 5
	// roundTripsFor and rateFor are the times of a round: 5 rounds of 4 ways are 7 s.
	roundTripsFor = 200 * time.Millisecond
	rateFor       = 150 * time.Millisecond
	// measureFor ends the measurement on a machine that is too busy for all rounds.
	measureFor = 10 * time.Second
	// ringSize has room for all questions that the client has open at once.
	ringSize = 256
	// nobody is a user who owns no file and has no rights.
	nobody = 65534
	// offerName is the name of the offer that the worker asks for.
	offerName = "echo"
)

var (
	leased = netip.MustParseAddrPort("192.0.2.10:5000")    // over eth0
	plain  = netip.MustParseAddrPort("198.51.100.10:5000") // over eth1
)

// Options configure the demo.
type Options struct {
	Out io.Writer // where the story is printed
}

// demo is one run.
type demo struct {
	*story.Teller
	facts          *Facts
	lab            *lab.Lab
	client, server *lab.Host
	folder         string // folder of the broker's socket
	broker         *broker.Broker
	worker         *lab.Process
	control        int // to the worker
	cpus           [2]int
	asking         map[byte]*client // by the way that is to answer
}

// Run runs the whole demo. It cleans up before it returns. A step that failed, or a statement that turned out to be false, is
// a claim that makes Facts.OK false. The error is ctx's if ctx ended, or that of a failed cleanup.
func Run(parent context.Context, opts Options) (*Facts, error) {
	d := &demo{Teller: story.NewTeller(opts.Out), control: -1, asking: map[byte]*client{}, facts: &Facts{Ring: ringSize, Ways: []Way{}, Queues: []lease.Status{}}}
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(parent, time.Minute, errors.New("the demo took longer than a minute"))
	defer cancel()
	fault := d.story(ctx)
	if fault != nil && parent.Err() == nil {
		d.Claim(false, "%v", fault)
		if d.worker != nil {
			d.Say("  the worker said: %q\n", d.worker.Log())
		}
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
		story.Step("The network", d.build),
		story.Step("The program and the broker", d.open),
		story.Step("A worker without rights", d.startWorker),
		story.Step("Round trips and answers per second", d.measure),
		story.Step("The counters", d.count),
		story.Step("The worker gives its lease back", d.fallBack),
	)
}

// build makes two namespaces with two cables between them.
func (d *demo) build(ctx context.Context) (err error) {
	if d.lab, err = lab.New(""); err != nil {
		return err
	}
	d.facts.ID = d.lab.ID()
	if d.client, err = d.lab.AddHost("client"); err != nil {
		return err
	}
	if d.server, err = d.lab.AddHost("server"); err != nil {
		return err
	}
	for i, net := range []string{"192.0.2", "198.51.100"} {
		name := fmt.Sprintf("eth%d", i)
		from, to := netip.MustParsePrefix(net+".1/24"), netip.MustParsePrefix(net+".10/24")
		err := d.lab.Connect(lab.End{Host: d.client, Interface: name, IPv4: from}, lab.End{Host: d.server, Interface: name, IPv4: to}, lab.Cable{Queues: 2})
		if err != nil {
			return err
		}
		// Both are equal: the sender computes checksums.
		for _, host := range []*lab.Host{d.client, d.server} {
			if err := host.SetOffload(name, map[string]bool{"tx": false}); err != nil {
				return err
			}
		}
	}
	if err := d.lab.Ready(ctx); err != nil {
		return err
	}
	d.Say("  client eth0 192.0.2.1    ═══ 192.0.2.10    eth0 server    XDP, AF_XDP sockets\n")
	d.Say("         eth1 198.51.100.1 ═══ 198.51.100.10 eth1           the kernel's sockets alone\n\n")
	d.Claim(true, "two namespaces (%s, %s), two cables with two queues each", d.client.Namespace(), d.server.Namespace())
	return nil
}

// open starts a broker, and has it offer the datagrams to one address.
func (d *demo) open(ctx context.Context) (err error) {
	if d.folder, err = os.MkdirTemp("", "shunt-"+d.facts.ID+"-"); err != nil {
		return err
	}
	if err := os.Chmod(d.folder, 0o711); err != nil { // so that the user nobody can connect
		return err
	}
	if d.broker, err = broker.Open(broker.Options{Socket: d.socket(), In: d.server.Run}); err != nil {
		return err
	}
	user := uint32(nobody)
	offer := broker.Offer{
		Name: offerName, Interface: "eth0", Addresses: []netip.AddrPort{leased}, Mode: xsk.Auto, RingSize: ringSize, Transmit: true,
		Allow: []broker.Rule{{User: &user}},
	}
	if err := d.broker.Apply([]broker.Offer{offer}); err != nil {
		return err
	}
	d.Say("  program   sh_udp on eth0, %s mode\n", d.broker.Status().Offers[0].Program)
	d.Say("  broker    %s\n", d.socket())
	d.Say("  offer     %q: datagrams to %s, rings of %d packets, to user %d\n\n", offer.Name, leased, offer.RingSize, user)
	_, err = udp.Open(ctx, udp.Options{Socket: d.socket(), Name: offerName})
	var refused *udp.Ended
	if !errors.As(err, &refused) {
		return fmt.Errorf("the broker should refuse user %d: %v", os.Getuid(), err)
	}
	d.Claim(refused.Code == "refused", "user %d asks the broker and is refused: no rule allows it", os.Getuid())
	return nil
}

func (d *demo) socket() string { return filepath.Join(d.folder, "udp.sock") }

// offer returns the broker's state of the offer; its lease is nil if no process has one.
func (d *demo) offer() (o broker.OfferStatus) {
	o = d.broker.Status().Offers[0]
	if o.Lease == nil {
		o.Lease = &broker.LeaseStatus{}
	}
	return o
}

// startWorker runs this binary again, as nobody; the worker gets its lease from the broker.
func (d *demo) startWorker(ctx context.Context) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make a socket to the worker: %w", err)
	}
	d.control = pair[0]
	theirs := os.NewFile(uintptr(pair[1]), "worker")
	defer theirs.Close() //nolint:errcheck // the worker has a copy
	// This path leads to the binary even if other users may not enter its folder. The context is not the
	// demo's, because the worker ends in its own order.
	cmd := d.server.Command(context.WithoutCancel(ctx), "/proc/self/exe", "demo", "udp-worker")
	cmd.Env = []string{socketVariable + "=" + d.socket()}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if d.worker, err = cmd.Spawn(); err != nil {
		return err
	}
	if err := unix.SetsockoptTimeval(d.control, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(patience.Seconds())}); err != nil {
		return fmt.Errorf("bound the time for the worker's answers: %w", err)
	}
	if err := d.hear(); err != nil {
		return err
	}
	l, w := d.offer().Lease, d.facts.Worker
	d.facts.Mode, d.facts.Reason = string(l.Mode), l.Reason
	d.Say("  process %d maps the memory and the sockets, which came over the broker's socket (SCM_RIGHTS)\n", w.PID)
	d.Say("  then they were bound, in %s mode\n", l.Mode)
	if l.Reason != "" {
		d.Say("  why not zero-copy: %s\n", l.Reason)
	}
	d.Say("\n")
	d.Claim(len(l.Queues) == 2, "each of the two queues of eth0 has an AF_XDP socket (%s)", l.Mode)
	d.Claim(l.Holder.PID == w.PID && l.Holder.UID == nobody, "the broker knows from the kernel who has the lease: process %d, user %d", l.Holder.PID, l.Holder.UID)
	d.Claim(w.UID == nobody && w.Capabilities == "0000000000000000", "it runs as uid %d with the capabilities %s", w.UID, w.Capabilities)
	d.Claim(w.Refused != "", "it could not make such a socket itself: %s", w.Refused)
	if d.cpus[0], d.cpus[1] = twoCPUs(); d.cpus[0] != 0 {
		d.facts.Worker.CPUs = []int{d.cpus[0] - 1, d.cpus[1] - 1}
	}
	return d.connect()
}

// connect makes the client's sockets.
func (d *demo) connect() error {
	for by, to := range map[byte]netip.AddrPort{byXDP: leased, byKernel: plain} {
		err := d.client.Run(func() (err error) {
			d.asking[by], err = newClient(to)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// tell gives the worker an order.
func (d *demo) tell(serve string) error {
	text, err := json.Marshal(order{Serve: serve, CPU: d.cpus[1]})
	if err == nil {
		err = unix.Sendmsg(d.control, text, nil, nil, unix.MSG_NOSIGNAL)
	}
	if err != nil {
		return fmt.Errorf("tell the worker to serve %q: %w", serve, err)
	}
	return nil
}

// hear waits for the worker's report.
func (d *demo) hear() error {
	buffer := make([]byte, 4096)
	n, err := unix.Read(d.control, buffer)
	for errors.Is(err, unix.EINTR) { // a read with a time limit is not restarted (signal(7))
		n, err = unix.Read(d.control, buffer)
	}
	if err == nil && n == 0 {
		err = errors.New("it has ended")
	}
	cpus := d.facts.Worker.CPUs
	if err == nil {
		err = json.Unmarshal(buffer[:n], &d.facts.Worker)
	}
	if err != nil {
		return fmt.Errorf("hear from the worker: %w", err)
	}
	d.facts.Worker.CPUs = cpus
	return nil
}

// stop stops the worker's way, and reads the worker's counts.
func (d *demo) stop() error { return errors.Join(d.tell(orderStop), d.hear()) }

// measure measures all ways in turns.
func (d *demo) measure(ctx context.Context) error {
	d.facts.Ways = make([]Way, len(ways))
	begin, done := time.Now(), 0
	for ; done < rounds && (done == 0 || time.Since(begin) < measureFor); done++ {
		for i, name := range ways {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			d.facts.Ways[i].Name = name
			round, err := d.round(name)
			if err != nil {
				return fmt.Errorf("measure %s: %w", name, err)
			}
			d.facts.Ways[i].Rounds = append(d.facts.Ways[i].Rounds, round)
		}
	}
	return d.compare(done)
}

// compare shows the medians, and checks which way the answers came.
func (d *demo) compare(done int) error {
	d.Say("  %-26s %10s %10s %10s %14s\n", "", "p50", "p99", "p99.9", "answers/s")
	wrong, late, asked := 0, 0, 0
	for i := range d.facts.Ways {
		w := &d.facts.Ways[i]
		w.P50 = w.median(func(r Round) float64 { return r.P50 })
		w.P99 = w.median(func(r Round) float64 { return r.P99 })
		w.P999 = w.median(func(r Round) float64 { return r.P999 })
		w.PerSecond = w.median(func(r Round) float64 { return r.PerSecond })
		d.Say("  %-26s %7.1f µs %7.1f µs %7.1f µs %14.0f\n", w.Name, w.P50, w.P99, w.P999, w.PerSecond)
		for _, r := range w.Rounds {
			wrong, late, asked = wrong+r.Wrong, late+r.Late, asked+r.Asked
		}
	}
	d.Say("\n  Round trip of one 64-byte datagram, and answers a second with %d open at once: medians of %d rounds of\n", flows*window, done)
	d.Say("  each, in turns. One spinning client over veth, on this machine, now. What spins has a CPU to itself.\n")
	if d.cpus[0] == 0 {
		d.Say("  There is one CPU for both sides: these figures say how it is shared, and nothing else.\n")
	}
	if late > 0 {
		d.Say("  %d of %d questions had no answer within %s.\n", late, asked, lateAfter)
	}
	d.Say("\n")
	d.Claim(wrong == 0, "every answer to 192.0.2.10 came from AF_XDP, and every one to 198.51.100.10 from the kernel's socket%s", unless(wrong == 0, fmt.Sprintf(": %d did not", wrong)))
	d.Claim(d.facts.Worker.Collections == 0, "the worker's Go runtime has collected no garbage: nothing is allocated per packet")
	return nil
}

// round measures one way.
func (d *demo) round(name string) (r Round, err error) {
	by := byte(byKernel)
	if name == waySleep || name == waySpin {
		by = byXDP
	}
	if err := d.tell(name); err != nil {
		return r, err
	}
	err = onCPU(d.cpus[0], func() error {
		d.asking[by].roundTrips(&r, by, roundTripsFor)
		d.asking[by].rate(&r, by, rateFor)
		return nil
	})
	if err := errors.Join(err, d.stop()); err != nil {
		return r, err
	}
	if len(d.asking[by].times) == 0 {
		return r, fmt.Errorf("none of %d questions was answered within %s", r.Asked, lateAfter)
	}
	return r, nil
}

// median returns the median of a figure over the rounds.
func (w *Way) median(figure func(Round) float64) float64 {
	var all []float64
	for _, r := range w.Rounds {
		all = append(all, figure(r))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// count compares the number of datagrams that the program matched with the numbers of their destinations.
func (d *demo) count(ctx context.Context) error {
	lost := func() (sum int64) {
		for _, q := range d.facts.Queues {
			sum += max(q.Lost(), -q.Lost())
		}
		return sum
	}
	for end := time.Now().Add(patience); ; {
		d.facts.Queues = d.offer().Lease.Queues
		if lost() == 0 || time.Now().After(end) || ctx.Err() != nil {
			break
		}
		time.Sleep(time.Millisecond) // a packet is under way
	}
	taken, used := uint64(0), 0
	d.Say("  queue     matched       taken  waiting  dropped  ring_full  passed_no_socket\n")
	for _, q := range d.facts.Queues {
		d.Say("  %5d %11d %11d %8d %8d %10d %17d\n", q.Queue, q.Matched, q.Taken, q.Waiting, q.Dropped, q.RingFull, q.PassedNoSocket)
		taken += q.Taken
		if q.Matched > 0 {
			used++
		}
	}
	w := d.facts.Worker
	d.Say("\n  The worker took %d datagrams, slept until one came %d times, and made %d system calls to send.\n\n", w.Delivered, w.Wakeups, w.Kicks)
	d.Claim(lost() == 0 && len(d.facts.Queues) > 0, "on each queue matched = taken + waiting + dropped + ring_full + passed_no_socket%s", unless(lost() == 0, fmt.Sprintf(": %d are missing", lost())))
	d.Claim(taken == w.Delivered+w.Invalid && w.Invalid == 0, "the worker has counted what the kernel's rings say it took: %d", taken)
	return nil
}

// fallBack gives the lease back: then the kernel's socket on the same port has to answer.
func (d *demo) fallBack(ctx context.Context) error {
	begin := time.Now()
	for _, step := range []func() error{
		func() error { return d.tell(orderClose) }, d.hear,
		func() error { return d.tell(wayBlocking) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	c := d.asking[byXDP]
	c.drain()
	who := byte(0)
	for asked := 0; who != byKernel && time.Since(begin) < patience && ctx.Err() == nil; asked++ {
		who, _ = c.ask(c.sockets[asked%flows])
	}
	d.facts.Fallback = float64(time.Since(begin).Microseconds()) / 1e3
	if err := d.stop(); err != nil {
		return err
	}
	o := d.offer()
	for end := time.Now().Add(patience); o.Ended["closed"] == 0 && time.Now().Before(end) && ctx.Err() == nil; o = d.offer() {
		time.Sleep(time.Millisecond) // the broker is taking the lease apart
	}
	d.facts.Past = o.Past
	d.Claim(who == byKernel, "the kernel's socket on the same port answered, %.1f ms after the order to close", d.facts.Fallback)
	d.Claim(o.Ended["closed"] == 1 && o.Past.Lost() == 0, "the broker counted a lease that was given back, and all of its %d datagrams are accounted for", o.Past.Matched)
	return nil
}

// takeDown ends and removes everything.
func (d *demo) takeDown() error {
	for _, c := range d.asking {
		c.close()
	}
	var errs []error
	if d.control >= 0 {
		errs = append(errs, unix.Close(d.control))
	}
	if d.worker != nil { // the worker ends by itself when the socket closes; if it does not, it is killed
		errs = append(errs, d.worker.End(syscall.SIGKILL, patience))
	}
	if d.broker != nil {
		errs = append(errs, d.broker.Close())
	}
	if d.folder != "" {
		errs = append(errs, os.RemoveAll(d.folder))
	}
	if d.lab != nil {
		errs = append(errs, d.lab.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clean up: %w; `shunt demo --clean %s` tries again", err, d.facts.ID)
	}
	return nil
}

func unless(ok bool, text string) string {
	if ok {
		return ""
	}
	return text
}
