package broker

import (
	"context"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/udp"
)

// fates are the possible ends of a lease while datagrams come to it.
var fates = []struct {
	name string
	meet func(t *testing.T, b *bed)
}{
	{"answers", func(t *testing.T, b *bed) {
		l := b.lease(0)
		ended := make(chan error, 1)
		go func() { ended <- udptest.Echo(l, 0) }()
		b.taken(500)
		b.revoke()
		<-ended
		if c := l.Queues[0].Counts(); c.Sent == 0 || c.Sent > c.Delivered {
			t.Errorf("it has answered, and counts %+v", c)
		}
		must(t, l.Close())
	}},
	{"is too slow", func(t *testing.T, b *bed) {
		l := b.lease(0)
		full := func() bool {
			s, err := l.Queues[0].Statistics()
			must(t, err)
			return s.RingFull+s.Dropped > 100
		}
		slow(t, l, 0, func(c udp.Counts) bool { return c.Delivered > 300 && full() })
		if !full() {
			t.Errorf("no overload in %s: %+v", patience, l.Queues[0].Counts())
		}
		b.stop()
		b.accounted(l)
	}},
	{"drops what is stale", func(t *testing.T, b *bed) {
		const ageMax = 2 * time.Millisecond
		l := b.lease(ageMax)
		slow(t, l, ageMax, func(c udp.Counts) bool { return c.Stale > 100 && c.Delivered > 100 })
		if c := l.Queues[0].Counts(); c.Stale <= 100 || c.Delivered <= 100 {
			t.Errorf("in %s: %+v", patience, c)
		}
		b.stop()
		b.accounted(l)
	}},
	{"reads nothing", func(t *testing.T, b *bed) {
		l := b.lease(0)
		b.is("the ring is full", func(o OfferStatus) bool { totals := o.Lease.Totals(); return totals.RingFull > 100 })
		must(t, l.Close())
	}},
	{"gives no frame back", func(t *testing.T, b *bed) {
		l, batch := b.lease(0), make([]udp.Descriptor, batchSize)
		b.is("no frame is free", func(o OfferStatus) bool {
			for l.Queues[0].Receive(batch) > 0 {
			}
			totals := o.Lease.Totals()
			return totals.Dropped > 100
		})
		must(t, l.Close())
	}},
	{"is killed", func(t *testing.T, b *bed) {
		before := b.broker.Status().Offers[0].Ended[endedDied]
		w := b.worker()
		b.taken(200)
		must(t, w.Process.Kill())
		b.is("the lease is over", func(o OfferStatus) bool { return o.Ended[endedDied] == before+1 })
		<-w.Ended
	}},
	{"is revoked", func(t *testing.T, b *bed) {
		w := b.worker()
		b.taken(200)
		b.revoke()
		<-w.Ended
	}},
}

// Each datagram of either family is accounted for, in every state of its lease, by the counters of the program at XDP and of the
// kernel, without the numbers of the leases' programs.
func TestEveryDatagramIsAccountedFor(t *testing.T) {
	for family, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) {
			b := overloaded(t)
			conn, err := b.client.Dial(context.Background(), "udp", b.addresses[family].String())
			must(t, err)
			defer conn.Close() //nolint:errcheck // all is sent
			for _, fate := range fates {
				t.Run(fate.name, func(t *testing.T) {
					on := *b
					on.t = t
					before := on.broker.Status().Offers[0].Past
					stop := flood(t, conn)
					stopped := false
					on.stop = func() {
						if !stopped {
							stopped = true
							stop()
						}
					}
					defer on.stop()
					fate.meet(t, &on)
					on.stop()
					o := on.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil && o.Past.Matched > before.Matched })
					if o.Past.Lost() != 0 || o.Past.Failed+o.Past.Unknown != 0 {
						t.Errorf("%d datagrams are not accounted for: %+v", o.Past.Lost(), o.Past)
					}
				})
			}
		})
	}
}

// lease has the offer, in this process.
func (b *bed) lease(ageMax time.Duration) *udp.Lease {
	b.t.Helper()
	l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo", MaxAge: ageMax, Checked: true})
	must(b.t, err)
	return l
}

// taken waits until the present holder has read so many datagrams.
func (b *bed) taken(count uint64) {
	b.t.Helper()
	b.is("datagrams are taken", func(o OfferStatus) bool {
		if o.Lease == nil {
			return false
		}
		totals := o.Lease.Totals()
		return totals.Taken > count
	})
}

