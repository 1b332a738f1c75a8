package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/bench/cpus"
	"github.com/shunt-lb/shunt/bench/live"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"golang.org/x/sys/unix"
)

// way is one way to get datagrams.
type way struct {
	name  string
	word  string // of c/subject.c
	lease bool   // from the UDP path
	inGo  bool
	peer  string // of peers
	limit bool   // a program that drops all: it only receives
}

// ways are all, in the order of their turns and of the report.
var ways = []way{
	{name: "recvfrom, blocking", word: "recvfrom"},
	{name: "recvfrom, spinning", word: "recvfrom-spin"},
	{name: "recvmmsg, spinning", word: "recvmmsg-spin"},
	{name: "recvmmsg, busy polling", word: "recvmmsg-busy"},
	{name: "AF_XDP sleeping, C", word: "sleep", lease: true},
	{name: "AF_XDP sleeping, Go", word: "sleep", lease: true, inGo: true},
	{name: "AF_XDP adaptive, C", word: "adaptive", lease: true},
	{name: "AF_XDP adaptive, Go", word: "adaptive", lease: true, inGo: true},
	{name: "AF_XDP spinning, C", word: "spin", lease: true},
	{name: "AF_XDP spinning, Go", word: "spin", lease: true, inGo: true},
	{name: "libxdp's socket, C", peer: "libxdp"},
	{name: "DPDK's testpmd", peer: "testpmd"},
	{name: "XDP_DROP, the limit", limit: true},
}

// Positions in ways of the ways that ratios and aims are about.
const (
	spinning, batches, polling, spinC, spinGo, firstPeer = 1, 2, 3, 8, 9, 10
	limitRow                                             = 12
)

// Sizes of the receive ring: libxdp and DPDK have the second one by themselves.
const echoRing, receiveRing = 256, 2048

// drainFor is the time that a subject has for the datagrams in its ring, after the last frame.
const drainFor = 20 * time.Millisecond

var server = netip.MustParseAddrPort("192.0.2.10:5000")

// bed is a client and a server.
type bed struct {
	lab            *lab.Lab
	client, server *lab.Host
	broker         *broker.Broker
	generator      *generator
	folder, socket string
	cpus           [2]int            // of the client and the subject
	missing        map[string]string // peers that this machine does not have, and why
}

func newBed(ctx context.Context) (b *bed, err error) {
	b = &bed{cpus: cpus.Two()}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.folder, err = os.MkdirTemp("", "shunt-udppath-"); err != nil {
		return b, err
	}
	if err := b.compile(ctx, "subject", "a C compiler"); err != nil {
		return b, err
	}
	b.findPeers(ctx)
	if b.lab, err = lab.New(""); err != nil {
		return b, err
	}
	if b.client, err = b.lab.AddHost("client"); err != nil {
		return b, err
	}
	if b.server, err = b.lab.AddHost("server"); err != nil {
		return b, err
	}
	err = b.lab.Connect(lab.End{Host: b.client, Interface: "eth0", IPv4: netip.MustParsePrefix("192.0.2.1/24")},
		lab.End{Host: b.server, Interface: "eth0", IPv4: netip.PrefixFrom(server.Addr(), 24)}, lab.Cable{Queues: 1})
	if err != nil {
		return b, err
	}
	if err := b.joined(); err != nil {
		return b, err
	}
	b.socket = filepath.Join(b.folder, "s")
	if b.broker, err = broker.Open(broker.Options{Socket: b.socket, In: b.server.Run}); err != nil {
		return b, err
	}
	return b, b.lab.Ready(ctx)
}

// joined prepares the link for generator and peers. Frames that XDP sends into a veth need its other end to have NAPI,
// which GRO switches on; a datagram is not merged with others, because no socket asks for that. The client fills in
// checksums itself: peers answer with the received bytes, and on a veth these would have half a checksum.
func (b *bed) joined() error {
	from, to := b.client.Interfaces()[0], b.server.Interfaces()[0]
	index, err := b.client.InterfaceIndex(from.Name)
	if err != nil {
		return err
	}
	err = errors.Join(neighbour(b.client, index, to), b.client.SetOffload(from.Name, map[string]bool{"tx": false}), b.server.SetOffload(to.Name, map[string]bool{"gro": true}))
	if err != nil {
		return err
	}
	b.generator, err = newGenerator(from, to, index)
	return err
}

func (b *bed) close() error {
	var errs []error
	if b.broker != nil {
		errs = append(errs, b.broker.Close())
	}
	if b.generator != nil {
		errs = append(errs, b.generator.Close())
	}
	if b.lab != nil {
		errs = append(errs, b.lab.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(b.folder))...)
}

// apart reports whether client and subject have a CPU each.
func (b *bed) apart() bool { return b.cpus[0] >= 0 }

