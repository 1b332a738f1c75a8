package broker

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/udp"
	"golang.org/x/sys/unix"
)

// drops has the offer drop datagrams that no socket takes, or not any more.
func (b *bed) drops(yes bool) {
	b.t.Helper()
	o := b.broker.offers["echo"].Offer
	o.Drop = yes
	must(b.t, b.broker.Apply([]Offer{o}))
}

// sent sends datagrams until some more have been dropped because no socket took them; nobody must answer any.
func (b *bed) sent(to netip.AddrPort) {
	b.t.Helper()
	conn, err := b.client.Dial(context.Background(), "udp", to.String())
	must(b.t, err)
	defer conn.Close() //nolint:errcheck // it has sent
	before := b.broker.Status().Offers[0]
	dropped := func(o OfferStatus) uint64 {
		totals := o.Past
		if o.Lease != nil {
			totals.Add(o.Lease.Totals())
		}
		return totals.DroppedNoSocket
	}
	b.is("datagrams are dropped", func(o OfferStatus) bool {
		_, err := conn.Write([]byte("to nobody"))
		must(b.t, err)
		return dropped(o) >= dropped(before)+10
	})
	if o := b.broker.Status().Offers[0]; o.Past.PassedNoSocket != before.Past.PassedNoSocket || o.Past.Lost() != 0 {
		b.t.Errorf("what was to be dropped is counted as %+v, after %+v", o.Past, before.Past)
	}
	must(b.t, conn.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
	if n, err := conn.Read(make([]byte, 64)); err == nil {
		b.t.Errorf("%d bytes of an answer to what was dropped", n)
	}
}

// With drop, datagrams that no socket takes do not pass, whether a program has the offer or not, and each of them is
// counted. The setting comes and goes without disturbing a lease.
func TestDropsWhatNoSocketTakes(t *testing.T) {
	b := newBed(t, Options{})
	b.until("kernel", nil)
	b.drops(true)
	for _, address := range b.addresses {
		b.sent(address)
	}
	counted := b.broker.Status().Offers[0].Past
	b.drops(false)
	if past := b.broker.Status().Offers[0].Past; past.DroppedNoSocket < counted.DroppedNoSocket || past.Lost() != 0 {
		t.Errorf("it had dropped %+v, and when it does not any more, that is %+v", counted, past)
	}
	b.until("kernel", nil)
	b.drops(true)
	w := b.worker()
	b.until("xsk", w)
	for _, yes := range []bool{false, true} {
		b.drops(yes)
		b.until("xsk", w)
	}
	if o := b.broker.Status().Offers[0]; o.Given != 1 || o.Lease == nil || len(o.Ended) != 0 {
		t.Errorf("pass and drop have disturbed the lease: %+v", o)
	}
	b.kill(w)
	b.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil && o.Ended[endedDied] == 1 })
	for _, address := range b.addresses {
		b.sent(address)
	}
	if o := b.broker.Status().Offers[0]; o.Past.Lost() != 0 || o.Past.PassedNoSocket != 0 || o.Past.Taken == 0 {
		t.Errorf("counted is %+v", o.Past)
	}
	b.drops(false)
	b.until("kernel", nil)
}

// On a queue that the lease does not have, no socket takes a datagram either. The program's own account is exact with
// the broker's counts.
func TestDropsOnOtherQueues(t *testing.T) {
	b := newBed(t, Options{})
	o := b.offer()
	o.Queues, o.Drop = []int{0}, true
	must(t, b.broker.Apply([]Offer{o}))
	l := b.lease(0)
	ended := make(chan error, 1)
	go func() { ended <- udptest.Echo(l, 0) }()
	elsewhere := func(o OfferStatus) hook.Count {
		if o.Lease == nil {
			return hook.Count{}
		}
		return o.Lease.Elsewhere
	}
	b.is("both queues have had some", func(o OfferStatus) bool {
		conn, err := b.client.Dial(context.Background(), "udp", b.addresses[0].String()) // from another port, and so to another queue
		must(t, err)
		defer conn.Close() //nolint:errcheck // it has sent
		_, err = fmt.Fprint(conn, "flood")
		must(t, err)
		return elsewhere(o).DroppedNoSocket > 10 && o.Lease.Queues[0].Taken > 10
	})
	st := b.is("the ring is empty", func(o OfferStatus) bool { return o.Lease.Queues[0].Waiting == 0 })
	if totals := st.Lease.Totals(); elsewhere(st).PassedNoSocket != 0 || elsewhere(st).Matched != elsewhere(st).DroppedNoSocket || totals.Lost() != 0 || st.Lease.Queues[0].Lost() != 0 {
		t.Errorf("the lease has %+v, elsewhere %+v", totals, elsewhere(st))
	}
	b.drops(false)
	b.revoke()
	<-ended
	must(t, l.Close())
	if st := b.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil }); st.Past.Lost() != 0 || st.Past.DroppedNoSocket == 0 {
		t.Errorf("in the end it is %+v", st.Past)
	}
}

