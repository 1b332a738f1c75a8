package lease

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/safchain/ethtool"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	queues = 2
	// patience bounds every wait for something that takes milliseconds.
	patience = time.Minute
)

// bed is a client and a server, whose interface has the program.
type bed struct {
	t              *testing.T
	client, server *lab.Host
	hook           *hook.Hook
	addresses      []netip.AddrPort // of the server: IPv4, IPv6
}

func newBed(t *testing.T, mode kernel.Mode) *bed { return newBedOf(t, mode, 1500) }

func newBedOf(t *testing.T, mode kernel.Mode, mtu int) *bed {
	t.Helper()
	n := udptest.New(t, lab.Cable{Queues: queues, MTU: mtu})
	b := &bed{t: t, client: n.Client, server: n.Server, addresses: n.Addresses}
	must(t, b.server.Run(func() (err error) {
		b.hook, err = hook.Attach(hook.Options{Interface: "eth0", Mode: mode})
		return err
	}))
	t.Cleanup(func() { must(t, b.hook.Close()) })
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	must(t, n.Lab.Ready(ctx))
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// open makes a lease of both addresses that can send, and binds it.
func (b *bed) open(ringSize uint32) *Lease {
	b.t.Helper()
	l := b.prepared(ringSize)
	must(b.t, l.Bind(patience))
	return l
}

// prepared makes a lease that is not bound.
func (b *bed) prepared(ringSize uint32) *Lease {
	b.t.Helper()
	l, err := b.lease(Spec{Mode: xsk.Auto, RingSize: ringSize, Transmit: true})
	must(b.t, err)
	b.t.Cleanup(func() { must(b.t, l.Close()) })
	return l
}

func (b *bed) lease(spec Spec) (l *Lease, err error) {
	spec.Addresses = b.addresses
	err = b.server.Run(func() (err error) {
		l, err = Open(b.hook, spec)
		return err
	})
	return l, err
}

// bound returns a lease that is bound, or the reason why it cannot be.
func (b *bed) bound(spec Spec, patience time.Duration) (*Lease, error) {
	l, err := b.lease(spec)
	if err == nil {
		if err = l.Bind(patience); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, err
}

// listen has the server's kernel answer the datagrams that AF_XDP does not take, with the name "kernel".
func (b *bed) listen() {
	b.t.Helper()
	for _, address := range b.addresses {
		_, err := b.server.ServeUDP(address.String(), "kernel")
		must(b.t, err)
	}
}

// echo answers the datagrams of the sockets, as lab's servers do, with the name "xsk"; stop ends it.
func echo(t *testing.T, held *xsk.Set) (stop func() []xsk.Counts) {
	t.Helper()
	qs, err := held.Queues(true)
	must(t, err)
	var ending atomic.Bool
	done := make(chan error, 1)
	go func() { done <- serve(qs, held.Sockets, ending.Load) }()
	return func() (counts []xsk.Counts) {
		t.Helper()
		ending.Store(true)
		must(t, <-done)
		for _, q := range qs {
			counts = append(counts, q.Counts())
		}
		return counts
	}
}

// serve answers until ended. The answer is the datagram, with its first byte replaced by "x".
func serve(qs []*xsk.Queue, sockets []*xsk.Socket, ended func() bool) error {
	waiter := xsk.NewWaiter(qs, sockets)
	batch := make([]xsk.Descriptor, 64)
	for !ended() {
		if _, err := waiter.Wait(20 * time.Millisecond); err != nil {
			return err
		}
		for _, q := range qs {
			if err := answer(q, batch[:q.Recv(batch)]); err != nil {
				return err
			}
		}
	}
	return nil
}

func answer(q *xsk.Queue, batch []xsk.Descriptor) error {
	for i := range batch {
		p, err := q.Packet(&batch[i])
		if err != nil {
			return err
		}
		p.Payload[0] = 'x'
		if err := q.Reply(&batch[i]); err != nil {
			return err
		}
	}
	sent := q.Send(batch)
	q.Release(batch[sent:])
	return errors.Join(q.Flush(), q.Err())
}

// ask sends a datagram from a socket of its own and returns the name of the answer: "xsk" or "kernel".
func (b *bed) ask(to netip.AddrPort) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := b.client.Dial(ctx, "udp", to.String())
	if err != nil {
		return "", err
	}
	defer conn.Close() //nolint:errcheck // all is sent
	return askOn(conn, patience)
}

func askOn(conn net.Conn, patience time.Duration) (string, error) {
	if _, err := conn.Write([]byte("ask me")); err != nil {
		return "", err
	}
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	buffer := make([]byte, 2048)
	n, err := conn.Read(buffer)
	switch text := string(buffer[:n]); {
	case err != nil:
		return "", err
	case text == "xsk me":
		return "xsk", nil
	case strings.HasPrefix(text, "kernel\n") && strings.HasSuffix(text, "\nask me"):
		return "kernel", nil
	default:
		return "", fmt.Errorf("an unknown answer %q", text)
	}
}

// settled waits until no packet is on its way, and returns the state of the queues.
func (b *bed) settled(l *Lease) []Status {
	b.t.Helper()
	for deadline := time.Now().Add(patience); ; {
		all, err := l.Status()
		must(b.t, err)
		lost := int64(0)
		for _, s := range all {
			lost += max(s.Lost(), -s.Lost())
		}
		if lost == 0 || time.Now().After(deadline) {
			return all
		}
		time.Sleep(time.Millisecond)
	}
}

// conserved expects matched = passed + taken + waiting + dropped + ring full on each queue.
func (b *bed) conserved(l *Lease) (sum Status) {
	b.t.Helper()
	for _, s := range b.settled(l) {
		if s.Lost() != 0 {
			b.t.Errorf("queue %d has %d datagrams that nobody can account for: %+v", s.Queue, s.Lost(), s)
		}
		sum.Matched += s.Matched
		sum.Free += s.Free
		sum.PassedNoSocket += s.PassedNoSocket
		sum.Taken += s.Taken
		sum.Waiting += s.Waiting
		sum.Dropped += s.Dropped
		sum.FillEmpty += s.FillEmpty
		sum.RingFull += s.RingFull
	}
	return sum
}

// Datagrams of both families and over both queues are answered by the program's sockets, in native and in
// generic mode.
func TestEcho(t *testing.T) {
	for _, mode := range []kernel.Mode{kernel.ModeNative, kernel.ModeGeneric} {
		t.Run(string(mode), func(t *testing.T) {
			b := newBed(t, mode)
			b.listen()
			l := b.open(64)
			want := xsk.Copy
			if mode == kernel.ModeGeneric {
				want = Generic
			}
			if l.Grant.Mode != want || mode == kernel.ModeNative && !strings.Contains(l.Grant.Reason, "zero-copy") {
				t.Errorf("mode %s (%s), want %s", l.Grant.Mode, l.Grant.Reason, want)
			}
			if who, err := b.ask(b.addresses[0]); err != nil || who != "kernel" {
				t.Errorf("before Serve %q answered: %v", who, err)
			}
			must(t, l.Serve())
			stop := echo(t, l.Set())
			asked := uint64(0)
			for onBoth := false; !onBoth && asked < 200; asked += 2 {
				for _, address := range b.addresses {
					if who, err := b.ask(address); err != nil || who != "xsk" {
						t.Fatalf("%q answered at %s: %v", who, address, err)
					}
				}
				all, err := l.Status()
				must(t, err)
				onBoth = asked >= 20 && all[0].Matched > 0 && all[1].Matched > 0
			}
			delivered := uint64(0)
			for i, c := range stop() {
				delivered += c.Delivered
				if c.Delivered == 0 && mode == kernel.ModeNative {
					t.Errorf("queue %d got nothing of %d datagrams: %+v", i, asked, c)
				}
			}
			if sum := b.conserved(l); delivered != asked || sum.Matched != asked {
				t.Errorf("%d datagrams were sent, %d matched and %d delivered", asked, sum.Matched, delivered)
			}
			if frames := 2 * l.Grant.Layouts[0].ReceiveFrames; b.conserved(l).Free != frames {
				t.Errorf("%d of %d frames have come back to the fill rings", b.conserved(l).Free, frames)
			}
			must(t, l.Pause())
			if who, err := b.ask(b.addresses[1]); err != nil || who != "kernel" {
				t.Errorf("after Pause %q answered: %v", who, err)
			}
		})
	}
}

// A large MTU makes large frames. A datagram that is not in one piece in the driver's memory (on veth, more than 3,520
// bytes) is the kernel's, and is counted.
func TestLargeDatagrams(t *testing.T) {
	b := newBedOf(t, kernel.ModeNative, 3818)
	b.listen()
	l := b.open(64)
	must(t, l.Serve())
	stop := echo(t, l.Set())
	if size := l.Grant.Layouts[0].FrameSize; size != 4096 {
		t.Errorf("frames have %d bytes", size)
	}
	for _, c := range []struct {
		size int
		want string
	}{{6, "xsk"}, {3000, "xsk"}, {3700, "kernel"}} {
		conn, err := b.client.Dial(context.Background(), "udp", b.addresses[0].String())
		must(t, err)
		question := append([]byte("ask me"), make([]byte, c.size-6)...)
		_, err = conn.Write(question)
		must(t, err)
		must(t, conn.SetReadDeadline(time.Now().Add(patience)))
		answer := make([]byte, 8192)
		n, err := conn.Read(answer)
		must(t, err)
		who := "kernel"
		if answer[0] == 'x' && n == c.size {
			who = "xsk"
		}
		if who != c.want {
			t.Errorf("%d bytes were answered by %s with %d", c.size, who, n)
		}
		must(t, conn.Close())
	}
	stop()
	passed, err := b.hook.Passed()
	must(t, err)
	if sum := b.conserved(l); passed["large"] != 1 || sum.Matched != 2 {
		t.Errorf("passed %v, %+v", passed, sum)
	}
}

// A queue without a socket leaves its datagrams to the kernel's socket on the same port; the other queue
// goes on.
func TestUnboundQueueFallsBack(t *testing.T) {
	b := newBed(t, kernel.ModeNative)
	b.listen()
	l := b.open(64)
	must(t, l.Serve())
	must(t, l.Unbind(1))
	stop := echo(t, l.Set())
	answers := map[string]uint64{}
	for asked := 0; asked < 200 && (asked < 20 || len(answers) < 2); asked++ {
		who, err := b.ask(b.addresses[asked%2])
		must(t, err)
		answers[who]++
	}
	counts := stop()
	sum := b.conserved(l)
	if answers["xsk"] == 0 || answers["kernel"] == 0 || counts[0].Delivered != answers["xsk"] || counts[1].Delivered != 0 ||
		sum.PassedNoSocket != answers["kernel"] {
		t.Errorf("answers %v, delivered %+v, counted %+v", answers, counts, sum)
	}
}

// flood sends datagrams from many sockets, so that all queues get some, and returns their number.
func (b *bed) flood(count int) uint64 {
	b.t.Helper()
	const flows = 16
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for i := range flows {
		conn, err := b.client.Dial(ctx, "udp", b.addresses[i%2].String())
		must(b.t, err)
		for range count / flows {
			_, err := conn.Write([]byte("flood"))
			must(b.t, err)
		}
		must(b.t, conn.Close())
	}
	return uint64(count / flows * flows)
}

// A program that takes nothing, and one that gives nothing back: every datagram is accounted for, by the
// right counter; then the queue works again.
func TestStarvation(t *testing.T) {
	b := newBed(t, kernel.ModeNative)
	l := b.open(64)
	must(t, l.Serve())

	sent := b.flood(1600) // more than all rings of both queues hold
	sum := b.conserved(l)
	if sum.Matched != sent || sum.Waiting != 2*64 || sum.RingFull != sent-2*64 || sum.Taken != 0 {
		t.Errorf("nobody reads, %d sent: %+v", sent, sum)
	}

	qs, err := l.Set().Queues(true)
	must(t, err)
	var held [queues][]xsk.Descriptor
	batch := make([]xsk.Descriptor, 64)
	take := func() (n int) {
		for i, q := range qs {
			got := q.Recv(batch)
			held[i] = append(held[i], batch[:got]...)
			n += got
		}
		return n
	}
	for range 20 { // until the program has every frame
		take()
		sent += b.flood(160)
		b.settled(l)
	}
	sum = b.conserved(l)
	if sum.Matched != sent || sum.Dropped == 0 || sum.Dropped != sum.FillEmpty {
		t.Errorf("nothing is given back, %d sent: %+v", sent, sum)
	}
	for i, q := range qs {
		take()
		if c := q.Counts(); c.HeldMax != l.Grant.Layouts[i].ReceiveFrames {
			t.Errorf("queue %d: %+v; all %d frames should be held", i, c, l.Grant.Layouts[i].ReceiveFrames)
		}
		q.Release(held[i])
	}
	b.listen()
	stop := echo(t, l.Set())
	if who, err := b.ask(b.addresses[0]); err != nil || who != "xsk" {
		t.Errorf("after the frames were given back %q answered: %v", who, err)
	}
	stop()
	b.conserved(l)
}

// The kernel frees a queue some time after its socket is closed. Opening waits for that, but not for a
// socket that somebody keeps.
func TestRebind(t *testing.T) {
	b := newBed(t, kernel.ModeNative)
	b.listen()
	for range 4 {
		l, err := b.bound(Spec{Mode: xsk.Auto, RingSize: 64, Transmit: true}, patience)
		must(t, err)
		must(t, l.Serve())
		stop := echo(t, l.Set())
		if who, err := b.ask(b.addresses[0]); err != nil || who != "xsk" {
			t.Errorf("%q answered: %v", who, err)
		}
		stop()
		must(t, l.Close())
		if who, err := b.ask(b.addresses[0]); err != nil || who != "kernel" {
			t.Errorf("after Close %q answered: %v", who, err)
		}
	}
	l := b.open(64)
	if _, err := b.bound(Spec{Mode: xsk.Auto, RingSize: 64, Transmit: true}, 100*time.Millisecond); !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "another AF_XDP socket has the queue") {
		t.Errorf("a queue that is taken: %v", err)
	}
	must(t, l.Serve())
	stop := echo(t, l.Set())
	if who, err := b.ask(b.addresses[1]); err != nil || who != "xsk" {
		t.Errorf("after the refusal %q answered: %v", who, err)
	}
	stop()
}