// offer has the broker lend the lease of a way, and nothing to ways without one.
func (b *bed) offer(w way, t task) error {
	if !w.lease {
		return b.broker.Apply(nil)
	}
	root, ring := uint32(0), uint32(echoRing)
	if t == receiving {
		ring = receiveRing
	}
	return b.broker.Apply([]broker.Offer{{Name: "bench", Interface: "eth0", Addresses: []netip.AddrPort{server}, Mode: xsk.Auto, RingSize: ring, Transmit: t == echoing, Allow: []broker.Rule{{User: &root}}}})
}

// command is a way's process, and its output once it works.
func (b *bed) command(ctx context.Context, w way, t task) (cmd *lab.Command, ready string) {
	if p, is := peers[w.peer]; is {
		words := p.command(b, t)
		return b.server.Command(ctx, words[0], words[1:]...), p.ready
	}
	args := []string{w.word, string(t), strconv.Itoa(b.cpus[1]), b.socket}
	if w.inGo {
		cmd = b.server.Command(ctx, "/proc/self/exe")
		cmd.Env = append(os.Environ(), subjectVariable+"="+strings.Join(args, " "))
		return cmd, "ready\n"
	}
	return b.server.Command(ctx, filepath.Join(b.folder, "subject"), args...), "ready\n"
}

// start starts a subject, and returns when it works.
func (b *bed) start(ctx context.Context, w way, t task) (*lab.Process, error) {
	if err := b.offer(w, t); err != nil {
		return nil, err
	}
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		p, err := b.try(ctx, w, t)
		if err == nil || w.peer == "" || time.Since(begin) > queueFor {
			return p, err
		}
	}
}

// queueFor bounds the time that a peer may find the queue taken: the kernel frees a socket's queue some milliseconds
// after the last turn, and the broker's clients wait for that.
const queueFor = 5 * time.Second

// try starts a subject once.
func (b *bed) try(ctx context.Context, w way, t task) (*lab.Process, error) {
	cmd, ready := b.command(ctx, w, t)
	p, err := cmd.Spawn()
	if err != nil {
		return nil, err
	}
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		select {
		case <-p.Ended:
			return nil, fmt.Errorf("the subject has ended: %s", p.Log())
		default:
		}
		if strings.Contains(p.Log(), ready) {
			return p, nil
		}
		if time.Since(begin) > 20*time.Second {
			return nil, errors.Join(fmt.Errorf("the subject does not begin to work: %s", p.Log()), p.End(unix.SIGKILL, time.Second))
		}
	}
}

// has reports whether this machine can give a way its turn.
func (b *bed) has(w way) bool { return b.missing[w.peer] == "" }

// echo is a way's turn to answer.
func (b *bed) echo(ctx context.Context, w way, each time.Duration) (r result, err error) {
	p, err := b.start(ctx, w, echoing)
	if err != nil {
		return r, err
	}
	var c *client
	err = b.client.Run(func() (err error) { c, err = newClient(server); return err })
	if err == nil {
		defer c.close()
		err = cpus.On(b.cpus[0], func() error { r = c.measure(each); return ctx.Err() })
	}
	if err == nil && len(c.times) < least {
		err = fmt.Errorf("%d questions were answered within %s, and %d are needed", len(c.times), patience, least)
	}
	return r, errors.Join(err, p.End(unix.SIGTERM, 10*time.Second))
}

// rate is a turn to receive: datagrams a second.
type rate struct{ Offered, Taken float64 }

// receive is a way's turn to receive as much as it can of so many frames.
func (b *bed) receive(ctx context.Context, w way, frames int) (r rate, err error) {
	taken, end, err := b.receiver(ctx, w)
	if err != nil {
		return r, err
	}
	var spent time.Duration
	var sent uint64
	runtime.GC() // a collection is not to interrupt the generator
	err = b.client.Run(func() error {
		return cpus.On(b.cpus[0], func() (err error) { spent, sent, err = b.generator.run(frames); return err })
	})
	time.Sleep(drainFor)
	if err = errors.Join(err, end()); err != nil {
		return r, err
	}
	n, err := taken()
	if err != nil {
		return r, err
	}
	if n == 0 || n > sent {
		return r, fmt.Errorf("%d datagrams were received of %d", n, sent)
	}
	return rate{Offered: float64(sent) / spent.Seconds(), Taken: float64(n) / spent.Seconds()}, nil
}

// receiver starts a way; end ends it, and then taken returns the number of datagrams that it received.
func (b *bed) receiver(ctx context.Context, w way) (taken func() (uint64, error), end func() error, err error) {
	if w.limit {
		if err := b.offer(w, receiving); err != nil {
			return nil, nil, err
		}
		taken, err = live.Drop(b.server, "eth0")
		return taken, func() error { return nil }, err
	}
	p, err := b.start(ctx, w, receiving)
	if err != nil {
		return nil, nil, err
	}
	pattern := took
	if w.peer != "" {
		pattern = peers[w.peer].taken
	}
	return func() (uint64, error) { return takenOf(p, pattern) }, func() error { return p.End(unix.SIGTERM, 10*time.Second) }, nil
}