// A guard that cannot be had is an error, which names the offer; all other offers are in force, and Apply tries again.
func TestNoRoomForAGuard(t *testing.T) {
	b := newBed(t, Options{})
	h := b.broker.hooks["eth0"]
	var taken []int
	for range hook.MaxLeases {
		number, err := h.Begin()
		must(t, err)
		taken = append(taken, number)
	}
	o := b.offer()
	o.Drop = true
	if err := b.broker.Apply([]Offer{o}); err == nil || !strings.Contains(err.Error(), "drop the datagrams of echo for which there is no socket: begin a lease on interface eth0: it has 64") {
		t.Errorf("without room: %v", err)
	}
	dropping := func(want bool) {
		t.Helper()
		if got := b.broker.Status().Offers[0]; got.Dropping != want || !got.Drop {
			t.Errorf("%+v, want dropping %t", got, want)
		}
	}
	dropping(false)
	b.until("kernel", nil)
	must(t, h.End(taken[0]))
	must(t, b.broker.Apply([]Offer{o}))
	dropping(true)
	b.sent(b.addresses[0])
	other := o
	other.Name = "other" // the same addresses, at once
	must(t, b.broker.Apply([]Offer{other}))
	b.sent(b.addresses[0])
	must(t, b.broker.Apply(nil))
	if len(b.broker.hooks) != 0 {
		t.Errorf("programs are left: %v", b.broker.hooks)
	}
}

// The advice goes with the lease to programs in Go; one that has decided itself knows it, too, and does not follow it.
func TestAdviceInGo(t *testing.T) {
	b := newBed(t, Options{})
	for _, advice := range []proto.Wait{"", proto.WaitSpin, proto.WaitAdaptive, proto.WaitSleep} {
		for _, own := range []time.Duration{0, -1} {
			o := b.offer()
			o.Wait = advice
			must(t, b.broker.Apply([]Offer{o}))
			l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo", Spin: own})
			must(t, err)
			spins := own == 0 && advice == proto.WaitSpin
			rounds := 0
			for deadline := time.Now().Add(patience); time.Now().Before(deadline) && l.Wakeups() == 0 && (!spins || rounds < 5); rounds++ {
				timer := time.AfterFunc(10*time.Millisecond, func() { _, _ = b.conn.Write([]byte("wake up")) })
				_, err := l.Wait(patience)
				must(t, err)
				timer.Stop()
				for _, q := range l.Queues { // so that the next Wait finds empty rings
					batch := make([]udp.Descriptor, batchSize)
					q.Release(batch[:q.Receive(batch)])
				}
			}
			if l.Advice != string(advice) || (l.Wakeups() == 0) != spins {
				t.Errorf("advised to %q, own %d: it knows of %q, and slept %d times in %d rounds", advice, own, l.Advice, l.Wakeups(), rounds)
			}
			must(t, l.Close())
			b.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil })
		}
	}
}

// So it does to programs in C.
func TestAdviceInC(t *testing.T) {
	b := newBed(t, Options{})
	udptest.EachCompiler(t, func(t *testing.T, c udptest.Compiler) {
		on := *b
		on.t = t
		binary := c.Program(t, filepath.Dir(b.path), "../../../udp/c/testdata/check.c")
		for _, advice := range []proto.Wait{"", proto.WaitSpin, proto.WaitAdaptive, proto.WaitSleep} {
			for _, own := range []string{"0", "4294967295"} {
				o := on.offer()
				o.Wait = advice
				must(t, on.broker.Apply([]Offer{o}))
				p := on.start(binary, "advice", on.path, own)
				for ended := false; !ended; {
					if _, err := on.conn.Write([]byte("wake up")); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
						t.Fatal(err)
					}
					select {
					case <-p.Ended:
						ended = true
					case <-time.After(10 * time.Millisecond):
					}
				}
				<-p.Ended
				want := fmt.Sprintf("flag %d, slept %v\n", map[proto.Wait]int{"": 0, proto.WaitSpin: 8, proto.WaitAdaptive: 16, proto.WaitSleep: 32}[advice], own != "0" || advice != proto.WaitSpin)
				if !strings.Contains(p.Log(), want) || p.Err() != nil {
					t.Errorf("advised to %q, own %s: it says %q, want %q: %v", advice, own, p.Log(), want, p.Err())
				}
				on.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil })
			}
		}
	})
}
