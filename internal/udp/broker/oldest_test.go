package broker

import (
	"context"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/udp"
)

// The status has the age of the oldest datagram of a ring, until the program has read it. Without times it has none.
func TestOldest(t *testing.T) {
	for _, stamped := range []bool{true, false} {
		b := newBedOf(t, 1, Options{})
		offer := b.offer()
		offer.Stamped, offer.RingSize = stamped, xsk.RingSizeMin
		must(t, b.broker.Apply([]Offer{offer}))
		l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo", Checked: true})
		must(t, err)
		oldest := func() (time.Duration, uint32) {
			q := b.broker.Status().Offers[0].Lease.Queues[0]
			return q.Oldest, q.Waiting
		}
		if age, waiting := oldest(); age != 0 || waiting != 0 {
			t.Errorf("the oldest of %d has waited %s", waiting, age)
		}
		conn := b.conn
		began := time.Now()
		_, err = conn.Write([]byte("x"))
		must(t, err)
		var first time.Duration
		b.is("it has come", func(OfferStatus) bool { age, waiting := oldest(); first = age; return waiting > 0 })
		second, _ := oldest()
		if most := time.Since(began); stamped && (first <= 0 || second <= first || second > most) || !stamped && second != 0 {
			t.Errorf("with times %v: the oldest has waited %s, later %s, and was sent %s ago", stamped, first, second, most)
		}
		batch := make([]udp.Descriptor, 4)
		n := l.Queues[0].Receive(batch)
		if age, waiting := oldest(); n != 1 || age != 0 || waiting != 0 {
			t.Errorf("%d were read, and the oldest of %d has waited %s", n, waiting, age)
		}
		l.Queues[0].Release(batch[:n])
		must(t, l.Close())
	}
}