// revoke ends the lease, and leaves the offer as it was.
func (b *bed) revoke() {
	b.t.Helper()
	was := b.broker.offers["echo"].Offer
	changed := was
	changed.Allow = []Rule{user(1)}
	must(b.t, b.broker.Apply([]Offer{changed}))
	must(b.t, b.broker.Apply([]Offer{was}))
}

// A program's own counters come with its renewals, and are shown as the program claims them: they change no other
// number, and none of them shrinks. A program without reports is not one that claims zero.
func TestClaims(t *testing.T) {
	b := newBed(t, Options{})
	r := b.raw()
	number, _ := r.hold("echo")
	answered := func(sequence uint64) {
		t.Helper()
		if body, _ := r.hear(); body.(*proto.Renewed).Sequence != sequence {
			t.Fatalf("%d is answered with %+v", sequence, body)
		}
	}
	claimed := func(when string, want []proto.Claim, all *proto.Claim) {
		t.Helper()
		o := b.broker.Status().Offers[0]
		if totals := o.Lease.Totals(); !reflect.DeepEqual(o.Lease.Claims, want) || !reflect.DeepEqual(o.Claimed, all) || totals != (Totals{}) {
			t.Errorf("%s: claimed are %+v, in sum %+v; counted are %+v", when, o.Lease.Claims, o.Claimed, totals)
		}
	}
	r.send(&proto.Renew{Lease: number, Sequence: 1})
	answered(1)
	claimed("without a report", nil, nil)
	report := &proto.Report{Lease: number, Sequence: 2}
	report.Claims[0], report.Claims[1], report.Claims[2] = proto.Claim{Stale: 1, TxShort: 2, Kicks: 3, Wakeups: 4}, proto.Claim{Stale: 10, Wakeups: 40}, proto.Claim{Kicks: 99} // of no queue
	r.send(report)
	answered(2)
	claimed("after a report", report.Claims[:2], &proto.Claim{Stale: 11, TxShort: 2, Kicks: 3, Wakeups: 44})
	report.Sequence, report.Claims[0], report.Claims[1].Kicks = 3, proto.Claim{Kicks: math.MaxUint64}, 1
	r.send(report)
	answered(3)
	last := proto.Claim{Stale: 11, TxShort: 2, Kicks: math.MaxUint64, Wakeups: 44}
	claimed("after one that takes back and exaggerates", []proto.Claim{{Stale: 1, TxShort: 2, Kicks: math.MaxUint64, Wakeups: 4}, report.Claims[1]}, &last)
	report.Lease++
	r.send(report).end(proto.EndProtocol, "may send only Renew and Report")
	o := b.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil })
	if !reflect.DeepEqual(o.Claimed, &last) || o.Past != (Totals{}) {
		t.Errorf("of a lease that is over: claimed %+v, counted %+v", o.Claimed, o.Past)
	}
}

// The broker has the counts of a program in Go when the program has closed its lease.
func TestReportsInGo(t *testing.T) {
	b := newBed(t, Options{})
	l := b.lease(0)
	stop := flood(t, b.conn)
	batch, woken := make([]udp.Descriptor, batchSize), uint64(0)
	for deadline := time.Now().Add(patience); woken == 0 && time.Now().Before(deadline); {
		_, err := l.Wait(100 * time.Millisecond)
		must(t, err)
		for _, q := range l.Queues {
			woken += q.Counts().Wakeups
			q.Release(batch[:q.Receive(batch)]) // until the rings are empty, and Wait sleeps
		}
	}
	stop()
	q := l.Queues[0]
	most := make([]udp.Descriptor, 4096)
	n := q.Reserve(most)
	q.Release(most[:n])
	var all proto.Claim
	for _, q := range l.Queues {
		c := q.Counts()
		all = each(all, proto.Claim{Stale: c.Stale, TxShort: c.TxShort, Kicks: c.Kicks, Wakeups: c.Wakeups}, sum)
	}
	if all.Wakeups == 0 || all.TxShort != uint64(len(most)-n) || all.Wakeups < l.Wakeups() { // both queues may end one sleep
		t.Errorf("it counts %+v, and woke %d times", all, l.Wakeups())
	}
	must(t, l.Close())
	if o := b.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil }); !reflect.DeepEqual(o.Claimed, &all) {
		t.Errorf("the program counts %+v, the broker knows %+v", all, o.Claimed)
	}
}