func TestWhatCannotBeOpened(t *testing.T) {
	b := newBed(t, kernel.ModeNative)
	for _, c := range []struct {
		spec Spec
		want string
	}{
		{Spec{Mode: xsk.ZeroCopy, RingSize: 64}, "bind with zero-copy"},
		{Spec{Mode: xsk.Copy, RingSize: 65}, "power of two"},
		{Spec{Mode: "fast", RingSize: 64}, "use auto, zero-copy or copy"},
		{Spec{Mode: xsk.Copy, RingSize: 64, Queues: []int{0, 7}}, "does not use this queue"},
		{Spec{Mode: xsk.Copy, RingSize: 64, Queues: []int{99}}, ""},
	} {
		l, err := b.bound(c.spec, patience)
		if err == nil {
			must(t, l.Close())
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v; want %q", c.spec, err, c.want)
		}
	}
	b.open(64) // nothing of the above holds a queue
}

// All queues are the queues in use, not all for which the interface has room: a veth without a set number of queues
// uses one, and has room for one on each CPU.
func TestAllQueuesAreThoseInUse(t *testing.T) {
	b := newBed(t, kernel.ModeNative)
	must(t, b.server.Run(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Flags, attrs.NumRxQueues, attrs.NumTxQueues = "roomy0", net.FlagUp, 4, 4
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "roomy1", PeerNumTxQueues: 1, PeerNumRxQueues: 1}); err != nil {
			return err
		}
		tool, err := ethtool.NewEthtool()
		if err != nil {
			return err
		}
		defer tool.Close()
		for inUse := range uint32(3) {
			inUse++
			if _, err := tool.SetChannels("roomy0", ethtool.Channels{RxCount: inUse, TxCount: inUse}); err != nil {
				return fmt.Errorf("use %d queues: %w", inUse, err)
			}
			h, err := hook.Attach(hook.Options{Interface: "roomy0", Mode: kernel.ModeNative})
			if err != nil {
				return err
			}
			l, err := Open(h, Spec{Addresses: b.addresses, Mode: xsk.Auto, RingSize: xsk.RingSizeMin})
			if err == nil {
				err = errors.Join(l.Bind(patience), l.Close())
			}
			if err = errors.Join(err, h.Close()); err != nil {
				return fmt.Errorf("with %d of %d queues in use: %w", inUse, h.Queues, err)
			}
			if got := len(l.Grant.Layouts); got != int(inUse) || h.Queues != 4 {
				t.Errorf("%d queues in use of %d, and the lease has %d", inUse, h.Queues, got)
			}
		}
		return nil
	}))
}
