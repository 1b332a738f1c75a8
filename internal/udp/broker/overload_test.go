package broker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/udp"
	"golang.org/x/sys/unix"
)

// A program that needs so long for each datagram is offered half as many again as it can work off.
const (
	workFor   = 100 * time.Microsecond
	overload  = 1.5
	delayMax  = 10 * time.Millisecond
	batchSize = 16
)

// overloaded lends a ring for delayMax, with times.
func overloaded(t *testing.T) *bed {
	t.Helper()
	b := newBedOf(t, 1, Options{})
	offer := b.offer()
	offer.Stamped, offer.RingSize = true, xsk.RingSize(delayMax, float64(time.Second/workFor))
	must(t, b.broker.Apply([]Offer{offer}))
	return b
}

// flood sends datagrams at the rate of the overload, until it is stopped.
func flood(t *testing.T, conn net.Conn) (stop func()) {
	t.Helper()
	quit, done := make(chan bool), make(chan bool)
	go func() {
		defer close(done)
		begin := time.Now()
		for sent := 0.; ; sent++ {
			if wait := time.Duration(sent/overload*float64(workFor)) - time.Since(begin); wait > time.Millisecond {
				select {
				case <-quit:
					return
				case <-time.After(wait):
				}
			}
			select {
			case <-quit:
				return
			default:
				_, _ = conn.Write([]byte("x")) // refused where nobody has the port for a moment
			}
		}
	}()
	return func() { close(quit); <-done }
}

func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // it cannot fail
	return time.Duration(ts.Nano())
}

// slow works on datagrams until it has had enough and is done, and returns the age of each when its turn came.
func slow(t *testing.T, l *udp.Lease, ageMax time.Duration, done func(udp.Counts) bool) (ages []time.Duration) {
	t.Helper()
	batch := make([]udp.Descriptor, batchSize)
	q := l.Queues[0]
	for begin := time.Now(); !done(q.Counts()) && time.Since(begin) < patience; {
		if _, err := l.Wait(100 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		before := monotonic()
		n := q.Receive(batch)
		for i := range batch[:n] {
			stamp := time.Duration(q.Stamp(&batch[i]))
			if stamp == 0 || stamp > monotonic() {
				t.Fatalf("a datagram of %s, at %s", stamp, monotonic())
			}
			if ageMax > 0 && before-stamp > ageMax+time.Millisecond/1000 {
				t.Fatalf("a datagram is %s old, and %s was the most", before-stamp, ageMax)
			}
			ages = append(ages, monotonic()-stamp)
			for worked := monotonic(); monotonic()-worked < workFor; { //nolint:revive // this is the work
			}
		}
		q.Release(batch[:n])
		if err := errors.Join(q.Err(), l.Err()); err != nil {
			t.Fatal(err)
		}
	}
	return ages
}

// accounted requires that every datagram is accounted for, by program and broker.
func (b *bed) accounted(l *udp.Lease) {
	b.t.Helper()
	o := b.is("every datagram is accounted for", func(o OfferStatus) bool { totals := o.Lease.Totals(); return totals.Lost() == 0 })
	counts, totals := l.Queues[0].Counts(), o.Lease.Totals()
	if totals.Taken != counts.Delivered+counts.Stale+counts.Invalid || counts.Invalid != 0 {
		b.t.Errorf("the program counts %+v, the broker %+v", counts, totals)
	}
	must(b.t, l.Close())
	b.is("the lease that is over is accounted for", func(o OfferStatus) bool { return o.Lease == nil && o.Past.Lost() == 0 && o.Past.Matched > 0 })
}

// The ring bounds the time that datagrams wait, also where more come than the program can work off.
func TestDelayUnderOverload(t *testing.T) {
	b := overloaded(t)
	l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo", Checked: true})
	must(t, err)
	begin := time.Now()
	stop := flood(t, b.conn)
	full := func() bool {
		s, err := l.Queues[0].Statistics()
		must(t, err)
		return s.RingFull+s.Dropped > 100
	}
	ages := slow(t, l, 0, func(c udp.Counts) bool { return c.Delivered > 1500 && full() })
	took := time.Since(begin)
	stop()
	if !full() {
		t.Fatalf("no overload in %s: %+v", patience, l.Queues[0].Counts())
	}
	slices.Sort(ages)
	of := func(part float64) time.Duration { return ages[int(part*float64(len(ages)-1))].Round(time.Microsecond) }
	// A slow machine takes longer for each datagram than the work, and datagrams wait longer in proportion (Little's law: the mean wait is the
	// mean number that wait, divided by the rate at which they are worked off). This allows no ring that has room for more than delayMax.
	turn, mean := took/time.Duration(len(ages)), time.Duration(0)
	for _, age := range ages {
		mean += age / time.Duration(len(ages))
	}
	bound := (delayMax/workFor + batchSize) * turn
	t.Logf("%d datagrams at %.1f times the rate of the program, which took %s for each: waited %s in the median, %s in the mean, %s in 99 of 100, %s at most; the ring and a batch of such are %s",
		len(ages), overload, turn, of(0.5), mean.Round(time.Microsecond), of(0.99), of(1), bound)
	if mean > bound {
		t.Errorf("the mean is %s, above %s", mean, bound)
	}
	b.accounted(l)
}

// A program may refuse datagrams that are too old.
func TestStaleDatagramsAreDropped(t *testing.T) {
	b := overloaded(t)
	const ageMax = 2 * time.Millisecond
	l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo", MaxAge: ageMax, Checked: true})
	must(t, err)
	stop := flood(t, b.conn)
	slow(t, l, ageMax, func(c udp.Counts) bool { return c.Stale > 200 && c.Delivered > 200 })
	stop()
	if c := l.Queues[0].Counts(); c.Stale <= 200 || c.Delivered <= 200 {
		t.Errorf("in %s: %+v", patience, c)
	}
	b.accounted(l)
	udptest.EachCompiler(t, func(t *testing.T, c udptest.Compiler) {
		on := *b
		on.t = t
		binary := c.Program(t, filepath.Dir(b.path), "../../../udp/c/testdata/check.c")
		stop := flood(t, b.conn)
		defer stop()
		before := *on.broker.Status().Offers[0].Claimed
		p := on.start(binary, "stale", b.path, "200", "2000")
		select {
		case <-p.Ended:
			if err := p.Err(); err != nil {
				t.Errorf("%v: %s", err, p.Log())
			}
		case <-time.After(patience):
			t.Errorf("it goes on: %s", p.Log())
		}
		o := on.is("the lease that is over is accounted for", func(o OfferStatus) bool { return o.Lease == nil && o.Past.Lost() == 0 })
		// Its counters were with the broker before its end.
		var own proto.Claim
		_, counts, _ := strings.Cut(p.Log(), "claims ")
		_, err := fmt.Sscan(counts, &own.Stale, &own.TxShort, &own.Kicks, &own.Wakeups)
		must(t, err)
		if all := each(before, own, sum); own.Stale < 200 || *o.Claimed != all {
			t.Errorf("it counts %+v; with what came before that is %+v, and the broker has %+v", own, all, *o.Claimed)
		}
	})
}

// Without times no age is known, and a program that asks for it gets an error.
func TestAgeNeedsTimes(t *testing.T) {
	b := newBed(t, Options{})
	_, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo", MaxAge: time.Second})
	if !errors.Is(err, xsk.ErrNoTimes) || !strings.Contains(err.Error(), "timestamps: true") {
		t.Errorf("%v", err)
	}
}
