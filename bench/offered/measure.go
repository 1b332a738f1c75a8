package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/shunt-lb/shunt/bench/cpus"
)

const (
	// stillFor is the number of looks, one a millisecond, during which nothing must come before a run counts as over.
	stillFor = 5
	// drainMax bounds the wait for that. Nothing but the measurement uses the link.
	drainMax = 10 * time.Second
)

// result is one arm at one load.
type result struct {
	Offered, Forwarded float64 // frames a second
	Sent, Returned     uint64  // frames
	Full               uint64  // frames for which the node's ring had no room
	Late               uint64  // frames that the node forwarded, and for which the wire's ring had no room
	Node, Wire         float64 // shares of a CPU
}

// lost is the share of frames that did not come back.
func (r result) lost() float64 { return 1 - float64(r.Returned)/float64(r.Sent) }

// unknown is the number of frames that no counter knows, more or less.
func (r result) unknown() float64 {
	return math.Abs(float64(r.Sent) - float64(r.Returned) - float64(r.Full) - float64(r.Late))
}

// each is the node's CPU time of a forwarded frame, in nanoseconds.
func (r result) each() float64 { return r.Node * 1e9 / r.Forwarded }

// state is the sum of all that happened on a bed.
type state struct {
	taken, full, late uint64
	node, wire        time.Duration
}

func (b *bed) state() (s state, err error) {
	var errs [4]error
	s.taken, _, errs[0] = b.sink.Counts()
	s.node, errs[1] = b.napi.node.ran()
	s.wire, errs[2] = b.napi.wire.ran()
	s.full, s.late, errs[3] = b.dropped()
	return s, errors.Join(errs[:]...)
}

// dropped are the frames for which the ring of an end had no room: the node's, and the wire's.
func (b *bed) dropped() (atNode, atWire uint64, err error) {
	link, err := b.node.Netlink().LinkByName(iface)
	if err != nil {
		return 0, 0, fmt.Errorf("read the counters of %s: %w", iface, err)
	}
	return link.Attrs().Statistics.RxDropped, link.Attrs().Statistics.TxDropped, nil
}

// settled waits until no frame is on its way, and returns the state then.
func (b *bed) settled(ctx context.Context) (last state, err error) {
	same := 0
	for begin := time.Now(); same < stillFor; time.Sleep(time.Millisecond) {
		now, err := b.state()
		if err != nil {
			return now, err
		}
		same++
		if now.taken != last.taken || now.node != last.node {
			same = 0
		}
		last = now
		if err := ctx.Err(); err != nil {
			return last, err
		}
		if time.Since(begin) > drainMax {
			return last, fmt.Errorf("%s: frames still come back %s after the last one was sent", b.arm.name, drainMax)
		}
	}
	return last, nil
}

// measure offers a load for a time, after a warm-up.
func (b *bed) measure(ctx context.Context, cpu int, perSecond float64, warm, each time.Duration) (r result, err error) {
	send := func(each time.Duration) (sent uint64, err error) {
		err = b.wire.Run(func() error {
			return cpus.On(cpu, func() error {
				return cpus.Ahead(func() (err error) { sent, err = b.paced.Pace(perSecond, each); return err })
			})
		})
		return sent, err
	}
	if _, err := send(warm); err != nil {
		return r, err
	}
	before, err := b.settled(ctx)
	if err != nil {
		return r, err
	}
	if r.Sent, err = send(each); err != nil {
		return r, err
	}
	after, err := b.settled(ctx)
	if err != nil {
		return r, err
	}
	r.Returned, r.Full, r.Late = after.taken-before.taken, after.full-before.full, after.late-before.late
	seconds := each.Seconds()
	r.Offered, r.Forwarded = float64(r.Sent)/seconds, float64(r.Returned)/seconds
	r.Node, r.Wire = (after.node-before.node).Seconds()/seconds, (after.wire-before.wire).Seconds()/seconds
	if r.Returned == 0 {
		return r, fmt.Errorf("%s: none of %d frames came back", b.arm.name, r.Sent)
	}
	return r, nil
}
